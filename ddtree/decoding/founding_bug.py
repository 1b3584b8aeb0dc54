"""The founding bug, put back on purpose: metadata whose width comes from configuration.

A target that rewrites the metadata on its way into the model, by the engine's own formulas: one number
n from configuration stands where the call's q_len belongs. With budget + 1 == n nothing changes.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.decoding.batch import DecodingTarget
from ddtree.invariants.claimed import index
from ddtree.spec.contracts import Acceptance, Commit, DraftTree, FlatMask, VerifyLayout
from ddtree.spec.errors import require

FIELDS = ("qo_indptr", "mask_indptr", "max_q_len")


class FoundingBug:
    """A target that verifies with the configured width instead of the call's.

    Eager calls get a rewritten layout. Fixed buffers are rewritten in place after they were filled,
    as the engine's replay code did, and set right again after the pass, since acceptance and commit
    took their widths from the call in the engine too. Wrap a target with the reference attention,
    which reads its widths where a kernel does.
    """

    def __init__(
        self, target: DecodingTarget, width: int = 8, fields: Collection[str] = FIELDS
    ) -> None:
        """Wrap ``target``.

        Args:
            target: runs the pass.
            width: the configured number of draft tokens, at least 1.
            fields: which of ``FIELDS`` to make from it.
        """
        unknown = sorted(set(fields) - set(FIELDS))
        require(not unknown, f"fields {unknown} are not among {', '.join(FIELDS)}")
        require(width >= 1, f"width must be at least 1, got {width}")
        self.target = target
        self.width = width
        self.fields = frozenset(fields)
        self.vocab_size = target.vocab_size
        self.max_context = target.max_context

    @property
    def slot_table(self) -> Int64[Tensor, "B max_context"]:
        """The target's."""
        return self.target.slot_table

    @property
    def prefix_len(self) -> int:
        """The target's."""
        return self.target.prefix_len

    def forward(
        self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask
    ) -> Float[Tensor, "T vocab"]:
        """Run the target's pass on the rewritten layout."""
        with self._rewritten(layout) as wrong:
            return self.target.forward(tree, wrong, mask)

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """The target's."""
        return self.target.commit(layout, acceptance)

    def reset(self, feature_layer_ids: tuple[int, ...] = ()) -> None:
        """The target's."""
        self.target.reset(feature_layer_ids)

    def prefill(self, token_ids: Int64[Tensor, " n"]) -> Float[Tensor, " vocab"]:
        """The target's: a prefill has no tree."""
        return self.target.prefill(token_ids)

    def rewind(self, prefix_len: int) -> None:
        """The target's."""
        self.target.rewind(prefix_len)

    def features(self) -> Float[Tensor, "new width"] | None:
        """The target's."""
        return self.target.features()

    @contextmanager
    def _rewritten(self, layout: VerifyLayout) -> Iterator[VerifyLayout]:
        wrong = configured_width(layout, self.width, self.fields)
        if not layout.is_captured:
            yield wrong
            return
        names = sorted(self.fields - {"max_q_len"})
        right = {name: getattr(layout, name).clone() for name in names}
        for name in names:
            getattr(layout, name).copy_(getattr(wrong, name))
        try:
            yield replace(layout, max_q_len=wrong.max_q_len)
        finally:
            for name, content in right.items():
                getattr(layout, name).copy_(content)


def configured_width(
    layout: VerifyLayout, width: int, fields: Collection[str] = FIELDS
) -> VerifyLayout:
    """The layout with ``fields`` as the engine computed them; unused requests of buffers stay empty."""
    used = (layout.qo_indptr.diff() > 0).long()
    prefix_lens = layout.kv_indptr.diff().long()
    wrong: dict[str, Any] = {
        "qo_indptr": _indptr(used * width, layout.qo_indptr),
        "mask_indptr": _indptr(used * index.mask_len(prefix_lens, width), layout.mask_indptr),
        "max_q_len": width,
    }
    return replace(layout, **{name: wrong[name] for name in fields})


def _indptr(lengths: Tensor, like: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(like.dtype)

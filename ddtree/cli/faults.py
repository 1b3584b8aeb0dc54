"""Faults put into a verify call on purpose, to be seen and to be caught.

Each takes the call's own tree, layout and mask and returns them broken in one way, as a real engine
broke them. None of them looks at how the checker works.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ddtree.decoding.founding_bug import FIELDS, configured_width
from ddtree.spec.contracts import DraftTree, FlatMask, VerifyLayout
from ddtree.spec.errors import InputError, require

Broken = tuple[VerifyLayout, FlatMask]


@dataclass(frozen=True)
class Fault:
    """One fault: a field or a habit, and the value it wrongly takes."""

    name: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Read ``NAME=VALUE``.

        Raises:
            InputError: no such fault, or a width that is not a whole number from 1 on.
        """
        name, _, value = text.partition("=")
        if name in WIDTH_FIELDS:
            if not value.isdecimal() or int(value) < 1:
                raise InputError(f"fault {text!r}: {name} needs a width from 1 on, as {name}=8")
        elif text not in HABITS:
            known = [f"{field}=N" for field in WIDTH_FIELDS] + list(HABITS)
            raise InputError(f"fault {text!r} is unknown; there are: {', '.join(known)}")
        return cls(name, value)

    def apply(self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Broken:
        """The layout and the mask of the call, broken; the call's own tensors stay as they are.

        Raises:
            InputError: nothing is broken by it: the call is such that the fault does not show.
        """
        if self.name in WIDTH_FIELDS:
            q_lens = layout.qo_indptr.diff().tolist()
            require(
                any(q_len != int(self.value) for q_len in q_lens),
                f"fault '{self.name}={self.value}' changes nothing: this call's q_len is "
                f"{self.value} itself; take another width, or another --budget (q_len is budget + 1)",
            )
            return configured_width(layout, int(self.value), WIDTH_FIELDS[self.name]), mask
        return HABITS[f"{self.name}={self.value}"](tree, layout, mask)


WIDTH_FIELDS = {"width": FIELDS, **{name: (name,) for name in FIELDS}}
"""Fields that the founding bug filled from a configured width, together and alone."""


def _inverted_mask(_tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Broken:
    """The other convention: True = may not attend."""
    return layout, FlatMask(~mask.allowed)


def _padding_visible(tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Broken:
    """Real rows see the padding columns."""
    num_nodes, q_lens = tree.num_nodes.tolist(), layout.qo_indptr.diff().tolist()
    require(
        num_nodes != q_lens,
        f"fault 'padding=visible' changes nothing: no row is padding (num_nodes {num_nodes}, q_len "
        f"{q_lens}); use --topk 1, whose tree is a chain that cannot use up a --budget above its depth",
    )
    allowed = mask.allowed.clone()
    for b, (nodes, q_len) in enumerate(zip(num_nodes, q_lens, strict=True)):
        start, end = layout.mask_indptr[b : b + 2].tolist()
        segment = allowed[start:end].view(q_len, -1)
        segment[:nodes, segment.shape[1] - (q_len - nodes) :] = True
    return layout, FlatMask(allowed)


def _positions_by_row(tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Broken:
    """Positions by row instead of by depth, as in a chain."""
    depths = [tree.depths[b, :nodes].tolist() for b, nodes in enumerate(tree.num_nodes.tolist())]
    require(
        any(request != list(range(len(request))) for request in depths),
        "fault 'positions=row' changes nothing: the tree is a chain, where row and depth are the same; "
        "use --topk 4 and a --budget from 2 on, so that the tree branches",
    )
    prefix_lens = layout.kv_indptr.diff().tolist()
    q_lens = layout.qo_indptr.diff().tolist()
    rows = [torch.arange(p, p + q) for p, q in zip(prefix_lens, q_lens, strict=True)]
    return replace(layout, positions=torch.cat(rows)), mask


HABITS: dict[str, Callable[[DraftTree, VerifyLayout, FlatMask], Broken]] = {
    "mask=inverted": _inverted_mask,
    "padding=visible": _padding_visible,
    "positions=row": _positions_by_row,
}

"""Faults put into a verify call on purpose, to be seen and to be caught.

Each takes the call's own tree, layout and mask and returns them broken in one way, as a real engine
broke them. None of them looks at how the checker works.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ddtree.decoding.founding_bug import FIELDS, configured_width
from ddtree.spec.contracts import DraftTree, FlatMask, VerifyLayout
from ddtree.spec.errors import InputError

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
        """The layout and the mask of the call, broken; the call's own tensors stay as they are."""
        if self.name in WIDTH_FIELDS:
            return configured_width(layout, int(self.value), WIDTH_FIELDS[self.name]), mask
        return HABITS[f"{self.name}={self.value}"](tree, layout, mask)


WIDTH_FIELDS = {"width": FIELDS, **{name: (name,) for name in FIELDS}}
"""Fields that the founding bug filled from a configured width, together and alone."""


def _inverted_mask(_tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Broken:
    """The other convention: True = may not attend."""
    return layout, FlatMask(~mask.allowed)


def _padding_visible(tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Broken:
    """Real rows see the padding columns."""
    allowed = mask.allowed.clone()
    for b, q_len in enumerate(layout.qo_indptr.diff().tolist()):
        num_nodes, start = int(tree.num_nodes[b]), int(layout.mask_indptr[b])
        if num_nodes == q_len:
            continue
        segment = allowed[start : int(layout.mask_indptr[b + 1])].view(q_len, -1)
        segment[:num_nodes, segment.shape[1] - (q_len - num_nodes) :] = True
    return layout, FlatMask(allowed)


def _positions_by_row(_tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Broken:
    """Positions by row instead of by depth, as in a chain."""
    prefix_lens = layout.kv_indptr.diff().tolist()
    q_lens = layout.qo_indptr.diff().tolist()
    rows = [torch.arange(p, p + q) for p, q in zip(prefix_lens, q_lens, strict=True)]
    return replace(layout, positions=torch.cat(rows)), mask


HABITS: dict[str, Callable[[DraftTree, VerifyLayout, FlatMask], Broken]] = {
    "mask=inverted": _inverted_mask,
    "padding=visible": _padding_visible,
    "positions=row": _positions_by_row,
}

"""Faults put into a verify call on purpose, to be seen and to be caught.

Each takes the call's own tree, layout and mask and returns them broken in one way, as a real engine
broke them. None of them looks at how the checker works.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddtree.spec.contracts import DraftTree, FlatMask, VerifyLayout
from ddtree.spec.errors import InputError
from ddtree.spec.index import mask_len

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


WIDTH_FIELDS = {
    "width": ("qo_indptr", "mask_indptr", "max_q_len"),
    "qo_indptr": ("qo_indptr",),
    "mask_indptr": ("mask_indptr",),
    "max_q_len": ("max_q_len",),
}
"""Fields that the founding bug filled from a configured width, together and alone."""


def configured_width(layout: VerifyLayout, width: int, fields: tuple[str, ...]) -> VerifyLayout:
    """The founding bug: ``fields`` computed for ``width`` query rows, whatever the call has."""
    has_rows = layout.qo_indptr.diff() > 0  # a captured layout may hold unused requests
    widths = has_rows.long() * width
    prefix_lens = layout.kv_indptr.diff().long()
    wrong = {
        "qo_indptr": _indptr(widths, layout.qo_indptr),
        "mask_indptr": _indptr(mask_len(prefix_lens, widths), layout.mask_indptr),
        "max_q_len": width,
    }
    return replace(layout, **{field: wrong[field] for field in fields})  # type: ignore[arg-type]


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


def _indptr(lengths: Tensor, like: Tensor) -> Tensor:
    ends = torch.zeros_like(like)
    ends[1:] = lengths.cumsum(0)
    return ends

"""What a picture shows: one request of a verify pass, as plain rows and one matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ddtree.spec.contracts import Acceptance, DraftTree, FlatMask, VerifyLayout


class Cell(IntEnum):
    """What one (row, column) of the mask means; the last two need a tree to judge by."""

    HIDDEN = 0
    PREFIX = 1
    TREE = 2
    WRONGLY_SEEN = 3
    WRONGLY_HIDDEN = 4


@dataclass(frozen=True)
class TreeView:
    """One request, in the words of the contracts. ``parents`` is empty when no tree is known."""

    request: int
    prefix_len: int
    q_len: int
    num_nodes: int | None
    """None when no tree is known."""
    token_ids: tuple[int, ...]
    """Empty when they are not known."""
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    accepted: tuple[int, ...]
    labels: tuple[str, ...]
    allowed: NDArray[np.bool_] | None
    """[q_len, prefix_len + q_len] as the layout says; None when it runs past the mask's end."""
    weighed: tuple[int, int] | None = None
    """``prefix_len`` and ``q_len`` as the whole call has them, where ``ddtree check`` has weighed its fields;
    those above are what the layout claims."""

    @property
    def widths(self) -> tuple[str, str]:
        """``prefix_len`` and ``q_len`` in words, both numbers where the call has another than is claimed."""
        claimed = (self.prefix_len, self.q_len)
        named = zip(("prefix_len", "q_len"), claimed, self.weighed or claimed, strict=True)
        prefix_len, q_len = (
            f"{name} {said}" + ("" if said == has else f" claimed, {has} by the call")
            for name, said, has in named
        )
        return prefix_len, q_len

    @property
    def padding(self) -> range:
        """Rows that are padding, as far as that is known."""
        return range(self.q_len if self.num_nodes is None else self.num_nodes, self.q_len)

    @property
    def lost(self) -> range:
        """Nodes without a query row (only in a broken call)."""
        return range(self.q_len, max(self.q_len, self.num_nodes or 0))

    def label(self, row: int) -> str:
        """The node's token as text, or nothing when it is not known."""
        return (self.labels[row] or "''") if row < len(self.labels) else ""

    def score(self, row: int, digits: int) -> str:
        """The node's score in so many digits, never as -0.0; nothing when it is not known."""
        if row >= len(self.scores) or not isfinite(self.scores[row]):
            return ""
        return f"{round(self.scores[row], digits) + 0.0:.{digits}f}"

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node by its parents; a node without a good parent stands at depth 0."""
        depths: list[int] = []
        for row in range(len(self.parents)):
            parent = self.parent(row)
            depths.append(0 if parent is None else depths[parent] + 1)
        return tuple(depths)

    def parent(self, row: int) -> int | None:
        """Row of the parent, None for the root and for a parent that is no earlier row."""
        parent = self.parents[row]
        return parent if 0 <= parent < row else None

    def children(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each node's children, in best-first order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for row in range(len(self.parents)):
            parent = self.parent(row)
            if parent is not None:
                children[parent].append(row)
        return tuple(tuple(rows) for rows in children)

    def roots(self) -> tuple[int, ...]:
        """Node 0, and every node whose parent is no earlier row (only in a broken tree)."""
        return tuple(row for row in range(len(self.parents)) if self.parent(row) is None)

    def heights(self) -> list[float]:
        """Line of each node, counted from the top: leaves in order, a parent beside its first child."""
        children = self.children()
        heights = [0.0] * len(self.parents)
        next_line = 0
        stack = list(reversed(self.roots()))
        while stack:
            row = stack.pop()
            heights[row] = next_line
            if not children[row]:
                next_line += 1
            stack.extend(reversed(children[row]))
        return heights

    def cells(self) -> NDArray[np.int8] | None:
        """The mask as ``Cell`` codes [q_len, prefix_len + q_len]; real rows judged by the tree."""
        if self.allowed is None:
            return None
        is_tree = np.arange(self.allowed.shape[1]) >= self.prefix_len
        codes = np.where(self.allowed, np.where(is_tree, Cell.TREE, Cell.PREFIX), Cell.HIDDEN)
        rows = min(len(self.parents), self.q_len)
        wanted = self._ancestor_or_self(rows)
        codes[:rows][self.allowed[:rows] & ~wanted] = Cell.WRONGLY_SEEN
        codes[:rows][~self.allowed[:rows] & wanted] = Cell.WRONGLY_HIDDEN
        return codes.astype(np.int8)

    def _ancestor_or_self(self, rows: int) -> NDArray[np.bool_]:
        wanted = np.zeros((rows, self.prefix_len + self.q_len), dtype=np.bool_)
        for row in range(rows):
            parent = self.parent(row)
            if parent is not None:
                wanted[row] = wanted[parent]
            wanted[row, : self.prefix_len] = True
            wanted[row, self.prefix_len + row] = True
        return wanted


def view_of(
    layout: VerifyLayout,
    mask: FlatMask,
    tree: DraftTree | None = None,
    acceptance: Acceptance | None = None,
    request: int = 0,
    token_text: Callable[[int], str] | None = None,
    *,
    has_tokens: bool = True,
) -> TreeView:
    """Gather the picture of one request, reading every width from ``layout`` as an engine would.

    ``has_tokens`` False: the tree's token ids are not known, whatever stands there.

    Raises:
        IndexError: the call has no such request.
    """
    qo, kv = layout.qo_indptr.tolist(), layout.kv_indptr.tolist()
    if not 0 <= request < len(qo) - 1:
        raise IndexError(f"request {request} of a call with {len(qo) - 1} requests")
    q_len, prefix_len = qo[request + 1] - qo[request], kv[request + 1] - kv[request]
    num_nodes = int(tree.num_nodes[request]) if tree is not None else None
    token_ids = _rows(tree.token_ids, request, num_nodes) if tree is not None and has_tokens else []
    text = token_text or str
    return TreeView(
        request=request,
        prefix_len=prefix_len,
        q_len=q_len,
        num_nodes=num_nodes,
        token_ids=tuple(token_ids),
        parents=tuple(_rows(tree.parents, request, num_nodes)) if tree is not None else (),
        scores=tuple(_rows(tree.scores, request, num_nodes)) if tree is not None else (),
        accepted=_path(acceptance, request),
        labels=tuple(shown(text(token)) for token in token_ids),
        allowed=_segment(layout, mask, request, q_len, prefix_len),
    )


def shown(text: str, width: int = 12) -> str:
    """Token text on one line: spaces and line ends visible, long text cut."""
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    text = "".join(char if char.isprintable() else "�" for char in text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _rows(rows: Tensor, request: int, num_nodes: int | None) -> list[int]:
    found: list[int] = rows[request, :num_nodes].tolist()
    return found


def _path(acceptance: Acceptance | None, request: int) -> tuple[int, ...]:
    if acceptance is None:
        return ()
    nodes: Sequence[int] = acceptance.nodes[request].tolist()
    return tuple(nodes[: int(acceptance.num_accepted[request])])


def _segment(
    layout: VerifyLayout, mask: FlatMask, request: int, q_len: int, prefix_len: int
) -> NDArray[np.bool_] | None:
    """The rows from ``mask_indptr`` on: broken widths show what a kernel would see."""
    width = prefix_len + q_len
    start = int(layout.mask_indptr[request])
    segment = mask.allowed[start : start + q_len * width] if start >= 0 else mask.allowed[:0]
    if q_len < 0 or prefix_len < 0 or segment.numel() != q_len * width:
        return None
    matrix: NDArray[np.bool_] = segment.reshape(q_len, width).cpu().numpy()
    return matrix

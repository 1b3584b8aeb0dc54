"""The factors that isolation crosses, and the verify pass of each combination."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from random import Random
from typing import Literal

import torch

from ddtree.invariants.conformance import oracle
from ddtree.invariants.conformance.attend import AttentionCase, Execution
from ddtree.invariants.conformance.calls import parents, slot_table, tree_of
from ddtree.invariants.strategies import VerifyCall
from ddtree.spec.layout import plan_verify

Number = Literal["q_len", "prefix_len"]
Earlier = Literal["none", "smaller", "larger"]


@dataclass(frozen=True)
class Cell:
    """One combination of factors: one call of a backend."""

    q_len: int = 9
    prefix_len: int = 5
    """Of the first request; others have 3 more each."""
    branching: bool = False
    padding: bool = False
    execution: Execution = "eager"
    earlier: Earlier = "none"
    """What was captured before the call that is replayed; ``none`` elsewhere."""
    batch: int = 1
    page_size: int = 1

    def __str__(self) -> str:
        """``q_len 9, prefix_len 5, branching False, ...``."""
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))


Q_LENS = (2, 4, 7, 8, 9, 15, 16, 17, 32, 33, 48, 64, 65)
"""Block size 8 and its neighbours, numbers beside words and tiles, and some that are none of these."""
PREFIX_LENS = (0, 1, 5, 16, 17, 40)
PATHS: tuple[tuple[Execution, Earlier], ...] = (
    ("eager", "none"),
    ("buffers", "none"),
    ("replay", "smaller"),
    ("replay", "larger"),
)
SWEPT: dict[Number, tuple[int, ...]] = {
    "q_len": tuple(range(2, 67)),
    "prefix_len": (*range(20), 24, 31, 32, 33, 40, 63, 64, 65),
}
"""All values of a number that are tried in one failing combination, to find where it turns."""


def grid(seed: int = 0) -> list[Cell]:
    """All combinations, shuffled, so that any first part of them is a fair sample."""
    cells = [
        Cell(q_len, prefix, branching, padding, *path, batch, page_size)
        for q_len, prefix, branching, padding, path, batch, page_size in product(
            Q_LENS, PREFIX_LENS, (False, True), (False, True), PATHS, (1, 3), (1, 4)
        )
    ]
    cells = [cell for cell in cells if can_be(cell)]
    Random(seed).shuffle(cells)  # noqa: S311 # no secret
    return cells


def can_be(cell: Cell) -> bool:
    """Whether there is such a tree: a root and two children at least, if it branches."""
    return not cell.branching or num_nodes(cell) >= 3


def sweep(cell: Cell, factor: Number) -> Iterator[Cell]:
    """The cell with every value of one number."""
    yield from filter(can_be, (at(cell, factor, value) for value in SWEPT[factor]))


def plain_sweeps() -> Iterator[Cell]:
    """Every value of each number in one call of each path."""
    for factor, (execution, earlier) in product(SWEPT, PATHS):
        yield from sweep(Cell(branching=True, execution=execution, earlier=earlier), factor)


def at(cell: Cell, factor: Number, value: int) -> Cell:
    """The cell with another value of one number."""
    return replace(cell, q_len=value) if factor == "q_len" else replace(cell, prefix_len=value)


def num_nodes(cell: Cell) -> int:
    """Real nodes of each request."""
    return max(cell.q_len - max(cell.q_len // 3, 1), 1) if cell.padding else cell.q_len


def captured_q_len(cell: Cell) -> int:
    """Width of the call that was captured before the cell's own is replayed; 0: none was."""
    return {"none": 0, "smaller": max(cell.q_len // 2, 2), "larger": cell.q_len + 9}[cell.earlier]


def case_of(cell: Cell, dtype: torch.dtype) -> AttentionCase:
    """The verify pass of a cell, with heads for the oracle's codes."""
    call = _call(cell)
    earlier = None
    if cell.execution == "replay":
        prefix, batch = (
            (cell.prefix_len // 2 or 2, 1)
            if cell.earlier == "smaller"
            else (cell.prefix_len + 6, cell.batch + 1)
        )
        other = replace(cell, q_len=captured_q_len(cell), prefix_len=prefix, batch=batch)
        earlier = _call(replace(other, branching=cell.branching and num_nodes(other) >= 3))
    case = AttentionCase(call, cell.execution, earlier, dtype=dtype, q_heads=1)
    most = max(oracle.entries(c) for c in (call, earlier) if c is not None)
    while most > oracle.capacity(case):
        case = replace(case, kv_heads=case.kv_heads * 2, q_heads=case.q_heads * 2)
    return case


def _call(cell: Cell) -> VerifyCall:
    """The same tree for all requests, pages shuffled."""
    shape = "binary" if cell.branching else "chain"
    tree = tree_of([parents(shape, num_nodes(cell))] * cell.batch, cell.q_len)
    prefixes = [cell.prefix_len + 3 * b for b in range(cell.batch)]
    prefix_lens = torch.tensor(prefixes, dtype=torch.int32)
    slots = slot_table(cell.page_size, cell.batch, max(prefixes) + cell.q_len, seed=1)
    return VerifyCall(tree, prefix_lens, slots, None, plan_verify(tree, prefix_lens, slots.table))

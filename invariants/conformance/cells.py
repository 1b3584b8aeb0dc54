"""The factors that isolation crosses, and the verify pass of each combination."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from random import Random
from typing import Literal, get_args

import torch

from ddtree.invariants.conformance import oracle
from ddtree.invariants.conformance.attend import SPARE, AttentionCase, Execution
from ddtree.invariants.conformance.calls import parents, slot_table, tree_of
from ddtree.invariants.strategies import VerifyCall
from ddtree.spec.layout import plan_verify

Number = Literal["q_len", "prefix_len"]
Earlier = Literal["none", "smaller", "larger"]
Prefixes = Literal[
    "equal", "rising", "falling", "first none", "second none", "first only", "last only"
]
Widths = Literal["equal", "rising", "falling"]


@dataclass(frozen=True)
class Cell:
    """One combination of factors: one call of a backend."""

    q_len: int = 9
    """Of the widest request."""
    prefix_len: int = 5
    """Of the request with the shortest, those apart that ``prefixes`` leaves without."""
    branching: bool = False
    padding: bool = False
    execution: Execution = "eager"
    earlier: Earlier = "none"
    """What was captured before the call that is replayed; ``none`` elsewhere."""
    batch: int = 1
    page_size: int = 1
    prefixes: Prefixes = "rising"
    """How prefix lengths follow each other: alike, 3 more or 3 fewer each, or some requests without."""
    widths: Widths = "equal"
    """How widths follow each other; a narrower one is the next below in ``Q_LENS``."""

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
WIDTHS: tuple[Widths, ...] = ("equal", "equal", "rising", "falling")
"""Half of all batches are of one width."""
COMBINATIONS = 10_000
"""Combinations in a grid."""


def grid(seed: int = 0) -> Iterator[Cell]:
    """Combinations drawn at random, each once: any first part of them is a fair sample.

    Each factor is drawn by itself, so none goes with another: a batch of 1 is as common as one of 3, and at
    each place of a batch every width and prefix length is met.
    """
    random = Random(seed)  # noqa: S311 # no secret
    drawn: set[Cell] = set()
    while len(drawn) < COMBINATIONS:
        q_len, prefix_len = random.choice(Q_LENS), random.choice(PREFIX_LENS)
        branching, padding = random.choice((False, True)), random.choice((False, True))
        path, batch, page_size = (
            random.choice(PATHS),
            random.choice((1, 2, 3)),
            random.choice((1, 4)),
        )
        cell = Cell(q_len, prefix_len, branching, padding, *path, batch, page_size)
        if batch > 1:
            prefixes = random.choice(get_args(Prefixes))
            widths = random.choice(WIDTHS)
            cell = replace(cell, prefixes=prefixes, widths=widths)
        if cell not in drawn and can_be(cell):
            drawn.add(cell)
            yield cell


def can_be(cell: Cell) -> bool:
    """Whether there are such trees: narrower ones too, and two children each if they branch."""
    if cell.widths != "equal" and len({q for q in Q_LENS if q < cell.q_len}) < cell.batch - 1:
        return False
    return not cell.branching or min(num_nodes(cell)) >= 3


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


def q_lens(cell: Cell) -> tuple[int, ...]:
    """Rows of each request."""
    if cell.widths == "equal":
        return (cell.q_len,) * cell.batch
    narrower = sorted(q for q in Q_LENS if q < cell.q_len)
    rising = (*narrower[len(narrower) - cell.batch + 1 :], cell.q_len)
    return rising if cell.widths == "rising" else rising[::-1]


def num_nodes(cell: Cell) -> tuple[int, ...]:
    """Real nodes of each request."""
    return tuple(max(q - max(q // 3, 1), 1) if cell.padding else q for q in q_lens(cell))


def prefix_lens(cell: Cell) -> tuple[int, ...]:
    """Prefix length of each request."""
    own, batch = cell.prefix_len, cell.batch
    match cell.prefixes:
        case "rising":
            return tuple(own + 3 * b for b in range(batch))
        case "falling":
            return tuple(own + 3 * b for b in reversed(range(batch)))
        case "first none":
            return (0, *(own,) * (batch - 1))
        case "second none":
            return (own, 0, *(own,) * (batch - 2))[:batch]
        case "first only":
            return (own, *(0,) * (batch - 1))
        case "last only":
            return (*(0,) * (batch - 1), own)
    return (own,) * batch


def captured_q_len(cell: Cell) -> int:
    """Width of the call that was captured before the cell's own is replayed; 0: none was."""
    return {"none": 0, "smaller": max(cell.q_len // 2, 2), "larger": cell.q_len + 9}[cell.earlier]


def case_of(cell: Cell, dtype: torch.dtype) -> AttentionCase:
    """The verify pass of a cell, with heads for the oracle's codes."""
    call = _call(cell)
    earlier = None
    if cell.execution == "replay":
        # no request has the prefix that the captured call had at its place, not even none
        fewest = 1 if all(prefix_lens(cell)[1:]) else cell.batch
        prefix, batch = (
            (cell.prefix_len // 2 or 2, fewest)
            if cell.earlier == "smaller"
            else (cell.prefix_len + 7, cell.batch + 1)
        )
        other = replace(cell, q_len=captured_q_len(cell), prefix_len=prefix, batch=batch)
        other = replace(other, prefixes="rising", widths="equal")
        earlier = _call(replace(other, branching=cell.branching and min(num_nodes(other)) >= 3))
    case = AttentionCase(call, cell.execution, earlier, dtype=dtype, q_heads=1)
    most = max(oracle.entries(c) for c in (call, earlier) if c is not None)
    while most > oracle.capacity(case):
        case = replace(case, kv_heads=case.kv_heads * 2, q_heads=case.q_heads * 2)
    return case


def max_q_len(cell: Cell) -> int:
    """What the layout of the call has as ``max_q_len``: in fixed buffers, room for the widest call."""
    widest = max(cell.q_len, captured_q_len(cell))
    return widest if cell.execution == "eager" else widest + SPARE


def _call(cell: Cell) -> VerifyCall:
    """Trees of one shape for all requests, pages shuffled."""
    shape = "binary" if cell.branching else "chain"
    tree = tree_of([parents(shape, count) for count in num_nodes(cell)], cell.q_len)
    lens = torch.tensor(prefix_lens(cell), dtype=torch.int32)
    context = int(lens.max()) + cell.q_len
    slots = slot_table(cell.page_size, cell.batch, context, seed=1)
    widths = None if cell.widths == "equal" else torch.tensor(q_lens(cell), dtype=torch.int32)
    layout = plan_verify(tree, lens, slots.table, widths)
    return VerifyCall(tree, lens, slots, widths, layout)

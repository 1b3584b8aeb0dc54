"""What a mutant is, and the ways to make one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ddtree.invariants import Call
from ddtree.invariants.sizes import INDPTRS, PER_REQUEST, TABLES
from ddtree.spec import DraftTree, VerifyBuffers
from tests.invariants.calls import captured, indptr, put, whole_round


class Mutant(NamedTuple):
    """A change that breaks one invariant, and the numbers it must give."""

    invariant: str
    what: str
    call: Callable[[], Call]
    request: int | None = None
    expected: Any = None
    found: Any = None
    hint: str = ""
    """Part of the hint; empty: the checker must be silent about the cause."""


def spoil(name: str, at: Any, value: Any) -> Callable[[], Call]:
    """The whole round with one entry changed."""
    return lambda: put(whole_round(), name, at, value)


def swap(**fields: Any) -> Callable[[], Call]:
    """The whole round with fields replaced."""
    return lambda: replace(whole_round(), **fields)


def change(edit: Callable[[Call], dict[str, Any]]) -> Callable[[], Call]:
    """The whole round with fields replaced by functions of it."""

    def made() -> Call:
        call = whole_round()
        return replace(call, **edit(call))

    return made


def buffered(
    edit: Callable[[VerifyBuffers], object], prefixes: tuple[int, ...] = (5, 3)
) -> Callable[[], Call]:
    """Filled buffers, corrupted afterwards."""

    def made() -> Call:
        tree, buffers = captured(prefixes)
        edit(buffers)
        return Call.of(tree, buffers)

    return made


def short_mask(
    prefixes: list[int], q_len: int, entries: int, *, capture: bool, rows: int | None = None
) -> Call:
    """Metadata alone, with a mask buffer of ``entries``: each row sees its prefix and itself."""
    lens = [q_len * (p + q_len) for p in prefixes]
    batch = len(prefixes)
    rows_of = [torch.cat([torch.ones(q_len, p), torch.eye(q_len)], dim=1) for p in prefixes]
    mask = torch.cat([seen.flatten() for seen in rows_of]).bool()
    return Call(
        qo_indptr=indptr([q_len] * batch),
        kv_indptr=indptr(prefixes),
        mask_indptr=indptr(lens),
        custom_mask=mask[:entries],
        positions=torch.repeat_interleave(torch.tensor(prefixes), q_len)
        if rows is None
        else torch.zeros(rows, dtype=torch.int64),
        is_captured=capture,
    )


def tied() -> Call:
    """Two siblings of one score, the larger token first."""
    tree = DraftTree(
        torch.tensor([[1, 5, 4]]),
        torch.tensor([[-1, 0, 0]], dtype=torch.int32),
        torch.tensor([[0, 1, 1]], dtype=torch.int32),
        torch.tensor([[0.0, -1.0, -1.0]], dtype=torch.float64),
        torch.tensor([3], dtype=torch.int32),
    )
    return Call.of(tree)


def with_unused(call: Call, at: int) -> Call:
    """The call in fixed buffers, with a request that is not in use before request ``at``."""
    wider: dict[str, Any] = {"is_captured": True}
    for name, value in call.known().items():
        if name in INDPTRS:
            wider[name] = torch.cat([value[: at + 1], value[at:]])
        elif name in {*PER_REQUEST, *TABLES}:
            row = torch.full_like(value[:1], -1 if name in {"parents", "prefix_lens"} else 0)
            if name == "num_nodes":
                row[:] = 1  # the root of a tree that nobody verifies
            if name == "scores":
                row[:, 1:] = -torch.inf
            wider[name] = torch.cat([value[:at], row, value[at:]])
    return replace(call, **wider)

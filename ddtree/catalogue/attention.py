"""Rows about which keys a row attends to, where the fault lies in the kernel's loop and not in the call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.catalogue.calls import causal, indptr, lay_out, tree_of
from ddtree.catalogue.entry import CallFault, Measured, Names, Property, PropertyFault, Right, Row
from ddtree.spec.attention import verify_attention
from ddtree.spec.contracts import FlatMask, PrefixLen, QLen, VerifyLayout
from ddtree.spec.index import kv_len, mask_len, position, window_start

TILE = 64


@dataclass(frozen=True)
class AttentionCase:
    """One call of the attention, without its numbers: those are drawn from a seed."""

    layout: VerifyLayout
    mask: FlatMask
    window: int | None = None


def loop_attention(
    case: AttentionCase,
    query: Tensor,
    kv: Tensor,
    pool: Tensor,
    *,
    causal_stop: bool = False,
    stop_by_call_row: bool = False,
    skip_by_first_row: bool = False,
    window_by: str = "position",
    spare: int = 0,
) -> Tensor:
    """A kernel's loop in plain Python: for each request and tile of rows, tiles of keys, then a softmax.

    Args:
        case: the call.
        query: ``[T, dim]``.
        kv: ``[T, dim]`` keys of the tree, and its values.
        pool: ``[slots, dim]`` keys of the prefixes, and their values.
        causal_stop: leave the keys behind the row tile's last row unread (SGLang 39593).
        stop_by_call_row: the same with rows counted over the whole call.
        skip_by_first_row: leave a key tile unread if the row tile's first row sees nothing of it.
        window_by: ``position``, ``row``, or ``root``: what a window counts back from.
        spare: entries that a window keeps besides its own.
    """
    output = torch.zeros_like(query)
    rows, kvs, masks = (
        t.tolist() for t in (case.layout.qo_indptr, case.layout.kv_indptr, case.layout.mask_indptr)
    )
    for b in range(len(rows) - 1):
        q_len, prefix_len = rows[b + 1] - rows[b], kvs[b + 1] - kvs[b]
        size = mask_len(prefix_len, q_len)
        seen = case.mask.allowed[masks[b] : masks[b] + size].reshape(q_len, -1).clone()
        own = slice(rows[b], rows[b + 1])
        keys = torch.cat([pool[case.layout.kv_indices[kvs[b] : kvs[b + 1]]], kv[own]])
        if case.window is not None:
            seen &= _inside(case, own, prefix_len, window_by, case.window + spare)
        for first in range(0, q_len, TILE):
            last = min(first + TILE, q_len)
            stop = kv_len(prefix_len, q_len)
            if causal_stop:
                stop = prefix_len + last
            if stop_by_call_row:
                stop = min(stop, prefix_len + last - rows[b])
            seen[first:last, max(stop, 0) :] = False
            if skip_by_first_row:
                for column in range(0, seen.shape[1], TILE):
                    if not seen[first, column : column + TILE].any():
                        seen[first:last, column : column + TILE] = False
        scores = (query[own] @ keys.T).masked_fill(~seen, -torch.inf)
        output[own] = scores.softmax(dim=1).nan_to_num(0.0) @ keys
    return output


def _inside(case: AttentionCase, own: slice, prefix_len: int, by: str, window: int) -> Tensor:
    """``[q_len, kv]`` bool: the entry is inside the row's window."""
    positions = case.layout.positions[own]
    if by == "row":
        positions = position(PrefixLen(prefix_len), torch.arange(positions.numel()))
    of_query = positions[:1].expand_as(positions) if by == "root" else positions
    of_key = torch.cat([torch.arange(prefix_len), positions])
    inside: Tensor = of_key >= window_start(of_query, window)[:, None]
    return inside


def _rows_that_differ(implementation: Any, case: AttentionCase) -> Measured:
    """Query rows whose output is not the reference's; the same random numbers for both."""
    generator = torch.Generator().manual_seed(0)
    count, slots = (
        case.layout.positions.numel(),
        max(case.layout.kv_indices.tolist(), default=0) + 1,
    )
    query, kv = torch.randn(2, count, 4, generator=generator, dtype=torch.float64)
    pool = torch.randn(slots, 4, generator=generator, dtype=torch.float64)
    right, _ = verify_attention(
        query[:, None],
        kv[:, None],
        kv[:, None],
        pool[:, None],
        pool[:, None],
        case.layout,
        case.mask,
        scale=1.0,
        window=case.window,
        compute_dtype=torch.float64,
    )
    found: Tensor = implementation(case, query, kv, pool)
    wrong = ((found - right[:, 0]).abs() > 1e-9).any(dim=1)
    return Measured([], wrong.nonzero().flatten().tolist())


ATTENTION = Property(
    "attention",
    "Each row's output is the softmax over just the entries that the mask and the window leave it.",
    _rows_that_differ,
)


def all_ones(q_lens: Sequence[int], prefixes: Sequence[int]) -> AttentionCase:
    """Every row sees every entry: no tree, but a mask that a caller may pass."""
    sizes = list(zip(prefixes, q_lens, strict=True))
    layout = VerifyLayout(
        qo_indptr=indptr(q_lens, torch.int32),
        kv_indptr=indptr(prefixes, torch.int32),
        kv_indices=torch.arange(sum(prefixes)),
        mask_indptr=indptr([mask_len(PrefixLen(p), QLen(q)) for p, q in sizes]),
        max_q_len=QLen(max(q_lens)),
        positions=torch.cat([torch.full((q,), p) for p, q in sizes]),
        out_cache_loc=torch.full((sum(q_lens),), -1),
    )
    return AttentionCase(
        layout, FlatMask(torch.ones(int(layout.mask_indptr[-1]), dtype=torch.bool))
    )


def of_tree(
    *parents: Sequence[int], prefixes: Sequence[int], window: int | None = None
) -> AttentionCase:
    """A pass of trees written out by hand, slots in order."""
    call = lay_out(tree_of(*parents), prefixes)
    known = call.known()
    fields = {name: known[name] for name in VerifyLayout.__dataclass_fields__ if name in known}
    fields["kv_indices"] = torch.arange(sum(prefixes))
    return AttentionCase(VerifyLayout(**fields), FlatMask(known["custom_mask"]), window)


def _fault(
    what: str, case: AttentionCase, rows: list[int], **faults: bool | str | int
) -> PropertyFault:
    def mutant(case: AttentionCase, query: Tensor, kv: Tensor, pool: Tensor) -> Tensor:
        return loop_attention(case, query, kv, pool, **faults)  # type: ignore[arg-type]

    return PropertyFault(what, ATTENTION, loop_attention, mutant, lambda: case, [], rows)


BY_ROW = _fault(
    "window 4, nodes [-1, 0, 0]: node 2 loses an entry too many",
    of_tree((-1, 0, 0), prefixes=[5], window=4),
    [2],
    window_by="row",
)
OFF_BY_ONE = _fault(
    "a window that keeps its width besides the row itself",
    of_tree((-1, 0, 0), prefixes=[5], window=4),
    [0, 1, 2],
    spare=1,
)
ROOTS_WINDOW = _fault(
    "one window for all rows, the root's",
    of_tree((-1, 0, 0, 1), prefixes=[5], window=4),
    [1, 2, 3],
    window_by="root",
)

ROW_4 = Row(
    4,
    "SGLang issue 39593",
    "the key loop stops at the causal tile although a mask is given",
    "a short cut of the loop that holds for one kind of mask only",
    "With a causal mask no row sees keys behind its own, and the loop may stop there. It stopped there "
    "with a custom mask too. Trees whose parents come first never notice.",
    (
        _fault(
            "130 rows, all ones: the first two tiles of rows miss the keys behind them",
            all_ones([130], [5]),
            list(range(128)),
            causal_stop=True,
        ),
        _fault(
            "rows counted over the call: a second request stops far too early",
            of_tree((-1, 0, 0), (-1, 0, 1), prefixes=[5, 3]),
            [3, 4, 5],
            stop_by_call_row=True,
        ),
        _fault(
            "a key tile skipped because the first row sees nothing of it",
            of_tree((-1, *[0] * 70), prefixes=[60]),
            [*range(4, 64), *range(68, 71)],
            skip_by_first_row=True,
        ),
        CallFault(
            "a causal mask written over the tree's",
            lambda: lay_out(tree_of((-1, 0, 0, 1)), [2]),
            causal,
            Names("visibility", 0, 0, 1),
            (Right("custom_mask", slice(12, 18), [True, True, True, False, True, False]),),
            "the mask is causal by row: siblings see each other",
        ),
    ),
)

ATTENTION_ROWS = (ROW_4,)

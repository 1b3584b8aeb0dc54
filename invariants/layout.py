"""Invariants of the layout: who owns which query rows, KV entries and mask entries."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ddtree.invariants import diagnosis
from ddtree.invariants.call import Call
from ddtree.invariants.claimed import index
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.sizes import Sizes, ancestors, diffs, total_rows, tree_rows
from ddtree.invariants.violation import Violation


def real_rows(call: Call, sizes: Sizes, b: int) -> int:
    """Query rows of request b that are real nodes; all of them where the call does not say.

    Where it does not count them, its trees tell: nodes have a parent, a depth, a finite score, padding none.
    """
    q_len = (sizes.q_lens or [])[b]
    if call.num_nodes is not None:
        return max(0, min(q_len, int(call.num_nodes[b])))
    for is_node in (
        None if call.parents is None else call.parents[b] >= 0,
        None if call.depths is None else call.depths[b] > 0,
        None if call.scores is None else call.scores[b].isfinite(),
    ):
        if is_node is not None:
            return min(q_len, 1 + _leading(is_node[1:]))
    return q_len


def _leading(flags: Tensor) -> int:
    """How many hold before the first that does not."""
    ends = (~flags).nonzero().flatten().tolist()
    return ends[0] if ends else flags.numel()


def slot_rows(call: Call, sizes: Sizes, b: int) -> int | None:
    """Query rows of request b whose slots are judged: its real nodes; None where nothing tells them.

    Without a tree they are the root's row and those behind it that lie at a position behind its own; the
    rest may be padding, which is at the root's position or nowhere.
    """
    real, start = real_rows(call, sizes, b), sizes.row_starts[b]
    if any(t is not None for t in (call.num_nodes, call.parents, call.depths, call.scores)):
        return real
    found = None if call.positions is None else call.positions[start : start + real]
    if found is None or not real or found.numel() < real:
        return None
    return 1 + _leading(found[1:] > found[0])


def _rows(value: Tensor, sizes: Sizes, b: int, count: int) -> Tensor | None:
    """The first ``count`` rows of request b; None where the tensor ends before."""
    start = sizes.row_starts[b]
    return value[start : start + count].long() if start + count <= value.shape[0] else None


def _prefix_slots(call: Call, sizes: Sizes) -> list[Tensor]:
    """Slots of each request's prefix entries."""
    assert call.kv_indptr is not None and call.kv_indices is not None
    starts = call.kv_indptr.long().tolist()
    lens = sizes.prefix_lens or []
    return [call.kv_indices[starts[b] : starts[b] + lens[b]].long() for b in range(sizes.batch)]


def mask_len(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare each segment of ``mask_indptr`` with the request's own sizes."""
    found, expected = diffs(call.mask_indptr, sizes.batch), sizes.mask_lens
    assert found is not None and expected is not None and call.mask_indptr is not None
    hint = diagnosis.mask_segments(call, sizes)
    for b, (have, want) in enumerate(zip(found, expected, strict=True)):
        if have != want:
            prefix_len, q_len = (sizes.prefix_lens or [])[b], (sizes.q_lens or [])[b]
            whole = (
                f"; the whole mask: {sizes.mask_starts[-1]} entries, mask_indptr[-1] is "
                f"{int(call.mask_indptr[-1])}"
            )
            yield Violation(
                b, want, have, f"{q_len} * ({prefix_len} + {q_len}) = {want}{whole}", hint
            )


def mask_indptr(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look at where the segments of the flat mask begin and end."""
    assert call.mask_indptr is not None
    yield from _indptr("mask_indptr", call.mask_indptr, sizes, sizes.mask_starts)
    if call.custom_mask is not None and not call.is_captured and call.mask_indptr.numel():
        size, end = call.custom_mask.numel(), int(call.mask_indptr[-1])
        if size != end:
            hint = diagnosis.capacity(size, sizes) if end == sizes.mask_starts[-1] else ""
            yield Violation(
                None, size, end, f"mask_indptr[-1] is {end}; custom_mask has {size} entries", hint
            )


def qo_indptr(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare each request's query rows with the rows of the call and of its tree."""
    assert call.qo_indptr is not None
    yield from _indptr("qo_indptr", call.qo_indptr, sizes, sizes.row_starts)
    if sizes.q_lens is None:
        return
    hint = diagnosis.row_widths(call, sizes)
    found = diffs(call.qo_indptr, sizes.batch) or []
    for b, (have, want) in enumerate(zip(found, sizes.q_lens, strict=True)):
        if have != want:
            yield Violation(b, want, have, f"qo_indptr[{b + 1}] - qo_indptr[{b}] = {have}", hint)
    total, end = total_rows(call), int(call.qo_indptr[sizes.batch])
    if total is not None and end != total and found == sizes.q_lens:
        yield Violation(
            None, total, end, f"qo_indptr[-1] is {end}; the call has {total} query rows"
        )
    for b, have in enumerate(found):
        idle = 0 if call.is_captured else 1  # fixed buffers may hold requests without rows
        least = idle if call.num_nodes is None or b in sizes.idle else int(call.num_nodes[b])
        most = have if call.token_ids is None else call.token_ids.shape[1]
        if have == sizes.q_lens[b] and not least <= have <= most:
            known = call.token_ids is not None
            expected = f"{least} to {most}" if known and least <= most else f"at least {least}"
            numbers = f"q_len {have} for {least} nodes{f' in {most} rows' if known else ''}"
            if have == 0:
                numbers = (
                    f"qo_indptr[{b}] == qo_indptr[{b + 1}]: the request has no query rows; one that is "
                    "verified has its root at least"
                )
            yield Violation(b, expected, have, numbers)


def max_q_len(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare with the largest q_len of the call."""
    assert call.max_q_len is not None and sizes.q_lens is not None
    most = max(sizes.q_lens, default=0)
    if call.max_q_len < most or (call.max_q_len > most and not call.is_captured):
        expected = f"at least {most}" if call.is_captured else most
        yield Violation(
            None,
            expected,
            call.max_q_len,
            f"q_lens {sizes.q_lens}",
            diagnosis.max_q_len(call, sizes),
        )


def kv_indptr(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare each request's KV entries with its prefix."""
    assert call.kv_indptr is not None
    ends = list(accumulate(sizes.prefix_lens or [], initial=0))
    yield from _indptr("kv_indptr", call.kv_indptr, sizes, ends)
    found, hint = diffs(call.kv_indptr, sizes.batch) or [], diagnosis.kv_lens(call, sizes)
    for b, (have, want) in enumerate(zip(found, sizes.prefix_lens or found, strict=True)):
        if have != want:
            yield Violation(
                b,
                want,
                have,
                f"kv_indptr[{b + 1}] - kv_indptr[{b}] = {have}; prefix_len is {want}",
                hint,
            )
    if call.kv_indices is not None and int(call.kv_indptr[-1]) > call.kv_indices.numel():
        end, size = int(call.kv_indptr[-1]), call.kv_indices.numel()
        yield Violation(
            None, f"at most {size}", end, f"kv_indptr[-1] is {end}; kv_indices has {size} entries"
        )


def kv_indices(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare each prefix slot with the pool."""
    for b, slots in enumerate(_prefix_slots(call, sizes)):
        yield from _outside(call, b, "kv_indices", slots, least=0)


def kv_unique(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look for a slot that one request's prefix uses twice; sharing between requests is a prefix cache."""
    for b, slots in enumerate(_prefix_slots(call, sizes)):
        twice = _repeated(slots)
        if twice is not None:
            entries = (slots == twice).nonzero().flatten().tolist()
            yield Violation(
                b,
                "distinct slots",
                twice,
                f"slot {twice} holds entries {entries[:4]} of the prefix",
            )


def out_cache_loc(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare each written slot with the pool; a padding row may be left unwritten (-1)."""
    assert call.out_cache_loc is not None and sizes.q_lens is not None
    for b, q_len in enumerate(sizes.q_lens):
        slots = _rows(call.out_cache_loc, sizes, b, q_len)
        if slots is not None:
            told = slot_rows(call, sizes, b)
            real = min(q_len, 1) if told is None else told  # of the others each may be padding
            yield from _outside(call, b, "out_cache_loc", slots[:real], least=0)
            yield from _outside(call, b, "out_cache_loc of padding", slots[real:], least=-1)


def write_unique(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look for a real row's slot that another row writes too; padding rows may share a dummy slot."""
    assert call.out_cache_loc is not None and sizes.q_lens is not None
    slots = call.out_cache_loc[: sizes.row_starts[-1]].long()
    values, inverse, counts = slots.unique(return_inverse=True, return_counts=True)
    shared = (counts > 1)[inverse] & (values >= 0)[inverse]
    for b in range(sizes.batch):
        start, told = sizes.row_starts[b], slot_rows(call, sizes, b)
        real = real_rows(call, sizes, b) if told is None else told
        bad = shared[start : start + real].nonzero().flatten()
        if bad.numel():
            slot = int(slots[start + int(bad[0])])
            writers = (slots == slot).nonzero().flatten().tolist()
            depths = _depths(call, b)[:real]
            hint = diagnosis.written_by_depth(slots[start : start + real], depths)
            yield Violation(
                b, "one writer", slot, f"slot {slot} is written by query rows {writers[:4]}", hint
            )


def write_disjoint(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look for a written slot that holds a prefix entry of any request."""
    assert call.out_cache_loc is not None and sizes.q_lens is not None
    prefixes = _prefix_slots(call, sizes)
    held = torch.cat(prefixes) if prefixes else torch.empty(0, dtype=torch.int64)
    slots = call.out_cache_loc[: sizes.row_starts[-1]].long()
    taken = torch.isin(slots, held)  # of all requests at once: it sorts
    for b, q_len in enumerate(sizes.q_lens):
        start = sizes.row_starts[b]
        for row in taken[start : start + q_len].nonzero().flatten().tolist()[:1]:
            slot = int(slots[start + row])
            owner = next(i for i, prefix in enumerate(prefixes) if bool((prefix == slot).any()))
            yield Violation(
                b,
                "a free slot",
                slot,
                f"row {row} writes slot {slot}, which holds a prefix entry of request {owner}",
            )


def slot_table(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the slots of the layout with the table they came from."""
    assert call.slot_table is not None and sizes.prefix_lens is not None
    prefixes = (
        _prefix_slots(call, sizes)
        if call.kv_indices is not None and call.kv_indptr is not None
        else None
    )
    for b, prefix_len in enumerate(sizes.prefix_lens):
        table = call.slot_table[b]
        if prefixes is not None:
            hint = diagnosis.slots(prefixes[b], table, 0)
            yield from _differs(b, "kv_indices", prefixes[b], table[:prefix_len], 0, hint)
        if call.out_cache_loc is not None and sizes.q_lens is not None:
            told = slot_rows(call, sizes, b)
            real = real_rows(call, sizes, b) if told is None else told
            slots = _rows(call.out_cache_loc, sizes, b, real)
            if slots is not None:
                hint = diagnosis.slots(slots, table, prefix_len, _depths(call, b)[:real])
                right = table[prefix_len : prefix_len + real]
                if told is None and right.numel() == real:
                    slots = slots.where(slots != -1, right)  # padding, for all that is known
                yield from _differs(b, "out_cache_loc", slots, right, prefix_len, hint)


def positions(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare each real row's position with its depth; without a tree, the root's with the prefix."""
    assert call.positions is not None and sizes.prefix_lens is not None and sizes.q_lens is not None
    placed: dict[int, diagnosis.Placed] = {}
    for b, prefix_len in enumerate(sizes.prefix_lens):
        depths = _depths(call, b)[: real_rows(call, sizes, b)]
        found = _rows(call.positions, sizes, b, depths.numel())
        if found is not None:
            placed[b] = diagnosis.Placed(found, prefix_len, depths, sizes.row_starts[b])
    hints = diagnosis.positions(list(placed.values()))
    for (b, (found, prefix_len, depths, _)), hint in zip(placed.items(), hints, strict=True):
        bad = (found != index.position(prefix_len, depths)).nonzero().flatten()
        if bad.numel():
            row = int(bad[0])
            want = index.position(prefix_len, int(depths[row]))
            numbers = f"row {row}: {prefix_len} + {int(depths[row])} = {want}"
            yield Violation(b, want, int(found[row]), numbers, hint)


def _depths(call: Call, b: int) -> Tensor:
    """Depths of a request's rows: the tree's own, else those that the parents give, else the root's."""
    nodes = tree_rows(call, b)
    if call.depths is not None:
        return call.depths[b].long()
    if call.parents is not None and nodes is not None:
        return ancestors(call.parents[b, :nodes]).sum(dim=1) - 1
    return torch.zeros(1, dtype=torch.int64)


def input_ids(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the token fed to each real row with its node's."""
    assert call.input_ids is not None and call.token_ids is not None and sizes.q_lens is not None
    for b in range(sizes.batch):
        real = real_rows(call, sizes, b)
        found = _rows(call.input_ids, sizes, b, real)
        if found is not None:
            yield from _differs(b, "input_ids", found, call.token_ids[b, :real], 0)


def _indptr(name: str, indptr: Tensor, sizes: Sizes, right: Sequence[int]) -> Iterator[Violation]:
    """Every indptr starts at 0 and never decreases; ``right`` are its ends where they are known."""
    if indptr.numel() and int(indptr[0]) != 0:
        yield Violation(None, 0, int(indptr[0]), f"{name}[0]")
    steps = indptr.long().diff()
    for b in (steps < 0).nonzero().flatten().tolist()[:1]:
        request = b if b < sizes.batch else None
        yield Violation(
            request,
            f"at least {int(indptr[b])}",
            int(indptr[b + 1]),
            f"{name}[{b + 1}] is less than {name}[{b}]",
            diagnosis.indptr_wrapped(indptr, b, right[b + 1] if b + 1 < len(right) else None),
        )


def _outside(call: Call, b: int, name: str, slots: Tensor, least: int) -> Iterator[Violation]:
    """Slots outside the pool."""
    bad = (
        slots < least
        if call.kv_pool_size is None
        else (slots < least) | (slots >= call.kv_pool_size)
    )
    for entry in bad.nonzero().flatten().tolist()[:1]:
        expected = (
            f"at least {least}"
            if call.kv_pool_size is None
            else f"{least} to {call.kv_pool_size - 1}"
        )
        yield Violation(b, expected, int(slots[entry]), f"{name}, entry {entry} of the request")


def _differs(
    b: int, name: str, found: Tensor, expected: Tensor, first: int, hint: str = ""
) -> Iterator[Violation]:
    """The first place where two rows differ; a row that is too short differs at its end."""
    if expected.numel() < found.numel():
        yield Violation(
            b,
            first + found.numel(),
            first + expected.numel(),
            f"{name}: the table has too few entries",
        )
        return
    for i in (found != expected).nonzero().flatten().tolist()[:1]:
        yield Violation(
            b, int(expected[i]), int(found[i]), f"{name}, entry {first + i} of the request", hint
        )


def _repeated(slots: Tensor) -> int | None:
    """A value that occurs twice."""
    values, counts = slots.unique(return_counts=True)
    repeated = values[counts > 1]
    return int(repeated[0]) if repeated.numel() else None


LAYOUT = (
    Invariant(
        "mask_len",
        "layout",
        "A request's mask segment has q_len rows of prefix_len + q_len entries.",
        "mask_indptr[b+1] - mask_indptr[b] == q_len * (prefix_len + q_len)",
        ("mask_indptr", "q_len", "prefix_len"),
        mask_len,
        proofs=("mask_width", "mask_segments"),
    ),
    Invariant(
        "mask_indptr",
        "layout",
        "Mask segments start at 0, never go back, and end with the mask.",
        "0 == mask_indptr[0] <= mask_indptr[1] <= ... == len(custom_mask)",
        ("mask_indptr",),
        mask_indptr,
        proofs=("mask_segments",),
    ),
    Invariant(
        "qo_indptr",
        "layout",
        (
            "qo_indptr counts the query rows of this call: each request's real nodes at "
            "least, the rows of its tree at most, T in all."
        ),
        "num_nodes[b] <= qo_indptr[b+1] - qo_indptr[b] == q_len <= Q, qo_indptr[-1] == T",
        ("qo_indptr",),
        qo_indptr,
        proofs=("mask_width",),
    ),
    Invariant(
        "max_q_len",
        "layout",
        "max_q_len is the largest q_len of the call; in fixed buffers it is no smaller.",
        "max_q_len == max(qo_indptr[b+1] - qo_indptr[b])",
        ("max_q_len", "q_len"),
        max_q_len,
    ),
    Invariant(
        "kv_indptr",
        "layout",
        "kv_indptr counts prefix entries only, and kv_indices has them all.",
        "kv_indptr[b+1] - kv_indptr[b] == prefix_len, kv_indptr[-1] <= len(kv_indices)",
        ("kv_indptr",),
        kv_indptr,
        proofs=("mask_segments",),
    ),
    Invariant(
        "kv_indices",
        "layout",
        "Prefix slots lie in the KV pool.",
        "0 <= kv_indices[i] < kv_pool_size for i < kv_indptr[-1]",
        ("kv_indices", "kv_indptr", "prefix_len"),
        kv_indices,
        ("kv_indptr",),
    ),
    Invariant(
        "kv_unique",
        "layout",
        "No slot holds two entries of one request's prefix.",
        "kv_indices[i] != kv_indices[j] for kv_indptr[b] <= i < j < kv_indptr[b+1]",
        ("kv_indices", "kv_indptr", "prefix_len"),
        kv_unique,
        ("kv_indptr",),
    ),
    Invariant(
        "out_cache_loc",
        "layout",
        ("Each real row's KV is written inside the pool; a padding row's may stay unwritten (-1)."),
        "0 <= out_cache_loc[row] < kv_pool_size",
        ("out_cache_loc", "q_len"),
        out_cache_loc,
        proofs=("padded_rows",),
    ),
    Invariant(
        "write_unique",
        "layout",
        "No other row writes a real row's slot.",
        "out_cache_loc[i] != out_cache_loc[j] for real i != j",
        ("out_cache_loc", "q_len"),
        write_unique,
    ),
    Invariant(
        "write_disjoint",
        "layout",
        "No row writes a slot that holds a prefix entry of any request.",
        "out_cache_loc[i] not in kv_indices[:kv_indptr[-1]]",
        ("out_cache_loc", "q_len", "kv_indices", "kv_indptr", "prefix_len"),
        write_disjoint,
        ("kv_indptr",),
    ),
    Invariant(
        "slot_table",
        "layout",
        (
            "Entry i of a request lies in the slot that the slot table gives it, row r of "
            "the tree at entry prefix_len + r."
        ),
        (
            "kv_indices[kv_indptr[b] + i] == slot_table[b, i], out_cache_loc[qo_indptr[b] + "
            "r] == slot_table[b, prefix_len + r]"
        ),
        ("slot_table", "prefix_len", "kv_indices|out_cache_loc"),
        slot_table,
        ("kv_indptr",),
    ),
    Invariant(
        "positions",
        "layout",
        "A real row's position is prefix_len + depth, not + row.",
        "positions[qo_indptr[b] + r] == prefix_len + depths[b, r]",
        ("positions", "prefix_len", "q_len"),
        positions,
        proofs=("depth_windows",),
    ),
    Invariant(
        "input_ids",
        "layout",
        "Each real row is fed its node's token.",
        "input_ids[qo_indptr[b] + r] == token_ids[b, r]",
        ("input_ids", "token_ids", "q_len"),
        input_ids,
    ),
)

"""Inputs whose output is the exact set of entries that a row attends to.

Queries and keys are zero, so every visible entry has the same weight and the output is the plain mean of
their values. Each entry of the whole batch has one power of two in one lane for its value: the mean times the
number of entries is then a sum of distinct powers of two, one for each entry seen. A mask that is ignored,
read at another offset or of another request shows as names of entries, where random numbers might hide it.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from ddtree.invariants.conformance.attend import POISON, AttentionCase, Inputs, output_of
from ddtree.invariants.strategies import VerifyCall
from ddtree.spec.mask import ancestors_or_self

BITS = {torch.float32: 8, torch.float16: 4, torch.bfloat16: 4}
"""Powers of two in a lane that a mean in that dtype keeps apart."""
CLOSE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.1}
"""How far a count times a mean may be from a whole number: some roundings of the largest sum of a lane."""


def capacity(case: AttentionCase) -> int:
    """Entries, of all requests together, that can be told apart."""
    return BITS[case.dtype] * case.kv_heads * case.head_dim


def entries(call: VerifyCall) -> int:
    """Entries of a call: prefixes and tree rows of all requests."""
    return int(call.layout.kv_indptr[-1]) + int(call.layout.qo_indptr[-1])


def inputs(case: AttentionCase, call: VerifyCall, slots: int) -> Inputs:
    """Zero queries and keys; entry ``i`` of the call has the value ``2 ** (i % bits)`` in lane ``i // bits``.

    Entries are numbered request by request, the prefix before the rows.
    """
    layout, dtype = call.layout, case.dtype
    rows = int(layout.qo_indptr[-1])
    codes = _codes(case, entries(call)).to(dtype)
    shape = (case.kv_heads, case.head_dim)
    value = torch.zeros(rows, *shape, dtype=dtype)
    pool = torch.full((slots, *shape), POISON, dtype=dtype)
    key_pool = torch.zeros(slots, *shape, dtype=dtype)
    for first, kv, qo in _segments(call):
        prefix, width = kv.stop - kv.start, qo.stop - qo.start
        pool[layout.kv_indices[kv]] = codes[first : first + prefix].view(-1, *shape)
        value[qo] = codes[first + prefix : first + prefix + width].view(-1, *shape)
    query = torch.zeros(rows, case.q_heads, case.head_dim, dtype=dtype)
    return Inputs(query, torch.zeros_like(value), value, key_pool, pool)


def wrong_rows(case: AttentionCase, result: object) -> dict[int, list[int]]:
    """Real rows of each request whose visible set is not the prefix, the row and its ancestors."""
    call, sets = case.call, _expected_sets(case.call)
    counts = sets.sum(1)
    seen = sets.double() @ _codes(case, sets.shape[1]) / counts[:, None]
    output = output_of(result, seen.shape[0]).double()
    group = case.q_heads // case.kv_heads
    lanes = output.unflatten(1, (case.kv_heads, group))  # every head of a group tells the same
    means = seen.view(-1, case.kv_heads, 1, case.head_dim)
    wrong = ~(((lanes - means) * counts.view(-1, 1, 1, 1)).abs() < CLOSE[case.dtype])
    bad = wrong.flatten(1).any(1)
    found: dict[int, list[int]] = {}
    for b, (_, _, qo) in enumerate(_segments(call)):
        real = bad[qo][: int(call.tree.num_nodes[b])]
        if real.any():
            found[b] = real.nonzero().flatten().tolist()
    return found


def explain(case: AttentionCase, result: object, wrong: dict[int, list[int]]) -> str:
    """What the first wrong row sees, entry by entry."""
    b, rows = next(iter(wrong.items()))
    row, call = rows[0], case.call
    start = int(call.layout.qo_indptr[b])
    output = output_of(result, int(call.layout.qo_indptr[-1])).double()
    lanes = output[start + row, :: case.q_heads // case.kv_heads].flatten()
    expected = set(_expected_sets(call)[start + row].nonzero().flatten().tolist())
    seen = _decode(case, lanes, entries(call))
    where = f"row {row} of request {b}"
    if lanes.isnan().any():
        return f"{where} is NaN"
    if not lanes.any():
        return f"{where} sees nothing, or was not computed: its output is 0"
    if seen is None:
        memory = ": it reads memory that nobody wrote" if lanes.abs().max() > POISON / 100 else ""
        return f"{where} is no mean of entries of the call{memory}"
    names = _names(call)
    said = []
    if extra := sorted(seen - expected):
        said.append(f"sees {_listed([names[i] for i in extra], b)}")
    if missing := sorted(expected - seen):
        said.append(f"does not see {_listed([names[i] for i in missing], b)}")
    return f"{where} {' and '.join(said) or 'differs between its query heads'}"


def seen_sets(case: AttentionCase, result: object, wrong: dict[int, list[int]]) -> Tensor:
    """``[T, entries]`` int8: 1 where a row saw an entry, by its output; -1 in a row whose set is not known.

    Rows that are not wrong, and padding, stand with what they should see.
    """
    call, group = case.call, case.q_heads // case.kv_heads
    sets = _expected_sets(call).to(torch.int8)
    output = output_of(result, sets.shape[0]).double()
    for b, rows in wrong.items():
        for row in rows:
            at = int(call.layout.qo_indptr[b]) + row
            expected = set(sets[at].nonzero().flatten().tolist())
            # one head of each group tells the whole set: the first that tells another than it should
            heads = (output[at, head::group].flatten() for head in range(group))
            told = [
                _decode(case, lanes, sets.shape[1]) if lanes.any() else set() for lanes in heads
            ]
            seen = next((entries for entries in told if entries != expected), expected)
            sets[at] = -1 if seen is None else 0
            sets[at, sorted(seen or ())] = 1
    return sets


def _segments(call: VerifyCall) -> Iterator[tuple[int, slice, slice]]:
    """For each request the number of its first entry, its prefix entries and its rows."""
    kv, qo = call.layout.kv_indptr.tolist(), call.layout.qo_indptr.tolist()
    for b in range(len(qo) - 1):
        yield kv[b] + qo[b], slice(kv[b], kv[b + 1]), slice(qo[b], qo[b + 1])


def _codes(case: AttentionCase, count: int) -> Tensor:
    """``[count, lanes]`` float64 values of the entries."""
    bits, entry = BITS[case.dtype], torch.arange(count)
    codes = torch.zeros(count, case.kv_heads * case.head_dim, dtype=torch.float64)
    codes[entry, entry // bits] = (2.0 ** (entry % bits)).double()
    return codes


def _expected_sets(call: VerifyCall) -> Tensor:
    """``[T, entries]`` bool: what each row should see; a padding row sees itself beside the prefix."""
    sets = torch.zeros(int(call.layout.qo_indptr[-1]), entries(call), dtype=torch.bool)
    for b, (first, kv, qo) in enumerate(_segments(call)):
        own = first + kv.stop - kv.start
        sets[qo, first:own] = True
        width = qo.stop - qo.start
        seen = ancestors_or_self(call.tree.parents[b, :width].tolist())
        sets[qo, own : own + width] = seen
    return sets


def _decode(case: AttentionCase, lanes: Tensor, count: int) -> set[int] | None:
    """The entries whose mean the lanes are, of all sets that fit the nearest; None if none fits."""
    bits, nearest, found = BITS[case.dtype], CLOSE[case.dtype], None
    for size in range(1, count + 1):
        sums = lanes * size
        whole = sums.round()
        off = float((sums - whole).abs().max())
        if not off < nearest or whole.min() < 0 or whole.max() >= 2**bits:
            continue
        seen = {
            lane * bits + bit
            for lane, value in enumerate(whole.long().tolist())
            for bit in _bits(value)
        }
        if len(seen) == size and max(seen) < count:
            nearest, found = off, seen
    return found


@cache
def _bits(value: int) -> tuple[int, ...]:
    return tuple(bit for bit in range(value.bit_length()) if value >> bit & 1)


def _names(call: VerifyCall) -> list[tuple[int, str, int]]:
    """``(request, "prefix entry" or "row", number)`` of each entry."""
    names = []
    for b, (_, kv, qo) in enumerate(_segments(call)):
        names += [(b, "prefix entry", i) for i in range(kv.stop - kv.start)]
        names += [(b, "row", i) for i in range(qo.stop - qo.start)]
    return names


def _listed(names: list[tuple[int, str, int]], own: int) -> str:
    """``row 2, row 5 of request 1 and 3 more``."""
    shown = [
        f"{kind} {number}{'' if request == own else f' of request {request}'}"
        for request, kind, number in names[:3]
    ]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shown) + more

"""The true sizes of a call: its width and prefix of each request, by the evidence it carries.

A width that comes from configuration is often written into ``qo_indptr``, ``mask_indptr`` and
``max_q_len`` alike, and then they agree with one another. What they cannot agree with is the call
itself: the rows of its query, its positions, its tree, its mask. The widths used here are
``qo_indptr``'s as long as that evidence bears them out, and the evidence's own where it does not. The
prefix lengths are ``kv_indptr``'s in the same way.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.claimed import index

Lens = list[int]

PER_REQUEST = (
    "num_nodes", "token_ids", "parents", "depths", "scores", "q_lens", "prefix_lens",
    "draft_log_probs", "root_token_ids", "nodes", "num_accepted", "bonus", "committed_lens", "src",
    "dst", "emitted",
)  # fmt: skip
"""Fields of an entry a request."""
TABLES = ("slot_table", "slot_table_after", "bias")
"""Fields of an entry a request that may have room for more requests."""
INDPTRS = ("qo_indptr", "kv_indptr", "mask_indptr", "byte_indptr")


@dataclass(frozen=True)
class Sizes:
    """Lengths of each request; None where the call does not say."""

    batch: int
    """Requests of the call; fixed buffers may hold more."""
    q_lens: Lens | None
    prefix_lens: Lens | None

    idle: frozenset[int] = frozenset()
    """Requests of fixed buffers that are not in use. Nothing is demanded of their trees."""

    @property
    def row_starts(self) -> Lens:
        """``[B+1]`` first query row of each request."""
        return list(accumulate(self.q_lens or [], initial=0))

    @property
    def mask_lens(self) -> Lens | None:
        """Entries of each request's flat mask segment."""
        if self.q_lens is None or self.prefix_lens is None:
            return None
        pairs = zip(self.prefix_lens, self.q_lens, strict=True)
        return [index.mask_len(prefix, q_len) for prefix, q_len in pairs]

    @property
    def mask_starts(self) -> Lens:
        """``[B+1]`` first flat mask entry of each request."""
        return list(accumulate(self.mask_lens or [], initial=0))


def sizes_of(call: Call) -> Sizes:
    """Weigh the evidence of one call.

    Requests that are not in use are no evidence: what speaks for a width need not speak for theirs.
    """
    batch = batch_of(call)
    empty = _empty(call)
    used = without(call, empty, batch)
    prefix_lens = _lens(_prefix_lens(used, batch - len(empty)))
    q_lens = _among(_lens(_q_lens(used, batch - len(empty), prefix_lens)), empty)
    return Sizes(batch, q_lens, _among(prefix_lens, empty), idle_requests(call, q_lens or []))


def _empty(call: Call) -> frozenset[int]:
    """Requests that the call claims are not in use, for which no indptr has anything; never all of them."""
    claimed = claimed_sizes(call)
    lens = [diffs(getattr(call, name), claimed.batch) for name in INDPTRS]
    empty = frozenset(b for b in claimed.idle if not any(each[b] for each in lens if each))
    return empty if len(empty) < claimed.batch else frozenset()


def without(call: Call, empty: frozenset[int], batch: int) -> Call:
    """The call without some requests that have no rows and no prefix; those behind them move up."""
    if not empty:
        return call
    known = call.known()
    left: dict[str, Any] = {"batch_size": batch - len(empty)} if "batch_size" in known else {}
    for name in (*PER_REQUEST, *TABLES):
        if name in known:
            left[name] = known[name][[b for b in range(len(known[name])) if b not in empty]]
    for name in INDPTRS:
        if name in known:
            entries = range(known[name].numel())
            left[name] = known[name][[i for i in entries if i - 1 not in empty]]
    return replace(call, **left)


def _among(lens: Lens | None, empty: frozenset[int]) -> Lens | None:
    """The lengths of the requests in use, with 0 for each of the others in its place."""
    if lens is None or not empty:
        return lens
    rest = iter(lens)
    return [0 if b in empty else next(rest) for b in range(len(lens) + len(empty))]


def in_use(call: Call, sizes: Sizes) -> tuple[Call, Sizes, Lens]:
    """The call and its sizes without the requests that are not in use, and which ones are left."""
    empty = _empty(call) & sizes.idle
    if not empty:
        return call, sizes, list(range(sizes.batch))
    kept = [b for b in range(sizes.batch) if b not in empty]
    q_lens, prefix_lens = (
        None if lens is None else [lens[b] for b in kept]
        for lens in (sizes.q_lens, sizes.prefix_lens)
    )
    idle = frozenset(i for i, b in enumerate(kept) if b in sizes.idle)
    return without(call, empty, sizes.batch), Sizes(len(kept), q_lens, prefix_lens, idle), kept


def claimed_sizes(call: Call) -> Sizes:
    """The sizes as the call claims them, with no look at the evidence: its own lengths, else the indptrs'."""
    batch = batch_of(call)
    prefix_lens = _lens(_own_prefix_lens(call, batch) or diffs(call.kv_indptr, batch))
    q_lens = _lens(_own_lens(call.q_lens, batch) or diffs(call.qo_indptr, batch))
    return Sizes(batch, q_lens, prefix_lens, idle_requests(call, q_lens or []))


def idle_requests(call: Call, q_lens: Lens) -> frozenset[int]:
    """Requests of fixed buffers without rows whose prefix length is told as negative, or else is 0."""
    held = diffs(call.kv_indptr, len(q_lens)) if call.is_captured else None
    if held is None:
        return frozenset()
    told = call.prefix_lens
    unused = (
        [p == 0 for p in held]
        if told is None or told.numel() != len(q_lens)
        else (told < 0).tolist()
    )
    pairs = zip(q_lens, unused, strict=True)
    return frozenset(b for b, (q_len, is_unused) in enumerate(pairs) if q_len == 0 and is_unused)


def _lens(found: Lens | None) -> Lens | None:
    """Lengths; None where one of them is negative and so none (the indptrs' own invariants say so)."""
    return None if found is None or min(found, default=0) < 0 else found


def diffs(indptr: Tensor | None, batch: int) -> Lens | None:
    """Segment lengths of the first ``batch`` requests; None where there are not so many."""
    if indptr is None or indptr.numel() < batch + 1:
        return None
    ends = indptr[: batch + 1].long().tolist()
    return [end - start for start, end in pairwise(ends)]


def batch_counts(call: Call) -> dict[str, int]:
    """Requests that each field speaks of, those with room for more apart."""
    known = call.known()
    counts = {name: int(known[name].shape[0]) for name in PER_REQUEST if name in known}
    return counts | ({"batch_size": call.batch_size} if call.batch_size is not None else {})


def room_counts(call: Call) -> dict[str, int]:
    """Requests that each indptr and table has room for."""
    known = call.known()
    room = {name: max(int(known[name].numel()) - 1, 0) for name in INDPTRS if name in known}
    return room | ({"bias": int(call.bias.shape[0])} if call.bias is not None else {})


def batch_of(call: Call) -> int:
    """Requests of the call."""
    if call.batch_size is not None:
        return call.batch_size
    counts = batch_counts(call)
    if counts:
        return next(iter(counts.values()))
    room = next(iter(room_counts(call).values()), 0)
    return _used(call, room) if call.is_captured else room


def _used(call: Call, room: int) -> int:
    """Requests of fixed buffers up to the last that has rows; those behind it are unused.

    A prefix alone makes no request, but it decides between fields that disagree.
    """
    ends = [_end(t) for t in (call.qo_indptr, call.mask_indptr, call.byte_indptr) if t is not None]
    prefixes = 0 if call.kv_indptr is None else _end(call.kv_indptr)
    return min(prefixes if prefixes in ends or not ends else max(ends), room)


def _end(indptr: Tensor) -> int:
    """Requests up to the last with a segment that is not empty."""
    owned = indptr.diff().nonzero()
    return int(owned[-1]) + 1 if owned.numel() else 0


def row_counts(call: Call) -> dict[str, int]:
    """Query rows that each field of one entry a row speaks of, the layout's widths apart."""
    known = call.known()
    names = ("positions", "out_cache_loc", "input_ids", "target_ids", "words")
    counts = {name: int(known[name].shape[0]) for name in names if name in known}
    return ({"num_rows": call.num_rows} if call.num_rows is not None else {}) | counts


def total_rows(call: Call) -> int | None:
    """Query rows of the call; None where fixed buffers hide it or nothing tells."""
    counts = row_counts(call)
    if call.is_captured or not counts:
        return None
    return Counter(counts.values()).most_common(1)[0][0]  # ties: the first named


def width_of_segment(length: int, prefix_len: int) -> int | None:
    """The only width that a mask segment of ``length`` entries fits; None where none does.

    ``q * (p + q)`` grows with q, so there is at most one.
    """
    if length <= 0 or prefix_len < 0:
        return None
    width = (isqrt(prefix_len * prefix_len + 4 * length) - prefix_len) // 2
    return width if width > 0 and index.mask_len(prefix_len, width) == length else None


def uniform_width(total: int, prefix_lens: Lens) -> int | None:
    """The only width, alike in all requests, that a whole mask of ``total`` entries fits."""
    if total <= 0 or not prefix_lens or min(prefix_lens) < 0:
        return None
    batch, entries = len(prefix_lens), sum(prefix_lens)
    width = (isqrt(entries * entries + 4 * batch * total) - entries) // (2 * batch)
    fits = sum(index.mask_len(p, width) for p in prefix_lens) == total
    return width if width > 0 and fits else None


def ancestors(parents: Tensor) -> Tensor:
    """``[rows, rows]`` bool: column j is row i itself or an ancestor; parents must precede."""
    seen = torch.eye(parents.shape[0], dtype=torch.bool)
    jump = parents.long()  # the 1st, 2nd, 4th, ... ancestor; seen holds as many
    while bool((live := jump >= 0).any()):
        seen[live] |= seen[jump[live]]
        jump = torch.where(live, jump[jump.clamp(min=0)], -1)
    return seen


def tree_rows(call: Call, request: int) -> int | None:
    """Real nodes of a request whose parents can be followed; None where they cannot.

    Where they are not counted they end before the first row, the root apart, without a parent.
    """
    if call.parents is None or request >= call.parents.shape[0]:
        return None
    if call.num_nodes is None:
        ends = (call.parents[request, 1:] < 0).nonzero().flatten()
        nodes = 1 + int(ends[0]) if ends.numel() else int(call.parents.shape[1])
    elif request >= call.num_nodes.numel():
        return None
    else:
        nodes = int(call.num_nodes[request])
    if not 1 <= nodes <= call.parents.shape[1]:
        return None
    parents = call.parents[request, :nodes].long()
    rows = torch.arange(nodes)
    sound = int(parents[0]) == -1 and bool(((parents >= 0) & (parents < rows))[1:].all())
    return nodes if sound else None


def _prefix_lens(call: Call, batch: int) -> Lens | None:
    """The call's own prefix lengths, else ``kv_indptr``'s unless more fields agree on others."""
    committed = _own_prefix_lens(call, batch)
    if committed is not None:
        return committed
    found = diffs(call.kv_indptr, batch)
    widths = _own_lens(call.q_lens, batch) or diffs(call.qo_indptr, batch)
    if found is None or not widths or min(widths) < 1:
        return found
    for other in (_by_roots(call, widths), prefixes_of_segments(call, widths)):
        if other is None or other == found:
            continue
        if _is_windowed(call, other, found):
            continue
        if _votes(call, other, found, widths) > 1 + _votes(call, found, found, widths):
            return other
    return found


def _by_roots(call: Call, widths: Lens) -> Lens | None:
    """Prefix lengths that the roots' positions tell."""
    starts = list(accumulate(widths, initial=0))
    if call.positions is None or starts[-1] > call.positions.numel():
        return None
    lens = [int(call.positions[start]) for start in starts[:-1]]
    return lens if min(lens) >= 0 else None


def prefixes_of_segments(call: Call, widths: Lens) -> Lens | None:
    """Prefix lengths over which rows of these widths fill the segments of ``mask_indptr``."""
    segments = diffs(call.mask_indptr, len(widths))
    if segments is None or min(widths, default=0) < 1:
        return None
    pairs = list(zip(segments, widths, strict=True))
    if any(length % q or length // q < q for length, q in pairs):
        return None
    return [length // q - q for length, q in pairs]


class Window(NamedTuple):
    """A window that may have cut prefixes."""

    size: int
    cut: list[int]
    """Requests that are longer."""
    is_sure: bool
    """Two different lengths were cut to one. Else whatever made one length less than the others' looks so."""


def window_of(whole: Lens, cut: Lens) -> Window | None:
    """The window that cuts every prefix of ``whole`` to ``cut``; None where there is none.

    Two requests at least must speak for it: one short enough to stay, or two cut to one length.
    """
    cuts = [b for b, (w, c) in enumerate(zip(whole, cut, strict=True)) if w != c]
    size = cut[cuts[0]] if cuts else 0
    if not cuts or any(min(w, size) != c for w, c in zip(whole, cut, strict=True)):
        return None
    is_sure = len({whole[b] for b in cuts}) > 1
    return Window(size, cuts, is_sure) if len(cuts) < len(whole) or is_sure else None


def _votes(call: Call, prefixes: Lens, found: Lens, widths: Lens) -> int:
    """Fields that bear these prefix lengths out, ``kv_indptr``'s own ``found`` apart."""
    segments = [index.mask_len(p, q) for p, q in zip(prefixes, widths, strict=True)]
    packed = [index.packed_len(bits) for bits in segments]
    said = (
        _by_roots(call, widths) == prefixes,
        diffs(call.mask_indptr, len(widths)) == segments,
        diffs(call.byte_indptr, len(widths)) == packed,
        prefixes != found and _slots_are(call, sum(prefixes), sum(found)),
        not (_lists(call, sum(found)) or _may_be_cut(prefixes, found))
        and mask_is(call, widths, prefixes),
        prefixes == [kv - q for kv, q in zip(found, widths, strict=True)]
        and _ends_in_tree(call, widths),
    )
    return sum(said)


def _is_windowed(call: Call, whole: Lens, found: Lens) -> bool:
    """Whether ``kv_indptr`` is what a window leaves of these lengths, and the slots are as many.

    Fixed buffers hide how many there are; one length alone that was cut is then no window's.
    """
    window = window_of(whole, found)
    if window is None:
        return False
    if call.kv_indices is None or call.is_captured:
        return window.is_sure
    return _lists(call, sum(found))


def _slots_are(call: Call, entries: int, claimed: int) -> bool:
    """Whether an eager call lists just ``entries`` slots, fewer than ``kv_indptr`` claims."""
    if call.kv_indices is None or call.is_captured:
        return False
    return call.kv_indices.numel() == entries < claimed


def _may_be_cut(whole: Lens, found: Lens) -> bool:
    """Whether some window leaves ``found`` of these prefix lengths, or all of them."""
    return all(f == min(w, max(found)) for w, f in zip(whole, found, strict=True))


def _lists(call: Call, entries: int) -> bool:
    """Whether an eager call lists just ``entries`` slots."""
    slots = None if call.is_captured else call.kv_indices
    return slots is not None and slots.numel() == entries


def _ends_in_tree(call: Call, widths: Lens) -> bool:
    """Whether each request's slots end in those of its tree, as in FlashInfer's convention."""
    if call.kv_indices is None or call.out_cache_loc is None or call.kv_indptr is None:
        return False
    starts = accumulate(widths, initial=0)
    ends = call.kv_indptr[1 : len(widths) + 1].long().tolist()
    return all(
        torch.equal(
            call.kv_indices[max(end - q, 0) : max(end, 0)].long(),
            call.out_cache_loc[row : row + q].long(),
        )
        for end, row, q in zip(ends, starts, widths, strict=False)
    )


def _own_lens(lens: Tensor | None, batch: int) -> Lens | None:
    """What the call says of itself, where that can be lengths."""
    if lens is None or lens.numel() != batch or bool((lens < 0).any()):
        return None
    return [int(n) for n in lens.tolist()]


def _own_prefix_lens(call: Call, batch: int) -> Lens | None:
    """The call's own prefix lengths; under capture an unused request, whose length is negative, has none."""
    lens = call.prefix_lens
    return _own_lens(lens.clamp(min=0) if lens is not None and call.is_captured else lens, batch)


def _q_lens(call: Call, batch: int, prefix_lens: Lens | None) -> Lens | None:
    """The widths that the evidence bears out, ``qo_indptr``'s own before any other."""
    asked = _own_lens(call.q_lens, batch)
    if asked is not None:
        return asked
    own = diffs(call.qo_indptr, batch)
    starts = _by_starts(call, batch, own, prefix_lens)
    alike = own == _by_segments(call, batch, prefix_lens) and written_rows(call) == sum(own or [])
    if own and alike and starts in (None, own):
        return own  # a node count that asks for more rows is then the wrong one
    possible: list[Lens] = []
    for widths in _candidates(call, batch, prefix_lens, own, starts):
        if widths not in possible and _bears_out(call, widths):
            possible.append(widths)
    if not possible:
        return own
    if len(possible) < 2:
        return possible[0]
    trees = [_tree(call, b) for b in range(batch)]
    return max(
        possible, key=lambda widths: _read_right(call, widths, prefix_lens, trees)
    )  # ties: the first


def _candidates(
    call: Call, batch: int, prefix_lens: Lens | None, own: Lens | None, starts: Lens | None
) -> Iterator[Lens]:
    """Widths that some field speaks for, the most trusted first."""
    if batch == 0:
        return
    total = total_rows(call)
    by_mask = _by_segments(call, batch, prefix_lens)
    ended = _ended(call, own or [])
    if own is not None and prefix_lens is not None:
        yield from _by_written(call, own, [by_mask, starts, ended], prefix_lens)
    for widths in (by_mask, starts):
        if own and widths and written_rows(call) == sum(widths) != sum(own):
            yield widths
    if own and starts and prefix_lens and _slots_begin(call, starts, prefix_lens):
        yield starts
    if own is not None and own == by_mask and total is None:
        by_length = _by_length(call, Sizes(batch, own, prefix_lens))
        if by_length is not None:
            yield by_length
    if own is not None:
        yield own
    if ended is not None:
        yield ended
    if by_mask is not None:
        yield by_mask
    nodes = _own_lens(call.num_nodes, batch)
    rows = written_rows(call) if total is None else total
    if nodes is not None and rows == sum(nodes):  # ragged, without padding
        yield nodes
    if starts is not None:
        yield starts
    if total and total % batch == 0:
        alike = [total // batch] * batch
        if _no_other(call, alike, prefix_lens) or (own and _may_be(call, alike, own, prefix_lens)):
            yield alike
    tree = call.parents if call.parents is not None else call.token_ids
    if tree is not None and (own is not None or rows == batch * tree.shape[1]):
        yield [int(tree.shape[1])] * batch


def _no_other(call: Call, alike: Lens, prefix_lens: Lens | None) -> bool:
    """Whether so many rows leave no other widths: no request can have more, or the mask makes sense so."""
    most = [call.max_q_len, None if call.budget is None else index.q_len_of(call.budget)]
    if len(alike) == 1 or alike[0] in most:
        return True
    if call.custom_mask is None or prefix_lens is None:
        return False
    whole = Sizes(len(alike), alike, prefix_lens).mask_starts[-1] == call.custom_mask.numel()
    return whole and _mask_sound(call.custom_mask, alike, prefix_lens)


def _may_be(call: Call, alike: Lens, own: Lens, prefix_lens: Lens | None) -> bool:
    """Whether nothing speaks against these widths in place of others that were claimed, as alike as they."""
    if len(set(own)) > 1 or prefix_lens is None:
        return False
    if call.custom_mask is not None:
        ends = {Sizes(len(own), widths, prefix_lens).mask_starts[-1] for widths in (alike, own)}
        if call.custom_mask.numel() not in ends:
            return False
    return call.positions is None or _by_roots(call, alike) == prefix_lens


def counted_alone(call: Call, sizes: Sizes) -> bool:
    """Whether the widths are known by the number of rows alone, taken as shared alike."""
    widths, total = sizes.q_lens or [], total_rows(call)
    tree = call.parents if call.parents is not None else call.token_ids
    known = [_own_lens(call.q_lens, sizes.batch), diffs(call.qo_indptr, sizes.batch)]
    known += [_own_lens(call.num_nodes, sizes.batch)]
    if total is None or widths in known or total != sum(widths) or len(set(widths)) > 1:
        return False
    if tree is not None and tree.shape[1] == widths[0]:
        return False
    by_starts = None if sizes.prefix_lens is None else _begun(call, sizes.prefix_lens, total)
    return by_starts != widths and not _no_other(call, widths, sizes.prefix_lens)


def _by_starts(call: Call, batch: int, own: Lens | None, prefix_lens: Lens | None) -> Lens | None:
    """Widths that slots and positions tell where the claimed ones cannot be right or begin elsewhere."""
    total = total_rows(call)
    rows = written_rows(call) if total is None else total
    if rows is None and prefix_lens and prefix_lens[-1] == 0:
        rows = _slots_end(call)  # rows at position 0 may be the last request's own
    if rows is None or prefix_lens is None:
        return None
    if own and _bears_out(call, own):
        if min(own) < 1:
            return None
        if (
            _by_roots(call, own) == prefix_lens
            and _slots_begin(call, own, prefix_lens) is not False
        ):
            return None
    return (
        _by_root_slots(call, prefix_lens, rows)
        or _begun(call, prefix_lens, rows)
        or _by_positions(call, batch, prefix_lens)
    )


def _ended(call: Call, own: Lens) -> Lens | None:
    """The claimed widths with the last ending where fixed buffers' rows do, which may be padding."""
    rows = written_rows(call)
    last = 0 if rows is None or not own else rows - sum(own[:-1])
    return [*own[:-1], last] if last > 0 and last != own[-1] else None


def _root_slots(call: Call, prefix_lens: Lens) -> Lens | None:
    """Slots that the table gives the roots."""
    table = call.slot_table
    if table is None or call.out_cache_loc is None or len(prefix_lens) > table.shape[0]:
        return None
    if not 0 <= min(prefix_lens, default=0) <= max(prefix_lens, default=0) < table.shape[1]:
        return None
    return [int(table[b, p]) for b, p in enumerate(prefix_lens)]


def _slots_begin(call: Call, widths: Lens, prefix_lens: Lens) -> bool | None:
    """Whether the roots are written where the table has them; None where nothing tells."""
    roots, starts = _root_slots(call, prefix_lens), list(accumulate(widths, initial=0))
    if roots is None or call.out_cache_loc is None:
        return None
    return starts[-1] <= call.out_cache_loc.numel() and roots == [
        int(call.out_cache_loc[start]) for start in starts[:-1]
    ]


def _by_root_slots(call: Call, prefix_lens: Lens, rows: int) -> Lens | None:
    """Widths with which each request begins in its root's slot and at its root's position."""
    roots = _root_slots(call, prefix_lens)
    if roots is None or call.out_cache_loc is None or len(set(roots)) < len(roots):
        return None
    found = [(call.out_cache_loc[:rows] == root).nonzero().flatten().tolist() for root in roots]
    if any(len(at) != 1 for at in found):
        return None
    ends = [*(at[0] for at in found), rows]
    widths = [end - start for start, end in pairwise(ends)]
    sound = ends[0] == 0 and min(widths, default=0) > 0
    return widths if sound and _by_roots(call, widths) == prefix_lens else None


def _begun(call: Call, prefix_lens: Lens, rows: int) -> Lens | None:
    """The only widths with which every request begins at its root's position; None where more do.

    A real row is at most one deeper than the deepest before it; behind them may come padding, at the root's
    position or at 0.
    """
    if call.positions is None or call.positions.numel() < rows:
        return None
    positions = call.positions[:rows].tolist()
    lasts = {p: _last_ends(positions, p) for p in set(prefix_lens)}
    ways = [torch.zeros(rows + 1, dtype=torch.int64)]  # of the requests so far to end at each row
    ways[0][0] = 1
    for prefix_len in prefix_lens:
        last = lasts[prefix_len]
        begun = torch.where(last > 0, ways[-1][:rows], 0)
        change = torch.nn.functional.pad(begun, (1, 1))
        ended = change.index_add(0, last + 1, -begun).cumsum(0)
        ways.append(ended[: rows + 1].clamp(max=2))  # more than one is all that counts
    if int(ways[-1][rows]) != 1:
        return None
    ends = [rows]
    for prefix_len, before in zip(reversed(prefix_lens), reversed(ways[:-1]), strict=True):
        begun = (before[: ends[-1]] > 0) & (lasts[prefix_len][: ends[-1]] >= ends[-1])
        ends.append(int(begun.nonzero()[0]))
    return [end - start for start, end in pairwise(reversed(ends))]


def _last_ends(positions: list[int], prefix_len: int) -> Tensor:
    """``[rows]`` where a request that starts at each row may end at last; 0: none starts there."""
    last = torch.zeros(len(positions), dtype=torch.int64)
    for start in [row for row, position in enumerate(positions) if position == prefix_len]:
        deepest, padding, end = prefix_len, False, start + 1
        for position in positions[start + 1 :]:
            if position in {prefix_len, 0}:
                padding = True
            elif padding or not prefix_len < position <= deepest + 1:
                break
            deepest, end = max(deepest, position), end + 1
        last[start] = end
    return last


def _by_positions(call: Call, batch: int, prefix_lens: Lens | None) -> Lens | None:
    """The only widths with which each request's positions begin where its rows do."""
    nodes = _own_lens(call.num_nodes, batch)
    rows = written_rows(call) if total_rows(call) is None else total_rows(call)
    if not nodes or rows is None or prefix_lens is None or call.positions is None:
        return None
    if call.depths is None or call.depths.shape[0] != batch or max(nodes) > call.depths.shape[1]:
        return None
    ways: dict[int, list[Lens]] = {0: [[]]}  # rows so far: widths so far, two ways at most
    for b, (count, prefix_len) in enumerate(zip(nodes, prefix_lens, strict=True)):
        right = index.position(prefix_len, call.depths[b, :count].long())
        longer: dict[int, list[Lens]] = {}
        for start, before in ways.items():
            if torch.equal(call.positions[start : start + count].long(), right):
                for width in range(count, call.depths.shape[1] + 1):
                    end = longer.setdefault(start + width, [])
                    end += [[*widths, width] for widths in before][: 2 - len(end)]
        ways = longer
    return ways[rows][0] if len(ways.get(rows, [])) == 1 else None


def _by_length(call: Call, claimed: Sizes) -> Lens | None:
    """The width, alike in all requests, of a mask whose length is not the claimed one."""
    if call.custom_mask is None or call.is_captured or claimed.prefix_lens is None:
        return None
    length = call.custom_mask.numel()
    width = uniform_width(length, claimed.prefix_lens)
    return None if width is None or length == claimed.mask_starts[-1] else [width] * claimed.batch


def _by_written(
    call: Call, own: Lens, others: Sequence[Lens | None], prefix_lens: Lens
) -> Iterator[Lens]:
    """Widths that the mask was written with, where it makes sense with those and none with the claimed ones.

    Every row sees itself, so in fixed buffers the last True entry ends the mask that was written. An eager
    mask must fill its segments; those alone decide where ``max_q_len`` is not of the claimed widths.
    """
    mask = call.custom_mask
    if not call.is_captured:
        by_mask, *by_rows = others
        by_mask = _by_bytes(call, prefix_lens) if mask is None else by_mask
        if call.max_q_len == max(own, default=0) != max(by_mask or own, default=0):
            by_mask = None
        for widths in (by_mask, *by_rows):
            if widths and widths != own and mask_is(call, widths, prefix_lens):
                yield widths
        return
    if mask is None or _mask_sound(mask, own, prefix_lens):
        return
    written = mask.nonzero()
    width = uniform_width(int(written[-1]) + 1 if written.numel() else 0, prefix_lens)
    if mask.numel() < Sizes(len(own), own, prefix_lens).mask_starts[-1]:
        width = None  # a buffer that is too small holds no whole mask
    for widths in ([width] * len(prefix_lens) if width else None, *others):
        if widths is not None and _mask_sound(mask, widths, prefix_lens):
            yield widths


def _by_bytes(call: Call, prefix_lens: Lens) -> Lens | None:
    """The only width, alike in all requests, that the segments of ``byte_indptr`` fit."""
    found = diffs(call.byte_indptr, len(prefix_lens))
    if found is None or min(prefix_lens, default=-1) < 0:
        return None
    fitting = [packed_widths(n, p) for n, p in zip(found, prefix_lens, strict=True)]
    common = set.intersection(*fitting)
    return [*common] * len(found) if len(common) == 1 else None


def packed_widths(found: int, prefix_len: int) -> set[int]:
    """Every width whose packed segment over this prefix has ``found`` bytes."""
    widths: set[int] = set()
    width = 1
    while (size := index.packed_len(index.mask_len(prefix_len, width))) <= found:
        widths |= {width} if size == found else set()
        width += 1
    return widths


def mask_is(call: Call, widths: Lens, prefix_lens: Lens) -> bool:
    """Whether the mask has just these segments, and makes sense with them; fixed buffers may be longer."""
    mask = (
        call.custom_mask if call.custom_mask is not None else _unpacked(call, widths, prefix_lens)
    )
    if mask is None or min(prefix_lens, default=0) < 0:
        return False
    end = Sizes(len(widths), widths, prefix_lens).mask_starts[-1]
    whole = bool(call.is_captured) or mask.numel() == end
    return whole and _mask_sound(mask, widths, prefix_lens)


def _unpacked(call: Call, widths: Lens, prefix_lens: Lens) -> Tensor | None:
    """The packed mask as a flat one of these sizes; None where it does not end with them."""
    segments = [index.mask_len(p, q) for p, q in zip(prefix_lens, widths, strict=True)]
    sizes = [index.packed_len(bits) for bits in segments]
    if call.packed is None or call.packed.numel() != sum(sizes):
        return None
    bits = (call.packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    parts = [part.flatten()[:n] for part, n in zip(bits.split(sizes), segments, strict=True)]
    return torch.cat(parts).bool()


def mask_fits(call: Call, widths: Lens, prefix_lens: Lens) -> bool:
    """Whether an eager mask has just so many entries or bytes."""
    if call.is_captured or min(*widths, *prefix_lens, 0) < 0:
        return False
    segments = [index.mask_len(p, q) for p, q in zip(prefix_lens, widths, strict=True)]
    if call.custom_mask is not None:
        return bool(call.custom_mask.numel() == sum(segments))
    packed: int = sum(index.packed_len(bits) for bits in segments)
    return call.packed is not None and call.packed.numel() == packed


def written_rows(call: Call) -> int | None:
    """Rows that fixed buffers were filled with: where the slots end, if the positions end there too.

    Where the pad slot is not known, a tail is told by its repeating one slot.
    """
    end, positions = _slots_end(call), None if call.positions is None else call.positions.nonzero()
    if end is None or positions is None or not positions.numel() or int(positions[-1]) + 1 != end:
        return None
    return end


def _slots_end(call: Call) -> int | None:
    """Rows up to the last of fixed buffers that has a slot of its own."""
    if not call.is_captured or call.out_cache_loc is None:
        return None
    last = call.out_cache_loc[-2:].tolist()
    tail = last[-1] if last and last[0] == last[-1] else -1
    pad = tail if call.pad_slot is None else call.pad_slot
    slots = (call.out_cache_loc != pad).nonzero()
    return int(slots[-1]) + 1 if slots.numel() else None


def rows_told(call: Call) -> bool:
    """Whether something beside ``qo_indptr`` and the mask tells how many rows an eager call has."""
    names = ("q_lens", "parents", "token_ids", "num_nodes")
    return total_rows(call) is not None or any(getattr(call, name) is not None for name in names)


def prefixes_told(call: Call, sizes: Sizes) -> bool:
    """Whether something beside ``kv_indptr`` and the mask bears the prefix lengths out."""
    own = sizes.prefix_lens or []
    rooted = _by_roots(call, sizes.q_lens) if sizes.q_lens else None
    return call.prefix_lens is not None or rooted == own


def width_attested(call: Call, sizes: Sizes) -> bool:
    """Whether the widths are known by more than one indptr's word against another's.

    An eager call's rows can be counted. Fixed buffers hide them, and then something else must tell.
    """
    if sizes.q_lens is None:
        return False
    tree = call.parents if call.parents is not None else call.token_ids
    if not call.is_captured or call.q_lens is not None:
        return True
    if tree is not None and set(sizes.q_lens) == {int(tree.shape[1])}:
        return True
    if written_rows(call) == sum(sizes.q_lens):
        return True
    if call.custom_mask is None or sizes.prefix_lens is None:
        return False
    return _mask_sound(call.custom_mask, sizes.q_lens, sizes.prefix_lens)


def _mask_sound(mask: Tensor, widths: Lens, prefix_lens: Lens) -> bool:
    """Whether every row, read with these widths, sees its prefix, itself and no later row."""
    start = 0
    for width, prefix_len in zip(widths, prefix_lens, strict=True):
        length = index.mask_len(prefix_len, width)
        rows = mask[start : start + length].bool()
        if rows.numel() < length or width < 0:
            return False
        seen = rows.reshape(width, index.kv_len(prefix_len, width))
        tree = seen[:, prefix_len:]
        if not seen[:, :prefix_len].all() or not tree.diagonal().all() or tree.triu(1).any():
            return False
        start += length
    return True


def _by_segments(call: Call, batch: int, prefix_lens: Lens | None) -> Lens | None:
    """Widths that the segments of ``mask_indptr`` fit."""
    segments = diffs(call.mask_indptr, batch)
    if segments is None or prefix_lens is None:
        return None
    widths = [width_of_segment(s, p) for s, p in zip(segments, prefix_lens, strict=True)]
    fitting = [width for width in widths if width is not None]
    return fitting if len(fitting) == batch else None


def _bears_out(call: Call, widths: Lens) -> bool:
    """Whether the rows of the call and of its tree allow these widths."""
    if any(width < 0 for width in widths):
        return False
    total = total_rows(call)
    if total is not None and sum(widths) != total:
        return False
    for rows in (call.token_ids, call.parents):
        if rows is not None and max(widths, default=0) > rows.shape[1]:
            return False
    if call.num_nodes is not None and call.num_nodes.numel() == len(widths):
        rows = call.parents if call.parents is not None else call.token_ids
        counts = call.num_nodes.tolist()
        sane = all(n >= 1 and (rows is None or n <= rows.shape[1]) for n in counts)
        idle = idle_requests(call, widths)
        pairs = enumerate(zip(counts, widths, strict=True))
        return not sane or all(n <= width or b in idle for b, (n, width) in pairs)
    return True


def _tree(call: Call, b: int) -> Tensor | None:
    """The ancestors of request b's real nodes; None where its parents cannot be followed."""
    nodes = tree_rows(call, b)
    if nodes is None or call.parents is None:
        return None
    return ancestors(call.parents[b, :nodes])


def _read_right(
    call: Call, widths: Lens, prefix_lens: Lens | None, trees: list[Tensor | None]
) -> int:
    """How many of the masks and the positions, read with these widths, are those of the trees."""
    if not prefix_lens:
        return 0
    masks = _masks_read(call, widths, prefix_lens, trees)
    return masks + _positions_read(call, widths, prefix_lens)


def _masks_read(call: Call, widths: Lens, prefix_lens: Lens, trees: list[Tensor | None]) -> int:
    """Requests whose tree the flat mask's rows are, if they begin where these widths put them."""
    if call.custom_mask is None:
        return 0
    right, start = 0, 0
    for width, prefix_len, tree in zip(widths, prefix_lens, trees, strict=True):
        columns, first = index.kv_len(prefix_len, width), start
        start += index.mask_len(prefix_len, width)
        nodes = width + 1 if tree is None else tree.shape[0]
        if tree is None or width < nodes or first + nodes * columns > call.custom_mask.numel():
            continue
        seen = call.custom_mask[first : first + nodes * columns].reshape(nodes, columns).bool()
        below = seen[:, prefix_len : prefix_len + nodes]
        right += bool(seen[:, :prefix_len].all()) and torch.equal(below, tree)
    return right


def _positions_read(call: Call, widths: Lens, prefix_lens: Lens) -> bool:
    """Whether every request's positions are where its rows would begin."""
    if call.positions is None or call.depths is None or call.num_nodes is None:
        return False
    if not call.depths.shape[0] == call.num_nodes.numel() == len(widths):
        return False
    starts = accumulate(widths, initial=0)
    counts = call.num_nodes.tolist()
    return all(
        torch.equal(
            call.positions[start : start + nodes].long(),
            index.position(prefix_len, call.depths[b, :nodes].long()),
        )
        for b, (start, nodes, prefix_len) in enumerate(
            zip(starts, counts, prefix_lens, strict=False)
        )
    )

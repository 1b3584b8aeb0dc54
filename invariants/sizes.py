"""The true sizes of a call: its width and prefix of each request, by the evidence it carries.

A width that comes from configuration is often written into ``qo_indptr``, ``mask_indptr`` and
``max_q_len`` alike, and then they agree with one another. What they cannot agree with is the call
itself: the rows of its query, its positions, its tree, its mask. The widths used here are
``qo_indptr``'s as long as that evidence bears them out, and the evidence's own where it does not.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt

import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.spec import index

Lens = list[int]


@dataclass(frozen=True)
class Sizes:
    """Lengths of each request; None where the call does not say."""

    batch: int
    """Requests of the call; fixed buffers may hold more."""
    q_lens: Lens | None
    prefix_lens: Lens | None

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
    """Weigh the evidence of one call."""
    batch = batch_of(call)
    prefix_lens = _lens(_prefix_lens(call, batch))
    return Sizes(batch, _lens(_q_lens(call, batch, prefix_lens)), prefix_lens)


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
    per_request = (
        "num_nodes", "token_ids", "parents", "depths", "scores", "q_lens", "prefix_lens",
        "root_token_ids", "nodes", "num_accepted", "bonus", "committed_lens", "src", "dst", "emitted",
    )  # fmt: skip
    known = call.known()
    counts = {name: int(known[name].shape[0]) for name in per_request if name in known}
    return counts | ({"batch_size": call.batch_size} if call.batch_size is not None else {})


def room_counts(call: Call) -> dict[str, int]:
    """Requests that each indptr and table has room for."""
    known = call.known()
    names = ("qo_indptr", "kv_indptr", "mask_indptr", "byte_indptr")
    room = {name: int(known[name].numel()) - 1 for name in names if name in known}
    return room | ({"bias": int(call.bias.shape[0])} if call.bias is not None else {})


def batch_of(call: Call) -> int:
    """Requests of the call."""
    if call.batch_size is not None:
        return call.batch_size
    counts = batch_counts(call)
    if counts:
        return next(iter(counts.values()))
    room = max(next(iter(room_counts(call).values()), 0), 0)
    return _used(call, room) if call.is_captured else room


def _used(call: Call, room: int) -> int:
    """Requests of fixed buffers up to the last that owns anything; those behind it are unused."""
    owned = [0]
    for indptr in (call.qo_indptr, call.kv_indptr, call.mask_indptr, call.byte_indptr):
        if indptr is not None:
            owned += (indptr.diff().nonzero().flatten() + 1).tolist()
    return min(max(owned), room)


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
    """Real nodes of a request whose parents can be followed; None where they cannot."""
    if call.parents is None or call.num_nodes is None:
        return None
    if request >= min(call.parents.shape[0], call.num_nodes.numel()):
        return None
    nodes = int(call.num_nodes[request])
    if not 1 <= nodes <= call.parents.shape[1]:
        return None
    parents = call.parents[request, :nodes].long()
    rows = torch.arange(nodes)
    sound = int(parents[0]) == -1 and bool(((parents >= 0) & (parents < rows))[1:].all())
    return nodes if sound else None


def _prefix_lens(call: Call, batch: int) -> Lens | None:
    """The call's own prefix lengths, else ``kv_indptr``'s, less the tree's rows where it counts them."""
    committed = _own_lens(call.prefix_lens, batch)
    if committed is not None:
        return committed
    lens = diffs(call.kv_indptr, batch)
    widths = diffs(call.qo_indptr, batch)
    if lens is None or widths is None or not counts_tree(call, lens, widths):
        return lens
    return [length - width for length, width in zip(lens, widths, strict=True)]


def _own_lens(lens: Tensor | None, batch: int) -> Lens | None:
    """What the call says of itself, where that can be lengths."""
    if lens is None or lens.numel() != batch or bool((lens < 0).any()):
        return None
    return [int(n) for n in lens.tolist()]


def counts_tree(call: Call, kv_lens: Lens, q_lens: Lens) -> bool:
    """Whether ``kv_indptr`` counts the tree's own entries too, as FlashInfer's does.

    Two signs are asked for: the roots' positions are those of the shorter prefix, and the mask's
    segments or the slots themselves (``kv_indices`` then ends in ``out_cache_loc``) say so as well.
    """
    prefixes = [kv - q for kv, q in zip(kv_lens, q_lens, strict=True)]
    starts = list(accumulate(q_lens, initial=0))
    if not prefixes or min(prefixes) < 0 or min(q_lens) < 1 or call.positions is None:
        return False
    if starts[-1] > call.positions.numel():
        return False
    if [int(call.positions[start]) for start in starts[:-1]] != prefixes:
        return False
    segments = [index.mask_len(p, q) for p, q in zip(prefixes, q_lens, strict=True)]
    if diffs(call.mask_indptr, len(prefixes)) == segments:
        return True
    if diffs(call.byte_indptr, len(prefixes)) == [index.packed_len(bits) for bits in segments]:
        return True
    if call.kv_indices is None or call.out_cache_loc is None or call.kv_indptr is None:
        return False
    ends = call.kv_indptr[1 : len(prefixes) + 1].long().tolist()
    pieces = zip(ends, starts, q_lens, strict=False)
    return all(
        torch.equal(
            call.kv_indices[max(end - q, 0) : end].long(), call.out_cache_loc[row : row + q].long()
        )
        for end, row, q in pieces
    )


def _q_lens(call: Call, batch: int, prefix_lens: Lens | None) -> Lens | None:
    """The widths that the evidence bears out, ``qo_indptr``'s own before any other."""
    asked = _own_lens(call.q_lens, batch)
    if asked is not None:
        return asked
    own = diffs(call.qo_indptr, batch)
    possible = [
        widths for widths in _candidates(call, batch, prefix_lens, own) if _bears_out(call, widths)
    ]
    if not possible:
        return own
    return max(
        possible, key=lambda widths: _read_right(call, widths, prefix_lens)
    )  # ties: the first


def _candidates(
    call: Call, batch: int, prefix_lens: Lens | None, own: Lens | None
) -> Iterator[Lens]:
    """Widths that some field speaks for, the most trusted first."""
    if batch == 0:
        return
    total = total_rows(call)
    by_mask = _by_segments(call, batch, prefix_lens)
    if own is not None and prefix_lens is not None:
        written = _by_written(call, own, prefix_lens)
        if written is not None:
            yield written
    if own is not None and own == by_mask and total is None:
        by_length = _by_length(call, Sizes(batch, own, prefix_lens))
        if by_length is not None:
            yield by_length
    if own is not None:
        yield own
    if by_mask is not None:
        yield by_mask
    if total is not None and total % batch == 0 and total > 0:
        yield [total // batch] * batch
    tree = call.parents if call.parents is not None else call.token_ids
    if tree is not None:
        yield [int(tree.shape[1])] * batch


def _by_length(call: Call, claimed: Sizes) -> Lens | None:
    """The width, alike in all requests, of a mask whose length is not the claimed one."""
    if call.custom_mask is None or call.is_captured or claimed.prefix_lens is None:
        return None
    length = call.custom_mask.numel()
    width = uniform_width(length, claimed.prefix_lens)
    return None if width is None or length == claimed.mask_starts[-1] else [width] * claimed.batch


def _by_written(call: Call, own: Lens, prefix_lens: Lens) -> Lens | None:
    """The width, alike in all requests, that fixed buffers' mask was written with.

    Every row sees itself, so the last True entry ends the mask that was written. It counts only where
    the mask makes sense with that width and makes none with the claimed ones.
    """
    if not call.is_captured or call.custom_mask is None:
        return None
    written = call.custom_mask.nonzero()
    width = uniform_width(int(written[-1]) + 1 if written.numel() else 0, prefix_lens)
    if width is None:
        return None
    widths = [width] * len(prefix_lens)
    sound = _mask_sound(call.custom_mask, widths, prefix_lens)
    return widths if sound and not _mask_sound(call.custom_mask, own, prefix_lens) else None


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
        return not sane or all(n <= width for n, width in zip(counts, widths, strict=True))
    return True


def _read_right(call: Call, widths: Lens, prefix_lens: Lens | None) -> int:
    """How many of the mask and the positions, read with these widths, are those of the trees."""
    if not prefix_lens:
        return 0
    return _mask_reads(call, widths[0], prefix_lens[0]) + _positions_read(call, widths, prefix_lens)


def _mask_reads(call: Call, width: int, prefix_len: int) -> bool:
    """Whether the flat mask's first rows are those of the first request's tree."""
    nodes = tree_rows(call, 0)
    if call.custom_mask is None or call.parents is None or nodes is None:
        return False
    columns = index.kv_len(prefix_len, width)
    if width < nodes or nodes * columns > call.custom_mask.numel():
        return False
    seen = call.custom_mask[: nodes * columns].reshape(nodes, columns).bool()
    tree = seen[:, prefix_len : prefix_len + nodes]
    return bool(seen[:, :prefix_len].all()) and torch.equal(
        tree, ancestors(call.parents[0, :nodes])
    )


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

"""What a call's mask lets each row of a request see, as a kernel reads it, beside what the row must see."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ddtree.invariants import mask as of_mask
from ddtree.invariants.call import Call
from ddtree.invariants.sizes import Sizes, ancestors, diffs, tree_rows
from ddtree.pictures.pages.markup import ranges
from ddtree.pictures.view import Cell

Bits = NDArray[np.bool_]
MOST_BITS = 2**26
"""Bits of one request that are looked at: a broken width may claim any number."""


@dataclass(frozen=True)
class Seen:
    """One request: ``rows`` query rows of ``prefix`` and then ``rows`` tree columns.

    ``rows`` and ``prefix`` are the larger of what is right and what the call claims, so that nothing is cut.
    """

    request: int
    rows: int
    prefix: int
    q_len: int
    """Right width, by the evidence of the call."""
    prefix_len: int
    num_nodes: int | None
    """None where the call holds no tree that can be followed."""
    judged: int
    """Rows whose bits are judged, from the first on: by the tree, or without one by the mask itself where
    that is sound if read at the right widths."""
    computed: int
    """Rows that the call computes, by its own ``qo_indptr``."""
    found: Bits
    must: Bits
    outside: int
    """Entries of these rows that lie past the end of the mask."""
    reading: str
    """How the mask was read."""

    @property
    def padding(self) -> range:
        """Rows that are padding, as far as that is known."""
        return range(self.rows if self.num_nodes is None else self.num_nodes, self.rows)

    @property
    def leaked(self) -> Bits:
        """Bits that are set and must not be."""
        return self._judged(self.found & ~self.must)

    @property
    def hidden(self) -> Bits:
        """Bits that must be set and are not."""
        return self._judged(~self.found & self.must)

    def codes(self) -> NDArray[np.int8]:
        """``Cell`` codes [rows, prefix + rows]."""
        is_tree = np.arange(self.found.shape[1]) >= self.prefix
        codes = np.where(self.found, np.where(is_tree, Cell.TREE, Cell.PREFIX), Cell.HIDDEN)
        codes[self.leaked] = Cell.WRONGLY_SEEN
        codes[self.hidden] = Cell.WRONGLY_HIDDEN
        return codes.astype(np.int8)

    def _judged(self, bits: Bits) -> Bits:
        bits = bits.copy()
        bits[self.judged :] = False
        return bits


def seen(call: Call, sizes: Sizes, b: int) -> Seen | None:
    """What request b's rows see; None where there is no mask, none that can be read, or one too large."""
    if sizes.q_lens is None or sizes.prefix_lens is None:
        return None
    q_len, prefix_len = sizes.q_lens[b], sizes.prefix_lens[b]
    own_q, own_prefix = diffs(call.qo_indptr, sizes.batch), diffs(call.kv_indptr, sizes.batch)
    computed = max(own_q[b], 0) if own_q else q_len
    held = max(own_prefix[b], 0) if own_prefix else prefix_len
    rows, prefix = max(q_len, computed), max(prefix_len, held)
    if rows == 0 or rows * (prefix + rows) > MOST_BITS:
        return None
    found = np.zeros((rows, prefix + rows), dtype=np.bool_)
    outside = 0
    if call.custom_mask is not None:
        start = sizes.mask_starts[b]
        if call.mask_indptr is not None and call.mask_indptr.numel() > b:
            start = int(call.mask_indptr[b])
        read, outside = _read_flat(call.custom_mask, start, computed, held)
        found[:computed, :held] = read[:, :held]
        found[:computed, prefix : prefix + computed] = read[:, held:]
        reading = (
            f"read as a kernel reads it: {computed} rows of {held} + {computed} entries, from entry {start} "
            "of custom_mask on"
        )
    else:
        form = next(of_mask.read(call, sizes, b), None)
        if form is None:
            return None
        columns = min(form.tree.shape[1], rows)
        found[:q_len, :prefix_len] = True if form.prefix is None else form.prefix.numpy()
        found[:q_len, prefix : prefix + columns] = form.tree[:, :columns].numpy()
        reading = f"read from the field {form.form}, {q_len} rows"
    nodes = tree_rows(call, b)
    must = np.zeros_like(found)
    judged = 0
    if nodes is not None and call.parents is not None:
        judged = nodes = min(nodes, rows)
        must[:nodes, :prefix_len] = True
        must[:nodes, prefix : prefix + nodes] = ancestors(call.parents[b, :nodes]).numpy()
    elif (own := _sound_mask(call, sizes, b)) is not None:
        judged = q_len
        must[:q_len, :prefix_len] = own[:, :prefix_len]
        must[:q_len, prefix : prefix + q_len] = own[:, prefix_len:]
    return Seen(
        request=b,
        rows=rows,
        prefix=prefix,
        q_len=q_len,
        prefix_len=prefix_len,
        num_nodes=nodes,
        judged=judged,
        computed=computed,
        found=found,
        must=must,
        outside=outside,
        reading=reading,
    )


def as_seen(views: dict[int, Seen | None], sets: Tensor, backend: str) -> dict[int, Seen | None]:
    """The views with what the rows of a backend saw in place of the mask that it was given.

    Args:
        views: every request of the call, in order.
        sets: ``[T, entries]`` as ``oracle.seen_sets`` gives them.
        backend: its name.
    """
    made: dict[int, Seen | None] = {}
    row = entry = 0
    for b, view in views.items():
        if view is None:
            return views  # where the next request begins is not known
        width = view.prefix + view.rows
        own = sets[row : row + view.rows].numpy()
        found = own[:, entry : entry + width] > 0
        if found.shape != view.found.shape:
            return views
        told = [f"drawn as {backend} saw it, decoded from its output"]
        others = np.delete(own, np.s_[entry : entry + width], axis=1)
        for rows, said in (
            ((others > 0).any(1), "also saw entries of other requests, which have no column here"),
            ((own < 0).any(1), "gave no mean of entries: what they saw is not known"),
        ):
            if rows.any():
                numbers = np.flatnonzero(rows).tolist()
                told.append(f"row{'s' * (len(numbers) > 1)} {ranges(numbers)} {said}")
        made[b] = replace(view, found=found, reading="; ".join(told), outside=0)
        row, entry = row + view.rows, entry + width
    return made


def _sound_mask(call: Call, sizes: Sizes, b: int) -> Bits | None:
    """The flat mask where the right widths put it, if rows then see prefix, self and no later row."""
    if call.custom_mask is None or sizes.q_lens is None or sizes.prefix_lens is None:
        return None
    q_len, prefix_len = sizes.q_lens[b], sizes.prefix_lens[b]
    bits, outside = _read_flat(call.custom_mask, sizes.mask_starts[b], q_len, prefix_len)
    tree = bits[:, prefix_len:]
    is_sound = bits[:, :prefix_len].all() and tree.diagonal().all() and not np.triu(tree, 1).any()
    return bits if is_sound and not outside else None


def _read_flat(mask: Tensor, start: int, rows: int, prefix: int) -> tuple[Bits, int]:
    """``[rows, prefix + rows]`` from ``start`` on; entries outside are False, and counted."""
    places = start + np.arange(rows * (prefix + rows))
    inside = (places >= 0) & (places < mask.numel())
    bits = np.zeros(places.shape, dtype=np.bool_)
    bits[inside] = mask.bool().numpy()[places[inside]]
    return bits.reshape(rows, prefix + rows), int((~inside).sum())

"""Kernels of layouts: of a verify pass, of a drafter's blocks, and of a pass's rows."""

import triton
import triton.language as tl

from ddtree.impl.index import block_start, kv_len, mask_len, position, row_offset, unused_row


@triton.jit
def _copy_slots(slots, into, prefix_len, BLOCK: tl.constexpr):
    """Copy a prefix's slots, shared among the programs of axis 1."""
    for first in range(
        block_start(tl.program_id(1), BLOCK), prefix_len, block_start(tl.num_programs(1), BLOCK)
    ):
        entry = first + tl.arange(0, BLOCK)
        slot = tl.load(slots + entry, mask=entry < prefix_len, other=-1)
        tl.store(into + entry, slot, mask=entry < prefix_len)


@triton.jit
def plan_kernel(
    depths, prefix_lens, slot_table, q_lens,  # [B, Q], [B], [B, max_context], [B] or None
    qo_indptr, kv_indptr, kv_indices, mask_indptr, positions, out_cache_loc,  # out
    batch, rows, max_context, table_stride,
    BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lay out one request. Every program adds up the lengths before it: no program waits.

    Programs of axis 1 share the copy of the prefix slots; the first also writes all else.
    """
    b = tl.program_id(0)
    share = tl.program_id(1)
    request = tl.arange(0, BATCH)
    prefix = tl.load(prefix_lens + request, mask=request < batch, other=-1).to(tl.int64)
    is_used = prefix >= 0
    # lengths that do not fit would become addresses outside
    prefix = tl.where(is_used, tl.minimum(prefix, max_context), 0)
    width = tl.full([BATCH], rows, tl.int64)
    if q_lens is not None:
        width = tl.load(q_lens + request, mask=request < batch, other=0).to(tl.int64)
        width = tl.minimum(tl.maximum(width, 0), rows)
    width = tl.where(is_used, width, 0)
    is_before = request < b
    is_mine = request == b
    kv_start = tl.sum(tl.where(is_before, prefix, 0), axis=0)
    prefix_len = tl.sum(tl.where(is_mine, prefix, 0), axis=0)
    slots = slot_table + row_offset(b.to(tl.int64), table_stride, 0)
    _copy_slots(slots, kv_indices + kv_start, prefix_len, BLOCK)

    if share == 0:
        q_start = tl.sum(tl.where(is_before, width, 0), axis=0)
        q_len = tl.sum(tl.where(is_mine, width, 0), axis=0)
        total = tl.sum(width, axis=0)
        masks = tl.where(is_used, mask_len(prefix, width), 0)
        mask_start = tl.sum(tl.where(is_before, masks, 0), axis=0)
        if b == 0:
            tl.store(qo_indptr, 0)
            tl.store(kv_indptr, 0)
            tl.store(mask_indptr, 0)
        tl.store(qo_indptr + b + 1, (q_start + q_len).to(tl.int32))
        tl.store(kv_indptr + b + 1, (kv_start + prefix_len).to(tl.int32))
        tl.store(mask_indptr + b + 1, mask_start + mask_len(prefix_len, q_len))

        row = tl.arange(0, ROWS)
        is_row = row < rows
        has_query = is_row & (row < q_len)
        depth = tl.load(depths + row_offset(b.to(tl.int64), rows, row), mask=has_query, other=0).to(
            tl.int64
        )
        entry = kv_len(prefix_len, row)
        slot = tl.load(slots + entry, mask=has_query & (entry < max_context), other=-1)
        # Rows without a query fill the tail: those of earlier requests come first.
        unused = unused_row(total, b.to(tl.int64), rows, q_start, row, q_len)
        into = tl.where(has_query, q_start + row, unused)
        tl.store(positions + into, tl.where(has_query, position(prefix_len, depth), 0), mask=is_row)
        tl.store(out_cache_loc + into, slot, mask=is_row)


@triton.jit
def plan_blocks_kernel(
    prefix_lens, limits, slot_table, roots,  # [B] twice, [B, max_context], [B]
    token_ids, begun, live,  # out [B, rows], of which the first of each, [B] twice
    qo_indptr, kv_indptr, kv_indices, positions,  # out
    batch, rows, max_context, table_stride,
    BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lay out one place's block. As in ``plan_kernel``, every program adds up the lengths before its own."""
    b = tl.program_id(0)
    request = tl.arange(0, BATCH)
    held = tl.load(prefix_lens + request, mask=request < batch, other=-1)
    limit = tl.load(limits + request, mask=request < batch, other=-1)
    is_live = (held >= 0) & (held < limit)
    prefix = tl.where(is_live, tl.minimum(held, max_context), 0)
    kv_start = tl.sum(tl.where(request < b, prefix, 0), axis=0)
    prefix_len = tl.sum(tl.where(request == b, prefix, 0), axis=0)
    slots = slot_table + row_offset(b.to(tl.int64), table_stride, 0)
    _copy_slots(slots, kv_indices + kv_start, prefix_len, BLOCK)

    if tl.program_id(1) == 0:
        if b == 0:
            tl.store(qo_indptr, 0)
            tl.store(kv_indptr, 0)
        tl.store(qo_indptr + b + 1, row_offset(b + 1, rows, 0))
        tl.store(kv_indptr + b + 1, kv_start + prefix_len)
        mine = tl.sum(tl.where((request == b) & is_live, held, 0), axis=0)
        takes_part = tl.sum(((request == b) & is_live).to(tl.int32), axis=0)
        tl.store(live + b, tl.where(takes_part > 0, mine, -1))
        row = tl.arange(0, ROWS)
        at = row_offset(b.to(tl.int64), rows, row)
        tl.store(positions + at, position(prefix_len, row).to(tl.int64), mask=row < rows)
        root = tl.load(roots + b)
        tl.store(begun + b, root)
        tl.store(token_ids + row_offset(b.to(tl.int64), rows, 0), root)


@triton.jit
def row_inputs_kernel(
    token_ids, qo_indptr, out_cache_loc,  # [B, width], [B+1], [T]
    tokens, slots,  # out [T] twice
    num_queries, batch, width, pad_slot,
    BATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token and the slot of some rows; those of no request get token 0 and the slot for padding."""
    row = block_start(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    is_row = row < num_queries
    request = tl.arange(0, BATCH)
    stop = tl.load(qo_indptr + request + 1, mask=request < batch, other=2147483647)
    b = tl.sum((row[:, None] >= stop[None, :]).to(tl.int32), axis=1)
    start = tl.load(qo_indptr + b, mask=is_row & (b < batch), other=0)
    at = row_offset(b.to(tl.int64), width, row - start)
    inside = is_row & (b < batch) & (row - start < width)
    tl.store(tokens + row, tl.load(token_ids + at, mask=inside, other=0), mask=is_row)
    slot = tl.load(out_cache_loc + row, mask=is_row, other=-1)
    tl.store(slots + row, tl.where(slot < 0, pad_slot, slot), mask=is_row)

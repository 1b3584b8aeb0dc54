"""Kernels that write a call into fixed buffers."""

import triton
import triton.language as tl

from ddtree.impl.index import block_start, row_offset
from ddtree.impl.mask_kernels import request_of


@triton.jit
def fill_rows_kernel(
    tree_token_ids, qo_indptr, kv_indptr, mask_indptr, positions, out_cache_loc,  # the call
    into_qo, into_kv, into_mask, into_positions, into_out, into_token_ids,  # the buffers
    batch, rows, max_batch, max_rows, pad_slot,
    BATCH: tl.constexpr, MAX_BATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK query rows; the first program also writes the indptrs."""
    query = block_start(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    b = request_of(qo_indptr, batch, query, BATCH)
    has_query = b < batch
    row = query - tl.load(qo_indptr + b, mask=has_query, other=0)
    is_row = query < max_rows
    token = tl.load(
        tree_token_ids + row_offset(b.to(tl.int64), rows, row),
        mask=has_query & (row < rows),
        other=0,
    )
    tl.store(into_token_ids + query, token, mask=is_row)
    tl.store(
        into_positions + query, tl.load(positions + query, mask=has_query, other=0), mask=is_row
    )
    tl.store(
        into_out + query,
        tl.load(out_cache_loc + query, mask=has_query, other=pad_slot),
        mask=is_row,
    )
    if tl.program_id(0) == 0:
        entry = tl.arange(0, MAX_BATCH)
        call = tl.minimum(entry, batch)  # the tails repeat the last value
        is_entry = entry <= max_batch
        tl.store(into_qo + entry, tl.load(qo_indptr + call), mask=is_entry)
        tl.store(into_kv + entry, tl.load(kv_indptr + call), mask=is_entry)
        tl.store(into_mask + entry, tl.load(mask_indptr + call), mask=is_entry)


@triton.jit
def fill_kernel(content, length, buffer, held, capacity, BLOCK: tl.constexpr):
    """Write ``length[0]`` of the ``held`` entries of ``content`` to the front of ``buffer``, 0 to the rest."""
    entry = block_start(tl.program_id(0).to(tl.int64), BLOCK) + tl.arange(0, BLOCK)
    value = tl.load(content + entry, mask=entry < tl.minimum(tl.load(length), held), other=0)
    tl.store(buffer + entry, value, mask=entry < capacity)

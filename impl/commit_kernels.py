"""Kernels of the commit: the slots first, then, with larger pages, the KV of all layers."""

import triton
import triton.language as tl

from ddtree.impl.index import block_start, commit_entry, dropped_step, kv_len, row_offset


@triton.jit
def commit_slots_kernel(
    nodes, num_accepted, qo_indptr, kv_indptr,  # [B, width], [B], [B+1] twice
    slot_table,  # [B, max_context], permuted in place where PERMUTE
    prefix_lens, src, dst,  # out [B], [B, width] twice
    width, max_context, table_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PERMUTE: tl.constexpr,
):  # fmt: skip
    """Commit one request's slots. Accepted rows come first, the others behind them in their order."""
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(num_accepted + b)
    q_len = tl.load(qo_indptr + b + 1) - tl.load(qo_indptr + b)
    prefix_len = tl.load(kv_indptr + b + 1) - tl.load(kv_indptr + b)
    slots = slot_table + row_offset(b, table_stride, 0)
    step = tl.arange(0, WIDTH)
    is_step = (step < count) & (step < width)
    node = tl.load(nodes + row_offset(b, width, step), mask=is_step, other=0)
    source = kv_len(prefix_len, node)
    is_entry = is_step & (source >= 0) & (source < max_context)  # whatever the path says
    written = tl.load(slots + source, mask=is_entry, other=-1)
    if PERMUTE:
        row = tl.arange(0, ROWS)
        entry = kv_len(prefix_len, row)
        is_row = (row < q_len) & (entry >= 0) & (entry < max_context)
        slot = tl.load(slots + entry, mask=is_row, other=-1)
        is_this = (node[:, None] == row[None, :]) & is_step[:, None]
        is_accepted = tl.max(is_this.to(tl.int32), axis=0) != 0
        as_step = tl.sum(tl.where(is_this, step[:, None], 0), axis=0)
        accepted_before = tl.sum(
            ((node[:, None] < row[None, :]) & is_step[:, None]).to(tl.int32), axis=0
        )
        into = tl.where(is_accepted, as_step, dropped_step(count, row, accepted_before))
        held = written
        target = commit_entry(prefix_len, into)
        fits = is_row & (target >= 0) & (target < max_context)
        tl.debug_barrier()  # all slots have been read
        tl.store(slots + target, slot, mask=fits)
    else:
        target = commit_entry(prefix_len, step)
        fits = is_step & (target >= 0) & (target < max_context)
        held = tl.load(slots + target, mask=fits, other=-1)
    tl.store(prefix_lens + b, commit_entry(prefix_len, count))
    tl.store(src + row_offset(b, width, step), written, mask=step < width)
    tl.store(dst + row_offset(b, width, step), held, mask=step < width)


@triton.jit
def move_kernel(
    pools, src, dst,  # addresses of the pools, [B, width] slots twice
    width, row_words, num_slots,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move one request's accepted rows of one pool, BLOCK words of each row.

    Every row is read before any is written, so it does not matter which slots are both.
    """
    b = tl.program_id(1).to(tl.int64)
    pool = tl.load(pools + tl.program_id(2)).to(tl.pointer_type(tl.int32))
    step = tl.arange(0, WIDTH)
    line = row_offset(b, width, step)
    source = tl.load(src + line, mask=step < width, other=-1)
    target = tl.load(dst + line, mask=step < width, other=-1)
    moves = (source >= 0) & (target >= 0) & (source != target)
    moves &= (source < num_slots) & (target < num_slots)  # whatever the slot table says
    if tl.max(moves.to(tl.int32), axis=0) > 0:
        word = block_start(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)[None, :]
        wanted = moves[:, None] & (word < row_words)
        words = tl.load(pool + row_offset(source[:, None], row_words, word), mask=wanted, other=0)
        tl.debug_barrier()
        tl.store(pool + row_offset(target[:, None], row_words, word), words, mask=wanted)


@triton.jit
def keep_kernel(num_accepted, new, held, batch, BLOCK: tl.constexpr):  # [B] each; `held` in place
    """Write what is new of the requests that accepted a node."""
    b = block_start(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    count = tl.load(num_accepted + b, mask=b < batch, other=0)
    is_new = (b < batch) & (count > 0)
    tl.store(held + b, tl.load(new + b, mask=is_new, other=0), mask=is_new)

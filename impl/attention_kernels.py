"""The kernels of ``verify_attention``: one pass over prefix and tree, then a merge of split results.

Work. The query heads of a KV group are packed into rows: row ``i`` of a request and KV head is query
row ``i // GROUP``, head ``kv_head * GROUP + i % GROUP``. Rows are cut into *tiles* of ``BLOCK_M``. The
KV entries of a request come in *blocks* of ``BLOCK_N``: first those of the prefix (the last may be
partial), then those of the tree. An *item* is one (request, KV head) with all its blocks.

Schedule. All blocks of all items stand in one line, in the order (request, KV head, block). The line is
cut into equal *spans*, one for each group of programs; a group has one program for each tile, so the
programs of a group read the same blocks at the same time and the second reader finds them in L2.
Widths, tiles, groups and spans are all computed here, from the indptrs: nothing is known to the host,
and a captured launch stays balanced whatever call is replayed.

Masking. Every row sees the whole prefix, so full prefix blocks are attended without a mask; the last
prefix entries, the tree and what a window cuts go through a second loop that reads ancestor bits.

Splits. An item inside one span is finished where it is computed. An item that a span boundary cuts
leaves one partial result in each span, merged by the second kernel in span order: the same call gives
the same bits.

Scaled pools. An entry is the pool's number times its KV head's factor. The key's factor joins the scale of
the scores and the value's is taken once: while a segment goes through the prefix, its maximum and output
sum are in the pool's units, and the first tree block, which comes after, turns them into the call's.
"""

import triton
import triton.language as tl

from ddtree.impl.index import (
    bit_shift,
    bit_word,
    chunk_len,
    chunk_start,
    row_offset,
    window_start,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# A record says what to merge: number of partial results (0: none), request, KV head, the tile's first row,
# first partial result, distance between them.
RECORD_WORDS = tl.constexpr(6)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "batch",
        "num_words",
        "words_stride",
        "key_factor_stride",
        "value_factor_stride",
        "window",
    ]  # no recompilation between calls
)
def attend_kernel(
    # inputs
    query,  # [T, KV_HEADS * GROUP, HEAD_DIM]
    key,  # [T, KV_HEADS, HEAD_DIM]
    value,
    key_pool,  # [slots, KV_HEADS, HEAD_DIM]
    value_pool,
    words,  # [T, num_words]
    qo_indptr,
    kv_indptr,
    kv_indices,
    positions,
    sinks,  # [KV_HEADS * GROUP]
    key_factor,  # of the pool's entries: a number, or a pointer to one for all or each KV head
    value_factor,
    # outputs
    output,  # [T, KV_HEADS * GROUP, HEAD_DIM], contiguous
    lse,  # [T, KV_HEADS * GROUP]
    partial,  # [programs, 2, BLOCK_M, HEAD_DIM]
    partial_stats,  # [programs, 2, 2, BLOCK_M]: maximum, sum
    records,  # [RECORD_WORDS, programs]
    num_records,  # [1]
    # sizes
    num_rows,
    batch,
    num_words,
    query_stride_row,
    query_stride_head,
    tree_stride_row,  # of key and value
    tree_stride_head,
    pool_stride_slot,  # of key_pool and value_pool
    pool_stride_head,
    words_stride,
    key_factor_stride,
    value_factor_stride,
    scale,
    softcap,
    window,
    # what is compiled in
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BATCH: tl.constexpr,  # batch rounded up to a power of two
    OFFSET: tl.constexpr,  # int32 where every offset into keys and values fits, else int64
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_LSE: tl.constexpr,
    FP8: tl.constexpr,  # how pools hold e4m3: "none": they do not; "native": so typed; "bits": as uint8
):
    """Attend one span of blocks with the rows of one tile."""
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)

    request = tl.arange(0, BATCH)
    exists = request < batch
    q_starts = tl.load(qo_indptr + request, mask=exists, other=0).to(tl.int32)
    q_ends = tl.load(qo_indptr + request + 1, mask=exists, other=0).to(tl.int32)
    kv_starts = tl.load(kv_indptr + request, mask=exists, other=0).to(tl.int32)
    kv_ends = tl.load(kv_indptr + request + 1, mask=exists, other=0).to(tl.int32)
    blocks = _num_blocks(kv_ends - kv_starts, q_ends - q_starts, window, BLOCK_N, HAS_WINDOW)

    num_tiles = tl.maximum(tl.cdiv(tl.max(q_ends - q_starts) * GROUP, BLOCK_M), 1)
    num_groups = tl.maximum(num_programs // num_tiles, 1)

    _clear_unused_rows(
        output,
        lse,
        tl.max(q_ends),
        num_rows,
        pid,
        num_programs,
        KV_HEADS * GROUP,
        HEAD_DIM,
        DIM,
        HAS_LSE,
    )
    # records stand by item and tile where there is one for each, else by program
    by_item = batch * KV_HEADS * num_tiles <= num_programs
    if by_item:
        is_empty = exists & (blocks == 0)
        for i in range(pid, tl.max(is_empty.to(tl.int32)) * KV_HEADS * num_tiles, num_programs):
            tl.store(records + request * KV_HEADS * num_tiles + i, 0, mask=is_empty)
    else:
        tl.store(records + pid, 0)
    if pid == 0:
        tl.store(num_records, tl.where(by_item, batch * KV_HEADS * num_tiles, num_programs))

    for program in range(pid, num_groups * num_tiles, num_programs):
        _attend_span(
            query, key, value, key_pool, value_pool, words, qo_indptr, kv_indptr, kv_indices, positions,
            sinks, key_factor, value_factor, output, lse, partial, partial_stats, records, num_programs,
            num_words, query_stride_row, query_stride_head, tree_stride_row, tree_stride_head,
            pool_stride_slot, pool_stride_head, words_stride, key_factor_stride, value_factor_stride,
            scale, softcap, window, blocks, request, program, num_groups, num_tiles, by_item,
            KV_HEADS, GROUP, HEAD_DIM, DIM, OFFSET, BLOCK_M, BLOCK_N,
            HAS_SOFTCAP, HAS_SINKS, HAS_WINDOW, HAS_SCALES, HAS_LSE, FP8,
        )  # fmt: skip


@triton.jit
def _attend_span(
    query, key, value, key_pool, value_pool, words, qo_indptr, kv_indptr, kv_indices, positions,
    sinks, key_factor, value_factor, output, lse, partial, partial_stats, records, num_programs,
    num_words, query_stride_row, query_stride_head, tree_stride_row, tree_stride_head,
    pool_stride_slot, pool_stride_head, words_stride, key_factor_stride, value_factor_stride,
    scale, softcap, window,
    blocks,  # [BATCH] of one item of each request
    request,  # [BATCH] 0, 1, ...
    program,
    num_groups,  # how many spans
    num_tiles,  # programs of a group
    by_item,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_LSE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Attend the blocks of one span with the rows of one tile of each item."""
    # the line of blocks: each item's share, and where each request's end
    group = program // num_tiles
    span = chunk_len(tl.sum(blocks) * KV_HEADS, num_groups, 1)
    # cut every item at multiples of the span instead where that makes the longest span (almost) no longer
    share = blocks
    most = tl.maximum(tl.max(blocks), 1)
    pieces = tl.maximum(most // tl.maximum(span, 1), 1)
    piece = tl.cdiv(most, pieces)
    longer = piece * tl.cdiv(span, piece)
    exact = tl.cdiv(blocks, tl.maximum(span, 1)) * span
    even = tl.cdiv(blocks, piece) * piece
    if tl.sum(exact) * KV_HEADS <= span * num_groups:
        share = exact
    elif (longer * 16 <= span * 17) & (tl.sum(even) * KV_HEADS <= longer * num_groups):
        share = even
        span = longer
    num_units = tl.sum(share) * KV_HEADS
    ends = tl.cumsum(share * KV_HEADS)

    offs_n = tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, DIM)
    unit = chunk_start(group, span)
    end = tl.minimum(unit + span, num_units)
    while unit < end:
        # the item that holds this unit
        b = tl.sum((ends <= unit).to(tl.int32))
        before = tl.max(tl.where(request < b, ends, 0))
        item_share = tl.sum(tl.where(request == b, share, 0))
        num_blocks = tl.sum(tl.where(request == b, blocks, 0))
        q_start = tl.load(qo_indptr + b).to(tl.int32)
        q_len = tl.load(qo_indptr + b + 1).to(tl.int32) - q_start
        kv_start = tl.load(kv_indptr + b).to(tl.int32)
        prefix_len = tl.load(kv_indptr + b + 1).to(tl.int32) - kv_start
        kv_head = (unit - before) // item_share
        item = b * KV_HEADS + kv_head
        item_start = before + kv_head * item_share
        item_stop = item_start + num_blocks
        stop = tl.minimum(end, item_start + item_share)
        # tiles see different numbers of tree blocks: a program takes another tile for each item
        tile = (program % num_tiles + item) % num_tiles
        tile_row = tile * BLOCK_M

        is_first = unit == item_start
        is_cut = (not is_first) | (stop < item_stop)
        num_splits = (
            tl.cdiv(item_stop, span) - group
        )  # of the item, where its start is in this span
        if is_first & (is_cut | by_item):
            record = records + tl.where(by_item, item * num_tiles + tile, program)
            _write_record(
                record, tl.where(is_cut, num_splits, 0), b, kv_head, tile_row,
                program * 2 + 1, num_tiles * 2, num_programs,
            )  # fmt: skip

        if tile_row < q_len * GROUP:
            # the segment's blocks, counted from the request's entry 0
            prefix_blocks = tl.cdiv(prefix_len, BLOCK_N)
            block = _first_block(prefix_len, window, BLOCK_N, HAS_WINDOW) + unit - item_start
            block_stop = block + tl.minimum(stop, item_stop) - unit

            # [BLOCK_M] rows of the tile, and their queries
            index = tile_row + offs_m
            node = index // GROUP
            row = (q_start + node).to(tl.int64)
            head = kv_head * GROUP + index % GROUP
            has_row = node < q_len
            # no row of the tile sees a tree block past its last ancestor bit
            last_word = _last_word(words, words_stride, row, has_row, num_words)
            start_m = _window_starts(positions, row, has_row, window, HAS_WINDOW)
            least_start = tl.max(start_m)
            q = tl.load(
                query
                + row_offset(row, query_stride_row, head * query_stride_head)[:, None]
                + offs_d[None, :],
                mask=has_row[:, None] & (offs_d < HEAD_DIM)[None, :],
                other=0.0,
            )
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, DIM], tl.float32)
            pool_scale = scale
            if HAS_SCALES:
                key_unit = _factor(key_factor, key_factor_stride, kv_head)
                value_unit = _factor(value_factor, value_factor_stride, kv_head)
                pool_scale = tl.maximum(scale * key_unit, 1e-30)  # 0 would make -inf a NaN
            in_pool_units = tl.full([], 1, tl.int1)

            # full prefix blocks that every row sees whole
            full_start = block
            if HAS_WINDOW:
                full_start = tl.cdiv(tl.maximum(least_start, 0), BLOCK_N).to(tl.int32)
                # deep rows' windows start past the prefix: what is cut of it ends with it, before the tree
                prefix_stop = tl.minimum(prefix_blocks, block_stop)
                full_start = tl.maximum(tl.minimum(full_start, prefix_stop), block)
            full_stop = tl.maximum(tl.minimum(prefix_len // BLOCK_N, block_stop), full_start)
            key_head = key_pool + kv_head * pool_stride_head
            value_head = value_pool + kv_head * pool_stride_head
            slots = kv_indices + kv_start + offs_n
            # slots are loaded a block ahead of their keys
            slot = tl.load(
                slots + full_start * BLOCK_N, mask=(offs_n >= 0) & (full_start < full_stop), other=0
            )
            for j in tl.range(full_start, full_stop):
                offset = row_offset(slot.to(OFFSET), pool_stride_slot, 0)[:, None] + offs_d[None, :]
                if HEAD_DIM < DIM:
                    k = tl.load(key_head + offset, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
                    v = tl.load(value_head + offset, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
                else:
                    k = tl.load(key_head + offset)
                    v = tl.load(value_head + offset)
                k, v = _from_pool(k, q.dtype, FP8), _from_pool(v, q.dtype, FP8)
                slot = tl.load(slots + tl.minimum(j + 1, full_stop - 1) * BLOCK_N)
                top, total, acc = _attend_block(
                    q, k, v, None, top, total, acc, pool_scale, softcap, HAS_SOFTCAP
                )

            # the others: under the window's edge, the prefix's last entries, the tree
            tree_stop = prefix_blocks + tl.cdiv((last_word + 1) * 32, BLOCK_N)
            num_front = full_start - block
            num_rest = num_front + tl.maximum(tl.minimum(block_stop, tree_stop) - full_stop, 0)
            for i in tl.range(0, num_rest, num_stages=2):
                j = tl.where(i < num_front, block + i, full_stop + i - num_front)
                in_tree = j >= prefix_blocks
                entry = tl.where(in_tree, j - prefix_blocks, j) * BLOCK_N + offs_n
                length = tl.where(in_tree, q_len, prefix_len)
                near = tl.minimum(entry, length - 1)  # past the end: the last again, masked below
                slot = tl.load(
                    kv_indices + kv_start + near, mask=(near >= 0) & (j < prefix_blocks), other=0
                )
                k, v = _load_block(
                    key, value, key_pool, value_pool, q_start + near, slot, kv_head, offs_d, in_tree,
                    tree_stride_row, tree_stride_head, pool_stride_slot, pool_stride_head,
                    q.dtype, HEAD_DIM, DIM, OFFSET, FP8,
                )  # fmt: skip
                sees = (entry < length)[None, :] & _sees(
                    words,
                    words_stride,
                    row,
                    has_row,
                    num_words,
                    j - prefix_blocks,
                    in_tree,
                    BLOCK_N,
                )
                if HAS_WINDOW:
                    key_position = tl.load(
                        positions + q_start + near, mask=(near >= 0) & in_tree, other=0
                    )
                    key_position = tl.where(in_tree, key_position, entry.to(tl.int64))
                    sees &= key_position[None, :] >= start_m[:, None]
                block_scale = scale
                if HAS_SCALES:
                    block_scale = tl.where(in_tree, scale, pool_scale)
                    if not HAS_SOFTCAP:
                        top *= tl.where(in_tree & in_pool_units, pool_scale / scale, 1.0)
                    acc *= tl.where(in_tree & in_pool_units, value_unit, 1.0)
                    in_pool_units &= ~in_tree
                top, total, acc = _attend_block(
                    q, k, v, sees, top, total, acc, block_scale, softcap, HAS_SOFTCAP
                )

            if HAS_SCALES:
                acc *= tl.where(in_pool_units, value_unit, 1.0)
            if not HAS_SOFTCAP:
                top *= tl.where(in_pool_units, pool_scale, scale) if HAS_SCALES else scale
            if is_cut:
                place = (program * 2 + tl.where(is_first, 1, 0)) * BLOCK_M
                tl.store(
                    partial + (place + offs_m)[:, None] * HEAD_DIM + offs_d[None, :],
                    acc,
                    mask=has_row[:, None] & (offs_d < HEAD_DIM)[None, :],
                )
                tl.store(partial_stats + place * 2 + offs_m, top, mask=has_row)
                tl.store(partial_stats + place * 2 + BLOCK_M + offs_m, total, mask=has_row)
            else:
                o, log_sum = _finish(acc, top, total, sinks, head, has_row, HAS_SINKS)
                out_row = row * (KV_HEADS * GROUP) + head
                tl.store(
                    output + out_row[:, None] * HEAD_DIM + offs_d[None, :],
                    o.to(output.dtype.element_ty),
                    mask=has_row[:, None] & (offs_d < HEAD_DIM)[None, :],
                )
                if HAS_LSE:
                    tl.store(lse + out_row, log_sum, mask=has_row)
        unit = stop


@triton.jit(do_not_specialize=["records_stride"])
def merge_kernel(
    partial,  # [programs, 2, BLOCK_M, HEAD_DIM]
    partial_stats,  # [programs, 2, 2, BLOCK_M]
    records,  # [RECORD_WORDS, programs]
    num_records,  # [1]
    qo_indptr,
    sinks,
    output,  # [T, KV_HEADS * GROUP, HEAD_DIM], contiguous
    lse,
    records_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MERGE_M: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Merge the partial results of MERGE_M rows of a tile, in span order."""
    offs_m = tl.program_id(1) * MERGE_M + tl.arange(0, MERGE_M)
    for record in range(tl.program_id(0), tl.load(num_records), tl.num_programs(0)):
        _merge_rows(
            partial, partial_stats, records + record, records_stride, qo_indptr, sinks, output, lse, offs_m,
            KV_HEADS, GROUP, HEAD_DIM, DIM, BLOCK_M, MERGE_M, MERGE_SPLITS, HAS_SINKS, HAS_LSE,
        )  # fmt: skip


@triton.jit
def _merge_rows(
    partial, partial_stats, record, records_stride, qo_indptr, sinks, output, lse, offs_m,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, MERGE_M: tl.constexpr, MERGE_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the rows ``offs_m`` of one record."""
    num_splits = tl.load(record)
    if num_splits > 0:
        b = tl.load(record + records_stride)
        kv_head = tl.load(record + records_stride * 2)
        tile_row = tl.load(record + records_stride * 3)
        first = tl.load(record + records_stride * 4)
        stride = tl.load(record + records_stride * 5)
        q_start = tl.load(qo_indptr + b).to(tl.int32)
        q_len = tl.load(qo_indptr + b + 1).to(tl.int32) - q_start

        offs_d = tl.arange(0, DIM)
        index = tile_row + offs_m
        node = index // GROUP
        has_row = node < q_len
        head = kv_head * GROUP + index % GROUP
        if tl.min(node) < q_len:
            top = tl.full([MERGE_M], float("-inf"), tl.float32)
            total = tl.zeros([MERGE_M], tl.float32)
            acc = tl.zeros([MERGE_M, DIM], tl.float32)
            for start in range(0, num_splits, MERGE_SPLITS):
                # all loads first: none waits for another
                parts = ()
                for i in tl.static_range(MERGE_SPLITS):
                    split = start + i
                    # the first span holds the item's start as its last segment, the others go on with it
                    place = first + split * stride
                    place = tl.where(split > 0, place - 1, place) * BLOCK_M
                    has = has_row & (split < num_splits)
                    parts += (
                        tl.load(partial_stats + place * 2 + offs_m, mask=has, other=float("-inf")),
                        tl.load(partial_stats + place * 2 + BLOCK_M + offs_m, mask=has, other=0.0),
                        tl.load(
                            partial + (place + offs_m)[:, None] * HEAD_DIM + offs_d[None, :],
                            mask=has[:, None] & (offs_d < HEAD_DIM)[None, :],
                            other=0.0,
                        ),
                    )
                for i in tl.static_range(MERGE_SPLITS):
                    new_top = tl.maximum(top, parts[3 * i])
                    base = tl.where(new_top == float("-inf"), 0.0, new_top)
                    shrink, weight = tl.exp2(top - base), tl.exp2(parts[3 * i] - base)
                    total = total * shrink + parts[3 * i + 1] * weight
                    acc = acc * shrink[:, None] + parts[3 * i + 2] * weight[:, None]
                    top = new_top

            o, log_sum = _finish(acc, top, total, sinks, head, has_row, HAS_SINKS)
            out_row = (q_start + node).to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(
                output + out_row[:, None] * HEAD_DIM + offs_d[None, :],
                o.to(output.dtype.element_ty),
                mask=has_row[:, None] & (offs_d < HEAD_DIM)[None, :],
            )
            if HAS_LSE:
                tl.store(lse + out_row, log_sum, mask=has_row)


@triton.jit
def _write_record(record, num_splits, b, kv_head, tile_row, first, stride, records_stride):
    """Tell the merge what to do for one tile."""
    tl.store(record, num_splits)
    tl.store(record + records_stride, b)
    tl.store(record + records_stride * 2, kv_head)
    tl.store(record + records_stride * 3, tile_row)
    tl.store(record + records_stride * 4, first)
    tl.store(record + records_stride * 5, stride)


@triton.jit
def _attend_block(q, k, v, sees, top, total, acc, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """One block of entries for a tile's rows: new maximum, sum and output sum; ``sees`` None: every row sees all."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    s = _cap(s, scale, softcap, HAS_SOFTCAP)
    if sees is not None:
        s = tl.where(sees, s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1))
    base = new_top
    if sees is not None:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # rows that have seen nothing yet
    p, shrink = _weights(s, top, base[:, None], base, scale, HAS_SOFTCAP)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc=acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _load_block(
    key, value, key_pool, value_pool, row, slot, kv_head, offs_d, in_tree,
    tree_stride_row, tree_stride_head, pool_stride_slot, pool_stride_head,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, OFFSET: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Keys and values of one block, which lies either in the tree's rows or in the pool's slots."""
    if FP8 == "none":
        offset = row_offset(
            tl.where(in_tree, row.to(slot.dtype), slot).to(OFFSET),
            tl.where(in_tree, tree_stride_row, pool_stride_slot),
            kv_head * tl.where(in_tree, tree_stride_head, pool_stride_head),
        )
        offset = offset[:, None] + offs_d[None, :]
        key_base = tl.where(in_tree, key, key_pool)
        value_base = tl.where(in_tree, value, value_pool)
        if HEAD_DIM < DIM:
            k = tl.load(key_base + offset, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(value_base + offset, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(key_base + offset)
            v = tl.load(value_base + offset)
    else:  # of two dtypes: both are addressed, one is read
        own = row_offset(row.to(OFFSET), tree_stride_row, kv_head * tree_stride_head)
        own = own[:, None] + offs_d[None, :]
        pooled = row_offset(slot.to(OFFSET), pool_stride_slot, kv_head * pool_stride_head)
        pooled = pooled[:, None] + offs_d[None, :]
        has_own = in_tree & (offs_d < HEAD_DIM)[None, :]
        has_pooled = (~in_tree) & (offs_d < HEAD_DIM)[None, :]
        pooled_k = _from_pool(tl.load(key_pool + pooled, mask=has_pooled), DTYPE, FP8)
        pooled_v = _from_pool(tl.load(value_pool + pooled, mask=has_pooled), DTYPE, FP8)
        k = tl.where(has_own, tl.load(key + own, mask=has_own), pooled_k)
        v = tl.where(has_own, tl.load(value + own, mask=has_own), pooled_v)
    return k, v


@triton.jit
def _from_pool(entries, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """What a pool holds in the query's dtype, exactly: each of the three holds every e4m3 number."""
    if FP8 == "bits":
        # sign, exponent and mantissa moved to a float16's; its exponent is biased by 8 more
        bits = entries.to(tl.int16)
        magnitude = bits & 0x7F
        moved = ((bits & 0x80) << 8) | tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7)  # NaN
        entries = moved.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return entries.to(DTYPE)


@triton.jit
def _factor(factor, stride, kv_head):
    """The pool's factor of a KV head; without a stride ``factor`` is a number."""
    if stride is not None:
        factor = tl.load(factor + kv_head * stride)
    return factor


@triton.jit
def _first_block(prefix_len, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """First prefix block that a row can see: the root's window reaches back farthest."""
    if HAS_WINDOW:
        return tl.maximum(window_start(prefix_len, window), 0) // BLOCK_N
    return prefix_len * 0


@triton.jit
def _num_blocks(prefix_len, q_len, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Blocks of one item: prefix and tree; none for a request without rows."""
    prefix_blocks = tl.cdiv(prefix_len, BLOCK_N)
    first = tl.minimum(_first_block(prefix_len, window, BLOCK_N, HAS_WINDOW), prefix_blocks)
    return tl.where(q_len > 0, prefix_blocks - first + tl.cdiv(q_len, BLOCK_N), 0)


@triton.jit
def _window_starts(positions, row, has_row, window, HAS_WINDOW: tl.constexpr):
    """First position that each row's window keeps."""
    if HAS_WINDOW:
        return tl.where(
            has_row, window_start(tl.load(positions + row, mask=has_row, other=0), window), 0
        )
    return row


@triton.jit
def _last_word(words, words_stride, row, has_row, num_words):
    """Last word in which any of the rows has a bit; -1 if none has."""
    last = tl.full([row.shape[0], 8], -1, tl.int32)
    for start in range(0, num_words, 8):
        word = start + tl.arange(0, 8)
        bits = tl.load(
            words + row_offset(row, words_stride, 0)[:, None] + word[None, :],
            mask=has_row[:, None] & (word < num_words)[None, :],
            other=0,
        )
        last = tl.where(bits != 0, word[None, :], last)
    return tl.max(last)


@triton.jit
def _sees(words, words_stride, row, has_row, num_words, tree_block, in_tree, BLOCK_N: tl.constexpr):
    """[rows, BLOCK_N] ancestor bits of a tree block; all True in a prefix block."""
    bits = tl.full([row.shape[0], BLOCK_N], -1, tl.int32)
    block_word = bit_word(tl.where(in_tree, tree_block, 0) * BLOCK_N)
    column_word = bit_word(tl.arange(0, BLOCK_N))
    for i in tl.static_range(BLOCK_N // 32):
        word = block_word + i
        row_bits = tl.load(
            words + row_offset(row, words_stride, word),
            mask=has_row & (word < num_words),
            other=0,
        )
        bits = tl.where(in_tree & (column_word == i)[None, :], row_bits[:, None], bits)
    return ((bits >> bit_shift(tl.arange(0, BLOCK_N))[None, :]) & 1) != 0


@triton.jit
def _cap(s, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Softcapped scores in units of log2; without a softcap the scale is applied in the exponent."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), finite for every x
        t = 1.0 - 2.0 / (tl.exp2(s * (2.0 * scale / softcap)) + 1.0)
        s = t * (softcap * LOG2E)
    return s


@triton.jit
def _weights(s, top, bases, base, scale, HAS_SOFTCAP: tl.constexpr):
    """One step of the online softmax: weights against the new maximum, and the factor on what came before."""
    if HAS_SOFTCAP:
        return tl.exp2(s - bases), tl.exp2(top - base)
    return tl.exp2(s * scale - bases * scale), tl.exp2((top - base) * scale)


@triton.jit
def _finish(acc, top, total, sinks, head, has_row, HAS_SINKS: tl.constexpr):
    """Output and natural log-sum-exp from the sums; a row that sees nothing gives 0 and -inf."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=has_row, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        acc *= shrink[:, None]
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)  # with top -inf: nothing was seen
    return acc / total[:, None], (top + tl.log2(total)) * LN2


@triton.jit
def _clear_unused_rows(
    output,
    lse,
    start,
    num_rows,
    pid,
    num_programs,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Write 0 (log-sum-exp -inf) to the rows past the call's last: a fixed buffer's tail."""
    offs_d = tl.arange(0, DIM)
    for i in range(start * HEADS + pid, num_rows * HEADS, num_programs):
        place = output + tl.cast(i, tl.int64) * HEAD_DIM + offs_d
        tl.store(place, tl.zeros([DIM], output.dtype.element_ty), mask=offs_d < HEAD_DIM)
        if HAS_LSE:
            tl.store(lse + i, float("-inf"))

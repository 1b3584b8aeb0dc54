"""The kernels of ``verify_attention``: one pass over prefix and tree, then a merge of split results.

Work. The query heads of a KV group are packed into rows: row ``i`` of a request and KV head is query
row ``i // GROUP``, head ``kv_head * GROUP + i % GROUP``. Rows are cut into *tiles* of ``BLOCK_M``. Where
the widest request has at most ``EXTRA_M`` rows past full tiles (the root makes q_len = 2^k + 1), those
form one small *extra* tile of its own. The KV entries of a request come in *blocks* of ``BLOCK_N``:
first those of the prefix (the last may be partial), then those of the tree. An *item* is one (request,
KV head) with all its blocks.

Schedule. All blocks of all items stand in one line, in the order (request, KV head, block). The line is
cut into equal *spans*, one for each group of programs; a group has one program for each full tile, so
the programs of a group read the same blocks at the same time and the second reader finds them in L2.
The extra tile is cheaper to compute: fewer programs, with longer spans, walk the line for it. Widths,
tiles, groups and spans are all computed here, from the indptrs: nothing is known to the host, and a
captured launch stays balanced whatever call is replayed.

Splits. An item inside one span is finished where it is computed. An item that a span boundary cuts
leaves one partial result in each span, merged by the second kernel in span order: the same call gives
the same bits.
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

# One cut tile, in int32 words, a row of `cuts` for each program that may note one: number of partial
# results (0: none), request, KV head, the tile's first row, first partial's program, distance between
# their programs.
CUT_WORDS = tl.constexpr(6)


@triton.jit(
    do_not_specialize=["num_rows", "batch", "num_words", "words_stride", "window", "extra_cost"]  # no recompilation between calls
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
    # outputs
    output,  # [T, KV_HEADS * GROUP, HEAD_DIM], contiguous
    lse,  # [T, KV_HEADS * GROUP]
    partial,  # [programs, 2, BLOCK_M, HEAD_DIM]
    partial_stats,  # [programs, 2, 2, BLOCK_M]: maximum, sum
    cuts,  # [CUT_WORDS, programs]
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
    scale,
    softcap,
    window,
    extra_cost,  # of a block of the extra tile, in sixteenths of a full tile's
    # what is compiled in
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BATCH: tl.constexpr,  # batch rounded up to a power of two
    OFFSET: tl.constexpr,  # int32 where every offset into keys and values fits, else int64
    BLOCK_M: tl.constexpr,
    EXTRA_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr,
    AHEAD: tl.constexpr = False,
    ALIGN: tl.constexpr = True,
    REST_STAGES: tl.constexpr = 2,
    OVERLAP: tl.constexpr = False,
):
    """Attend one span of blocks with the rows of one tile."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)

    request = tl.arange(0, BATCH)
    exists = request < batch
    q_starts = tl.load(qo_indptr + request, mask=exists, other=0)
    q_ends = tl.load(qo_indptr + request + 1, mask=exists, other=0)
    kv_starts = tl.load(kv_indptr + request, mask=exists, other=0)
    kv_ends = tl.load(kv_indptr + request + 1, mask=exists, other=0)
    blocks = _num_blocks(kv_ends - kv_starts, q_ends - q_starts, window, BLOCK_N, HAS_WINDOW)

    tl.store(cuts + pid, 0)
    _clear_unused_rows(
        output, lse, tl.max(q_ends), num_rows, pid, num_programs, KV_HEADS * GROUP, HEAD_DIM, DIM, HAS_LSE
    )

    most_rows = tl.max(q_ends - q_starts) * GROUP
    has_extra = (EXTRA_M > 0) & (most_rows % BLOCK_M > 0) & (most_rows % BLOCK_M <= EXTRA_M)
    num_tiles = tl.cdiv(most_rows, BLOCK_M) - has_extra.to(tl.int32)
    num_groups = num_programs // tl.maximum(num_tiles, 1)
    if has_extra:
        whole = num_tiles * 16
        num_groups = (num_programs * 16) // (whole + extra_cost)
        num_groups = tl.minimum(num_groups, (num_programs - 1) // tl.maximum(num_tiles, 1))
    num_groups = tl.maximum(num_groups, 1)
    num_full = num_groups * num_tiles
    extra_groups = tl.where(has_extra, tl.maximum(num_programs - num_full, 1), 0)

    for program in range(pid, num_full + extra_groups, num_programs):
        if program < num_full:
            _attend_span(
                query, key, value, key_pool, value_pool, words, qo_indptr, kv_indptr, kv_indices, positions,
                sinks, output, lse, partial, partial_stats, cuts, num_programs,
                num_words, query_stride_row, query_stride_head, tree_stride_row, tree_stride_head,
                pool_stride_slot, pool_stride_head, words_stride, scale, softcap, window,
                blocks, request, program, program // num_tiles, num_groups, 0, num_tiles, 0,
                KV_HEADS, GROUP, HEAD_DIM, DIM, OFFSET, BLOCK_M, BLOCK_M, BLOCK_N,
                HAS_SOFTCAP, HAS_SINKS, HAS_WINDOW, HAS_LSE, AHEAD, ALIGN, REST_STAGES,
            )  # fmt: skip
        if EXTRA_M > 0:
            if program >= num_full:
                _attend_span(
                    query, key, value, key_pool, value_pool, words, qo_indptr, kv_indptr, kv_indices, positions,
                    sinks, output, lse, partial, partial_stats, cuts, num_programs,
                    num_words, query_stride_row, query_stride_head, tree_stride_row, tree_stride_head,
                    pool_stride_slot, pool_stride_head, words_stride, scale, softcap, window,
                    blocks, request, program, program - num_full, extra_groups, num_full, 1, num_tiles * BLOCK_M,
                    KV_HEADS, GROUP, HEAD_DIM, DIM, OFFSET, EXTRA_M, BLOCK_M, BLOCK_N,
                    HAS_SOFTCAP, HAS_SINKS, HAS_WINDOW, HAS_LSE, AHEAD, ALIGN, REST_STAGES,
                )  # fmt: skip


@triton.jit
def _attend_span(
    query, key, value, key_pool, value_pool, words, qo_indptr, kv_indptr, kv_indices, positions,
    sinks, output, lse, partial, partial_stats, cuts, num_programs,
    num_words, query_stride_row, query_stride_head, tree_stride_row, tree_stride_head,
    pool_stride_slot, pool_stride_head, words_stride, scale, softcap, window,
    blocks,  # [BATCH] of one item of each request
    request,  # [BATCH] 0, 1, ...
    program,
    group,  # which span
    num_groups,  # how many spans
    first_program,  # of the class
    num_tiles,  # of the class: programs of a group
    first_row,  # of the class's first tile
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,  # of this class's tiles
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_LSE: tl.constexpr,
    AHEAD: tl.constexpr, ALIGN: tl.constexpr, REST_STAGES: tl.constexpr,
):  # fmt: skip
    """Attend the blocks of one span with the rows of one tile of each item."""
    # the line of blocks: each item's share, and where each request's end
    num_units = tl.sum(blocks) * KV_HEADS
    span = chunk_len(num_units, num_groups, 1)
    share = blocks
    if ALIGN:
        # cut every item at multiples of the span instead where that makes the longest span (almost) no longer
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
    offs_m = tl.arange(0, ROWS)
    offs_d = tl.arange(0, DIM)
    unit = chunk_start(group, span)
    end = tl.minimum(unit + span, num_units)
    while unit < end:
        # the item that holds this unit
        b = tl.sum((ends <= unit).to(tl.int32))
        before = tl.max(tl.where(request < b, ends, 0))
        item_share = tl.sum(tl.where(request == b, share, 0))
        num_blocks = tl.sum(tl.where(request == b, blocks, 0))
        q_start = tl.load(qo_indptr + b)
        q_len = tl.load(qo_indptr + b + 1) - q_start
        kv_start = tl.load(kv_indptr + b)
        prefix_len = tl.load(kv_indptr + b + 1) - kv_start
        kv_head = (unit - before) // item_share
        item_start = before + kv_head * item_share
        stop = tl.minimum(end, item_start + item_share)
        # tiles see different numbers of tree blocks: a program takes another tile for each item
        tile = ((program - first_program) % num_tiles + b * KV_HEADS + kv_head) % num_tiles
        tile_row = first_row + tile * ROWS

        is_continued = unit > item_start  # another span holds the item's start
        is_cut = is_continued | (stop < item_start + num_blocks)
        if is_continued:
            first = item_start // span  # the span in which the item starts
            if group == first + 1:
                tl.store(cuts + program, tl.cdiv(item_start + num_blocks, span) - first)
                tl.store(cuts + num_programs + program, b)
                tl.store(cuts + num_programs * 2 + program, kv_head)
                tl.store(cuts + num_programs * 3 + program, tile_row)
                tl.store(
                    cuts + num_programs * 4 + program,
                    first_program + first * num_tiles + (program - first_program) % num_tiles,
                )
                tl.store(cuts + num_programs * 5 + program, num_tiles)

        if tile_row < q_len * GROUP:
            # the segment's blocks, counted from the request's entry 0
            prefix_blocks = tl.cdiv(prefix_len, BLOCK_N)
            block = _first_block(prefix_len, window, BLOCK_N, HAS_WINDOW) + unit - item_start
            block_stop = block + tl.minimum(stop - unit, item_start + num_blocks - unit)

            # [ROWS] rows of the tile, and their queries
            index = tile_row + offs_m
            node = index // GROUP
            row = (q_start + node).to(tl.int64)
            head = kv_head * GROUP + index % GROUP
            has_row = node < q_len
            # no row of the tile sees a tree block past its last ancestor bit
            last_word = _last_word(words, words_stride, row, has_row, num_words)
            start_m = _window_starts(positions, row, has_row, window, HAS_WINDOW)
            q = tl.load(
                query
                + row_offset(row, query_stride_row, head * query_stride_head)[:, None]
                + offs_d[None, :],
                mask=has_row[:, None] & (offs_d < HEAD_DIM)[None, :],
                other=0.0,
            )
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM], tl.float32)

            # full prefix blocks that every row sees whole
            full_start = block
            if HAS_WINDOW:
                full_start = tl.cdiv(tl.maximum(tl.max(start_m), 0), BLOCK_N).to(tl.int32)
                full_start = tl.minimum(tl.maximum(full_start, block), block_stop)
            full_stop = tl.maximum(tl.minimum(prefix_len // BLOCK_N, block_stop), full_start)
            key_head = key_pool + kv_head * pool_stride_head
            value_head = value_pool + kv_head * pool_stride_head
            slots = kv_indices + kv_start + offs_n
            if AHEAD:
                slot = tl.load(slots + full_start * BLOCK_N, mask=(offs_n >= 0) & (full_start < full_stop), other=0)
            for j in tl.range(full_start, full_stop):
                if not AHEAD:
                    slot = tl.load(slots + j * BLOCK_N)
                offset = row_offset(slot.to(OFFSET), pool_stride_slot, 0)[:, None] + offs_d[None, :]
                if HEAD_DIM < DIM:
                    k = tl.load(key_head + offset, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
                    v = tl.load(value_head + offset, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
                else:
                    k = tl.load(key_head + offset)
                    v = tl.load(value_head + offset)
                if AHEAD:
                    slot = tl.load(slots + tl.minimum(j + 1, full_stop - 1) * BLOCK_N)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")
                s = _cap(s, scale, softcap, HAS_SOFTCAP)
                new_top = tl.maximum(top, tl.max(s, 1))
                p, shrink = _weights(s, top, new_top, scale, HAS_SOFTCAP)
                top = new_top
                total = total * shrink + tl.sum(p, 1)
                acc = tl.dot(p.to(v.dtype), v, acc=acc * shrink[:, None], input_precision="ieee")

            # the others: under the window's edge, the prefix's last entries, the tree
            tree_stop = prefix_blocks + tl.cdiv((last_word + 1) * 32, BLOCK_N)
            num_front = full_start - block
            num_rest = num_front + tl.maximum(tl.minimum(block_stop, tree_stop) - full_stop, 0)
            for i in tl.range(0, num_rest, num_stages=REST_STAGES):
                j = tl.where(i < num_front, block + i, full_stop + i - num_front)
                in_tree = j >= prefix_blocks
                entry = tl.where(in_tree, j - prefix_blocks, j) * BLOCK_N + offs_n
                length = tl.where(in_tree, q_len, prefix_len)
                near = tl.minimum(entry, length - 1)  # past the end: the last again, masked below
                slot = tl.load(kv_indices + kv_start + near, mask=(near >= 0) & (j < prefix_blocks), other=0)
                offset = row_offset(
                    tl.where(in_tree, (q_start + near).to(slot.dtype), slot).to(OFFSET),
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
                sees = (entry < length)[None, :] & _sees(
                    words, words_stride, row, has_row, num_words, j - prefix_blocks, in_tree, BLOCK_N
                )
                if HAS_WINDOW:
                    key_position = tl.load(positions + q_start + near, mask=(near >= 0) & in_tree, other=0)
                    key_position = tl.where(in_tree, key_position, entry.to(tl.int64))
                    sees &= key_position[None, :] >= start_m[:, None]
                s = tl.dot(q, tl.trans(k), input_precision="ieee")
                s = _cap(s, scale, softcap, HAS_SOFTCAP)
                s = tl.where(sees, s, float("-inf"))
                new_top = tl.maximum(top, tl.max(s, 1))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)  # rows that have seen nothing yet
                p, shrink = _weights(s, top, base, scale, HAS_SOFTCAP)
                top = new_top
                total = total * shrink + tl.sum(p, 1)
                acc = tl.dot(p.to(v.dtype), v, acc=acc * shrink[:, None], input_precision="ieee")

            if not HAS_SOFTCAP:
                top *= scale
            if is_cut:
                place = (program * 2 + tl.where(is_continued, 0, 1)) * BLOCK_M
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


@triton.jit
def merge_kernel(
    partial,  # [programs, 2, BLOCK_M, HEAD_DIM]
    partial_stats,  # [programs, 2, 2, BLOCK_M]
    cuts,  # [CUT_WORDS, programs]
    qo_indptr,
    sinks,
    output,  # [T, KV_HEADS * GROUP, HEAD_DIM], contiguous
    lse,
    num_programs,  # of the first kernel
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PROGRAMS: tl.constexpr,  # num_programs rounded up to a power of two
    MERGE_M: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Merge the partial results of cut tiles in span order, MERGE_M rows at a time."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    # the tasks: MERGE_M rows of a cut tile each
    place_of = tl.arange(0, PROGRAMS)
    is_cut = tl.load(cuts + place_of, mask=place_of < num_programs, other=0) > 0
    ends = tl.cumsum(is_cut.to(tl.int32)) * (BLOCK_M // MERGE_M)
    num_tasks = tl.max(ends)
    offs_d = tl.arange(0, DIM)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        cut = cuts + tl.sum((ends <= task).to(tl.int32))
        num_splits = tl.load(cut)
        b = tl.load(cut + num_programs)
        kv_head = tl.load(cut + num_programs * 2)
        tile_row = tl.load(cut + num_programs * 3)
        first = tl.load(cut + num_programs * 4)
        stride = tl.load(cut + num_programs * 5)
        q_start = tl.load(qo_indptr + b)
        q_len = tl.load(qo_indptr + b + 1) - q_start

        offs_m = task % (BLOCK_M // MERGE_M) * MERGE_M + tl.arange(0, MERGE_M)
        index = tile_row + offs_m
        node = index // GROUP
        has_row = node < q_len
        head = kv_head * GROUP + index % GROUP
        if (tile_row + tl.min(offs_m)) // GROUP < q_len:
            top = tl.full([MERGE_M], float("-inf"), tl.float32)
            total = tl.zeros([MERGE_M], tl.float32)
            acc = tl.zeros([MERGE_M, DIM], tl.float32)
            for start in range(0, num_splits, MERGE_SPLITS):
                split = start + tl.arange(0, MERGE_SPLITS)
                # the first span holds the item's start (side 1), the others go on with it (side 0)
                place = ((first + split * stride) * 2 + (split == 0).to(tl.int32)) * BLOCK_M
                has = (split < num_splits)[:, None] & has_row[None, :]  # [MERGE_SPLITS, MERGE_M]
                tops = tl.load(
                    partial_stats + (place * 2)[:, None] + offs_m[None, :], mask=has, other=float("-inf")
                )
                totals = tl.load(
                    partial_stats + (place * 2 + BLOCK_M)[:, None] + offs_m[None, :], mask=has, other=0.0
                )
                values = tl.load(
                    partial
                    + (place[:, None] + offs_m[None, :])[:, :, None] * HEAD_DIM
                    + offs_d[None, None, :],
                    mask=has[:, :, None] & (offs_d < HEAD_DIM)[None, None, :],
                    other=0.0,
                )
                new_top = tl.maximum(top, tl.max(tops, 0))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                shrink = tl.exp2(top - base)
                weights = tl.exp2(tops - base[None, :])
                total = total * shrink + tl.sum(totals * weights, 0)
                acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
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
def _weights(s, top, new_top, scale, HAS_SOFTCAP: tl.constexpr):
    """One step of the online softmax: weights against the new maximum, and the factor on what came before."""
    if HAS_SOFTCAP:
        return tl.exp2(s - new_top[:, None]), tl.exp2(top - new_top)
    return tl.exp2(s * scale - (new_top * scale)[:, None]), tl.exp2((top - new_top) * scale)


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

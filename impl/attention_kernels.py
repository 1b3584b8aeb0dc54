"""The kernels of ``verify_attention``: one pass over prefix and tree, then a merge of split results.

Work. The query heads of a KV group are packed into rows: row ``i`` of a request and KV head is query
row ``i // GROUP``, head ``kv_head * GROUP + i % GROUP``. A *tile* is ``BLOCK_M + EXTRA_M`` such rows.
The KV entries of a request come in *blocks* of ``BLOCK_N``: first those of the prefix (the last may be
partial), then those of the tree. An *item* is one (request, KV head) with all its blocks.

Schedule. All blocks of all items stand in one line, in the order (request, KV head, block). The line is
cut into equal *spans*, one for each group of programs; a group has one program for each tile, so the
programs of a group read the same blocks at the same time and the second reader finds them in L2. Widths,
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

# One cut tile, in int32 words of a row of `cuts`: request (-1: none), KV head, tile, first partial's
# program, number of spans that share it, distance between their programs.
CUT_WORDS = tl.constexpr(8)


@triton.jit(
    do_not_specialize=["num_rows", "batch", "num_words", "words_stride", "window"]  # no recompilation between calls
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
    partial,  # [programs, 2, ROWS, HEAD_DIM]
    partial_stats,  # [programs, 2, 2, ROWS]: maximum, sum
    cuts,  # [programs, CUT_WORDS]
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
    # what is compiled in
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BATCH: tl.constexpr,  # batch rounded up to a power of two
    WORDS: tl.constexpr,  # num_words rounded up to a power of two
    OFFSET: tl.constexpr,  # int32 where every offset into keys and values fits, else int64
    BLOCK_M: tl.constexpr,
    EXTRA_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Attend one span of blocks with the rows of one tile."""
    ROWS: tl.constexpr = BLOCK_M + EXTRA_M
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)

    # [BATCH] the line of blocks: each request's share, and where it ends
    request = tl.arange(0, BATCH)
    exists = request < batch
    q_ends = tl.load(qo_indptr + request + 1, mask=exists, other=0)
    q_lens = q_ends - tl.load(qo_indptr + request, mask=exists, other=0)
    prefix_lens = tl.load(kv_indptr + request + 1, mask=exists, other=0) - tl.load(
        kv_indptr + request, mask=exists, other=0
    )
    shares = KV_HEADS * _num_blocks(prefix_lens, q_lens, window, BLOCK_N, HAS_WINDOW)
    ends = tl.cumsum(shares)
    num_units = tl.sum(shares)
    num_tiles = tl.maximum(tl.cdiv(tl.max(q_lens) * GROUP, ROWS), 1)
    num_groups = tl.maximum(num_programs // num_tiles, 1)
    span = chunk_len(num_units, num_groups, 1)

    tl.store(cuts + pid * CUT_WORDS, -1)
    _clear_unused_rows(
        output, lse, tl.max(q_ends), num_rows, pid, num_programs, KV_HEADS * GROUP, HEAD_DIM, DIM, HAS_LSE
    )

    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, DIM)
    for program in range(pid, num_groups * num_tiles, num_programs):
        group = program // num_tiles
        unit = chunk_start(group, span)
        end = tl.minimum(unit + span, num_units)
        while unit < end:
            # the item that holds this unit
            b = tl.sum((ends <= unit).to(tl.int32))
            before = tl.max(tl.where(request < b, ends, 0))
            q_start = tl.load(qo_indptr + b)
            q_len = tl.load(qo_indptr + b + 1) - q_start
            kv_start = tl.load(kv_indptr + b)
            prefix_len = tl.load(kv_indptr + b + 1) - kv_start
            num_blocks = _num_blocks(prefix_len, q_len, window, BLOCK_N, HAS_WINDOW)
            kv_head = (unit - before) // num_blocks
            item_start = before + kv_head * num_blocks
            item = b * KV_HEADS + kv_head
            # tiles see different numbers of tree blocks: a program takes another tile for each item
            tile = (program % num_tiles + item) % num_tiles
            stop = tl.minimum(end, item_start + num_blocks)

            is_cut = (unit > item_start) | (stop < item_start + num_blocks)
            if (unit == chunk_start(group, span)) & (unit > item_start):
                first = item_start // span  # the span in which the item starts
                if group == first + 1:
                    _note_cut(
                        cuts + pid * CUT_WORDS,
                        b,
                        kv_head,
                        tile,
                        first * num_tiles + program % num_tiles,
                        tl.cdiv(item_start + num_blocks, span) - first,
                        num_tiles,
                    )

            if tile * ROWS < q_len * GROUP:
                # blocks of this segment, counted from the request's entry 0
                first_block = _first_block(prefix_len, window, BLOCK_N, HAS_WINDOW)
                prefix_blocks = tl.cdiv(prefix_len, BLOCK_N)
                block = first_block + unit - item_start
                block_stop = first_block + stop - item_start

                # [BLOCK_M] rows of the tile, and their queries
                index = tile * ROWS + tl.arange(0, BLOCK_M)
                node = index // GROUP
                row = (q_start + node).to(tl.int64)
                head = kv_head * GROUP + index % GROUP
                has_row = node < q_len
                q = tl.load(
                    query
                    + row_offset(row, query_stride_row, head * query_stride_head)[:, None]
                    + offs_d[None, :],
                    mask=has_row[:, None] & (offs_d < HEAD_DIM)[None, :],
                    other=0.0,
                )
                start_m = _window_starts(positions, row, has_row, window, HAS_WINDOW)
                top = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, DIM], tl.float32)
                last_word = _last_word(words, words_stride, row, has_row, num_words, WORDS)

                if EXTRA_M > 0:  # the few rows past BLOCK_M, as columns: they share each loaded block
                    index_x = tile * ROWS + BLOCK_M + tl.arange(0, EXTRA_M)
                    node_x = index_x // GROUP
                    row_x = (q_start + node_x).to(tl.int64)
                    head_x = kv_head * GROUP + index_x % GROUP
                    has_row_x = node_x < q_len
                    q_x = tl.load(  # [DIM, EXTRA_M]
                        query
                        + row_offset(row_x, query_stride_row, head_x * query_stride_head)[None, :]
                        + offs_d[:, None],
                        mask=has_row_x[None, :] & (offs_d < HEAD_DIM)[:, None],
                        other=0.0,
                    )
                    start_x = _window_starts(positions, row_x, has_row_x, window, HAS_WINDOW)
                    top_x = tl.full([EXTRA_M], float("-inf"), tl.float32)
                    total_x = tl.zeros([BLOCK_N, EXTRA_M], tl.float32)
                    acc_x = tl.zeros([DIM, EXTRA_M], tl.float32)
                    last_word = tl.maximum(
                        last_word, _last_word(words, words_stride, row_x, has_row_x, num_words, WORDS)
                    )

                # no row of the tile sees a tree block past its last ancestor bit
                block_stop = tl.minimum(
                    block_stop, prefix_blocks + tl.cdiv((last_word + 1) * 32, BLOCK_N)
                )
                # blocks from here to there are full prefix blocks that every row sees whole
                full_start = first_block
                if HAS_WINDOW:
                    latest = tl.max(start_m)
                    if EXTRA_M > 0:
                        latest = tl.maximum(latest, tl.max(start_x))
                    full_start = tl.cdiv(tl.maximum(latest, 0), BLOCK_N).to(tl.int32)
                full_stop = prefix_len // BLOCK_N

                slot = _slots(kv_indices, kv_start, block, prefix_blocks, prefix_len, BLOCK_N)
                for j in tl.range(block, block_stop):
                    in_tree = j >= prefix_blocks
                    tree_block = tl.where(in_tree, j - prefix_blocks, 0)
                    entry = tl.where(in_tree, tree_block, j) * BLOCK_N + offs_n
                    is_entry = entry < tl.where(in_tree, q_len, prefix_len)
                    offset = row_offset(
                        tl.where(in_tree, (q_start + entry).to(slot.dtype), slot).to(OFFSET),
                        tl.where(in_tree, tree_stride_row, pool_stride_slot),
                        kv_head * tl.where(in_tree, tree_stride_head, pool_stride_head),
                    )
                    offset = offset[:, None] + offs_d[None, :]
                    has_kv = is_entry[:, None]
                    if HEAD_DIM < DIM:
                        has_kv &= (offs_d < HEAD_DIM)[None, :]
                    k = tl.load(tl.where(in_tree, key, key_pool) + offset, mask=has_kv, other=0.0)
                    v = tl.load(tl.where(in_tree, value, value_pool) + offset, mask=has_kv, other=0.0)
                    # the next block's slots, a whole iteration ahead of the loads that need them
                    slot = _slots(kv_indices, kv_start, j + 1, prefix_blocks, prefix_len, BLOCK_N)

                    s = tl.dot(q, tl.trans(k), input_precision="ieee")
                    s = _cap(s, scale, softcap, HAS_SOFTCAP)
                    if EXTRA_M > 0:
                        s_x = tl.dot(k, q_x, input_precision="ieee")
                        s_x = _cap(s_x, scale, softcap, HAS_SOFTCAP)
                    if (j < full_start) | (j >= full_stop):
                        key_position = entry.to(tl.int64)
                        if HAS_WINDOW:
                            key_position = tl.where(
                                in_tree,
                                tl.load(
                                    positions + q_start + entry, mask=is_entry & in_tree, other=0
                                ),
                                key_position,
                            )
                        sees = is_entry[None, :] & _sees(
                            words, words_stride, row, has_row, num_words, tree_block, in_tree, BLOCK_N
                        )
                        if HAS_WINDOW:
                            sees &= key_position[None, :] >= start_m[:, None]
                        s = tl.where(sees, s, float("-inf"))
                        if EXTRA_M > 0:
                            sees_x = is_entry[None, :] & _sees(
                                words, words_stride, row_x, has_row_x, num_words, tree_block, in_tree, BLOCK_N
                            )
                            if HAS_WINDOW:
                                sees_x &= key_position[None, :] >= start_x[:, None]
                            s_x = tl.where(tl.trans(sees_x), s_x, float("-inf"))

                    p, shrink, top = _softmax_step(s, top, scale, 1, HAS_SOFTCAP)
                    total = total * shrink + tl.sum(p, 1)
                    acc = tl.dot(
                        p.to(v.dtype), v, acc=acc * shrink[:, None], input_precision="ieee"
                    )
                    if EXTRA_M > 0:
                        p_x, shrink_x, top_x = _softmax_step(s_x, top_x, scale, 0, HAS_SOFTCAP)
                        # summed over the block after the loop: rows of a block lie in several warps
                        total_x = total_x * shrink_x[None, :] + p_x
                        acc_x = tl.dot(
                            tl.trans(v), p_x.to(v.dtype), acc=acc_x * shrink_x[None, :], input_precision="ieee"
                        )

                if not HAS_SOFTCAP:
                    top *= scale
                if is_cut:
                    side = tl.where(unit > item_start, 0, 1)
                    place = (program * 2 + side) * ROWS
                    offs_m = tl.arange(0, BLOCK_M)
                    tl.store(
                        partial + (place + offs_m)[:, None] * HEAD_DIM + offs_d[None, :],
                        acc,
                        mask=has_row[:, None] & (offs_d < HEAD_DIM)[None, :],
                    )
                    tl.store(partial_stats + place * 2 + offs_m, top, mask=has_row)
                    tl.store(partial_stats + place * 2 + ROWS + offs_m, total, mask=has_row)
                else:
                    o, log_sum = _finish(acc, top, total, sinks, head, has_row, 1, HAS_SINKS)
                    out_row = row * (KV_HEADS * GROUP) + head
                    tl.store(
                        output + out_row[:, None] * HEAD_DIM + offs_d[None, :],
                        o.to(output.dtype.element_ty),
                        mask=has_row[:, None] & (offs_d < HEAD_DIM)[None, :],
                    )
                    if HAS_LSE:
                        tl.store(lse + out_row, log_sum, mask=has_row)
                if EXTRA_M > 0:
                    sum_x = tl.sum(total_x, 0)
                    if not HAS_SOFTCAP:
                        top_x *= scale
                    if is_cut:
                        side = tl.where(unit > item_start, 0, 1)
                        place = (program * 2 + side) * ROWS
                        offs_x = BLOCK_M + tl.arange(0, EXTRA_M)
                        tl.store(
                            partial + (place + offs_x)[None, :] * HEAD_DIM + offs_d[:, None],
                            acc_x,
                            mask=has_row_x[None, :] & (offs_d < HEAD_DIM)[:, None],
                        )
                        tl.store(partial_stats + place * 2 + offs_x, top_x, mask=has_row_x)
                        tl.store(partial_stats + place * 2 + ROWS + offs_x, sum_x, mask=has_row_x)
                    else:
                        o_x, log_sum_x = _finish(
                            acc_x, top_x, sum_x, sinks, head_x, has_row_x, 0, HAS_SINKS
                        )
                        out_row_x = row_x * (KV_HEADS * GROUP) + head_x
                        tl.store(
                            output + out_row_x[None, :] * HEAD_DIM + offs_d[:, None],
                            o_x.to(output.dtype.element_ty),
                            mask=has_row_x[None, :] & (offs_d < HEAD_DIM)[:, None],
                        )
                        if HAS_LSE:
                            tl.store(lse + out_row_x, log_sum_x, mask=has_row_x)
            unit = stop


@triton.jit
def merge_kernel(
    partial,  # [programs, 2, ROWS, HEAD_DIM]
    partial_stats,  # [programs, 2, 2, ROWS]
    cuts,  # [programs, CUT_WORDS]
    qo_indptr,
    sinks,
    output,  # [T, KV_HEADS * GROUP, HEAD_DIM], contiguous
    lse,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_M: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Merge the partial results of MERGE_M rows of one cut tile, in span order."""
    cut = cuts + tl.program_id(0) * CUT_WORDS
    b = tl.load(cut)
    if b >= 0:
        kv_head = tl.load(cut + 1)
        tile = tl.load(cut + 2)
        first = tl.load(cut + 3)
        num_splits = tl.load(cut + 4)
        stride = tl.load(cut + 5)
        q_start = tl.load(qo_indptr + b)
        q_len = tl.load(qo_indptr + b + 1) - q_start

        offs_m = tl.program_id(1) * MERGE_M + tl.arange(0, MERGE_M)
        offs_d = tl.arange(0, DIM)
        index = tile * ROWS + offs_m
        node = index // GROUP
        has_row = (offs_m < ROWS) & (node < q_len)
        head = kv_head * GROUP + index % GROUP

        top = tl.full([MERGE_M], float("-inf"), tl.float32)
        total = tl.zeros([MERGE_M], tl.float32)
        acc = tl.zeros([MERGE_M, DIM], tl.float32)
        for start in range(0, num_splits, MERGE_SPLITS):
            split = start + tl.arange(0, MERGE_SPLITS)
            # the first span holds the item's start (side 1), the others go on with it (side 0)
            place = ((first + split * stride) * 2 + (split == 0).to(tl.int32)) * ROWS
            has = (split < num_splits)[:, None] & has_row[None, :]  # [MERGE_SPLITS, MERGE_M]
            tops = tl.load(
                partial_stats + (place * 2)[:, None] + offs_m[None, :], mask=has, other=float("-inf")
            )
            totals = tl.load(
                partial_stats + (place * 2 + ROWS)[:, None] + offs_m[None, :], mask=has, other=0.0
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

        o, log_sum = _finish(acc, top, total, sinks, head, has_row, 1, HAS_SINKS)
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
def _slots(kv_indices, kv_start, block, prefix_blocks, prefix_len, BLOCK_N: tl.constexpr):
    """Pool slots of a prefix block; 0 past the prefix."""
    entry = block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_prefix = (block < prefix_blocks) & (entry < prefix_len)
    return tl.load(kv_indices + kv_start + entry, mask=in_prefix, other=0)


@triton.jit
def _window_starts(positions, row, has_row, window, HAS_WINDOW: tl.constexpr):
    """First position that each row's window keeps."""
    if HAS_WINDOW:
        return tl.where(
            has_row, window_start(tl.load(positions + row, mask=has_row, other=0), window), 0
        )
    return row


@triton.jit
def _last_word(words, words_stride, row, has_row, num_words, WORDS: tl.constexpr):
    """Last word in which any of the rows has a bit; -1 if none has."""
    word = tl.arange(0, WORDS)
    bits = tl.load(
        words + row_offset(row, words_stride, 0)[:, None] + word[None, :],
        mask=has_row[:, None] & (word < num_words)[None, :],
        other=0,
    )
    return tl.max(tl.where(bits != 0, word[None, :], -1))


@triton.jit
def _sees(words, words_stride, row, has_row, num_words, tree_block, in_tree, BLOCK_N: tl.constexpr):
    """[rows, BLOCK_N] ancestor bits of a tree block; all True in a prefix block."""
    bits = tl.full([row.shape[0], BLOCK_N], -1, tl.int32)
    block_word = bit_word(tree_block * BLOCK_N)
    column_word = bit_word(tl.arange(0, BLOCK_N))
    for i in tl.static_range(BLOCK_N // 32):
        word = block_word + i
        row_bits = tl.load(
            words + row_offset(row, words_stride, word),
            mask=has_row & in_tree & (word < num_words),
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
def _softmax_step(s, top, scale, AXIS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """One step of the online softmax over AXIS: weights, and the factor on what came before."""
    new_top = tl.maximum(top, tl.max(s, AXIS))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # rows that have seen nothing yet
    if HAS_SOFTCAP:
        p = tl.exp2(s - tl.expand_dims(base, AXIS))
        shrink = tl.exp2(top - base)
    else:
        p = tl.exp2(s * scale - tl.expand_dims(base * scale, AXIS))
        shrink = tl.exp2((top - base) * scale)
    return p, shrink, new_top


@triton.jit
def _finish(acc, top, total, sinks, head, has_row, AXIS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Output and natural log-sum-exp from the sums; a row that sees nothing gives 0 and -inf."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=has_row, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        acc *= tl.expand_dims(shrink, AXIS)
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)  # with top -inf: nothing was seen
    return acc / tl.expand_dims(total, AXIS), (top + tl.log2(total)) * LN2


@triton.jit
def _note_cut(cut, b, kv_head, tile, first, num_splits, stride):
    """Tell the second kernel of a tile that several spans share."""
    tl.store(cut, b)
    tl.store(cut + 1, kv_head)
    tl.store(cut + 2, tile)
    tl.store(cut + 3, first)
    tl.store(cut + 4, num_splits)
    tl.store(cut + 5, stride)


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

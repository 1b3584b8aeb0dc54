"""The kernel of ``verify_attention`` for Hopper's matrix units, in Gluon: large tiles, asynchronous throughout.

Schedule, records, masks and merge are those of ``attention_kernels``; read that first. What differs is how
one program attends its span. Three groups of four warps work on one tile of ``BLOCK_M`` = 128 rows:

- the *producer* gathers the rows of keys and values with 16-byte asynchronous copies into ``STAGES`` shared
  buffers of ``BLOCK_N`` entries, as far ahead of the others as there is room;
- two *consumers* of 64 rows each multiply from the same buffers, so keys and values are read once for 128
  rows. The scores of block i + 1 and the output of block i are issued together, and the softmax of block
  i + 1 runs while the matrix units still do the latter; the two consumers fill each other's gaps.

They meet in two barriers a buffer: *full* (the copies have landed) and *empty* (both consumers have read).
Pools of fp8 go through the producer's registers: it loads a block while it converts the one before, exactly, and
stores what the consumers read as if it had been copied. Scaled pools are done as in ``attention_kernels``.

All three walk the same segments in the same order, each computing the schedule for itself from the indptrs.

A request whose rows leave 64 or fewer beyond full tiles (the root makes q_len = 2^k + 1) has a *tail tile*
that one consumer does alone. It costs less than a full tile, ``TAIL_SAVING`` sixteenths of it for each block,
so tail tiles have programs and longer spans of their own. Up to four full tiles are done side by side by a
group of programs, as in ``attention_kernels``; more would leave many of the 132 programs over, so they
follow one another in the line instead, item by item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ddtree.impl.index import (
    bit_shift,
    bit_word,
    block_start,
    chunk_len,
    chunk_start,
    col_of,
    num_blocks,
    round_up,
    row_of,
    row_offset,
    window_start,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
SHARE = gl.constexpr(64)
"""Rows of one consumer."""
BLOCK_M = gl.constexpr(128)
"""Rows of a tile."""


@gluon.jit(
    do_not_specialize=[
        "num_rows",
        "batch",
        "num_words",
        "words_stride",
        "window",
        "key_factor_stride",
        "value_factor_stride",
    ]
)
def attend_hopper_kernel(
    # inputs, outputs and sizes: see attention_kernels.attend_kernel
    query,
    key,
    value,
    key_pool,
    value_pool,
    words,
    qo_indptr,
    kv_indptr,
    kv_indices,
    positions,
    sinks,
    key_factor,
    value_factor,
    output,
    lse,
    partial,
    partial_stats,
    records,
    num_records,
    num_rows,
    batch,
    num_words,
    query_stride_row,
    query_stride_head,
    tree_stride_row,
    tree_stride_head,
    pool_stride_slot,
    pool_stride_head,
    words_stride,
    key_factor_stride,
    value_factor_stride,
    scale,
    softcap,
    window,
    # what is compiled in
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BATCH: gl.constexpr,
    OFFSET: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TAIL_SAVING: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    HAS_LSE: gl.constexpr,
    FP8: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Attend one span of blocks with the rows of one tile."""
    dtype: gl.constexpr = query.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_blocks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    # buffers of their own: what waits for one need not be ordered with what arrives at another
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    arrivals: gl.constexpr = 1 if FP8 else 128  # the producer's stores, or each thread's copies
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=arrivals)
        mbarrier.init(k_empty.index(i), count=2)  # both consumers
        mbarrier.init(v_full.index(i), count=arrivals)
        mbarrier.init(v_empty.index(i), count=2)
    barriers = (k_full, k_empty, v_full, v_empty)

    indptrs = (qo_indptr, kv_indptr, batch, window)
    masks = (words, words_stride, num_words, positions)
    sources = (
        key, value, key_pool, value_pool, kv_indices,
        tree_stride_row, tree_stride_head, pool_stride_slot, pool_stride_head,
    )  # fmt: skip
    queries = (query, query_stride_row, query_stride_head, scale, softcap)
    factors = (key_factor, value_factor, key_factor_stride, value_factor_stride)
    results = (output, partial, partial_stats, records, num_records, num_rows)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    indptrs, masks, queries, factors, sinks, results, lse, k_blocks, v_blocks, barriers,
                    0, KV_HEADS, GROUP, HEAD_DIM, BATCH, BLOCK_N, STAGES, TAIL_SAVING,
                    HAS_SOFTCAP, HAS_SINKS, HAS_WINDOW, HAS_SCALES, HAS_LSE,
                ),
            ),
            (
                _consume,
                (
                    indptrs, masks, queries, factors, sinks, results, lse, k_blocks, v_blocks, barriers,
                    1, KV_HEADS, GROUP, HEAD_DIM, BATCH, BLOCK_N, STAGES, TAIL_SAVING,
                    HAS_SOFTCAP, HAS_SINKS, HAS_WINDOW, HAS_SCALES, HAS_LSE,
                ),
            ),
            (
                _produce,
                (
                    indptrs, masks, sources, k_blocks, v_blocks, barriers,
                    KV_HEADS, GROUP, HEAD_DIM, BATCH, OFFSET, BLOCK_N, STAGES, TAIL_SAVING, HAS_WINDOW,
                    FP8,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _requests(
    qo_indptr,
    kv_indptr,
    batch,
    window,
    GROUP: gl.constexpr,
    BATCH: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
):
    """Each request's number, its blocks a KV head; the most rows of one and the rows of all."""
    # every warp holds all requests: its reductions need no other warp
    request = gl.arange(0, BATCH, gl.BlockedLayout([BATCH // 32], [32], [gl.num_warps()], [0]))
    exists = request < batch
    q_starts = gl.load(qo_indptr + request, mask=exists, other=0).to(gl.int32)
    q_ends = gl.load(qo_indptr + request + 1, mask=exists, other=0).to(gl.int32)
    kv_starts = gl.load(kv_indptr + request, mask=exists, other=0).to(gl.int32)
    kv_ends = gl.load(kv_indptr + request + 1, mask=exists, other=0).to(gl.int32)
    q_lens = q_ends - q_starts
    prefix_lens = kv_ends - kv_starts
    prefix_blocks = num_blocks(prefix_lens, BLOCK_N)
    first = gl.minimum(_first_block(prefix_lens, window, BLOCK_N, HAS_WINDOW), prefix_blocks)
    tree_blocks = num_blocks(q_lens, BLOCK_N)
    blocks = gl.where(q_lens > 0, prefix_blocks - first + tree_blocks, 0)
    return request, blocks, row_offset(gl.max(q_lens), GROUP, 0), gl.max(q_ends)


@gluon.jit
def _programs(max_rows, num_programs, TAIL_SAVING: gl.constexpr):
    """How programs share the tiles: a request's full tiles, how many of them a group of programs does side by
    side, groups, and programs that do the tail tile (0: there is none)."""
    shares = gl.maximum(num_blocks(max_rows, SHARE), 2)
    full_tiles = row_of(shares, 2)
    has_tail = col_of(shares, 2)
    cost = row_offset(full_tiles, 16, row_offset(has_tail, 16 - TAIL_SAVING, 0))
    # programs do not divide well by many tiles: these follow one another in the line
    side_by_side = gl.where(full_tiles > 4, 1, full_tiles)
    work = row_offset(row_of(full_tiles, side_by_side), row_offset(num_programs, 16, 0), 0)
    groups = gl.maximum(row_of(work, cost), 1)
    rest = gl.maximum(num_programs - row_offset(groups, side_by_side, 0), 1)
    tails = row_offset(has_tail, rest, 0)
    return full_tiles, side_by_side, groups, tails


@gluon.jit
def _spans(blocks, num_groups, items):
    """The line of blocks: the share of each request's items, where requests end, and a span's length."""
    span = chunk_len(row_offset(gl.sum(blocks), items, 0), num_groups, 1)
    # cut every item at multiples of the span instead where that makes the longest span (almost) no longer
    most = gl.maximum(gl.max(blocks), 1)
    least = gl.maximum(span, 1)
    piece = num_blocks(most, gl.maximum(row_of(most, least), 1))
    longer = round_up(span, piece)
    exact = block_start(num_blocks(blocks, least), span)
    even = round_up(blocks, piece)
    use_exact = gl.sum(exact) * items <= span * num_groups
    use_even = (longer * 16 <= span * 17) & (gl.sum(even) * items <= longer * num_groups)
    share = gl.where(use_exact, exact, gl.where(use_even, even, blocks))
    span = gl.where(use_exact, span, gl.where(use_even, longer, span))
    ends = gl.associative_scan(row_offset(share, items, 0), 0, _add)
    return share, ends, row_offset(gl.sum(share), items, 0), span


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _segment(
    unit,
    end,
    program,
    request,
    blocks,
    share,
    ends,
    tiles,
    in_line,
    first_tile,
    indptrs,
    KV_HEADS: gl.constexpr,
):
    """The item that holds a unit of the line, the segment's end, and the tile that this program takes."""
    qo_indptr, kv_indptr, _, _ = indptrs
    b = gl.sum((ends <= unit).to(gl.int32))
    before = gl.max(gl.where(request < b, ends, 0))
    item_share = gl.sum(gl.where(request == b, share, 0))
    num_blocks = gl.sum(gl.where(request == b, blocks, 0))
    q_start = gl.load(qo_indptr + b).to(gl.int32)
    q_len = gl.load(qo_indptr + b + 1).to(gl.int32) - q_start
    kv_start = gl.load(kv_indptr + b).to(gl.int32)
    prefix_len = gl.load(kv_indptr + b + 1).to(gl.int32) - kv_start
    line = row_of(unit - before, item_share)
    kv_head = row_of(line, in_line)
    item = row_offset(b, KV_HEADS, kv_head)
    item_start = before + block_start(line, item_share)
    item_stop = item_start + num_blocks
    stop = gl.minimum(end, item_start + item_share)
    tile = first_tile + gl.where(
        in_line > 1, col_of(line, in_line), col_of(col_of(program, tiles) + item, tiles)
    )
    return b, q_start, q_len, kv_start, prefix_len, kv_head, item, item_start, item_stop, stop, tile


@gluon.jit
def _full_blocks(
    unit, item_start, item_stop, stop, prefix_len, q_start, q_len, tile, positions, window,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The segment's blocks from the request's entry 0: its first, the first and last that every row sees whole, its last."""
    block = _first_block(prefix_len, window, BLOCK_N, HAS_WINDOW) + unit - item_start
    block_stop = block + gl.minimum(stop, item_stop) - unit
    full_start = block
    if HAS_WINDOW:
        rows: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        node = row_of(block_start(tile, BLOCK_M) + gl.arange(0, BLOCK_M, rows), GROUP)
        has_row = node < q_len
        position = gl.load(positions + q_start + node, mask=has_row, other=0)
        least_start = gl.max(gl.where(has_row, window_start(position, window), 0))
        full_start = num_blocks(gl.maximum(least_start, 0), BLOCK_N).to(gl.int32)
        # deep rows' windows start past the prefix: what is cut of it ends with it, before the tree
        prefix_stop = gl.minimum(num_blocks(prefix_len, BLOCK_N), block_stop)
        full_start = gl.maximum(gl.minimum(full_start, prefix_stop), block)
    full_stop = gl.maximum(gl.minimum(row_of(prefix_len, BLOCK_N), block_stop), full_start)
    return block, full_start, full_stop, block_stop


@gluon.jit
def _rest_blocks(
    block, full_start, full_stop, block_stop, prefix_blocks, q_start, q_len, tile, masks,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """How many blocks need a mask: prefix blocks under a window's edge, with them the prefix's last entries, and
    with both the tree blocks that a row sees. They are attended in this order."""
    words, words_stride, num_words, _ = masks
    num_front = full_start - block
    last_word = block_start(0, prefix_blocks) - 1
    if block_stop > prefix_blocks:
        # no row of the tile sees a tree block past its last ancestor bit
        row_words: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [gl.num_warps(), 1], [1, 0])
        node = row_of(
            block_start(tile, BLOCK_M) + gl.arange(0, BLOCK_M, gl.SliceLayout(1, row_words)), GROUP
        )
        has_row = node < q_len
        row = (q_start + node).to(gl.int64)
        last = gl.full([BLOCK_M, 8], -1, gl.int32, row_words)
        for start in range(0, num_words, 8):
            word = start + gl.arange(0, 8, gl.SliceLayout(0, row_words))
            bits = gl.load(
                words + row_offset(row, words_stride, 0)[:, None] + word[None, :],
                mask=has_row[:, None] & (word < num_words)[None, :],
                other=0,
            )
            last = gl.where(bits != 0, word[None, :], last)
        last_word = gl.max(gl.max(last, 1), 0)
    tree_stop = prefix_blocks + num_blocks(block_start(last_word + 1, 32), BLOCK_N)
    num_pooled = num_front + gl.maximum(gl.minimum(block_stop, prefix_blocks) - full_stop, 0)
    num_rest = num_front + gl.maximum(gl.minimum(block_stop, tree_stop) - full_stop, 0)
    return num_front, num_pooled, num_rest


@gluon.jit
def _first_block(prefix_len, window, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr):
    """First prefix block that a row can see: the root's window reaches back farthest."""
    if HAS_WINDOW:
        return row_of(gl.maximum(window_start(prefix_len, window), 0), BLOCK_N)
    return block_start(0, prefix_len)


@gluon.jit
def _produce(
    indptrs, masks, sources, k_blocks, v_blocks, barriers,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BATCH: gl.constexpr,
    OFFSET: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TAIL_SAVING: gl.constexpr,
    HAS_WINDOW: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of every block of the span into shared memory."""
    qo_indptr, kv_indptr, batch, window = indptrs
    (
        key, value, key_pool, value_pool, kv_indices,
        tree_stride_row, tree_stride_head, pool_stride_slot, pool_stride_head,
    ) = sources  # fmt: skip
    _, _, _, positions = masks
    # of 16-bit entries 16 bytes a thread; of fp8 8 bytes, which become 16
    width: gl.constexpr = HEAD_DIM // 4 if FP8 else HEAD_DIM
    copies: gl.constexpr = gl.BlockedLayout(
        [1, 2 if FP8 else 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0]
    )
    pairs: gl.constexpr = gl.BlockedLayout(
        [1, 4], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0]
    )
    offs_m = gl.arange(0, BLOCK_N, gl.SliceLayout(1, pairs))
    offs_w = gl.arange(0, HEAD_DIM // 2, gl.SliceLayout(0, pairs))
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copies))
    offs_d = gl.arange(0, width, gl.SliceLayout(0, copies))
    AHEAD: gl.constexpr = 1 if FP8 else 0
    request, blocks, max_rows, _ = _requests(
        qo_indptr, kv_indptr, batch, window, GROUP, BATCH, BLOCK_N, HAS_WINDOW
    )
    num_programs = gl.num_programs(0)
    full_tiles, side_by_side, groups, tails = _programs(max_rows, num_programs, TAIL_SAVING)
    done = gl.to_tensor(0)
    for program in range(gl.program_id(0), row_offset(groups, side_by_side, tails), num_programs):
        is_full = program < row_offset(groups, side_by_side, 0)
        tiles = gl.where(is_full, side_by_side, 1)
        in_line = gl.where(is_full, row_of(full_tiles, side_by_side), 1)
        first_tile = gl.where(is_full, 0, full_tiles)
        base = gl.where(is_full, 0, row_offset(groups, side_by_side, 0))
        share, ends, num_units, span = _spans(
            blocks, gl.where(is_full, groups, tails), row_offset(in_line, KV_HEADS, 0)
        )
        unit = chunk_start(row_of(program - base, tiles), span)
        end = gl.minimum(unit + span, num_units)
        while unit < end:
            _, q_start, q_len, kv_start, prefix_len, kv_head, _, item_start, item_stop, stop, tile = (
                _segment(
                    unit, end, program - base, request, blocks, share, ends, tiles, in_line, first_tile,
                    indptrs, KV_HEADS,
                )
            )  # fmt: skip
            if tile * BLOCK_M < q_len * GROUP:
                block, full_start, full_stop, block_stop = _full_blocks(
                    unit, item_start, item_stop, stop, prefix_len, q_start, q_len, tile, positions, window,
                    GROUP, BLOCK_N, HAS_WINDOW,
                )  # fmt: skip
                key_head = key_pool + row_offset(kv_head, pool_stride_head, 0)
                value_head = value_pool + row_offset(kv_head, pool_stride_head, 0)
                slots = kv_indices + kv_start + offs_n
                # slots are loaded a block ahead of their keys
                slot = gl.load(
                    slots + block_start(full_start, BLOCK_N),
                    mask=(offs_n >= 0) & (full_start < full_stop),
                    other=0,
                ).to(gl.int32)
                if FP8:
                    offset = (
                        row_offset(slot.to(OFFSET), pool_stride_slot, 0)[:, None] + offs_d[None, :]
                    )
                    has_block = (offset >= 0) & (full_start < full_stop)
                    k = gl.load(key_head + offset, mask=has_block)
                    v = gl.load(value_head + offset, mask=has_block)
                    slot = gl.load(
                        slots + block_start(gl.minimum(full_start + 1, full_stop - 1), BLOCK_N),
                        mask=(offs_n >= 0) & (full_start < full_stop),
                        other=0,
                    ).to(gl.int32)
                for j in range(full_start, full_stop):
                    following = gl.load(
                        slots + block_start(gl.minimum(j + 1 + AHEAD, full_stop - 1), BLOCK_N)
                    ).to(gl.int32)
                    offset = (
                        row_offset(slot.to(OFFSET), pool_stride_slot, 0)[:, None] + offs_d[None, :]
                    )
                    if FP8:
                        # a fence waits for loads too: the next block's start after it
                        has_next = (offset >= 0) & (j + 1 < full_stop)
                        _put(
                            _converted(k, k_blocks.dtype), _converted(v, k_blocks.dtype),
                            k_blocks, v_blocks, barriers, done, STAGES,
                        )  # fmt: skip
                        k = gl.load(key_head + offset, mask=has_next)
                        v = gl.load(value_head + offset, mask=has_next)
                    else:
                        _copy(
                            key_head, value_head, offset, k_blocks, v_blocks, barriers, done, STAGES
                        )
                    done += 1
                    slot = following

                # the others: under the window's edge, the prefix's last entries, the tree
                prefix_blocks = num_blocks(prefix_len, BLOCK_N)
                num_front, _, num_rest = _rest_blocks(
                    block, full_start, full_stop, block_stop, prefix_blocks, q_start, q_len, tile, masks,
                    GROUP, BLOCK_N,
                )  # fmt: skip
                for i in range(num_rest):
                    j = gl.where(i < num_front, block + i, full_stop + i - num_front)
                    in_tree = j >= prefix_blocks
                    entry = block_start(gl.where(in_tree, j - prefix_blocks, j), BLOCK_N) + offs_n
                    # past the end: the last again, masked by the consumers
                    near = gl.minimum(entry, gl.where(in_tree, q_len, prefix_len) - 1)
                    slot = gl.load(
                        kv_indices + kv_start + near,
                        mask=(near >= 0) & (j < prefix_blocks),
                        other=0,
                    ).to(gl.int32)
                    if FP8:
                        if in_tree:
                            node = block_start(j - prefix_blocks, BLOCK_N) + offs_m
                            own = row_offset(
                                (q_start + gl.minimum(node, q_len - 1)).to(OFFSET),
                                tree_stride_row,
                                row_offset(kv_head, tree_stride_head, 0),
                            )
                            own = own[:, None] + offs_w[None, :]
                            own_k, own_v = gl.load(key + own), gl.load(value + own)
                            _put(own_k, own_v, k_blocks, v_blocks, barriers, done, STAGES)
                        else:
                            pooled = row_offset(slot.to(OFFSET), pool_stride_slot, 0)
                            pooled = pooled[:, None] + offs_d[None, :]
                            last_k, last_v = (
                                gl.load(key_head + pooled),
                                gl.load(value_head + pooled),
                            )
                            _put(
                                _converted(last_k, k_blocks.dtype), _converted(last_v, k_blocks.dtype),
                                k_blocks, v_blocks, barriers, done, STAGES,
                            )  # fmt: skip
                    else:
                        offset = row_offset(
                            gl.where(in_tree, q_start + near, slot).to(OFFSET),
                            gl.where(in_tree, tree_stride_row, pool_stride_slot),
                            row_offset(
                                kv_head, gl.where(in_tree, tree_stride_head, pool_stride_head), 0
                            ),
                        )
                        _copy(
                            gl.where(in_tree, key, key_pool),
                            gl.where(in_tree, value, value_pool),
                            offset[:, None] + offs_d[None, :],
                            k_blocks,
                            v_blocks,
                            barriers,
                            done,
                            STAGES,
                        )
                    done += 1
            unit = stop


@gluon.jit
def _converted(packed, dtype: gl.constexpr):
    """[rows, 2 w] pairs of entries in ``dtype``, exactly, from [rows, w] words of four e4m3 entries each."""
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b, c, d; .reg .b32 m, n; .reg .f32 p, q, r, s; mov.b32 {a, b}, $2; "
            "cvt.rn.f16x2.e4m3x2 m, a; cvt.rn.f16x2.e4m3x2 n, b; "
            "mov.b32 {a, b}, m; mov.b32 {c, d}, n; "
            "cvt.f32.f16 p, a; cvt.f32.f16 q, b; cvt.f32.f16 r, c; cvt.f32.f16 s, d; "
            "cvt.rn.bf16x2.f32 $0, q, p; cvt.rn.bf16x2.f32 $1, s, r; }",
            "=r,=r,r", [packed], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; "
            "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [packed], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return gl.reshape(gl.join(low, high), [packed.shape[0], packed.shape[1] * 2])


@gluon.jit
def _put(k, v, k_blocks, v_blocks, barriers, done, STAGES: gl.constexpr):
    """Store one block's rows, as pairs of entries, into its stage's buffers once they are empty."""
    k_full, k_empty, v_full, v_empty = barriers
    stage = col_of(done, STAGES)
    phase = ((done // STAGES) & 1) ^ 1
    # a buffer of 16-bit entries seen as one of words: the same bytes under the same swizzle. Gluon has no
    # public name for that
    words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    shape: gl.constexpr = [k_blocks.shape[1], k_blocks.shape[2] // 2]
    mbarrier.wait(k_empty.index(stage), phase)
    k_blocks.index(stage)._reinterpret(gl.int32, shape, words).store(k)  # noqa: SLF001
    mbarrier.wait(v_empty.index(stage), phase)
    v_blocks.index(stage)._reinterpret(gl.int32, shape, words).store(v)  # noqa: SLF001
    fence_async_shared()  # the matrix units read by another path than the stores went
    mbarrier.arrive(k_full.index(stage))
    mbarrier.arrive(v_full.index(stage))


@gluon.jit
def _copy(keys, values, offset, k_blocks, v_blocks, barriers, done, STAGES: gl.constexpr):
    """Copy one block's rows into its stage's buffers once they are empty; full as soon as all has landed."""
    k_full, k_empty, v_full, v_empty = barriers
    stage = done % STAGES
    phase = (done // STAGES) & 1
    mbarrier.wait(k_empty.index(stage), phase ^ 1)
    async_copy.async_copy_global_to_shared(k_blocks.index(stage), keys + offset)
    async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
    mbarrier.wait(v_empty.index(stage), phase ^ 1)
    async_copy.async_copy_global_to_shared(v_blocks.index(stage), values + offset)
    async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)


@gluon.jit
def _consume(
    indptrs, masks, queries, factors, sinks, results, lse, k_blocks, v_blocks, barriers,
    part: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BATCH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TAIL_SAVING: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_WINDOW: gl.constexpr,
    HAS_SCALES: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Attend every block of the span with 64 rows of the tile."""
    qo_indptr, kv_indptr, batch, window = indptrs
    _, _, _, positions = masks
    query, query_stride_row, query_stride_head, scale, softcap = queries
    key_factor, value_factor, key_factor_stride, value_factor_stride = factors
    output, partial, partial_stats, records, num_records, num_rows = results
    k_full, k_empty, v_full, v_empty = barriers
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    request, blocks, max_rows, used_rows = _requests(
        qo_indptr, kv_indptr, batch, window, GROUP, BATCH, BLOCK_N, HAS_WINDOW
    )
    pid = gl.program_id(0)
    num_programs = gl.num_programs(0)
    num_tiles = gl.maximum(num_blocks(max_rows, BLOCK_M), 1)
    # records stand by item and tile where there is one for each, else by program
    by_item = row_offset(row_offset(batch, KV_HEADS, 0), num_tiles, 0) <= num_programs
    if part == 0:
        if by_item:
            is_empty = (request < batch) & (blocks == 0)
            for i in range(
                pid,
                row_offset(row_offset(gl.max(is_empty.to(gl.int32)), KV_HEADS, 0), num_tiles, 0),
                num_programs,
            ):
                gl.store(
                    records + row_offset(row_offset(request, KV_HEADS, 0), num_tiles, i),
                    0,
                    mask=is_empty,
                )
        else:
            gl.store(records + pid, 0)
        if pid == 0:
            gl.store(
                num_records,
                gl.where(
                    by_item, row_offset(row_offset(batch, KV_HEADS, 0), num_tiles, 0), num_programs
                ),
            )
    if part == 1:
        _clear_unused_rows(
            output, lse, used_rows, num_rows, pid, num_programs, KV_HEADS * GROUP, HEAD_DIM, HAS_LSE
        )
    full_tiles, side_by_side, groups, tails = _programs(max_rows, num_programs, TAIL_SAVING)
    done = gl.to_tensor(0)
    for program in range(gl.program_id(0), row_offset(groups, side_by_side, tails), num_programs):
        is_full = program < row_offset(groups, side_by_side, 0)
        tiles = gl.where(is_full, side_by_side, 1)
        in_line = gl.where(is_full, row_of(full_tiles, side_by_side), 1)
        first_tile = gl.where(is_full, 0, full_tiles)
        base = gl.where(is_full, 0, row_offset(groups, side_by_side, 0))
        share, ends, num_units, span = _spans(
            blocks, gl.where(is_full, groups, tails), row_offset(in_line, KV_HEADS, 0)
        )
        group = row_of(program - base, tiles)
        unit = chunk_start(group, span)
        end = gl.minimum(unit + span, num_units)
        while unit < end:
            b, q_start, q_len, _, prefix_len, kv_head, item, item_start, item_stop, stop, tile = (
                _segment(
                    unit, end, program - base, request, blocks, share, ends, tiles, in_line, first_tile,
                    indptrs, KV_HEADS,
                )
            )  # fmt: skip
            tile_row = block_start(tile, BLOCK_M)
            is_first = unit == item_start
            is_cut = (not is_first) | (stop < item_stop)
            if part == 0:
                if is_first & (is_cut | by_item):
                    record = records + gl.where(by_item, row_offset(item, num_tiles, tile), program)
                    # of the item, where its start is in this span
                    num_splits = gl.cdiv(item_stop, span) - group
                    gl.store(record, gl.where(is_cut, num_splits, 0))
                    gl.store(record + num_programs, b)
                    gl.store(record + row_offset(2, num_programs, 0), kv_head)
                    gl.store(record + row_offset(3, num_programs, 0), tile_row)
                    gl.store(record + row_offset(4, num_programs, 0), program * 2 + 1)
                    gl.store(record + row_offset(5, num_programs, 0), tiles * 2)

            if tile_row < q_len * GROUP:
                block, full_start, full_stop, block_stop = _full_blocks(
                    unit, item_start, item_stop, stop, prefix_len, q_start, q_len, tile, positions, window,
                    GROUP, BLOCK_N, HAS_WINDOW,
                )  # fmt: skip
                prefix_blocks = num_blocks(prefix_len, BLOCK_N)
                num_front, num_pooled, num_rest = _rest_blocks(
                    block, full_start, full_stop, block_stop, prefix_blocks, q_start, q_len, tile, masks,
                    GROUP, BLOCK_N,
                )  # fmt: skip
                if tile_row + part * SHARE < q_len * GROUP:
                    index_q = (
                        tile_row + part * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, loads))
                    )
                    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, loads))
                    q = gl.load(
                        query
                        + row_offset(
                            (q_start + row_of(index_q, GROUP)).to(gl.int64),
                            query_stride_row,
                            row_offset(
                                row_offset(kv_head, GROUP, col_of(index_q, GROUP)),
                                query_stride_head,
                                0,
                            ),
                        )[:, None]
                        + offs_d[None, :],
                        mask=(row_of(index_q, GROUP) < q_len)[:, None],
                        other=0.0,
                    )
                    # in registers: shared memory then serves keys and values alone
                    q = gl.convert_layout(q, gl.DotOperandLayout(0, scores, 2))

                    index_m = tile_row + part * SHARE + gl.arange(0, SHARE, rows)
                    node = row_of(index_m, GROUP)
                    row = (q_start + node).to(gl.int64)
                    has_row = node < q_len
                    start_m = row
                    if HAS_WINDOW:
                        position = gl.load(positions + row, mask=has_row, other=0)
                        start_m = gl.where(has_row, window_start(position, window), 0)
                    top = gl.full([SHARE], float("-inf"), gl.float32, rows)
                    total = gl.zeros([SHARE], gl.float32, rows)
                    acc = gl.zeros([SHARE, HEAD_DIM], gl.float32, sums)
                    of_masks = (masks, row, has_row, start_m, q_start, q_len, prefix_len)
                    of_blocks = (block, num_front, full_stop, prefix_blocks)
                    pool_scale = scale
                    if HAS_SCALES:
                        key_unit = _factor(key_factor, key_factor_stride, kv_head)
                        pool_scale = gl.maximum(scale * key_unit, 1e-30)  # 0 would make -inf a NaN
                    top, total, acc = _attend(
                        full_stop - full_start, 0, q, k_blocks, v_blocks, barriers, done, top, total, acc,
                        pool_scale, softcap, of_masks, of_blocks,
                        BLOCK_N, STAGES, HAS_SOFTCAP, HAS_WINDOW, False, scores, sums,
                    )  # fmt: skip
                    done += full_stop - full_start
                    if HAS_SCALES:
                        # what is left of the prefix, still in the pool's units; then the call's
                        top, total, acc = _attend(
                            num_pooled, 0, q, k_blocks, v_blocks, barriers, done, top, total, acc,
                            pool_scale, softcap, of_masks, of_blocks,
                            BLOCK_N, STAGES, HAS_SOFTCAP, HAS_WINDOW, True, scores, sums,
                        )  # fmt: skip
                        done += num_pooled
                        acc *= _factor(value_factor, value_factor_stride, kv_head)
                        if not HAS_SOFTCAP:
                            top *= pool_scale / scale
                    else:
                        num_pooled = gl.minimum(num_pooled, 0)
                    top, total, acc = _attend(
                        num_rest - num_pooled, num_pooled,
                        q, k_blocks, v_blocks, barriers, done, top, total, acc,
                        scale, softcap, of_masks, of_blocks,
                        BLOCK_N, STAGES, HAS_SOFTCAP, HAS_WINDOW, True, scores, sums,
                    )  # fmt: skip
                    done += num_rest - num_pooled
                    _write(
                        acc, top, total, is_cut, is_first, program, tile_row, kv_head, q_start, q_len,
                        scale, sinks, output, partial, partial_stats, lse,
                        part, KV_HEADS, GROUP, HEAD_DIM, HAS_SOFTCAP, HAS_SINKS, HAS_LSE, sums,
                    )  # fmt: skip
                else:
                    # no rows: only let the buffers go
                    for _ in range(full_stop - full_start + num_rest):
                        stage = done % STAGES
                        phase = (done // STAGES) & 1
                        mbarrier.wait(k_full.index(stage), phase)
                        mbarrier.arrive(k_empty.index(stage))
                        mbarrier.wait(v_full.index(stage), phase)
                        mbarrier.arrive(v_empty.index(stage))
                        done += 1
            unit = stop


@gluon.jit
def _attend(
    count, first, q, k_blocks, v_blocks, barriers, done, top, total, acc,
    scale, softcap, of_masks, of_blocks,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
    MASKED: gl.constexpr, scores: gl.constexpr, sums: gl.constexpr,
):  # fmt: skip
    """``count`` blocks of entries for 64 rows: new maximum, sum and output sum. Of the blocks that need a
    mask the first of these is number ``first``."""
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, sums)
    k_full, k_empty, v_full, v_empty = barriers
    if count > 0:
        stage = done % STAGES
        mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
        nothing = gl.zeros([SHARE, BLOCK_N], gl.float32, scores)
        s = warpgroup_mma(
            q, k_blocks.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(stage))
        p, top, shrink = _softmax(
            s, top, scale, softcap, of_masks, of_blocks, first,
            BLOCK_N, HAS_SOFTCAP, HAS_WINDOW, MASKED, scores,
        )  # fmt: skip
        # each of a row's four threads sums its own weights; the four are added once, at the end
        total = total * shrink
        parts = _sum_own(p)
        own: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
        acc = acc * gl.convert_layout(shrink, rows_of_sums)[:, None]
        p = gl.convert_layout(p.to(k_blocks.dtype), weights)
        for i in range(1, count):
            v_stage = stage
            v_phase = ((done + i - 1) // STAGES) & 1
            stage = (done + i) % STAGES
            mbarrier.wait(k_full.index(stage), ((done + i) // STAGES) & 1)
            s = warpgroup_mma(
                q, k_blocks.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc = warpgroup_mma(p, v_blocks.index(v_stage), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(k_empty.index(stage))
            new_p, top, shrink = _softmax(
                s, top, scale, softcap, of_masks, of_blocks, first + i,
                BLOCK_N, HAS_SOFTCAP, HAS_WINDOW, MASKED, scores,
            )  # fmt: skip
            total = total * shrink
            parts = parts * gl.convert_layout(shrink, own)[:, None] + _sum_own(new_p)
            parts = _before_wait(parts)
            acc, p, parts = warpgroup_mma_wait(0, [acc, p, parts])
            mbarrier.arrive(v_empty.index(v_stage))
            acc = acc * gl.convert_layout(shrink, rows_of_sums)[:, None]
            p = gl.convert_layout(new_p.to(k_blocks.dtype), weights)
        v_phase = ((done + count - 1) // STAGES) & 1
        mbarrier.wait(v_full.index(stage), v_phase)
        acc = warpgroup_mma(p, v_blocks.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(stage))
        total += gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, scores))
    return top, total, acc


@gluon.jit
def _factor(factor, stride, kv_head):
    """The pool's factor of a KV head; without a stride ``factor`` is a number."""
    if stride is not None:
        factor = gl.load(factor + row_offset(kv_head, stride, 0))
    return factor


@gluon.jit
def _sum_own(p):
    """[rows, 4] sums of the columns that one thread holds: in a matrix accumulator, pairs 8 columns apart."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _before_wait(total):
    """The sums, used by a store that never happens (they are not negative): a memory operation, which the
    assembler leaves before the next wait, and with it the softmax. It would else wait first, then compute."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.u32 a, 0; setp.lt.f32 p, $1, 0f00000000; "
        "@p st.shared.f32 [a], $1; mov.f32 $0, $1; }",
        "=f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _softmax(
    s, top, scale, softcap, of_masks, of_blocks, i,
    BLOCK_N: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr, MASKED: gl.constexpr,
    scores: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: weights, new maximum, and the factor on what came before."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), finite for every x
        t = 1.0 - 2.0 / (gl.exp2(s * (2.0 * scale / softcap)) + 1.0)
        s = t * (softcap * LOG2E)
    if MASKED:
        s = gl.where(_sees(of_masks, of_blocks, i, BLOCK_N, HAS_WINDOW, scores), s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1))
    base = new_top
    if MASKED:
        base = gl.where(new_top == float("-inf"), 0.0, new_top)  # rows that have seen nothing yet
    if HAS_SOFTCAP:
        p = gl.exp2(s - base[:, None])
        shrink = gl.exp2(top - base)
    else:
        p = gl.exp2(s * scale - (base * scale)[:, None])
        shrink = gl.exp2((top - base) * scale)
    return p, new_top, shrink


@gluon.jit
def _sees(
    of_masks, of_blocks, i, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr, scores: gl.constexpr
):
    """[64, BLOCK_N] what the rows see of the segment's i-th block that needs a mask."""
    masks, row, has_row, start_m, q_start, q_len, prefix_len = of_masks
    words, words_stride, num_words, positions = masks
    block, num_front, full_stop, prefix_blocks = of_blocks
    j = gl.where(i < num_front, block + i, full_stop + i - num_front)
    in_tree = j >= prefix_blocks
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
    entry = block_start(gl.where(in_tree, j - prefix_blocks, j), BLOCK_N) + offs_n
    bits = gl.full([SHARE, BLOCK_N], -1, gl.int32, scores)
    block_word = bit_word(block_start(gl.where(in_tree, j - prefix_blocks, 0), BLOCK_N))
    column_word = bit_word(offs_n)
    for w in gl.static_range(BLOCK_N // 32):
        word = block_word + w
        row_bits = gl.load(
            words + row_offset(row, words_stride, word),
            mask=has_row & (word < num_words) & in_tree,
            other=-1,
        )
        bits = gl.where((column_word == w)[None, :], row_bits[:, None], bits)
    sees = ((bits >> bit_shift(offs_n)[None, :]) & 1) != 0
    length = gl.where(in_tree, q_len, prefix_len)
    sees = sees & (entry < length)[None, :]
    if HAS_WINDOW:
        near = gl.minimum(entry, length - 1)
        key_position = gl.load(positions + q_start + near, mask=(near >= 0) & in_tree, other=0)
        key_position = gl.where(in_tree, key_position, entry.to(gl.int64))
        sees = sees & (key_position[None, :] >= start_m[:, None])
    return sees


@gluon.jit
def _write(
    acc, top, total, is_cut, is_first, program, tile_row, kv_head, q_start, q_len,
    scale, sinks, output, partial, partial_stats, lse,
    part: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, sums: gl.constexpr,
):  # fmt: skip
    """Write a partial result, or the rows' output where nothing is left to merge."""
    rows: gl.constexpr = gl.SliceLayout(1, sums)
    offs_m = part * SHARE + gl.arange(0, SHARE, rows)
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, sums))
    node = row_of(tile_row + offs_m, GROUP)
    has_row = node < q_len
    head = row_offset(kv_head, GROUP, col_of(tile_row + offs_m, GROUP))
    top = gl.convert_layout(top, rows)
    total = gl.convert_layout(total, rows)
    if not HAS_SOFTCAP:
        top *= scale
    if is_cut:
        place = row_offset(row_offset(program, 2, gl.where(is_first, 1, 0)), BLOCK_M, 0)
        gl.store(
            partial + row_offset((place + offs_m)[:, None], HEAD_DIM, 0) + offs_d[None, :],
            acc,
            mask=has_row[:, None],
        )
        gl.store(partial_stats + row_offset(place, 2, offs_m), top, mask=has_row)
        gl.store(partial_stats + row_offset(place, 2, BLOCK_M + offs_m), total, mask=has_row)
    else:
        if HAS_SINKS:
            sink = gl.load(sinks + head, mask=has_row, other=0.0).to(gl.float32) * LOG2E
            new_top = gl.maximum(top, sink)
            shrink = gl.exp2(top - new_top)
            total = total * shrink + gl.exp2(sink - new_top)
            acc = acc * shrink[:, None]
            top = new_top
        total = gl.where(total == 0.0, 1.0, total)  # with top -inf: nothing was seen
        out_row = row_offset((q_start + node).to(gl.int64), KV_HEADS * GROUP, head)
        gl.store(
            output + row_offset(out_row[:, None], HEAD_DIM, 0) + offs_d[None, :],
            (acc / total[:, None]).to(output.dtype.element_ty),
            mask=has_row[:, None],
        )
        if HAS_LSE:
            gl.store(lse + out_row, (top + gl.log2(total)) * LN2, mask=has_row)


@gluon.jit
def _clear_unused_rows(
    output,
    lse,
    start,
    num_rows,
    pid,
    num_programs,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """Write 0 (log-sum-exp -inf) to the rows past the call's last: a fixed buffer's tail."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs_d = gl.arange(0, HEAD_DIM, layout)
    for i in range(row_offset(start, HEADS, pid), row_offset(num_rows, HEADS, 0), num_programs):
        place = output + row_offset(gl.cast(i, gl.int64), HEAD_DIM, offs_d)
        gl.store(place, gl.zeros([HEAD_DIM], output.dtype.element_ty, layout))
        if HAS_LSE:
            gl.store(lse + i, float("-inf"))

"""Kernels of the captured check: the table of invariants, evaluated on the device.

``sizes_kernel`` reads the indptrs and lengths, lays the call out (``plan``) and checks what they alone tell.
The others look at trees, rows, masks, slots, acceptances and commits at the addresses of that plan, one
program a request, and ``finish_kernel`` writes the least site that was broken into the record. Nothing that is
read is trusted: every address is bounded by the tensor's own size.
"""

import triton
import triton.language as tl

from ddtree.impl.check_sites import constant
from ddtree.impl.index import (
    bit_shift,
    bit_word,
    bit_words,
    block_start,
    col_of,
    commit_entry,
    kv_len,
    mask_len,
    mask_offset,
    num_blocks,
    packed_byte,
    packed_len,
    packed_shift,
    position,
    q_len_of,
    row_of,
    row_offset,
    tree_col,
)

# rows of the plan, [PLAN_ROWS, room]
ROW_START = tl.constexpr(0)
Q_LEN = tl.constexpr(1)
PREFIX_LEN = tl.constexpr(2)
KV_START = tl.constexpr(3)
MASK_START = tl.constexpr(4)
BYTE_START = tl.constexpr(5)
IS_IDLE = tl.constexpr(6)
IS_TREE = tl.constexpr(7)  # the parents can be followed
BAD_SLOT = tl.constexpr(8)  # first prefix entry outside the pool; NOWHERE
TWICE = tl.constexpr(9)  # least slot that the prefix uses twice; NOWHERE
MOVED = tl.constexpr(10)  # first prefix entry that is not the slot table's; NOWHERE
PLAN_ROWS = 11

# words of the state
BATCH_SIZE = tl.constexpr(0)
KNOWS_Q = tl.constexpr(1)
KNOWS_PREFIX = tl.constexpr(2)
KV_HOLDS = tl.constexpr(3)
NUM_ROWS = tl.constexpr(4)
NUM_BITS = tl.constexpr(5)
IS_DOUBTFUL = tl.constexpr(6)
FIRST = tl.constexpr(7)  # least key of a broken site
PAD_SLOT = tl.constexpr(8)
STALE_BIT = tl.constexpr(9)  # first entry of the flat mask behind the call that is not 0; NOWHERE
LARGEST = tl.constexpr(10)  # largest value of the flat mask
BAD_BIAS = tl.constexpr(11)  # first entry of the dense mask that is no mask's; NOWHERE
IS_OWN = tl.constexpr(
    12
)  # the indptrs agree with one another, so that only the rows written could deny them
PAD_IN_TAIL = tl.constexpr(13)
STATE_WORDS = 16

# words of the record
CHECKED = tl.constexpr(0)
BROKEN = tl.constexpr(1)
DOUBTED = tl.constexpr(2)
SNAPSHOT = tl.constexpr(3)  # 0: none, 1: of a doubtful call, 2: of a broken one
SITE = tl.constexpr(4)
REQUEST = tl.constexpr(5)
EXPECTED = tl.constexpr(6)
FOUND = tl.constexpr(7)
AT_CALL = tl.constexpr(8)
TAKES = tl.constexpr(9)  # whether this launch takes the snapshot
RECORD_WORDS = 16

NOWHERE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
PARTS = tl.constexpr(4)
FAR = tl.constexpr(0x7FFFFFFF)

FEWER = constant("batch")
WIDTH_QO = constant("index_width", "qo_indptr")
WIDTH_KV = constant("index_width", "kv_indptr")
WIDTH_MASK = constant("index_width", "mask_indptr")
WIDTH_FLAT = constant("index_width", "custom_mask")
WIDTH_VOCAB = constant("index_width", "vocab")
WIDTH_ROW = constant("index_width", "row")
WIDTH_SLOT = constant("index_width", "slot")
LOG_PROBS = constant("log_probs")
BEST_CANDIDATES = constant("best_candidates")
PATH_SCORE = constant("path_score")
NUM_NODES = constant("num_nodes")
BUDGET = constant("budget")
ROOT_PARENTS = constant("root", "parents")
ROOT_DEPTHS = constant("root", "depths")
ROOT_SCORES = constant("root", "scores")
ROOT_TOKEN_IDS = constant("root", "token_ids")
PARENT_ORDER = constant("parent_order")
DEPTH = constant("depth")
DEPTH_HORIZON = constant("depth", "horizon")
SIBLINGS_DISTINCT = constant("siblings_distinct")
BEST_FIRST = constant("best_first")
BEST_FIRST_ORDER = constant("best_first", "order")
TIE_ORDER = constant("tie_order")
PADDING_PARENTS = constant("padding", "parents")
PADDING_TOKEN_IDS = constant("padding", "token_ids")
PADDING_DEPTHS = constant("padding", "depths")
PADDING_SCORES = constant("padding", "scores")
TOKEN_RANGE = constant("token_range")
MASK_LEN = constant("mask_len")
MASK_START_AT = constant("mask_indptr", "start")
MASK_STEP = constant("mask_indptr", "step")
MASK_END = constant("mask_indptr", "end")
QO_START = constant("qo_indptr", "start")
QO_STEP = constant("qo_indptr", "step")
QO_WIDTH = constant("qo_indptr", "width")
QO_END = constant("qo_indptr", "end")
QO_ROWS = constant("qo_indptr", "rows")
MAX_Q_LEN = constant("max_q_len")
KV_START_AT = constant("kv_indptr", "start")
KV_STEP = constant("kv_indptr", "step")
KV_LEN = constant("kv_indptr", "len")
KV_END = constant("kv_indptr", "end")
KV_INDICES = constant("kv_indices")
KV_UNIQUE = constant("kv_unique")
OUT_CACHE_LOC = constant("out_cache_loc")
WRITE_UNIQUE = constant("write_unique")
WRITE_DISJOINT = constant("write_disjoint")
SLOT_TABLE = constant("slot_table")
POSITIONS = constant("positions")
INPUT_IDS = constant("input_ids")
FLAT_LEN = constant("flat_len")
PACKED_LEN = constant("packed_len")
PACKED_END = constant("packed_len", "end")
SHAPE_WORDS = constant("mask_shape", "words")
SHAPE_ROWS = constant("mask_shape", "rows")
SHAPE_BIAS = constant("mask_shape", "bias")
VALUES_FLAT = constant("mask_values", "custom_mask")
VALUES_BIAS = constant("mask_values", "bias")
VISIBILITY = constant("visibility")
MASK_IS_TREE = constant("mask_is_tree")
MASK_POSITIONS = constant("mask_positions")
PREFIX_VISIBLE = constant("prefix_visible")
PADDING_INVISIBLE = constant("padding_invisible")
SPARE_BITS = constant("spare_bits")
ROOM_POSITIONS = constant("buffer_capacity", "positions")
ROOM_OUT = constant("buffer_capacity", "out_cache_loc")
ROOM_INPUT = constant("buffer_capacity", "input_ids")
ROOM_ROWS = constant("buffer_capacity", "num_rows")
ROOM_TARGET = constant("buffer_capacity", "target_ids")
ROOM_KV = constant("buffer_capacity", "kv_indices")
TAIL_QO = constant("stale_tail", "qo_indptr")
TAIL_KV = constant("stale_tail", "kv_indptr")
TAIL_MASK = constant("stale_tail", "mask_indptr")
TAIL_POSITIONS = constant("stale_tail", "positions")
TAIL_OUT = constant("stale_tail", "out_cache_loc")
TAIL_INPUT = constant("stale_tail", "input_ids")
TAIL_BITS = constant("stale_tail", "custom_mask")
TAIL_PAD = constant("stale_tail", "pad_slot")
NUM_ACCEPTED = constant("num_accepted")
ACCEPTED_END = constant("accepted_end")
ACCEPTED_PATH = constant("accepted_path", "root")
CHOICE = constant("choice")
BONUS = constant("bonus")
WALK_END = constant("walk_end")
EMITTED = constant("emitted")
COMMIT_LEN = constant("commit_len")
COMMIT_SRC = constant("commit_src")
COMMIT_DST = constant("commit_dst")
COMMIT_ORDER = constant("commit_order")
SLOT_PERMUTATION = constant("slot_permutation")
PREFIX_KEPT = constant("prefix_kept")


# what is found


@triton.jit
def number_of(site, request, part, room):
    """Where a site's two numbers stand, for one request and one part of the call."""
    return row_offset(row_offset(row_offset(site, room + 1, request), PARTS, part), 2, 0)


@triton.jit
def report(bad, site, request, part, expected, found, state, numbers, room):
    """Note one broken site: its two numbers, and its key if it is the least."""
    if bad:
        at = number_of(site, request, part, room)
        tl.store(numbers + at, expected)
        tl.store(numbers + at + 1, found)
        note(site, request, part, state)


@triton.jit
def note(site, request, part, state):
    """Note the key of a broken site, if it is the least."""
    key = (tl.zeros([], tl.int64) + site) * (1 << 40) + request * (1 << 8) + part
    tl.atomic_min(state + FIRST, key)


@triton.jit
def report_first(bad, index, site, expected, found, state, numbers, room):
    """Note the first of a vector of requests whose site is broken."""
    at = tl.min(tl.where(bad, index, FAR), axis=0)
    is_it = index == at
    report(
        at < FAR, site, at, 0, tl.sum(tl.where(is_it, expected, 0), axis=0), tl.sum(tl.where(is_it, found,
        0), axis=0), state, numbers, room,
    )  # fmt: skip


@triton.jit
def as_bits(number):
    """The bits of a float64."""
    return number.to(tl.float64).to(tl.int64, bitcast=True)


@triton.jit
def of(vector, is_it):
    """The one entry of a vector."""
    return tl.sum(tl.where(is_it, vector, 0), axis=0)


# words of 32 bits, held in 64


@triton.jit
def as_word(loaded):
    """A word without its sign."""
    return loaded.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def low_bits(count):
    """The lowest ``count`` bits of a word; none below 0, all from 32 on."""
    count = tl.minimum(tl.maximum(count.to(tl.int64), 0), 32)
    return (tl.full(count.shape, 1, tl.int64) << count) - 1


@triton.jit
def high_bit(word):
    """The place of the highest bit of a word that is not 0."""
    place = tl.zeros(word.shape, tl.int64)
    for step in tl.static_range(5):
        width = 16 >> step
        above = word >> width
        place += tl.where(above != 0, width, 0)
        word = tl.where(above != 0, above, word)
    return place


@triton.jit
def count_bits(word):
    """How many bits of a word are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word + (word >> 8) + (word >> 16) + (word >> 24)) & 0x3F


@triton.jit
def union(a, b):
    """Bits of either."""
    return a | b


# sizes


@triton.jit
def load_len(indptr, request, is_request):
    """Lengths of an indptr's segments; 0 past the last."""
    start = tl.load(indptr + request, mask=is_request, other=0).to(tl.int64)
    return tl.load(indptr + request + 1, mask=is_request, other=0).to(tl.int64) - start


@triton.jit
def requests_used(indptr, request, room):
    """Requests up to the last that has a segment that is not empty."""
    return tl.max(tl.where(load_len(indptr, request, request < room) != 0, request + 1, 0), axis=0)


@triton.jit
def check_indptr(
    indptr, request, room, START: tl.constexpr, STEP: tl.constexpr, state, numbers, numbers_room
):  # fmt: skip
    """Hold an indptr to start at 0 and never to go back; return whether it does."""
    start = tl.load(indptr).to(tl.int64)
    report(start != 0, START, 0, 0, 0, start, state, numbers, numbers_room)
    length = load_len(indptr, request, request < room)
    end = tl.load(indptr + request + 1, mask=request < room, other=0).to(tl.int64)
    report_first(length < 0, request, STEP, end - length, end, state, numbers, numbers_room)
    return (start == 0) & (tl.min(length, axis=0) >= 0)


@triton.jit
def check_tail(
    indptr, request, room, batch, SITE: tl.constexpr, state, numbers, numbers_room
):  # fmt: skip
    """Hold an indptr to repeat its last value behind the call."""
    last = tl.load(indptr + tl.minimum(batch, room)).to(tl.int64)
    value = tl.load(indptr + request + 1, mask=request < room, other=0).to(tl.int64)
    bad = (request >= batch) & (request < room) & (value != last)
    report_first(bad, request, SITE, last, value, state, numbers, numbers_room)


@triton.jit
def check_room(need, size, SITE: tl.constexpr, state, numbers, room):
    """Hold a buffer to have room for the call; a size of -1 is no buffer's."""
    report((size >= 0) & (size < need), SITE, 0, 0, need, size, state, numbers, room)


@triton.jit
def sizes_kernel(
    qo_indptr, kv_indptr, mask_indptr, byte_indptr,  # [room+1] each
    q_lens, prefix_lens, num_nodes, num_accepted, committed_lens,  # [B] each
    plan, state, numbers,
    room, batch, qo_room, kv_room, mask_room, byte_room, bias_room, table_room, after_room,
    rows, tree_rows, parent_rows, budget, max_q_len, total,  # -1: not known
    mask_size, kv_size, packed_size, words_rows, words_width, bias_rows, bias_columns,
    positions_size, out_size, input_size, query_size, target_size, max_rows, needs_q,
    num_rows, counted_rows, vocab, stride, pool_size, most_accepted,
    CAPTURED: tl.constexpr, DYNAMIC: tl.constexpr, OFFSET_BITS: tl.constexpr,
    QO_IS_32: tl.constexpr, KV_IS_32: tl.constexpr, MASK_IS_32: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Lay the call out, and check what indptrs, lengths and shapes tell."""
    request = tl.arange(0, BATCH)
    if DYNAMIC:
        prefixes = tl.zeros([], tl.int32)
        furthest = tl.zeros([], tl.int32)
        same = tl.zeros([], tl.int32)
        if kv_indptr is not None:
            prefixes = requests_used(kv_indptr, request, kv_room)
        if qo_indptr is not None:
            used = requests_used(qo_indptr, request, qo_room)
            furthest = tl.maximum(furthest, used)
            same = same | (used == prefixes).to(tl.int32)
        if mask_indptr is not None:
            used = requests_used(mask_indptr, request, mask_room)
            furthest = tl.maximum(furthest, used)
            same = same | (used == prefixes).to(tl.int32)
        if byte_indptr is not None:
            used = requests_used(byte_indptr, request, byte_room)
            furthest = tl.maximum(furthest, used)
            same = same | (used == prefixes).to(tl.int32)
        if qo_indptr is None and mask_indptr is None and byte_indptr is None:
            same = tl.full([], 1, tl.int32)
        batch = tl.minimum(tl.where(same != 0, prefixes, furthest), batch)
        short = batch
        short = tl.where(after_room < batch, after_room, short)
        short = tl.where(table_room < batch, table_room, short)
        short = tl.where(bias_room < batch, bias_room, short)
        short = tl.where(byte_room < batch, byte_room, short)
        short = tl.where(mask_room < batch, mask_room, short)
        short = tl.where(kv_room < batch, kv_room, short)
        short = tl.where(qo_room < batch, qo_room, short)  # the first that has too little room
        report(short < batch, FEWER, 0, 0, batch, short, state, numbers, room)
        batch = tl.where(short < batch, 0, batch)  # nothing else can then be addressed
    is_mine = request < batch
    zero = tl.zeros([BATCH], tl.int64)

    # the claimed lengths: what the call says of itself, else the indptrs'
    q_len = zero
    knows_q = tl.zeros([], tl.int32)
    own_q = zero
    if qo_indptr is not None:
        own_q = load_len(qo_indptr, request, is_mine & (request < qo_room))
        q_len = own_q
        knows_q = (tl.min(own_q, axis=0) >= 0).to(tl.int32)
    if q_lens is not None:
        asked = tl.load(q_lens + request, mask=is_mine, other=0).to(tl.int64)
        is_asked = tl.min(asked, axis=0) >= 0
        q_len = tl.where(is_asked, asked, q_len)
        knows_q = tl.where(is_asked, 1, knows_q)
    q_len = tl.where(knows_q != 0, q_len, 0)
    prefix_len = zero
    knows_prefix = tl.zeros([], tl.int32)
    own_prefix = zero
    if kv_indptr is not None:
        own_prefix = load_len(kv_indptr, request, is_mine & (request < kv_room))
        prefix_len = own_prefix
        knows_prefix = (tl.min(own_prefix, axis=0) >= 0).to(tl.int32)
    unused = own_prefix == 0
    if prefix_lens is not None:
        told = tl.load(prefix_lens + request, mask=is_mine, other=0).to(tl.int64)
        unused = told < 0
        if CAPTURED:
            told = tl.maximum(told, 0)
        is_told = tl.min(told, axis=0) >= 0
        prefix_len = tl.where(is_told, told, prefix_len)
        knows_prefix = tl.where(is_told, 1, knows_prefix)
    prefix_len = tl.where(knows_prefix != 0, prefix_len, 0)
    is_idle = zero != 0
    if CAPTURED and kv_indptr is not None:
        is_idle = is_mine & (knows_q != 0) & (q_len == 0) & unused

    segments = tl.where(is_mine, mask_len(prefix_len, q_len), 0)
    bytes_ = packed_len(segments)
    knows_mask = (knows_q != 0) & (knows_prefix != 0)
    all_rows = tl.sum(q_len, axis=0)
    all_prefixes = tl.sum(prefix_len, axis=0)
    all_bits = tl.sum(segments, axis=0)
    kv_start = tl.cumsum(prefix_len, axis=0) - prefix_len
    is_room = request < room
    tl.store(
        plan + row_offset(ROW_START, room, request), tl.cumsum(q_len, axis=0) - q_len, mask=is_room
    )
    tl.store(plan + row_offset(Q_LEN, room, request), q_len, mask=is_room)
    tl.store(plan + row_offset(PREFIX_LEN, room, request), prefix_len, mask=is_room)
    if kv_indptr is not None:
        kv_start = tl.load(kv_indptr + request, mask=is_mine & (request < kv_room), other=0).to(
            tl.int64
        )
    tl.store(plan + row_offset(KV_START, room, request), kv_start, mask=is_room)
    tl.store(
        plan + row_offset(MASK_START, room, request),
        tl.cumsum(segments, axis=0) - segments,
        mask=is_room,
    )
    tl.store(
        plan + row_offset(BYTE_START, room, request),
        tl.cumsum(bytes_, axis=0) - bytes_,
        mask=is_room,
    )
    tl.store(plan + row_offset(IS_IDLE, room, request), is_idle.to(tl.int64), mask=is_room)
    tl.store(plan + row_offset(IS_TREE, room, request), zero, mask=is_room)
    tl.store(state + BATCH_SIZE, batch)
    tl.store(state + KNOWS_Q, knows_q)
    tl.store(state + KNOWS_PREFIX, knows_prefix)
    tl.store(state + NUM_ROWS, all_rows)
    tl.store(state + NUM_BITS, tl.where(knows_mask, all_bits, 0))
    if (max_rows >= 0) & (all_rows > max_rows):
        tl.store(state + IS_DOUBTFUL, 1)  # more rows than the checker has room for
    if (needs_q != 0) & (knows_q == 0):
        tl.store(state + IS_DOUBTFUL, 1)  # other fields may tell the widths

    # index_width
    if QO_IS_32:
        report(all_rows > FAR, WIDTH_QO, 0, 0, 0, all_rows, state, numbers, room)
    if KV_IS_32:
        report(all_prefixes > FAR, WIDTH_KV, 0, 0, 0, all_prefixes, state, numbers, room)
    bits = tl.where(knows_mask, all_bits, 0)
    if MASK_IS_32:
        report(bits > FAR, WIDTH_MASK, 0, 0, 0, bits, state, numbers, room)
    if OFFSET_BITS == 32:
        if mask_indptr is not None:
            report(bits - 1 > FAR, WIDTH_FLAT, 0, 0, 0, bits - 1, state, numbers, room)
        last_row = tl.where(num_rows > 0, num_rows, tl.maximum(all_rows, counted_rows)) - 1
        if vocab > 0:
            last = row_offset(last_row, vocab.to(tl.int64), vocab - 1)
            report((last_row >= 0) & (last > FAR), WIDTH_VOCAB, 0, 0, 0, last, state, numbers, room)
        if stride > 0:
            last = row_offset(last_row, stride.to(tl.int64), stride - 1)
            report((last_row >= 0) & (last > FAR), WIDTH_ROW, 0, 0, 0, last, state, numbers, room)
            last = row_offset(pool_size.to(tl.int64) - 1, stride, stride - 1)
            report((pool_size > 0) & (last > FAR), WIDTH_SLOT, 0, 0, 0, last, state, numbers, room)

    # num_nodes, budget
    nodes = zero
    if num_nodes is not None:
        nodes = tl.load(num_nodes + request, mask=is_mine, other=1).to(tl.int64)
        bad = is_mine & ((nodes < 1) | ((rows >= 0) & (nodes > rows)))
        report_first(bad, request, NUM_NODES, zero, nodes, state, numbers, room)
        if budget >= 0:
            bad = is_mine & (nodes > q_len_of(budget))
            report_first(bad, request, BUDGET, zero, nodes, state, numbers, room)

    # mask_len, mask_indptr
    own_segments = zero
    if mask_indptr is not None:
        own_segments = load_len(mask_indptr, request, is_mine & (request < mask_room))
        if knows_mask:
            bad = is_mine & (own_segments != segments)
            report_first(bad, request, MASK_LEN, segments, own_segments, state, numbers, room)
        check_indptr(
            mask_indptr, request, mask_room, MASK_START_AT, MASK_STEP, state, numbers, room,
        )  # fmt: skip
        if not CAPTURED:
            end = tl.load(mask_indptr + mask_room).to(tl.int64)
            is_bad = (mask_size >= 0) & (mask_size != end)
            report(is_bad, MASK_END, 0, 0, mask_size, end, state, numbers, room)

    # qo_indptr
    if qo_indptr is not None:
        check_indptr(qo_indptr, request, qo_room, QO_START, QO_STEP, state, numbers, room)
        if knows_q != 0:
            is_other = is_mine & (own_q != q_len)
            report_first(is_other, request, QO_WIDTH, q_len, own_q, state, numbers, room)
            end = tl.load(qo_indptr + tl.minimum(batch, qo_room)).to(tl.int64)
            is_all = tl.max(is_other.to(tl.int32), axis=0) == 0
            report(
                (total >= 0) & (end != total) & is_all, QO_END, 0, 0, total, end, state, numbers, room,
            )  # fmt: skip
            least = zero + (0 if CAPTURED else 1)
            if num_nodes is not None:
                least = tl.where(is_idle, 0, nodes)
            bad = (
                is_mine
                & (own_q == q_len)
                & ((own_q < least) | ((tree_rows >= 0) & (own_q > tree_rows)))
            )
            report_first(bad, request, QO_ROWS, zero, own_q, state, numbers, room)
            if (parent_rows >= 0) & (tl.max(q_len, axis=0) > parent_rows):
                tl.store(state + IS_DOUBTFUL, 1)  # the trees deny the widths

    # max_q_len
    if knows_q != 0:
        most = tl.max(q_len, axis=0)
        is_bad = max_q_len < most
        if not CAPTURED:
            is_bad = max_q_len != most
        report((max_q_len >= 0) & is_bad, MAX_Q_LEN, 0, 0, most, max_q_len, state, numbers, room)

    # kv_indptr
    kv_holds = (zero == 0).to(tl.int32)
    if kv_indptr is not None:
        holds = check_indptr(
            kv_indptr, request, kv_room, KV_START_AT, KV_STEP, state, numbers, room,
        )  # fmt: skip
        kv_holds = tl.where(holds, kv_holds, 0)
        if knows_prefix != 0:
            is_other = is_mine & (own_prefix != prefix_len)
            report_first(is_other, request, KV_LEN, prefix_len, own_prefix, state, numbers, room)
            kv_holds = tl.where(is_other, 0, kv_holds)
        end = tl.load(kv_indptr + kv_room).to(tl.int64)
        is_bad = (kv_size >= 0) & (end > kv_size)
        report(is_bad, KV_END, 0, 0, kv_size, end, state, numbers, room)
        kv_holds = tl.where(is_bad, 0, kv_holds)
    tl.store(state + KV_HOLDS, tl.min(kv_holds, axis=0))

    # flat_len, packed_len, mask_shape
    if knows_mask & (mask_size >= 0):
        is_bad = mask_size < all_bits
        if not CAPTURED:
            is_bad = mask_size != all_bits
        report(is_bad, FLAT_LEN, 0, 0, all_bits, mask_size, state, numbers, room)
    if knows_mask & (packed_size >= 0):
        held_bytes = bytes_
        if byte_indptr is not None:
            held_bytes = load_len(byte_indptr, request, is_mine & (request < byte_room))
        else:
            is_alone = (zero + batch) == 1
            if CAPTURED:  # a buffer may be longer
                is_alone = is_alone & (packed_size < bytes_)
            held_bytes = tl.where(is_alone, packed_size, held_bytes)
        held_bytes = tl.where(is_mine, held_bytes, 0)
        report_first(
            held_bytes != bytes_, request, PACKED_LEN, bytes_, held_bytes, state, numbers, room,
        )  # fmt: skip
        end = tl.sum(held_bytes, axis=0)
        is_bad = (end > packed_size) | ((not CAPTURED) & (end < packed_size))
        report((batch > 0) & is_bad, PACKED_END, 0, 0, end, packed_size, state, numbers, room)
    if knows_q != 0:
        most = tl.max(q_len, axis=0)
        need = bit_words(most)
        is_bad = (words_width >= 0) & (words_width < need)
        report(is_bad, SHAPE_WORDS, 0, 0, need, words_width, state, numbers, room)
        is_bad = (words_rows >= 0) & (words_rows < all_rows)
        report(is_bad, SHAPE_ROWS, 0, 0, all_rows, words_rows, state, numbers, room)
        if bias_rows >= 0:
            is_low = bias_rows < most
            is_short = bias_columns - bias_rows < tl.max(prefix_len, axis=0)
            held = tl.where(is_low, bias_rows, bias_columns)
            report(is_low | is_short, SHAPE_BIAS, 0, 0, 0, held, state, numbers, room)

    # buffer_capacity, and the indptrs' stale_tail
    if CAPTURED:
        if knows_q != 0:
            check_room(all_rows, positions_size, ROOM_POSITIONS, state, numbers, room)
            check_room(all_rows, out_size, ROOM_OUT, state, numbers, room)
            check_room(all_rows, input_size, ROOM_INPUT, state, numbers, room)
            check_room(all_rows, query_size, ROOM_ROWS, state, numbers, room)
            check_room(all_rows, target_size, ROOM_TARGET, state, numbers, room)
            check_room(all_prefixes, kv_size, ROOM_KV, state, numbers, room)
            if qo_indptr is not None:
                check_tail(qo_indptr, request, qo_room, batch, TAIL_QO, state, numbers, room)
            if kv_indptr is not None:
                check_tail(kv_indptr, request, kv_room, batch, TAIL_KV, state, numbers, room)
            if mask_indptr is not None:
                check_tail(mask_indptr, request, mask_room, batch, TAIL_MASK, state, numbers, room)
    is_own = (q_len != own_q) | (own_segments != segments) | (is_mine & (q_len == 0))
    is_own_all = (tl.max(is_own.to(tl.int32), axis=0) == 0) & knows_mask
    tl.store(state + IS_OWN, is_own_all.to(tl.int64))

    # num_accepted, commit_len
    if num_accepted is not None:
        count = tl.load(num_accepted + request, mask=is_mine, other=1).to(tl.int64)
        bad = (count < 1) | ((most_accepted >= 0) & (count > most_accepted))
        if num_nodes is not None:
            bad = bad | (count > nodes)
        report_first(
            is_mine & bad & ~is_idle, request, NUM_ACCEPTED, zero, count, state, numbers, room,
        )  # fmt: skip
        if committed_lens is not None:
            if knows_prefix != 0:
                want = commit_entry(prefix_len, count)
                found = tl.load(committed_lens + request, mask=is_mine, other=0).to(tl.int64)
                bad = is_mine & (found != want) & ~is_idle
                report_first(bad, request, COMMIT_LEN, want, found, state, numbers, room)


# trees


@triton.jit
def tree_kernel(
    token_ids, parents, depths, scores, num_nodes, root_token_ids,
    plan, state, numbers,
    room, rows, horizon, vocab,  # -1: not known
    ROWS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Check one request's tree."""
    b = tl.program_id(0).to(tl.int64)
    if b >= tl.load(state + BATCH_SIZE):
        return
    row = tl.arange(0, ROWS)
    is_row = row < rows
    line = row_offset(b, rows, row)
    nodes = tl.zeros([], tl.int64)
    if num_nodes is not None:
        nodes = tl.load(num_nodes + b).to(tl.int64)
    is_node = is_row & (row < nodes)
    has_nodes = (nodes >= 1) & (nodes <= rows)
    parent = tl.full([ROWS], -1, tl.int64)
    token = tl.zeros([ROWS], tl.int64)
    is_sound = has_nodes
    first = tl.full([], 0, tl.int32)

    # root
    if parents is not None:
        parent = tl.load(parents + line, mask=is_row, other=-1).to(tl.int64)
        value = of(parent, row == 0)
        report(value != -1, ROOT_PARENTS, b, 0, -1, value, state, numbers, room)
        is_sound = is_sound & (value == -1)
    if depths is not None:
        value = tl.load(depths + row_offset(b, rows, 0)).to(tl.int64)
        report(value != 0, ROOT_DEPTHS, b, 0, 0, value, state, numbers, room)
    score = tl.zeros([ROWS], tl.float64)
    if scores is not None:
        score = tl.load(scores + line, mask=is_row, other=0.0).to(tl.float64)
        value = tl.load(scores + row_offset(b, rows, 0)).to(tl.float64)
        report(
            value != 0.0, ROOT_SCORES, b, 0, tl.zeros([], tl.int64), as_bits(value), state, numbers, room,
        )  # fmt: skip
    if token_ids is not None:
        token = tl.load(token_ids + line, mask=is_row, other=0).to(tl.int64)
        if root_token_ids is not None:
            value = of(token, row == 0)
            right = tl.load(root_token_ids + b).to(tl.int64)
            report(value != right, ROOT_TOKEN_IDS, b, 0, right, value, state, numbers, room)
    if num_nodes is not None:
        if parents is not None:
            bad = is_node & (row > 0) & ((parent < 0) | (parent >= row))
            first = tl.min(tl.where(bad, row, ROWS), axis=0)
            report(
                first < ROWS, PARENT_ORDER, b, 0, 0, of(parent, row == first), state, numbers, room,
            )  # fmt: skip
            is_sound = is_sound & (first == ROWS)
            tl.store(plan + row_offset(IS_TREE, room, b), is_sound.to(tl.int64))
            is_child = is_node & (row > 0) & is_sound
            if depths is not None:
                found = tl.load(depths + line, mask=is_row, other=0).to(tl.int64)
                above = row_offset(b, rows, tl.where(is_child, parent, 0))
                want = tl.load(depths + above, mask=is_child, other=0).to(tl.int64) + 1
                bad = is_child & (found != want)
                first = tl.min(tl.where(bad, row, ROWS), axis=0)
                report(
                    first < ROWS, DEPTH, b, 0, of(want, row == first), of(found, row == first), state,
                    numbers, room,
                )  # fmt: skip
                bad = is_child & (found == want) & (horizon >= 0) & (found > horizon)
                first = tl.min(tl.where(bad, row, ROWS), axis=0)
                report(
                    first < ROWS, DEPTH_HORIZON, b, 0, 0, of(found, row == first), state, numbers, room,
                )  # fmt: skip
            if token_ids is not None:
                if is_sound:
                    check_siblings(
                        token_ids, parents, scores, row, is_node, parent, token, score, b, rows, nodes,
                        state, numbers, room, ROWS, OTHERS,
                    )  # fmt: skip
        if scores is not None:
            bad = is_node & ~(tl.abs(score) < float("inf"))  # NaN too
            first = tl.min(tl.where(bad, row, ROWS), axis=0)
            report(first < ROWS, BEST_FIRST, b, 0, 0, 0, state, numbers, room)
            before = tl.load(scores + line - 1, mask=is_node & (row > 0), other=float("inf"))
            bad = is_node & (row > 0) & (score > before.to(tl.float64))
            first = tl.min(tl.where(bad, row, ROWS), axis=0)
            is_it = row == first
            found = as_bits(tl.sum(tl.where(is_it, score, 0.0), axis=0))
            report(first < ROWS, BEST_FIRST_ORDER, b, 0, 0, found, state, numbers, room)
        # padding
        is_padding = is_row & (row >= nodes) & has_nodes
        if parents is not None:
            first = tl.min(tl.where(is_padding & (parent != -1), row, ROWS), axis=0)
            found = of(parent, row == first)
            report(first < ROWS, PADDING_PARENTS, b, 0, -1, found, state, numbers, room)
        if token_ids is not None:
            first = tl.min(tl.where(is_padding & (token != 0), row, ROWS), axis=0)
            found = of(token, row == first)
            report(first < ROWS, PADDING_TOKEN_IDS, b, 0, 0, found, state, numbers, room)
            bad = is_node & ((token < 0) | ((vocab >= 0) & (token >= vocab)))
            first = tl.min(tl.where(bad, row, ROWS), axis=0)
            report(
                first < ROWS, TOKEN_RANGE, b, 0, 0, of(token, row == first), state, numbers, room,
            )  # fmt: skip
        if depths is not None:
            found = tl.load(depths + line, mask=is_row, other=0).to(tl.int64)
            first = tl.min(tl.where(is_padding & (found != 0), row, ROWS), axis=0)
            found = of(found, row == first)
            report(first < ROWS, PADDING_DEPTHS, b, 0, 0, found, state, numbers, room)
        if scores is not None:
            bad = is_padding & (score != float("-inf"))
            first = tl.min(tl.where(bad, row, ROWS), axis=0)
            at = row_offset(b, rows, tl.where(first < ROWS, first, 0))
            found = tl.load(scores + at).to(tl.float64)
            want = as_bits(tl.full([], float("-inf"), tl.float64))
            report(first < ROWS, PADDING_SCORES, b, 0, want, as_bits(found), state, numbers, room)


@triton.jit
def check_siblings(
    token_ids, parents, scores, row, is_node, parent, token, score,
    b, rows, nodes, state, numbers, room,
    ROWS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Compare each node with all others: distinct siblings, and the order of ties by rank path."""
    is_child = is_node & (row > 0)
    is_twin = tl.zeros([ROWS], tl.int32)  # an earlier sibling has its token
    rank = tl.zeros([ROWS], tl.int64)  # siblings before it
    last = tl.full([ROWS], -1, tl.int64)  # the sibling just before it
    for start in range(0, rows, OTHERS):
        other = start + tl.arange(0, OTHERS)
        is_other = other < nodes
        at = row_offset(b, rows, other)
        its_parent = tl.load(parents + at, mask=is_other & (other < rows), other=-2).to(tl.int64)
        its_token = tl.load(token_ids + at, mask=is_other & (other < rows), other=0).to(tl.int64)
        before = (other[None, :] < row[:, None]) & is_node[:, None] & is_other[None, :]
        siblings = before & (its_parent[None, :] == parent[:, None])
        twins = siblings & (its_token[None, :] == token[:, None])
        is_twin = is_twin | tl.max(twins.to(tl.int32), axis=1)
        rank += tl.sum(siblings.to(tl.int64), axis=1)
        last = tl.maximum(last, tl.max(tl.where(siblings, other[None, :], -1).to(tl.int64), axis=1))
    first = tl.min(tl.where(is_twin != 0, row, ROWS), axis=0)
    report(first < ROWS, SIBLINGS_DISTINCT, b, 0, 0, of(token, row == first), state, numbers, room)
    if scores is not None:
        tree = row_offset(b, rows, 0)
        has_last = last >= 0
        at = tree + tl.where(has_last, last, 0)
        last_score = tl.load(scores + at, mask=has_last, other=0.0).to(tl.float64)
        last_token = tl.load(token_ids + at, mask=has_last, other=0).to(tl.int64)
        bad = has_last & (last_score == score) & (last_token > token)
        is_broken = tl.max(bad.to(tl.int32), axis=0) > 0
        # rows r and r + 1 of equal score: climb to the node that both are below
        follows = row + 1 < nodes
        next_score = tl.load(scores + tree + row + 1, mask=follows, other=0.0).to(tl.float64)
        left = tl.where(follows & (next_score == score), row, 0)
        right = tl.where(follows & (next_score == score), row + 1, 0)
        below_left = left * 0 - 1
        below_right = left * 0 - 1
        while tl.max((left != right).to(tl.int32), axis=0) > 0:
            up_left = left > right
            up_right = right > left
            below_left = tl.where(up_left, left, below_left)
            below_right = tl.where(up_right, right, below_right)
            left_up = tl.load(parents + tree + left, mask=up_left, other=0).to(tl.int32)
            right_up = tl.load(parents + tree + right, mask=up_right, other=0).to(tl.int32)
            left = tl.where(up_left, left_up, left)
            right = tl.where(up_right, right_up, right)
        crossed = (below_left >= 0) & (below_right >= 0) & (below_left > below_right)
        if (~is_broken) & (tl.max(crossed.to(tl.int32), axis=0) > 0):
            # the order of paths counts only where the tree gives each token of a depth one rank
            depth = rank * 0
            node = tl.where(is_child, parent, -1)
            while tl.max(node, axis=0) >= 0:
                depth += (node >= 0).to(tl.int64)
                node = tl.load(parents + tree + node, mask=node >= 0, other=-1).to(tl.int64)
            conflicts = tl.zeros([ROWS], tl.int32)
            for start in range(0, rows, OTHERS):
                other = start + tl.arange(0, OTHERS)
                is_it = row[:, None] == other[None, :]
                its_depth = tl.sum(tl.where(is_it, depth[:, None], 0), axis=0)
                its_rank = tl.sum(tl.where(is_it, rank[:, None], 0), axis=0)
                its_token = tl.sum(tl.where(is_it, token[:, None], 0), axis=0)
                both = is_child[:, None] & (other > 0)[None, :] & (other < nodes)[None, :]
                both = both & (its_depth[None, :] == depth[:, None])
                same_rank = its_rank[None, :] == rank[:, None]
                same_token = its_token[None, :] == token[:, None]
                conflicts = conflicts | tl.max(
                    (both & (same_rank != same_token)).to(tl.int32), axis=1
                )
            is_broken = tl.max(conflicts, axis=0) == 0
        report(is_broken, TIE_ORDER, b, 0, 0, 0, state, numbers, room)


# the draft


@triton.jit
def log_probs_kernel(log_probs, state, worst, size, BLOCK: tl.constexpr):
    """Look for the first log-prob of one request that is NaN or above 0; programs of axis 1 share it."""
    b = tl.program_id(0).to(tl.int64)
    if b < tl.load(state + BATCH_SIZE):
        entry = block_start(tl.program_id(1).to(tl.int64), BLOCK) + tl.arange(0, BLOCK)
        value = tl.load(log_probs + row_offset(b, size, entry), mask=entry < size, other=0.0)
        bad = (entry < size) & ~(value <= 0.0)
        at = tl.min(tl.where(bad, entry, NOWHERE), axis=0)
        if at < NOWHERE:
            tl.atomic_min(worst + b, at)


@triton.jit
def drafted_tree_kernel(
    log_probs, token_ids, parents, depths, scores, num_nodes,
    plan, state, numbers, worst,
    room, rows, horizon, vocab,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compare one node with the draft: is its token the rank that its place among its siblings says?"""
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    if b >= tl.load(state + BATCH_SIZE):
        return
    if (node == 0) | (tl.load(plan + row_offset(IS_TREE, room, b)) == 0):
        return
    nodes = tl.load(num_nodes + b).to(tl.int64)
    tree = row_offset(b, rows, 0)
    depth = tl.load(depths + tree + node).to(tl.int64)
    token = tl.load(token_ids + tree + node).to(tl.int64)
    if (node >= nodes) | (depth < 1) | (depth > horizon) | (token < 0) | (token >= vocab):
        return
    parent = tl.load(parents + tree + node).to(tl.int64)
    row = tl.arange(0, ROWS)
    is_row = (row > 0) & (row < node)
    its_parent = tl.load(parents + tree + row, mask=is_row, other=-1).to(tl.int64)
    its_token = tl.load(token_ids + tree + row, mask=is_row, other=-1).to(tl.int64)
    is_sibling = is_row & (its_parent == parent) & (its_token >= 0) & (its_token < vocab)
    rank = tl.sum(is_sibling.to(tl.int32), axis=0)
    line = log_probs + row_offset(row_offset(b, horizon, depth - 1), vocab, 0)
    own = tl.load(line + token).to(tl.float32)
    better = 0
    for first in range(0, vocab, BLOCK):
        other = first + tl.arange(0, BLOCK)
        value = tl.load(line + other, mask=other < vocab, other=float("-inf")).to(tl.float32)
        is_better = (value > own) | ((value == own) & (other < token))
        better += tl.sum((is_better & (other < vocab)).to(tl.int32), axis=0)
    report(better != rank, BEST_CANDIDATES, b, 0, 0, 0, state, numbers, room)
    if scores is not None:
        score = tl.load(scores + tree + node).to(tl.float64)
        want = tl.load(scores + tree + parent).to(tl.float64) + own.to(tl.float64)
        bad = score != want
        if not EXACT:
            bad = bad & ~(tl.abs(score - want) <= 1e-5 * tl.maximum(tl.abs(want), 1.0))
        if bad:
            # of several nodes the first: their numbers stand where the finishing program finds them
            tl.atomic_min(worst + room + b, node.to(tl.int64))


@triton.jit
def judge_draft_kernel(
    log_probs, token_ids, parents, depths, scores, state, numbers, worst, room, rows, horizon, vocab,
    HAS_TREE: tl.constexpr,
):  # fmt: skip
    """Report each request's first log-prob that is none, and its first node whose score is not its path's."""
    b = tl.program_id(0).to(tl.int64)
    entry = tl.load(worst + b)
    if entry < NOWHERE:
        tl.store(worst + b, NOWHERE)
        value = as_bits(tl.load(log_probs + row_offset(row_offset(b, horizon, 0), vocab, entry)))
        report(True, LOG_PROBS, b, 0, 0, value, state, numbers, room)
    if HAS_TREE:
        node = tl.load(worst + room + b)
        if node < NOWHERE:
            tl.store(worst + room + b, NOWHERE)
            at = row_offset(b, rows, node)
            depth = tl.load(depths + at).to(tl.int64)
            token = tl.load(token_ids + at).to(tl.int64)
            above = row_offset(b, rows, tl.load(parents + at).to(tl.int64))
            own = tl.load(log_probs + row_offset(row_offset(b, horizon, depth - 1), vocab, token))
            want = tl.load(scores + above).to(tl.float64) + own.to(tl.float32).to(tl.float64)
            found = tl.load(scores + at).to(tl.float64)
            report(True, PATH_SCORE, b, 0, as_bits(want), as_bits(found), state, numbers, room)


# rows


@triton.jit
def real_rows(num_nodes, b, q_len):
    """Query rows of a request that are real nodes; all of them where nothing tells."""
    real = q_len
    if num_nodes is not None:
        real = tl.maximum(tl.minimum(q_len, tl.load(num_nodes + b).to(tl.int64)), 0)
    return real


@triton.jit
def slot_rows(num_nodes, positions, b, start, q_len, positions_size, BLOCK: tl.constexpr):
    """Query rows of a request whose slots are judged: its real nodes, or those that positions tell."""
    real = real_rows(num_nodes, b, q_len)
    if num_nodes is None and positions is not None:
        knows = (q_len > 0) & (start + q_len <= positions_size)
        root = tl.load(positions + start, mask=knows, other=0).to(tl.int64)
        for first in range(0, q_len, BLOCK):
            row = first + tl.arange(0, BLOCK).to(tl.int64)
            is_row = knows & (row > 0) & (row < q_len)
            at = tl.load(positions + start + row, mask=is_row, other=0).to(tl.int64)
            real = tl.minimum(real, tl.min(tl.where(is_row & (at <= root), row, q_len), axis=0))
    return real


@triton.jit
def check_differs(bad, entry, expected, found, site, b, part, is_done, state, numbers, room):
    """Note the first entry of a block that differs, unless one before it did; return whether one has."""
    first = tl.min(tl.where(bad, entry, NOWHERE), axis=0)
    is_it = entry == first
    is_new = (first < NOWHERE) & (is_done == 0)
    report(is_new, site, b, part, of(expected, is_it), of(found, is_it), state, numbers, room)
    return is_done | (first < NOWHERE).to(tl.int32)


@triton.jit
def rows_kernel(
    positions, input_ids, out_cache_loc, slot_table, token_ids, parents, depths, num_nodes,
    plan, state, numbers,
    room, rows, token_rows, positions_size, input_size, out_size, table_stride, max_context, pool_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Check one request's query rows: positions, tokens, and the slots they write."""
    b = tl.program_id(0).to(tl.int64)
    if (b >= tl.load(state + BATCH_SIZE)) | (tl.load(state + KNOWS_Q) == 0):
        return
    start = tl.load(plan + row_offset(ROW_START, room, b))
    q_len = tl.load(plan + row_offset(Q_LEN, room, b))
    prefix_len = tl.load(plan + row_offset(PREFIX_LEN, room, b))
    is_tree = tl.load(plan + row_offset(IS_TREE, room, b)) != 0
    knows_prefix = tl.load(state + KNOWS_PREFIX) != 0
    real = real_rows(num_nodes, b, q_len)

    judged = tl.minimum(real, 1)
    if depths is not None:
        judged = tl.minimum(real, rows)
    elif parents is not None:
        judged = tl.where(is_tree, real, judged)
    has_positions = knows_prefix & (start + judged <= positions_size)
    has_tokens = start + real <= input_size
    if token_ids is not None:
        is_short = has_tokens & (token_rows < real)
        report(is_short, INPUT_IDS, b, 0, real, token_rows, state, numbers, room)
        has_tokens = has_tokens & (token_rows >= real)
    written = slot_rows(num_nodes, positions, b, start, q_len, positions_size, BLOCK)
    has_slots = start + q_len <= out_size
    has_table = (tl.load(state + KV_HOLDS) != 0) & knows_prefix & (start + written <= out_size)
    if slot_table is not None:
        held = tl.maximum(tl.minimum(max_context - prefix_len, written), 0)
        is_short = has_table & (held < written)
        report(
            is_short, SLOT_TABLE, b, 1, prefix_len + written, prefix_len + held, state, numbers, room,
        )  # fmt: skip
        has_table = has_table & (held >= written)

    off = 0
    unfed = 0
    outside = 0
    unwritten = 0
    moved = 0
    for first in range(0, q_len, BLOCK):
        row = first + tl.arange(0, BLOCK).to(tl.int64)
        is_real = row < real
        if positions is not None:
            is_judged = (row < judged) & has_positions
            depth = tl.zeros([BLOCK], tl.int64)
            if depths is not None:
                depth = tl.load(depths + row_offset(b, rows, row), mask=is_judged, other=0).to(
                    tl.int64
                )
            elif parents is not None:
                node = tl.where(is_judged & is_tree, row, 0)
                while tl.max(node, axis=0) > 0:
                    depth += (node > 0).to(tl.int64)
                    up = tl.load(parents + row_offset(b, rows, node), mask=node > 0, other=0)
                    node = up.to(tl.int64)
            found = tl.load(positions + start + row, mask=is_judged, other=0).to(tl.int64)
            want = position(prefix_len, depth)
            off = check_differs(
                is_judged & (found != want), row, want, found, POSITIONS, b, 0, off, state, numbers, room,
            )  # fmt: skip
        if input_ids is not None and token_ids is not None:
            is_fed = is_real & has_tokens
            found = tl.load(input_ids + start + row, mask=is_fed, other=0).to(tl.int64)
            want = tl.load(token_ids + row_offset(b, token_rows, row), mask=is_fed, other=0).to(
                tl.int64
            )
            unfed = check_differs(
                is_fed & (found != want), row, want, found, INPUT_IDS, b, 0, unfed, state, numbers, room,
            )  # fmt: skip
        if out_cache_loc is not None:
            is_mine = (row < q_len) & has_slots
            slot = tl.load(out_cache_loc + start + row, mask=is_mine, other=0).to(tl.int64)
            is_over = (pool_size >= 0) & (slot >= pool_size)
            bad = is_mine & (row < written) & ((slot < 0) | is_over)
            outside = check_differs(
                bad, row, tl.zeros([BLOCK], tl.int64), slot, OUT_CACHE_LOC, b, 0, outside, state, numbers,
                room,
            )  # fmt: skip
            bad = is_mine & (row >= written) & ((slot < -1) | is_over)
            unwritten = check_differs(
                bad, row, tl.zeros([BLOCK], tl.int64), slot, OUT_CACHE_LOC, b, 1, unwritten, state, numbers,
                room,
            )  # fmt: skip
            if slot_table is not None:
                is_held = (row < written) & has_table
                slot = tl.load(out_cache_loc + start + row, mask=is_held, other=0).to(tl.int64)
                at = row_offset(b, table_stride, kv_len(prefix_len, row))
                want = tl.load(slot_table + at, mask=is_held, other=0).to(tl.int64)
                moved = check_differs(
                    is_held & (slot != want), row, want, slot, SLOT_TABLE, b, 1, moved, state, numbers,
                    room,
                )  # fmt: skip


# slots: one bit a slot, in words of 32


@triton.jit
def slot_bit(slot):
    """The bit of a slot in its word."""
    return (tl.full(slot.shape, 1, tl.int32)) << bit_shift(slot).to(tl.int32)


@triton.jit
def mark_slots_kernel(
    kv_indices, out_cache_loc, slot_table,
    plan, state,
    held, mine, written, doubly,  # bits of slots: of any prefix, of each request's, of rows, of two rows
    room, kv_size, out_size, table_stride, max_context, pool_size, num_slots,
    HAS_KV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mark the slots of one request's prefix (axis 1 shares it) and of its rows."""
    b = tl.program_id(0).to(tl.int64)
    if b >= tl.load(state + BATCH_SIZE):
        return
    slot_words = bit_words(num_slots)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    if HAS_KV:
        prefix_len = tl.load(plan + row_offset(PREFIX_LEN, room, b))
        kv_start = tl.load(plan + row_offset(KV_START, room, b))
        is_known = (tl.load(state + KV_HOLDS) != 0) & (tl.load(state + KNOWS_PREFIX) != 0)
        end = tl.where(is_known, tl.minimum(prefix_len, kv_size - kv_start), 0)
        for first in range(
            block_start(tl.program_id(1), BLOCK), end, block_start(tl.num_programs(1), BLOCK)
        ):
            entry = first + lane
            is_entry = entry < end
            slot = tl.load(kv_indices + kv_start + entry, mask=is_entry, other=0).to(tl.int64)
            bad = is_entry & ((slot < 0) | ((pool_size >= 0) & (slot >= pool_size)))
            if tl.max(bad.to(tl.int32), axis=0) > 0:
                tl.atomic_min(
                    plan + row_offset(BAD_SLOT, room, b),
                    tl.min(tl.where(bad, entry, NOWHERE), axis=0),
                )
            if tl.max((is_entry & (slot >= num_slots)).to(tl.int32), axis=0) > 0:
                tl.store(state + IS_DOUBTFUL, 1)
            is_slot = is_entry & (slot >= 0) & (slot < num_slots)
            slot = tl.where(is_slot, slot, 0)
            bit = slot_bit(slot)
            before = tl.atomic_or(
                mine + row_offset(b, slot_words, bit_word(slot)), bit, mask=is_slot
            )
            twice = is_slot & ((before & bit) != 0)
            if tl.max(twice.to(tl.int32), axis=0) > 0:
                tl.atomic_min(
                    plan + row_offset(TWICE, room, b),
                    tl.min(tl.where(twice, slot, NOWHERE), axis=0),
                )
            tl.atomic_or(held + bit_word(slot), bit, mask=is_slot)
            if slot_table is not None:
                in_table = is_entry & (entry < max_context)
                at = row_offset(b, table_stride, entry)
                want = tl.load(slot_table + at, mask=in_table, other=0).to(tl.int64)
                found = tl.load(kv_indices + kv_start + entry, mask=in_table, other=0).to(tl.int64)
                bad = in_table & (found != want)
                if tl.max(bad.to(tl.int32), axis=0) > 0:
                    tl.atomic_min(
                        plan + row_offset(MOVED, room, b),
                        tl.min(tl.where(bad, entry, NOWHERE), axis=0),
                    )
    if out_cache_loc is not None and tl.program_id(1) == 0:
        start = tl.load(plan + row_offset(ROW_START, room, b))
        q_len = tl.load(plan + row_offset(Q_LEN, room, b))
        for first in range(0, q_len, BLOCK):
            row = first + lane
            is_row = (row < q_len) & (start + row < out_size)
            slot = tl.load(out_cache_loc + start + row, mask=is_row, other=-1).to(tl.int64)
            if tl.max((is_row & (slot >= num_slots)).to(tl.int32), axis=0) > 0:
                tl.store(state + IS_DOUBTFUL, 1)
            is_slot = is_row & (slot >= 0) & (slot < num_slots)
            slot = tl.where(is_slot, slot, 0)
            bit = slot_bit(slot)
            before = tl.atomic_or(written + bit_word(slot), bit, mask=is_slot)
            tl.atomic_or(doubly + bit_word(slot), bit, mask=is_slot & ((before & bit) != 0))


@triton.jit
def judge_slots_kernel(
    kv_indices, out_cache_loc, slot_table, num_nodes, positions,
    plan, state, numbers,
    held, doubly,
    room, out_size, positions_size, table_stride, max_context, num_slots,
    HAS_KV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Say what the marks of one request's slots mean."""
    b = tl.program_id(0).to(tl.int64)
    if b >= tl.load(state + BATCH_SIZE):
        return
    q_len = tl.load(plan + row_offset(Q_LEN, room, b))
    start = tl.load(plan + row_offset(ROW_START, room, b))
    if HAS_KV:
        kv_start = tl.load(plan + row_offset(KV_START, room, b))
        entry = tl.load(plan + row_offset(BAD_SLOT, room, b))
        if entry < NOWHERE:
            found = tl.load(kv_indices + kv_start + entry).to(tl.int64)
            report(True, KV_INDICES, b, 0, 0, found, state, numbers, room)
            tl.store(plan + row_offset(BAD_SLOT, room, b), NOWHERE)
        twice = tl.load(plan + row_offset(TWICE, room, b))
        if twice < NOWHERE:
            report(True, KV_UNIQUE, b, 0, 0, twice, state, numbers, room)
            tl.store(plan + row_offset(TWICE, room, b), NOWHERE)
        if slot_table is not None:
            prefix_len = tl.load(plan + row_offset(PREFIX_LEN, room, b))
            is_known = (tl.load(state + KV_HOLDS) != 0) & (tl.load(state + KNOWS_PREFIX) != 0)
            entry = tl.load(plan + row_offset(MOVED, room, b))
            if is_known & (max_context < prefix_len):
                report(True, SLOT_TABLE, b, 0, prefix_len, max_context, state, numbers, room)
            elif entry < NOWHERE:
                found = tl.load(kv_indices + kv_start + entry).to(tl.int64)
                want = tl.load(slot_table + row_offset(b, table_stride, entry)).to(tl.int64)
                report(True, SLOT_TABLE, b, 0, want, found, state, numbers, room)
            tl.store(plan + row_offset(MOVED, room, b), NOWHERE)
    if out_cache_loc is not None:
        real = slot_rows(num_nodes, positions, b, start, q_len, positions_size, BLOCK)
        pad = tl.load(state + PAD_SLOT)
        sure = real
        if num_nodes is None:
            sure = tl.minimum(q_len, 1)
        shared = 0
        taken = 0
        is_live = 0
        for first in range(0, q_len, BLOCK):
            row = first + tl.arange(0, BLOCK).to(tl.int64)
            is_row = (row < q_len) & (start + row < out_size)
            slot = tl.load(out_cache_loc + start + row, mask=is_row, other=-1).to(tl.int64)
            is_slot = is_row & (slot >= 0) & (slot < num_slots)
            at = tl.where(is_slot, slot, 0)
            bit = slot_bit(at)
            is_shared = (tl.load(doubly + bit_word(at), mask=is_slot, other=0) & bit) != 0
            shared = check_differs(
                is_slot & is_shared & (row < real), row, tl.zeros([BLOCK], tl.int64), slot, WRITE_UNIQUE, b,
                0, shared, state, numbers, room,
            )  # fmt: skip
            is_taken = (tl.load(held + bit_word(at), mask=is_slot, other=0) & bit) != 0
            taken = check_differs(
                is_slot & is_taken, row, tl.zeros([BLOCK], tl.int64), slot, WRITE_DISJOINT, b, 0, taken,
                state, numbers, room,
            )  # fmt: skip
            is_live = is_live | tl.max((is_row & (row < sure) & (slot == pad)).to(tl.int32), axis=0)
        if (b == 0) & (pad >= 0) & (pad < num_slots):
            word = tl.load(held + bit_word(tl.maximum(pad, 0)))
            is_live = is_live | ((word >> bit_shift(tl.maximum(pad, 0)).to(tl.int32)) & 1)
        bad = (is_live != 0) & (pad >= 0) & (tl.load(state + PAD_IN_TAIL) != 0)
        report(bad, TAIL_PAD, 0, 0, 0, pad, state, numbers, room)


@triton.jit
def clear_slots_kernel(
    kv_indices, out_cache_loc,
    plan, state,
    held, mine, written, doubly,
    room, kv_size, out_size, num_slots,
    HAS_KV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clear what ``mark_slots_kernel`` marked."""
    b = tl.program_id(0).to(tl.int64)
    if b >= tl.load(state + BATCH_SIZE):
        return
    slot_words = bit_words(num_slots)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    if HAS_KV:
        prefix_len = tl.load(plan + row_offset(PREFIX_LEN, room, b))
        kv_start = tl.load(plan + row_offset(KV_START, room, b))
        is_known = (tl.load(state + KV_HOLDS) != 0) & (tl.load(state + KNOWS_PREFIX) != 0)
        end = tl.where(is_known, tl.minimum(prefix_len, kv_size - kv_start), 0)
        for first in range(
            block_start(tl.program_id(1), BLOCK), end, block_start(tl.num_programs(1), BLOCK)
        ):
            is_entry = first + lane < end
            slot = tl.load(kv_indices + kv_start + first + lane, mask=is_entry, other=-1).to(
                tl.int64
            )
            is_slot = is_entry & (slot >= 0) & (slot < num_slots)
            at = bit_word(tl.where(is_slot, slot, 0))
            tl.store(held + at, 0, mask=is_slot)
            tl.store(mine + row_offset(b, slot_words, at), 0, mask=is_slot)
    if out_cache_loc is not None and tl.program_id(1) == 0:
        start = tl.load(plan + row_offset(ROW_START, room, b))
        q_len = tl.load(plan + row_offset(Q_LEN, room, b))
        for first in range(0, q_len, BLOCK):
            row = first + lane
            is_row = (row < q_len) & (start + row < out_size)
            slot = tl.load(out_cache_loc + start + row, mask=is_row, other=-1).to(tl.int64)
            is_slot = is_row & (slot >= 0) & (slot < num_slots)
            at = bit_word(tl.where(is_slot, slot, 0))
            tl.store(written + at, 0, mask=is_slot)
            tl.store(doubly + at, 0, mask=is_slot)


# tails of fixed buffers


@triton.jit
def first_stale(buffer, first, size, value, BLOCK: tl.constexpr):
    """The first entry from ``first`` on that does not hold ``value``; NOWHERE."""
    at = tl.full([], NOWHERE, tl.int64)
    for start in range(first, size, BLOCK):
        entry = start + tl.arange(0, BLOCK).to(tl.int64)
        found = tl.load(buffer + entry, mask=entry < size, other=0).to(tl.int64)
        bad = (entry < size) & (found != value)
        at = tl.minimum(at, tl.min(tl.where(bad, entry, NOWHERE), axis=0))
    return at


@triton.jit
def tails_kernel(
    positions, out_cache_loc, input_ids,
    state, numbers,
    room, positions_size, out_size, input_size, pad_slot,
    HAS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look at what lies behind the call's rows; find the pad slot, and where the written rows end."""
    live = tl.load(state + NUM_ROWS)
    is_known = tl.load(state + KNOWS_Q) != 0
    pad = tl.full([], -1, tl.int64)
    if out_cache_loc is not None:
        if HAS_PAD:
            pad = pad * 0 + pad_slot
        elif live < out_size:
            pad = tl.load(out_cache_loc + out_size - 1).to(tl.int64)
    tl.store(state + PAD_SLOT, pad)
    tl.store(state + PAD_IN_TAIL, 0)
    if is_known:
        if positions is not None:
            at = first_stale(positions, live, positions_size, 0, BLOCK)
            if at < NOWHERE:
                found = tl.load(positions + at).to(tl.int64)
                report(True, TAIL_POSITIONS, 0, 0, 0, found, state, numbers, room)
        if out_cache_loc is not None:
            at = first_stale(out_cache_loc, live, out_size, pad, BLOCK)
            if at < NOWHERE:
                found = tl.load(out_cache_loc + at).to(tl.int64)
                report(True, TAIL_OUT, 0, 0, pad, found, state, numbers, room)
            in_tail = 0
            for start in range(live, out_size, BLOCK):
                entry = start + tl.arange(0, BLOCK).to(tl.int64)
                found = tl.load(out_cache_loc + entry, mask=entry < out_size, other=-2).to(tl.int64)
                in_tail = in_tail | tl.max((found == pad).to(tl.int32), axis=0)
            tl.store(state + PAD_IN_TAIL, in_tail)
        if input_ids is not None:
            at = first_stale(input_ids, live, input_size, 0, BLOCK)
            if at < NOWHERE:
                found = tl.load(input_ids + at).to(tl.int64)
                report(True, TAIL_INPUT, 0, 0, 0, found, state, numbers, room)
    # rows that were written: where the slots end, if the positions end there too
    if positions is not None and out_cache_loc is not None:
        last = tl.load(out_cache_loc + out_size - 1, mask=out_size > 0, other=-1).to(tl.int64)
        before = tl.load(out_cache_loc + out_size - 2, mask=out_size > 1, other=-1).to(tl.int64)
        tail = tl.where((before == last) | (out_size < 2), last, -1)
        if HAS_PAD:
            tail = tail * 0 + pad_slot
        slots_end = tl.full([], 0, tl.int64)
        positions_end = tl.full([], 0, tl.int64)
        for start in range(0, tl.maximum(out_size, positions_size), BLOCK):
            entry = start + tl.arange(0, BLOCK).to(tl.int64)
            slot = tl.load(out_cache_loc + entry, mask=entry < out_size, other=-1).to(tl.int64)
            is_slot = (entry < out_size) & (slot != tail)
            slots_end = tl.maximum(slots_end, tl.max(tl.where(is_slot, entry + 1, 0), axis=0))
            at = tl.load(positions + entry, mask=entry < positions_size, other=0).to(tl.int64)
            positions_end = tl.maximum(
                positions_end, tl.max(tl.where(at != 0, entry + 1, 0), axis=0)
            )
        if (slots_end != positions_end) | (slots_end != live):
            tl.store(state + IS_OWN, 0)
    else:
        tl.store(state + IS_OWN, 0)


@triton.jit
def mask_tail_kernel(
    custom_mask, state, size, CAPTURED: tl.constexpr, IS_BOOL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Look at the flat mask behind the call, and for values that are neither 0 nor 1."""
    entry = block_start(tl.program_id(0).to(tl.int64), BLOCK) + tl.arange(0, BLOCK)
    live = tl.load(state + NUM_BITS)
    knows_mask = (tl.load(state + KNOWS_Q) != 0) & (tl.load(state + KNOWS_PREFIX) != 0)
    if (not IS_BOOL) | (block_start(tl.program_id(0).to(tl.int64) + 1, BLOCK) > live):
        value = tl.load(custom_mask + entry, mask=entry < size, other=0).to(tl.int32)
        if CAPTURED:
            stale = (entry >= live) & (value != 0) & knows_mask
            at = tl.min(tl.where(stale, entry, NOWHERE), axis=0)
            if at < NOWHERE:
                tl.atomic_min(state + STALE_BIT, at)
        if not IS_BOOL:
            most = tl.max(value, axis=0)
            if most > 1:
                tl.atomic_max(state + LARGEST, most.to(tl.int64))


@triton.jit
def bias_values_kernel(bias, state, size, lowest, BLOCK: tl.constexpr):
    """Look for the first entry of a dense mask that is neither 0 nor the lowest number."""
    entry = block_start(tl.program_id(0).to(tl.int64), BLOCK) + tl.arange(0, BLOCK)
    value = tl.load(bias + entry, mask=entry < size, other=0.0).to(tl.float64)
    bad = (entry < size) & (value != 0.0) & ~(value <= lowest)
    at = tl.min(tl.where(bad, entry, NOWHERE), axis=0)
    if at < NOWHERE:
        tl.atomic_min(state + BAD_BIAS, at)


# masks


@triton.jit
def seen_at(
    mask, b, row, col, start, prefix_len, q_len, wanted, bias_rows, bias_columns, hidden_below,
    FORM: tl.constexpr,
):  # fmt: skip
    """Read (row, col) of request b; ``start`` is its first entry (byte, where packed)."""
    if FORM == "custom_mask":
        at = mask_offset(start, row, col, prefix_len, q_len)
        seen = tl.load(mask + at, mask=wanted, other=0) != 0
    elif FORM == "packed":
        bit = tl.where(wanted, mask_offset(0, row, col, prefix_len, q_len), 0)
        byte = tl.load(mask + packed_byte(start, bit), mask=wanted, other=0).to(tl.int32)
        seen = ((byte >> packed_shift(bit).to(tl.int32)) & 1) != 0
    else:
        entry = tl.where(
            col < prefix_len, col, tree_col(bias_columns - bias_rows, col - prefix_len)
        )
        at = row_offset(row_offset(b, bias_rows, row), bias_columns, entry)
        seen = tl.load(mask + at, mask=wanted, other=0.0).to(tl.float64) > hidden_below
    return seen & wanted


@triton.jit
def is_readable(
    b,
    start,
    q_len,
    prefix_len,
    state,
    size,
    bias_rows,
    bias_columns,
    bias_batch,
    FORM: tl.constexpr,
):
    """Whether a mask holds the whole of a request; lengths and shapes have their own invariants."""
    knows = (tl.load(state + KNOWS_Q) != 0) & (tl.load(state + KNOWS_PREFIX) != 0)
    if FORM == "custom_mask":
        fits = start + mask_len(prefix_len, q_len) <= size
    elif FORM == "packed":
        fits = start + packed_len(mask_len(prefix_len, q_len)) <= size
    else:
        fits = (b < bias_batch) & (q_len <= bias_rows) & (prefix_len <= bias_columns - bias_rows)
    return knows & fits


@triton.jit
def see_rows_kernel(
    mask, bits, hidden,  # out: [max_rows, width] words of the tree's columns, [max_rows] whether prefix is hidden
    plan, state,
    room, size, bias_rows, bias_columns, bias_batch, hidden_below, width,
    FORM: tl.constexpr, BATCH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read one query row of a mask; programs of axis 1 share its prefix."""
    query = tl.program_id(0).to(tl.int64)
    batch = tl.load(state + BATCH_SIZE)
    request = tl.arange(0, BATCH)
    is_request = request < batch
    ends = tl.load(plan + row_offset(ROW_START, room, request), mask=is_request, other=NOWHERE)
    ends += tl.load(plan + row_offset(Q_LEN, room, request), mask=is_request, other=0)
    b = tl.sum((is_request & (ends <= query)).to(tl.int64), axis=0)
    if b < batch:
        row = query - tl.load(plan + row_offset(ROW_START, room, b))
        q_len = tl.load(plan + row_offset(Q_LEN, room, b))
        prefix_len = tl.load(plan + row_offset(PREFIX_LEN, room, b))
        if FORM == "custom_mask":
            start = tl.load(plan + row_offset(MASK_START, room, b))
        else:
            start = tl.load(plan + row_offset(BYTE_START, room, b))
        if is_readable(
            b, start, q_len, prefix_len, state, size, bias_rows, bias_columns, bias_batch, FORM,
        ):  # fmt: skip
            is_hidden = 0
            for first in range(
                block_start(tl.program_id(1), BLOCK),
                prefix_len,
                block_start(tl.num_programs(1), BLOCK),
            ):
                col = first + tl.arange(0, BLOCK).to(tl.int64)
                wanted = col < prefix_len
                seen = seen_at(
                    mask, b, row, col, start, prefix_len, q_len, wanted, bias_rows, bias_columns,
                    hidden_below, FORM,
                )  # fmt: skip
                is_hidden = is_hidden | tl.max((wanted & ~seen).to(tl.int32), axis=0)
            if is_hidden != 0:
                tl.store(hidden + query, 1)
            if tl.program_id(1) == 0:
                columns = q_len
                if FORM == "bias":
                    columns = tl.zeros([], tl.int64) + bias_rows
                word = tl.arange(0, WIDTH)
                place = tl.arange(0, 32)
                node = block_start(word[:, None], 32) + place[None, :]
                seen = seen_at(
                    mask, b, row, tree_col(prefix_len, node), start, prefix_len, q_len, node < columns,
                    bias_rows, bias_columns, hidden_below, FORM,
                )  # fmt: skip
                found = tl.sum(
                    seen.to(tl.int32) << place[None, :], axis=1
                )  # distinct bits: no carry
                tl.store(bits + row_offset(query, width, word), found, mask=word < width)


@triton.jit
def load_bits(bits, row, is_row, word, first_row, width, num_words):
    """``[rows, words]`` of a request's tree columns."""
    at = row_offset(first_row + row.to(tl.int64)[:, None], width, word[None, :])
    return as_word(tl.load(bits + at, mask=is_row[:, None] & (word < num_words)[None, :], other=0))


@triton.jit
def has_bit(words, word, node):
    """Whether each row's words, or one row of words for all, hold a row's bit."""
    of_word = tl.where(word[None, :] == (bit_word(node))[:, None], words, 0)
    return ((tl.sum(of_word, axis=1) >> (bit_shift(node))) & 1) != 0


@triton.jit
def mask_kernel(
    bits, hidden, judged,  # [max_rows, width], [max_rows], scratch [max_rows]
    parents, num_nodes, positions,
    plan, state, numbers,
    room, width, words_rows, size, bias_rows, bias_columns, bias_batch, tree_rows, positions_size, max_rows,
    FORM: tl.constexpr, PART: tl.constexpr, HAS_TREE: tl.constexpr,
    MAY_DOUBT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Judge what one request's rows see, in one form of the mask."""
    b = tl.program_id(0).to(tl.int64)
    if (b >= tl.load(state + BATCH_SIZE)) | (tl.load(state + KNOWS_Q) == 0):
        return
    start = tl.load(plan + row_offset(ROW_START, room, b))
    q_len = tl.load(plan + row_offset(Q_LEN, room, b))
    prefix_len = tl.load(plan + row_offset(PREFIX_LEN, room, b))
    if FORM == "words":
        readable = (start + q_len <= words_rows) & (bit_words(q_len) <= width)
    else:
        if FORM == "custom_mask":
            first_entry = tl.load(plan + row_offset(MASK_START, room, b))
        else:
            first_entry = tl.load(plan + row_offset(BYTE_START, room, b))
        readable = is_readable(
            b, first_entry, q_len, prefix_len, state, size, bias_rows, bias_columns, bias_batch, FORM,
        )  # fmt: skip
    readable = readable & (start + q_len <= max_rows)
    if not readable:
        if MAY_DOUBT:
            tl.store(state + IS_DOUBTFUL, 1)
        return
    columns = q_len
    if FORM == "bias":
        columns = tl.zeros([], tl.int64) + bias_rows
    if FORM != "words":
        if bit_words(columns) > width:
            tl.store(state + IS_DOUBTFUL, 1)  # wider than the checker has room for
            return
    word = tl.arange(0, WIDTH).to(tl.int64)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    own_columns = low_bits(columns - block_start(word, 32))[None, :]
    square = low_bits(q_len - block_start(word, 32))[None, :]
    nodes = real_rows(num_nodes, b, q_len)
    blocks = num_blocks(q_len, BLOCK)

    # the rows that are surely real
    if num_nodes is None:
        has_positions = start + q_len <= positions_size
        root_position = tl.zeros([], tl.int64)
        if positions is not None:
            if has_positions & (q_len > 0):
                root_position = tl.load(positions + start).to(tl.int64)
        seen_by_real = tl.zeros([WIDTH], tl.int64)
        for step in range(blocks):
            row = block_start(blocks - 1 - step, BLOCK) + lane
            is_row = row < q_len
            below = load_bits(bits, row, is_row, word, start, width, width) & square
            below = below & low_bits(row[:, None] - block_start(word[None, :], 32))
            is_real = is_row & (row < 1)
            if positions is not None:
                at = tl.load(positions + start + row, mask=is_row & has_positions, other=0).to(
                    tl.int64
                )
                is_deeper = has_positions & (at > root_position)
                is_real = is_real | (is_row & is_deeper & (tl.max(below, axis=1) != 0))
            grows = 1
            while grows != 0:
                is_real = is_real | (is_row & has_bit(seen_by_real[None, :], word, row))
                wider = seen_by_real | tl.reduce(tl.where(is_real[:, None], below, 0), 0, union)
                grows = tl.max((wider != seen_by_real).to(tl.int32), axis=0)
                seen_by_real = wider
            tl.store(judged + start + row, is_real.to(tl.int32), mask=is_row)
        tl.debug_barrier()

    is_tree = False
    if HAS_TREE:
        is_tree = (tl.load(plan + row_offset(IS_TREE, room, b)) != 0) & (
            tl.load(num_nodes + b).to(tl.int64) <= q_len
        )
    wrong = tl.full(
        [], NOWHERE, tl.int64
    )  # row * 2^32 + column of the first cell that is not the tree's
    sees = tl.full([], 0, tl.int64)
    no_tree = tl.full([], NOWHERE, tl.int64)  # the first row that is no node's
    off = 0
    is_hidden = 0
    sees_padding = 0
    is_spare = 0
    is_sound = 1
    for step in range(blocks):
        row = block_start(step, BLOCK) + lane
        is_row = row < q_len
        loaded = load_bits(bits, row, is_row, word, start, width, width)
        found = loaded & own_columns
        if num_nodes is None:
            is_real = is_row & (tl.load(judged + start + row, mask=is_row, other=0) != 0)
        else:
            is_real = is_row & (row < nodes)
        inside = found & square
        own = has_bit(inside, word, row)
        later = inside & ~low_bits(row[:, None] + 1 - block_start(word[None, :], 32))
        sees_later = tl.max(later, axis=1) != 0
        if HAS_TREE:
            if is_tree:
                node = tl.where(is_row & (row < nodes), row, -1)
                right = tl.zeros([BLOCK, WIDTH], tl.int64)
                while tl.max(node, axis=0) >= 0:
                    is_node = node >= 0
                    at = tl.where(is_node, node, 0)
                    bit = tl.where(is_node, (at * 0 + 1) << (bit_shift(at)), 0)
                    right = right | tl.where(
                        word[None, :] == (bit_word(at))[:, None], bit[:, None], 0
                    )
                    node = tl.load(
                        parents + row_offset(b, tree_rows, at), mask=is_node, other=-1
                    ).to(tl.int64)
                differs = (found ^ right) & low_bits(nodes - block_start(word, 32))[None, :]
                differs = tl.where((row < nodes)[:, None], differs, 0)
                lowest = high_bit(differs & (0 - differs))
                cell = row[:, None] * (1 << 32) + block_start(word[None, :], 32) + lowest
                cell = tl.where(differs != 0, cell, NOWHERE)
                first = tl.min(tl.min(cell, axis=1), axis=0)
                if first < wrong:
                    wrong = first
                    is_it = (cell == first) & (((found >> lowest) & 1) != 0)
                    sees = tl.max(tl.max(is_it.to(tl.int64), axis=1), axis=0)
        else:
            below = inside & low_bits(row[:, None] - block_start(word[None, :], 32))
            places = tl.where(below != 0, block_start(word[None, :], 32) + high_bit(below), -1)
            parent = tl.max(places, axis=1)
            has_parent = is_row & (parent >= 0)
            above = (
                load_bits(
                    bits, tl.where(has_parent, parent, 0), has_parent, word, start, width, width
                )
                & square
            )
            mine = tl.where(
                word[None, :] == (bit_word(row))[:, None],
                ((row * 0 + 1) << (bit_shift(row)))[:, None],
                0,
            )
            is_other = tl.max((inside != (above | mine)).to(tl.int32), axis=1) != 0
            bad = ~own | sees_later | ((row > 0) & (parent < 0)) | (has_parent & is_other)
            no_tree = tl.minimum(no_tree, tl.min(tl.where(is_real & bad, row, NOWHERE), axis=0))
            if positions is not None:
                if (tl.load(state + KNOWS_PREFIX) != 0) & (start + q_len <= positions_size):
                    at = tl.load(positions + start + row, mask=is_row, other=0).to(tl.int64)
                    want = position(prefix_len, tl.sum(count_bits(inside), axis=1) - 1)
                    off = check_differs(
                        is_real & (at != want), row, want, at, MASK_POSITIONS, b, PART, off, state, numbers,
                        room,
                    )  # fmt: skip
        if num_nodes is not None:
            padding = found & ~low_bits(nodes - block_start(word, 32))[None, :]
            sees_padding = sees_padding | tl.max(
                (is_real & (tl.max(padding, axis=1) != 0)).to(tl.int32), axis=0
            )
        if FORM == "words":
            spare = loaded & ~square
            is_spare = is_spare | tl.max(
                (is_real & (tl.max(spare, axis=1) != 0)).to(tl.int32), axis=0
            )
        else:
            hides = tl.load(hidden + start + row, mask=is_row, other=0) != 0
            is_hidden = is_hidden | tl.max((is_real & hides).to(tl.int32), axis=0)
            is_sound = is_sound & tl.min(
                (~is_row | (own & ~sees_later & ~hides)).to(tl.int32), axis=0
            )
            tl.store(hidden + start + row, 0, mask=is_row)
    if HAS_TREE:
        report(wrong < NOWHERE, VISIBILITY, b, PART, 1 - sees, sees, state, numbers, room)
    else:
        report(no_tree < NOWHERE, MASK_IS_TREE, b, PART, 0, 0, state, numbers, room)
    report(is_hidden != 0, PREFIX_VISIBLE, b, PART, 1, 0, state, numbers, room)
    report(sees_padding != 0, PADDING_INVISIBLE, b, PART, 0, 1, state, numbers, room)
    report(is_spare != 0, SPARE_BITS, b, PART, 0, 1, state, numbers, room)
    if MAY_DOUBT:
        if (is_sound == 0) & (tl.load(state + IS_OWN) == 0):
            tl.store(state + IS_DOUBTFUL, 1)  # read with another width the mask may make sense


# acceptances and commits


@triton.jit
def acceptance_kernel(
    nodes, num_accepted, bonus, target_ids, emitted,
    token_ids, parents, num_nodes,
    plan, state, numbers,
    room, width, emitted_width, rows, target_size, vocab,
    HAS_TOKENS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Check one request's accepted path, its bonus and its new tokens."""
    b = tl.program_id(0).to(tl.int64)
    if b >= tl.load(state + BATCH_SIZE):
        return
    if tl.load(plan + row_offset(IS_IDLE, room, b)) != 0:
        return
    count = tl.load(num_accepted + b).to(tl.int64)
    step = tl.arange(0, WIDTH)
    line = row_offset(b, width, step)
    is_step = step < width
    node = tl.load(nodes + line, mask=is_step, other=-1).to(tl.int64)
    filled = tl.sum((is_step & (node != -1)).to(tl.int64), axis=0)
    bad = (is_step & (step < count) & (node == -1)) | (is_step & (step >= count) & (node != -1))
    is_broken = tl.max(bad.to(tl.int32), axis=0) > 0
    report(is_broken, ACCEPTED_END, b, 0, count, filled, state, numbers, room)
    if is_broken | (count < 1) | (count > width):
        return
    on_path = step < count
    last = of(node, step == count - 1)
    is_path = True
    if parents is not None:
        root = of(node, step == 0)
        report(root != 0, ACCEPTED_PATH, b, 0, 0, root, state, numbers, room)
        real = tl.zeros([], tl.int64) + rows
        if num_nodes is not None:
            real = tl.minimum(tl.load(num_nodes + b).to(tl.int64), rows)
        after = on_path & (step > 0)
        before = tl.load(nodes + line - 1, mask=after, other=0).to(tl.int64)
        is_real = (node > 0) & (node < real)
        parent = tl.load(
            parents + row_offset(b, rows, tl.where(after & is_real, node, 0)),
            mask=after & is_real,
            other=-1,
        ).to(tl.int64)
        bad = after & (~is_real | (parent != before))
        first = tl.min(tl.where(bad, step, WIDTH), axis=0)
        is_it = step == first
        want = tl.where(is_real, before, NOWHERE)
        found = tl.where(is_real, parent, node)
        report(
            (first < WIDTH) & (root == 0), ACCEPTED_PATH, b, 0, of(want, is_it), of(found, is_it), state,
            numbers, room,
        )  # fmt: skip
        is_path = (first == WIDTH) & (root == 0) & (real >= 1)
    if not is_path:
        return
    start = tl.load(plan + row_offset(ROW_START, room, b))
    has_targets = (tl.load(state + KNOWS_Q) != 0) & (
        start + tl.max(tl.where(on_path, node, 0), axis=0) < target_size
    )
    if target_ids is not None and parents is not None and HAS_TOKENS:
        after = on_path & (step > 0) & has_targets
        before = tl.load(nodes + line - 1, mask=after, other=0).to(tl.int64)
        want = tl.load(target_ids + start + before, mask=after, other=0).to(tl.int64)
        found = tl.load(token_ids + row_offset(b, rows, node), mask=after, other=0).to(tl.int64)
        first = tl.min(tl.where(after & (found != want), step, WIDTH), axis=0)
        is_it = step == first
        report(first < WIDTH, CHOICE, b, 0, of(want, is_it), of(found, is_it), state, numbers, room)
    if bonus is not None:
        token = tl.load(bonus + b).to(tl.int64)
        want = token
        if target_ids is not None:
            if has_targets & (last >= 0):
                want = tl.load(target_ids + start + last).to(tl.int64)
        outside = (token < 0) | ((vocab >= 0) & (token >= vocab))
        told = tl.where(token != want, want, NOWHERE)
        report((token != want) | outside, BONUS, b, 0, told, token, state, numbers, room)
        if parents is not None and HAS_TOKENS:
            if num_nodes is not None:
                row = tl.arange(0, ROWS)
                is_real = row < tl.minimum(tl.load(num_nodes + b).to(tl.int64), rows)
                at = row_offset(b, rows, row)
                parent = tl.load(parents + at, mask=is_real, other=-2).to(tl.int64)
                its_token = tl.load(token_ids + at, mask=is_real, other=0).to(tl.int64)
                bad = is_real & (parent == last) & (its_token == token)
                report(
                    tl.max(bad.to(tl.int32), axis=0) > 0, WALK_END, b, 0, count + 1, count, state, numbers,
                    room,
                )  # fmt: skip
            if emitted is not None:
                is_new = step + 1 < count
                after = tl.load(nodes + line + 1, mask=is_new, other=0).to(tl.int64)
                want = tl.load(token_ids + row_offset(b, rows, after), mask=is_new, other=-1).to(
                    tl.int64
                )
                want = tl.where(step == count - 1, token, want)
                is_out = step < emitted_width
                found = tl.load(
                    emitted + row_offset(b, emitted_width, step), mask=is_out, other=-1
                ).to(tl.int64)
                bad = (is_out & (found != want)) | (~is_out & (step < count))
                report(
                    tl.max(bad.to(tl.int32), axis=0) > 0, EMITTED, b, 0, 0, 0, state, numbers, room,
                )  # fmt: skip


@triton.jit
def commit_kernel(
    nodes, num_accepted, src, dst, out_cache_loc, slot_table_after,
    plan, state, numbers, room, width, out_size, after_stride, max_context,
    WIDTH: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """Check one request's commit: sources, destinations and order."""
    b = tl.program_id(0).to(tl.int64)
    if b >= tl.load(state + BATCH_SIZE):
        return
    step = tl.arange(0, WIDTH)
    is_step = step < width
    line = row_offset(b, width, step)
    start = tl.load(plan + row_offset(ROW_START, room, b))
    prefix_len = tl.load(plan + row_offset(PREFIX_LEN, room, b))
    is_idle = tl.load(plan + row_offset(IS_IDLE, room, b)) != 0
    knows_q = tl.load(state + KNOWS_Q) != 0
    knows_prefix = tl.load(state + KNOWS_PREFIX) != 0
    if src is not None:
        source = tl.load(src + line, mask=is_step, other=-1).to(tl.int64)
        if num_accepted is not None:
            count = tl.load(num_accepted + b).to(tl.int64)
            is_counted = (count >= 1) & (count <= width) & ~is_idle
            on_path = is_step & (step < count)
            if nodes is not None and out_cache_loc is not None:
                node = tl.load(nodes + line, mask=on_path, other=0).to(tl.int64)
                fits = (
                    (tl.max(node, axis=0) + start < out_size)
                    & (tl.min(node, axis=0) >= 0)
                    & knows_q
                )
                wanted = on_path & fits & is_counted
                want = tl.load(out_cache_loc + start + node, mask=wanted, other=-1).to(tl.int64)
                bad = is_step & (source != want) & fits & is_counted
                first = tl.min(tl.where(bad, step, WIDTH), axis=0)
                is_it = step == first
                report(
                    first < WIDTH, COMMIT_SRC, b, 0, of(want, is_it), of(source, is_it), state, numbers,
                    room,
                )  # fmt: skip
            if dst is not None:
                target = tl.load(dst + line, mask=is_step, other=-1).to(tl.int64)
                is_told = is_counted & knows_prefix
                want = source
                if slot_table_after is not None:
                    is_told = is_told & (prefix_len + count <= max_context)
                    at = row_offset(b, after_stride, commit_entry(prefix_len, step))
                    want = tl.load(slot_table_after + at, mask=on_path & is_told, other=-1).to(
                        tl.int64
                    )
                else:
                    is_still = tl.max((is_step & (source != target)).to(tl.int32), axis=0) == 0
                    if out_cache_loc is not None:
                        fits = knows_q & (start + count <= out_size)
                        wanted = on_path & fits & ~is_still
                        at = tl.load(out_cache_loc + start + step, mask=wanted, other=-1).to(
                            tl.int64
                        )
                        want = tl.where(is_still, source, at)
                        is_told = is_told & (is_still | fits)
                    else:
                        is_told = is_told & is_still
                want = tl.where(on_path, want, -1)
                bad = is_step & (target != want) & is_told
                first = tl.min(tl.where(bad, step, WIDTH), axis=0)
                is_it = step == first
                report(
                    first < WIDTH, COMMIT_DST, b, 0, of(want, is_it), of(target, is_it), state, numbers,
                    room,
                )  # fmt: skip
        if dst is not None:
            mine = row_offset(b, width, step)  # number of each of this request's moves
            is_late = tl.zeros([WIDTH], tl.int32)
            for begin in range(0, block_start(b + 1, width), MOVES):
                move = begin + tl.arange(0, MOVES).to(tl.int64)
                is_move = move < block_start(b + 1, width)
                its_source = tl.load(src + move, mask=is_move, other=-1).to(tl.int64)
                its_target = tl.load(dst + move, mask=is_move, other=-1).to(tl.int64)
                writes = is_move & (its_target >= 0) & (its_target != its_source)
                hits = (
                    writes[None, :]
                    & (its_target[None, :] == source[:, None])
                    & (move[None, :] < mine[:, None])
                )
                is_late = is_late | tl.max(hits.to(tl.int32), axis=1)
            bad = is_step & (source >= 0) & (is_late != 0)
            first_step = tl.min(tl.where(bad, step, WIDTH), axis=0)
            found = of(source, step == first_step)
            report(first_step < WIDTH, COMMIT_ORDER, b, 0, 0, found, state, numbers, room)


@triton.jit
def tables_kernel(
    slot_table, slot_table_after,
    changed,  # scratch [tables' rows, 2, CHANGES]
    plan, state, numbers,
    room, table_stride, after_stride, context,
    CHANGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hold one row of the slot table to its slots; rows behind the call's requests to theirs as well."""
    b = tl.program_id(0).to(tl.int64)
    is_mine = b < tl.load(state + BATCH_SIZE)
    prefix_len = tl.load(plan + row_offset(PREFIX_LEN, room, b), mask=is_mine, other=0)
    knows_prefix = tl.load(state + KNOWS_PREFIX) != 0
    moved = tl.full([], NOWHERE, tl.int64)
    total = tl.zeros([], tl.int64)
    for begin in range(0, context, BLOCK):
        entry = begin + tl.arange(0, BLOCK).to(tl.int64)
        is_entry = entry < context
        before = tl.load(
            slot_table + row_offset(b, table_stride, entry), mask=is_entry, other=0
        ).to(tl.int64)
        after = tl.load(
            slot_table_after + row_offset(b, after_stride, entry), mask=is_entry, other=0
        ).to(tl.int64)
        differs = is_entry & (before != after)
        if tl.max(differs.to(tl.int32), axis=0) > 0:
            in_prefix = differs & (entry < prefix_len) & knows_prefix
            moved = tl.minimum(moved, tl.min(tl.where(in_prefix, entry, NOWHERE), axis=0))
            into = total + tl.cumsum(differs.to(tl.int64), axis=0) - 1
            kept = differs & (into < CHANGES)
            tl.store(changed + row_offset(b, 2 * CHANGES, into), before, mask=kept)
            tl.store(changed + row_offset(b, 2 * CHANGES, CHANGES + into), after, mask=kept)
            total += tl.sum(differs.to(tl.int64), axis=0)
    tl.debug_barrier()
    if total > CHANGES:
        tl.store(state + IS_DOUBTFUL, 1)
    elif total > 0:
        one = tl.arange(0, CHANGES)
        is_one = one < total
        old = tl.load(changed + row_offset(b, 2 * CHANGES, one), mask=is_one, other=0)
        new = tl.load(changed + row_offset(b, 2 * CHANGES, CHANGES + one), mask=is_one, other=0)
        pair = is_one[:, None] & is_one[None, :]
        was = tl.sum((pair & (old[:, None] == old[None, :])).to(tl.int32), axis=1)
        now = tl.sum((pair & (old[:, None] == new[None, :])).to(tl.int32), axis=1)
        is_other = tl.max((is_one & (was != now)).to(tl.int32), axis=0) > 0
        if is_other:
            note(SLOT_PERMUTATION, b, 0, state)  # it has no numbers, and b may be past the room
    if moved < NOWHERE:
        was_at = tl.load(slot_table + row_offset(b, table_stride, moved)).to(tl.int64)
        is_at = tl.load(slot_table_after + row_offset(b, after_stride, moved)).to(tl.int64)
        report(True, PREFIX_KEPT, b, 0, was_at, is_at, state, numbers, room)


# the record


@triton.jit
def finish_kernel(
    bias, state, numbers, record, room, bias_stride, always_key, always_doubt,
    TRAP: tl.constexpr,
):  # fmt: skip
    """Write the least broken site into the record, make the state ready for the next call."""
    stale = tl.load(state + STALE_BIT)
    report(stale < NOWHERE, TAIL_BITS, 0, 0, 0, 1, state, numbers, room)
    largest = tl.load(state + LARGEST)
    report(largest > 1, VALUES_FLAT, 0, 0, 0, largest, state, numbers, room)
    if bias is not None:
        at = tl.load(state + BAD_BIAS)
        if at < NOWHERE:
            found = as_bits(tl.load(bias + at).to(tl.float64))
            report(True, VALUES_BIAS, row_of(at, bias_stride), 0, 0, found, state, numbers, room)
    tl.debug_barrier()
    key = tl.minimum(tl.atomic_min(state + FIRST, tl.full([], NOWHERE, tl.int64)), always_key)
    is_doubtful = (tl.load(state + IS_DOUBTFUL) != 0) | (always_doubt != 0)
    checked = tl.load(record + CHECKED) + 1
    tl.store(record + CHECKED, checked)
    held = tl.load(record + SNAPSHOT)
    takes = 0
    if key < NOWHERE:
        tl.store(record + BROKEN, tl.load(record + BROKEN) + 1)
        if held < 2:
            takes = 1
            site = row_of(key, 1 << 40)
            request = row_of(col_of(key, 1 << 40), 1 << 8)
            part = col_of(key, 1 << 8)
            at = number_of(site, tl.minimum(request, room), part, room)
            tl.store(record + SITE, site)
            tl.store(record + REQUEST, request)
            tl.store(record + EXPECTED, tl.load(numbers + at))
            tl.store(record + FOUND, tl.load(numbers + at + 1))
            tl.store(record + AT_CALL, checked)
            tl.store(record + SNAPSHOT, 2)
    elif is_doubtful:
        tl.store(record + DOUBTED, tl.load(record + DOUBTED) + 1)
        if held == 0:
            takes = 1
            tl.store(record + AT_CALL, checked)
            tl.store(record + SNAPSHOT, 1)
    tl.store(record + TAKES, takes)
    tl.debug_barrier()
    tl.store(state + FIRST, NOWHERE)
    tl.store(state + IS_DOUBTFUL, 0)
    tl.store(state + STALE_BIT, NOWHERE)
    tl.store(state + LARGEST, 0)
    tl.store(state + BAD_BIAS, NOWHERE)
    if TRAP:
        if key < NOWHERE:
            tl.inline_asm_elementwise(
                "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def snapshot_kernel(sources, offsets, sizes, snapshot, record, BLOCK: tl.constexpr):
    """Copy the bytes of one field of a call that broke something; programs of axis 1 share it."""
    if tl.load(record + TAKES) != 0:
        field = tl.program_id(0)
        source = tl.load(sources + field).to(tl.pointer_type(tl.uint8))
        into = snapshot + tl.load(offsets + field)
        size = tl.load(sizes + field)
        for first in range(
            block_start(tl.program_id(1), BLOCK), size, block_start(tl.num_programs(1), BLOCK)
        ):
            at = first + tl.arange(0, BLOCK).to(tl.int64)
            tl.store(into + at, tl.load(source + at, mask=at < size, other=0), mask=at < size)

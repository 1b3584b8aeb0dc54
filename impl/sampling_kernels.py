"""Kernels of the target's choice: argmax, the cut of top-k and top-p, and the sample itself.

A token's *key* orders a row: the order-preserving bits of its logit above the complement of its id,
so the largest key is the likeliest token, the smallest id among equals. No two tokens of a row share
one. Weights are ``exp((logit - peak) / temperature)`` in float64.
"""

import triton
import triton.language as tl

from ddtree.impl.index import block_start, chunk_len, chunk_start, col_of, row_of, row_offset
from ddtree.impl.mask_kernels import request_of
from ddtree.impl.rank_kernels import order_of, value_of

NO_KEY = tl.constexpr(-0x8000000000000000)  # below every token's key


@triton.jit
def key_of(logit, token):
    """The key of a token (module docstring)."""
    return (order_of(logit).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def id_of(key):
    """The token of a key."""
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def weight_of(logit, peak, temperature):
    """A token's weight in float64; the peak first, so that a tiny temperature cannot overflow it."""
    return tl.exp((logit.to(tl.float64) - peak.to(tl.float64)) / temperature)


@triton.jit
def split_argmax_kernel(
    logits, keys, vocab, stride, BLOCK: tl.constexpr
):  # [T, vocab] -> [T, splits]
    """Largest key of one split of one row."""
    query, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    length = chunk_len(vocab, splits, BLOCK)
    start = chunk_start(split, length)
    best = tl.full([BLOCK], NO_KEY, tl.int64)
    for first in range(start, tl.minimum(start + length, vocab), BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(
            logits + row_offset(query, stride, token), mask=token < vocab, other=float("-inf")
        )
        key = tl.where(token < vocab, key_of(logit.to(tl.float32), token), NO_KEY)
        best = tl.maximum(best, key)
    tl.store(keys + row_offset(query, splits, split), tl.max(best, axis=0))


@triton.jit
def combine_argmax_kernel(keys, ids, splits, SPLITS: tl.constexpr):  # [T, splits] -> [T]
    """Token of a row's largest key."""
    query, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    key = tl.load(keys + row_offset(query, splits, split), mask=split < splits, other=NO_KEY)
    tl.store(ids + query, id_of(tl.max(key, axis=0)))


@triton.jit
def measure(
    row, vocab, bound, least, peak, temperature, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """Count, or weigh, the tokens whose order is at least ``bound`` and whose key at least ``least``."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < vocab, other=float("nan")).to(tl.float32)
        is_in = (token < vocab) & (order_of(logit) >= bound) & (key_of(logit, token) >= least)
        if BY_WEIGHT:
            total += tl.where(
                is_in, weight_of(tl.where(is_in, logit, peak), peak, temperature), 0.0
            )
        else:
            total += is_in.to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def cut(row, vocab, goal, least, peak, temperature, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Least key of the shortest run of likeliest tokens whose count, or weight, reaches ``goal``."""
    bound = tl.full([], -0x80000000, tl.int64)
    for step in range(32):
        trial = bound + (tl.full([], 1, tl.int64) << (31 - step))
        reached = measure(row, vocab, trial, least, peak, temperature, BY_WEIGHT, BLOCK) >= goal
        bound = tl.where(reached, trial, bound)
    above = measure(row, vocab, bound + 1, least, peak, temperature, BY_WEIGHT, BLOCK)
    one = tl.full([], 1.0, tl.float64)
    if BY_WEIGHT:
        one = weight_of(value_of(bound.to(tl.int32)), peak, temperature)
    room = tl.maximum(tl.ceil((goal - above) / one), 1.0)  # how many of those equal at the bound
    before = tl.full([], 0, tl.int32)
    last = tl.full([], 0, tl.int64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < vocab, other=float("nan")).to(tl.float32)
        equal = ((token < vocab) & (order_of(logit) == bound) & (key_of(logit, token) >= least)).to(
            tl.int32
        )
        rank = before + tl.cumsum(equal, axis=0) - equal
        last = tl.maximum(
            last, tl.max(tl.where((equal != 0) & (rank < room), token, 0), axis=0).to(tl.int64)
        )
        before += tl.sum(equal, axis=0)
    return (bound << 32) | (0xFFFFFFFF - last)


@triton.jit
def sample_ranked_kernel(
    ranked_logits, ranked_ids, weights, uniforms,  # [T, kept] twice, [T, splits] or None, [T]
    ids, is_open,  # out [T] twice
    kept, splits, temperature, top_p,
    KEPT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sample one row from its ``kept`` likeliest tokens.

    With ``weights``, those of all tokens, the row stays open where the likeliest alone do not reach
    top-p of them; without, the likeliest are all that there are (top-k).
    """
    query, rank = tl.program_id(0).to(tl.int64), tl.arange(0, KEPT)
    line = row_offset(query, kept, 0)
    temperature = tl.load(temperature)
    peak = tl.load(ranked_logits + line)
    logit = tl.load(ranked_logits + line + rank, mask=rank < kept, other=float("-inf"))
    is_in = logit > float("-inf")
    weight = tl.where(is_in, weight_of(tl.where(is_in, logit, peak), peak, temperature), 0.0)
    likeliest = tl.sum(weight, axis=0)
    is_short = 0
    if top_p is not None:
        total = likeliest
        if weights is not None:
            split = tl.arange(0, SPLITS)
            each = tl.load(
                weights + row_offset(query, splits, split), mask=split < splits, other=0.0
            )
            total = tl.sum(each, axis=0)
        goal = tl.load(top_p) * total
        if weights is not None:
            is_short = (likeliest < goal).to(tl.int32)
        is_in = is_in & (tl.cumsum(weight, axis=0) - weight < goal)
        is_in = is_in | (rank == 0)
    count = tl.sum(is_in.to(tl.int32), axis=0)  # the first of them in rank order

    # The same tokens by id; the place in rank order rides along.
    token = tl.load(ranked_ids + line + rank, mask=rank < count, other=0x7FFFFFFF).to(tl.int64)
    key = tl.sort(row_offset(token, KEPT, rank))
    token, rank_of = row_of(key, KEPT).to(tl.int32), col_of(key, KEPT).to(tl.int32)
    is_in = rank_of < count
    logit = tl.load(ranked_logits + line + rank_of, mask=is_in, other=peak)
    weight = tl.where(is_in, weight_of(logit, peak, temperature), 0.0)
    goal = tl.load(uniforms + query) * tl.sum(weight, axis=0)
    exceeds = (tl.cumsum(weight, axis=0) > goal) & (weight > 0)
    found = tl.min(tl.where(exceeds, token, 0x7FFFFFFF), axis=0)
    last = tl.max(tl.where(weight > 0, token, 0), axis=0)  # rounding may leave none that exceeds
    tl.store(ids + query, tl.minimum(found, last).to(tl.int64))
    tl.store(is_open + query, is_short)


@triton.jit
def cut_kernel(
    logits, tops, is_open, least_keys,  # [T, vocab], [T, *], [T] or None, out [T]
    vocab, stride, top_stride, temperature, top_k, top_p,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Least key of one open row that top-k and then top-p keep."""
    query = tl.program_id(0).to(tl.int64)
    row = logits + row_offset(query, stride, 0)
    is_this = 1
    if is_open is not None:
        is_this = tl.load(is_open + query)
    if is_this != 0:
        peak = tl.load(row + tl.load(tops + row_offset(query, top_stride, 0))).to(tl.float32)
        heat = tl.load(temperature)
        least = tl.full([], NO_KEY, tl.int64)
        if top_k is not None:
            least = cut(row, vocab, top_k, least, peak, heat, False, BLOCK)
        if top_p is not None:
            lowest = tl.full([], -0x80000000, tl.int64)
            total = measure(row, vocab, lowest, least, peak, heat, True, BLOCK)
            goal = tl.load(top_p) * total
            least = cut(row, vocab, goal, least, peak, heat, True, BLOCK)
        tl.store(least_keys + query, least)


@triton.jit
def split_weight_kernel(
    logits, tops, is_open, least_keys, weights,  # as above, least_keys or None, out [T, splits]
    vocab, stride, top_stride, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Weight of one split of one open row, of the tokens that are kept."""
    query, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    is_this = 1
    if is_open is not None:
        is_this = tl.load(is_open + query)
    if is_this != 0:
        row = logits + row_offset(query, stride, 0)
        peak = tl.load(row + tl.load(tops + row_offset(query, top_stride, 0))).to(tl.float32)
        least = tl.full([], NO_KEY, tl.int64)
        if least_keys is not None:
            least = tl.load(least_keys + query)
        heat = tl.load(temperature)
        length = chunk_len(vocab, splits, BLOCK)
        start = chunk_start(split, length)
        total = tl.zeros([BLOCK], tl.float64)
        for first in range(start, tl.minimum(start + length, vocab), BLOCK):
            token = first + tl.arange(0, BLOCK)
            logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            is_in = (token < vocab) & (key_of(logit, token) >= least)
            total += tl.where(is_in, weight_of(tl.where(is_in, logit, peak), peak, heat), 0.0)
        tl.store(weights + row_offset(query, splits, split), tl.sum(total, axis=0))


@triton.jit
def sample_kernel(
    logits, tops, is_open, least_keys, weights, uniforms,  # as above; [T]
    ids,  # out [T]
    vocab, stride, top_stride, splits, temperature,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First token of one open row at which the running weight exceeds ``uniform * total``."""
    query, every = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    is_this = 1
    if is_open is not None:
        is_this = tl.load(is_open + query)
    if is_this != 0:
        row = logits + row_offset(query, stride, 0)
        peak = tl.load(row + tl.load(tops + row_offset(query, top_stride, 0))).to(tl.float32)
        least = tl.full([], NO_KEY, tl.int64)
        if least_keys is not None:
            least = tl.load(least_keys + query)
        heat = tl.load(temperature)
        line = row_offset(query, splits, every)
        weight = tl.load(weights + line, mask=every < splits, other=0.0)
        goal = tl.load(uniforms + query) * tl.sum(weight, axis=0)

        upto = tl.cumsum(weight, axis=0)
        crossed = tl.min(tl.where(upto > goal, every, SPLITS), axis=0)
        last_split = tl.max(tl.where(weight > 0, every, 0), axis=0)  # rounding may leave none
        split = tl.minimum(crossed, last_split)
        running = tl.sum(tl.where(every < split, weight, 0.0), axis=0)

        length = chunk_len(vocab, splits, BLOCK)
        start = chunk_start(split, length)
        found = tl.full([], 0x7FFFFFFF, tl.int32)
        last = tl.full([], 0, tl.int32)
        for first in range(start, tl.minimum(start + length, vocab), BLOCK):
            token = first + tl.arange(0, BLOCK)
            logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            is_in = (token < vocab) & (key_of(logit, token) >= least)
            here = tl.where(is_in, weight_of(tl.where(is_in, logit, peak), peak, heat), 0.0)
            exceeds = (running + tl.cumsum(here, axis=0) > goal) & (here > 0)
            found = tl.minimum(found, tl.min(tl.where(exceeds, token, 0x7FFFFFFF), axis=0))
            last = tl.maximum(last, tl.max(tl.where(here > 0, token, 0), axis=0))
            running += tl.sum(here, axis=0)
        tl.store(ids + query, tl.minimum(found, last).to(tl.int64))


@triton.jit
def uniform_kernel(
    seeds, qo_indptr, positions, uniforms,  # [B], [B+1], [T], out [T] float64
    batch, num_queries,
    BATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Uniform numbers of the rows' seeds and positions: Philox 4x32-10, 53 bits of its first 64."""
    query = block_start(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    b = request_of(qo_indptr, batch, query, BATCH)
    has_query = (query < num_queries) & (b < batch)
    seed = tl.load(seeds + b, mask=has_query, other=0).to(tl.uint64, bitcast=True)
    at = tl.load(positions + query, mask=has_query, other=0)
    zero = tl.zeros([BLOCK], tl.uint32)
    low, high = at.to(tl.uint32), (at >> 32).to(tl.uint32)
    word0, word1, _, _ = tl.philox(seed, low, high, zero, zero, 10)
    bits = (word0.to(tl.int64) << 21) | (word1.to(tl.int64) >> 11)
    tl.store(
        uniforms + query, bits.to(tl.float64) * 1.1102230246251565e-16, mask=query < num_queries
    )

"""Kernels that find the likeliest tokens of a row, in rank order.

Logits are ranked as they are or, for ``SOFTMAX``, by the log-probs of ``ddtree.spec.softmax``, the same
bits: two logits may share one.

A number's *cost* is an integer that orders it, the bits of its float32 turned around: smaller is
likelier. -inf (``NO_COST``) comes after every candidate. A log-prob is at most 0, a logit may be more.
"""

import triton
import triton.language as tl

from ddtree.impl.exact import (
    bits_of,
    exponential,
    float_of,
    log_1p,
    split_steps,
    weight_steps,
)
from ddtree.impl.index import row_offset
from ddtree.spec import softmax

NO_COST = tl.constexpr(0x7F800000)  # that of -inf: not a candidate
MIDPOINTS = tl.constexpr(10)
MIN_FLOAT32 = tl.constexpr(-3.4028234663852886e38)
TILE_REACH = tl.constexpr(softmax.TILE_REACH)
ROW_REACH = tl.constexpr(softmax.ROW_REACH)


@triton.jit
def order_of(logit):
    """Order-preserving int32 of a float32 number; 0.0 and -0.0 are alike, NaN is least."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, -0x80000000, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def value_of(order):
    """The float32 number of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def cost_of(value, LOG_PROBS: tl.constexpr):
    """Cost of a float32 number; what is NaN or -inf, and a log-prob above 0, has none."""
    is_one = value > float("-inf")
    if LOG_PROBS:
        is_one = is_one & (value <= 0)
    return tl.where(is_one, ~order_of(value), NO_COST)


@triton.jit
def cut_smallest(costs, k):
    """Return a cost at which the k smallest (of at least k) end: they are those below it, and as
    many of those equal to it as k leaves room for.

    Bisects the range of the costs' bits; from MIDPOINTS counts on every other trial is the next cost
    itself, which ends it early where many are equal.
    """
    low, high = tl.min(costs, axis=0), tl.max(costs, axis=0)
    count = 0
    while low < high:
        is_next = (count >= MIDPOINTS) & (count % 2 == 0)
        trial = (low & high) + ((low ^ high) >> 1) + 1  # above the mean, which cannot overflow
        if is_next:
            trial = tl.min(tl.where(costs > low, costs, NO_COST), axis=0)
        below = tl.sum((costs < trial).to(tl.int32), axis=0)
        if below < k:
            low = trial
        else:
            high = tl.where(is_next, low, trial - 1)
        if below == k:
            low = trial
            high = trial
        count += 1
    return low


@triton.jit
def place_smallest(costs, k):
    """Say which are the k smallest, the first ones among equals, and each one's place in order.

    Returns ``(chosen, place)``; costs of ``NO_COST`` are never chosen.
    """
    limit = cut_smallest(costs, k)
    below = (costs < limit).to(tl.int32)
    equal = ((costs == limit) & (limit < NO_COST)).to(tl.int32)
    room = k - tl.sum(below, axis=0)
    both = below + (equal << 12)  # one scan for two: fewer than k <= 1024 lie below
    before = tl.cumsum(both, axis=0) - both
    below_before, equal_before = before & 4095, before >> 12
    chosen = (below != 0) | ((equal != 0) & (equal_before < room))
    return chosen, below_before + tl.minimum(equal_before, room)


@triton.jit
def candidate(value, LOG_PROBS: tl.constexpr, SOFTMAX: tl.constexpr):
    """The number itself, -inf for what is no candidate: NaN, a log-prob above 0, a logit of +inf."""
    if LOG_PROBS:
        is_one = value <= 0
    elif SOFTMAX:
        is_one = value < float("inf")
    else:
        is_one = value > float("-inf")
    return tl.where(is_one, value, float("-inf"))


@triton.jit
def finite(peak):
    """The peak, 0 where it is that of no token."""
    return tl.where(peak > float("-inf"), peak, 0.0)


@triton.jit
def weight_of(value, base, REACH: tl.constexpr):
    """exp(value - base); of what is out of reach, so little that it comes to no step."""
    difference = value.to(tl.float64) - base.to(tl.float64)
    difference = tl.where(value >= base - REACH, difference, -REACH)
    return exponential(difference, bits_of, float_of)


@triton.jit
def log_total_of(peaks, sums, base):
    """log(sum of exp(logit - base)) of a row, from its tiles' peaks and sums."""
    weight = weight_of(peaks, base, ROW_REACH) * (sums.to(tl.float64) * 0.0009765625)  # 2**-10
    whole, part = split_steps(weight, bits_of)
    rest = tl.sum(whole) - 1099511627776  # in 2**-40: all but the likeliest, which weighs 1
    total = rest.to(tl.float64) * 9.094947017729282e-13 + tl.sum(part).to(tl.float64) * (
        4.0389678347315804e-28  # 2**-91
    )
    return log_1p(tl.maximum(total, 0.0), bits_of, float_of)


@triton.jit
def log_prob_of(logit, base, log_total):
    """Log-prob of a logit, float32; -inf where it is below that range."""
    log_prob = (logit.to(tl.float64) - base.to(tl.float64)) - log_total
    return tl.where(log_prob >= MIN_FLOAT32, log_prob, float("-inf")).to(tl.float32)


@triton.jit
def group_max_kernel(
    log_probs, group_maxima,  # [B, horizon, vocab], [B, horizon, num_groups] float32
    tile_peaks, tile_sums,  # for SOFTMAX, [B, horizon, num_tiles] float32, int64
    vocab, num_groups, horizon, stride_b, stride_d,
    LOG_PROBS: tl.constexpr, SOFTMAX: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Largest value of each group of GROUP neighbouring tokens; GROUPS groups a program.

    For SOFTMAX a program's tokens are a tile of the reference's, and their weights are summed.
    """
    b, depth = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = log_probs + b * stride_b + depth * stride_d
    value = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    value = candidate(value, LOG_PROBS, SOFTMAX)
    line = row_offset(b, horizon, depth)
    largest = tl.max(value, axis=1)
    tl.store(group_maxima + row_offset(line, num_groups, group), largest, mask=group < num_groups)
    if SOFTMAX:
        peak = tl.max(largest, axis=0)
        steps = weight_steps(weight_of(value, finite(peak), TILE_REACH), bits_of)
        into = row_offset(line, tl.num_programs(1), tl.program_id(1))
        tl.store(tile_peaks + into, peak)
        tl.store(tile_sums + into, tl.sum(steps))


@triton.jit
def rank_kernel(
    log_probs, group_maxima,  # [B, horizon, vocab], [B, horizon, num_groups]
    tile_peaks, tile_sums,  # for SOFTMAX, [B, horizon, num_tiles]
    groups, unsorted,  # scratch [B, horizon, kept] int32, int64
    ranked_log_probs, ranked_ids,  # out [B, horizon, kept] float32, int32
    vocab, num_groups, num_tiles, kept, horizon, stride_b, stride_d,
    LOG_PROBS: tl.constexpr, SOFTMAX: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_TILES: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One depth's ``kept`` likeliest tokens in rank order: log-prob descending, then id ascending.

    The ``kept`` groups with the largest maxima (the first among equals) hold all of them: each such
    group holds a token that beats every token outside. Padding: -inf.
    """
    depth, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = row_offset(b, horizon, depth)
    scratch = row_offset(line, kept, 0)
    if SOFTMAX:
        tile = tl.arange(0, NUM_TILES)
        at = row_offset(line, num_tiles, tile)
        peaks = tl.load(tile_peaks + at, mask=tile < num_tiles, other=float("-inf"))
        sums = tl.load(tile_sums + at, mask=tile < num_tiles, other=0)
        base = finite(tl.max(peaks, axis=0))
        log_total = log_total_of(peaks, sums, base)

    # The groups worth looking at, ascending.
    group = tl.arange(0, NUM_GROUPS)
    largest = tl.load(
        group_maxima + row_offset(line, num_groups, group),
        mask=group < num_groups,
        other=float("-inf"),
    )
    if SOFTMAX:
        largest = log_prob_of(largest, base, log_total)
    chosen, place = place_smallest(cost_of(largest, LOG_PROBS or SOFTMAX), kept)
    tl.store(groups + scratch + place, group, mask=chosen)
    num_chosen = tl.sum(chosen.to(tl.int32), axis=0)
    tl.debug_barrier()

    # Their tokens, ascending; the likeliest kept.
    entry = tl.arange(0, KEPT * GROUP)
    member = entry // GROUP
    start = tl.load(groups + scratch + member, mask=member < num_chosen, other=0) * GROUP
    token = start + entry % GROUP
    is_token = (member < num_chosen) & (token < vocab)
    row = log_probs + b * stride_b + depth * stride_d
    value = tl.load(row + token, mask=is_token, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        value = log_prob_of(candidate(value, False, True), base, log_total)
    cost = cost_of(value, LOG_PROBS or SOFTMAX)
    chosen, place = place_smallest(cost, kept)
    tl.store(unsorted + scratch + place, (cost.to(tl.int64) << 32) | token, mask=chosen)
    num_chosen = tl.sum(chosen.to(tl.int32), axis=0)
    tl.debug_barrier()

    # In rank order; no two keys are equal.
    mine = tl.arange(0, KEPT)
    key = tl.load(unsorted + scratch + mine, mask=mine < num_chosen, other=0x7FFFFFFFFFFFFFFF)
    key = tl.sort(key)
    value = value_of(~(key >> 32).to(tl.int32))
    value = tl.where(mine < num_chosen, value, float("-inf"))
    tl.store(ranked_log_probs + scratch + mine, value, mask=mine < kept)
    token = tl.where(mine < num_chosen, key & 0xFFFFFFFF, 0).to(tl.int32)
    tl.store(ranked_ids + scratch + mine, token, mask=mine < kept)

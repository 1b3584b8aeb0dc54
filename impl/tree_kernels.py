"""Kernels of ``build_tree``: candidates of each depth in rank order, then best first.

Log-probs are at most 0, so the bits of ``|log-prob|`` are an integer *cost* that orders them:
smaller is likelier, -0.0 and 0.0 are alike, and -inf (``NO_COST``) comes after every candidate.
"""

import triton
import triton.language as tl

from ddtree.impl.index import row_offset

NO_COST = tl.constexpr(0x7F800000)  # the bits of inf: not a candidate
MIN_FLOAT32 = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def cost_of(log_prob):
    """Order-preserving cost of a float32 log-prob; what is above 0, NaN or -inf has none."""
    bits = log_prob.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(log_prob <= 0, bits, NO_COST)


@triton.jit
def kth_smallest(costs, k):
    """Return the k-th smallest (from 1) of non-negative int32 numbers, bit by bit from the top."""
    found = 0
    for step in range(31):
        trial = found + (1 << (30 - step))
        found = tl.where(tl.sum((costs < trial).to(tl.int32), axis=0) < k, trial, found)
    return found


@triton.jit
def place_smallest(costs, k):
    """Say which are the k smallest, the first ones among equals, and each one's place in order.

    Returns ``(chosen, place)``; costs of ``NO_COST`` are never chosen.
    """
    limit = kth_smallest(costs, k)
    below = (costs < limit).to(tl.int32)
    equal = ((costs == limit) & (limit < NO_COST)).to(tl.int32)
    room = k - tl.sum(below, axis=0)
    both = below + (equal << 12)  # one scan for two: fewer than k <= 1024 lie below
    before = tl.cumsum(both, axis=0) - both
    below_before, equal_before = before & 4095, before >> 12
    chosen = (below != 0) | ((equal != 0) & (equal_before < room))
    return chosen, below_before + tl.minimum(equal_before, room)


@triton.jit
def group_max_kernel(
    log_probs, group_maxima,  # [B, horizon, vocab], [B, horizon, num_groups] float32
    vocab, num_groups, horizon, stride_b, stride_d,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Likeliest log-prob of each group of GROUP neighbouring tokens; GROUPS groups a program."""
    b, depth = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = log_probs + b * stride_b + depth * stride_d
    value = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    value = tl.where(value <= 0, value, float("-inf"))
    into = row_offset(row_offset(b, horizon, depth), num_groups, group)
    tl.store(group_maxima + into, tl.max(value, axis=1), mask=group < num_groups)


@triton.jit
def rank_kernel(
    log_probs, group_maxima,  # [B, horizon, vocab], [B, horizon, num_groups]
    groups, unsorted,  # scratch [B, horizon, kept] int32, int64
    ranked_log_probs, ranked_ids,  # out [B, horizon, kept] float32, int32
    vocab, num_groups, kept, horizon, stride_b, stride_d,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, KEPT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One depth's ``kept`` likeliest tokens in rank order: log-prob descending, then id ascending.

    The ``kept`` groups with the largest maxima (the first among equals) hold all of them: each such
    group holds a token that beats every token outside. Padding: -inf.
    """
    depth, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    line = row_offset(b, horizon, depth)
    scratch = row_offset(line, kept, 0)

    # The groups worth looking at, ascending.
    group = tl.arange(0, NUM_GROUPS)
    largest = tl.load(
        group_maxima + row_offset(line, num_groups, group),
        mask=group < num_groups,
        other=float("-inf"),
    )
    chosen, place = place_smallest(cost_of(largest), kept)
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
    cost = cost_of(value)
    chosen, place = place_smallest(cost, kept)
    tl.store(unsorted + scratch + place, (cost.to(tl.int64) << 32) | token, mask=chosen)
    num_chosen = tl.sum(chosen.to(tl.int32), axis=0)
    tl.debug_barrier()

    # A token's rank is the number of tokens before it.
    mine = tl.arange(0, KEPT)
    key = tl.load(unsorted + scratch + mine, mask=mine < num_chosen, other=0)
    rank = tl.zeros([KEPT], tl.int32)
    for first in range(0, num_chosen, TILE):
        other = first + tl.arange(0, TILE)
        rival = tl.load(
            unsorted + scratch + other, mask=other < num_chosen, other=0x7FFFFFFFFFFFFFFF
        )
        rank += tl.sum((rival[:, None] < key[None, :]).to(tl.int32), axis=0)
    magnitude = (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    rank = tl.where(mine < num_chosen, rank, mine)
    tl.store(
        ranked_log_probs + scratch + rank,
        tl.where(mine < num_chosen, -magnitude, float("-inf")),
        mask=mine < kept,
    )
    tl.store(ranked_ids + scratch + rank, (key & 0xFFFFFFFF).to(tl.int32), mask=mine < kept)


# The order of paths. Equal scores are ordered by rank path, so a path needs a number that orders
# like it. Rank r is written as in Elias' gamma code of r + 1, ones for zeros: l ones, a zero, and
# the low l bits of r + 1, where l = floor(log2(r + 1)). The code is prefix-free and grows with r, so
# codes joined from the top bit down order like paths. The i-th node of a tree has at least
# prod(r + 1) - 1 nodes before it (all paths whose ranks are nowhere larger), hence the l of a path
# in a heap of `budget` nodes sum to at most log2(2 * budget), and a path of depth h takes at most
# h + 2 log2(2 budget) bits: 53 for depth 31 and budget 1024. They fill bits 62 down to 6; bits 5 to 0
# count those used. Two paths in the heap never continue one another, so no two codes agree.


@triton.jit
def extend_code(code, rank):
    """Code of the path with one more rank. For rank 0, a single zero bit, that is ``code + 1``."""
    used = code & 63
    length = ((rank + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    ones = (1 << length) - 1
    bits = (ones << (length + 1)) | (rank + 1 - (1 << length))
    width = 2 * length + 1
    return (code - used + (bits.to(tl.int64) << (63 - used - width))) + used + width


@triton.jit
def score_cost(score):
    """Cost of a float64 score, rounded to float32: costs order like scores, but more of them tie."""
    rounded = tl.maximum(score, MIN_FLOAT32).to(tl.float32)  # below float32: all alike, yet a score
    return tl.where(score > float("-inf"), cost_of(rounded), NO_COST)


@triton.jit
def child_score(log_probs, depth, rank, horizon, kept, score):
    """Score of a node's child of that rank; -inf where there is none."""
    exists = (depth < horizon) & (rank < kept)
    return score + tl.load(
        log_probs + row_offset(depth, kept, rank), mask=exists, other=float("-inf")
    ).to(tl.float64)


@triton.jit
def best_first_kernel(
    root_token_ids, ranked_log_probs, ranked_ids,  # [B], [B, horizon, kept] twice
    token_ids, parents, depths, scores, num_nodes,  # out [B, Q], the last [B]
    ranks, next_scores, next_codes, codes,  # scratch [B, Q]
    budget, horizon, kept,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Pop the best paths of one request. Slot j holds node j's best child that is no node yet.

    So the heap is one value a slot: a pop moves its slot on to the next rank and opens a slot for
    the new node. The pops compare float32-rounded costs; only where those tie are the float64
    scores and the path codes read. Scores add up in depth order.
    """
    b = tl.program_id(0).to(tl.int64)
    line = row_offset(b, budget + 1, 0)
    candidates = row_offset(b, horizon * kept, 0)
    ranked_log_probs += candidates
    ranked_ids += candidates
    token_ids += line
    parents += line
    depths += line
    scores += line
    ranks += line
    next_scores += line
    next_codes += line
    codes += line

    slot = tl.arange(0, SLOTS)
    row, is_row = slot + 1, slot < budget
    tl.store(token_ids + row, tl.zeros([SLOTS], tl.int64), mask=is_row)
    tl.store(parents + row, tl.full([SLOTS], -1, tl.int32), mask=is_row)
    tl.store(depths + row, tl.zeros([SLOTS], tl.int32), mask=is_row)
    tl.store(scores + row, tl.full([SLOTS], float("-inf"), tl.float64), mask=is_row)
    tl.store(token_ids, tl.load(root_token_ids + b))
    tl.store(parents, -1)
    tl.store(depths, 0)
    tl.store(scores, 0.0)
    first_score = child_score(ranked_log_probs, 0, 0, horizon, kept, tl.zeros([], tl.float64))
    no_code = tl.zeros([], tl.int64)
    tl.store(ranks, 0)
    tl.store(codes, no_code)
    tl.store(next_scores, first_score)
    tl.store(next_codes, no_code + 1)
    tl.debug_barrier()

    cost = tl.where(slot == 0, score_cost(first_score), NO_COST)
    best = tl.min(cost, axis=0)
    node = 1
    while (node <= budget) & (best < NO_COST):
        is_best = cost == best
        count_and_slot = tl.sum(tl.where(is_best, 65536 + slot, 0), axis=0)
        parent = count_and_slot & 65535
        if count_and_slot >= 131072:
            tied = tl.load(next_scores + slot, mask=is_best, other=float("-inf"))
            is_best = is_best & (tied == tl.max(tied, axis=0))
            tied_code = tl.load(next_codes + slot, mask=is_best, other=0x7FFFFFFFFFFFFFFF)
            is_best = is_best & (tied_code == tl.min(tied_code, axis=0))
            parent = tl.max(tl.where(is_best, slot, 0), axis=0)

        rank = tl.load(ranks + parent)
        depth = tl.load(depths + parent) + 1
        score = tl.load(next_scores + parent)
        code = tl.load(next_codes + parent)
        sibling = child_score(
            ranked_log_probs, depth - 1, rank + 1, horizon, kept, tl.load(scores + parent)
        )
        child = child_score(ranked_log_probs, depth, 0, horizon, kept, score)
        sibling_code = extend_code(tl.load(codes + parent), rank + 1)
        cost = tl.where(
            slot == parent, score_cost(sibling), tl.where(slot == node, score_cost(child), cost)
        )
        best = tl.min(cost, axis=0)

        tl.debug_barrier()  # everything about the parent has been read
        tl.store(
            token_ids + node, tl.load(ranked_ids + row_offset(depth - 1, kept, rank)).to(tl.int64)
        )
        tl.store(parents + node, parent)
        tl.store(depths + node, depth)
        tl.store(scores + node, score)
        tl.store(codes + node, code)
        tl.store(ranks + parent, rank + 1)
        tl.store(next_scores + parent, sibling)
        tl.store(next_codes + parent, sibling_code)
        tl.store(ranks + node, 0)
        tl.store(next_scores + node, child)
        tl.store(next_codes + node, code + 1)
        tl.debug_barrier()
        node += 1
    tl.store(num_nodes + b, node)

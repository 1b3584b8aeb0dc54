"""Kernels of ``build_tree``'s second half: the best paths of ranked candidates.

A path's *cost* is minus its score: 0 at best, inf where there is no path.
"""

import triton
import triton.language as tl

from ddtree.impl.index import row_offset
from ddtree.impl.rank_kernels import MIN_FLOAT32, NO_COST, cost_of

LOWEST_SCORE = tl.constexpr(-1.7976931348623157e308)  # the least finite float64
MANY_PATHS = tl.constexpr(4096)  # counts of paths stop here


# The order of paths. Equal scores are ordered by rank path, so a path needs a number that orders
# like it. Rank r is written as in Elias' gamma code of r + 1, ones for zeros: l ones, a zero, and
# the low l bits of r + 1, where l = floor(log2(r + 1)). The code is prefix-free and grows with r, so
# codes joined from the top bit down order like paths. At least prod(r + 1) - 1 paths score no less
# than a path (those whose ranks are nowhere larger), so among n listed paths the l of one sum to at
# most log2(n), in a heap of n nodes to at most log2(2n), and a path of depth h takes at most h + 22
# bits for the 2048 paths that are listed at most. They fill bits 62 down to 6; bits 5 to 0 count
# those used, so that a path comes before those that continue it by zeros.


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
def grid_limit(log_probs, budget, horizon, kept, DEPTHS: tl.constexpr):
    """A cost that ``budget`` paths do not exceed: that of the last leaf of a full tree of ``budget``
    leaves with one width at all its depths, the cheapest over the depths. inf: none is that full.
    """
    last, depth = tl.arange(0, DEPTHS), tl.arange(0, DEPTHS)
    bits = tl.log2(tl.zeros([DEPTHS], tl.float32) + budget)
    width = tl.ceil(tl.exp2(bits / (last + 1).to(tl.float32)) - 1e-3).to(tl.int32)
    is_there = (last < horizon) & (width <= kept)
    log_prob = tl.load(
        log_probs + row_offset(depth[None, :], kept, width[:, None] - 1),
        mask=is_there[:, None] & (depth[None, :] <= last[:, None]),
        other=0.0,
    )
    return tl.min(tl.where(is_there, tl.sum(-log_prob, axis=1), float("inf")), axis=0)


@triton.jit
def tighter_limit(
    log_probs, ways, limit, budget, horizon, kept, KEPT: tl.constexpr, BINS: tl.constexpr
):
    """A smaller cost that ``budget`` paths do not exceed, by counting paths in bins of cost.

    Costs above those of a depth's likeliest token are rounded up to whole bins and the counts of
    depth after depth convolved; a path is in the bin of its rounded cost or an earlier one.
    """
    bucket, rank = tl.arange(0, BINS), tl.arange(0, KEPT)
    step = limit / (BINS - 2)
    tl.store(ways + bucket, (bucket == 0).to(tl.int32))
    tl.debug_barrier()
    within = tl.zeros([BINS], tl.int32)
    base = -tl.load(log_probs)
    depth = 0
    found = 1
    while (found > 0) & (depth < horizon) & (base <= limit):
        line = log_probs + row_offset(depth, kept, 0)
        excess = tl.load(line) - tl.load(line + rank, mask=rank < kept, other=float("-inf"))
        over = tl.minimum(tl.ceil(excess / step), BINS - 1.0).to(tl.int32)
        tokens = tl.where(bucket < BINS - 1, tl.histogram(over, BINS), 0)
        rest = bucket[:, None] - bucket[None, :]
        paths = tl.sum(tl.load(ways + rest, mask=rest >= 0, other=0) * tokens[None, :], axis=1)
        tl.debug_barrier()  # all have read
        tl.store(ways + bucket, tl.minimum(paths, MANY_PATHS))
        tl.debug_barrier()
        above = bucket - tl.ceil(base / step).to(tl.int32)
        here = tl.load(ways + above, mask=above >= 0, other=0)
        within += here
        found = tl.sum(here, axis=0)
        depth += 1
        base -= tl.load(log_probs + row_offset(depth, kept, 0), mask=depth < horizon, other=0.0)
    enough = (tl.cumsum(within, axis=0) >= budget) & (bucket < BINS - 1)
    least = tl.min(tl.where(enough, bucket, BINS), axis=0)
    return tl.minimum(limit, tl.where(least < BINS, least * step * 1.00001, limit))


@triton.jit
def list_paths(
    log_probs, scores, codes, parents, ranks, depths, firsts,  # [horizon, kept], out [PATHS]
    limit, horizon, kept,
    KEPT_BITS: tl.constexpr, PATHS: tl.constexpr, PATH_BITS: tl.constexpr,
):  # fmt: skip
    """List the root and all paths that cost no more than ``limit``, depth by depth.

    A path's children within the limit are its first ranks: their number is found by bisection.
    Returns how many there are; more than PATHS: not all have been listed.
    """
    slot = tl.arange(0, PATHS)
    lowest = tl.maximum(-limit.to(tl.float64), LOWEST_SCORE)
    tl.store(scores, 0.0)
    tl.store(codes, tl.zeros([], tl.int64))
    tl.store(parents, -1)
    tl.store(ranks, 0)
    tl.store(depths, 0)
    tl.debug_barrier()
    start, end, depth, added = 0, 1, 0, 1
    while (added > 0) & (depth < horizon):
        line = log_probs + row_offset(depth, kept, 0)
        parent = start + slot
        score = tl.load(scores + parent, mask=parent < end, other=float("-inf"))
        count = tl.zeros([PATHS], tl.int32)
        for bit in range(KEPT_BITS):
            trial = count + (1 << (KEPT_BITS - 1 - bit))
            log_prob = tl.load(
                line + trial - 1, mask=(parent < end) & (trial <= kept), other=float("-inf")
            )
            count = tl.where(score + log_prob.to(tl.float64) >= lowest, trial, count)
        added = tl.sum(count, axis=0)
        if end + added <= PATHS:
            tl.store(firsts + slot, tl.cumsum(count, axis=0) - count)
            tl.debug_barrier()
            is_child = slot < added
            member = tl.zeros([PATHS], tl.int32)  # the last parent whose first child is not later
            for bit in range(PATH_BITS):
                trial = member + (1 << (PATH_BITS - 1 - bit))
                first = tl.load(firsts + trial, mask=is_child, other=PATHS)
                member = tl.where(first <= slot, trial, member)
            rank = slot - tl.load(firsts + member, mask=is_child, other=0)
            parent = start + member
            log_prob = tl.load(line + rank, mask=is_child, other=0.0).to(tl.float64)
            score = tl.load(scores + parent, mask=is_child, other=0.0) + log_prob
            code = extend_code(tl.load(codes + parent, mask=is_child, other=0), rank)
            tl.store(scores + end + slot, score, mask=is_child)
            tl.store(codes + end + slot, code, mask=is_child)
            tl.store(parents + end + slot, parent, mask=is_child)
            tl.store(ranks + end + slot, rank, mask=is_child)
            tl.store(depths + end + slot, tl.zeros([PATHS], tl.int32) + depth + 1, mask=is_child)
            tl.debug_barrier()
            start = end
            end += added
            depth += 1
        else:
            end += added
            added = 0
    return end


@triton.jit
def sort_paths(scores, codes, order, num_paths, PATHS: tl.constexpr):
    """Put the listed paths' numbers in ``order``: score descending, then code ascending.

    One sort by the scores' bits, the lowest of which make room for the path's number; then
    neighbours out of order change places until there are none. Paths of one depth are listed in
    the order of their codes, so only equal scores at two depths are ever out of order, or scores
    that differ in their last bits alone.
    """
    slot = tl.arange(0, PATHS)
    score = tl.load(scores + slot, mask=slot < num_paths, other=0.0)
    cost = score.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    key = tl.where(slot < num_paths, (cost & -PATHS) | slot, 0x7FFFFFFFFFFFFFFF)
    tl.store(order + slot, (tl.sort(key) & (PATHS - 1)).to(tl.int32))
    tl.debug_barrier()
    pair = tl.arange(0, PATHS // 2)
    swaps = 1
    while swaps > 0:
        swaps = 0
        for odd in range(2):
            at = 2 * pair + odd
            is_pair = at + 1 < num_paths
            left = tl.load(order + at, mask=is_pair, other=0)
            right = tl.load(order + at + 1, mask=is_pair, other=0)
            left_score = tl.load(scores + left, mask=is_pair, other=0.0)
            right_score = tl.load(scores + right, mask=is_pair, other=0.0)
            left_code = tl.load(codes + left, mask=is_pair, other=0)
            right_code = tl.load(codes + right, mask=is_pair, other=0)
            is_wrong = (right_score > left_score) | (
                (right_score == left_score) & (right_code < left_code)
            )
            tl.debug_barrier()
            tl.store(order + at, right, mask=is_pair & is_wrong)
            tl.store(order + at + 1, left, mask=is_pair & is_wrong)
            tl.debug_barrier()
            swaps += tl.sum((is_pair & is_wrong).to(tl.int32), axis=0)


@triton.jit
def score_cost(score):
    """Cost of a float64 score, rounded to float32: costs order like scores, but more of them tie."""
    rounded = tl.maximum(score, MIN_FLOAT32).to(tl.float32)  # below float32: all alike, yet a score
    return tl.where(score > float("-inf"), cost_of(rounded, True), NO_COST)


@triton.jit
def child_score(log_probs, depth, rank, horizon, kept, score):
    """Score of a node's child of that rank; -inf where there is none."""
    exists = (depth < horizon) & (rank < kept)
    return score + tl.load(
        log_probs + row_offset(depth, kept, rank), mask=exists, other=float("-inf")
    ).to(tl.float64)


@triton.jit
def pop_paths(
    log_probs,  # [horizon, kept]
    parents, depths, scores, node_ranks,  # out [Q]
    ranks, next_scores, next_codes, codes,  # scratch [Q]
    budget, horizon, kept,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Pop the best paths one by one. Slot j holds node j's best child that is no node yet.

    So the heap is one value a slot: a pop moves its slot on to the next rank and opens a slot for
    the new node. The pops compare float32-rounded costs; only where those tie are the float64
    scores and the path codes read. Scores add up in depth order. Returns the number of nodes.
    """
    slot = tl.arange(0, SLOTS)
    tl.store(parents, -1)
    tl.store(depths, 0)
    tl.store(scores, 0.0)
    tl.store(node_ranks, 0)
    first_score = child_score(log_probs, 0, 0, horizon, kept, tl.zeros([], tl.float64))
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
            log_probs, depth - 1, rank + 1, horizon, kept, tl.load(scores + parent)
        )
        child = child_score(log_probs, depth, 0, horizon, kept, score)
        sibling_code = extend_code(tl.load(codes + parent), rank + 1)
        cost = tl.where(
            slot == parent, score_cost(sibling), tl.where(slot == node, score_cost(child), cost)
        )
        best = tl.min(cost, axis=0)

        tl.debug_barrier()  # everything about the parent has been read
        tl.store(parents + node, parent)
        tl.store(depths + node, depth)
        tl.store(scores + node, score)
        tl.store(node_ranks + node, rank)
        tl.store(codes + node, code)
        tl.store(ranks + parent, rank + 1)
        tl.store(next_scores + parent, sibling)
        tl.store(next_codes + parent, sibling_code)
        tl.store(ranks + node, 0)
        tl.store(next_scores + node, child)
        tl.store(next_codes + node, code + 1)
        tl.debug_barrier()
        node += 1
    return node


@triton.jit
def best_first_kernel(
    root_token_ids, ranked_log_probs, ranked_ids,  # [B], [B, horizon, kept] twice
    token_ids, parents, depths, scores, num_nodes,  # out [B, Q], the last [B]
    floats, longs, ints,  # scratch [B, PATHS] float64, [B, 2, PATHS] int64, [B, 6, WIDTH] int32
    budget, horizon, kept,
    LISTED: tl.constexpr, SLOTS: tl.constexpr, KEPT: tl.constexpr, KEPT_BITS: tl.constexpr,
    PATHS: tl.constexpr, PATH_BITS: tl.constexpr, WIDTH: tl.constexpr,
    DEPTHS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The best paths of one request, in order.

    LISTED: find a cost that ``budget`` paths do not exceed but few more do, list all paths within it
    and sort them. Where that lists too many or too few, pop one by one.
    """
    b = tl.program_id(0).to(tl.int64)
    ranked_log_probs += row_offset(b, horizon * kept, 0)
    ranked_ids += row_offset(b, horizon * kept, 0)
    token_ids += row_offset(b, budget + 1, 0)
    parents += row_offset(b, budget + 1, 0)
    depths += row_offset(b, budget + 1, 0)
    scores += row_offset(b, budget + 1, 0)
    path_scores = floats + row_offset(b, PATHS, 0)
    path_codes = longs + row_offset(b, 2 * PATHS, 0)
    path_parents = ints + row_offset(b, 6 * WIDTH, 0)
    path_ranks = path_parents + row_offset(1, WIDTH, 0)
    path_depths = path_parents + row_offset(2, WIDTH, 0)
    firsts = path_parents + row_offset(3, WIDTH, 0)
    order = path_parents + row_offset(4, WIDTH, 0)
    rows = path_parents + row_offset(5, WIDTH, 0)

    num_paths = PATHS + 1
    if LISTED:
        limit = grid_limit(ranked_log_probs, budget, horizon, kept, DEPTHS)
        is_searched = True
        while is_searched:
            before = limit
            if (limit > 1e-30) & (limit < float("inf")):  # or bins have no width
                limit = tighter_limit(
                    ranked_log_probs, firsts, limit, budget, horizon, kept, KEPT, BINS
                )
                tl.debug_barrier()
            num_paths = list_paths(
                ranked_log_probs, path_scores, path_codes,
                path_parents, path_ranks, path_depths, firsts,
                limit, horizon, kept, KEPT_BITS, PATHS, PATH_BITS,
            )  # fmt: skip
            is_searched = (num_paths > PATHS) & (limit < 0.97 * before)
        if (num_paths <= budget) & (limit < float("inf")):
            num_paths = PATHS + 1  # too few: not all that there are

    slot = tl.arange(0, PATHS)
    is_row = slot <= budget
    if num_paths <= PATHS:
        sort_paths(path_scores, path_codes, order, num_paths, PATHS)
        count = tl.minimum(num_paths, budget + 1)
        is_node = slot < count
        path = tl.load(order + slot, mask=is_node, other=0)
        tl.store(rows + path, slot, mask=is_node)
        tl.debug_barrier()
        above = tl.load(path_parents + path, mask=is_node, other=-1)
        depth = tl.load(path_depths + path, mask=is_node, other=0)
        rank = tl.load(path_ranks + path, mask=is_node, other=0)
        score = tl.load(path_scores + path, mask=is_node, other=float("-inf"))
        parent = tl.load(rows + above, mask=above >= 0, other=-1)
        tl.store(parents + slot, parent, mask=is_row)
        tl.store(depths + slot, depth, mask=is_row)
        tl.store(scores + slot, score, mask=is_row)
    else:
        count = pop_paths(
            ranked_log_probs, parents, depths, scores, rows,
            path_ranks, path_scores, path_codes + PATHS, path_codes,
            budget, horizon, kept, SLOTS,
        )  # fmt: skip
        is_node = slot < count
        depth = tl.load(depths + slot, mask=is_node, other=0)
        rank = tl.load(rows + slot, mask=is_node, other=0)
        is_padding = is_row & (slot >= count)
        tl.store(parents + slot, tl.full([PATHS], -1, tl.int32), mask=is_padding)
        tl.store(depths + slot, tl.zeros([PATHS], tl.int32), mask=is_padding)
        tl.store(scores + slot, tl.full([PATHS], float("-inf"), tl.float64), mask=is_padding)
    token = tl.load(
        ranked_ids + row_offset(depth - 1, kept, rank), mask=is_node & (depth > 0), other=0
    ).to(tl.int64)
    tl.store(token_ids + slot, tl.where(slot == 0, tl.load(root_token_ids + b), token), mask=is_row)
    tl.store(num_nodes + b, count)

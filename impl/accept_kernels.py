"""Kernels of the walk down the tree."""

import triton
import triton.language as tl

from ddtree.impl.index import row_offset


@triton.jit
def walk_kernel(
    parents, token_ids, num_nodes,  # [B, rows] twice, [B]
    target_ids, qo_indptr,  # [T], [B+1]
    nodes, num_accepted, bonus,  # out [B, width], [B], [B]
    rows, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Follow one request's choices from the root; a request without rows accepts nothing."""
    b = tl.program_id(0).to(tl.int64)
    start = tl.load(qo_indptr + b)
    q_len = tl.load(qo_indptr + b + 1) - start
    row = tl.arange(0, ROWS)
    num_real = tl.minimum(tl.load(num_nodes + b), tl.minimum(q_len, rows))
    is_child = (row >= 1) & (row < num_real)
    line = row_offset(b, rows, row)
    parent = tl.load(parents + line, mask=is_child, other=-1)
    token = tl.load(token_ids + line, mask=is_child, other=-1)

    step = tl.arange(0, WIDTH)
    count = tl.minimum(q_len, 1)
    path = tl.where((step == 0) & (count > 0), 0, -1)
    choice = tl.load(target_ids + start, mask=count > 0, other=0)
    child = tl.min(tl.where((parent == 0) & (token == choice), row, ROWS), axis=0)
    while (child < ROWS) & (count < width):
        path = tl.where(step == count, child, path)
        count += 1
        choice = tl.load(target_ids + start + child)
        child = tl.min(tl.where((parent == child) & (token == choice), row, ROWS), axis=0)
    tl.store(nodes + row_offset(b, width, step), path, mask=step < width)
    tl.store(num_accepted + b, count)
    tl.store(bonus + b, choice)


@triton.jit
def new_tokens_kernel(
    token_ids, nodes, num_accepted, bonus,  # [B, rows], [B, width], [B], [B]
    new_token_ids,  # out [B, width]
    rows, width,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One request's accepted tokens after the root, then its bonus, then -1."""
    b = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, WIDTH)
    last = tl.load(num_accepted + b) - 1
    node = tl.load(nodes + row_offset(b, width, step + 1), mask=step < last, other=0)
    token = tl.load(token_ids + row_offset(b, rows, node), mask=step < last, other=-1)
    token = tl.where(step == last, tl.load(bonus + b), token)
    tl.store(new_token_ids + row_offset(b, width, step), token, mask=step < width)

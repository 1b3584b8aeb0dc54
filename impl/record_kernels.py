"""Kernels of the record of a round."""

import triton
import triton.language as tl

from ddtree.impl.index import chunk_len, chunk_start, row_offset
from ddtree.impl.rank_kernels import value_of
from ddtree.impl.sampling_kernels import NO_KEY, id_of, key_of


@triton.jit
def split_top_two_kernel(
    logits, nodes, num_accepted, qo_indptr,  # [T, vocab], [B, width], [B], [B+1]
    keys,  # out [B, width, splits, 2]
    width, vocab, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The two largest keys of one split of one accepted node's row; those of a path's steps alone."""
    step, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(1)
    if step < tl.load(num_accepted + b):
        line = row_offset(b, width, step)
        query = tl.load(qo_indptr + b).to(tl.int64) + tl.load(nodes + line)
        length = chunk_len(vocab, splits, BLOCK)
        start = chunk_start(split, length)
        best = tl.full([BLOCK], NO_KEY, tl.int64)
        second = tl.full([BLOCK], NO_KEY, tl.int64)
        for first in range(start, tl.minimum(start + length, vocab), BLOCK):
            token = first + tl.arange(0, BLOCK)
            logit = tl.load(
                logits + row_offset(query, stride, token), mask=token < vocab, other=float("-inf")
            )
            key = tl.where(token < vocab, key_of(logit.to(tl.float32), token), NO_KEY)
            second = tl.maximum(second, tl.minimum(best, key))
            best = tl.maximum(best, key)
        largest = tl.max(best, axis=0)
        into = keys + row_offset(row_offset(line, splits, split), 2, 0)
        tl.store(into, largest)
        tl.store(into + 1, tl.max(tl.where(best == largest, second, best), axis=0))


@triton.jit
def pack_kernel(
    token_ids, parents, depths, scores, num_nodes,  # [B, rows] four times, [B]
    nodes, num_accepted, bonus,  # [B, width], [B] twice
    keys, logits,  # [B, width, keys], and what they are of, or None
    packed,  # out [B, fields]
    width, rows, fields, num_keys,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One request's record, field after field."""
    b = tl.program_id(0).to(tl.int64)
    step, row = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    is_step, is_row = step < width, row < rows
    count = tl.load(num_accepted + b)
    into = packed + row_offset(b, fields, 0)

    node = tl.load(nodes + row_offset(b, width, step + 1), mask=step + 1 < count, other=0)
    token = tl.load(token_ids + row_offset(b, rows, node), mask=step + 1 < count, other=-1)
    tl.store(into + step, tl.where(step + 1 == count, tl.load(bonus + b), token), mask=is_step)
    into += width
    path = tl.load(nodes + row_offset(b, width, step), mask=is_step, other=-1)
    tl.store(into + step, path.to(tl.int64), mask=is_step)
    into += width
    tl.store(into, count.to(tl.int64))
    tl.store(into + 1, tl.load(bonus + b))
    tl.store(into + 2, tl.load(num_nodes + b).to(tl.int64))
    into += 3

    line = row_offset(b, rows, row)
    tl.store(into + row, tl.load(token_ids + line, mask=is_row, other=0), mask=is_row)
    into += rows
    parent = tl.load(parents + line, mask=is_row, other=0)
    tl.store(into + row, parent.to(tl.int64), mask=is_row)
    into += rows
    depth = tl.load(depths + line, mask=is_row, other=0)
    tl.store(into + row, depth.to(tl.int64), mask=is_row)
    into += rows
    score = tl.load(scores + line, mask=is_row, other=0.0)
    tl.store(into + row, score.to(tl.int64, bitcast=True), mask=is_row)

    if keys is not None:
        into += rows
        is_on = is_step & (step < count)
        one = tl.arange(0, KEYS)
        key = tl.load(
            keys + row_offset(row_offset(b, width, step)[:, None], num_keys, one[None, :]),
            mask=is_on[:, None] & (one < num_keys)[None, :],
            other=NO_KEY,
        )
        best = tl.max(key, axis=1)
        second = tl.max(tl.where(key == best[:, None], NO_KEY, key), axis=1)
        has_second = second != NO_KEY  # a vocabulary of one has none
        largest = value_of((best >> 32).to(tl.int32))
        runner_up = tl.where(has_second, value_of((second >> 32).to(tl.int32)), float("-inf"))
        margin = (largest - runner_up).to(logits.dtype.element_ty).to(tl.float64)
        margin = tl.where(is_on, margin, 0.0)
        tl.store(into + step, margin.to(tl.int64, bitcast=True), mask=is_step)
        into += width
        runner_up_id = tl.where(is_on & has_second, id_of(second), 0)
        tl.store(into + step, runner_up_id, mask=is_step)

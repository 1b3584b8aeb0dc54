"""Kernels between the matrix products of a decoder layer, one row of one request a program or more."""

import triton
import triton.language as tl

from ddtree.impl.index import block_start, row_offset


@triton.jit
def _rms_normed(value, weight, col, width, eps):
    """``weight * value / rms(value)`` of a row, rounded where PyTorch rounds."""
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    rounded = (wide * scale).to(value.dtype).to(tl.float32)
    factor = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    return (factor * rounded).to(value.dtype)


@triton.jit
def add_norm_kernel(
    x, residual,  # [T, width], [T, width] or None
    weight,  # [width]
    total, normed,  # out [T, width] twice; `total` only where there is a residual
    eps, width, residual_stride, total_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``total = x + residual``, ``normed = weight * total / rms(total)``, rounded where PyTorch rounds."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    at = row_offset(row, width, col)
    value = tl.load(x + at, mask=col < width, other=0.0)
    if residual is not None:
        other = tl.load(
            residual + row_offset(row, residual_stride, col), mask=col < width, other=0.0
        )
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + row_offset(row, total_stride, col), value, mask=col < width)
    tl.store(normed + at, _rms_normed(value, weight, col, width, eps), mask=col < width)


@triton.jit
def embed_norm_kernel(
    table, token_ids, starts,  # [vocab, width], [B, row_width], [B+1 or more]
    weight,  # [width]
    total, normed,  # out [T, width] twice
    factor, eps, width, batch, row_width,
    BATCH: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's token looked up, and its norm; rows of no request have token 0."""
    row = tl.program_id(0)
    request = tl.arange(0, BATCH)
    stop = tl.load(starts + request + 1, mask=request < batch, other=2147483647)
    b = tl.sum((row >= stop).to(tl.int32), axis=0)
    node = row - tl.load(starts + b, mask=b < batch, other=0)
    inside = (b < batch) & (node < row_width)
    token = tl.load(token_ids + row_offset(b.to(tl.int64), row_width, node), mask=inside, other=0)
    col = tl.arange(0, BLOCK)
    value = tl.load(table + row_offset(token, width, col), mask=col < width, other=0.0)
    if HAS_FACTOR:
        value = (value.to(tl.float32) * factor).to(value.dtype)
    at = row_offset(row.to(tl.int64), width, col)
    tl.store(total + at, value, mask=col < width)
    tl.store(normed + at, _rms_normed(value, weight, col, width, eps), mask=col < width)


@triton.jit
def _normed(first, second, weight, half, is_half, eps, HEAD_DIM: tl.constexpr):
    """Both halves of a head, normalised; as they are without a weight."""
    if weight is not None:
        dtype = first.dtype
        one, two = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt((tl.sum(one * one, axis=0) + tl.sum(two * two, axis=0)) / HEAD_DIM + eps)
        factor = tl.load(weight + half, mask=is_half, other=0.0).to(tl.float32)
        first = (factor * (one * scale).to(dtype).to(tl.float32)).to(dtype)
        factor = tl.load(weight + HEAD_DIM // 2 + half, mask=is_half, other=0.0).to(tl.float32)
        second = (factor * (two * scale).to(dtype).to(tl.float32)).to(dtype)
    return first, second


@triton.jit
def _rotated(first, second, cos, sin, at, half, is_half, HEAD_DIM: tl.constexpr):
    """Both halves of a head, turned by the angles of its row."""
    one, two = first.to(tl.float32), second.to(tl.float32)
    cos_one = tl.load(cos + at + half, mask=is_half, other=0.0).to(tl.float32)
    sin_one = tl.load(sin + at + half, mask=is_half, other=0.0).to(tl.float32)
    cos_two = tl.load(cos + at + HEAD_DIM // 2 + half, mask=is_half, other=0.0).to(tl.float32)
    sin_two = tl.load(sin + at + HEAD_DIM // 2 + half, mask=is_half, other=0.0).to(tl.float32)
    return (
        (one * cos_one - two * sin_one).to(first.dtype),
        (two * cos_two + one * sin_two).to(first.dtype),
    )


@triton.jit
def _store(into, first, second, half, is_half, HEAD_DIM: tl.constexpr):
    """Write both halves of a head."""
    tl.store(into + half, first, mask=is_half)
    tl.store(into + HEAD_DIM // 2 + half, second, mask=is_half)


@triton.jit
def _keep(
    into, pool, slots, row, kv_head,
    first, second, half, is_half, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write a key's or value's head into the rows, and into the pool where the row has a slot."""
    inner = row_offset(kv_head, HEAD_DIM, 0)
    _store(
        into + row_offset(row, KV_HEADS * HEAD_DIM, inner), first, second, half, is_half, HEAD_DIM
    )
    if slots is not None:
        slot = tl.load(slots + row)
        place = row_offset(slot, KV_HEADS * HEAD_DIM, inner)
        _store(pool + place, first, second, half, is_half & (slot >= 0), HEAD_DIM)


@triton.jit
def heads_kernel(
    rows,  # [T, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM]: queries, keys, values
    cos, sin, positions,  # [entries, HEAD_DIM] twice, [T]
    q_weight, k_weight, eps,  # [HEAD_DIM] twice, or None
    query, key, value,  # out [T, heads, HEAD_DIM]
    key_pool, value_pool, slots,  # [slots, KV_HEADS, HEAD_DIM] twice and [T], or None
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head of one row: normalise and rotate queries and keys; put keys and values into the pools too."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF)
    is_half = half < HEAD_DIM // 2
    source = rows + row_offset(
        row, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, row_offset(head, HEAD_DIM, 0)
    )
    first = tl.load(source + half, mask=is_half, other=0.0)
    second = tl.load(source + HEAD_DIM // 2 + half, mask=is_half, other=0.0)
    angles = row_offset(tl.load(positions + row), HEAD_DIM, 0)
    if head < Q_HEADS:
        first, second = _normed(first, second, q_weight, half, is_half, eps, HEAD_DIM)
        first, second = _rotated(first, second, cos, sin, angles, half, is_half, HEAD_DIM)
        place = row_offset(row, Q_HEADS * HEAD_DIM, row_offset(head, HEAD_DIM, 0))
        _store(query + place, first, second, half, is_half, HEAD_DIM)
    elif head < Q_HEADS + KV_HEADS:
        first, second = _normed(first, second, k_weight, half, is_half, eps, HEAD_DIM)
        first, second = _rotated(first, second, cos, sin, angles, half, is_half, HEAD_DIM)
        _keep(
            key, key_pool, slots, row, head - Q_HEADS,
            first, second, half, is_half, KV_HEADS, HEAD_DIM,
        )  # fmt: skip
    else:
        _keep(
            value, value_pool, slots, row, head - Q_HEADS - KV_HEADS,
            first, second, half, is_half, KV_HEADS, HEAD_DIM,
        )  # fmt: skip


@triton.jit
def context_kernel(
    rows,  # [layers, T, 2 * KV_HEADS * HEAD_DIM]: keys, values
    cos, sin, positions,  # [entries, HEAD_DIM] twice, [T]
    k_weight, eps,  # [layers, HEAD_DIM] or None
    pools, slots,  # out [layers, 2, num_slots, KV_HEADS, HEAD_DIM], [T]
    num_rows, num_slots,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head of one row in one layer: a key normalised and rotated, or a value, into its pool.

    Rows with a negative slot are left out.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        half = tl.arange(0, HALF)
        is_half = half < HEAD_DIM // 2
        line = row_offset(layer, num_rows, row)
        source = rows + row_offset(line, 2 * KV_HEADS * HEAD_DIM, row_offset(head, HEAD_DIM, 0))
        first = tl.load(source + half, mask=is_half, other=0.0)
        second = tl.load(source + HEAD_DIM // 2 + half, mask=is_half, other=0.0)
        if head < KV_HEADS:
            if k_weight is not None:
                weight = k_weight + row_offset(layer, HEAD_DIM, 0)
                first, second = _normed(first, second, weight, half, is_half, eps, HEAD_DIM)
            angles = row_offset(tl.load(positions + row), HEAD_DIM, 0)
            first, second = _rotated(first, second, cos, sin, angles, half, is_half, HEAD_DIM)
        kind = tl.where(head < KV_HEADS, 0, 1)
        inner = row_offset(head - row_offset(kind, KV_HEADS, 0), HEAD_DIM, 0)
        pool = row_offset(row_offset(layer, 2, kind), num_slots, slot)
        into = pools + row_offset(pool, KV_HEADS * HEAD_DIM, inner)
        _store(into, first, second, half, is_half, HEAD_DIM)


@triton.jit
def gate_kernel(
    both,  # [T, 2 * width]: gate, up
    out,  # [T, width]
    width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``silu(gate) * up``."""
    row = tl.program_id(0).to(tl.int64)
    col = block_start(tl.program_id(1), BLOCK) + tl.arange(0, BLOCK)
    at = row_offset(row, width, 0) + row_offset(row, width, 0)
    gate = tl.load(both + at + col, mask=col < width, other=0.0)
    up = tl.load(both + at + width + col, mask=col < width, other=0.0)
    wide = gate.to(tl.float32)
    chosen = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(
        out + row_offset(row, width, col),
        (chosen * up.to(tl.float32)).to(gate.dtype),
        mask=col < width,
    )

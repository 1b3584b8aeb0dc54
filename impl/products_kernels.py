"""Matrix products of few rows with what stands before and behind them in a decoder layer.

``weight`` is ``[outputs, width]`` as PyTorch's linear layers hold it. Sums are float32 and are rounded where a
product of its own would round, so that the results are those of the launches one by one.
"""

import triton
import triton.language as tl

from ddtree.impl.index import block_start, row_offset


@triton.jit
def _scales(x, row, is_row, width, eps, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """``1 / rms`` of rows ``[T, width]``."""
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, width, BLOCK_K):
        col = first + tl.arange(0, BLOCK_K)
        at = row_offset(row[:, None], width, col[None, :])
        value = tl.load(x + at, mask=is_row[:, None] & (col < width)[None, :], other=0.0)
        wide = value.to(tl.float32)
        total += tl.sum(wide * wide, axis=1)
    return tl.rsqrt(total / width + eps)


@triton.jit
def _normed_part(x, norm, row, is_row, col, width, scale):
    """Some columns of ``norm * x * scale``, rounded where PyTorch rounds."""
    at = row_offset(row[:, None], width, col[None, :])
    value = tl.load(x + at, mask=is_row[:, None] & (col < width)[None, :], other=0.0)
    rounded = (value.to(tl.float32) * scale[:, None]).to(value.dtype).to(tl.float32)
    factor = tl.load(norm + col, mask=col < width, other=0.0).to(tl.float32)
    return (factor[None, :] * rounded).to(value.dtype)


@triton.jit
def _weights(weight, out, is_out, col, width):
    """Some columns of the rows ``out`` of a weight, turned: ``[columns, outputs]``."""
    at = row_offset(out[None, :], width, col[:, None])
    return tl.load(weight + at, mask=is_out[None, :] & (col < width)[:, None], other=0.0)


@triton.jit
def _rounded(total, bias, out, is_out, like):
    """A product's sums in the dtype of ``like``, with the bias if there is one."""
    if bias is not None:
        total += tl.load(bias + out, mask=is_out, other=0.0).to(tl.float32)[None, :]
    return total.to(like.dtype.element_ty)


@triton.jit
def _turned(
    first, second, weight, eps, cos, sin, entry, is_row, half, is_half, HEAD_DIM: tl.constexpr
):
    """Both halves of rows' heads, normalised where there is a weight, and turned by their rows' angles."""
    dtype = first.dtype
    one, two = first.to(tl.float32), second.to(tl.float32)
    if weight is not None:
        squares = tl.sum(one * one, axis=1) + tl.sum(two * two, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        factor = tl.load(weight + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
        one = (factor * (one * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        factor = tl.load(weight + HEAD_DIM // 2 + half, mask=is_half, other=0.0).to(tl.float32)
        two = (factor[None, :] * (two * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    at = row_offset(entry[:, None], HEAD_DIM, half[None, :])
    inside = is_row[:, None] & is_half[None, :]
    cos_one = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
    sin_one = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
    cos_two = tl.load(cos + HEAD_DIM // 2 + at, mask=inside, other=0.0).to(tl.float32)
    sin_two = tl.load(sin + HEAD_DIM // 2 + at, mask=inside, other=0.0).to(tl.float32)
    return (one * cos_one - two * sin_one).to(dtype), (two * cos_two + one * sin_two).to(dtype)


@triton.jit
def _store_heads(
    into,
    first,
    second,
    row,
    is_row,
    head,
    half,
    is_half,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Write both halves of a head of some rows ``[T, HEADS, HEAD_DIM]``."""
    place = row_offset(row[:, None], HEADS * HEAD_DIM, row_offset(head, HEAD_DIM, half)[None, :])
    inside = is_row[:, None] & is_half[None, :]
    tl.store(into + place, first, mask=inside)
    tl.store(into + HEAD_DIM // 2 + place, second, mask=inside)


@triton.jit
def norm_heads_kernel(
    x, norm, eps,  # [T, width], [width]
    weight, bias,  # [(Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, width], [outputs] or None
    cos, sin, positions,  # [entries, HEAD_DIM] twice, [T]
    q_weight, k_weight, head_eps,  # [HEAD_DIM] twice, or None
    query, key, value,  # out [T, heads, HEAD_DIM]
    num_rows, width,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One head of some rows: norm, product, norm of the head, rotation."""
    head = tl.program_id(1)
    row = block_start(tl.program_id(0), BLOCK_M) + tl.arange(0, BLOCK_M).to(tl.int64)
    is_row = row < num_rows
    half = tl.arange(0, HALF)
    is_half = half < HEAD_DIM // 2
    out = row_offset(head, HEAD_DIM, half)
    scale = _scales(x, row, is_row, width, eps, BLOCK_M, BLOCK_K)
    one = tl.zeros([BLOCK_M, HALF], tl.float32)
    two = tl.zeros([BLOCK_M, HALF], tl.float32)
    for start in range(0, width, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        part = _normed_part(x, norm, row, is_row, col, width, scale)
        one = tl.dot(
            part, _weights(weight, out, is_half, col, width), acc=one, input_precision="ieee"
        )
        two = tl.dot(
            part, _weights(weight, out + HEAD_DIM // 2, is_half, col, width),
            acc=two, input_precision="ieee",
        )  # fmt: skip
    first = _rounded(one, bias, out, is_half, x)
    second = _rounded(two, bias, out + HEAD_DIM // 2, is_half, x)

    entry = tl.load(positions + row, mask=is_row, other=0)
    if head < Q_HEADS:
        first, second = _turned(
            first, second, q_weight, head_eps, cos, sin, entry, is_row, half, is_half, HEAD_DIM
        )
        _store_heads(query, first, second, row, is_row, head, half, is_half, Q_HEADS, HEAD_DIM)
    elif head < Q_HEADS + KV_HEADS:
        first, second = _turned(
            first, second, k_weight, head_eps, cos, sin, entry, is_row, half, is_half, HEAD_DIM
        )
        _store_heads(
            key, first, second, row, is_row, head - Q_HEADS, half, is_half, KV_HEADS, HEAD_DIM
        )
    else:
        _store_heads(
            value, first, second, row, is_row, head - Q_HEADS - KV_HEADS,
            half, is_half, KV_HEADS, HEAD_DIM,
        )  # fmt: skip


@triton.jit
def norm_gate_kernel(
    x, norm, eps,  # [T, width], [width]
    weight,  # [2 * outputs, width]: gate, up
    gated,  # out [T, outputs]
    num_rows, width, outputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``silu(gate) * up`` of some columns of some rows, the norm before the products."""
    row = block_start(tl.program_id(0), BLOCK_M) + tl.arange(0, BLOCK_M).to(tl.int64)
    is_row = row < num_rows
    out = block_start(tl.program_id(1), BLOCK_N) + tl.arange(0, BLOCK_N)
    is_out = out < outputs
    scale = _scales(x, row, is_row, width, eps, BLOCK_M, BLOCK_K)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        part = _normed_part(x, norm, row, is_row, col, width, scale)
        gate = tl.dot(
            part, _weights(weight, out, is_out, col, width), acc=gate, input_precision="ieee"
        )
        up = tl.dot(
            part,
            _weights(weight, outputs + out, is_out, col, width),
            acc=up,
            input_precision="ieee",
        )
    dtype = x.dtype.element_ty
    wide = gate.to(dtype).to(tl.float32)
    chosen = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    tl.store(
        gated + row_offset(row[:, None], outputs, out[None, :]),
        (chosen * up.to(dtype).to(tl.float32)).to(dtype),
        mask=is_row[:, None] & is_out[None, :],
    )


@triton.jit
def product_add_kernel(
    x, weight, bias,  # [T, width], [outputs, width], [outputs] or None
    residual, total,  # [T, outputs], out like it
    num_rows, width, outputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some columns of some rows' product, added to the residual."""
    row = block_start(tl.program_id(0), BLOCK_M) + tl.arange(0, BLOCK_M).to(tl.int64)
    is_row = row < num_rows
    out = block_start(tl.program_id(1), BLOCK_N) + tl.arange(0, BLOCK_N)
    is_out = out < outputs
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        at = row_offset(row[:, None], width, col[None, :])
        part = tl.load(x + at, mask=is_row[:, None] & (col < width)[None, :], other=0.0)
        sums = tl.dot(
            part, _weights(weight, out, is_out, col, width), acc=sums, input_precision="ieee"
        )
    product = _rounded(sums, bias, out, is_out, x).to(tl.float32)
    at = row_offset(row[:, None], outputs, out[None, :])
    inside = is_row[:, None] & is_out[None, :]
    other = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, (other + product).to(x.dtype.element_ty), mask=inside)

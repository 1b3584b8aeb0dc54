"""Products of few rows together with what stands around them: a layer in six launches instead of ten.

A product of some sixteen rows with a small weight takes little longer than a launch, so that it is worth its
while to repeat a norm in every program. Sums are those of ``layers.py`` in another order.
"""

import torch
import triton
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.impl.arguments import require_table
from ddtree.impl.op import op
from ddtree.impl.products_kernels import norm_gate_kernel, norm_heads_kernel, product_add_kernel
from ddtree.spec.errors import require
from ddtree.spec.index import fits_int32

BLOCK_K = 128
"""Most columns that a step of a product's sum takes."""
BLOCK_N = 16
"""Outputs of a program, where they are not a head's."""
MOST_SUMS = 64 * 64
"""Sums of a program, which lie in registers."""
MAX_HEAD_DIM = MOST_SUMS // 16
"""A product has 16 rows at least."""
SHARED = 96 * 1024
"""Bytes of tiles on their way, within the shared memory of every GPU since compute capability 8."""


def norm_heads(
    x: Float[Tensor, "T width"],
    norm: Float[Tensor, " width"],
    eps: float,
    weight: Float[Tensor, "outputs width"],
    bias: Float[Tensor, " outputs"] | None,
    rope: tuple[Float[Tensor, "entries head_dim"], Float[Tensor, "entries head_dim"]],
    positions: Int64[Tensor, " T"],
    heads: tuple[int, int],
    norms: tuple[Tensor | None, Tensor | None] = (None, None),
    head_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[T, heads, head_dim]`` of the norm of rows.

    As ``add_norm``, the product with the stacked weights and ``split_heads`` would.

    Args:
        x: the rows.
        norm: its weight.
        eps: of the norm.
        weight: of queries, keys and values, ``(q_heads + 2 * kv_heads) * head_dim`` outputs.
        bias: of the outputs, if they have one.
        rope: cosines and sines of every position that there may be.
        positions: of the rows; trusted.
        heads: of queries and of keys.
        norms: weights ``[head_dim]`` of queries and keys, each normalised a head at a time; None: not.
        head_eps: of those norms.

    Raises:
        InputError: shapes that do not agree, numbers that do not lie side by side, a head_dim that is odd or
            above 256, or a weight of 2^31 numbers.
    """
    (count, width), (q_heads, kv_heads), head_dim = x.shape, heads, rope[0].shape[1]
    require(
        head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM,
        "head_dim is {}; it must be even and at most {}",
        head_dim,
        MAX_HEAD_DIM,
    )
    outputs = (q_heads + 2 * kv_heads) * head_dim
    _require_product(x, weight, outputs)
    require_table("norm", norm, width)
    if bias is not None:
        require_table("bias", bias, outputs)
    for table in rope:
        require_table("rope", table, rope[0].shape[0], head_dim)
    require_table("positions", positions, count)
    for one in norms:
        if one is not None:
            require_table("norms", one, head_dim)
    query = x.new_empty((count, q_heads, head_dim))
    key = x.new_empty((count, kv_heads, head_dim))
    value = torch.empty_like(key)
    if count:
        _norm_heads(
            x, norm, eps, weight, bias, *rope, positions, *norms, head_eps, query, key, value
        )
    return query, key, value


@op("norm_heads", writes=("query", "key", "value"))
def _norm_heads(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    head_eps: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> None:
    """Launch."""
    (rows, width), (_, q_heads, head_dim), kv_heads = x.shape, query.shape, key.shape[1]
    half = max(16, triton.next_power_of_2(head_dim // 2))
    block_m, block_k, stages = _tiles(x, 2 * half)
    norm_heads_kernel[(triton.cdiv(rows, block_m), q_heads + 2 * kv_heads)](
        x, norm, eps, weight, bias, cos, sin, positions, q_weight, k_weight, head_eps,
        query, key, value, rows, width,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=half,
        BLOCK_M=block_m, BLOCK_K=block_k, num_stages=stages,
    )  # fmt: skip


def norm_gate(
    x: Float[Tensor, "T width"],
    norm: Float[Tensor, " width"],
    eps: float,
    weight: Float[Tensor, "twice width"],
) -> Float[Tensor, "T outputs"]:
    """``silu(gate) * up`` of the norm of rows, the two weights stacked.

    Raises:
        InputError: shapes that do not agree, numbers that do not lie side by side, an odd number of outputs,
            or a weight of 2^31 numbers.
    """
    twice = weight.shape[0]
    require(twice % 2 == 0, "weight has {} outputs; half of them are the gate's", twice)
    _require_product(x, weight, twice)
    require_table("norm", norm, x.shape[1])
    gated = x.new_empty((x.shape[0], weight.shape[0] // 2))
    if gated.numel():
        _norm_gate(x, norm, eps, weight, gated)
    return gated


@op("norm_gate", writes=("gated",))
def _norm_gate(x: Tensor, norm: Tensor, eps: float, weight: Tensor, gated: Tensor) -> None:
    """Launch."""
    (rows, width), outputs = x.shape, gated.shape[1]
    block_m, block_k, stages = _tiles(x, 2 * BLOCK_N)
    norm_gate_kernel[(triton.cdiv(rows, block_m), triton.cdiv(outputs, BLOCK_N))](
        x, norm, eps, weight, gated, rows, width, outputs,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=block_k, num_stages=stages,
    )  # fmt: skip


def product_add(
    x: Float[Tensor, "T width"],
    weight: Float[Tensor, "outputs width"],
    bias: Float[Tensor, " outputs"] | None,
    residual: Float[Tensor, "T outputs"],
) -> Float[Tensor, "T outputs"]:
    """``residual + linear(x)``.

    Raises:
        InputError: shapes that do not agree, numbers that do not lie side by side, or a weight of 2^31
            numbers.
    """
    outputs = weight.shape[0]
    _require_product(x, weight, outputs)
    if bias is not None:
        require_table("bias", bias, outputs)
    require_table("residual", residual, x.shape[0], outputs)
    total = torch.empty_like(residual)
    if total.numel():
        _product_add(x, weight, bias, residual, total)
    return total


@op("product_add", writes=("total",))
def _product_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, total: Tensor
) -> None:
    """Launch."""
    (rows, width), outputs = x.shape, total.shape[1]
    block_m, block_k, stages = _tiles(x, BLOCK_N)
    product_add_kernel[(triton.cdiv(rows, block_m), triton.cdiv(outputs, BLOCK_N))](
        x, weight, bias, residual, total, rows, width, outputs,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=block_k, num_stages=stages,
    )  # fmt: skip


def _require_product(x: Tensor, weight: Tensor, outputs: int) -> None:
    """Refuse rows and a weight that do not go together, and a weight whose addresses overflow int32."""
    require_table("x", x, *x.shape)
    require_table("weight", weight, outputs, x.shape[1])
    require(
        fits_int32(weight.numel()),
        "weight has shape {}, {} numbers; the kernels take at most 2147483647",
        list(weight.shape),
        weight.numel(),
    )


def _tiles(x: Tensor, outputs: int) -> tuple[int, int, int]:
    """Rows and columns of a step, and the depth of the load pipeline, for so many outputs a program."""
    block_m = min(MOST_SUMS // outputs, max(16, triton.next_power_of_2(x.shape[0])))
    block_k = BLOCK_K
    while 2 * (block_m + outputs) * block_k * x.element_size() > SHARED:
        block_k //= 2
    return block_m, block_k, min(4, SHARED // ((block_m + outputs) * block_k * x.element_size()))

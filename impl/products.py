"""Products of few rows together with what stands around them: a layer in six launches instead of ten.

A product of some sixteen rows with a small weight takes little longer than a launch, so that it is worth its
while to repeat a norm in every program. Sums are those of ``layers.py`` in another order.
"""

import torch
import triton
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.impl.op import op
from ddtree.impl.products_kernels import norm_gate_kernel, norm_heads_kernel, product_add_kernel

BLOCK_K = 128
"""Most columns that a step of a product's sum takes."""
BLOCK_N = 16
"""Outputs of a program, where they are not a head's."""
MOST_SUMS = 64 * 64
"""Sums of a program, which lie in registers."""
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
    """Queries, keys and values of the norm of rows: ``add_norm``, the product, ``split_heads``.

    All tensors are contiguous, weights a part of one that is.
    """
    count, (q_heads, kv_heads), head_dim = x.shape[0], heads, rope[0].shape[1]
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
    """``silu(gate) * up`` of the norm of rows, the two weights stacked."""
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
    """``residual + linear(x)``."""
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


def _tiles(x: Tensor, outputs: int) -> tuple[int, int, int]:
    """Rows and columns of a step, and the depth of the load pipeline, for so many outputs a program."""
    block_m = min(MOST_SUMS // outputs, max(16, triton.next_power_of_2(x.shape[0])))
    block_k = BLOCK_K
    while 2 * (block_m + outputs) * block_k * x.element_size() > SHARED:
        block_k //= 2
    return block_m, block_k, min(4, SHARED // ((block_m + outputs) * block_k * x.element_size()))

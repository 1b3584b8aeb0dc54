"""What stands between the matrix products of a Llama-like decoder layer, in three launches."""

import torch
import triton
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.impl.layers_kernels import add_norm_kernel, gate_kernel, heads_kernel
from ddtree.impl.op import op

GATE_BLOCK = 1024


def add_norm(
    x: Float[Tensor, "T width"],
    residual: Float[Tensor, "T width"] | None,
    weight: Float[Tensor, " width"],
    eps: float,
) -> tuple[Float[Tensor, "T width"], Float[Tensor, "T width"]]:
    """Return ``weight * total / rms(total)`` and ``total = x + residual``; tensors are contiguous."""
    normed = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    if x.shape[0]:
        _add_norm(x, residual, weight, total, normed, eps)
    return normed, x if total is None else total


@op("add_norm", writes=("total", "normed"))
def _add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    total: Tensor | None,
    normed: Tensor,
    eps: float,
) -> None:
    """Launch."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    add_norm_kernel[(rows,)](
        x, residual, weight, total, normed, eps, width,
        BLOCK=block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip


def split_heads(
    rows: Float[Tensor, "T width"],
    rope: tuple[Float[Tensor, "entries head_dim"], Float[Tensor, "entries head_dim"]],
    positions: Int64[Tensor, " T"],
    heads: tuple[int, int],
    norms: tuple[Tensor | None, Tensor | None] = (None, None),
    eps: float = 0.0,
    pools: tuple[Tensor, Tensor] | None = None,
    slots: Int64[Tensor, " T"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[T, heads, head_dim]`` of a product with their stacked weights.

    Args:
        rows: ``[T, (q_heads + 2 * kv_heads) * head_dim]``, queries first.
        rope: cosines and sines of every position that there may be.
        positions: of the rows; trusted.
        heads: of queries (0: there are none) and of keys.
        norms: weights ``[head_dim]`` of queries and keys, each normalised a head at a time; None: not.
        eps: of the norms.
        pools: where keys and values are written too, in their dtype.
        slots: of the pools, one a row.
    """
    count, (q_heads, kv_heads), head_dim = rows.shape[0], heads, rope[0].shape[1]
    query = rows.new_empty((count, q_heads, head_dim))
    key = rows.new_empty((count, kv_heads, head_dim))
    value = torch.empty_like(key)
    if count:
        key_pool, value_pool = (None, None) if pools is None else pools
        _split_heads(
            rows, *rope, positions, *norms, eps, query, key, value, key_pool, value_pool,
            None if pools is None else slots,
        )  # fmt: skip
    return query, key, value


@op("split_heads", writes=("query", "key", "value", "key_pool", "value_pool"))
def _split_heads(
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor | None,
    value_pool: Tensor | None,
    slots: Tensor | None,
) -> None:
    """Launch."""
    (count, q_heads, head_dim), kv_heads = query.shape, key.shape[1]
    heads_kernel[(count, q_heads + 2 * kv_heads)](
        rows, cos, sin, positions, q_weight, k_weight, eps, query, key, value, key_pool, value_pool, slots,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2), num_warps=1,
    )  # fmt: skip


def gate(both: Float[Tensor, "T twice"]) -> Float[Tensor, "T width"]:
    """Return ``silu(gate) * up`` of a product with the two weights stacked."""
    out = both.new_empty((both.shape[0], both.shape[1] // 2))
    if out.numel():
        _gate(both, out)
    return out


@op("gate", writes=("out",))
def _gate(both: Tensor, out: Tensor) -> None:
    """Launch."""
    rows, width = out.shape
    gate_kernel[(rows, triton.cdiv(width, GATE_BLOCK))](both, out, width, BLOCK=GATE_BLOCK)

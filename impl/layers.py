"""What stands between the matrix products of Llama-like decoder layers, a launch each."""

import torch
import triton
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from ddtree.impl.arguments import require_table
from ddtree.impl.layers_kernels import (
    add_norm_kernel,
    context_kernel,
    embed_norm_kernel,
    gate_kernel,
    heads_kernel,
)
from ddtree.impl.op import op
from ddtree.spec.errors import InputError, require

GATE_BLOCK = 1024


def add_norm(
    x: Float[Tensor, "T width"],
    residual: Float[Tensor, "T width"] | None,
    weight: Float[Tensor, " width"],
    eps: float,
    into: Float[Tensor, "T width"] | None = None,
) -> tuple[Float[Tensor, "T width"], Float[Tensor, "T width"]]:
    """Return ``weight * total / rms(total)`` and ``total = x + residual``, which is written ``into``.

    ``x`` is contiguous; rows of ``residual`` and ``into`` (None: new memory) may lie apart.

    Raises:
        InputError: shapes that do not agree, or numbers of a row that do not lie side by side.
    """
    require_table("x", x, *x.shape)
    require_table("weight", weight, x.shape[1])
    for name, part in (("residual", residual), ("into", into)):
        if part is not None and (part.shape != x.shape or part.stride(1) != 1):
            raise InputError(
                f"{name} has shape {list(part.shape)} and strides {part.stride()}, x shape {list(x.shape)}; "
                "the shapes are one, and a row's numbers lie side by side"
            )
    normed = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x) if into is None else into
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
        width if residual is None else residual.stride(0), width if total is None else total.stride(0),
        BLOCK=block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip


def embed_norm(
    table: Float[Tensor, "vocab width"],
    token_ids: Int64[Tensor, "B row_width"],
    starts: Int32[Tensor, " indptr"],
    num_rows: int,
    weight: Float[Tensor, " width"],
    eps: float,
    factor: float = 1.0,
) -> tuple[Float[Tensor, "T width"], Float[Tensor, "T width"]]:
    """Return the norm of ``factor * table[token]`` and the product itself, of ``num_rows`` rows.

    Args:
        table: contiguous.
        token_ids: each request's; trusted.
        starts: row at which each request's begin, as ``VerifyLayout.qo_indptr``. Rows of no request have
            token 0.
        num_rows: how many.
        weight: of the norm.
        eps: of the norm.
        factor: on what is looked up.

    Raises:
        InputError: fewer starts than requests, no request, or a table or a norm whose numbers do not lie side
            by side.
    """
    batch, (vocab, width) = token_ids.shape[0], table.shape
    require(batch >= 1, "token_ids has 0 requests; rows are looked up for 1 at least")
    require(starts.numel() > batch, "starts has {} entries, for {} requests", starts.numel(), batch)
    require_table("table", table, vocab, width)
    require_table("weight", weight, width)
    total = table.new_empty((num_rows, table.shape[1]))
    normed = torch.empty_like(total)
    if num_rows:
        _embed_norm(table, token_ids.contiguous(), starts, weight, total, normed, factor, eps)
    return normed, total


@op("embed_norm", writes=("total", "normed"))
def _embed_norm(
    table: Tensor,
    token_ids: Tensor,
    starts: Tensor,
    weight: Tensor,
    total: Tensor,
    normed: Tensor,
    factor: float,
    eps: float,
) -> None:
    """Launch."""
    (rows, width), (batch, row_width) = total.shape, token_ids.shape
    block = triton.next_power_of_2(width)
    embed_norm_kernel[(rows,)](
        table, token_ids, starts, weight, total, normed, float(factor), eps, width, batch, row_width,
        BATCH=triton.next_power_of_2(batch), HAS_FACTOR=factor != 1,
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
        slots: of the pools, one a row; rows with a negative one are not written there.
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


def write_context(
    rows: Float[Tensor, "layers T width"],
    rope: tuple[Float[Tensor, "entries head_dim"], Float[Tensor, "entries head_dim"]],
    positions: Int64[Tensor, " T"],
    k_norms: Float[Tensor, "layers head_dim"] | None,
    eps: float,
    pools: Float[Tensor, "layers 2 slots kv_heads head_dim"],
    slots: Int64[Tensor, " T"],
) -> None:
    """Write rows' keys, normalised and rotated, and values into the pools of all layers at once.

    Args:
        rows: ``[layers, T, 2 * kv_heads * head_dim]`` products, keys first; contiguous.
        rope: as in ``split_heads``.
        positions: of the rows; trusted.
        k_norms: weights of the keys' norms, a head at a time; None: they are not normalised.
        eps: of the norms.
        pools: keys and values of each layer; contiguous; changed in place.
        slots: of the pools, one a row; rows with a negative one are left out, others are trusted.

    Raises:
        InputError: shapes that do not agree, or numbers that do not lie side by side.
    """
    layers, _, _, kv_heads, head_dim = pools.shape
    count = rows.shape[1]
    require_table("pools", pools, layers, 2, *pools.shape[2:])
    require_table("rows", rows, layers, count, 2 * kv_heads * head_dim)
    for table in rope:
        require_table("rope", table, table.shape[0], head_dim)
    require_table("positions", positions, count)
    require_table("slots", slots, count)
    if k_norms is not None:
        require_table("k_norms", k_norms, layers, head_dim)
    if rows.numel():
        _write_context(rows, *rope, positions, k_norms, eps, pools, slots)


@op("write_context", writes=("pools",))
def _write_context(
    rows: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_norms: Tensor | None,
    eps: float,
    pools: Tensor,
    slots: Tensor,
) -> None:
    """Launch."""
    layers, _, num_slots, kv_heads, head_dim = pools.shape
    count = rows.shape[1]
    context_kernel[(count, 2 * kv_heads, layers)](
        rows, cos, sin, positions, k_norms, eps, pools, slots, count, num_slots,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim,
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

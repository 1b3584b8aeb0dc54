"""Step 4: tree attention on a paged KV pool.

The tree's own keys and values lie beside the pool (rows of the call), the prefix in the pool at
``kv_indices``, as in SGLang's extend attention. So only the pool's entries are ever quantised, and only
they have scales. Every width is read from the call's ``qo_indptr`` and
``kv_indptr``. As a kernel would, this trusts the layout: a wrong width really yields wrong text.
"""

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ddtree.spec.contracts import TreeMask, VerifyLayout
from ddtree.spec.dtypes import FLOAT, FP8, indexable, require_kind, require_tensor
from ddtree.spec.errors import InputError, require, require_int, require_number
from ddtree.spec.index import window_start
from ddtree.spec.mask import FORMS, read_mask, request_lens
from ddtree.spec.public import public

PoolScale = float | Float32[Tensor, ""] | Float32[Tensor, " kv_heads"] | None
"""What a pool's entries are to be multiplied by: one number, or one for each KV head; None: 1."""


@public
def verify_attention(
    query: Float[Tensor, "T q_heads head_dim"],
    key: Float[Tensor, "T kv_heads head_dim"],
    value: Float[Tensor, "T kv_heads head_dim"],
    key_pool: Float[Tensor, "slots kv_heads head_dim"],
    value_pool: Float[Tensor, "slots kv_heads head_dim"],
    layout: VerifyLayout,
    mask: TreeMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " q_heads"] | None = None,
    window: int | None = None,
    key_scale: PoolScale = None,
    value_scale: PoolScale = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "T q_heads head_dim"], Float[Tensor, "T q_heads"] | None]:
    """Attend from every tree node to the prefix and to its ancestors.

    Args:
        query: ``[T, q_heads, head_dim]``; query head h reads KV head ``h // (q_heads / kv_heads)``.
        key: ``[T, kv_heads, head_dim]`` of the tree rows.
        value: like ``key``.
        key_pool: ``[slots, kv_heads, head_dim]``, read at ``layout.kv_indices``; a float dtype or
            ``float8_e4m3fn``.
        value_pool: like ``key_pool``.
        layout: the call's layout.
        mask: the call's mask in any form.
        scale: factor on the scores; None: ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[q_heads]`` one more score of each head that takes weight and gives no value.
        window: a row sees keys from ``position - window + 1`` on, by tree depth, not by row.
        key_scale: an entry's key is the pool's number times this: a float, or float32 of shape ``[]`` or
            ``[kv_heads]``, not negative; None: 1. It holds for a pool of any dtype, and never for
            the tree's own ``key``, which the model has just computed.
        value_scale: the same for values.
        return_lse: also return the natural log of the softmax's denominator, the sink included.
        compute_dtype: dtype of the arithmetic.

    Returns:
        The output ``[T, q_heads, head_dim]`` in query's dtype, or in float64 where that is the
        ``compute_dtype``, and the log-sum-exp ``[T, q_heads]`` or None. Rows past ``qo_indptr[-1]``
        and rows that see nothing are 0 (log-sum-exp -inf).

    Raises:
        InputError: dtypes or shapes that do not agree, a softcap or window that is not positive, a scale
            that is negative or not finite, or a layout that reads past the end of a tensor.
    """
    _require_shapes(query, key, value, key_pool, value_pool, sinks)
    require_kind("layout", layout, VerifyLayout)
    require_kind("mask", mask, *FORMS)
    if scale is not None:
        require_number("scale", scale)
    if softcap is not None:
        require_number("softcap", softcap)
        require(softcap > 0, f"softcap is {softcap}; it must be above 0")
    if window is not None:
        require_int("window", window, 1, "the row itself")
    require(compute_dtype in FLOAT, f"compute_dtype is {compute_dtype}; expected a floating dtype")
    key_factors, value_factors = (
        _factors(name, factor, key, compute_dtype)
        for name, factor in (("key_scale", key_scale), ("value_scale", value_scale))
    )
    num_rows, q_heads, head_dim = query.shape
    group = q_heads // key.shape[1]
    factor = head_dim**-0.5 if scale is None else scale
    output = torch.zeros(query.shape, dtype=compute_dtype, device=query.device)
    lse = torch.full((num_rows, q_heads), -torch.inf, dtype=compute_dtype, device=query.device)

    for b in range(layout.qo_indptr.numel() - 1):
        prefix_len, q_len = request_lens(layout, b)
        start, kv_start = int(layout.qo_indptr[b]), int(layout.kv_indptr[b])
        require(
            start + q_len <= num_rows,
            f"qo_indptr gives request {b} rows {start} to {start + q_len}; query has {num_rows}",
        )
        require(
            kv_start + prefix_len <= layout.kv_indices.numel(),
            f"kv_indptr gives request {b} entries {kv_start} to {kv_start + prefix_len}; "
            f"kv_indices has {layout.kv_indices.numel()}",
        )
        rows = slice(start, start + q_len)
        slots = layout.kv_indices[kv_start : kv_start + prefix_len]
        _require_slots(b, slots, key_pool.shape[0])
        queries = query[rows].to(compute_dtype)
        # [kv, q_heads, head_dim]
        keys, values = (
            torch.cat([_read_pool(pool, slots, factors), own[rows].to(compute_dtype)])
            .repeat_interleave(group, 1)
            for pool, factors, own in (
                (key_pool, key_factors, key),
                (value_pool, value_factors, value),
            )
        )  # fmt: skip

        scores = torch.einsum("qhd,khd->hqk", queries, keys) * factor
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = read_mask(mask, layout, b)
        if window is not None:
            key_positions = torch.cat(
                [torch.arange(prefix_len, device=query.device), layout.positions[rows]]
            )
            seen = seen & (key_positions >= window_start(layout.positions[rows], window)[:, None])
        scores = scores.masked_fill(~seen, -torch.inf)
        denominator = torch.logsumexp(scores, dim=-1)  # [q_heads, q_len]
        if sinks is not None:
            denominator = torch.logaddexp(denominator, sinks.to(compute_dtype)[:, None])
        blind = denominator == -torch.inf  # rows that see nothing
        weights = torch.exp(scores - denominator[..., None]).masked_fill(blind[..., None], 0.0)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values)
        lse[rows] = denominator.T

    out_dtype = torch.float64 if compute_dtype is torch.float64 else query.dtype
    return output.to(out_dtype), lse if return_lse else None


def _require_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    sinks: Tensor | None,
) -> None:
    """Refuse heads and head dims that do not fit together."""
    for name, tensor in (
        ("query", query),
        ("key", key),
        ("value", value),
        ("key_pool", key_pool),
        ("value_pool", value_pool),
    ):
        pool = name.endswith("_pool")
        require_tensor(name, tensor, FLOAT + FP8 * pool, ("rows", "heads", "head_dim"))
        require(
            tensor.shape[2] == query.shape[2],
            "{} has head_dim {}, query {}",
            name,
            tensor.shape[2],
            query.shape[2],
        )
    if key.shape != value.shape:
        raise InputError(f"key has shape {list(key.shape)}, value {list(value.shape)}")
    if key_pool.shape != value_pool.shape:
        raise InputError(
            f"key_pool has shape {list(key_pool.shape)}, value_pool {list(value_pool.shape)}"
        )
    num_rows, q_heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
    require(key.shape[0] == num_rows, "key has {} rows, query {}", key.shape[0], num_rows)
    pool_heads = key_pool.shape[1]
    require(kv_heads == pool_heads, "key has {} KV heads, key_pool {}", kv_heads, pool_heads)
    require(
        kv_heads >= 1 and q_heads % kv_heads == 0,
        "{} query heads do not divide into {} KV heads",
        q_heads,
        kv_heads,
    )
    if sinks is not None:
        require_tensor("sinks", sinks, FLOAT, (q_heads,))


def _require_scale(name: str, scale: PoolScale, kv_heads: int) -> None:
    """Refuse what is neither a number from 0 on nor a tensor for one or each KV head; reads no tensor."""
    if isinstance(scale, Tensor):
        require_tensor(name, scale, (torch.float32,), (kv_heads,) if scale.ndim else ())
    elif scale is not None:
        require_number(name, scale)
        require(scale >= 0, f"{name} is {scale}; the least is 0")


def _factors(name: str, scale: PoolScale, key: Tensor, dtype: torch.dtype) -> Tensor:
    """What a pool's numbers are multiplied by, ``[kv_heads or 1, 1]``."""
    _require_scale(name, scale, key.shape[1])
    if not isinstance(scale, Tensor):
        scale = torch.tensor(1.0 if scale is None else scale, dtype=dtype, device=key.device)
    wrong = scale[~((scale >= 0) & scale.isfinite())].tolist()
    require(not wrong, f"{name} holds {wrong[:1]}; expected finite numbers from 0 on")
    return scale.to(dtype).reshape(-1, 1)


def _read_pool(pool: Tensor, slots: Tensor, factors: Tensor) -> Tensor:
    """The entries in those slots as they were before they were divided by their factors and rounded."""
    return indexable(pool)[slots].view(pool.dtype).to(factors.dtype) * factors


def _require_slots(b: int, slots: Tensor, num_slots: int) -> None:
    """Refuse a slot outside the pool."""
    outside = slots[(slots < 0) | (slots >= num_slots)]
    if outside.numel():
        require(
            False,
            f"kv_indices of request {b} holds slot {int(outside[0])}; the pool has {num_slots} slots",
        )

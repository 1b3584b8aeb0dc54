"""A Transformers attention function that runs ``spec.verify_attention`` in every layer.

The layout and the mask of the call travel beside the model, as an engine's metadata does, so a wrong
width in them does in the model exactly what it does in an engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ddtree.spec.attention import verify_attention
from ddtree.spec.contracts import FlatMask, VerifyLayout
from ddtree.spec.errors import require

NAME = "ddtree_reference"

_call: ContextVar[tuple[VerifyLayout, FlatMask]] = ContextVar("verify call")


@contextmanager
def running(model: Any, layout: VerifyLayout, mask: FlatMask) -> Iterator[None]:
    """Let ``model`` run one verify pass with this layout and mask; its own attention afterwards."""
    own = model.config._attn_implementation  # noqa: SLF001 (Transformers has no public reader)
    token = _call.set((layout, mask))
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
        _call.reset(token)


def register(model: Any) -> None:
    """Make the function known to Transformers.

    Raises:
        InputError: the model's layers do not look their attention up by name.
    """
    from transformers import AttentionInterface

    can_switch = getattr(model, "_can_set_attn_implementation", None)
    require(
        can_switch is not None and can_switch(),
        f"{type(model).__name__} does not take its attention from Transformers' registry, which "
        "attention='reference' needs; use attention='dense'",
    )
    AttentionInterface.register(NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the call's own mask is used)
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from the tree's rows; ``key`` and ``value`` hold the cached prefix, then the rows.

    Args:
        module: the attention layer.
        query: ``[1, q_heads, T, head_dim]``.
        key: ``[1, kv_heads, prefix_len + T, head_dim]``.
        value: like ``key``.
        attention_mask: not used.
        scaling: factor on the scores.
        softcap: of the scores.
        sliding_window: by position.
        s_aux: ``[q_heads]`` attention sinks.

    Returns:
        The output ``[1, T, q_heads, head_dim]``, and None for the weights.
    """
    layout, mask = _call.get()
    rows = query.shape[2]
    # [entries, kv_heads, head_dim]: the pool is the cache itself, entry i in slot i
    key_pool, value_pool = key[0].transpose(0, 1), value[0].transpose(0, 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    out, _lse = verify_attention(
        query[0].transpose(0, 1),
        key_pool[-rows:],
        value_pool[-rows:],
        key_pool,
        value_pool,
        layout,
        mask,
        scale=scaling if scaling is not None else getattr(module, "scaling", None),
        softcap=softcap,
        sinks=s_aux,
        window=sliding_window,
        compute_dtype=wide,
    )
    return out[None], None

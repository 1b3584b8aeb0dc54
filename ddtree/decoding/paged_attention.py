"""The Transformers attention function ``attn_implementation="ddtree"``.

In a pass that a ``PagedTarget`` runs, every layer attends through ``impl.verify_attention`` on the paged
pool. What the layers need travels with the call, as Transformers hands it on: the ancestor bits as the
4-D attention mask (so no mask is built), the pass itself as the keyword ``ddtree``. Outside such a pass the
model attends as it would with ``sdpa``, or ``eager`` where that cannot do what the layer asks.
"""

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Int64
from torch import Tensor

from ddtree.impl import verify_attention
from ddtree.spec.contracts import BitMask, PagedKV, VerifyLayout
from ddtree.spec.dtypes import FP8
from ddtree.spec.errors import require

NAME = "ddtree"


@dataclass(frozen=True)
class Asked:
    """What a layer asks of its attention beside queries, keys and values."""

    scale: float | None
    softcap: float | None
    window: int | None
    sinks: Tensor | None


class Attends(Protocol):
    """What a pass does in each layer."""

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        words: Tensor,
        asked: Asked,
    ) -> Tensor:
        """Attend from ``query [T, q_heads, head_dim]``; return its output, like it."""
        ...


@dataclass(frozen=True)
class VerifyPass:
    """One pass over the rows of trees: reads prefixes from the pool, writes the rows' KV to it."""

    kv: PagedKV
    layout: VerifyLayout
    slots: Int64[Tensor, " T"]
    """Pool slot that each row's KV is written to; rows without one write to a slot nobody reads."""

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        words: Tensor,
        asked: Asked,
    ) -> Tensor:
        """Run a layer of a Transformers model."""
        # side by side, with the strides that say so even of a single row
        key, value = (t.contiguous().flatten().view(t.shape) for t in (key, value))
        return self.attend_in(module.layer_idx, query, key, value, words, asked, write=True)

    def attend_in(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        words: Tensor,
        asked: Asked,
        *,
        write: bool,
    ) -> Tensor:
        """The rows see their prefix in the pool and their ancestors beside it; ``write`` their KV then."""
        key_pool, value_pool = self.kv.keys[layer], self.kv.values[layer]
        out, _lse = verify_attention(
            query, key, value, key_pool, value_pool, self.layout, BitMask(words),
            scale=asked.scale, softcap=asked.softcap, sinks=asked.sinks, window=asked.window,
        )  # fmt: skip
        if write:
            _write(key_pool, self.slots, key)
            _write(value_pool, self.slots, value)
        return out


def _write(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows to their slots, rounded to the pool's dtype."""
    if pool.dtype in FP8:
        most = torch.finfo(pool.dtype).max  # what lies beyond would become NaN
        rows = rows.clamp(-most, most).to(pool.dtype).view(torch.uint8)
        pool = pool.view(torch.uint8)  # which index_copy_ can move
    pool.index_copy_(0, slots, rows)


def register() -> None:
    """Make ``attn_implementation="ddtree"`` known to Transformers; again is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)  # outside a pass, an additive mask


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    ddtree: Attends | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend in one layer.

    Args:
        module: the attention layer.
        query: ``[1, q_heads, T, head_dim]``.
        key: ``[1, kv_heads, T, head_dim]`` of the same rows.
        value: like ``key``.
        attention_mask: in a pass the ancestor bits ``[1, 1, T, words]``.
        scaling: factor on the scores.
        softcap: of the scores.
        sliding_window: by position.
        s_aux: ``[q_heads]`` attention sinks.
        ddtree: the pass; None: none runs.
        others: for the attention outside a pass.

    Returns:
        The output ``[1, T, q_heads, head_dim]``, and the weights where ``eager`` gives them.
    """
    if ddtree is None:
        given = {"softcap": softcap, "sliding_window": sliding_window, "s_aux": s_aux}
        others |= {name: content for name, content in given.items() if content is not None}
        return _plain(module, query, key, value, attention_mask, scaling, others)
    assert attention_mask is not None, "4-D masks are handed on"
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    asked = Asked(scaling, softcap, sliding_window, s_aux)
    out = ddtree.attend(module, query, key, value, attention_mask[0, 0], asked)
    return out[None], None


def _plain(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    others: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attend outside a pass, as Transformers' own functions do."""
    from transformers import AttentionInterface

    require(
        attention_mask is None or attention_mask.dtype.is_floating_point,
        f"{type(module).__name__} does not hand the keyword 'ddtree' of the model's forward on to its "
        "attention function, so no pass can reach it",
    )
    attend: Any = AttentionInterface()["sdpa"]
    if "softcap" in others or "s_aux" in others:
        attend = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    found: tuple[Tensor, Tensor | None] = attend(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )
    return found

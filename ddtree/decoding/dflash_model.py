"""The DFlash draft model: a block of mask tokens attends to itself and to the target's features.

From the DFlash paper (arXiv 2602.06036) and the layout of the published checkpoints. The target's
hidden states of a few layers, side by side, are projected once into context features; each layer
turns them into keys and values with its own projections and attends over [context ; block] with no
mask inside the block. Positions are absolute. Module names are the checkpoint's keys.
"""

from collections.abc import Iterator
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ddtree.decoding.dflash_config import DFlashConfig


class RMSNorm(nn.Module):
    """``weight * x / rms(x)``, the mean taken in float32 (or wider)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    """Attention of the block over [context ; block], q and k normalised a head at a time."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(
        self, x: Float[Tensor, "n hidden"], rope: tuple[Tensor, Tensor]
    ) -> tuple[Float[Tensor, "n kv_heads head_dim"], Float[Tensor, "n kv_heads head_dim"]]:
        """Keys (normalised, rotated) and values of ``n`` entries."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(key, rope), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def forward(
        self,
        x: Float[Tensor, "block hidden"],
        rope: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
    ) -> Float[Tensor, "block hidden"]:
        """Attend from every block row to the whole context and the whole block."""
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rope)
        pairs = zip(context, self.keys_values(x, rope), strict=True)
        # [heads, context + block, head_dim]
        key, value = (
            torch.cat(pair).transpose(0, 1).repeat_interleave(self.groups, dim=0) for pair in pairs
        )
        out = F.scaled_dot_product_attention(query.transpose(0, 1)[None], key[None], value[None])
        return cast("Tensor", self.o_proj(out[0].transpose(0, 1).flatten(1)))


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``down(silu(gate(x)) * up(x))``."""
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attention and feed-forward, each added to its input."""
        x = x + self.self_attn(self.input_layernorm(x), rope, context)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class DFlashModel(nn.Module):
    """The layers of the drafter; the embedding and the head are the target's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        width = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def context(
        self, features: Float[Tensor, "new width"], positions: Int64[Tensor, " new"]
    ) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values ``[new, kv_heads, head_dim]`` of committed entries."""
        x = self.hidden_norm(self.fc(features))
        rope = self.rope(positions, x.dtype)
        return [layer.self_attn.keys_values(x, rope) for layer in self._layers()]

    def forward(
        self,
        block: Float[Tensor, "block hidden"],
        positions: Int64[Tensor, " block"],
        context: list[tuple[Tensor, Tensor]],
    ) -> Float[Tensor, "block hidden"]:
        """Hidden states of the block's rows, ready for the target's head."""
        rope = self.rope(positions, block.dtype)
        x = block
        for layer, entries in zip(self._layers(), context, strict=True):
            x = layer(x, rope, entries)
        return cast("Tensor", self.norm(x))

    def _layers(self) -> Iterator[Layer]:
        return (cast("Layer", layer) for layer in self.layers)

    def rope(self, positions: Int64[Tensor, " n"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[n, 1, head_dim]`` of absolute positions."""
        dim = self.config.head_dim
        even = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
        angle = positions[:, None].float() * self.config.rope_theta ** -(even / dim)
        angle = torch.cat([angle, angle], dim=-1)[:, None]
        return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(
    x: Float[Tensor, "n heads head_dim"], rope: tuple[Tensor, Tensor]
) -> Float[Tensor, "n heads head_dim"]:
    """Rotary embedding, the two halves of a head paired."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin

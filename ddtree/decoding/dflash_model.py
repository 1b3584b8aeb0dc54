"""The DFlash draft model: a block of mask tokens attends to itself and to the target's features.

From the DFlash paper (arXiv 2602.06036) and the layout of the published checkpoints. The target's
hidden states of a few layers, side by side, are projected once into context features; each layer
turns them into keys and values with its own projections and attends over [context ; block] with no
mask inside the block. Positions are absolute. Module names are the checkpoint's keys.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ddtree.spec.contracts import BlockSize
from ddtree.spec.errors import InputError, require


@dataclass(frozen=True)
class DFlashConfig:
    """The fields of a DFlash checkpoint's ``config.json`` that the model depends on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    block_size: BlockSize
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    attention_bias: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    @classmethod
    def from_json(cls, path: Path) -> "DFlashConfig":
        """Read ``config.json``; DFlash's own fields may stand in ``dflash_config`` or beside it.

        Raises:
            InputError: the file is missing or broken, a field is missing, or the config asks for
                what this model does not do (other activations, scaled RoPE, sliding layers).
        """
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the drafter's config {path}: {error}") from error
        fields = {**raw, **(raw.get("dflash_config") or {})}
        fields["rope_theta"] = _rope_theta(raw)
        heads = raw.get("num_attention_heads")
        fields.setdefault("head_dim", raw["hidden_size"] // heads if heads else None)
        if "target_layer_ids" not in fields and {"num_target_layers", "num_hidden_layers"} <= {*raw}:
            fields["target_layer_ids"] = spread_layers(
                raw["num_target_layers"], raw["num_hidden_layers"]
            )
        _refuse_unknown_kinds(raw)
        names = cls.__dataclass_fields__
        missing = [n for n in names if n not in fields and not hasattr(cls, n)]
        require(not missing, f"the drafter's config {path} lacks {', '.join(missing)}")
        values = {n: fields[n] for n in names if n in fields}
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
        config = cls(**values)
        require(config.block_size >= 1, f"{path}: block_size is {config.block_size}")
        require(bool(config.target_layer_ids), f"{path}: target_layer_ids is empty")
        return config


def spread_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target layers that a checkpoint without a list of its own reads: evenly spread."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def _rope_theta(raw: dict[str, Any]) -> float:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(kind == "default", f"drafter with RoPE of type {kind!r}: only 'default' is supported")
    return float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))


def _refuse_unknown_kinds(raw: dict[str, Any]) -> None:
    kinds = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    require(not kinds, f"drafter with layers of type {', '.join(kinds)}: only full_attention")
    act = raw.get("hidden_act", "silu")
    require(act == "silu", f"drafter with activation {act!r}: only 'silu' is supported")
    require(not raw.get("is_causal"), "drafter with a causal block: only full attention inside it")


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
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``down(silu(gate(x)) * up(x))``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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
        return x + self.mlp(self.post_attention_layernorm(x))


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
        return [layer.self_attn.keys_values(x, rope) for layer in self.layers]

    def forward(
        self,
        block: Float[Tensor, "block hidden"],
        positions: Int64[Tensor, " block"],
        context: list[tuple[Tensor, Tensor]],
    ) -> Float[Tensor, "block hidden"]:
        """Hidden states of the block's rows, ready for the target's head."""
        rope = self.rope(positions, block.dtype)
        x = block
        for layer, entries in zip(self.layers, context, strict=True):
            x = layer(x, rope, entries)
        out: Tensor = self.norm(x)
        return out

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

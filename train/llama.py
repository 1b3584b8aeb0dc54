"""The target as a plain Llama forward: whole sequences for features, one token a row for generation.

Nothing here reads a host value, so a step of generation can be captured in a CUDA graph.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from ddtree.decoding.dflash_model import rotate
from ddtree.spec.errors import require


@dataclass(frozen=True)
class Layer:
    """A layer's weights; projections of one input are stacked into one matrix."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """A Transformers Llama's weights and what it computes from them."""

    def __init__(self, model: Any) -> None:
        """Take the weights, in their dtype and on their device.

        Raises:
            InputError: not a plain Llama (other architecture, biases, scaled RoPE).
        """
        config = model.config
        require(config.model_type == "llama", f"the target is a {config.model_type}, not a llama")
        biased = config.attention_bias or config.mlp_bias
        require(not biased, "the target's projections have biases; a plain Llama has none")
        rope = config.rope_parameters
        require(
            rope.get("rope_type", "default") == "default", f"the target's RoPE is scaled: {rope}"
        )
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(config.head_dim or config.hidden_size // config.num_attention_heads)
        self.eps = float(config.rms_norm_eps)
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()
        self.head: Tensor = model.get_output_embeddings().weight.detach()
        self.norm: Tensor = model.model.norm.weight.detach()
        self.layers = [_layer(layer) for layer in model.model.layers]
        even = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=self.device)
        self.frequencies = float(rope["rope_theta"]) ** -(even / self.head_dim)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of what is computed."""
        return self.embedding.dtype

    @torch.no_grad()
    def read(
        self, token_ids: Int64[Tensor, "B S"], feature_layer_ids: tuple[int, ...] = ()
    ) -> tuple[Float[Tensor, "B S hidden"], Float[Tensor, "B S width"] | None]:
        """Read whole sequences from position 0 on.

        Args:
            token_ids: ``[B, S]``; what follows a sequence's end changes nothing before it.
            feature_layer_ids: layers whose output hidden states are wanted (0: the first layer).

        Returns:
            The states that the head reads, and the hidden states of the layers asked for, side by side.
        """
        x = F.embedding(token_ids, self.embedding)
        rope = self._rope(torch.arange(token_ids.shape[1], device=self.device))
        taken = {}
        for i, layer in enumerate(self.layers):
            q, k, v = (t.transpose(1, 2) for t in self._qkv(layer, x, rope))  # [B, heads, S, dim]
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._finish(layer, x, seen.transpose(1, 2).flatten(2))
            if i in feature_layer_ids:
                taken[i] = x
        features = torch.cat([taken[i] for i in feature_layer_ids], -1) if taken else None
        return self._rms(x, self.norm), features

    def caches(self, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values ``[rows, kv_heads, length, head_dim]`` of every layer, zeros."""
        shape = (rows, self.kv_heads, length, self.head_dim)
        return [
            (self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)) for _ in self.layers
        ]

    @torch.no_grad()
    def step(
        self,
        token_ids: Int64[Tensor, " B"],
        positions: Int64[Tensor, " B"],
        caches: list[tuple[Tensor, Tensor]],
    ) -> Float[Tensor, "B hidden"]:
        """Read one token of each row at its own position; keys and values go into the caches.

        Entries past a row's position are not seen, so a row starts anew by its position alone.

        Returns:
            The states that the head reads.
        """
        rows, length = token_ids.shape[0], caches[0][0].shape[2]
        at = torch.arange(rows, device=self.device)
        groups = self.heads // self.kv_heads
        hidden_from = torch.arange(length, device=self.device) > positions[:, None]  # [B, length]
        bias = torch.zeros(hidden_from.shape, dtype=self.dtype, device=self.device)
        bias = bias.masked_fill_(hidden_from, -torch.inf)[:, None, None]
        rope = self._rope(positions)
        x = F.embedding(token_ids, self.embedding)
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            q, k, v = self._qkv(layer, x, rope)
            keys[at, :, positions] = k
            values[at, :, positions] = v
            # the queries of one KV head side by side: its keys and values are read once
            q = q.reshape(rows * self.kv_heads, groups, self.head_dim) * self.head_dim**-0.5
            scores = torch.bmm(q, keys.flatten(0, 1).transpose(1, 2))
            scores = scores.view(rows, self.kv_heads, groups, length) + bias
            weights = torch.softmax(scores, -1).flatten(0, 1)
            seen = torch.bmm(weights, values.flatten(0, 1))
            x = self._finish(layer, x, seen.view(rows, -1))
        return self._rms(x, self.norm)

    def _qkv(self, layer: Layer, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries and keys (rotated) and values ``[..., heads, head_dim]``."""
        qkv = F.linear(self._rms(x, layer.attention_norm), layer.qkv).unflatten(
            -1, (-1, self.head_dim)
        )
        turned = rotate(qkv[..., : self.heads + self.kv_heads, :], rope)
        q, k = turned.split([self.heads, self.kv_heads], dim=-2)
        return q, k, qkv[..., self.heads + self.kv_heads :, :]

    def _finish(self, layer: Layer, x: Tensor, seen: Tensor) -> Tensor:
        """Add what attention saw and the feed-forward layer."""
        x = x + F.linear(seen, layer.out)
        gate, up = F.linear(self._rms(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[n, 1, head_dim]``."""
        angle = positions[:, None].float() * self.frequencies
        angle = torch.cat([angle, angle], dim=-1)[:, None]
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    with torch.no_grad():
        return Layer(
            attention_norm=layer.input_layernorm.weight.detach(),
            qkv=torch.cat(
                [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
            ),
            out=attention.o_proj.weight.detach(),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight.detach(),
        )

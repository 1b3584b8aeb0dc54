"""The layers of Llama-like decoders in ten launches each, from a model's own weights.

Transformers' layers take some forty: a norm alone is seven. In a CUDA graph of a small batch that is most
of the time of a pass. Here weights of one input are stacked into one matrix (the modules' parameters become
views of it, so nothing is held twice), and what stands between the products is three kernels
(``ddtree.impl.layers``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ddtree.impl.layers import add_norm, embed_norm, gate, split_heads, write_context
from ddtree.impl.products import norm_gate, norm_heads, product_add

MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
"""Transformers' models whose layers are plain: pre-norm, rotary, gated by SiLU, nothing scaled."""

PARAMETERS = {
    *(f"self_attn.{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "mlp.down_proj.bias",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}
"""All of a layer that is computed with."""

FEW_ROWS = 64
SMALL_WIDTH = 1024
"""Rows and hidden size up to which a product takes about as long as its launch."""

Pools = Sequence[tuple[Tensor, Tensor]]
"""Of each layer: keys and values ``[slots, kv_heads, head_dim]``."""
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Given a layer and ``[T, heads, head_dim]`` queries, keys and values: what attention makes of them."""


@dataclass(frozen=True)
class Tokens:
    """What a pass begins with: tokens, to be looked up."""

    table: Tensor
    token_ids: Int64[Tensor, "B width"]
    starts: Int32[Tensor, " indptr"]
    """Row at which each request's rows begin, as ``VerifyLayout.qo_indptr``."""
    factor: float = 1.0
    """On what is looked up."""


@dataclass(frozen=True)
class Norm:
    """A norm's weight and epsilon."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> "Norm":
        """Of a module, Transformers' or ours."""
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        return cls(module.weight.detach(), float(eps))


@dataclass(frozen=True)
class _Layer:
    """A layer's weights."""

    input_norm: Norm
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    head_eps: float
    out: nn.Linear
    mlp_norm: Norm
    gate_up: Tensor
    down: nn.Linear


@dataclass(frozen=True)
class _Context:
    """What makes keys and values in all layers: weights stacked over layers too."""

    qkv: Tensor
    bias: Tensor | None
    k_norms: Tensor | None


class FusedLayers:
    """A stack of layers with the final norm."""

    def __init__(
        self, layers: Sequence[Any], norm: Any, head_dim: int, *, has_context: bool = False
    ) -> None:
        """Take the modules; their stacked parameters become views.

        ``has_context``: of a drafter. For ``write_context`` and ``draft``.
        """
        self._context = _context_of([layer.self_attn for layer in layers]) if has_context else None
        self._layers = [_layer_of(layer) for layer in layers]
        self._norm = Norm.of(norm)
        first = layers[0].self_attn
        self.heads = (
            first.q_proj.out_features // head_dim,
            first.k_proj.out_features // head_dim,
        )
        self._q_width = first.q_proj.out_features

    def __call__(
        self,
        tokens: Tokens,
        rope: tuple[Tensor, Tensor],
        positions: Int64[Tensor, " T"],
        attend: Attend,
        pools: Pools | None = None,
        slots: Int64[Tensor, " T"] | None = None,
        watched: Sequence[int] = (),
    ) -> tuple[Float[Tensor, "T hidden"], Float[Tensor, "T features"] | None]:
        """Run the layers.

        Args:
            tokens: of the rows.
            rope: cosines and sines ``[entries, head_dim]`` of every position that there may be.
            positions: of the rows.
            attend: the attention.
            pools: where keys and values go.
            slots: of the pools, one a row; rows with a negative one go to none.
            watched: layers whose outputs are wanted.

        Returns:
            The rows after the final norm, and the outputs of the watched layers side by side; that of the
            last one is normalised, as Transformers has it.
        """
        hidden, residual = self._looked_up(tokens, positions.numel())
        features = outputs = None
        if watched:
            features = hidden.new_empty((hidden.shape[0], len(watched) * hidden.shape[1]))
            outputs = features.split(hidden.shape[1], dim=1)
        for i, layer in enumerate(self._layers):
            if i:
                into = outputs[watched.index(i - 1)] if outputs and i - 1 in watched else None
                hidden, residual = _normed(hidden, residual, layer.input_norm, into)
            query, key, value = split_heads(
                F.linear(hidden, layer.qkv, layer.qkv_bias), rope, positions, self.heads,
                (layer.q_norm, layer.k_norm), layer.head_eps,
                None if pools is None else pools[i], slots,
            )  # fmt: skip
            hidden = layer.out(attend(i, query, key, value).flatten(1))
            hidden, residual = _normed(hidden, residual, layer.mlp_norm)
            hidden = layer.down(gate(F.linear(hidden, layer.gate_up)))
        hidden, _ = _normed(hidden, residual, self._norm)
        if outputs and len(self._layers) - 1 in watched:
            outputs[watched.index(len(self._layers) - 1)].copy_(hidden)
        for i, watched_layer in enumerate(watched):
            if outputs and (first := watched.index(watched_layer)) < i:  # watched twice
                outputs[i].copy_(outputs[first])
        return hidden, features

    def draft(
        self,
        tokens: Tokens,
        rope: tuple[Tensor, Tensor],
        positions: Int64[Tensor, " T"],
        attend: Attend,
    ) -> Float[Tensor, "T hidden"]:
        """The rows after the final norm. Few rows of small layers take six launches a layer instead of ten.

        So it is for drafts alone: what rounds otherwise than a product of its own would make texts of target
        rows and of single tokens differ.
        """
        hidden = self._layers[0].down.out_features
        if positions.numel() > FEW_ROWS or hidden > SMALL_WIDTH:
            return self(tokens, rope, positions, attend)[0]
        _, x = self._looked_up(tokens, positions.numel())
        for i, layer in enumerate(self._layers):
            query, key, value = norm_heads(
                x, layer.input_norm.weight, layer.input_norm.eps, layer.qkv, layer.qkv_bias,
                rope, positions, self.heads, (layer.q_norm, layer.k_norm), layer.head_eps,
            )  # fmt: skip
            attended = attend(i, query, key, value).flatten(1)
            x = product_add(attended, layer.out.weight, layer.out.bias, x)
            gated = norm_gate(x, layer.mlp_norm.weight, layer.mlp_norm.eps, layer.gate_up)
            x = product_add(gated, layer.down.weight, layer.down.bias, x)
        return _normed(x, None, self._norm)[0]

    def _looked_up(self, tokens: Tokens, num_rows: int) -> tuple[Tensor, Tensor]:
        """The rows normalised for the first layer, and as they are."""
        norm = self._layers[0].input_norm
        return embed_norm(
            tokens.table, tokens.token_ids, tokens.starts, num_rows,
            norm.weight, norm.eps, tokens.factor,
        )  # fmt: skip

    def write_context(
        self,
        x: Float[Tensor, "T hidden"],
        rope: tuple[Tensor, Tensor],
        positions: Int64[Tensor, " T"],
        pools: Float[Tensor, "layers 2 slots kv_heads head_dim"],
        slots: Int64[Tensor, " T"],
    ) -> None:
        """Put each layer's keys and values of ``x`` into its pools, all layers at once.

        Rows with a negative slot are left out.
        """
        assert self._context is not None
        count = len(self._layers)
        weight = self._context.qkv.unflatten(0, (count, -1))[:, self._q_width :]
        each = x.expand(count, *x.shape)
        if self._context.bias is None:
            rows = torch.bmm(each, weight.transpose(1, 2))
        else:
            bias = self._context.bias.unflatten(0, (count, 1, -1))[..., self._q_width :]
            rows = torch.baddbmm(bias, each, weight.transpose(1, 2))
        norms = self._context.k_norms
        write_context(
            rows, rope, positions, None if norms is None else norms.unflatten(0, (count, -1)),
            self._layers[0].head_eps, pools, slots,
        )  # fmt: skip


class FusedModel:
    """A Transformers causal LM in such layers."""

    @torch.no_grad()
    def __init__(self, model: Any, head_dim: int, num_positions: int) -> None:
        """Take a model that ``can_fuse``; positions stay below ``num_positions``."""
        inner = model.model
        self._embed, self._head = inner.embed_tokens, model.lm_head
        like = inner.embed_tokens.weight[:1]
        entries = torch.arange(num_positions, device=like.device)
        cos, sin = inner.rotary_emb(like[None], entries[None])
        self._rope = cos[0].contiguous(), sin[0].contiguous()
        self._layers = FusedLayers(inner.layers, inner.norm, head_dim)

    def __call__(
        self,
        token_ids: Int64[Tensor, "B width"],
        starts: Int32[Tensor, " indptr"],
        positions: Int64[Tensor, " T"],
        attend: Attend,
        pools: Pools | None,
        slots: Int64[Tensor, " T"] | None,
        watched: Sequence[int],
        keep: int,
    ) -> tuple[Float[Tensor, "kept vocab"], Float[Tensor, "T features"] | None]:
        """Logits of the last ``keep`` rows (0: of all), and the outputs of the watched layers."""
        tokens = Tokens(self._embed.weight, token_ids, starts)
        hidden, features = self._layers(
            tokens, self._rope, positions, attend, pools, slots, watched
        )
        logits: Tensor = self._head(hidden[-keep:] if keep else hidden)
        return logits, features


def can_fuse(model: Any) -> bool:
    """Whether a Transformers causal LM is one of those, with their plain weights and nothing in between."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return False
    if getattr(model, "_compiled_call_impl", None) is not None:
        return False  # compiled in place: it is to run as it is
    parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    for layer in model.model.layers:
        linear = [
            *(getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"),
            *(getattr(layer.mlp, f"{name}_proj") for name in ("gate", "up", "down")),
        ]
        if {name for name, _ in layer.named_children()} != parts:
            return False
        if {name for name, _ in layer.named_parameters()} - PARAMETERS:
            return False  # what is not looked for would be left out of the sums
        if any(type(module) is not nn.Linear for module in linear):
            return False
    return type(model.model.embed_tokens) is nn.Embedding


def _normed(
    x: Tensor, residual: Tensor | None, norm: Norm, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return add_norm(x, residual, norm.weight, norm.eps, into)


def _layer_of(layer: Any) -> _Layer:
    """Stack a layer's weights."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return _Layer(
        input_norm=Norm.of(layer.input_layernorm),
        qkv=_stacked(projections, "weight"),
        qkv_bias=None if attention.q_proj.bias is None else _stacked(projections, "bias"),
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        head_eps=0.0 if q_norm is None else Norm.of(q_norm).eps,
        out=attention.o_proj,
        mlp_norm=Norm.of(layer.post_attention_layernorm),
        gate_up=_stacked((mlp.gate_proj, mlp.up_proj), "weight"),
        down=mlp.down_proj,
    )


def _context_of(attentions: Sequence[Any]) -> _Context:
    """Stack the projections of all layers, of which those of one layer are then a part."""
    projections = [
        module for each in attentions for module in (each.q_proj, each.k_proj, each.v_proj)
    ]
    norms = [each.k_norm for each in attentions if getattr(each, "k_norm", None) is not None]
    return _Context(
        qkv=_stacked(projections, "weight"),
        bias=None if projections[0].bias is None else _stacked(projections, "bias"),
        k_norms=_stacked(norms, "weight") if norms else None,
    )


def _stacked(modules: Sequence[nn.Module], name: str) -> Tensor:
    """The parameters as one tensor, of which they become views; once, however often it is asked for."""
    parts = [getattr(module, name).data for module in modules]
    storage = parts[0].untyped_storage()
    side_by_side = all(
        part.untyped_storage().data_ptr() == storage.data_ptr()
        and part.is_contiguous()
        and part.storage_offset() == parts[0].storage_offset() + sum(p.numel() for p in parts[:i])
        for i, part in enumerate(parts)
    )
    first: Tensor = parts[0]
    if side_by_side:
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        return first.as_strided(shape, first.stride(), first.storage_offset())
    whole = torch.cat(parts)
    views = whole.split([part.shape[0] for part in parts])
    for module, view in zip(modules, views, strict=True):
        getattr(module, name).data = view
    return whole

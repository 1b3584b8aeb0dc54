"""What each layer of a model asks of a paged attention, found by running one token through it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddtree.decoding.paged_attention import NAME, Asked, register
from ddtree.impl.attention import HEAD_DIMS
from ddtree.spec.errors import require

LOOKS_AT_ALL_POSITIONS = {"dynamic", "longrope"}
"""Rotary kinds whose angles depend on the largest position of the call, so on other requests."""


@dataclass(frozen=True)
class Layer:
    """The attention of one layer."""

    name: str
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None


@dataclass
class _Probe:
    """A pass that attends to nothing and remembers who asked."""

    layers: dict[int, Layer] = field(default_factory=dict)

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        words: Tensor,
        asked: Asked,
    ) -> Tensor:
        """Remember the layer."""
        layer, name = module.layer_idx, type(module).__name__
        require(layer not in self.layers, f"layer {layer} ({name}) attends more than once a pass")
        require(
            getattr(module, "is_causal", True),
            f"layer {layer} ({name}) is not causal: it looks at rows after its own",
        )
        self.layers[layer] = Layer(name, key.shape[1], key.shape[2], value.shape[2], asked.window)
        return query.new_zeros(*query.shape[:2], value.shape[2])


@torch.no_grad()
def layers_of(model: Any) -> tuple[Layer, ...]:
    """Find each layer's attention and leave ``model`` with ``attn_implementation="ddtree"``.

    Raises:
        InputError: the paged pool or the kernels cannot serve a layer, which is named; the model is
            then as it was.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    can_switch = getattr(model, "_can_set_attn_implementation", None)
    require(
        can_switch is not None and can_switch(),
        f"{name} does not take its attention from Transformers' registry",
    )
    rotary = set(_rope_types(getattr(config, "rope_parameters", None)))
    require(
        not rotary & LOOKS_AT_ALL_POSITIONS,
        f"{name} has rotary positions of type {', '.join(sorted(rotary & LOOKS_AT_ALL_POSITIONS))}: "
        "the longest request of a batch would change all the others'",
    )
    register()
    own, probe = model.config._attn_implementation, _Probe()  # noqa: SLF001 (no public reader)
    model.set_attn_implementation(NAME)
    try:
        device = model.get_input_embeddings().weight.device
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        model(
            input_ids=zero, position_ids=zero, attention_mask=zero.int()[None, None],
            use_cache=False, ddtree=probe,
        )  # fmt: skip
        layers = _require_served(name, config, probe.layers)
    except BaseException:
        model.set_attn_implementation(own)
        raise
    return layers


def _require_served(name: str, config: Any, found: dict[int, Layer]) -> tuple[Layer, ...]:
    """Refuse what the pool cannot hold or the kernels cannot compute."""
    count = int(config.num_hidden_layers)
    missing = sorted(set(range(count)) - set(found))
    require(
        not missing,
        f"{name}: layer {missing[0] if missing else ''} does not attend through Transformers' registry "
        f"({len(missing)} of {count} layers do not)",
    )
    layers = tuple(found[i] for i in range(count))
    kinds = getattr(config, "layer_types", None) or (None,) * count
    for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        who = f"{name}: layer {i} ({layer.name})"
        require(
            layer.value_dim == layer.head_dim,
            f"{who} has keys of {layer.head_dim} and values of {layer.value_dim} numbers a head; "
            "the pool holds heads of one size",
        )
        require(
            layer.head_dim in HEAD_DIMS,
            f"{who} has a head_dim of {layer.head_dim}; the kernels serve {HEAD_DIMS}",
        )
        require(
            (layer.kv_heads, layer.head_dim) == (layers[0].kv_heads, layers[0].head_dim),
            f"{who} has {layer.kv_heads} KV heads of {layer.head_dim}, layer 0 has "
            f"{layers[0].kv_heads} of {layers[0].head_dim}; the pools must be alike",
        )
        require(
            kind is None or (kind == "sliding_attention") == (layer.window is not None),
            f"{who} is of type {kind} and hands its attention function the window {layer.window}",
        )
    return layers


def _rope_types(parameters: Any) -> Iterator[str]:
    """Every ``rope_type`` of the configuration, which may hold one for each type of layer."""
    if isinstance(parameters, dict):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for inner in parameters.values():
            yield from _rope_types(inner)

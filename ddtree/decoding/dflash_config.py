"""The configuration of a DFlash checkpoint: what the draft model depends on, checked."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.spec.contracts import BlockSize
from ddtree.spec.errors import InputError, require

ARCHITECTURE = "DFlashDraftModel"
"""What ``architectures`` says in published checkpoints; their successors add parts of their own."""


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
                what this model does not do (other architectures and activations, scaled RoPE,
                sliding layers).
        """
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the drafter's config {path}: {error}") from error
        own = raw.get("dflash_config") or {}
        fields = {k: v for k, v in [*raw.items(), *own.items()] if v is not None}
        fields["rope_theta"] = _rope_theta(raw)
        if {"hidden_size", "num_attention_heads"} <= {*raw}:
            fields.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
        if "target_layer_ids" not in fields and {"num_target_layers", "num_hidden_layers"} <= {
            *raw
        }:
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
    kinds = sorted(set(raw.get("architectures") or ()) - {ARCHITECTURE})
    require(not kinds, f"drafter of architecture {', '.join(kinds)}: only {ARCHITECTURE}")
    require(not raw.get("is_causal"), "drafter with a causal block: only full attention inside it")

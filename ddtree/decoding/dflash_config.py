"""The configuration of a DFlash checkpoint: what the draft model depends on, checked."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from sys import float_info
from typing import Any, cast

from ddtree.spec.contracts import BlockSize
from ddtree.spec.errors import InputError, given, require

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
            InputError: the file is missing or broken, a field is missing or of another type, or the config
                asks for what this model does not do (other architectures and activations, scaled RoPE,
                sliding layers).
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the drafter's config {path}: {error}") from error
        require(
            isinstance(raw, dict),
            f"the drafter's config {path} holds {given(raw)}; expected a JSON object",
        )
        fields = _typed(raw, path)
        _refuse_unknown_kinds(fields, path)
        if "hidden_size" in fields and "num_attention_heads" in fields:
            fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
        if "num_target_layers" in fields and "num_hidden_layers" in fields:
            spread = spread_layers(fields["num_target_layers"], fields["num_hidden_layers"])
            fields.setdefault("target_layer_ids", spread)
        names = cls.__dataclass_fields__
        missing = [n for n in names if n not in fields and not hasattr(cls, n)]
        # Transformers takes 10,000, engines 1,000,000: drafts would be worse, and nobody would know why
        why = "; give the RoPE base that it was trained with" if "rope_theta" in missing else ""
        require(not missing, f"the drafter's config {path} lacks {', '.join(missing)}{why}")
        config = cls(**{n: fields[n] for n in names if n in fields})
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        require(
            heads % kv_heads == 0,
            f"{path}: num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}",
        )
        require(
            config.head_dim % 2 == 0, f"{path}: head_dim is {config.head_dim}; RoPE pairs halves"
        )
        return config


def spread_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The target layers that a checkpoint without a list of its own reads: evenly spread."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def _typed(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields that matter here, each of its type; those that are null are absent.

    Raises:
        InputError: one is not.
    """
    own = _table(raw, "dflash_config", path)
    rope = _table(raw, "rope_parameters", path) or _table(raw, "rope_scaling", path)
    rope = {
        "rope_type": rope.get("rope_type", rope.get("type")),
        "rope_theta": rope.get("rope_theta"),
    }
    present = [(k, v) for table in (raw, own, rope) for k, v in table.items() if v is not None]
    fields = {name: value for name, value in present if name in _FIELDS}
    for name, value in fields.items():
        is_right, wanted = _FIELDS[name]
        require(is_right(value), f"{path}: {name} is {_shown(value)}; expected {wanted}")
    for name in ("rope_theta", "rms_norm_eps"):
        if name in fields:
            fields[name] = float(fields[name])
    if "target_layer_ids" in fields:
        fields["target_layer_ids"] = tuple(fields["target_layer_ids"])
    return fields


def _table(raw: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    """An object inside the config; empty where there is none."""
    table = raw.get(name)
    require(
        table is None or isinstance(table, dict),
        f"{path}: {name} is {_shown(table)}; expected a JSON object",
    )
    return table or {}


def _shown(value: object) -> str:
    """A value as JSON writes it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    # compared, not converted: a whole number may be larger than any float
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(cast("float", value)) <= float_info.max


def _is_list_of(value: object, is_one: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


MOST_SHOWN = 60
"""Characters of a value in a message."""
MOST = 2**20
"""Of a size: products of three are numbers of elements."""
_Kind = tuple[Callable[[Any], bool], str]
_SIZE: _Kind = (lambda v: _is_int(v, 1, MOST), f"a whole number from 1 to {MOST}")
_NUMBER: _Kind = (_is_number, "a finite number")
_ABOVE_0: _Kind = (lambda v: _is_number(v) and v > 0, "a finite number above 0")
_BOOL: _Kind = (lambda v: isinstance(v, bool), "true or false")
_TEXT: _Kind = (lambda v: isinstance(v, str), "a string")
_TEXTS: _Kind = (lambda v: _is_list_of(v, _TEXT[0]), "a list of strings")
_ID: _Kind = (lambda v: _is_int(v, 0, 2**31 - 1), "a whole number from 0 on")
_IDS: _Kind = (
    lambda v: _is_list_of(v, _ID[0]) and len(v) > 0,
    "a list of whole numbers from 0 on, one at least",
)
_FIELDS: dict[str, _Kind] = {
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _SIZE,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE,
    "head_dim": _SIZE,
    "rms_norm_eps": _ABOVE_0,
    "rope_theta": _ABOVE_0,
    "block_size": _SIZE,
    "mask_token_id": _ID,
    "target_layer_ids": _IDS,
    "num_target_layers": _SIZE,
    "attention_bias": _BOOL,
    "input_embedding_scale": _NUMBER,
    "output_multiplier": _NUMBER,
    "final_logit_softcapping": _NUMBER,
    "rope_type": _TEXT,
    "layer_types": _TEXTS,
    "hidden_act": _TEXT,
    "architectures": _TEXTS,
    "is_causal": _BOOL,
}
"""Each field's type, and how it is told."""


def _refuse_unknown_kinds(fields: dict[str, Any], path: Path) -> None:
    rope = fields.get("rope_type", "default")
    require(rope == "default", f"{path}: RoPE of type {rope!r}: only 'default' is supported")
    kinds = sorted({*fields.get("layer_types", ())} - {"full_attention"})
    require(not kinds, f"{path}: layers of type {', '.join(kinds)}: only full_attention")
    act = fields.get("hidden_act", "silu")
    require(act == "silu", f"{path}: activation {act!r}: only 'silu' is supported")
    kinds = sorted({*fields.get("architectures", ())} - {ARCHITECTURE})
    require(not kinds, f"{path}: architecture {', '.join(kinds)}: only {ARCHITECTURE}")
    require(not fields.get("is_causal"), f"{path}: a causal block: only full attention inside it")

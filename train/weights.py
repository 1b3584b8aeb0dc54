"""A drafter's folder in the published layout: config.json and weights in bf16, split into small files."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from train.files import write_bytes, write_json

MOST_BYTES = 15 * 2**20
"""Of one file."""


def write_drafter(folder: Path, model: DFlashModel, *, most_bytes: int = MOST_BYTES) -> list[Path]:
    """Write ``config.json`` and the weights in bf16.

    One file where they fit, else numbered ones with ``model.safetensors.index.json``, as Transformers does.
    Files of an earlier writing that no longer belong are removed, last.

    Args:
        folder: made where it is missing.
        model: the draft model, in any dtype.
        most_bytes: of one file; a tensor that is larger has a file of its own.

    Returns:
        The files with weights.
    """
    weights = {k: v.detach().to("cpu", torch.bfloat16) for k, v in model.state_dict().items()}
    parts = _parts(weights, most_bytes)
    count = len(parts)
    names = [
        "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
        for i in range(1, count + 1)
    ]
    for name, part in zip(names, parts, strict=True):
        write_bytes(folder / name, save(part, metadata={"format": "pt"}))
    index = folder / "model.safetensors.index.json"
    if count > 1:
        where = {k: name for name, part in zip(names, parts, strict=True) for k in part}
        size = sum(t.numel() * t.element_size() for t in weights.values())
        write_json(
            index, {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        )
    else:
        index.unlink(missing_ok=True)
    write_json(folder / "config.json", config_json(model.config))
    for path in folder.glob("model*.safetensors"):
        if path.name not in names:
            path.unlink()
    return [folder / name for name in names]


def _parts(weights: dict[str, Tensor], most_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors in order, a new part where one would grow too large."""
    parts, room = list[dict[str, Tensor]](), 0
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if not parts or size > room:
            parts.append({})
            room = most_bytes
        parts[-1][name] = tensor
        room -= size
    return parts


def config_json(config: DFlashConfig) -> dict[str, Any]:
    """The published form of a configuration."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.attention_bias,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "block_size": int(config.block_size),
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
    }

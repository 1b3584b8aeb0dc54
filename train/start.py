"""The draft model before training: as near to the target's last layers as its layout allows."""

from typing import Any, cast

import torch
from torch import Tensor

from ddtree.decoding.dflash_config import DFlashConfig, spread_layers
from ddtree.decoding.dflash_model import DFlashModel, Layer
from ddtree.spec.contracts import BlockSize
from ddtree.spec.errors import require
from train.llama import Llama


def config_for(model: Any, *, layers: int, block_size: int, mask_token_id: int) -> DFlashConfig:
    """A drafter as wide as the target, which reads as many of its layers as it has itself."""
    config = model.config
    depth = int(config.num_hidden_layers)
    require(1 <= layers <= depth, f"a drafter of {layers} layers; the target has {depth}")
    require(
        0 <= mask_token_id < config.vocab_size,
        f"mask token {mask_token_id} outside the vocabulary of {config.vocab_size}",
    )
    return DFlashConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        block_size=BlockSize(block_size),
        mask_token_id=mask_token_id,
        target_layer_ids=spread_layers(depth, layers),
        num_target_layers=depth,
    )


@torch.no_grad()
def from_last_layers(config: DFlashConfig, model: Any, sample: Tensor) -> DFlashModel:
    """Copy the target's last layers and its final norm.

    The drafter normalises queries and keys, the target does not: the norms' weights are the lengths that the
    target's heads have on ``sample [B, S]``, a few texts. The context starts as the last of the layers read.
    """
    drafter = DFlashModel(config).to(model.device)
    last = model.model.layers[-config.num_hidden_layers :]
    for mine, its in zip(drafter.layers, last, strict=True):
        layer = cast("Layer", mine)
        own = {k: v.float() for k, v in its.state_dict().items()}
        layer.load_state_dict({**layer.state_dict(), **own})
    drafter.norm.weight.copy_(model.model.norm.weight)
    drafter.hidden_norm.weight.copy_(
        torch.stack([layer.input_layernorm.weight.float() for layer in last]).mean(0)
    )
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -config.hidden_size :].fill_diagonal_(1.0)
    _scale_heads(drafter, Llama(model), sample)
    return drafter


def _scale_heads(drafter: DFlashModel, llama: Llama, sample: Tensor) -> None:
    """Set the norms of queries and keys to the root mean square of the target's heads."""
    depth, count = len(llama.layers), drafter.config.num_hidden_layers
    for i, mine in enumerate(drafter.layers):
        layer, below = cast("Layer", mine), depth - count + i - 1
        if below < 0:
            continue  # the first layer reads embeddings, not another layer's output
        _, states = llama.read(sample, (below,))
        assert states is not None
        x = layer.input_layernorm(states.float())
        attention = layer.self_attn
        for project, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        ):
            heads = project(x).unflatten(-1, (-1, attention.head_dim))
            norm.weight.fill_(float(heads.square().mean(-1).sqrt().mean()))

"""What a Transformers model must be able to do to verify trees, checked before it runs."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree.spec.errors import InputError, of_kind, require


def require_tree_target(model: Any, *, windows: bool = False) -> None:
    """Refuse a model that cannot verify a tree, naming what stands in the way.

    A tree pass needs, in every layer, KV entries that can be masked, gathered and dropped one by
    one, and positions that the caller gives.

    Args:
        model: a Transformers causal LM.
        windows: whether the target attends in sliding windows by position, on a cache that keeps
            every entry.

    Raises:
        InputError: an encoder-decoder, recurrent or linear-attention layers, a sliding-window cache
            (it drops entries) unless ``windows``, ALiBi, or a forward without ``position_ids``.
    """
    from transformers import DynamicCache

    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    require(not model.config.is_encoder_decoder, f"{name} is an encoder-decoder model")
    named = [*(getattr(config, "layer_types", None) or ())]
    named += getattr(config, "attention_layers", None) or ()  # GPT-Neo's name: global, local
    allowed = ("full_attention", "sliding_attention") if windows else ("full_attention",)
    kinds = sorted(set(named) - {*allowed, "global"})
    require(
        not kinds,
        f"{name} has layers of type {', '.join(kinds)} (the first is layer "
        f"{next((i for i, kind in enumerate(named) if kind in kinds), None)}): they drop or mix KV "
        "entries by row, which a tree's rejected and sibling nodes do not allow; only "
        f"{' and '.join(allowed)} {'do' if windows else 'does'}",
    )
    require(
        not getattr(model, "_is_stateful", False),
        f"{name} keeps a recurrent state, which cannot drop the rejected nodes of a tree",
    )
    layers = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers})
    require(
        windows or layers in ([], ["DynamicLayer"]),
        f"{name} caches in {', '.join(layers)}: only a plain DynamicLayer keeps every entry",
    )
    require(
        not getattr(config, "alibi", False), f"{name} uses ALiBi: positions by row, not by depth"
    )
    inputs = inspect.signature(model.forward).parameters
    for needed in ("attention_mask", "position_ids"):
        require(needed in inputs, f"{name}.forward takes no {needed}")
    require(model.get_output_embeddings() is not None, f"{name} has no output head")


def context_size(model: Any, max_context: int | None) -> int:
    """How many KV entries a target holds: ``max_context``, or else what the configuration allows.

    Raises:
        InputError: no context length is known, or more than the model has positions for.
    """
    limit = context_of(model)
    size = max_context if max_context is not None else limit
    if size is None:
        raise InputError("the model's configuration gives no context length: give max_context")
    require(size >= 1, f"max_context must be at least 1, got {size}")
    require(
        limit is None or size <= limit,
        f"max_context {size} is more than the model's {limit} positions",
    )
    return size


def require_tokens(token_ids: Tensor, vocab_size: int, held: int, room: int) -> None:
    """Refuse a prompt of no tokens, of tokens outside the vocabulary, or of more than fit.

    Args:
        token_ids: ``[n]`` tokens to append.
        vocab_size: tokens of the vocabulary.
        held: KV entries that are there already.
        room: KV entries that there can be.

    Raises:
        InputError: with the numbers.
    """
    require(
        isinstance(token_ids, Tensor),
        f"token_ids is {of_kind(token_ids)}; expected a tensor of token ids",
    )
    require(token_ids.numel() >= 1, "the prompt is empty; at least one token is needed")
    low, high = int(token_ids.min()), int(token_ids.max())
    require(
        low >= 0 and high < vocab_size,
        f"token ids reach from {low} to {high}; the vocabulary has {vocab_size}",
    )
    total = held + token_ids.numel()
    require(
        total <= room,
        f"{held} entries and {token_ids.numel()} tokens more make {total}; the context holds {room}",
    )


def require_layers(layer_ids: Sequence[int], num_layers: int) -> None:
    """Refuse layers that a model does not have.

    Raises:
        InputError: with their numbers.
    """
    bad = [i for i in layer_ids if not 0 <= i < num_layers]
    require(not bad, f"feature layers {bad} outside the model's {num_layers} layers")


def context_of(model: Any) -> int | None:
    """The most tokens that the model's configuration allows, or None where it does not say."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


class Caller:
    """Calls a model's forward by the argument names of the installed Transformers."""

    def __init__(self, model: Any) -> None:
        """Look up the names once: the cache argument was renamed, not every model skips rows."""
        inputs = inspect.signature(model.forward).parameters
        self.model = model
        self.cache_name = "cache" if "cache" in inputs else "past_key_values"
        self.skips_rows = "logits_to_keep" in inputs

    def __call__(
        self, token_ids: Tensor, cache: Any, *, keep: int | Tensor, **inputs: Any
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Run ``token_ids [n]``, extending ``cache``.

        Args:
            token_ids: ``[n]`` tokens.
            cache: the Transformers cache, changed in place.
            keep: rows whose logits are wanted: how many of the last ones, or their indices.
            inputs: further arguments of the model's forward.

        Returns:
            The logits ``[rows, vocab]`` of those rows, and the hidden states if asked for.
        """
        inputs[self.cache_name] = cache
        if self.skips_rows:
            inputs["logits_to_keep"] = keep
        out = self.model(input_ids=token_ids[None], use_cache=True, **inputs)
        logits: Tensor = out.logits[0]
        if not self.skips_rows:
            logits = logits[-keep:] if isinstance(keep, int) else logits[keep]
        return logits, out.hidden_states


def lowest(dtype: torch.dtype) -> float:
    """The number that an additive mask holds where attending is not allowed."""
    return torch.finfo(dtype).min

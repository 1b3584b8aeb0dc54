"""Tiny randomly initialised models with attention of several shapes."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 31
CONTEXT = 128

# tied to no pad token: a padding row holds token 0, which is a token like any other
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    # grouped query heads
    "llama": lambda: LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **COMMON,
    ),
    # normalised q and k, heads wider than hidden_size / heads
    "qwen3": lambda: Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        **COMMON,
    ),
    # one KV head for all query heads
    "gemma": lambda: GemmaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        **COMMON,
    ),
    # a KV head for each query head, rotary on a part of each head
    "gpt_neox": lambda: GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        **COMMON,
    ),
    # learned positions: a position by row instead of by depth would change every embedding
    "gpt2": lambda: GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        **{k: v for k, v in COMMON.items() if k != "max_position_embeddings"},
    ),
}

WIDE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **COMMON,
}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
PAGED = {
    # heads as wide as the kernels serve, windows shorter than a tree's prefix and depth together
    "llama-64": lambda: LlamaConfig(**WIDE, head_dim=64),
    "qwen2-64": lambda: Qwen2Config(**{**WIDE, "hidden_size": 128, **TWO_HEADS}),
    "qwen3-128": lambda: Qwen3Config(**{**WIDE, **TWO_HEADS}, head_dim=128),
    # queries, keys and values are slices of one tensor
    "phi3-64": lambda: Phi3Config(**{**WIDE, "hidden_size": 128, **TWO_HEADS}),
    "mistral-window": lambda: MistralConfig(**WIDE, head_dim=64, sliding_window=6),
    # full and sliding layers by turns, scores capped, a scale of its own
    "gemma2-softcap": lambda: Gemma2Config(
        **WIDE, head_dim=64, sliding_window=5, attn_logit_softcapping=3.0, query_pre_attn_scalar=9
    ),
    # sinks, sliding and full layers by turns
    "gpt-oss-sinks": lambda: GptOssConfig(
        **WIDE,
        head_dim=64,
        sliding_window=7,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


def tiny_model(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A model of the kind with weights large enough that the text depends on the whole context."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config((CONFIGS | PAGED)[kind]())
    for name, weight in model.named_parameters():
        if weight.ndim > 1 or "sinks" in name:
            torch.nn.init.normal_(weight, std=0.5 if "embed" in name else 0.3)
    return model.to(dtype).eval()


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Random tokens ``[length]``."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def write_tiny(folder: Path) -> Path:
    """A Llama of three layers with random weights, and a tokenizer whose tokens are a, b, c, ..."""
    tiny_model("llama", torch.float32).save_pretrained(folder)
    words = {chr(ord("a") + i): i for i in range(26)} | {str(i): 26 + i for i in range(VOCAB - 26)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))  # noqa: S106 (a token of text)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder

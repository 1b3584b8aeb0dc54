"""Checkpoints that people have: the published configurations in small, with their targets.

Widths are small; what the two configurations must agree on is the published one: layers, vocabulary,
mask token, the layers read, the block size, heads a KV head, and where each form keeps its fields.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ddtree.decoding import DFlashDrafter, HFTarget, autoregressive, compare, generate
from ddtree.spec import InputError

WIDTH: dict[str, Any] = {"hidden_size": 32, "head_dim": 16, "rms_norm_eps": 1e-6}
QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "pad_token_id": None,
    "eos_token_id": 151645,
    **WIDTH,
}
MASK = 151669
PUBLISHED: dict[str, tuple[Any, dict[str, Any]]] = {
    # every field flat but DFlash's own two
    "Qwen3-4B-DFlash-b16": (
        lambda: transformers.Qwen3Config(
            num_hidden_layers=36,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=96,
            tie_word_embeddings=True,
            **QWEN,
        ),
        {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": False,
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": 16,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 9, 17, 25, 33]},
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "intermediate_size": 96,
            "layer_types": ["full_attention"] * 5,
            "max_window_layers": 5,
            "model_type": "qwen3",
            "num_attention_heads": 8,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "num_target_layers": 36,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            **QWEN,
        },
    ),
    # as newer Transformers write it: RoPE in a table of its own, the block size nested
    "Qwen3-8B-DFlash-b16": (
        lambda: transformers.Qwen3Config(
            num_hidden_layers=36,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=96,
            tie_word_embeddings=False,
            **QWEN,
        ),
        {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": MASK,
                "target_layer_ids": [1, 9, 17, 25, 33],
            },
            "intermediate_size": 96,
            "num_attention_heads": 8,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "num_target_layers": 36,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
            **QWEN,
        },
    ),
    # a target of experts, 48 layers; the layers read are not listed
    "Qwen3-Coder-30B-A3B-DFlash": (
        lambda: transformers.Qwen3MoeConfig(
            num_hidden_layers=48,
            num_attention_heads=8,
            num_key_value_heads=1,
            intermediate_size=96,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            **QWEN,
        ),
        {
            "architectures": ["DFlashDraftModel"],
            "block_size": 16,
            "dflash_config": {"mask_token_id": MASK},
            "intermediate_size": 96,
            "num_attention_heads": 8,
            "num_hidden_layers": 8,
            "num_key_value_heads": 1,
            "num_target_layers": 48,
            "rope_theta": 10000000,
            **QWEN,
        },
    ),
    # the drafter of a Llama: the mask token is one of its reserved ones
    "LLaMA3.1-8B-Instruct-DFlash-UltraChat": (
        lambda: transformers.LlamaConfig(
            vocab_size=128256,
            num_hidden_layers=32,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=96,
            max_position_embeddings=131072,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            **WIDTH,
        ),
        {
            "architectures": ["DFlashDraftModel"],
            "block_size": 10,
            "dflash_config": {"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]},
            "intermediate_size": 96,
            "num_attention_heads": 8,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "num_target_layers": 32,
            "rope_theta": 500000.0,
            "vocab_size": 128256,
            **WIDTH,
        },
    ),
}


def published_state(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights in bf16 under the published keys, written out here rather than asked of a model."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    read = len(config["dflash_config"].get("target_layer_ids", range(config["num_hidden_layers"])))
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, read * hidden),
        "hidden_norm": (hidden,),
        "norm": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"layers.{layer}.{name}"] = shape
    generator = torch.Generator().manual_seed(1)
    return {
        f"{name}.weight": (
            torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        ).bfloat16()
        for name, shape in shapes.items()
    }


def write(folder: Path, config: dict[str, Any], parts: int = 1) -> None:
    """Write a checkpoint, its weights whole or in parts with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = published_state(config)
    if parts == 1:
        save_file(state, folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        keys = list(state)[part::parts]
        save_file({key: state[key] for key in keys}, folder / name)
        weight_map |= dict.fromkeys(keys, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def target_of(config: Any) -> HFTarget:
    """A target with random weights in float32."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return HFTarget(model.float(), max_context=256)


@pytest.mark.parametrize(("name", "parts"), list(zip(PUBLISHED, (1, 3, 2, 1), strict=True)))
def test_a_published_checkpoint_drafts_for_its_target(
    name: str, parts: int, tmp_path: Path
) -> None:
    """It loads by folder, whole or split, and the text is the target's; the mask token may be in it."""
    config, raw = PUBLISHED[name]
    write(tmp_path, raw, parts)
    target = target_of(config())
    drafter = DFlashDrafter.load(tmp_path, target)
    state = published_state(raw)
    assert torch.equal(drafter.model.fc.weight, state["fc.weight"].float())
    assert len(drafter.target_layer_ids) == raw["num_hidden_layers"]
    mask = drafter.model.config.mask_token_id
    prompt = torch.tensor([5, mask, 17, mask, 99, 100])
    plain = autoregressive(target, prompt, max_new_tokens=6)
    for budget in (7, 32):
        found = generate(target, drafter, prompt, budget=budget, max_new_tokens=6)
        assert compare(found, plain).equal
        assert found.rounds[0].num_nodes == budget + 1


def test_the_layers_read_where_none_are_listed() -> None:
    """They are spread from the second to the fourth last, as the published code does."""
    from ddtree.decoding.dflash_config import spread_layers

    assert spread_layers(48, 8) == (1, 7, 14, 20, 26, 32, 39, 45)
    assert spread_layers(48, 5) == (1, 12, 23, 34, 45)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """A target of one published configuration."""
    return target_of(PUBLISHED["Qwen3-4B-DFlash-b16"][0]())


def test_a_checkpoint_loads_by_hub_name(
    tmp_path: Path, target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the local cache alone; a name that is not there is told, with what to run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--z-lab--Qwen3-4B-DFlash-b16"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    write(home / "snapshots" / ("0" * 40), PUBLISHED["Qwen3-4B-DFlash-b16"][1])
    assert DFlashDrafter.load("z-lab/Qwen3-4B-DFlash-b16", target).block_size == 16
    with pytest.raises(InputError, match="hf download z-lab/none"):
        DFlashDrafter.load("z-lab/none", target)
    with pytest.raises(InputError, match="'not a name' is neither 'embedded' nor a folder nor"):
        DFlashDrafter.load("not a name", target)


def test_split_weights_that_do_not_add_up_are_refused(tmp_path: Path, target: HFTarget) -> None:
    """A part that is missing, a tensor in two parts, an index that is none."""
    write(tmp_path, PUBLISHED["Qwen3-4B-DFlash-b16"][1], parts=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(InputError, match=r"names model-00002-of-00002\.safetensors; the folder l"):
        DFlashDrafter.load(tmp_path, target)
    second.write_bytes(first.read_bytes())
    with pytest.raises(InputError, match=r"00002\.safetensors holds fc\.weight, .*another file"):
        DFlashDrafter.load(tmp_path, target)
    second.write_bytes(kept)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"fc.weight": "../model.safetensors"}}')
    with pytest.raises(InputError, match=r"names \.\./model\.safetensors"):
        DFlashDrafter.load(tmp_path, target)
    index.write_text("[]")
    with pytest.raises(InputError, match="cannot read the index"):
        DFlashDrafter.load(tmp_path, target)


def test_a_successor_is_refused_by_name(tmp_path: Path, target: HFTarget) -> None:
    """A checkpoint of another architecture is told apart before its tensors are."""
    raw = {**PUBLISHED["Qwen3-4B-DFlash-b16"][1], "architectures": ["DFlash2DraftModel"]}
    write(tmp_path, raw)
    with pytest.raises(InputError, match="architecture DFlash2DraftModel: only DFlashDraftModel"):
        DFlashDrafter.load(tmp_path, target)

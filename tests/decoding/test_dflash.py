"""The DFlash drafter against an independent computation, and its checkpoint's checks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from ddtree.decoding import DFlashDrafter, HFTarget, autoregressive, generate
from ddtree.decoding.dflash_config import DFlashConfig, spread_layers
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.spec import InputError
from tests.decoding.tiny import VOCAB, prompt, tiny_model

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "num_target_layers": 3,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """A tiny target of three layers, float32."""
    return HFTarget(tiny_model("llama", torch.float32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with random weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    model = DFlashModel(DFlashConfig.from_json(tmp_path / "config.json"))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.ndim == 1 else 0.0, std=0.3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def _expected(folder: Path, target: HFTarget, tokens: torch.Tensor, features: torch.Tensor) -> Any:
    """One pass over the whole context at once, from Transformers' Qwen3 parts and a softmax."""
    weights = load_file(folder / "model.safetensors")
    config = Qwen3Config(
        hidden_size=32,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    block = torch.full((6,), 7)
    block[0] = tokens[-1]
    x = target.model.get_input_embeddings()(block)

    def norm(name: str, value: torch.Tensor) -> torch.Tensor:
        layer = qwen3.Qwen3RMSNorm(value.shape[-1], eps=1e-6)
        layer.weight.data = weights[name + ".weight"]
        out: torch.Tensor = layer(value)
        return out

    context = norm("hidden_norm", features @ weights["fc.weight"].T)
    positions = torch.arange(len(context) + 6)[None]
    cos, sin = qwen3.Qwen3RotaryEmbedding(config)(x, positions)
    for i in range(2):
        name = f"layers.{i}."
        w = {k.removeprefix(name): v for k, v in weights.items() if k.startswith(name)}
        h = norm(name + "input_layernorm", x)
        both = torch.cat([context, h])
        q = norm(name + "self_attn.q_norm", (h @ w["self_attn.q_proj.weight"].T).view(6, 4, 16))
        k = norm(name + "self_attn.k_norm", (both @ w["self_attn.k_proj.weight"].T).view(-1, 2, 16))
        v = (both @ w["self_attn.v_proj.weight"].T).view(-1, 2, 16)
        q, k = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
        q = qwen3.apply_rotary_pos_emb(q, q, cos[:, -6:], sin[:, -6:])[0][0]
        k = qwen3.apply_rotary_pos_emb(k, k, cos, sin)[0][0]
        heads = []
        for head in range(4):
            scores = (q[head] @ k[head // 2].T) / 16**0.5
            heads.append(scores.softmax(-1) @ v[:, head // 2])
        x = x + torch.cat(heads, dim=-1) @ w["self_attn.o_proj.weight"].T
        h = norm(name + "post_attention_layernorm", x)
        gate = torch.nn.functional.silu(h @ w["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    logits = target.model.get_output_embeddings()(norm("norm", x)[1:])
    return torch.log_softmax(logits, -1)[None]


def test_drafts_equal_an_independent_computation(folder: Path, target: HFTarget) -> None:
    """Adding the context bit by bit gives what one pass over all of it gives."""
    drafter = DFlashDrafter.load(folder, target)
    tokens, features = prompt(21), torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        drafter.reset()
        for start, end in ((0, 9), (9, 10), (10, 14), (14, 20)):
            found = drafter.draft(tokens[: end + 1], features[start:end])
            with torch.no_grad():
                expected = _expected(folder, target, tokens[: end + 1], features[:end])
            assert found.shape == (1, 5, VOCAB)
            assert expected.std() > 0.1
            assert torch.allclose(found, expected, atol=1e-5)


def test_text_with_a_random_drafter_equals_plain_decoding(folder: Path, target: HFTarget) -> None:
    """However bad the drafter is, the text is the target's."""
    drafter = DFlashDrafter.load(folder, target)
    expected = autoregressive(target, prompt(9), max_new_tokens=30)
    for budget, topk in ((0, None), (7, 1), (16, 4), (63, None)):
        found = generate(target, drafter, prompt(9), budget=budget, topk=topk, max_new_tokens=30)
        assert found.token_ids == expected.token_ids
    assert max(found.acceptance_histogram) > 1


def test_own_fields_are_read_from_both_places(tmp_path: Path) -> None:
    """The block size may stand in dflash_config or beside it; missing layer ids are spread."""
    raw = {k: v for k, v in CONFIG.items() if k != "block_size"}
    raw["dflash_config"] = {"mask_token_id": 7, "block_size": 16}
    raw["num_target_layers"] = 36
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = DFlashConfig.from_json(tmp_path / "config.json")
    assert (config.block_size, config.target_layer_ids) == (16, (1, 33))
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(28, 1) == (14,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "lacks mask_token_id"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "RoPE of type 'yarn'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "type sliding_attention"),
        ({"num_target_layers": 30}, "made for 30 layers, the target has 3"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 3]}}, r"\[3\] outside"),
        ({"dflash_config": {"mask_token_id": 31, "target_layer_ids": [0, 2]}}, "mask_token_id 31"),
        ({"rope_theta": None}, "lacks rope_theta; give the RoPE base that it was trained with"),
        ({"rope_theta": None, "rope_scaling": {"rope_type": "default"}}, "lacks rope_theta"),
        (
            {"num_attention_heads": 3},
            "num_attention_heads is 3, no multiple of num_key_value_heads, 2",
        ),
        ({"head_dim": 15}, "head_dim is 15; RoPE pairs halves"),
        ({"intermediate_size": 50}, r"has shape \[48, 32\], the config makes it \[50, 32\]"),
    ],
)
def test_config_that_does_not_fit_is_refused(
    folder: Path, target: HFTarget, change: dict[str, Any], message: str
) -> None:
    """A config that lacks a field, asks for more than is done or misfits is refused, with why."""
    raw = {k: v for k, v in {**CONFIG, **change}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=message):
        DFlashDrafter.load(folder, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": "16"}, 'block_size is "16"; expected a whole number from 1 to 1048576'),
        ({"block_size": 0}, "block_size is 0; expected"),
        ({"block_size": True}, "block_size is true; expected"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0; expected"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776; expected"),
        ({"num_target_layers": [3]}, r"num_target_layers is \[3\]; expected"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; expected a finite number above 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; expected"),
        ({"rope_theta": float("nan")}, "rope_theta is NaN; expected"),
        ({"rope_theta": 10**400}, r"rope_theta is 1000.*\.\.\.; expected"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, 'rope_theta is "1e6"; expected'),
        ({"rope_scaling": ["yarn"]}, r'rope_scaling is \["yarn"\]; expected a JSON object'),
        ({"dflash_config": 7}, "dflash_config is 7; expected a JSON object"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id is -1; expected"),
        ({"target_layer_ids": []}, "target_layer_ids is "),
        ({"layer_types": "full_attention"}, 'layer_types is "full_attention"; expected a list of'),
        ({"architectures": [None]}, r"architectures is \[null\]; expected a list of strings"),
        ({"hidden_act": 1}, "hidden_act is 1; expected a string"),
        ({"attention_bias": "no"}, 'attention_bias is "no"; expected true or false'),
        (
            {"final_logit_softcapping": {}},
            "final_logit_softcapping is {}; expected a finite number",
        ),
    ],
)
def test_fields_of_another_type_are_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """The file, the field, what it holds and what is wanted."""
    path, own = tmp_path / "config.json", CONFIG["dflash_config"]
    if "target_layer_ids" in change:
        change, own = {"dflash_config": {**own, **change}}, {}
    path.write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(InputError, match=f"^{path}: {message}"):
        DFlashConfig.from_json(path)


@pytest.mark.parametrize("text", ["[]", "7", "null", '"config"'])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    """The file is named."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"{path} holds .*; expected a JSON object"):
        DFlashConfig.from_json(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "1 of the 2048 numbers of fc.weight are NaN or infinite"),
        (float("-inf"), "1 of the 2048 numbers"),
        (None, "fc.weight is of int64; expected float32, bfloat16"),
    ],
)
def test_weights_that_no_draft_can_be_made_with_are_refused(
    folder: Path, target: HFTarget, value: float | None, message: str
) -> None:
    """At loading, with the file and the tensor."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    if value is None:
        weights["fc.weight"] = weights["fc.weight"].long()
    else:
        weights["fc.weight"][3, 5] = value
    save_file(weights, file)
    with pytest.raises(InputError, match=f"^{file}: {message}"):
        DFlashDrafter.load(folder, target)


def test_missing_and_surplus_tensors_are_listed(folder: Path, target: HFTarget) -> None:
    """Every missing and every surplus tensor is named."""
    weights = load_file(folder / "model.safetensors")
    del weights["fc.weight"]
    weights["candidate_selector.hidden_projection.weight"] = torch.zeros(1)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"missing: fc\.weight; surplus: candidate_selector\.hid"):
        DFlashDrafter.load(folder, target)


def test_broken_files_are_refused(folder: Path, target: HFTarget) -> None:
    """Missing and damaged files are refused by name."""
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"cannot read the drafter's weights .*model\.safetensors"):
        DFlashDrafter.load(folder, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"holds no \.safetensors"):
        DFlashDrafter.load(folder, target)
    with pytest.raises(InputError, match="no drafter folder"):
        DFlashDrafter.load(folder / "none", target)


def test_features_that_leave_a_gap_are_refused(folder: Path, target: HFTarget) -> None:
    """The context must reach up to the root, entry for entry."""
    drafter = DFlashDrafter.load(folder, target)
    with pytest.raises(InputError, match="holds 0 entries and got 7 more; the prefix has 8"):
        drafter.draft(prompt(9), torch.zeros(7, 64))

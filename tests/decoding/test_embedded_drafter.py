"""The drafter that comes with ddtree: whole, as its card says, and worth its passes on held-out prompts."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ddtree
from ddtree.decoding import DFlashDrafter, HFTarget, autoregressive, compare, generate, load_target
from ddtree.decoding.dflash import checkpoint_folder
from ddtree.spec import InputError
from tests.decoding.tiny import tiny_model
from train.card import write_card
from train.evaluate import length_of

FOLDER = checkpoint_folder("embedded")
SHA256 = {
    "model-00001-of-00003.safetensors": "a7462407857f",
    "model-00002-of-00003.safetensors": "5d81e8e38f16",
    "model-00003-of-00003.safetensors": "a51b94336fc2",
}


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """The embedded target and its tokenizer."""
    return load_target("embedded")


def test_the_weights_are_those_that_were_measured() -> None:
    """Nothing stands between the evaluation and what users get: three files of bf16, 40 MB at most."""
    files = {file.name: file.read_bytes() for file in FOLDER.glob("*.safetensors")}
    assert {name: hashlib.sha256(data).hexdigest()[:12] for name, data in files.items()} == SHA256
    assert sum(map(len, files.values())) < 40e6
    for file in FOLDER.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_card_is_made_of_the_evaluation(tmp_path: Path) -> None:
    """The model card holds the numbers of the files beside it, which reach the lengths aimed at."""
    run, result = (
        json.loads((FOLDER / name).read_text()) for name in ("training.json", "evaluation.json")
    )
    write_card(tmp_path, run, result)
    assert (tmp_path / "README.md").read_text() == (FOLDER / "README.md").read_text()
    greedy, sampled = (length_of(result, "tree", 32, temperature) for temperature in (0.0, 0.8))
    assert greedy is not None and sampled is not None and min(greedy, sampled) >= 3.0


@pytest.mark.parametrize(
    ("prompt", "least"), [('def fibonacci(n):\n    """', 2.5), ("Water boils at a lower", 1.8)]
)
def test_it_drafts_what_the_target_says(loaded: tuple[Any, Any], prompt: str, least: float) -> None:
    """Trees of 32 nodes give the text of plain decoding, several tokens a round."""
    model, tokenizer = loaded
    ids = torch.tensor(tokenizer(prompt)["input_ids"])
    target = HFTarget(model)
    drafter = DFlashDrafter.load("embedded", target)
    assert (drafter.block_size, drafter.target_layer_ids) == (16, (1, 8, 14, 20, 27))
    found = generate(target, drafter, ids, budget=32, max_new_tokens=24)
    expected = autoregressive(HFTarget(model), ids, max_new_tokens=24)
    compared = compare(found, expected, target.dtype)
    assert compared.equal or compared.is_tie
    assert found.tokens_per_round >= least


def test_by_name_in_python(loaded: tuple[Any, Any]) -> None:
    """``drafter="embedded"`` serves ``ddtree.generate``, in a batch too."""
    model, tokenizer = loaded
    prompts = ["1, 2, 3, 4,", "The cat sat on the"]
    found = ddtree.generate(
        model, tokenizer, prompts, drafter="embedded", budget=8, max_new_tokens=6
    )
    plain = ddtree.generate(model, tokenizer, prompts, budget=0, max_new_tokens=6)
    assert [one.text for one in found] == [one.text for one in plain]


def test_another_target_is_refused() -> None:
    """With both numbers; nothing is drafted by a model that was made for another target."""
    with pytest.raises(InputError, match="the drafter's hidden size is 576, the target's is"):
        DFlashDrafter.load("embedded", HFTarget(tiny_model("llama", torch.float32)))


def test_it_is_no_target() -> None:
    """A checkpoint has no tokenizer: the one that Transformers makes up for it is not taken for one."""
    with pytest.raises(InputError, match=f"target folder {FOLDER} has no tokenizer"):
        load_target(str(FOLDER))

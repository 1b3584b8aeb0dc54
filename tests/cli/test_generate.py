"""``ddtree generate`` with a small real model."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ddtree import decoding
from ddtree.cli import models
from ddtree.cli.generate import Streamer, bars
from ddtree.cli.models import load_pair
from ddtree.decoding import Comparison
from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from tests.cli.conftest import Run
from tests.decoding.test_dflash import CONFIG
from tests.decoding.tiny import tiny_model

PROMPT = "a b c d a b c d a b"


def test_text_statistics_and_equality(run: Run, tiny_folder: Path) -> None:
    """The text, tokens a round, the histogram, and that plain decoding gives the same."""
    result = run("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 24)
    assert result.exit_code == 0, result.stderr
    assert "24 tokens in" in result.stdout
    assert "compared with plain decoding: equal, token for token" in result.stdout
    assert "█" in result.stdout
    assert "loading the target" in result.stderr


def test_json_is_json_alone_and_adds_up(run: Run, tiny_folder: Path) -> None:
    """Rounds, histogram and tokens agree with each other."""
    args = (PROMPT, "--target", tiny_folder, "--max-new-tokens", 24, "--debug", "--json")
    told = json.loads(run("generate", *args).stdout)
    assert told["compared"]["equal"] is True
    assert len(told["token_ids"]) == 24
    assert 1 + sum(len(one["new_token_ids"]) for one in told["rounds"]) == 24
    histogram = told["acceptance_histogram"]
    assert sum(histogram.values()) == told["verify_passes"]
    assert 1 + sum(int(tokens) * rounds for tokens, rounds in histogram.items()) == 24
    assert told["verify_passes"] == len(told["rounds"]) < 23


def test_sampling_repeats_and_says_why_it_is_not_compared(run: Run, tiny_folder: Path) -> None:
    """One seed, one text; the report says why there is no comparison."""
    args = (PROMPT, "--target", tiny_folder, "--temperature", 0.8, "--top-k", 5, "--json")
    first, second = (json.loads(run("generate", *args, "--seed", 1).stdout) for _ in range(2))
    other = json.loads(run("generate", *args, "--seed", 2).stdout)
    assert first["token_ids"] == second["token_ids"] != other["token_ids"]
    assert first["compared"] is None
    assert "sampled text" in first["why_not_compared"]


def test_no_compare(run: Run, tiny_folder: Path) -> None:
    """The baseline is left out, and that is said."""
    args = (PROMPT, "--target", tiny_folder, "--max-new-tokens", 4, "--no-compare")
    assert "no: not asked for (--no-compare)" in run("generate", *args).stdout


def test_chat_without_a_template_is_refused(run: Run, tiny_folder: Path) -> None:
    """The next step is named."""
    result = run("generate", PROMPT, "--target", tiny_folder, "--chat")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr
    assert "--raw" in result.stderr


def test_an_empty_prompt_is_refused(run: Run, tiny_folder: Path) -> None:
    """A model cannot start from nothing."""
    result = run("generate", "", "--target", tiny_folder)
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr


def test_more_tokens_than_the_context_are_refused(run: Run, tiny_folder: Path) -> None:
    """Both numbers are given, and no text is begun."""
    result = run("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 1000)
    assert result.exit_code == 2
    assert "10 prompt tokens and 1000 new ones make 1010" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(("is_tie", "code"), [(True, 0), (False, 1)])
def test_a_text_that_differs_is_told(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, is_tie: bool, code: int
) -> None:
    """A tie is reported with its margins and passes; another difference fails."""
    monkeypatch.setattr(
        decoding, "compare", lambda *_: Comparison(False, 3, 1, 2, 1e-5, 2e-5, is_tie)
    )
    result = run("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 4)
    assert result.exit_code == code
    assert ("tie below float error" if is_tie else "DIFFERENT") in result.stdout
    assert "1e-05 and 2e-05" in result.stdout


def test_the_stream_holds_back_half_a_character(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of one character may come as several tokens: it is printed when it is whole."""

    class Bytes:
        def text(self, token_ids: list[int]) -> str:
            return bytes(token_ids).decode(errors="replace")

    pair: Any = Bytes()
    stream = Streamer(pair, quiet=False)
    a, b, c = "é!".encode()
    stream([a])
    assert capsys.readouterr().out == ""
    stream([b])
    assert capsys.readouterr().out == "é"
    stream([c])
    stream.end()
    assert capsys.readouterr().out == "!\n"


def test_bars_are_in_proportion() -> None:
    """The most frequent count fills the bar, and each count is told."""
    assert bars({1: 2, 3: 4}) == ["  1 token     2 " + "█" * 20, "  3 tokens    4 " + "█" * 40]


@pytest.mark.parametrize("count", range(1, 7))
def test_sums_agree_wherever_the_text_is_cut(run: Run, tiny_folder: Path, count: int) -> None:
    """A round cut by the limit counts what it gave; one token is one token."""
    args = ("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", count)
    told = json.loads(run(*args, "--json").stdout)
    histogram = told["acceptance_histogram"]
    assert 1 + sum(int(tokens) * rounds for tokens, rounds in histogram.items()) == count
    passes = told["verify_passes"]
    cut = sum(one["num_accepted"] - len(one["new_token_ids"]) for one in told["rounds"])
    said = run(*args, "--no-compare").stdout
    assert f"{count} token{'s' * (count > 1)} in {passes} verify pass{'es' * (passes != 1)}" in said
    assert (" tokens a round (the first" in said) == (passes > 0)
    assert ("past the end of the text" in said) == (cut > 0)


def test_an_interruption_tells_what_there_is(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third verify pass: the text and the statistics so far, exit code 130."""
    good = load_pair(str(tiny_folder), "ngram", 8)
    args = ("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 24)
    whole = json.loads(run(*args, "--json").stdout)
    left = 0

    def forward(*given: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return passes(*given)

    passes = good.target.forward
    monkeypatch.setattr(good.target, "forward", forward)
    monkeypatch.setattr(models, "load_pair", lambda *_: good)
    left = 2
    result = run(*args)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "in 2 verify passes" in result.stdout
    assert "compared with plain decoding: no: interrupted" in result.stdout
    left = 2
    told = json.loads(run(*args, "--json").stdout)
    assert (told["interrupted"], whole["interrupted"]) == (True, False)
    assert told["token_ids"] == whole["token_ids"][: len(told["token_ids"])]
    assert len(told["rounds"]) == 2


@pytest.fixture
def dflash_folder(tmp_path: Path) -> Path:
    """A DFlash checkpoint with random weights for the small target; block size 6."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    model = DFlashModel(DFlashConfig.from_json(tmp_path / "config.json"))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def test_a_dflash_checkpoint_drafts(run: Run, tiny_folder: Path, dflash_folder: Path) -> None:
    """Its own block size bounds the depth, and the text equals plain decoding."""
    args = (PROMPT, "--target", tiny_folder, "--draft", dflash_folder, "--max-new-tokens", 12)
    told = json.loads(run("generate", *args, "--json").stdout)
    assert told["compared"]["equal"] is True
    assert max(one["num_accepted"] for one in told["rounds"]) <= 6


def test_another_block_size_than_the_checkpoints_is_refused(
    run: Run, tiny_folder: Path, dflash_folder: Path
) -> None:
    """Both numbers, and what to do."""
    args = (PROMPT, "--target", tiny_folder, "--draft", dflash_folder, "--block-size", 8)
    result = run("generate", *args)
    assert result.exit_code == 2
    assert "--block-size is 8, the checkpoint was trained with 6" in result.stderr
    assert "leave --block-size out" in result.stderr


def test_debug_stops_the_founding_bug(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target with the bug: exit code 1, the invariant and the cause on stderr, no traceback."""
    good = load_pair(str(tiny_folder), "ngram", 8, "reference")
    target: Any = decoding.FoundingBug(good.target)
    monkeypatch.setattr(models, "load_pair", lambda *_: replace(good, target=target))
    result = run("generate", PROMPT, "--target", tiny_folder, "--debug", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "error: mask_len is broken in request 0" in result.stderr
    assert "width 8; this call's q_len is 17" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def wide_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's tokenizer with a Llama whose heads are as wide as the kernels serve."""
    folder = tmp_path_factory.mktemp("wide-llama")
    tiny_model("llama-64", torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(tiny_folder / name, folder / name)
    return folder


def test_the_paged_attention_gives_the_dense_text(run: Run, wide_folder: Path) -> None:
    """Verified by the kernels, compared with plain decoding, and equal to what dense gives."""
    args = ("generate", PROMPT, "--target", wide_folder, "--max-new-tokens", 8, "--budget", 5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    paged = json.loads(run(*args, "--attention", "paged", "--device", device, "--json").stdout)
    dense = json.loads(run(*args, "--json").stdout)
    assert paged["compared"]["equal"] is True
    assert paged["token_ids"] == dense["token_ids"]
    assert 0 < paged["verify_passes"] < 7


def test_what_the_paged_attention_cannot_serve_is_refused(run: Run, tiny_folder: Path) -> None:
    """Too narrow heads, an unknown word and an unknown device: exit code 2, with the reason."""
    for options, reason in {
        ("--attention", "paged"): "layer 0 (LlamaAttention) has a head_dim of 8",
        ("--attention", "flash"): "'flash' is not one of auto, dense, paged",
        ("--device", "toaster"): "--device 'toaster'",
    }.items():
        result = run("generate", PROMPT, "--target", tiny_folder, *options)
        assert result.exit_code == 2
        assert reason in result.stderr

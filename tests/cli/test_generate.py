"""``ddtree generate`` with a small real model."""

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copy
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import transformers
from safetensors.torch import save_file
from typer.testing import Result

from ddtree import decoding
from ddtree.cli import models
from ddtree.cli.generate import Written, bars
from ddtree.cli.models import Pair, load_pair
from ddtree.decoding import Comparison, DFlashDrafter, Stops
from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.decoding.tuning_results import key_of, key_of_names
from ddtree.spec import InputError
from tests.cli.conftest import Run
from tests.decoding.test_dflash import CONFIG
from tests.decoding.tiny import tiny_model

PROMPT = "a b c d a b c d a b"


class Passes:
    """The verify passes of the pair that the command loads: ``left`` more run, then one raises."""

    def __init__(self, pair: Pair, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward, self.error, self.left = pair.plain.forward, error, 0
        monkeypatch.setattr(pair.plain, "forward", self)
        monkeypatch.setattr(models, "load_pair", lambda *_: pair)

    def __call__(self, *given: Any) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.forward(*given)


def told(result: Result) -> Any:
    """The one request of a JSON report."""
    assert result.stdout, (result.exit_code, result.stderr, result.exception)
    (one,) = json.loads(result.stdout)["requests"]
    return one


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
    one = told(run("generate", *args))
    assert one["compared"]["equal"] is True
    assert len(one["token_ids"]) == 24
    assert one["finish_reason"] == "length"
    assert 1 + sum(len(round_["new_token_ids"]) for round_ in one["rounds"]) == 24
    histogram = one["acceptance_histogram"]
    assert sum(histogram.values()) == one["verify_passes"]
    assert 1 + sum(int(tokens) * rounds for tokens, rounds in histogram.items()) == 24
    assert one["verify_passes"] == len(one["rounds"]) < 23


def test_sampling_repeats_and_says_why_it_is_not_compared(run: Run, tiny_folder: Path) -> None:
    """One seed, one text; the report says why there is no comparison."""
    args = (PROMPT, "--target", tiny_folder, "--temperature", 0.8, "--top-k", 5, "--json")
    first, second = (told(run("generate", *args, "--seed", 1)) for _ in range(2))
    other = told(run("generate", *args, "--seed", 2))
    assert first["token_ids"] == second["token_ids"] != other["token_ids"]
    assert first["compared"] is None
    assert "sampled text" in first["why_not_compared"]


def test_no_compare(run: Run, tiny_folder: Path) -> None:
    """The baseline is left out, and that is said."""
    args = (PROMPT, "--target", tiny_folder, "--max-new-tokens", 4, "--no-compare")
    assert (
        "not compared with plain decoding: not asked for (--no-compare)"
        in run("generate", *args).stdout
    )


def test_chat_without_a_template_is_refused(run: Run, tiny_folder: Path) -> None:
    """The next step is named."""
    result = run("generate", PROMPT, "--target", tiny_folder, "--chat")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr
    assert "--raw" in result.stderr


def test_an_empty_prompt_is_refused(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model cannot start from nothing; of several it is told which, before the weights are loaded."""
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    result = run("generate", "", "--target", tiny_folder)
    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr
    result = run("generate", "a", "", "--target", tiny_folder)
    assert result.exit_code == 2
    assert "error: prompt 1 is empty: it has no token\nnext: give some text" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "\udcff bad"), "it is not UTF-8: character 0 is the byte 0xff"),
        (("generate", "a", "b\udce9"), "number 1 is not UTF-8: character 1 is the byte 0xe9"),
        (("generate", "a", "--stop", "\udcff"), "it is not UTF-8: character 0 is the byte 0xff"),
        (("generate", "a", "--stop", ""), "a stop string is empty"),
        (("show", "--prompt", "\udcff"), "it is not UTF-8: character 0 is the byte 0xff"),
        (("dump", "x.npz", "--prompt", "\udcff"), "it is not UTF-8: character 0 is the byte 0xff"),
    ],
)
def test_texts_that_are_none_are_refused_before_loading(
    run: Run, args: tuple[str, ...], message: str
) -> None:
    """Bytes of the command line that are not UTF-8 come as half surrogate pairs; exit code 2."""
    result = run(*args, "--target", "embedded")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())
    assert "loading" not in result.stderr


def test_more_tokens_than_the_context_are_refused(run: Run, tiny_folder: Path) -> None:
    """Both numbers are given, and no text is begun."""
    result = run("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 1000)
    assert result.exit_code == 2
    assert "10 prompt tokens and 1000 new ones make 1010" in result.stderr
    assert "next: --max-new-tokens 118 fits; or shorten the prompt" in result.stderr
    assert result.stdout == ""
    result = run("generate", "a", PROMPT, "--target", tiny_folder, "--max-new-tokens", 120)
    assert "error: prompt 1: 10 prompt tokens and 120 new ones" in result.stderr
    assert "next: --max-new-tokens 118 fits beside the longest prompt; or sh" in result.stderr
    fits = run("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 118, "--no-compare")
    assert fits.exit_code == 0, fits.stderr
    long = run("generate", "a " * 128, "--target", tiny_folder)
    assert "next: shorten the prompt" in long.stderr


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

    def decode(token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    written = Written("", torch.tensor([0]), Stops(decode=decode), is_shown=True)
    a, b, c = "é!".encode()
    written([a], None)
    assert capsys.readouterr().out == ""
    written([b], None)
    assert capsys.readouterr().out == "é"
    written([c], None)
    written.end()
    written.end()
    assert capsys.readouterr().out == "!\n"
    assert written.text == "é!"


def test_bars_are_in_proportion() -> None:
    """The most frequent count fills the bar, and each count is told."""
    assert bars({1: 2, 3: 4}) == ["  1 token     2 " + "█" * 20, "  3 tokens    4 " + "█" * 40]


@pytest.mark.parametrize("count", range(1, 7))
def test_sums_agree_wherever_the_text_is_cut(run: Run, tiny_folder: Path, count: int) -> None:
    """A round cut by the limit counts what it gave; one token is one token."""
    args = ("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", count)
    one = told(run(*args, "--json"))
    histogram = one["acceptance_histogram"]
    assert 1 + sum(int(tokens) * rounds for tokens, rounds in histogram.items()) == count
    passes = one["verify_passes"]
    cut = sum(each["num_accepted"] - len(each["new_token_ids"]) for each in one["rounds"])
    said = run(*args, "--no-compare").stdout
    assert f"{count} token{'s' * (count > 1)} in {passes} verify pass{'es' * (passes != 1)}" in said
    assert (" tokens a round (the first" in said) == (passes > 0)
    assert ("past the end of the text" in said) == (cut > 0)


def test_an_interruption_tells_what_there_is(
    run: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third verify pass: the text and the statistics so far, exit code 130."""
    good = load_pair(str(tiny_folder), "ngram", 8)
    args = ("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 24)
    whole = told(run(*args, "--json"))
    passes = Passes(good, KeyboardInterrupt(), monkeypatch)
    passes.left = 2
    result = run(*args)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "\ninterrupted\n" in result.output  # the text's line has ended
    assert "in 2 verify passes" in result.stdout
    assert "not compared with plain decoding: interrupted" in result.stdout
    passes.left = 2
    result = run(*args, "--json")
    assert json.loads(result.stdout)["interrupted"] is True
    one = told(result)
    assert one["token_ids"] == whole["token_ids"][: len(one["token_ids"])]
    assert len(one["rounds"]) == 2
    assert (one["finish_reason"], whole["finish_reason"]) == (None, "length")
    assert one["rounds"] == [
        {**each, "draft_seconds": ANY, "verify_seconds": ANY} for each in whole["rounds"][:2]
    ]
    page = tmp_path / "trace.html"
    for passes.left in (2, 0):
        result = run(*args, "--trace", page)
        assert (result.exit_code, f"{page}" in result.stderr) == (130, True)
        assert "ended by the interruption" in page.read_text()
        page.unlink()
    monkeypatch.setattr(good.plain, "prefill", passes)
    result = run(*args, "--trace", page)
    assert result.exit_code == 130
    assert f"{page} is not written: there is no token yet" in result.stderr


def test_an_error_in_a_text_begins_a_line(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text that has come stands whole above it."""
    good = load_pair(str(tiny_folder), "ngram", 8)
    Passes(good, InputError("nothing more"), monkeypatch).left = 2
    result = run("generate", PROMPT, "--target", tiny_folder)
    assert result.exit_code == 2
    assert result.stdout.strip() and result.stdout.endswith("\n")
    assert f"{result.stdout}error: nothing more\n" in result.output


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
    one = told(run("generate", *args, "--json"))
    assert one["compared"]["equal"] is True
    assert max(each["num_accepted"] for each in one["rounds"]) <= 6


def test_another_block_size_than_the_checkpoints_is_refused(
    run: Run, tiny_folder: Path, dflash_folder: Path
) -> None:
    """Both numbers, and what to do."""
    args = (PROMPT, "--target", tiny_folder, "--draft", dflash_folder, "--block-size", 8)
    result = run("generate", *args)
    assert result.exit_code == 2
    assert "--block-size is 8, the checkpoint was trained with 6" in result.stderr
    assert "leave --block-size out" in result.stderr
    assert "loading" not in result.stderr


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("embeded", "did you mean --draft embedded?"),
        ("n-gram", "did you mean --draft ngram?"),
        ("/nonexistent/x", "(config.json and *.safetensors)"),
        ("a/b/c", "(config.json and *.safetensors)"),
        ("a/b", "or fetch this one: hf download a/b"),
    ],
)
def test_a_drafter_that_is_none_has_a_next_step(run: Run, name: str, step: str) -> None:
    """Before anything is loaded: what was meant, what can be given, what can be fetched."""
    result = run("generate", "x", "--draft", name)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --draft {name!r} is neither")
    assert result.stderr.endswith(f"{step}\n")


def test_a_damaged_drafter_is_told_where_to_get_anew(
    run: Run, tiny_folder: Path, dflash_folder: Path
) -> None:
    """Its config before the target is loaded, its weights after."""
    args = ("generate", PROMPT, "--target", tiny_folder, "--draft", dflash_folder)
    (dflash_folder / "model.safetensors").write_bytes(b"damaged")
    result = run(*args)
    assert result.exit_code == 2
    assert "cannot read the drafter's weights" in result.stderr
    assert "next: if the checkpoint is damaged, copy or download its folder anew" in result.stderr
    (dflash_folder / "config.json").write_text("[]")
    result = run(*args)
    assert (result.exit_code, "loading" in result.stderr) == (2, False)
    assert "expected a JSON object\nnext: if the checkpoint is damaged" in result.stderr


def test_debug_stops_the_founding_bug(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target with the bug: exit code 1, the invariant and the cause on stderr, no traceback."""
    good = load_pair(str(tiny_folder), "ngram", 8, "reference")
    bugged = decoding.SeparateTargets([decoding.FoundingBug(good.plain)])
    monkeypatch.setattr(models, "load_pair", lambda *_: good)
    monkeypatch.setattr(models.Pair, "target", lambda *_: bugged)
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
    paged = told(run(*args, "--attention", "paged", "--device", device, "--json"))
    dense = told(run(*args, "--json"))
    assert paged["compared"]["equal"] is True
    assert paged["token_ids"] == dense["token_ids"]
    assert 0 < paged["verify_passes"] < 7


def test_what_the_paged_attention_cannot_serve_is_refused(run: Run, tiny_folder: Path) -> None:
    """Too narrow heads, an unknown word and an unknown device: exit code 2, with the reason."""
    for options, reason in {
        ("--attention", "paged"): "layer 0 (LlamaAttention) has a head_dim of 8",
        ("--attention", "flash"): "'flash' is not one of auto, dense, paged",
        (
            "--device",
            "toaster",
        ): "--device 'toaster' is not one that ddtree knows\nnext: use cpu, cuda",
    }.items():
        result = run("generate", PROMPT, "--target", tiny_folder, *options)
        assert result.exit_code == 2
        assert reason in result.stderr


SEVERAL = (PROMPT, "e f", "z y x z y x z", "q")


def test_several_prompts_are_decoded_at_once(run: Run, tiny_folder: Path) -> None:
    """Each has the text that it has alone; a table tells of each, and plain decoding agrees."""
    args = ("--target", tiny_folder, "--max-new-tokens", 10)
    together = json.loads(run("generate", *SEVERAL, *args, "--batch-size", 3, "--json").stdout)
    assert [one["prompt"] for one in together["requests"]] == list(SEVERAL)
    for prompt, one in zip(SEVERAL, together["requests"], strict=True):
        assert one["compared"]["equal"] is True
        alone = told(run("generate", prompt, *args, "--no-compare", "--json"))
        assert one["text"] == alone["text"]
        assert one["token_ids"] == alone["token_ids"]
    result = run("generate", *SEVERAL, *args)
    assert result.exit_code == 0, result.stderr
    for one in together["requests"]:
        assert one["text"] in result.stdout
    assert result.stdout.count("equal") == 4
    assert result.stdout.count("its length") == 4


def test_a_table_that_does_not_fit_is_lines(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 30 columns each request's numbers stand below each other, by name."""
    monkeypatch.setenv("COLUMNS", "30")
    args = ("--target", tiny_folder, "--max-new-tokens", 4, "--no-compare")
    lines = run("generate", "a b", "c", *args).stdout.splitlines()
    for line in ("#: 0", "prompt: a b", "#: 1", "prompt: c"):
        assert lines.count(line) == 1
    assert lines.count("tokens: 4") == lines.count("ended by: its length") == 2
    assert max(map(len, lines[:-2])) <= 80


def test_prompts_come_from_files(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    """One a line, or lines of JSON; arguments come first; a line that is none is named."""
    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("a b\n\nc d\n")
    objects.write_text('{"prompt": "a b", "id": 3}\n"c\\nd"\n')
    marked = tmp_path / "marked.txt"
    marked.write_bytes("\ufeffa\u2028b\r\n\r\nc d\r\n".encode())
    args = ("--target", tiny_folder, "--max-new-tokens", 2, "--no-compare", "--json")
    for given, expected in (
        ((lines,), ["a b", "c d"]),
        ((objects,), ["a b", "c\nd"]),
        ((lines, "e"), ["e", "a b", "c d"]),
        ((marked,), ["a\u2028b", "c d"]),
    ):
        report = json.loads(run("generate", "--prompts", *given, *args).stdout)
        assert [one["prompt"] for one in report["requests"]] == expected
    for text, reason in (
        ('"a"\n{"text": "b"}\n', "line 2: neither a string nor an object"),
        ("a b", "line 1: not JSON"),
        ('"a"\n"\\ud83d"', "line 2: it is not UTF-8: character 0 is half a surrogate pair, U+D83D"),
    ):
        objects.write_text(text)
        result = run("generate", "--prompts", objects, *args)
        assert (result.exit_code, result.stdout) == (2, "")
        assert reason in " ".join(result.stderr.split())
        assert 'next: give a JSON value a line, "text" or' in " ".join(result.stderr.split())
    lines.write_bytes(b"a\nb\n\xe9t\xe9\n")
    told = run("generate", "--prompts", lines, *args).stderr
    assert (
        f"{lines}, line 3: not UTF-8" in told and f"-f latin1 -t utf-8 {lines} > utf8.txt" in told
    )
    lines.write_text("\n")
    assert "there is no prompt" in run("generate", "--prompts", lines, *args).stderr
    assert run("generate", "--prompts", tmp_path / "none", *args).exit_code == 2


def test_stop_strings_end_the_text(run: Run, tiny_folder: Path) -> None:
    """The text is cut before the string, its tokens are kept, and plain decoding stops there too."""
    args = ("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 24, "--json")
    whole = told(run(*args))["text"]
    stop = whole[7:10]
    one = told(run(*args, "--stop", "zzzz", "--stop", stop))
    assert one["text"] == whole[: whole.index(stop)]
    assert len(one["token_ids"]) == whole.index(stop) + 3
    assert one["finish_reason"] == "stop_string"
    assert one["compared"]["equal"] is True
    assert run(*args, "--stop", "").exit_code == 2


def test_a_repetition_penalty_changes_both_decoders(run: Run, tiny_folder: Path) -> None:
    """Another text than without, equal to plain decoding with it."""
    args = ("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 24, "--json")
    with_it = told(run(*args, "--repetition-penalty", 1.5))
    assert with_it["compared"]["equal"] is True
    assert with_it["token_ids"] != told(run(*args))["token_ids"]
    assert run(*args, "--repetition-penalty", 0).exit_code == 2


def test_each_prompt_samples_with_its_own_seed(run: Run, tiny_folder: Path) -> None:
    """Prompt i of a batch has the text that it has alone with seed + i."""
    args = ("--target", tiny_folder, "--temperature", 0.9, "--max-new-tokens", 8, "--json")
    report = json.loads(run("generate", *SEVERAL, *args, "--seed", 5).stdout)
    for i, one in enumerate(report["requests"]):
        alone = told(run("generate", SEVERAL[i], *args, "--seed", 5 + i))
        assert one["token_ids"] == alone["token_ids"]


def test_a_wrong_command_line_leaves_nothing_to_the_next(run: Run, tiny_folder: Path) -> None:
    """After ``--json`` and an error the next report is whole, whenever the first one's rest is collected."""
    args = ("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 2, "--json")
    for _ in range(2):
        assert run(*args, "--no-such-option").exit_code == 2
        assert told(run(*args))["token_ids"]
        gc.collect()
        assert told(run(*args))["token_ids"]


def test_a_batch_that_is_interrupted_tells_of_each(
    run: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that were done, under way and waiting; exit code 130."""
    good = load_pair(str(tiny_folder), "ngram", 8)
    passes = Passes(good, KeyboardInterrupt(), monkeypatch)
    passes.left = 3
    args = ("generate", "q", "a b", "c", "--target", tiny_folder, "--max-new-tokens", 9)
    result = run(*args, "--batch-size", 2)
    assert result.exit_code == 130
    assert "not compared with plain decoding: interrupted" in result.stdout
    assert "the first token comes with the prompt, and is in no verify pass" in result.stdout
    passes.left = 3
    report = json.loads(run(*args, "--batch-size", 2, "--json").stdout)
    assert report["interrupted"] is True
    assert [bool(one["token_ids"]) for one in report["requests"]] == [True, True, False]


def test_weights_of_another_dtype(run: Run, tiny_folder: Path, dflash_folder: Path) -> None:
    """Target and drafter come in it; a word that is none is refused."""
    pair = load_pair(str(tiny_folder), str(dflash_folder), None, "dense", "cpu", "bfloat16")
    assert pair.plain.dtype == torch.bfloat16
    args = ("generate", PROMPT, "--target", tiny_folder, "--max-new-tokens", 3, "--no-compare")
    result = run(*args, "--draft", dflash_folder, "--dtype", "bfloat16", "--json")
    assert len(told(result)["token_ids"]) == 3
    assert "is not one of float32" in run(*args, "--dtype", "int8").stderr


def test_auto_is_the_trained_one_for_the_embedded_target(tiny_folder: Path) -> None:
    """Other targets, and a block size of one's own, take prompt lookup."""
    pair = load_pair("embedded", "auto", None)
    assert pair.draft == "embedded" and isinstance(pair.drafter, DFlashDrafter)
    known = key_of_names("embedded", "embedded", "cpu", "float32", "dense", 1, 8)
    assert known == key_of(pair.plain.model, "embedded", "dense", 1, 8)  # before it is loaded
    assert load_pair("embedded", "auto", 8).draft == "ngram"
    assert load_pair(str(tiny_folder), "auto", None).draft == "ngram"

"""``ddtree tune`` with a small real model, and ``ddtree generate --budget auto`` after it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree.decoding.tuning_results import Times, Tuning, store, stored
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tune_args(tiny_folder: Path, tmp_path: Path) -> tuple[object, ...]:
    """A quick tuning of the small model."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b c a b c a b\nz y z y z\n")
    options = ["--budgets", "2,5", "--topks", "1,all", "--max-new-tokens", "24", "--rounds", "2"]
    return ("tune", "--target", tiny_folder, "--prompts", prompts, *options)


def test_the_table_the_sentence_the_picture_and_the_stored_result(
    run: Run, tune_args: tuple[object, ...], tmp_path: Path
) -> None:
    """What a user sees: costs by q_len, tokens a round by topk, and which is best."""
    picture = tmp_path / "tuning.png"
    result = run(*tune_args, "--topks", "1,2,4,8,all", "--plot", picture)
    assert result.exit_code == 0, result.stderr
    for said in ("q_len", "verify", "even", "by", "tokens/s", "plain decoding: "):
        assert said in result.stdout
    assert result.stdout.count("topk ") >= 5
    assert "…" not in result.stdout  # every head can be read in 80 columns
    (tuning,) = stored()
    assert str(tuning) in result.stdout
    assert "stored for --budget auto" in result.stdout
    assert "timing rounds of q_len 6" in result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_too_few_new_tokens_are_refused_before_loading(
    run: Run, tune_args: tuple[object, ...]
) -> None:
    """A round is read off as many as the drafter's block has."""
    result = run(*tune_args, "--max-new-tokens", 7)
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --max-new-tokens is 7; a round is read off 8, the drafter's block size\n"
        "next: give 8 or more; several times as many say more\n"
    )
    assert "a round is read off 16" in run("tune", "--max-new-tokens", 8).stderr


def test_json_is_json_alone_and_can_be_read_back(run: Run, tune_args: tuple[object, ...]) -> None:
    """The report holds the whole result; with --no-store nothing is kept."""
    report = json.loads(run(*tune_args, "--no-store", "--json").stdout)
    assert stored() == []
    assert report["stored"] is None
    tuning = Tuning.from_json(report)
    assert [cost.budget for cost in tuning.costs] == [0, 2, 5]
    assert report["best"]["tokens_per_second"] == tuning.best.tokens_per_second
    assert len(report["rates"]) == 4


def test_auto_needs_a_result_and_uses_it(
    run: Run, tune_args: tuple[object, ...], tiny_folder: Path
) -> None:
    """Without one the command that makes it is named; with one the choice is told and used."""
    args = ("generate", "a b c a b c", "--target", tiny_folder, "--budget", "auto", "--json")
    result = run(*args, "--max-new-tokens", 12)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "needs measurements, and none are stored for" in result.stderr
    assert "loading" not in result.stderr
    said = " ".join(result.stderr.split())
    assert f"ddtree tune --target {tiny_folder} --batch-size 1" in said

    assert run(*tune_args).exit_code == 0
    (tuning,) = stored()
    busy = replace(tuning, plain=replace(tuning.plain, ms=Times(1.0, 1.0, 2.0)))
    store(busy)
    assert busy.noise in run(*args, "--max-new-tokens", 2).stderr
    store(tuning)
    result = run(*args, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.stderr
    assert f"budget auto: {tuning}" in result.stderr
    report = json.loads(result.stdout)
    assert (report["budget"], report["topk"]) == (tuning.best.budget, tuning.best.topk)
    (one,) = report["requests"]
    assert one["compared"]["equal"] is True
    assert max(stats["num_nodes"] for stats in one["rounds"]) <= tuning.best.budget + 1
    several = run(*args[:2], "e f", *args[2:], "--max-new-tokens", 4)
    assert "(measured at batch size 1)" in several.stderr


def test_another_drafter_or_dtype_is_another_result(
    run: Run, tune_args: tuple[object, ...], tiny_folder: Path
) -> None:
    """What was measured for one is not used for the other, and the other is named."""
    assert run(*tune_args).exit_code == 0
    args = ("generate", "a b", "--target", tiny_folder, "--budget", "auto", "--no-compare")
    for options in (("--block-size", 4), ("--dtype", "bfloat16")):
        result = run(*args, *options)
        assert result.exit_code == 2
        assert "there are some for" in result.stderr
        assert f"{options[0]} {options[1]} --batch-size 1" in " ".join(result.stderr.split())

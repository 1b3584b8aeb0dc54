"""Tuning: acceptance read off texts is decoding's own, what follows from it, results found again."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

import ddtree
from ddtree.cli.tune import _costs
from ddtree.decoding import DFlashDrafter, Drafter, HFTarget, NGramDrafter, autoregressive, generate
from ddtree.decoding.acceptance import Rounds, follow, rows_of_text
from ddtree.decoding.completion import NGRAM_BLOCK_SIZE
from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.decoding.tuning_results import (
    Accepted,
    Cost,
    Key,
    Plain,
    Times,
    Tuning,
    drafter_name,
    find,
    key_of,
    store,
    stored,
)
from ddtree.pictures.tuning import _costs as draw
from ddtree.spec import InputError
from ddtree.spec.sampling import Sampling
from tests.decoding.test_dflash import CONFIG
from tests.decoding.tiny import VOCAB, prompt, tiny_model

NEW = 45


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny target."""
    return tiny_model("llama", torch.float64)


class Letters:
    """A tokenizer whose tokens are the letters from a on."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        """The ids."""
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        """The text."""
        return "".join(chr(ord("a") + token) for token in token_ids)


def drafters(target: HFTarget, folder: Path) -> Iterator[Drafter]:
    """One without features and one with."""
    yield NGramDrafter(VOCAB, 5)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    drafter = DFlashModel(DFlashConfig.from_json(folder / "config.json"))
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    yield DFlashDrafter(drafter, target)


@pytest.mark.parametrize("sampling", [None, Sampling(0.7, seed=3)])
def test_rounds_read_off_a_text_are_those_of_decoding_it(
    model: Any, tmp_path: Path, sampling: Sampling | None
) -> None:
    """Of every budget and topk, round for round, greedy and sampled."""
    target, ids = HFTarget(model), prompt(9)
    text = autoregressive(target, ids, max_new_tokens=NEW, sampling=sampling).token_ids
    more = 0
    for drafter in drafters(target, tmp_path):
        topks = (1, 3, None)
        whole = torch.cat([ids, torch.tensor(text)])
        found = rows_of_text(target, drafter, whole, ids.numel(), budget=16, topks=topks)
        for topk in topks:
            for budget in (2, 16):
                made = generate(
                    target, drafter, ids, budget=budget, topk=topk, max_new_tokens=NEW,
                    sampling=sampling,
                )  # fmt: skip
                assert made.token_ids == text
                tokens = follow((found[topk] <= budget).sum(1).tolist())
                assert tokens == [stats.num_accepted for stats in made.rounds][: len(tokens)]
                assert len(tokens) >= len(made.rounds) - int(drafter.block_size)
                more += sum(count > 1 for count in tokens)
    assert more > 5  # drafts were accepted


def test_rounds_count_and_add() -> None:
    """Lengths and shares by depth, by hand."""
    rounds = Rounds.of([1, 3]) + Rounds.of([2, 2])
    assert (rounds.rounds, rounds.length) == (4, 2.0)
    assert rounds.by_depth == (0.75, 0.25)
    assert Rounds.of([]).by_depth == ()


def made(plain_rate: float = 10.0, **key: Any) -> Tuning:
    """A result with round numbers: at budgets 4 and 8 trees give 12 and 12.1 tokens a second, chains 9."""

    def times(ms: float) -> Times:
        return Times(ms, ms, ms)

    names = {"target": "t", "drafter": "d", "device": "c", "dtype": "float32", "attention": "dense"}
    return Tuning(
        key=Key(**{**names, "batch_size": 1, **key}),
        made="2026-01-01T00:00:00+00:00",
        versions={"torch": "2"},
        prompts=2,
        prefix_lens=(3, 9),
        new_tokens=20,
        temperature=0.0,
        horizon=2,
        plain=Plain(times(100.0), plain_rate, "one at a time"),
        costs=(
            Cost(0, 3, times(0.0), times(110.0)),
            Cost(4, 3, times(20.0), times(130.0)),
            Cost(8, 3, times(20.0), times(180.0)),
        ),
        accepted=(
            Accepted(4, 1, 9, 1.35, 1.0, 1.5, (0.3,)),
            Accepted(8, 1, 9, 1.8, 1.0, 2.0, (0.8,)),
            Accepted(4, None, 9, 1.8, 1.2, 3.0, (0.7, 0.1)),
            Accepted(8, None, 9, 2.42, 1.5, 2.5, (0.9, 0.52)),
        ),
    )


def test_the_recommendation_follows_from_costs_and_yields() -> None:
    """Of nearly equal rates the smaller budget's; the range is that of the prompts."""
    tuning = made()
    best = tuning.best
    assert (best.budget, best.topk) == (4, None)
    assert (best.tokens_per_second, best.lowest, best.highest) == pytest.approx((12, 8, 20))
    assert tuning.gain == pytest.approx(1.2)
    assert tuning.even_at(8) == pytest.approx(2.0)
    assert "budget 4, topk all: 12 tokens/s (8 to 20 by prompt) expected, 1.20 times" in str(tuning)
    eight = made(batch_size=8)
    assert eight.best.tokens_per_second == pytest.approx(96)
    assert eight.even_at(8) == pytest.approx(0.25)


def test_drafting_that_cannot_be_told_apart_is_in_verify() -> None:
    """Where the device drafts and verifies in one, the sum is all there is: kept, drawn and printed so."""
    apart = made()
    one = replace(
        apart,
        costs=tuple(
            replace(cost, draft_ms=None, verify_ms=Times(ms, ms, ms))
            for cost in apart.costs
            for ms in [cost.round_ms]
        ),
    )
    assert one.rates == apart.rates and one.best == apart.best
    assert Tuning.from_json(json.loads(json.dumps(one.as_json()))) == one
    table = Console(width=80)
    with table.capture() as said:
        table.print(_costs(one))
    assert said.get().count("in verify") == 3
    for found, labels in ((apart, ["verify", "draft"]), (one, ["draft and verify, in one"])):
        axes = Figure().subplots()
        draw(axes, found)
        assert [line.get_label() for line in axes.get_lines()][:-1] == labels


def test_plain_decoding_is_recommended_where_it_is_faster() -> None:
    """And it is said plainly, with the best tree beside it."""
    tuning = made(plain_rate=15.0)
    assert (tuning.best.budget, tuning.best.tokens_per_second) == (0, 15.0)
    assert str(tuning).startswith("plain decoding is faster here: 15 tokens/s; the best tree")
    assert "0.80 times as much" in str(tuning)


def test_a_recommendation_within_the_spread_says_so() -> None:
    """Of plain decoding's passes, or of the prompts; a clear one says nothing, nor does plain decoding."""
    tuning = made()
    assert tuning.doubt.startswith("plain decoding lies within the spread of the prompts")
    assert str(tuning).endswith(f"; {tuning.doubt}")
    passes = replace(tuning, plain=replace(tuning.plain, ms=Times(100.0, 80.0, 110.0)))
    assert passes.doubt == (
        "that lies within the spread of plain decoding, whose quicker passes (quartile) give 12.5 tokens/s"
    )
    assert passes.as_json()["doubt"] == passes.doubt
    clear = made(plain_rate=7.5)
    assert (clear.doubt, clear.as_json()["doubt"]) == ("", None)
    assert str(clear).endswith("1.60 times plain decoding (7.5 tokens/s)")
    assert made(plain_rate=15.0).doubt == ""


def test_a_busy_machine_is_told() -> None:
    """Quartiles far apart, or more rows that cost less: each is said with its numbers."""
    quiet = made()
    assert quiet.noise == "" and quiet.as_json()["noise"] is None
    spread = replace(quiet.costs[1], verify_ms=Times(130.0, 100.0, 151.0))
    noisy = replace(quiet, costs=(quiet.costs[0], spread, quiet.costs[2]))
    assert noisy.noise == (
        "this machine was busy while measuring; measure again: q_len 5 took 100.0 to 151.0 ms (quartiles)"
    )
    assert noisy.as_json()["noise"] == noisy.noise
    cheap = replace(quiet.costs[2], verify_ms=Times(100.0, 100.0, 100.0))
    noisy = replace(quiet, costs=(*quiet.costs[:2], cheap))
    assert noisy.noise.endswith("q_len 9 took 100.0 ms, less than q_len 5 with 130.0 ms")
    slow = replace(quiet, plain=replace(quiet.plain, ms=Times(100.0, 80.0, 130.0)))
    assert "plain decoding took 80.0 to 130.0 ms" in slow.noise


def test_a_stored_result_is_found_again(cache: Path) -> None:
    """As it was; by its whole key, the batch size nearest; foreign files are passed over."""
    one, eight = made(), made(batch_size=8)
    path = store(one)
    store(eight)
    store(replace(one, prompts=5))  # measured anew: the older one is gone
    (path.parent / "broken.json").write_text("{")
    (path.parent / "old.json").write_text('{"format": 0}')
    assert len(stored()) == 2
    assert find(one.key) == replace(one, prompts=5)
    assert find(replace(one.key, batch_size=6)) == eight
    for name in ("target", "drafter", "device", "dtype", "attention"):
        other: Any = {name: "other"}
        assert find(replace(one.key, **other)) is None
    assert path.is_relative_to(cache)
    assert (
        path.stat().st_mode == (path.parent / "old.json").stat().st_mode
    )  # any file's, by the umask


def test_tune_measures_stores_and_auto_uses_it(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Every budget is timed, acceptance covers every topk, and ``budget="auto"`` decodes with the best."""
    letters = Letters()
    with pytest.raises(InputError, match=r"none are stored for .*ddtree.tune\(model, tokenizer"):
        ddtree.generate(model, letters, "abcabc", budget="auto")
    told: list[tuple[int, int]] = []
    model.train()
    tuning = ddtree.tune(
        model, letters, ["abcabcab", "zyx"], budgets=(7, 2), topks=(1, None), max_new_tokens=40,
        rounds=4, on_progress=lambda done, most, _: told.append((done, most)),
    )  # fmt: skip
    assert model.training
    model.eval()
    assert [cost.budget for cost in tuning.costs] == [0, 2, 7]
    assert all(cost.rounds == 4 and cost.round_ms > 0 for cost in tuning.costs)
    assert {(each.budget, each.topk) for each in tuning.accepted} == {
        (2, 1), (7, 1), (2, None), (7, None),
    }  # fmt: skip
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    assert find(tuning.key) == tuning

    chosen = replace(tuning, plain=replace(tuning.plain, tokens_per_second=1e-6))
    store(chosen)
    caplog.set_level(logging.INFO, logger="ddtree")
    (tree,) = ddtree.generate(model, letters, "abcabc", budget="auto", max_new_tokens=20)
    assert tree.rounds[0].tree.token_ids.shape[1] == chosen.best.budget + 1
    assert str(chosen) in caplog.text
    store(replace(tuning, plain=replace(tuning.plain, tokens_per_second=1e9)))
    (plain,) = ddtree.generate(model, letters, "abcabc", budget="auto", max_new_tokens=20)
    assert plain.token_ids == tree.token_ids
    assert {stats.num_nodes for stats in plain.rounds} == {1}


@pytest.mark.parametrize("high", [1.0, 2.0])
def test_auto_warns_where_the_machine_was_busy(
    model: Any, caplog: pytest.LogCaptureFixture, high: float
) -> None:
    """As the command line does, in the words of the stored result; where it was quiet it says nothing."""
    quiet = replace(made(), key=key_of(model, "ngram", "dense", 1, NGRAM_BLOCK_SIZE))
    store(replace(quiet, plain=replace(quiet.plain, ms=Times(1.0, 1.0, high))))
    ddtree.generate(model, Letters(), "abcabc", budget="auto", max_new_tokens=2)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    busy = (
        "budget auto: this machine was busy while measuring; measure again: plain decoding took "
        "1.0 to 2.0 ms (quartiles)"
    )
    assert warned == ([busy] if high == 2.0 else [])


def test_tune_times_a_full_batch(model: Any) -> None:
    """All places are taken in the rounds that are timed, with fewer prompts than places too."""
    tuning = ddtree.tune(
        model, Letters(), "abcabcab", budgets=(3,), topks=(2,), batch_size=3, max_new_tokens=30,
        rounds=3, temperature=0.8,
    )  # fmt: skip
    assert tuning.key.batch_size == 3
    assert all(cost.rounds == 3 for cost in tuning.costs)  # an odd number is exact too
    rate, length = tuning.rates[0], tuning.accepted[0].tokens_per_round
    assert rate.tokens_per_second == pytest.approx(3e3 * length / tuning.cost(3).round_ms)


def test_bad_input_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets below 1, texts too short to read anything off, auto with a topk or a nameless drafter."""
    letters = Letters()
    model.train()
    with pytest.raises(InputError, match="budget is 0; the least is 1"):
        ddtree.tune(model, letters, "abc", budgets=(0,))
    assert model.training
    model.eval()
    with pytest.raises(InputError, match="prompt 1: token ids reach from 1000000"):
        ddtree.tune(model, letters, [letters("abc")["input_ids"], [10**6]])
    with pytest.raises(
        InputError, match="max_new_tokens is 7; a round is read off 8, the drafter's"
    ):
        ddtree.tune(model, letters, "abc", max_new_tokens=7)
    with monkeypatch.context() as patch:
        patch.setattr("ddtree.decoding.tuning.stop_ids_of", lambda _: range(VOCAB))
        with pytest.raises(InputError, match=r"no text has the 8 new .* \(the longest has 1\)"):
            ddtree.tune(model, letters, "abc", max_new_tokens=8)
    with pytest.raises(InputError, match="topk is 3; budget 'auto' chooses it"):
        ddtree.generate(model, letters, "abc", budget="auto", topk=3)
    drafter = NGramDrafter(VOCAB, 4)
    with pytest.raises(InputError, match="by the drafter's name"):
        ddtree.generate(model, letters, "abc", budget="auto", drafter=drafter)
    assert stored() == []


def test_a_drafter_trained_anew_is_another(tmp_path: Path) -> None:
    """New weights in the same folder have a name of their own; an equal folder keeps its name."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    name = drafter_name(tmp_path, 8)
    assert drafter_name(str(tmp_path), 8) == name
    weights.write_bytes(b"another")
    assert drafter_name(tmp_path, 8) != name

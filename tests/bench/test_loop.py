"""What the benchmarks of the loop make of their measurements, and the plain decoding they compare with."""

import gc
from typing import Any

import pytest
import torch

from bench.loop import beside, fastest, random_model, random_prompts, spread, summary, table
from bench.parts import HEAD, LENGTHS, PARTS, line
from bench.plain import Plain
from bench.plot import draw_loop, draw_parts
from ddtree.decoding import HFTarget, autoregressive
from ddtree.decoding.paged import PagedTarget
from tests.impl.cases import DEVICE

MACHINE = {"gpu": "a GPU", "torch": "2", "triton": "3", "transformers": "5"}


def row(method: str, batch: int, budget: int | None, speed: float) -> dict[str, Any]:
    """A measurement: a text of 11 tokens for each of three prompts, the last one taking half as long."""
    found = {
        "method": method, "batch": batch, "budget": budget, "tokens_per_second": speed,
        "ms_per_round": 1.0, "acceptance_length": 2.0,
    }  # fmt: skip
    if method == "official":
        return found | {"which_prompts": [0, 2]}
    seconds = 10 / speed
    waves = [1.2 * seconds, 1.2 * seconds, 0.6 * seconds]
    return found | {"seconds_of_waves": waves, "token_ids": [[1] * 11] * 3}


def test_the_fastest_of_several_runs_counts() -> None:
    """All their times are kept, and no run pays for the collector."""
    times, enabled = [3.0, 1.5, 2.0], []

    def run() -> dict[str, Any]:
        enabled.append(gc.isenabled())
        return {"seconds": times[len(enabled) - 1], "number": len(enabled)}

    assert fastest(run, 3) == {"seconds": 1.5, "number": 2, "seconds_of_runs": times}
    assert enabled == [False] * 3 and gc.isenabled()


def test_the_best_budget_is_held_to_the_best_of_the_others() -> None:
    """Speed-ups are taken from the fastest plain row of a batch, and from official rows on their prompts."""
    rows = [
        row("official", 1, 8, 50.0), row("official", 1, 16, 100.0), row("plain", 1, None, 200.0),
        row("ours", 1, 8, 300.0), row("ours", 1, 32, 500.0), row("plain", 8, None, 1000.0),
        row("ours", 8, 8, 900.0),
    ]  # fmt: skip
    for official in rows[:2]:
        official["beside"] = beside(rows, official["which_prompts"])
        # two texts in 1.2 + 0.6 of what one takes on average: a ninth faster than all three
        assert official["beside"]["plain"] == pytest.approx(200 / 0.9)
        assert official["beside"]["ours"] == pytest.approx({"8": 300 / 0.9, "32": 500 / 0.9})
    found = summary(rows)
    assert found["1"]["budget"] == 32
    assert found["1"]["times_plain"] == 2.5
    assert found["1"]["times_official"] == pytest.approx(5.0 / 0.9)
    assert found["1"]["official_prompts"] == 2
    assert found["8"]["times_plain"] == 0.9
    assert "times_official" not in found["8"]
    lines = table(rows).splitlines()
    assert len(lines) == 8 + 2  # a line more for each official row
    assert "on its 2 prompts: plain 222.2, ours 333.3 at this budget, 555.6 at 32" in lines[2]
    assert "ours nan at this budget" in lines[4]
    assert spread(3, 24) == [0, 8, 16]
    assert spread(24, 24) == list(range(24))
    draw_loop(
        {"rows": rows, "machine": MACHINE, "target": "t", "drafter": "d", "dtype": "bfloat16"}
    )


def test_a_speed_up_is_the_acceptance_length_over_what_a_round_costs() -> None:
    """A round of two plain steps pays from two tokens on."""
    us = {**dict.fromkeys(PARTS, 100.0), "round": 500.0, "plain": 250.0}
    of = {"prefix": 8, "budget": 4, "us": us}
    numbers = [float(word) for word in line(of).split()]
    assert len(numbers) == 2 + len(PARTS) + 3 + len(LENGTHS)
    assert numbers[-len(LENGTHS) - 1] == 2.0
    assert numbers[-len(LENGTHS) :] == [length / 2 for length in LENGTHS]
    assert len(HEAD) > 80
    draw_parts({"rows": [of], "machine": MACHINE, "size": "8b", "dtype": "bfloat16"})


def test_plain_steps_are_plain_decoding() -> None:
    """Two requests of different lengths side by side, their places given back."""
    model = random_model("tiny", torch.float32, DEVICE)
    prompts = random_prompts(13, 2)
    target = PagedTarget(model, max_batch=2, max_context=16)
    found = Plain(target).decode(prompts, 3)
    for ids, tokens in zip(prompts, found.token_ids, strict=True):
        assert tokens == list(autoregressive(HFTarget(model), ids, max_new_tokens=3).token_ids)
    assert target.num_free_pages == 32

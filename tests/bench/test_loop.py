"""What the benchmarks of the loop make of their measurements, and the plain decoding they compare with."""

from typing import Any

import torch

from bench.loop import random_model, random_prompts, summary, table
from bench.parts import HEAD, LENGTHS, PARTS, line
from bench.plain import Plain
from bench.plot import draw_loop, draw_parts
from ddtree.decoding import HFTarget, autoregressive
from ddtree.decoding.paged import PagedTarget
from tests.impl.cases import DEVICE

MACHINE = {"gpu": "a GPU", "torch": "2", "triton": "3", "transformers": "5"}


def row(method: str, batch: int, budget: int | None, speed: float) -> dict[str, Any]:
    """A measurement."""
    return {
        "method": method, "batch": batch, "budget": budget, "tokens_per_second": speed,
        "ms_per_round": 1.0, "acceptance_length": 2.0,
    }  # fmt: skip


def test_the_best_budget_is_held_to_the_best_of_the_others() -> None:
    """Speed-ups are taken from the fastest official and plain rows of the same batch."""
    rows = [
        row("official", 1, 8, 50.0), row("official", 1, 16, 100.0), row("plain", 1, None, 200.0),
        row("ours", 1, 8, 300.0), row("ours", 1, 32, 500.0), row("plain", 8, None, 1000.0),
        row("ours", 8, 8, 900.0),
    ]  # fmt: skip
    found = summary(rows)
    assert found["1"]["budget"] == 32
    assert found["1"]["times_plain"] == 2.5
    assert found["1"]["times_official"] == 5.0
    assert found["8"]["times_plain"] == 0.9
    assert "times_official" not in found["8"]
    assert len(table(rows).splitlines()) == 8
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

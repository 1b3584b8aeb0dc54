"""The second pass on a tiny model: it holds for what decoding emits, and notices what it did not."""

import json
from argparse import Namespace
from typing import Any

import pytest
import torch

from bench import second_pass
from bench.common import RESULTS
from bench.second_pass import BUDGETS, run_cell, verdict
from ddtree.decoding import HFTarget, SeparateTargets
from tests.decoding.tiny import prompt, tiny_model

ARGS = Namespace(tokens=12, attention="dense")
WRONG = "not the argmax in the second pass"


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny target in bf16."""
    return tiny_model("llama", torch.bfloat16)


def cell_of(model: Any, batch: int) -> dict[str, Any]:
    """Five prompts through the cell."""
    prompts = [prompt(n, seed=n) for n in (3, 7, 4, 9, 5)]
    return run_cell(model, "ngram", prompts, 4, batch, ARGS, lambda: None)


@pytest.mark.parametrize("batch", [1, 3])
def test_every_token_is_the_argmax_again(model: Any, batch: int) -> None:
    """Every token emitted, with the first of each prompt, and to the bit."""
    cell = cell_of(model, batch)
    assert cell[WRONG] == 0
    assert cell["texts other than what the passes emitted"] == 0
    assert cell["tokens"] >= 5 * ARGS.tokens
    assert cell["largest logit the same to the bit"] == cell["tokens"]
    assert cell["in one causal pass"]["tokens"] == 5 * ARGS.tokens
    assert verdict(cell, torch.bfloat16)


def test_a_paged_batch_is_passed_again() -> None:
    """The kernels' target, with a place that is taken twice and one that is unused at the end."""
    dtype = torch.float16  # Triton's interpreter has no bf16 products
    model = tiny_model("llama-64", dtype).to("cuda" if torch.cuda.is_available() else "cpu")
    prompts = [prompt(n, seed=n) for n in (3, 7, 4)]
    args = Namespace(tokens=3, attention="paged")
    cell = run_cell(model, "ngram", prompts, 2, 2, args, lambda: None)
    assert cell["tokens"] >= 9
    assert verdict(cell, dtype)


def test_a_token_that_the_pass_did_not_choose_is_noticed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first decoding's target is wrong in its tenth pass; the second pass says so."""

    class Wrong(HFTarget):
        passes = 0

        def forward(self, *call: Any) -> torch.Tensor:
            logits = super().forward(*call).clone()
            self.passes += 1
            if self.passes == 10:
                logits[:, int(logits[0].argmin())] += 1e3
            return logits

    made: list[HFTarget] = []

    def batch_target(model: Any, *_: Any) -> tuple[SeparateTargets, HFTarget]:
        made.append(HFTarget(model) if made else Wrong(model))
        return SeparateTargets([made[-1]]), made[-1]

    monkeypatch.setattr(second_pass, "batch_target", batch_target)
    cell = cell_of(model, 1)
    assert cell[WRONG] >= 1
    assert not verdict(cell, torch.bfloat16)


def test_the_recorded_run_holds() -> None:
    """Every cell of the recorded run, judged again from its counts: none of its tokens fails."""
    result = json.loads((RESULTS / "second-pass-cpu.json").read_text(encoding="utf-8"))
    assert result["settings"]["prompts"] == 50
    dtype: torch.dtype = getattr(torch, result["settings"]["dtype"])
    assert {f"budget {budget}, batch 1" for budget in BUDGETS} <= result["cells"].keys()
    assert all(verdict(cell, dtype) for cell in result["cells"].values())

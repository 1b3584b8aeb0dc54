"""The chi-square test of sampling: by hand, and on a tiny model with a fair and an unfair draw."""

import json
import math
from argparse import Namespace
from typing import Any

import pytest
import torch

from bench.common import RESULTS
from bench.sampling import Case, chi_square, run_case, summary_of
from ddtree.decoding import HFTarget, NGramDrafter
from ddtree.spec.sampling import row_uniforms
from tests.decoding.tiny import VOCAB, tiny_model


def test_chi_square_by_hand() -> None:
    """Three bins of 20 expected that hold 10, 20 and 30: 10 at two degrees of freedom, p = exp(-5)."""
    found = chi_square([0] * 10 + [1] * 20 + [2] * 30, torch.full((3,), 1 / 3).double())
    assert found["chi_square"] == pytest.approx(10)
    assert found["p"] == pytest.approx(math.exp(-5))


def test_rare_tokens_share_a_bin() -> None:
    """Tokens of 3 expected draws each are one bin of 12; a single one joins the bin before."""
    probs = torch.tensor([0.88, 0.03, 0.03, 0.03, 0.03, 0.0]).double()
    found = chi_square([0] * 88 + [1] * 12, probs)
    assert (found["bins"], found["chi_square"]) == (2, 0)
    assert chi_square([0] * 88 + [5] * 12, probs)["tokens of probability 0"] == 12
    lone = chi_square([0] * 97 + [1] * 3, torch.tensor([0.97, 0.03]).double())
    assert (lone["bins"], lone["p"]) == (1, None)


def test_a_fair_draw_passes_and_an_unfair_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens deep on a tiny target; uniforms pressed towards 0 are refused."""
    target = HFTarget(tiny_model("llama", torch.float32))
    prompt_ids = torch.tensor([1, 2, 1, 2, 1, 2, 1])
    case = Case(target, NGramDrafter(VOCAB, 4), prompt_ids, 12)
    settings: dict[str, Any] = {"temperature": 1.0}
    args = Namespace(draws=1000, chunk=500)
    fair = run_case(case, settings, args, lambda _: None)
    assert summary_of({"fair": fair})["smallest p"] > 1e-3
    assert fair["first"]["draws"] == 1000
    assert 100 <= fair["second"]["draws"] < 1000
    assert fair["first"]["bins"] > 5

    monkeypatch.setattr("bench.sampling.row_uniforms", lambda *call: 0.9 * row_uniforms(*call))
    monkeypatch.setattr("bench.sampling.WHOLE", 0)
    unfair = summary_of({"unfair": run_case(case, settings, args, lambda _: None)})
    assert unfair["smallest p"] < 1e-6
    assert not unfair["holds"]


def test_the_recorded_run_holds() -> None:
    """No p of the recorded run is too small for the number of tests, and each wrong twin was refused."""
    result = json.loads((RESULTS / "sampling-cpu.json").read_text(encoding="utf-8"))
    assert result["settings"]["draws"] == 20_000
    assert len(result["cases"]) >= 6
    summary = summary_of(result["cases"])
    assert summary == result["summary"]
    assert summary["holds"]

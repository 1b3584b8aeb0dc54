"""The whole matrix of prompts, budgets and batches against plain decoding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.equality import BATCHES, BUDGETS, key_of, prompts_of_tests

ROOT = Path(__file__).parents[2]
WHOLE = {key_of(budget, "all", batch) for budget in (0, 7, 16, 32, 128) for batch in (1, 8)}
BY_TOPK = {
    key_of(budget, topk, 1) for budget in (0, 1, 7, 16, 17, 63, 256) for topk in ("1", "4", "all")
}


def assert_whole(result: Path, prompts: int, cells: set[str]) -> None:
    """Every cell is there, and none differs but by a tie."""
    found = json.loads(result.read_text(encoding="utf-8"))
    names = [prompt["id"] for prompt in prompts_of_tests()[:prompts]]
    assert sorted(found["prompts"]) == sorted(names)
    for name, entry in found["prompts"].items():
        assert set(entry["cells"]) == cells, name
        verdicts = {cell["verdict"] for cell in entry["cells"].values()}
        assert verdicts <= {"equal", "tie"}, name
    assert found["summary"]["different"] == 0
    assert found["summary"]["cells"] == prompts * len(cells)


@pytest.mark.parametrize(
    ("result", "prompts", "cells"),
    [("cuda", 24, BY_TOPK), ("cpu-ngram", 50, WHOLE), ("cpu", 50, WHOLE), ("h200", 50, WHOLE)],
)
def test_the_recorded_matrix_is_whole(result: str, prompts: int, cells: set[str]) -> None:
    """The recorded runs hold every cell of every prompt, and none differs."""
    assert_whole(ROOT / f"bench/results/equality-{result}.json", prompts, cells)


def test_the_script_runs_the_matrix_that_is_recorded() -> None:
    """Fifty prompts with names of their own, and the recorded cells."""
    names = {prompt["id"] for prompt in prompts_of_tests()}
    assert len(names) == len(prompts_of_tests()) == 50
    assert {key_of(budget, "all", batch) for budget in BUDGETS for batch in BATCHES} == WHOLE


@pytest.mark.long
def test_the_whole_matrix(tmp_path: Path) -> None:
    """Draft-tree text equals plain decoding in every cell, on this machine (about an hour)."""
    out = tmp_path / "equality.json"
    command = [sys.executable, "bench/equality.py", "--tokens", "24", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert_whole(out, 50, WHOLE)

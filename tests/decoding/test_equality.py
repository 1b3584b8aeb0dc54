"""The whole matrix of prompts, budgets and topk against plain decoding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMPTS = json.loads((ROOT / "tests/data/prompts.json").read_text(encoding="utf-8"))
BUDGETS = (0, 1, 7, 16, 17, 63, 256)
CELLS = {f"budget {budget}, topk {topk}" for budget in BUDGETS for topk in (1, 4, "all")}


def assert_whole(result: Path, prompts: int) -> None:
    """Every cell is there, and none differs but by a tie."""
    found = json.loads(result.read_text(encoding="utf-8"))
    assert len(found["prompts"]) == prompts
    for name, entry in found["prompts"].items():
        assert set(entry["cells"]) == CELLS, name
        verdicts = {cell["verdict"] for cell in entry["cells"].values()}
        assert verdicts <= {"equal", "tie"}, name
    assert found["summary"]["different"] == 0


def test_the_recorded_matrix_is_whole() -> None:
    """The recorded run holds every cell of every prompt, at least 20 of them, and none differs."""
    assert len(PROMPTS) >= 20
    assert_whole(ROOT / "bench/results/equality-cuda.json", len(PROMPTS))


@pytest.mark.long
def test_the_whole_matrix(tmp_path: Path) -> None:
    """Draft-tree text equals plain decoding in every cell, on this machine (about an hour)."""
    out = tmp_path / "equality.json"
    subprocess.run([sys.executable, "bench/equality.py", "--out", str(out)], cwd=ROOT, check=True)
    assert_whole(out, len(PROMPTS))

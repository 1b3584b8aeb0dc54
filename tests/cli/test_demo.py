"""``ddtree demo``: the story comes true on the embedded model, and would say so if it did not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.cli import story
from ddtree.cli.models import Pair, load_pair
from ddtree.decoding import Choices
from tests.decoding.tiny import VOCAB


def test_the_whole_story(tmp_path: Path) -> None:
    """Every part comes out as told, with garbled texts, named invariants and two pictures."""
    done = subprocess.run(
        [sys.executable, "-m", "ddtree", "demo", "--out", str(tmp_path / "out"),
         "--max-new-tokens", "16", "--json"],
        capture_output=True, text=True, check=False, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    told = json.loads(done.stdout)
    parts = {part["part"]: part for part in told["parts"]}
    assert list(parts) == list("abcde")
    assert told["ok"] and all(part["ok"] for part in parts.values())

    plain, trees = parts["a"]["runs"]
    assert plain["text"] == trees["text"]
    assert trees["verify_passes"] < plain["verify_passes"]
    assert len(parts["b"]["runs"]) == 4
    assert all(run["text"] != plain["text"] for run in parts["b"]["runs"])
    stopped, passed = parts["c"]["runs"][:4], parts["c"]["runs"][4:]
    assert [run["invariant"] for run in stopped[:2]] == ["mask_len", "mask_len"]
    assert all(run["violation"] for run in stopped)
    assert all(run["text"] == plain["text"] for run in passed + parts["d"]["runs"])
    pictures = [Path(file) for file in parts["e"]["files"]]
    assert [file.name for file in pictures] == ["tree.png", "tree.svg"]
    assert pictures[0].read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def pair(tiny_folder: Path) -> Pair:
    """A small target with the reference attention."""
    return load_pair(str(tiny_folder), "ngram", 8, "reference")


def test_a_story_without_the_bug_is_not_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the right width nothing garbles and nothing is caught, so those parts fail."""
    monkeypatch.setattr(story, "WIDTH", story.BUDGET + 1)
    told = story.Story(pair, pair.drafter, 8)
    expected = told.expected()
    assert not told.garbled(expected).ok
    assert not told.caught(expected).ok


def test_a_story_whose_blind_spot_is_wrong_is_not_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With budget 9 the bug is visible, debug mode stops it, and part d fails."""
    monkeypatch.setattr(story, "BLIND_BUDGET", 9)
    told = story.Story(pair, pair.drafter, 8)
    assert not told.blind(told.expected()).ok


def test_another_text_than_the_right_one_is_not_told(pair: Pair) -> None:
    """Part a compares with the text it is given."""
    told = story.Story(pair, pair.drafter, 8)
    expected = told.expected()
    assert told.equality(expected)[0].outcomes[1].compared is not None
    last = (expected.token_ids[-1] + 1) % VOCAB
    wrong = Choices((*expected.token_ids[:-1], last), expected.margins, expected.runner_up_ids)
    assert not told.equality(wrong)[0].ok

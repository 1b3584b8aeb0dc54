"""``ddtree conform`` and ``ddtree isolate``: the founding bug, a backend of one's own, and bad requests."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

MINE = '''
from ddtree import spec
from ddtree.invariants.conformance import Refused


class Mine:
    """Right, but for one width alone."""

    def verify_attention(self, query, key, value, key_pool, value_pool, layout, mask):
        if len(set(layout.qo_indptr.diff().tolist()) - {0}) > 1:
            raise Refused("one width only")
        return spec.verify_attention(query, key, value, key_pool, value_pool, layout, mask)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, since failing cases are written to it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_founding_bug_is_found_and_written(run: Run, folder: Path) -> None:
    """The table, the smallest case with its cause, and a file that ``ddtree check`` refuses."""
    result = run("conform", "founding-bug", "--only", "plan_verify", "--examples", "20")
    assert result.exit_code == 1, result.stderr
    assert "smallest case: q_len 1, num_nodes 1, prefix_len 0, page size 1" in result.stdout
    assert "the width came from configuration" in result.stdout
    assert "founding-bug: 0 hold, 1 broken" in result.stdout
    checked = run("check", folder / "ddtree-conform/founding-bug-plan-verify.safetensors")
    assert checked.exit_code == 1
    assert "mask_len is broken in request 0: expected 1, found 64" in checked.stdout


def test_a_backend_of_ones_own_holds(run: Run, folder: Path) -> None:
    """A class in a file: what holds, what was refused and why; no folder is left behind."""
    (folder / "mine.py").write_text(MINE)
    args = ("conform", "mine.py:Mine", "--only", "visible", "--examples", "25")
    result = run(*args)
    assert result.exit_code == 0, result.stdout
    assert "3 hold, 0 broken" in result.stdout
    assert [
        path.name for path in folder.iterdir() if path.is_dir() and "conform" in path.name
    ] == []
    told = json.loads(run(*args, "--json").stdout)
    assert [prop["state"] for prop in told["properties"]] == ["holds"] * 3
    assert all(list(prop["refused"]) == ["one width only"] for prop in told["properties"])


def test_isolation_says_it_in_a_sentence(run: Run, folder: Path) -> None:
    """The sentence, the table, an example, and every call in a file."""
    result = run(
        "isolate", "founding-bug", "--calls", "400", "--seconds", "300", "--out", "cells.json"
    )
    assert result.exit_code == 1, result.stderr
    told = " ".join(result.stdout.split())
    assert "founding-bug fails iff q_len != 8, eager and replay alike" in told
    assert "a width of 8 is used where q_len belongs" in told
    assert "for example: q_len" in told
    data = json.loads((folder / "cells.json").read_text())
    assert data["rules"] == ["q_len != 8"]
    assert len(data["cells"]) <= 400


def test_isolation_of_what_is_right(run: Run, folder: Path) -> None:
    """Nothing fails: exit code 0."""
    (folder / "mine.py").write_text(MINE)
    result = run("isolate", "mine.py:Mine", "--calls", "40")
    assert result.exit_code == 0
    assert "nothing fails: 25 calls" in result.stdout


@pytest.mark.parametrize("verb", ["conform", "isolate"])
def test_without_a_backend_the_built_in_ones_are_listed(run: Run, verb: str) -> None:
    """Peers, faults, and how one's own is named."""
    result = run(verb)
    assert result.exit_code == 0
    for name in ("sglang-triton", "sdpa", "founding-bug", "module:object"):
        assert name in result.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "there is no built-in backend 'nothing'"),
        ("none.py:Mine", "there is no file none.py"),
        ("no_such_module:Mine", "no_such_module:Mine cannot be imported"),
        ("ddtree.spec:Mine", "has no attribute 'Mine'"),
        ("pathlib:Path", "Path offers none of the functions build_tree"),
    ],
)
def test_a_backend_that_is_none_is_refused(run: Run, name: str, said: str) -> None:
    """One message with a next step, exit code 2."""
    result = run("conform", name)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_an_unknown_property_is_refused(run: Run) -> None:
    """The message lists those there are."""
    result = run("conform", "reference", "--only", "speed")
    assert result.exit_code == 2
    assert "no property is called 'speed'" in result.stderr

"""SGLang's plugin on SGLang's own plugin loader and ``TritonAttnBackend``, from its wheels."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hooks.engines import needs
from tests.hooks.entry_points import run_script

OLD, NEW = "0.5.16", "0.5.23"
HINT = "every segment fits width 8; this call's q_len is 17: the width came from configuration"
old = pytest.mark.skipif(
    bool(needs(f"sglang-{OLD}", "common")), reason=needs(f"sglang-{OLD}", "common")
)
new = pytest.mark.skipif(
    bool(needs(f"sglang-{NEW}", "common")), reason=needs(f"sglang-{NEW}", "common")
)
both = pytest.mark.parametrize(
    "version", [pytest.param(OLD, marks=old), pytest.param(NEW, marks=new)]
)


def run(version: str, name: str, folder: Path, **environment: str) -> tuple[Any, str]:
    """What a function of ``sglang_pass`` returns in a process of its own, and what is logged."""
    return run_script("tests.hooks.sglang_pass", version, name, folder=folder, **environment)


def holds_founding_bug(found: dict[str, Any]) -> None:
    """Eager, capture and replay are each caught by name with the bug's own numbers."""
    assert found["eager"] == ["mask_len", 0, 374, 104, HINT]
    assert found["kernel"] == ["mask_len", 0, 374, 104, HINT]
    for graph in ("capture", "replay"):
        assert found[graph] == ["mask_len", 0, 374, 104, HINT + " or an earlier fill"]
    assert found["batch"] == ["mask_len", 0, 17 * (31 + 17), 8 * (31 + 8), HINT]
    assert found["no mask"][:4] == ["qo_indptr", 0, 17, 8]
    assert found["another device"] == found["eager"]
    assert found["kernel, captured"][:4] == ["max_q_len", None, "at least 17", 8]


@old
def test_the_founding_bug_is_caught_where_sglang_had_it(tmp_path: Path) -> None:
    """Its own EAGLE metadata at 0.5.16, which takes the width from configuration, eager and in graphs."""
    found, log = run(OLD, "founding_bug", tmp_path, DDTREE_DEBUG_ACTION="raise")
    holds_founding_bug(found)
    assert (
        "ddtree hooks: installed on SGLang 0.5.16: TritonAttnBackend.init_forward_metadata, " in log
    )


@new
def test_the_founding_bug_is_caught_where_a_third_party_meets_it(tmp_path: Path) -> None:
    """A ``spec_info`` that sets ``draft_token_num`` alone has the configured width in 0.5.23."""
    found, _ = run(NEW, "founding_bug_of_a_third_party", tmp_path, DDTREE_DEBUG_ACTION="raise")
    holds_founding_bug(found)


@both
def test_what_is_right_is_passed_by(version: str, tmp_path: Path) -> None:
    """Trees of 1 to 63 nodes, chains whose rows are mostly padding, replays in buffers that held larger
    passes, prefill, decode and warm-ups raise no alarm; an unknown layout is said once to be not checked."""
    passes, log = run(version, "silent", tmp_path, DDTREE_DEBUG_ACTION="raise")
    assert passes == 20
    assert log.count("not checked") == 1
    assert (
        "not checked: eager verify metadata: requests have widths of their own (ragged verify)"
        in log
    )


@new
def test_wrong_contents_and_a_missing_hook_are_caught(tmp_path: Path) -> None:
    """A row that sees too much, positions by row, slots written twice or over the prefix, a mask buffer of
    the configured width; and SGLang swallows a hook that cannot be applied, which is missed by name."""
    found, log = run(NEW, "wrong", tmp_path, DDTREE_DEBUG_ACTION="raise")
    names = {what: violation and violation[0] for what, violation in found.items()}
    assert names == {
        "mask": "visibility",
        "positions": "positions",
        "one slot": "write_unique",
        "slots of the prefix": "write_disjoint",
        "room": "flat_len",
    }
    assert found["room"][2:4] == [64 * (5 + 64), 4 * 8 * (96 + 8)]
    assert "installed on SGLang 0.5.23: TritonAttnBackend.init_forward_metadata, " in log
    assert (
        "not installed on SGLang 0.5.23: TritonAttnBackend.__init__ (SGLang did not apply the hook to"
        in log
    )


@both
def test_plans_of_flashinfer_are_checked(version: str, tmp_path: Path) -> None:
    """Right ones are made as if nothing were hooked, and the wrapper is free again afterwards. Caught are: a
    width that is not the pass's, eager, captured and replayed; a mask that sees too much or was filled up;
    positions by row; rows written elsewhere than they are read; a width that the host is told."""
    both, log = run(version, "flashinfer", tmp_path, DDTREE_DEBUG_ACTION="raise")
    assert both["right"] == [12 * 3 + 1, 0]
    for where in ("", " of a capture", " of a replay"):
        assert (
            f"the first call is checked: FlashInfer's verify plan{where}, batch 1, q_len 64" in log
        )
    assert "not checked" not in log
    assert "FlashInferIndicesUpdaterPrefill.call_begin_forward (level full" in log
    found = both["wrong"]
    names = {what: violation and violation[0] for what, violation in found.items()}
    assert names == {
        "eager": "mask_len",
        "capture": "mask_len",
        "replay": "mask_len",
        "mask": "visibility",
        "short mask": "visibility",
        "positions": "positions",
        "written elsewhere": "slot_table",
        "fast plan": "max_q_len",
    }
    assert found["eager"][1:4] == [0, 17 * (5 + 17), 8 * (5 + 8)]
    assert found["fast plan"][2:4] == ["at least 17", 8]


@old
@pytest.mark.gpu
def test_kernels_in_a_graph_are_checked(tmp_path: Path) -> None:
    """While a CUDA graph is captured shapes alone are looked at, and the capture goes through."""
    found, _ = run(OLD, "captured", tmp_path, DDTREE_DEBUG_ACTION="raise", TRITON_INTERPRET="0")
    assert found.pop("wide kernel")[:4] == ["max_q_len", None, "at least 17", 8]
    assert found.pop("wide replay")[:4] == ["mask_len", 0, 374, 104]
    assert found == {"capture": None, "kernel": None, "replay": None}


@old
def test_workers_dump_what_the_commands_read(tmp_path: Path) -> None:
    """Parent and forked worker log and dump by default; check names the violation, replay runs it again."""
    pids, log = run(OLD, "forked", tmp_path)
    assert (
        log.count("mask_len is broken in request 0, eager verify metadata: expected 374, found 104")
        == 2
    )
    files = sorted(file.name for file in tmp_path.iterdir())
    for pid in pids:
        assert any(
            f"-{pid}-" in file and file.endswith("-sglang_eager-mask_len.safetensors")
            for file in files
        ), files
    kept = next(file for file in files if "verify_attention" in file)
    eager = next(file for file in files if "sglang_eager" in file)
    ddtree = [sys.executable, "-m", "ddtree"]
    checked = subprocess.run(
        [*ddtree, "check", tmp_path / eager], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 1
    assert "mask_len is broken in request 0: expected 374, found 104" in checked.stdout
    again = subprocess.run(
        [*ddtree, "replay", tmp_path / kept], capture_output=True, text=True, check=False
    )
    # on wrong metadata the two may read other bits; 2 would be a file that cannot be run
    assert again.returncode in {0, 1}, again.stdout + again.stderr
    assert "verify_attention: reference and kernels" in again.stdout


@new
def test_off_nothing_is_hooked(tmp_path: Path) -> None:
    """Without DDTREE_DEBUG the same passes run unhooked: the bug is there, and nothing is said or written."""
    found, log = run(NEW, "founding_bug_of_a_third_party", tmp_path, DDTREE_DEBUG="")
    assert len(found) == 9
    assert not any(found.values())
    assert "ddtree" not in log
    assert not list(tmp_path.iterdir())

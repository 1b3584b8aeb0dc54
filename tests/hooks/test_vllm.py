"""vLLM's plugin on its own loader, ``AttentionGroup`` and Triton metadata builder, from its wheel."""

from pathlib import Path

import pytest

from tests.hooks.engines import needs
from tests.hooks.entry_points import run_script

pytestmark = pytest.mark.skipif(bool(needs("vllm-0.33.0")), reason=needs("vllm-0.33.0"))


def test_right_batches_are_passed_by(tmp_path: Path) -> None:
    """Prefill, decode, chains, padding, captures and a drafter's pass raise no alarm; what is not known
    is said once."""
    passes, log = run_script(
        "tests.hooks.vllm_pass", "silent", folder=tmp_path, DDTREE_DEBUG_ACTION="raise"
    )
    assert passes == 16
    assert "ddtree hooks: installed on vLLM 0.33.0: AttentionGroup.build_metadata, " in log
    assert log.count("not checked") == 2
    assert "a pass begins at positions [6, 32], its prefixes are [5, 31]" in log
    assert "not checked: attention metadata: the cache is of the kind MambaSpec" in log


def test_wrong_batches_are_caught_by_name(tmp_path: Path) -> None:
    """One thing wrong each: lengths, indptr, rows, slots of other blocks or written twice."""
    found, _ = run_script(
        "tests.hooks.vllm_pass", "wrong", folder=tmp_path, DDTREE_DEBUG_ACTION="raise"
    )
    assert {what: violation and violation[0] for what, violation in found.items()} == {
        "right": None,
        "max_query_len": "max_q_len",
        "indptr": "qo_indptr",
        "rows": "buffer_capacity",
        "slots": "slot_table",
        "one slot": "write_unique",
        "seq_lens": "kv_indptr",
    }
    assert found["max_query_len"][2:4] == ["at least 17", 8]

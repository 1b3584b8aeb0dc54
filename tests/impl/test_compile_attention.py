"""Both kernels of ``verify_attention`` compile for GPUs that are not here, without spilling much."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "max_stack"),
    [
        ("90 bfloat16 128 0", 64),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("90 bfloat16 128 1", 64),
                ("90 float16 64 1", 64),
                ("90 bfloat16 96 0", 64),
                ("90 bfloat16 256 0", 192),  # accumulators of 64 rows by 256 take most registers
                ("90 float32 64 0", 64),
                ("80 bfloat16 128 0", 64),
                ("100 bfloat16 128 0", 128),  # compiles; no figure was taken there
            )
        ),
    ],
)
def test_both_launches_compile_with_few_spills(arguments: str, max_stack: int) -> None:
    """Each launch becomes machine code whose stack (bytes a thread) stays within the limit."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.impl.compile_attention", *arguments.split()],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels = json.loads(run.stdout)
    assert [kernel["name"] for kernel in kernels] == ["attend_kernel", "merge_kernel"]
    assert [kernel for kernel in kernels if kernel["stack"] > max_stack] == []

"""Both kernels of ``verify_attention`` compile for GPUs that are not here, without spilling much."""

import json
import os
import subprocess
import sys

import pytest

from tests.processes import PYTHONPATH, ROOT

MAX_STACK = {
    "80-bfloat16-128": 64,
    "90-bfloat16-128": 64,
    "90-bfloat16-128-general": 64,
    "90-bfloat16-128-fp8": 160,  # of a producer that has 88 registers
    "90-bfloat16-128-fp8-general": 64,
    "100-bfloat16-128": 128,  # compiles; no figure was taken there
}
"""Bytes of local memory a thread, above all spills, that each variant may take."""
LONG_MAX_STACK = {
    "80-bfloat16-128-fp8": 448,  # bits are moved: a path for GPUs without fp8, not a fast one
    "90-bfloat16-128-options": 256,  # of the softcap, outside the loop over full blocks
    "90-bfloat16-128-general-options": 64,
    "90-bfloat16-128-fp8-options": 512,
    "90-bfloat16-128-fp8-general-options": 64,
    "90-float16-128-fp8": 160,
    "90-float16-64-options": 64,
    "90-float16-64-general-options": 64,
    "90-bfloat16-64-fp8": 64,
    "90-bfloat16-96": 64,
    "80-bfloat16-256": 64,
    "90-bfloat16-256": 64,
    "90-bfloat16-256-options": 128,
    "90-bfloat16-256-fp8": 64,
    "90-float32-64": 64,
    "100-bfloat16-128-fp8": 128,
}


def attend_kernel_of(variant: str) -> str:
    """Name of the kernel that attends: Hopper GPUs have their own for head dims 64 and 128."""
    capability, dtype, head_dim, *extras = variant.split("-")
    is_hopper = capability == "90" and dtype != "float32" and head_dim in {"64", "128"}
    return "attend_hopper_kernel" if is_hopper and "general" not in extras else "attend_kernel"


@pytest.mark.parametrize(
    "limits", [MAX_STACK, pytest.param(LONG_MAX_STACK, marks=pytest.mark.long)]
)
def test_both_launches_compile_with_few_spills(limits: dict[str, int]) -> None:
    """Each launch becomes machine code whose stack stays within the limit."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.impl.compile_attention", *limits],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    names = {variant: [kernel["name"] for kernel in kernels] for variant, kernels in found.items()}
    assert names == {variant: [attend_kernel_of(variant), "merge_kernel"] for variant in limits}
    stacks = {variant: max(k["stack"] for k in kernels) for variant, kernels in found.items()}
    assert {v: stack for v, stack in stacks.items() if stack > limits[v]} == {}

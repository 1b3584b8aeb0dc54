"""Every kernel of a round compiles for GPUs that are not here, without spilling much."""

import json
import os
import subprocess
import sys

import pytest
from _pytest.mark.structures import ParameterSet

from tests.processes import PYTHONPATH, ROOT

MAX_STACK = 64
"""Bytes of local memory a thread: the rank kernel at budget 512 spills a few registers."""


def long(*values: int) -> ParameterSet:
    """Parameters of a long test."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("capability", "budget"),
    [
        *((80, 100), (90, 100), (100, 100)),
        *(long(capability, budget) for capability in (80, 90, 100) for budget in (64, 512)),
    ],
)
def test_every_launch_compiles_with_few_spills(capability: int, budget: int) -> None:
    """Each launch of a round becomes machine code whose stack stays within the limit.

    The kernels of log-softmax, whose every operation rounds as the reference's, fuse none.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.impl.compile_round", str(capability), str(budget)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels = json.loads(run.stdout)
    assert len({kernel["name"] for kernel in kernels}) == 33
    assert [k for k in kernels if k["stack"] > MAX_STACK] == []
    exact = {"group_max_kernel", "rank_kernel"}
    assert [k for k in kernels if k["name"] in exact and k["fused"]] == []
    assert any(kernel["fused"] for kernel in kernels)  # where it is let, the compiler fuses


@pytest.mark.parametrize("capability", [90, long(80), long(100)])
def test_every_launch_of_a_check_compiles(capability: int) -> None:
    """The captured check's kernels become machine code, whatever fields a call has."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.impl.compile_check", str(capability), "64"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels = json.loads(run.stdout)
    assert len({kernel["name"] for kernel in kernels}) == 19
    assert [k for k in kernels if k["stack"] > MAX_STACK] == []

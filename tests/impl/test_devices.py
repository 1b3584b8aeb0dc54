"""Compiled kernels on a CPU: one sentence that says what to do, from every launcher, before a launch."""

import os
import subprocess
import sys

from tests.processes import PYTHONPATH

CALLS = """
import torch, transformers
from ddtree import Budget, Horizon, impl, spec
from ddtree.decoding.paged import PagedTarget
from ddtree.impl.sampling import first_argmax
from ddtree.invariants import Call

draft = torch.zeros(1, 2, 5).log_softmax(-1)
roots, lens, slots = torch.tensor([4]), torch.tensor([5]), torch.arange(16)[None]
tree = spec.build_tree(draft, roots, Budget(3))
layout = spec.plan_verify(tree, lens, slots)
mask, bits = (spec.tree_mask(tree, layout, form=form) for form in ("flat", "bits"))
row, pool = torch.zeros(4, 1, 64), torch.zeros(16, 1, 64)
config = transformers.LlamaConfig(
    vocab_size=8, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, head_dim=64, intermediate_size=8
)
for make in (
    lambda: impl.build_tree(draft, roots, Budget(3)),
    lambda: impl.plan_verify(tree, lens, slots),
    lambda: impl.tree_mask(tree, layout),
    lambda: impl.convert_mask(mask, layout, "bits"),
    lambda: impl.verify_attention(row, row, row, pool, pool, layout, bits),
    lambda: impl.accept_greedy(tree, torch.zeros(4, dtype=torch.int64), layout, Horizon(2)),
    lambda: first_argmax(torch.zeros(4, 5)),
    lambda: impl.CapturedCheck(Call.of(tree, layout, mask)),
    lambda: PagedTarget(transformers.LlamaForCausalLM(config), max_context=16),
):
    try:
        make()
    except spec.InputError as error:
        assert error.__suppress_context__ or error.__context__ is None
        print(error)
    else:
        raise SystemExit("it was not refused")
"""


def test_a_cpu_is_refused_with_the_next_step() -> None:
    """Without the interpreter each call names the variable, and no error of Triton's shows."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", CALLS],
        env=environment | {"PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 9
    for line in lines:
        assert (
            "is on a CPU; the kernels run on CUDA devices: on a CPU set TRITON_INTERPRET=1" in line
        )

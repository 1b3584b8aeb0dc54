"""Compiled kernels on a CPU: one sentence that says what to do, from every launcher, before a launch."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddtree.impl.op import op, require_kernels
from ddtree.spec import InputError
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


def test_a_failed_launch_is_explained_by_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, with a tensor on a CPU among the arguments or in a list of them; else it stays as it is."""

    @op("fails")
    def fails(one: Tensor | None, others: list[Tensor]) -> None:
        raise RuntimeError(f"the launch failed with {one} and {others}")

    here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    for interpreted, one, others, is_explained in [
        (False, here, [elsewhere], True),
        (False, None, [elsewhere, here], True),
        (False, elsewhere, [elsewhere], False),
        (False, None, [], False),
        (True, here, [here], False),
    ]:
        monkeypatch.setattr("ddtree.impl.op.IS_INTERPRETED", interpreted)
        with pytest.raises((InputError, RuntimeError)) as caught:
            fails(one, others)
        told = "a tensor of the call is on a CPU" if is_explained else "the launch failed"
        assert str(caught.value).startswith(told), (interpreted, one, others)


@pytest.mark.parametrize(
    ("device", "interpreted", "runs"),
    [("cpu", False, False), ("cpu", True, True), ("cuda", False, True), ("meta", False, True)],
)
def test_where_kernels_run(
    device: str, interpreted: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everywhere but on a CPU, and there in the interpreter."""
    monkeypatch.setattr("ddtree.impl.op.IS_INTERPRETED", interpreted)
    if runs:
        require_kernels(torch.device(device), "the model")
    else:
        with pytest.raises(InputError, match="the model is on a CPU"):
            require_kernels(torch.device(device), "the model")


class Seen(TorchDispatchMode):
    """Names the calls that go through PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_call_is_an_operator_to_whoever_watches() -> None:
    """Watched, it goes through the dispatcher; its results without content are those of ``fake``."""

    @op("starts", fake=lambda one: one.new_empty(2))
    def starts(one: Tensor) -> Tensor:
        return one.new_zeros(2)

    with Seen() as seen:
        starts(torch.zeros(1))
    assert "ddtree.starts.default" in seen.names
    assert torch.ops.ddtree.starts(torch.zeros(1, device="meta")).shape == (2,)

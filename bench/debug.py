"""What a public call costs the host beside its work: debug mode off, checks of arguments, operators.

    python bench/debug.py [--out FILE.json]      on a CPU the kernels that make the inputs are interpreted

Four things, in microseconds a call, each the least of some repetitions:

- ``decorator``: a function under ``@public``, debug mode off, beside the undecorated one.
- ``operator``: a call of one of our operators through PyTorch's dispatcher, as traced code makes it,
  beside the direct call that eager code makes; and how an operator made by ``torch.library.custom_op``
  would do.
- ``public call``: each public function with its launches taken out: checks, allocations, dataclasses.
- ``launches`` (on a GPU): the same functions whole, the host's part alone.

No device work is done by ``@public`` with debug mode off: it compares one global with None.
"""

import argparse
import json
import os
import platform
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
from torch import Tensor
from torch.library import custom_op

from ddtree import impl
from ddtree.impl import accept, attention, commit, layout, mask, sampling, tree
from ddtree.impl.op import op
from ddtree.spec import Budget, Horizon, PagedKV
from ddtree.spec.public import public

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, BUDGET, HORIZON, VOCAB = 4, Budget(64), Horizon(15), 1000
MODULES = (accept, attention, commit, layout, mask, sampling, tree)


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    with torch.inference_mode():
        figures = {**decorator(), **dispatch(), **calls("public call")}
        if DEVICE == "cuda":
            figures |= {f"launches: {name}": cost for name, cost in whole().items()}
    machine = {
        "processor": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    width = max(map(len, figures))
    for name, cost in figures.items():
        print(f"{name:<{width}}  {cost:8.2f} us")
    if out:
        out.write_text(json.dumps({"machine": machine, "microseconds": figures}, indent=1) + "\n")


def cost(call: Callable[[], object], number: int = 2000, repeats: int = 9) -> float:
    """Microseconds of one call."""
    call()
    return min(timeit.repeat(call, number=number, repeat=repeats)) / number * 1e6


def decorator() -> dict[str, float]:
    """``@public`` with debug mode off."""

    def plain(one: Any, other: Any, *, third: Any = None) -> Any:
        return one, other, third

    decorated = public(plain)
    costs = [cost(partial(f, 1, 2, third=3), 100_000) for f in (plain, decorated)]
    return {
        "decorator: undecorated function": costs[0],
        "decorator: under @public, debug mode off": costs[1],
        "decorator: difference": costs[1] - costs[0],
    }


def dispatch() -> dict[str, float]:
    """One launcher that does nothing: direct, decorated, through the dispatcher, as a custom_op."""

    def nothing(one: Tensor, other: Tensor, third: Tensor, into: Tensor, size: int) -> None:
        del one, other, third, into, size

    registered = op("nothing", writes=("into",))(nothing)
    custom = custom_op("ddtree::nothing_custom", nothing, mutates_args=("into",))
    tensors = [torch.zeros(3, device=DEVICE) for _ in range(4)]
    kinds: dict[str, Callable[..., Any]] = {
        "operator: undecorated launcher": nothing,
        "operator: launcher under @op, called by eager code": registered,
        "operator: through the dispatcher, as traced code calls it": torch.ops.ddtree.nothing.default,
        "operator: the same made by torch.library.custom_op": custom,
    }
    return {name: cost(partial(f, *tensors, 5), 5000) for name, f in kinds.items()}


class NoKernel:
    """A kernel whose launch does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def without_kernels() -> Iterator[None]:
    """Take the kernels out of the launchers."""
    kernels = {
        (module, name): kernel
        for module in (*MODULES, impl.rank)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }
    for module, name in kernels:
        setattr(module, name, NoKernel())
    try:
        yield
    finally:
        for (module, name), kernel in kernels.items():
            setattr(module, name, kernel)


def functions() -> dict[str, Callable[[], object]]:
    """Each public function with arguments of its own."""
    draft = torch.randn(BATCH, HORIZON, VOCAB, device=DEVICE).log_softmax(-1)
    roots = torch.zeros(BATCH, dtype=torch.int64, device=DEVICE)
    prefix_lens = torch.full((BATCH,), 100, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(BATCH * 256, device=DEVICE).view(BATCH, 256)
    trees = impl.build_tree(draft, roots, BUDGET)
    plan = impl.plan_verify(trees, prefix_lens, slots)
    bits = impl.tree_mask(trees, plan)
    rows = plan.positions.numel()
    query = torch.randn(rows, 8, 128, device=DEVICE, dtype=torch.float16)
    key, value = torch.randn(2, rows, 2, 128, device=DEVICE, dtype=torch.float16)
    pool = torch.randn(BATCH * 256, 2, 128, device=DEVICE, dtype=torch.float16)
    ids = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    logits = torch.randn(rows, VOCAB, device=DEVICE)
    uniforms = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    found = impl.accept_greedy(trees, ids, plan, HORIZON)
    kv = PagedKV((pool,) * 28, (pool,) * 28, slots.clone(), 1)
    return {
        "build_tree": lambda: impl.build_tree(draft, roots, BUDGET),
        "plan_verify": lambda: impl.plan_verify(trees, prefix_lens, slots),
        "tree_mask": lambda: impl.tree_mask(trees, plan),
        "verify_attention": lambda: impl.verify_attention(
            query, key, value, pool, pool, plan, bits
        ),
        "accept_greedy": lambda: impl.accept_greedy(trees, ids, plan, HORIZON),
        "accept_sampled": lambda: impl.accept_sampled(
            trees, logits, plan, HORIZON, uniforms, temperature=0.8, top_k=20
        ),
        "commit_kv": lambda: impl.commit_kv(kv, plan, found),
    }


def calls(title: str) -> dict[str, float]:
    """Each public function without its launches."""
    with without_kernels():
        return {f"{title}: {name}": cost(call) for name, call in functions().items()}


def whole() -> dict[str, float]:
    """Each public function's host time, launches included; the queue is emptied between repetitions."""
    costs = {}
    for name, call in functions().items():
        call()
        least = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            least = min(least, timeit.timeit(call, number=20) / 20 * 1e6)
        costs[name] = least
    torch.cuda.synchronize()
    return costs


if __name__ == "__main__":
    main()

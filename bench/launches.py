"""How many operations of a device one round of the loop takes, part by part: no GPU is needed.

    TRITON_INTERPRET=1 python bench/launches.py               the embedded pair's layers, in tiny sizes
    TRITON_INTERPRET=1 python bench/launches.py --batch 8 --sampled

A round on a small model is bound by its launches, one after the other. So one eager step of
``DeviceRounds`` is run on the CPU in Triton's interpreter, and what would be a kernel on a GPU is counted:
every launch of a Triton kernel, and every operation of PyTorch that is neither a view nor an allocation.
An operation of PyTorch may take more than one kernel; most take one.

*On the way*: what stands in the one line that a round waits for. *Beside*: what runs on a second stream.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ddtree.impl.round
from bench.loop import SHAPES, random_prompts
from ddtree.decoding import DFlashDrafter, HFTarget, Request
from ddtree.decoding.device_rounds import DeviceRounds
from ddtree.decoding.dflash_config import DFlashConfig, spread_layers
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.decoding.dflash_paged import PagedDFlash
from ddtree.decoding.paged import PagedTarget
from ddtree.decoding.rounds import Held
from ddtree.spec import BlockSize
from ddtree.spec.sampling import Sampling

PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "draft": ((PagedDFlash, "draft"),),
    "build": ((ddtree.impl.round, "build_tree"),),
    "plan": ((ddtree.impl.round, "plan_verify"),),
    "mask": ((ddtree.impl.round, "tree_mask"),),
    "verify": ((PagedTarget, "forward"),),
    "accept": ((ddtree.impl.round, "_accept"), (ddtree.impl.round, "new_tokens")),
    "commit": ((PagedTarget, "commit"),),
    "context": ((PagedDFlash, "take"), (PagedDFlash, "commit")),
    "record": ((DeviceRounds, "accepted"),),
}
"""The functions that each part is made of; what is outside of them is *rest*."""
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh",
    "_unsafe_view", "_reshape_alias", "unbind", "split", "split_with_sizes", "alias", "view",
}  # fmt: skip
"""Operations that only make or describe memory, beside those that say they are views."""

Key = tuple[str, bool, str]
"""Part, whether it runs beside, operation."""


class Counted(TorchDispatchMode):
    """Counts operations where it is on, by part."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts = ["rest"]
        self.is_beside = False
        self.counts: Counter[Key] = Counter()

    def add(self, name: str) -> None:
        """One operation more."""
        self.counts[self.parts[-1], self.is_beside, name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if not func.is_view and name not in NO_KERNEL:
            self.add(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is counted inside is of that part."""
        self.parts.append(name)
        try:
            yield
        finally:
            self.parts.pop()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is counted inside runs on the second stream."""
        before, self.is_beside = self.is_beside, True
        try:
            yield
        finally:
            self.is_beside = before


def count(run: DeviceRounds) -> Counter[Key]:
    """The operations of one step."""
    counted = Counted()

    def named(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with counted.part(name):
                return function(*args, **kwargs)

        return call

    launch = GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        counted.add(executor.fn.__name__)
        with _disable_current_modes():
            launch(executor, *args, **kwargs)

    with ExitStack() as patched:
        for name, functions in PARTS.items():
            for owner, attribute in functions:
                function = named(name, getattr(owner, attribute))
                patched.enter_context(patch.object(owner, attribute, function))
        patched.enter_context(patch.object(run, "_beside", counted.beside))
        patched.enter_context(patch.object(GridExecutor, "__call__", launched))
        # launchers shall not become operators, in which nothing is seen
        patched.enter_context(patch("torch._C._len_torch_dispatch_stack", lambda: 0))
        with counted:
            run.step()
    return counted.counts


def rounds(
    *, layers: int, drafter_layers: int, block: int, budget: int, batch: int, page_size: int = 1,
    sampled: bool = False,
) -> DeviceRounds:  # fmt: skip
    """Rounds of a tiny Llama in fused layers with a drafter of its own, a request begun in every place."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = SHAPES["tiny"] | {"num_hidden_layers": layers}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**shape, **special, max_position_embeddings=128)
    ).eval()
    watched = spread_layers(layers, drafter_layers) if layers > drafter_layers else (0,)
    config = DFlashConfig(
        hidden_size=shape["hidden_size"], intermediate_size=shape["intermediate_size"],
        num_hidden_layers=drafter_layers, num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"], head_dim=shape["head_dim"],
        rms_norm_eps=1e-6, rope_theta=10000.0, block_size=BlockSize(block), mask_token_id=7,
        target_layer_ids=watched, num_target_layers=layers,
    )  # fmt: skip
    drafter = DFlashDrafter(DFlashModel(config), HFTarget(model))
    sampling = Sampling(0.9, seed=3) if sampled else None
    target = PagedTarget(model, max_batch=batch, max_context=96, page_size=page_size, fused=True)
    target.watch(drafter.target_layer_ids)
    found = DeviceRounds(target, drafter, budget=budget, topk=None, sampling=sampling, ragged=False)
    for place, ids in enumerate(random_prompts(shape["vocab_size"], 1) * batch):
        held = Held(place, Request(ids, 20), sampling)
        held.tokens.append(int(target.begin(place, ids, 96).argmax()))
        found.begin(place, held)
    return found


def table(counts: Counter[Key]) -> str:
    """A line a part."""
    lines = [f"{'part':<8}  {'on the way':>10}  {'beside':>6}  operations"]
    for part in (*PARTS, "rest", "all"):
        mine = {key: times for key, times in counts.items() if part in ("all", key[0])}
        sums = [
            sum(n for key, n in mine.items() if key[1] == is_beside) for is_beside in (False, True)
        ]
        names: Counter[str] = Counter()
        for (_, _, name), times in mine.items():
            names[name] += times
        what = "" if part == "all" else ", ".join(f"{name} {n}" for name, n in names.most_common())
        lines.append(f"{part:<8}  {sums[0]:>10}  {sums[1]:>6}  {what}".rstrip())
    return "\n".join(lines)


def main() -> None:
    """Count, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--drafter-layers", type=int, default=5)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--sampled", action="store_true")
    options = parser.parse_args()
    print(table(count(rounds(**vars(options)))))


if __name__ == "__main__":
    main()

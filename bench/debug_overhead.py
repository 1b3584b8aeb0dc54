"""What debug mode costs a verify pass of an 8B-sized model on one GPU, in a CUDA graph and eagerly.

Usage, from the repository's root: ``python3 bench/debug_overhead.py [--out FILE] [--layers N]``.

The pass has the shapes of Qwen3-8B (36 layers of 32 query and 8 KV heads of 128, width 4096, 12288 inside,
vocabulary 151936), random bf16 weights (16 GB) and the paged pools of all layers; batch 8, budget 64 (520
rows), prefix 4096. It is captured without a check, with a ``CapturedCheck`` of each level before the
layers, and in debug mode, where the first ``verify_attention`` of the pass puts the check into the graph.
Replays are timed in turns, so that what the GPU's clock does concerns all alike.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from ddtree import impl
from ddtree.impl import CapturedCheck
from ddtree.invariants import Call, debug
from ddtree.invariants.streams import beside, capturing
from ddtree.spec import BitMask, Budget, DraftTree, QLen, VerifyLayout

WIDTH, INSIDE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 12288, 32, 8, 128, 151936
BATCH, BUDGET, PREFIX, HORIZON = 8, 64, 4096, 15
ROUNDS, REPLAYS = 7, 12


class Pass:
    """The model, its pools, and one call in fixed memory."""

    def __init__(self, layers: int) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            made = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
            return made.normal_(0, columns**-0.5)

        self.norm = torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda")
        self.layers = [
            {
                "qkv": weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
                "out": weight(WIDTH, HEADS * HEAD_DIM),
                "up": weight(2 * INSIDE, WIDTH),
                "down": weight(WIDTH, INSIDE),
            }
            for _ in range(layers)
        ]
        self.embed, self.head = weight(VOCAB, WIDTH), weight(VOCAB, WIDTH)
        context = PREFIX + BUDGET + 1
        self.num_slots = BATCH * context
        self.table = torch.randperm(self.num_slots, device="cuda").view(BATCH, context)
        shape = (layers, 2, self.num_slots, KV_HEADS, HEAD_DIM)
        self.pools = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        draft = torch.randn(BATCH, HORIZON, VOCAB, device="cuda").mul(4).log_softmax(-1)
        self.roots = torch.randint(0, VOCAB, (BATCH,), device="cuda")
        self.prefix_lens = torch.full((BATCH,), PREFIX, dtype=torch.int32, device="cuda")
        self.tree: DraftTree = impl.build_tree(draft, self.roots, Budget(BUDGET))
        planned = impl.plan_verify(self.tree, self.prefix_lens, self.table)
        flat = impl.tree_mask(self.tree, planned, "flat")
        self.bits: BitMask = impl.tree_mask(self.tree, planned, "bits")
        self.buffers = impl.VerifyBuffers(BATCH, QLen(BUDGET + 1), PREFIX, device="cuda")
        self.buffers.fill(self.tree, planned, flat)
        self.layout: VerifyLayout = self.buffers.layout

    def run(self) -> Tensor:
        """The logits of all rows."""
        state = self.embed[self.buffers.token_ids]
        slots, rows = self.layout.out_cache_loc, state.shape[0]
        for weights, (keys, values) in zip(self.layers, self.pools, strict=True):
            qkv = rms_norm(state, (WIDTH,), self.norm) @ weights["qkv"].T
            query, key, value = qkv.view(rows, -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
            keys[slots], values[slots] = key, value
            output, _ = impl.verify_attention(
                query, key.contiguous(), value.contiguous(), keys, values, self.layout, self.bits
            )
            state = state + output.reshape(rows, -1) @ weights["out"].T
            gate, up = (rms_norm(state, (WIDTH,), self.norm) @ weights["up"].T).chunk(2, -1)
            state = state + (silu(gate) * up) @ weights["down"].T
        return rms_norm(state, (WIDTH,), self.norm) @ self.head.T

    def call(self, mask: str) -> Call:
        """What a server knows of the call, with the mask in one form."""
        known: dict[str, Any] = {
            "root_token_ids": self.roots, "prefix_lens": self.prefix_lens, "budget": BUDGET,
            "horizon": HORIZON, "kv_pool_size": self.num_slots, "slot_table": self.table,
            "vocab_size": VOCAB, "num_rows": BATCH * (BUDGET + 1),
        }  # fmt: skip
        if mask == "flat":
            return Call.of(self.tree, self.buffers, **known)
        return Call.of(self.tree, self.layout, self.bits, input_ids=self.buffers.token_ids, **known)


def captured(
    run: Callable[[], object], mode: AbstractContextManager[object] | None = None
) -> torch.cuda.CUDAGraph:
    """A graph of one run, captured in ``mode``, after one on the side that compiles what it launches."""
    with beside(torch.device("cuda")):
        run()
    with mode or nullcontext(), capturing() as graph:
        run()
    return graph


def milliseconds(run: Callable[[], object], times: int) -> float:
    """Mean time of one of so many runs on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def alternately(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Median over rounds of each graph's time, the graphs in turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(ROUNDS + 1):
        order = list(graphs)[:: 1 if number % 2 else -1]
        for name in order:
            spent = milliseconds(graphs[name].replay, REPLAYS)
            if number:  # the first warms up
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    arguments = parser.parse_args()
    begun = time.time()
    torch.manual_seed(0)
    made = Pass(arguments.layers)
    checks = {
        f"{level}, {mask}": CapturedCheck(made.call(mask), level=level)
        for level in ("cheap", "full")
        for mask in ("bits", "flat")
    }
    graphs = {"alone": captured(made.run)}

    def with_check(check: CapturedCheck) -> Callable[[], object]:
        def run() -> object:
            check.launch()
            return made.run()

        return run

    for name, check in checks.items():
        graphs[name] = captured(with_check(check))
    kept: list[CapturedCheck] = []
    for level in ("cheap", "full"):
        with impl.check.keeping(kept):
            graphs[f"debug mode, {level}"] = captured(made.run, debug(level=level))
    only = {f"{name}, check alone": captured(check.launch) for name, check in checks.items()}
    print(f"captured after {time.time() - begun:.0f} s", flush=True)
    in_passes, alone = alternately(graphs), alternately(only)

    eager: dict[str, float] = {}
    made.run()
    for name, mode in (
        ("eager", nullcontext()), ("eager, cheap", debug(level="cheap")), ("eager, full", debug()),
    ):  # fmt: skip
        with mode:
            torch.cuda.synchronize()
            start = time.time()
            made.run()
            torch.cuda.synchronize()
            eager[name] = (time.time() - start) * 1e3

    for check in [*checks.values(), *kept]:
        violation = check.wait()
        assert violation is None, violation
        assert check.counts[0] > ROUNDS * REPLAYS and not check.counts[1], check.counts
        assert not check.doubts, "a clean call was doubted"
    base = in_passes["alone"]
    report = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "shape": {"batch": BATCH, "budget": BUDGET, "prefix": PREFIX, "layers": arguments.layers},
        "checks_in_debug_graphs": len(kept),
        "milliseconds": in_passes, "check_alone_milliseconds": alone, "eager_milliseconds": eager,
        "overhead_percent": {n: (t / base - 1) * 100 for n, t in in_passes.items()},
        "share_percent": {n: t / base * 100 for n, t in alone.items()},
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, spent in (in_passes | alone | eager).items():
        print(f"{name:32} {spent:9.3f} ms  {(spent / base - 1) * 100:+8.2f} %")


if __name__ == "__main__":
    main()

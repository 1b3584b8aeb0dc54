"""The round without the model on one GPU: checked against the reference, then timed in CUDA graphs.

Usage, from the repository's root: ``python3 bench/round.py [--part trees|rounds|times] [--out FILE]``.

Each figure is the median time of a graph's replays over the rounds in it; each round of a graph
reads its own inputs, together larger than the L2 cache. Nothing is timed before the same call has
equalled the reference. ``whole`` = build + plan + bits + accept + commit.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddtree import impl, spec  # noqa: E402
from ddtree.impl.rank import ranked  # noqa: E402
from ddtree.impl.sampling import first_argmax, row_uniforms  # noqa: E402
from ddtree.spec.sampling import first_argmax as spec_first_argmax  # noqa: E402
from ddtree.spec.sampling import row_uniforms as spec_row_uniforms  # noqa: E402
from tests.impl.replays import CAPTURED, replay, same  # noqa: E402

LAYERS, KV_HEADS, HEAD_DIM = 28, 8, 128
VOCAB, HORIZON, PREFIX = 151936, 15, 2048
SHAPES = [(16, 1), (64, 1), (128, 1), (256, 1), (512, 1), (1024, 1), (16, 32), (64, 32), (64, 8)]
"""(budget, batch)"""
TARGETS = {(64, 1): 60.0, (512, 1): 250.0, (64, 32): 400.0}
"""Microseconds of ``whole``."""


def draft(batch: int, horizon: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Log-probs on the GPU of bf16 logits: sharp at first, flatter with depth, many ties."""
    spread = torch.linspace(6.0, 3.0, max(horizon, 1), device="cuda")[:horizon, None]
    logits = torch.randn(batch, horizon, vocab, device="cuda", generator=generator) * spread
    return logits.bfloat16().float().log_softmax(-1)


def followed(
    tree: spec.DraftTree, layout: spec.VerifyLayout, generator: torch.Generator
) -> torch.Tensor:
    """Target choices ``[T]``: four nodes in five choose a child where they have one."""
    batch, rows = tree.token_ids.shape
    choice = torch.randint(0, 1000, (batch, rows + 1), device="cuda", generator=generator)
    follows = torch.rand(batch, rows, device="cuda", generator=generator) < 0.8
    parents = torch.where(follows & (tree.parents >= 0), tree.parents, rows).long()
    choice.scatter_(1, parents, tree.token_ids)
    flat = torch.zeros(layout.positions.numel(), dtype=torch.int64, device="cuda")
    for b in range(batch):
        start, end = layout.qo_indptr[b : b + 2].tolist()
        flat[start:end] = choice[b, : end - start]
    return flat


def to(device: str, value: Any) -> Any:
    """Move a contract's tensors."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(to(device, v) for v in value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{f: to(device, getattr(value, f)) for f in value.__dataclass_fields__})
    return value


def same_tree(name: str, found: spec.DraftTree, expected: spec.DraftTree) -> None:
    """Refuse any difference of two trees."""
    for field in found.__dataclass_fields__:
        same(f"{name} {field}", getattr(found, field), getattr(expected, field))


def check_trees(generator: torch.Generator) -> int:
    """Hold ``build_tree`` to the reference on fresh inputs of many kinds; return how many."""
    count = 0
    for batch, horizon, vocab, budget in [
        (1, 15, 151936, 64), (1, 15, 151936, 512), (2, 31, 32000, 1024), (3, 7, 262144, 255),
        (2, 15, 1000, 1024), (5, 3, 7, 33), (4, 15, 50257, 16), (1, 1, 33, 64), (33, 7, 997, 17),
        (256, 4, 131, 8), (2, 0, 5, 4), (2, 3, 5, 0),
    ]:  # fmt: skip
        shape = (batch, horizon, vocab)
        base = draft(*shape, generator)
        noise = torch.rand(shape, device="cuda", generator=generator)
        kinds = {
            "bf16 logits": base,
            "normal": torch.randn(shape, device="cuda", generator=generator).log_softmax(-1),
            "flat": torch.zeros(shape, device="cuda").log_softmax(-1),
            "grid": (noise * 6).floor().log_softmax(-1),
            "sparse": base.masked_fill(noise < 0.9, -torch.inf),
            "two left": base.masked_fill(
                base < base.topk(min(2, vocab), -1).values[..., -1:], -torch.inf
            ),
            "zeros": torch.where(noise < 0.01, -0.0, -noise * 1e-18 - (noise < 0.5).float()),
            "huge": -3.4e38 * noise,
        }
        if batch == 1:
            kinds |= {"bf16": base.bfloat16(), "fp16": base.half()}
        for kind, log_probs in kinds.items():
            roots = torch.randint(0, vocab, (batch,), device="cuda", generator=generator)
            for topk in (None, 4) if kind == "grid" else (None,):
                found = impl.build_tree(log_probs, roots, budget, topk)
                same_tree(
                    f"{shape} budget {budget} {kind}",
                    found,
                    spec.build_tree(log_probs.cpu(), roots.cpu(), budget, topk),
                )
                count += 1
    return count


def check_rounds(generator: torch.Generator, replays: int) -> int:
    """Replay captured rounds of a toy target over random shapes; hold each to the reference."""
    for config in CAPTURED.values():
        replay(config, replays, generator)
    return replays * len(CAPTURED)


@dataclass
class Inputs:
    """One round's inputs on the GPU."""

    log_probs: torch.Tensor
    roots: torch.Tensor
    prefix_lens: torch.Tensor
    slot_table: torch.Tensor
    target_ids: torch.Tensor


def whole(inputs: Inputs, kv: spec.PagedKV, budget: int) -> tuple[Any, ...]:
    """Everything of a round but the model."""
    tree = impl.build_tree(inputs.log_probs, inputs.roots, budget)
    layout = impl.plan_verify(tree, inputs.prefix_lens, kv.slot_table)
    mask = impl.tree_mask(tree, layout)
    acceptance = impl.accept_greedy(tree, inputs.target_ids, layout, HORIZON)
    return tree, layout, mask, acceptance, impl.commit_kv(kv, layout, acceptance)


def check_whole(inputs: Inputs, kv: spec.PagedKV, budget: int) -> None:
    """Hold one whole round to the reference, with the sync debug mode on."""
    known_kv = to(
        "cpu",
        spec.PagedKV(
            tuple(p.clone() for p in kv.keys[:2]),
            tuple(p.clone() for p in kv.values[:2]),
            kv.slot_table.clone(),
            kv.page_size,
        ),
    )
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    tree, layout, mask, acceptance, commit = whole(inputs, kv, budget)
    torch.cuda.set_sync_debug_mode("default")
    known_tree = spec.build_tree(inputs.log_probs.cpu(), inputs.roots.cpu(), budget)
    same_tree("whole", tree, known_tree)
    known = spec.plan_verify(known_tree, inputs.prefix_lens.cpu(), known_kv.slot_table)
    for field in ("qo_indptr", "kv_indptr", "mask_indptr", "positions", "out_cache_loc"):
        same(field, getattr(layout, field), getattr(known, field))
    same("kv_indices", layout.kv_indices[: known.kv_indices.numel()], known.kv_indices)
    same("bits", mask.words, spec.tree_mask(known_tree, known).words)
    known_acceptance = spec.accept_greedy(known_tree, inputs.target_ids.cpu(), known, HORIZON)
    known_commit = spec.commit_kv(known_kv, known, known_acceptance)
    for found, expected in ((acceptance, known_acceptance), (commit, known_commit)):
        for field in found.__dataclass_fields__:
            same(field, getattr(found, field), getattr(expected, field))
    same("slot table", kv.slot_table, known_kv.slot_table)
    for pool, expected in zip(
        kv.keys[:2] + kv.values[:2], known_kv.keys + known_kv.values, strict=True
    ):
        same("pool", pool, expected)


def microseconds(calls: list[Callable[[], Any]], repeats: int = 30) -> float:
    """Median time of one call, over replays of a graph that makes all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return statistics.median(times)


def measure(budget: int, batch: int, generator: torch.Generator) -> dict[str, float]:
    """Check and time one shape."""
    q_len, context = budget + 1, PREFIX + budget + 1
    sets = max(2, min(12, -(-120_000_000 // (batch * HORIZON * VOCAB * 4))))
    pages = -(-context // 16)
    num_slots = batch * pages * 16
    pools = [
        torch.randn(num_slots, KV_HEADS, HEAD_DIM, device="cuda", generator=generator).bfloat16()
        for _ in range(2 * LAYERS)
    ]
    inputs, kvs = [], {1: [], 16: []}
    for _ in range(sets):
        order = torch.randperm(batch * pages, device="cuda", generator=generator)
        table = (
            (order[:, None] * 16 + torch.arange(16, device="cuda"))
            .view(batch, -1)[:, :context]
            .contiguous()
        )
        log_probs = draft(batch, HORIZON, VOCAB, generator)
        roots = torch.randint(0, VOCAB, (batch,), device="cuda", generator=generator)
        prefix_lens = torch.randint(
            PREFIX // 2, PREFIX, (batch,), device="cuda", dtype=torch.int32, generator=generator
        )
        tree = impl.build_tree(log_probs, roots, budget)
        layout = impl.plan_verify(tree, prefix_lens, table)
        inputs.append(
            Inputs(log_probs, roots, prefix_lens, table, followed(tree, layout, generator))
        )
        for page_size, rows in kvs.items():
            rows.append(
                spec.PagedKV(tuple(pools[:LAYERS]), tuple(pools[LAYERS:]), table.clone(), page_size)
            )
    for rows in kvs.values():
        whole(inputs[-1], rows[-1], budget)  # compile
        check_whole(inputs[0], rows[0], budget)

    made = [whole(i, kv, budget) for i, kv in zip(inputs, kvs[16], strict=True)]
    pairs = list(zip(inputs, made, strict=True))
    result = {
        "accepted": statistics.mean(float(m[3].num_accepted.float().mean()) for m in made),
        "build": microseconds(
            [lambda i=i: impl.build_tree(i.log_probs, i.roots, budget) for i in inputs]
        ),
        "rank": microseconds([lambda i=i: ranked(i.log_probs, min(budget, VOCAB)) for i in inputs]),
        "plan": microseconds(
            [lambda i=i, m=m: impl.plan_verify(m[0], i.prefix_lens, i.slot_table) for i, m in pairs]
        ),
        "bits": microseconds([lambda m=m: impl.tree_mask(m[0], m[1]) for _, m in pairs]),
        "accept": microseconds(
            [
                lambda i=i, m=m: impl.accept_greedy(m[0], i.target_ids, m[1], HORIZON)
                for i, m in pairs
            ]
        ),
    }
    for page_size, rows in kvs.items():
        result[f"commit{page_size}"] = microseconds(
            [
                lambda m=m, kv=kv: impl.commit_kv(kv, m[1], m[3])
                for (_, m), kv in zip(pairs, rows, strict=True)
            ]
        )
        result[f"whole{page_size}"] = microseconds(
            [lambda i=i, kv=kv: whole(i, kv, budget) for i, kv in zip(inputs, rows, strict=True)]
        )
    if batch * q_len <= 65:
        result.update(measure_choice(made[0], batch * q_len, generator))
    return result


def measure_choice(
    made: tuple[Any, ...], rows: int, generator: torch.Generator
) -> dict[str, float]:
    """Check and time the target's choice from bf16 logits: argmax and samples."""
    logits = [
        (torch.randn(rows, VOCAB, device="cuda", generator=generator) * 4).bfloat16()
        for _ in range(3)
    ]
    tree, layout = made[0], made[1]
    sampling = spec.Sampling(seed=7)
    uniforms = row_uniforms(sampling, layout, tree.token_ids.shape[0])
    same(
        "uniforms",
        uniforms[:rows],
        spec_row_uniforms(sampling, to("cpu", layout), tree.token_ids.shape[0])[:rows],
    )
    same("argmax", first_argmax(logits[0]), spec_first_argmax(logits[0].cpu()))
    result = {"argmax": microseconds([lambda x=x: first_argmax(x) for x in logits])}
    for name, temperature, top_k, top_p in [
        ("sample", 1.0, None, None),
        ("top-k", 0.8, 50, None),
        ("top-p", 0.8, None, 0.9),
    ]:
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        found = impl.accept_sampled(tree, logits[0], layout, HORIZON, uniforms, **options)
        expected = spec.accept_sampled(
            *to("cpu", (tree, logits[0], layout)), HORIZON, uniforms.cpu(), **options
        )
        same(f"{name} bonus", found.bonus, expected.bonus)
        same(f"{name} nodes", found.nodes, expected.nodes)
        result[name] = microseconds(
            [
                lambda x=x, o=options: impl.accept_sampled(tree, x, layout, HORIZON, uniforms, **o)
                for x in logits
            ],
            10,
        )
    return result


def main() -> None:
    """Check, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--part", choices=("trees", "rounds", "times"), help="one part alone")
    parser.add_argument("--replays", type=int, default=50, help="replays of each captured round")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(options.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)  # poisons what torch.empty returns
    if options.part in (None, "trees"):
        print(f"trees equal to the reference: {check_trees(generator)}", flush=True)
    if options.part in (None, "rounds"):
        count = check_rounds(generator, options.replays)
        print(f"captured rounds equal to the reference: {count}", flush=True)
    torch.use_deterministic_algorithms(False)
    if options.part in (None, "times"):
        measure_all(generator, options.out)


def measure_all(generator: torch.Generator, out: Path | None) -> None:
    """Time every shape, print a table, write JSON."""
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    results = []
    names: list[str] = []
    for budget, batch in SHAPES:
        result = measure(budget, batch, generator)
        names = names or list(result)
        target = TARGETS.get((budget, batch))
        results.append({"budget": budget, "batch": batch, "target_us": target, **result})
        if len(results) == 1:
            print("budget batch " + " ".join(f"{name:>8}" for name in names) + "   target")
        print(
            f"{budget:6} {batch:5} "
            + " ".join(f"{result[n]:8.1f}" if n in result else " " * 8 for n in names)
            + f"   {target or ''}",
            flush=True,
        )
        torch.cuda.empty_cache()
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine, "us": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

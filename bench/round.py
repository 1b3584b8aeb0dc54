"""The round without the model on one GPU: checked against the reference, then timed in CUDA graphs.

Usage, from the repository's root: ``python3 bench/round.py [--part trees rounds times choice]
[--shapes 64x1,512x1] [--out FILE]``. A shape is budget x batch; its times are written into FILE as soon
as they are there, beside those of other shapes, so that a run may be cut in pieces.

Each figure is the median time of a graph's replays over the rounds in it; each round of a graph
reads its own inputs, together larger than the L2 cache. No shape is timed before its calls have equalled
the reference, in processes of their own. ``whole`` = build + plan + bits + accept + commit.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddtree import impl, spec  # noqa: E402
from ddtree.impl.rank import ranked  # noqa: E402
from ddtree.impl.sampling import first_argmax, row_uniforms  # noqa: E402
from ddtree.invariants.streams import capturing  # noqa: E402
from ddtree.spec import Budget, Horizon  # noqa: E402
from ddtree.spec.sampling import first_argmax as spec_first_argmax  # noqa: E402
from ddtree.spec.sampling import row_uniforms as spec_row_uniforms  # noqa: E402
from tests.impl.replays import CAPTURED, replay, same  # noqa: E402

LAYERS, KV_HEADS, HEAD_DIM = 28, 8, 128
VOCAB, HORIZON, PREFIX = 151936, Horizon(15), 2048
SHAPES = [(budget, batch) for batch in (1, 8, 32) for budget in (16, 64, 128, 256, 512, 1024)]
"""(budget, batch)"""
TARGETS = {(64, 1): 60.0, (512, 1): 250.0, (64, 32): 400.0}
"""Microseconds of ``whole``."""
TREES = [  # batch, horizon, vocab, budget
    (1, 15, 151936, 64), (1, 15, 151936, 512), (2, 31, 32000, 1024), (3, 7, 262144, 255),
    (2, 15, 1000, 1024), (5, 3, 7, 33), (4, 15, 50257, 16), (1, 1, 33, 64), (33, 7, 997, 17),
    (256, 4, 131, 8), (2, 0, 5, 4), (2, 3, 5, 0),
]  # fmt: skip


@contextmanager
def workers(count: int) -> Iterator[Executor]:
    """Processes that share the GPU and hold ``impl`` to the reference, a core each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=start_worker) as pool:
        yield pool


def start_worker() -> None:
    """Use one core, poison what torch.empty returns, and do not say that the sync mode is new."""
    warnings.filterwarnings("ignore", message="Synchronization debug mode")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)


def draft_logits(batch: int, horizon: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Bf16 logits on the GPU: sharp at first, flatter with depth, many ties."""
    spread = torch.linspace(6.0, 3.0, max(horizon, 1), device="cuda")[:horizon, None]
    logits = torch.randn(batch, horizon, vocab, device="cuda", generator=generator) * spread
    return logits.bfloat16()


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


def check_tree(name: str, draft: torch.Tensor, budget: int, topk: int | None, logits: bool) -> None:
    """Hold one batch of trees to the reference."""
    roots = torch.randint(0, draft.shape[2], draft.shape[:1], device="cuda")
    same_tree(
        f"{name} {list(draft.shape)} {draft.dtype} budget {budget} topk {topk} logits {logits}",
        impl.build_tree(draft, roots, Budget(budget), topk, from_logits=logits),
        spec.build_tree(draft.cpu(), roots.cpu(), Budget(budget), topk, from_logits=logits),
    )


def check_trees(shape: tuple[int, int, int, int], count: int) -> int:
    """Hold one shape's trees to the reference: every kind, ``count`` random ones; return how many.

    One process takes a whole shape, which compiles its kernels once.
    """
    batch, horizon, vocab, budget = shape
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    logits = draft_logits(batch, horizon, vocab, generator)
    base = logits.float().log_softmax(-1)
    normal = torch.randn(shape[:3], device="cuda", generator=generator)
    noise = torch.rand(shape[:3], device="cuda", generator=generator)
    second = base.topk(min(2, base.shape[2]), -1).values[..., -1:]
    grid = (noise * 6).floor()
    log_probs = {
        "bf16 logits": base,
        "normal": normal.log_softmax(-1),
        "flat": torch.zeros_like(noise).log_softmax(-1),
        "grid": grid.log_softmax(-1),
        "sparse": base.masked_fill(noise < 0.9, -torch.inf),
        "two left": base.masked_fill(base < second, -torch.inf),
        "zeros": torch.where(noise < 0.01, -0.0, -noise * 1e-18 - (noise < 0.5).float()),
        "huge": -3.4e38 * noise,
        "bf16": base.bfloat16(),
        "fp16": base.half(),
    }
    of_logits = {
        "bf16": logits,
        "fp16": logits.half(),
        "normal": normal * 5 + 3,
        "flat": torch.full_like(noise, 7.5),
        "grid": grid.bfloat16(),
        "hairs": normal * 1e-7,
        "sparse": logits.masked_fill(noise < 0.9, -torch.inf),
        "two left": logits.masked_fill(base < second, -torch.inf),
        "huge": 3.4e38 * normal.clamp(-1, 1),
        "log-probs": base,
    }
    for is_logits, kinds in ((False, log_probs), (True, of_logits)):
        for kind, draft in kinds.items():
            check_tree(kind, draft, budget, 4 if kind == "sparse" else None, is_logits)
    for seed in range(count):
        draft, topk = random_logits(shape, seed)
        check_tree(f"seed {seed}", draft.cuda(), budget, topk, logits=True)
    return len(log_probs) + len(of_logits) + count


def random_logits(shape: tuple[int, int, int, int], seed: int) -> tuple[torch.Tensor, int | None]:
    """Logits of any dtype, scale, shift, with ties and -inf or without, and a topk."""
    g = torch.Generator().manual_seed(seed)

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(0, len(values), (), generator=g))]

    draft = torch.randn(shape[:3], generator=g)
    draft = draft * one_of(1e-8, 0.1, 1.0, 3.0, 8.0, 100.0, 1e4) + one_of(0.0, 0.0, -9.0, 3e4)
    draft = draft.clamp(-6e4, 6e4).to(one_of(torch.float32, torch.bfloat16, torch.float16))
    if one_of(False, True):
        draft = draft.round()
    share = one_of(0.0, 0.0, 0.5, 0.999, 1.0)
    draft = draft.masked_fill(torch.rand(draft.shape, generator=g) < share, -torch.inf)
    return draft, one_of(None, None, 4)


def check_rounds(generator: torch.Generator, replays: int) -> int:
    """Replay captured rounds of a toy target over random shapes; hold each to the reference."""
    for config in CAPTURED.values():
        replay(config, replays, generator)
    return replays * len(CAPTURED)


@dataclass
class Inputs:
    """One round's inputs on the GPU; the log-probs are PyTorch's of the logits."""

    logits: torch.Tensor
    log_probs: torch.Tensor
    roots: torch.Tensor
    prefix_lens: torch.Tensor
    slot_table: torch.Tensor
    target_ids: torch.Tensor


def draw_inputs(budget: int, batch: int, generator: torch.Generator) -> tuple[Inputs, torch.Tensor]:
    """Draw one round's inputs and its slot table, in pages of 16."""
    context = PREFIX + budget + 1
    order = torch.randperm(batch * pages_of(budget), device="cuda", generator=generator)
    table = order[:, None] * 16 + torch.arange(16, device="cuda")
    table = table.view(batch, -1)[:, :context].contiguous()
    logits = draft_logits(batch, HORIZON, VOCAB, generator)
    log_probs = logits.float().log_softmax(-1)
    roots = torch.randint(0, VOCAB, (batch,), device="cuda", generator=generator)
    prefix_lens = torch.randint(
        PREFIX // 2, PREFIX, (batch,), device="cuda", dtype=torch.int32, generator=generator
    )
    tree = impl.build_tree(logits, roots, Budget(budget), from_logits=True)
    layout = impl.plan_verify(tree, prefix_lens, table)
    target_ids = followed(tree, layout, generator)
    return Inputs(logits, log_probs, roots, prefix_lens, table, target_ids), table


def pages_of(budget: int) -> int:
    """Pages of 16 entries that a request may fill."""
    return -(-(PREFIX + budget + 1) // 16)


def draw_pools(budget: int, batch: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Draw key and value pools of all layers."""
    shape = (batch * pages_of(budget) * 16, KV_HEADS, HEAD_DIM)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(2 * LAYERS)
    ]


def paged(pools: list[torch.Tensor], table: torch.Tensor, page_size: int) -> spec.PagedKV:
    """A KV of these pools with a slot table of its own."""
    return spec.PagedKV(tuple(pools[:LAYERS]), tuple(pools[LAYERS:]), table.clone(), page_size)


def build(inputs: Inputs, budget: int, *, from_logits: bool) -> spec.DraftTree:
    """The trees, from logits in bf16 or from log-probs in float32."""
    draft = inputs.logits if from_logits else inputs.log_probs
    return impl.build_tree(draft, inputs.roots, Budget(budget), from_logits=from_logits)


def whole(
    inputs: Inputs, kv: spec.PagedKV, budget: int, *, from_logits: bool = True
) -> tuple[Any, ...]:
    """Everything of a round but the model."""
    tree = build(inputs, budget, from_logits=from_logits)
    layout = impl.plan_verify(tree, inputs.prefix_lens, kv.slot_table)
    mask = impl.tree_mask(tree, layout)
    acceptance = impl.accept_greedy(tree, inputs.target_ids, layout, HORIZON)
    return tree, layout, mask, acceptance, impl.commit_kv(kv, layout, acceptance)


def check_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Hold whole rounds of one shape to the reference: logits and slots, log-probs and pages."""
    budget, batch = shape
    generator = torch.Generator("cuda").manual_seed(budget + batch)
    pools = draw_pools(budget, batch, generator)
    inputs, table = draw_inputs(budget, batch, generator)
    for page_size, from_logits in ((1, True), (16, False)):
        whole(inputs, paged(pools, table, page_size), budget, from_logits=from_logits)  # compile
        check_whole(inputs, paged(pools, table, page_size), budget, from_logits)
    return shape


def check_whole(inputs: Inputs, kv: spec.PagedKV, budget: int, from_logits: bool) -> None:
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
    tree, layout, mask, acceptance, commit = whole(inputs, kv, budget, from_logits=from_logits)
    torch.cuda.set_sync_debug_mode("default")
    draft = inputs.logits if from_logits else inputs.log_probs
    known_tree = spec.build_tree(
        draft.cpu(), inputs.roots.cpu(), Budget(budget), from_logits=from_logits
    )
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
    with capturing() as graph:
        kept = [call() for call in calls]
    for _ in range(3):
        graph.replay()
    times: list[float] = []
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
    """Time one shape."""
    sets = max(2, min(24, -(-120_000_000 // (batch * HORIZON * VOCAB * 2))))
    pools = draw_pools(budget, batch, generator)
    drawn = [draw_inputs(budget, batch, generator) for _ in range(sets)]
    inputs = [each for each, _ in drawn]
    kvs = {size: [paged(pools, table, size) for _, table in drawn] for size in (1, 16)}
    made = [whole(i, kv, budget) for i, kv in zip(inputs, kvs[16], strict=True)]
    pairs = list(zip(inputs, made, strict=True))
    kept = min(budget, VOCAB)
    result = {
        "accepted": statistics.mean(float(m[3].num_accepted.float().mean()) for m in made),
        "build": microseconds([partial(build, i, budget, from_logits=True) for i in inputs]),
        "rank": microseconds([partial(ranked, i.logits, kept, softmax=True) for i in inputs]),
        "log_probs_build": microseconds(
            [partial(build, i, budget, from_logits=False) for i in inputs]
        ),
        "log_probs_rank": microseconds([partial(ranked, i.log_probs, kept) for i in inputs]),
        "plan": microseconds(
            [partial(impl.plan_verify, m[0], i.prefix_lens, i.slot_table) for i, m in pairs]
        ),
        "bits": microseconds([partial(impl.tree_mask, m[0], m[1]) for _, m in pairs]),
        "accept": microseconds(
            [partial(impl.accept_greedy, m[0], i.target_ids, m[1], HORIZON) for i, m in pairs]
        ),
    }
    for page_size, rows in kvs.items():
        result[f"commit{page_size}"] = microseconds(
            [
                partial(impl.commit_kv, kv, m[1], m[3])
                for (_, m), kv in zip(pairs, rows, strict=True)
            ]
        )
    for name, page_size, from_logits in (
        ("whole1", 1, True), ("whole16", 16, True), ("log_probs_whole1", 1, False),
    ):  # fmt: skip
        result[name] = microseconds(
            [
                partial(whole, i, kv, budget, from_logits=from_logits)
                for i, kv in zip(inputs, kvs[page_size], strict=True)
            ]
        )
    return result


def measure_choice(generator: torch.Generator, rows: int = 65) -> dict[str, float]:
    """Check and time the target's choice of one tree from bf16 logits: argmax and samples."""
    logits = [
        (torch.randn(rows, VOCAB, device="cuda", generator=generator) * 4).bfloat16()
        for _ in range(3)
    ]
    inputs, table = draw_inputs(rows - 1, 1, generator)
    tree = build(inputs, rows - 1, from_logits=True)
    layout = impl.plan_verify(tree, inputs.prefix_lens, table)
    sampling = spec.Sampling(seed=7)
    uniforms = row_uniforms(sampling, layout, tree.token_ids.shape[0])
    same(
        "uniforms",
        uniforms[:rows],
        spec_row_uniforms(sampling, to("cpu", layout), tree.token_ids.shape[0])[:rows],
    )
    same("argmax", first_argmax(logits[0]), spec_first_argmax(logits[0].cpu()))
    result = {"argmax": microseconds([partial(first_argmax, x) for x in logits])}
    for name, temperature, top_k, top_p in [
        ("sample", 1.0, None, None),
        ("top-k", 0.8, 50, None),
        ("top-p", 0.8, None, 0.9),
    ]:
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        found = impl.accept_sampled(tree, logits[0], layout, HORIZON, uniforms, **options)
        known_tree, known_layout = to("cpu", tree), to("cpu", layout)
        expected = spec.accept_sampled(
            known_tree, logits[0].cpu(), known_layout, HORIZON, uniforms.cpu(), **options
        )
        same(f"{name} bonus", found.bonus, expected.bonus)
        same(f"{name} nodes", found.nodes, expected.nodes)
        result[name] = microseconds(
            [
                partial(impl.accept_sampled, tree, x, layout, HORIZON, uniforms, **options)
                for x in logits
            ],
            10,
        )
    return result


def shapes_of(text: str) -> list[tuple[int, int]]:
    """Read ``64x1,512x32``."""
    pairs = [part.split("x") for part in text.split(",")]
    return [(int(budget), int(batch)) for budget, batch in pairs]


def main() -> None:
    """Check, measure, print a table, write JSON."""
    parts = ("trees", "rounds", "times", "choice")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, help="these parts alone")
    parser.add_argument("--shapes", type=shapes_of, default=SHAPES, help="budget x batch, ...")
    parser.add_argument("--random", type=int, default=20, help="random batches of trees a shape")
    parser.add_argument("--replays", type=int, default=50, help="replays of each captured round")
    parser.add_argument("--processes", type=int, default=16, help="that compare with the reference")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(options.seed)
    with workers(options.processes) as pool:
        shapes = pool.map(check_shape, options.shapes if "times" in options.part else ())
        held = TREES if "trees" in options.part else []
        trees = pool.map(check_trees, held, [options.random] * len(held))
        if "rounds" in options.part:
            torch.use_deterministic_algorithms(True, warn_only=True)  # poisons torch.empty
            count = check_rounds(generator, options.replays)
            torch.use_deterministic_algorithms(False)
            print(f"captured rounds equal to the reference: {count}", flush=True)
        checked = list(shapes)
        print(f"whole rounds equal to the reference: {checked}", flush=True)
        print(f"batches of trees equal to the reference: {sum(trees)}", flush=True)
    if "times" in options.part:
        measure_all(checked, generator, options.out)
    if "choice" in options.part:
        print(f"the target's choice of 65 rows: {measure_choice(generator)}")


def measure_all(
    shapes: Sequence[tuple[int, int]], generator: torch.Generator, out: Path | None
) -> None:
    """Time every shape, print a table, write JSON after each."""
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    rows = {}
    if out and out.exists():
        rows = {(r["budget"], r["batch"]): r for r in json.loads(out.read_text())["us"]}
    for at, (budget, batch) in enumerate(shapes):
        result = measure(budget, batch, generator)
        target = TARGETS.get((budget, batch))
        rows[budget, batch] = {"budget": budget, "batch": batch, "target_us": target, **result}
        if at == 0:
            print("budget batch " + " ".join(f"{name:>8}" for name in result) + "   target")
        print(
            f"{budget:6} {batch:5} "
            + " ".join(f"{us:{max(8, len(name))}.1f}" for name, us in result.items())
            + f"   {target or ''}",
            flush=True,
        )
        torch.cuda.empty_cache()
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            ordered = sorted(rows.values(), key=lambda row: (row["batch"], row["budget"]))
            out.write_text(json.dumps({"machine": machine, "us": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()

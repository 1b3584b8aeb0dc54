"""Measure ``verify_attention`` on a GPU: correctness first, then times.

A time is the median of CUDA-graph replays. One graph runs the call once on each of several KV pools,
which together are much larger than the L2 cache, with shuffled slots; the time is divided by their
number. ``floor`` is the larger of bytes (each read or written once) over the memory's rate and operations
over the matrix units' rate. What is timed has been compared with the reference in float64 before.

    python bench/attention.py check    results against the reference, all dtypes and options
    python bench/attention.py sweep    several configurations on every shape
    python bench/attention.py grid     the chosen configuration, and PyTorch's attention beside it
"""

import argparse
import json
import math
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from ddtree import spec
from ddtree.impl.attention import attend
from ddtree.impl.attention_configs import AttentionConfig, choose_config

RESULTS = Path(__file__).resolve().parent / "results"
BYTES_PER_S = 4.3e12  # what copies reach on an H200
FLOP_PER_S = 770e12  # what bf16 matrix products reach there
COLD_BYTES = 400e6  # pools of a cell together, eight times the L2 cache
MAX_POOLS = 12
LEAST_FLOOR_US = 15.0
"""Below, launches weigh more than the work: left out of the mean over the floor."""


@dataclass(frozen=True)
class Cell:
    """One shape."""

    batch: int
    q_len: int
    prefix: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 1

    @property
    def floor_us(self) -> float:
        """No kernel can be faster than this."""
        entries = self.batch * (self.prefix + self.q_len)
        kv = 2 * 2 * entries * self.kv_heads * self.head_dim
        qo = 2 * 2 * self.batch * self.q_len * self.q_heads * self.head_dim
        flop = 4 * entries * self.q_heads * self.q_len * self.head_dim
        return 1e6 * max((kv + qo) / BYTES_PER_S, flop / FLOP_PER_S)

    @property
    def one_less(self) -> "Cell":
        """The same without one row: full tiles, where the root makes q_len = 2^k + 1."""
        return replace(self, q_len=self.q_len - 1)

    def __str__(self) -> str:
        """Batch, q_len, prefix, heads, and what is not usual."""
        dim = f" dim {self.head_dim}" if self.head_dim != 128 else ""
        page = f" page {self.page_size}" if self.page_size != 1 else ""
        return (
            f"{self.batch}, {self.q_len}, {self.prefix}, {self.q_heads}/{self.kv_heads}{dim}{page}"
        )


# Peers on an H200 in an earlier run (torch 2.11.0+cu130, Triton 3.6.0, bf16, head dim 128), not measured
# here: SGLang 0.5.23 extend_attention_fwd, FlashInfer 0.6.7 paged prefill with a custom mask, and SDPA
# with a dense additive mask on repeated contiguous KV, microseconds.
RECORDED = {
    Cell(1, 17, 2048): (128, 30.3, 130),
    Cell(1, 65, 2048): (135, 49, 134),
    Cell(1, 257, 2048): (146, 144, 157),
    Cell(1, 513, 2048): (280, 363, 286),
    Cell(1, 17, 16384): (1081, 86.9, 933),
    Cell(1, 65, 16384): (1085, 235, 955),
    Cell(1, 257, 16384): (1099, 809, 1015),
    Cell(1, 513, 16384): (2196, 2313, 1793),
    Cell(1, 17, 65536): (4269, 309, 3678),
    Cell(1, 65, 65536): (4285, 867, 3731),
    Cell(1, 257, 65536): (4271, 3082, 3972),
    Cell(1, 513, 65536): (8604, 9070, 7180),
    Cell(8, 17, 4096): (528, 179, 868),
    Cell(8, 65, 4096): (553, 603, 890),
    Cell(8, 257, 4096): (1639, 1725, 1681),
    Cell(8, 513, 4096): (2838, 3048, 2554),
    Cell(32, 17, 2048): (1087, 317, 1743),
    Cell(32, 65, 2048): (1154, 927, 1798),
    Cell(32, 257, 2048): (3690, 3004, 3516),
    Cell(32, 513, 2048): (6538, 6191, 5610),
    Cell(1, 17, 16384, 32, 4): (1069, 88.0, 927),
    Cell(1, 257, 16384, 32, 4): (1094, 803, 997),
    Cell(16, 65, 4096, 32, 4): (1077, 1094, 1734),
}
PEERS = ("sglang_us", "flashinfer_us", "sdpa_dense_us")
GRID = list(RECORDED)
VARIED = [Cell(1, 17, 16384), Cell(1, 257, 16384), Cell(8, 65, 4096), Cell(32, 17, 2048)]
"""Cells that the grid also measures with head dim 64 and with pages of 16 and 64 slots."""


def geometric_mean(ratios: list[float]) -> float:
    """The mean of what multiplies."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def machine() -> dict[str, str]:
    """What a result was measured on."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


@dataclass
class Call:
    """The tensors of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_pool: Tensor
    value_pool: Tensor
    layout: spec.VerifyLayout
    mask: spec.BitMask

    def run(self, config: AttentionConfig, **options: Any) -> tuple[Tensor, Tensor | None]:
        """One call with a configuration."""
        given = {"softcap": None, "sinks": None, "window": None, "return_lse": False, **options}
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return attend(
            self.query,
            self.key,
            self.value,
            self.key_pool,
            self.value_pool,
            self.layout,
            self.mask.words,
            scale=self.query.shape[2] ** -0.5,
            config=config,
            num_programs=config.programs_per_sm * sms,
            **given,
        )

    def reference(self, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The same by the reference in float64."""
        return spec.verify_attention(
            self.query,
            self.key,
            self.value,
            self.key_pool,
            self.value_pool,
            self.layout,
            self.mask,
            compute_dtype=torch.float64,
            **options,
        )


@cache
def best_first_tree(q_len: int, depth: int = 15) -> spec.DraftTree:
    """A tree as DDTree builds it: peaked marginals, horizon 15."""
    generator = torch.Generator().manual_seed(q_len)
    logits = 10.0 * torch.randn(1, depth, max(1024, q_len), generator=generator)
    return spec.build_tree(
        logits.log_softmax(-1), torch.zeros(1, dtype=torch.int64), spec.Budget(q_len - 1)
    )


def make_call(
    q_lens: list[int], prefixes: list[int], q_heads: int, kv_heads: int, head_dim: int,
    dtype: torch.dtype = torch.bfloat16, page_size: int = 1, seed: int = 0, spare_pages: int = 1,
) -> Call:  # fmt: skip
    """Random tensors on the GPU; pages are shuffled over the pool; equal trees for equal q_len."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    batch, pages = len(q_lens), [-(-p // page_size) for p in prefixes]
    shuffled = torch.randperm(sum(pages) + spare_pages, generator=generator, device="cuda")[
        : sum(pages)
    ]
    slots = (shuffled[:, None] * page_size + torch.arange(page_size, device="cuda")).split(pages)
    trees = [best_first_tree(q) for q in q_lens]

    def indptr(lengths: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(dtype)

    layout = spec.VerifyLayout(
        qo_indptr=indptr(q_lens, torch.int32),
        kv_indptr=indptr(prefixes, torch.int32),
        kv_indices=torch.cat([s.flatten()[:p] for s, p in zip(slots, prefixes, strict=True)]),
        mask_indptr=indptr(
            [q * (p + q) for q, p in zip(q_lens, prefixes, strict=True)], torch.int64
        ),
        max_q_len=max(q_lens),
        positions=torch.cat(
            [p + t.depths[0].long() for p, t in zip(prefixes, trees, strict=True)]
        ).cuda(),
        out_cache_loc=torch.full((sum(q_lens),), -1, device="cuda"),
    )
    num_words = -(-max(q_lens) // 32)
    words = torch.cat([pad(tree_words(q), (0, num_words - tree_words(q).shape[1])) for q in q_lens])

    def random(rows: int, heads: int) -> Tensor:
        return torch.randn(
            rows, heads, head_dim, generator=generator, device="cuda", dtype=torch.float32
        ).to(dtype)

    def pool() -> Tensor:  # slots that no entry uses hold NaN
        slots = (sum(pages) + spare_pages) * page_size
        tensor = torch.full((slots, kv_heads, head_dim), torch.nan, dtype=dtype, device="cuda")
        tensor[layout.kv_indices] = random(layout.kv_indices.numel(), kv_heads)
        return tensor

    rows = sum(q_lens)
    assert batch == len(prefixes)
    return Call(
        random(rows, q_heads),
        random(rows, kv_heads),
        random(rows, kv_heads),
        pool(),
        pool(),
        layout,
        spec.BitMask(words.cuda()),
    )


@cache
def tree_words(q_len: int) -> Tensor:
    """Ancestor words of ``best_first_tree``."""
    tree = best_first_tree(q_len)
    layout = spec.plan_verify(tree, torch.zeros(1, dtype=torch.int64), torch.arange(q_len)[None])
    return spec.tree_mask(tree, layout, "bits").words


def error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN stays NaN."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# Of the output: rounding of the softmax's weights and of the result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LSE_TOLERANCE = 1e-5  # sums are float32 in every dtype, products of float32 inputs exact

CHECK_OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 40},
    {"softcap": 20.0},
    {"sinks": True},
    {"window": 3, "softcap": 5.0, "sinks": True},
]


@dataclass(frozen=True)
class CheckShape:
    """One ragged call."""

    q_lens: list[int]
    prefixes: list[int]
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 1
    spare_pages: int = 1


CHECK_SHAPES = [
    CheckShape([17], [200]),
    CheckShape([65, 1, 130], [0, 65, 1500]),
    CheckShape([257], [2048]),
    CheckShape([513, 33], [64, 4099], 8, 2, page_size=16),
    CheckShape([2, 7, 17, 33], [63, 64, 65, 1], 6, 2, 64),
    CheckShape([65, 17], [1000, 3], 4, 4, 96),
    CheckShape([33], [777], 16, 2, 256, page_size=64),
    CheckShape([17] * 40, [100 + 37 * i for i in range(40)], 8, 1),
    CheckShape([17, 65], [3000, 65], spare_pages=1_500_000),  # byte offsets past 2^31
    CheckShape([17, 65], [3000, 65], spare_pages=2_200_000),  # element offsets past 2^31
]


def check_one(dtype: torch.dtype, number: int) -> list[dict[str, Any]]:
    """Compare one shape in one dtype with the reference, over the options (in a process of its own)."""
    shape = CHECK_SHAPES[number]
    call = make_call(**asdict(shape), dtype=dtype, seed=number)
    config = choose_config(dtype, shape.head_dim)
    rows = []
    for option in CHECK_OPTIONS:
        given = dict(option)
        if given.pop("sinks", False):
            given["sinks"] = torch.randn(shape.q_heads, device="cuda")
        expected, expected_lse = call.reference(**given, return_lse=True)
        torch.use_deterministic_algorithms(mode=True)  # torch.empty gives NaN
        found, found_lse = call.run(config, **given, return_lse=True)
        torch.use_deterministic_algorithms(mode=False)
        again, _ = call.run(config, **given, return_lse=True)
        assert found_lse is not None
        assert expected_lse is not None
        e, lse_e, same = (
            error(found, expected),
            error(found_lse, expected_lse),
            torch.equal(found, again),
        )
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": asdict(shape),
                "option": str(option),
                "error": e,
                "lse_error": lse_e,
                "same_bits": same,
                "ok": e <= TOLERANCE[dtype] and lse_e <= LSE_TOLERANCE and same,
            }
        )
    return rows


def check(out: Path, limit: float) -> None:
    """Compare with the reference over shapes, dtypes and options; fail if any disagrees."""
    jobs = [
        (dtype, number)
        for number, shape in enumerate(CHECK_SHAPES)
        for dtype in TOLERANCE
        if shape.spare_pages == 1 or dtype is torch.bfloat16
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(check_one, *job) for job in jobs]
        for job in as_completed(futures, timeout=limit):
            rows += job.result()
            print(f"  {len(rows)} checked, {sum(not r['ok'] for r in rows)} disagree", flush=True)
    for dtype in ("float32", "float16", "bfloat16"):
        mine = [r for r in rows if r["dtype"] == dtype]
        worst, worst_lse = (max(r[key] for r in mine) for key in ("error", "lse_error"))
        print(f"{dtype}: worst error {worst:.2e}, log-sum-exp {worst_lse:.2e}")
    (out / "attention-check.json").write_text(json.dumps({"machine": machine(), "rows": rows}))
    bad = [row for row in rows if not row["ok"]]
    print(*bad, f"check: {len(rows) - len(bad)} of {len(rows)} agree", sep="\n", flush=True)
    if bad:
        raise SystemExit(1)


def num_pools(cell: Cell, heads: int) -> int:
    """How many KV pools together outsize the L2 cache."""
    per_pool = 4 * cell.batch * cell.prefix * heads * cell.head_dim
    return min(max(2, int(COLD_BYTES / per_pool) + 1), MAX_POOLS)


def calls_of(cell: Cell) -> list[Call]:
    """The same call on several pools."""
    return [
        make_call(
            [cell.q_len] * cell.batch,
            [cell.prefix] * cell.batch,
            cell.q_heads,
            cell.kv_heads,
            cell.head_dim,
            page_size=cell.page_size,
            seed=seed,
        )
        for seed in range(num_pools(cell, cell.kv_heads))
    ]


def graph_us(runs: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """Median microseconds of one run, from replays of a graph that does each run once."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return 1e3 * float(times[len(times) // 2]) / len(runs)


def checked_us(calls: list[Call], config: AttentionConfig, expected: Tensor) -> tuple[float, float]:
    """Error of the first call's output, which must be small, and time of a call."""
    found, _ = calls[0].run(config)
    found_error = error(found, expected)
    if not found_error <= TOLERANCE[torch.bfloat16]:
        raise SystemExit(f"{config}: error {found_error}")
    return found_error, graph_us([partial(call.run, config) for call in calls])


def packed_sdpa_us(cell: Cell) -> tuple[float, str]:
    """SDPA without a mask on contiguous KV, heads of a group packed into rows, and the backend.

    It computes less (no tree) and reads in order: what the fastest kernels of PyTorch reach on this work.
    """
    rows = cell.q_len * cell.q_heads // cell.kv_heads
    sets = [
        partial(
            sdpa,
            sdpa_input(cell, cell.kv_heads, rows),
            sdpa_input(cell, cell.kv_heads),
            sdpa_input(cell, cell.kv_heads),
        )
        for _ in range(num_pools(cell, cell.kv_heads))
    ]
    times = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            try:
                sets[0]()
            except RuntimeError as reason:  # it does not take this shape
                print(f"{cell}: {backend.name}: {reason}")
                continue
            times.append((graph_us(sets), backend.name))
    return min(times)


def dense_sdpa_us(cell: Cell) -> float:
    """SDPA with a dense additive mask on contiguous KV already repeated for every query head."""
    kv = cell.prefix + cell.q_len
    bias = torch.zeros(cell.q_len, kv, device="cuda", dtype=torch.bfloat16)
    sees = torch.ones(cell.q_len, cell.q_len, device="cuda").tril().bool()  # cost is any mask's
    bias[:, cell.prefix :].masked_fill_(~sees, -torch.inf)
    mask = bias.expand(cell.batch, 1, cell.q_len, kv).contiguous()
    sets = [
        partial(
            sdpa,
            sdpa_input(cell, cell.q_heads, cell.q_len),
            sdpa_input(cell, cell.q_heads),
            sdpa_input(cell, cell.q_heads),
            attn_mask=mask,
        )
        for _ in range(num_pools(cell, cell.q_heads))
    ]
    return graph_us(sets, replays=5)


def sdpa_input(cell: Cell, heads: int, length: int | None = None) -> Tensor:
    """Random [batch, heads, length, head_dim]; None: all entries."""
    shape = cell.batch, heads, length or cell.prefix + cell.q_len, cell.head_dim
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def figures_of(cell: Cell) -> dict[str, Any]:
    """Shape, time, floor and error of the chosen configuration."""
    calls = calls_of(cell)
    config = choose_config(torch.bfloat16, cell.head_dim)
    found_error, us = checked_us(calls, config, calls[0].reference()[0])
    torch.cuda.empty_cache()
    return {**asdict(cell), "us": us, "floor_us": cell.floor_us, "error": found_error}


def grid(out: Path, limit: float) -> None:
    """Time the chosen configuration on every cell, with one row less, and PyTorch beside it."""
    started = time.monotonic()
    result: dict[str, Any] = {
        "machine": machine(),
        "method": " ".join((__doc__ or "").split("\n\n")[1].split()),
        "recorded": "figures under `recorded` come from an earlier run on an H200: see bench/attention.py",
        "cells": [],
        "variants": [],
    }
    path = out / "attention-h200.json"
    print("batch, q_len, prefix, heads: floor | ours (x floor) | one row less | packed | dense, us")
    for cell in GRID:
        if time.monotonic() - started > limit:
            raise SystemExit(f"{limit} s are over at {cell}; {path} holds the cells before")
        row, less = figures_of(cell), figures_of(cell.one_less)
        row["one_less"] = {key: less[key] for key in ("q_len", "us", "floor_us", "error")}
        row["sdpa_packed_us"], row["sdpa_packed_backend"] = packed_sdpa_us(cell)
        row["sdpa_dense_us"] = dense_sdpa_us(cell)
        row["recorded"] = dict(zip(PEERS, RECORDED[cell], strict=True))
        torch.cuda.empty_cache()
        result["cells"].append(row)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(
            f"{cell}: {row['floor_us']:.1f} | {row['us']:.1f} ({row['us'] / row['floor_us']:.2f}) | "
            f"{less['us']:.1f} ({less['us'] / less['floor_us']:.2f}) | {row['sdpa_packed_us']:.1f} | "
            f"{row['sdpa_dense_us']:.1f}",
            flush=True,
        )
    for cell in VARIED:
        for changed in (
            replace(cell, head_dim=64),
            *(replace(cell, page_size=p) for p in (16, 64)),
        ):
            result["variants"].append(row := figures_of(changed))
            print(f"{changed}: {row['floor_us']:.1f} | {row['us']:.1f}", flush=True)
    result["geometric_means"] = summary(result["cells"])
    result["seconds"] = time.monotonic() - started
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["geometric_means"], indent=1), f"{result['seconds']:.0f} s", path)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means over the cells: ours over the floor, others over ours."""
    every = [*rows, *(row["one_less"] for row in rows)]
    floors = [row["us"] / row["floor_us"] for row in every if row["floor_us"] >= LEAST_FLOOR_US]
    return {
        "over_floor": geometric_mean(floors),
        "over_floor_cells": len(floors),
        "sdpa_packed_over_ours": geometric_mean([r["sdpa_packed_us"] / r["us"] for r in rows]),
        "sdpa_dense_over_ours": geometric_mean([r["sdpa_dense_us"] / r["us"] for r in rows]),
        **{
            f"recorded_{name.removesuffix('_us')}_over_ours": geometric_mean(
                [row["recorded"][name] / row["us"] for row in rows]
            )
            for name in PEERS
        },
    }


def candidates(head_dim: int) -> Iterator[AttentionConfig]:
    """The configurations that a sweep tries, the chosen one first."""
    chosen = choose_config(torch.bfloat16, head_dim)
    yield chosen
    large = AttentionConfig(128, 64, num_stages=4, programs_per_sm=1, num_warps=8)
    for config in (
        AttentionConfig(64, 64, num_stages=2),
        AttentionConfig(64, 64, num_stages=2, programs_per_sm=1, num_warps=8),
        AttentionConfig(64, 32, num_stages=4),
        AttentionConfig(64, 32, programs_per_sm=1),
        large,
        replace(large, block_n=128, num_stages=3),
        replace(large, block_n=128, num_stages=2),
    ):
        if config != chosen:
            yield config


def compile_one(cell: Cell, config: AttentionConfig) -> str:
    """Compile a configuration into Triton's cache (in a process of its own); what went wrong, or nothing."""
    try:
        make_call([17], [64], cell.q_heads, cell.kv_heads, cell.head_dim).run(config)
        torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources as reason:
        return f"{config}: {reason}"
    return ""


def sweep(out: Path, limit: float, head_dim: int) -> None:
    """Time every candidate on the grid's cells and those with one row less."""
    started, rows = time.monotonic(), []
    cells = [replace(cell, head_dim=head_dim) for cell in GRID]
    cells += [cell.one_less for cell in cells]
    heads = {(cell.q_heads, cell.kv_heads): cell for cell in cells}
    jobs = [(cell, config) for cell in heads.values() for config in candidates(head_dim)]
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        problems = dict(zip(jobs, pool.map(compile_one, *zip(*jobs, strict=True)), strict=True))
    print(*filter(None, problems.values()), f"{time.monotonic() - started:.0f} s", sep="\n")
    for cell in cells:
        if time.monotonic() - started > limit:
            raise SystemExit(f"{limit} s are over at {cell}")
        calls = calls_of(cell)
        expected, _ = calls[0].reference()
        usable = [
            config
            for config in candidates(head_dim)
            if not problems[heads[cell.q_heads, cell.kv_heads], config]
        ]
        rounds: dict[AttentionConfig, list[float]] = {config: [] for config in usable}
        for order in (usable, usable[::-1], usable):  # the GPU slows under load: no one is first
            for config in order:
                rounds[config].append(checked_us(calls, config, expected)[1])
        times = {config: sorted(us)[1] for config, us in rounds.items()}
        del calls, expected
        torch.cuda.empty_cache()
        ranking = sorted(times, key=times.__getitem__)
        chosen = next(candidates(head_dim))
        found = [{"config": asdict(config), "us": times[config]} for config in ranking]
        rows.append({**asdict(cell), "floor_us": cell.floor_us, "times": found})
        result = {"machine": machine(), "chosen": asdict(chosen), "cells": rows}
        (out / "attention-sweep.json").write_text(json.dumps(result) + "\n")
        loss = times[chosen] / times[ranking[0]]
        print(f"{cell}: {times[ranking[0]]:.1f} {ranking[0]}, chosen {loss:.3f}", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["check", "sweep", "grid"])
    parser.add_argument("--limit", type=float, default=300.0, help="stop after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--head-dim", type=int, default=128, help="of the sweep")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(machine(), flush=True)
    if arguments.what == "check":
        check(arguments.out, arguments.limit)
    elif arguments.what == "sweep":
        sweep(arguments.out, arguments.limit, arguments.head_dim)
    else:
        grid(arguments.out, arguments.limit)


if __name__ == "__main__":
    main()

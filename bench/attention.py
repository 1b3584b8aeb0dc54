"""Measure ``verify_attention`` on a GPU: correctness first, then times.

A time is the median of CUDA-graph replays. One graph runs the call once on each of several KV pools,
which together are much larger than the L2 cache, with shuffled slots; the time is divided by their
number. Whoever is compared is timed in two rounds of opposite order. ``floor`` is the larger of bytes
(each read or written once) over the memory's rate and operations over the matrix units' rate. What is
timed has been compared with the reference in float64 before.

    python bench/attention.py check    results against the reference, all dtypes and options
    python bench/attention.py sweep    several configurations on every shape
    python bench/attention.py grid     the chosen configuration, and its peers in the same run
        --peers none | all | sglang,flashinfer,...    --cells main less dim64 page16 fp8 1,17,16384 ...
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.cells import MAIN, Cell, choose_cells, everything_seen, make_call, random_call
from bench.common import (
    RESULTS,
    Captured,
    error,
    geometric_mean,
    interleaved_us,
    machine,
    result_name,
)
from bench.peers import CEILINGS, PACKAGES, PEERS, Call, Run, ddtree, reference
from ddtree import impl
from ddtree.impl.attention import attend
from ddtree.impl.attention_configs import AttentionConfig, HopperConfig, choose_config
from ddtree.invariants.conformance import Refused

LEAST_FLOOR_US = 15.0
"""Below, launches weigh more than the work: left out of the mean over the floor."""
OURS = "ddtree"


def run_config(call: Call, config: AttentionConfig) -> Tensor:
    """One call with a configuration that need not be the chosen one."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return attend(
        *call.arguments[:6],
        call.mask.words,
        scale=call.query.shape[2] ** -0.5,
        softcap=None,
        sinks=None,
        window=None,
        **call.scales,
        return_lse=False,
        config=config,
        num_programs=config.programs_per_sm * sms,
    )[0]


# Of the output: rounding of the softmax's weights and of the result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
LSE_TOLERANCE = 1e-5  # sums are float32 in every dtype, products of float32 inputs exact
FP8_ARITHMETIC = 0.06
"""Of a peer that rounds the query and the softmax's weights to fp8 too, where the pools are fp8."""

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
    CheckShape([33, 17], [777, 40], 6, 2, 64, page_size=16),
    CheckShape([17, 65], [3000, 65], spare_pages=1_500_000),  # byte offsets past 2^31
    CheckShape([17, 65], [3000, 65], spare_pages=2_200_000),  # element offsets past 2^31
]


def check_one(
    dtype: torch.dtype, shape: CheckShape, *, fp8: bool, device: str = "cuda"
) -> list[dict[str, Any]]:
    """Compare one shape in one dtype with the reference, over the options (in a process of its own)."""
    call = make_call(**asdict(shape), dtype=dtype, fp8=fp8, device=device)
    rows = []
    for option in CHECK_OPTIONS:
        given = dict(option)
        if given.pop("sinks", False):
            given["sinks"] = torch.randn(shape.q_heads, device=device)
        expected, expected_lse = reference(call, **given, return_lse=True)
        given |= {**call.scales, "return_lse": True}
        torch.use_deterministic_algorithms(mode=True)  # torch.empty gives NaN
        found, found_lse = impl.verify_attention(*call.arguments, **given)
        torch.use_deterministic_algorithms(mode=False)
        again, _ = impl.verify_attention(*call.arguments, **given)
        assert found_lse is not None
        assert expected_lse is not None
        e, lse_e, same = (
            error(found, expected),
            error(found_lse, expected_lse),
            torch.equal(found, again),
        )
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch.") + " fp8" * fp8,
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
        (dtype, shape, fp8)
        for shape in CHECK_SHAPES
        for dtype in TOLERANCE
        for fp8 in (False, True)
        if shape.spare_pages == 1 or dtype is torch.bfloat16
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(check_one, dtype, shape, fp8=fp8) for dtype, shape, fp8 in jobs]
        for job in as_completed(futures, timeout=limit):
            rows += job.result()
            print(f"  {len(rows)} checked, {sum(not r['ok'] for r in rows)} disagree", flush=True)
    for dtype in sorted({row["dtype"] for row in rows}):
        mine = [r for r in rows if r["dtype"] == dtype]
        worst, worst_lse = (max(r[key] for r in mine) for key in ("error", "lse_error"))
        print(f"{dtype}: worst error {worst:.2e}, log-sum-exp {worst_lse:.2e}")
    (out / result_name("attention-check")).write_text(
        json.dumps({"machine": machine(), "rows": rows})
    )
    bad = [row for row in rows if not row["ok"]]
    print(*bad, f"check: {len(rows) - len(bad)} of {len(rows)} agree", sep="\n", flush=True)
    if bad:
        raise SystemExit(1)


def captured(
    prepare: Callable[[Call], Run], calls: list[Call], expected: Tensor, tolerance: float
) -> tuple[Captured, float]:
    """A graph of an implementation's runs on all calls, and the error of the first, which is small."""
    runs = [prepare(call) for call in calls]
    found_error = error(runs[0]().reshape(expected.shape), expected)
    if not found_error <= tolerance:
        raise Refused(f"wrong: error {found_error:.2g} against the reference")
    return Captured(runs), found_error


def measure(cell: Cell, peers: list[str]) -> dict[str, Any]:
    """Compare every implementation with the reference on a cell, then time those that are right."""
    calls = [random_call(cell, seed) for seed in range(cell.num_pools)]
    expected, _ = reference(calls[0])
    graphs: dict[str, Captured] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    tolerance = TOLERANCE[torch.bfloat16]
    graphs[OURS], errors[OURS] = captured(ddtree, calls, expected, tolerance)
    open_calls = [replace(calls[0], mask=everything_seen(calls[0])), *calls[1:]]
    for name in peers:
        wide = FP8_ARITHMETIC if cell.fp8 and name == "sglang" else tolerance
        try:
            if name in PEERS:
                graphs[name], errors[name] = captured(PEERS[name], calls, expected, wide)
            else:
                unmasked, _ = reference(open_calls[0])
                graphs[name], errors[name] = captured(
                    CEILINGS[name], open_calls, unmasked, tolerance
                )
        except (Refused, ImportError, RuntimeError, ValueError, AssertionError) as reason:
            refused[name] = str(reason).strip().split("\n")[0][:300] or repr(reason)
    us = interleaved_us(graphs)
    if reached := [us[name] for name in CEILINGS if name in us]:
        us["unmasked"] = min(reached)
    return {
        **asdict(cell), "floor_us": cell.floor_us, "us": us, "error": errors, "not_timed": refused
    }  # fmt: skip


def compile_flex(cell: Cell, name: str) -> None:
    """Compile a peer for a cell into PyTorch's cache on disk (in a process of its own)."""
    with suppress(Exception):  # what goes wrong will again where it counts, and be reported there
        PEERS[name](random_call(cell, 0))()


def compile_all_flex(cells: list[Cell], names: list[str]) -> None:
    """Compile FlexAttention for all shapes at once, which would take minutes one after another."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process starts its own
    jobs = [
        (cell, name) for cell in cells for name in names if cell.page_size == 1 and not cell.fp8
    ]
    if jobs:
        pool = ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn"))
        wait([pool.submit(compile_flex, *job) for job in jobs], timeout=90)
        pool.shutdown(wait=False, cancel_futures=True)


def grid(out: Path, limit: float, peers: list[str], names: list[str]) -> None:
    """Time the chosen configuration on the cells, and its peers beside it."""
    started = time.monotonic()
    result: dict[str, Any] = {
        "subject": "attention",
        "machine": machine(*PACKAGES),
        "method": " ".join((__doc__ or "").split("\n\n")[1].split()),
        "cells": [],
    }
    path = out / result_name("attention")
    chosen = choose_cells(names)
    compile_all_flex([cell for _, cell in chosen], [n for n in peers if n.startswith("flex")])
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    print("batch, q_len, prefix, heads: floor | ours (x floor) | others (x ours), us")
    for group, cell in chosen:
        if time.monotonic() - started > limit:
            raise SystemExit(f"{limit} s are over at {cell}; {path} holds the cells before")
        row = {"group": group, **measure(cell, peers)}
        torch.cuda.empty_cache()
        result["cells"].append(row)
        result["summary"] = summary(result["cells"])
        result["seconds"] = time.monotonic() - started
        path.write_text(json.dumps(result, indent=1) + "\n")
        ours = row["us"][OURS]
        others = ", ".join(
            f"{name} {us:.1f} ({us / ours:.2f})" for name, us in row["us"].items() if name != OURS
        )
        print(f"{cell}: {cell.floor_us:.1f} | {ours:.1f} ({ours / cell.floor_us:.2f}) | {others}")
        print("".join(f"    not {n}: {why[:80]}\n" for n, why in row["not_timed"].items()), end="")
        sys.stdout.flush()
    print(json.dumps(result["summary"], indent=1), f"{result['seconds']:.0f} s", path)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means: ours over the floor by group, others over ours on the main cells; who is faster."""
    over: dict[str, list[float]] = {}
    for row in rows:
        if row["floor_us"] >= LEAST_FLOOR_US:
            over.setdefault(row["group"], []).append(row["us"][OURS] / row["floor_us"])
    main = [row["us"] for row in rows if row["group"] == "main"]
    others = sorted({name for us in main for name in us} - {OURS, *CEILINGS})
    ratios = {name: [us[name] / us[OURS] for us in main if name in us] for name in others}
    return {
        "over_floor": {group: geometric_mean(found) for group, found in over.items()},
        "over_floor_cells": {group: len(found) for group, found in over.items()},
        "over_ours": {name: geometric_mean(found) for name, found in ratios.items()},
        "over_ours_cells": {name: len(found) for name, found in ratios.items()},
        "faster_than_ours": [
            f"{name} at {row['batch']}, {row['q_len']}, {row['prefix']} ({row['group']})"
            for row in rows
            for name, us in row["us"].items()
            if us < row["us"][OURS]
        ],
    }


def candidates(head_dim: int) -> Iterator[AttentionConfig]:
    """The configurations that a sweep tries, the chosen one first."""
    chosen = choose_config(torch.bfloat16, head_dim, torch.cuda.get_device_capability()[0])
    yield chosen
    if isinstance(chosen, HopperConfig):
        yield from (replace(chosen, num_stages=4), replace(chosen, tail_saving=4))
    large = AttentionConfig(128, 64, num_stages=4, programs_per_sm=1, num_warps=8)
    for config in (
        AttentionConfig(64, 64, num_stages=2),
        AttentionConfig(64, 64, num_stages=2, programs_per_sm=1, num_warps=8),
        AttentionConfig(64, 32, num_stages=4),
        AttentionConfig(64, 32, programs_per_sm=1),
        AttentionConfig(64, 64, programs_per_sm=1, num_warps=8),
        AttentionConfig(64, 64),
        large,
        replace(large, block_n=128, num_stages=3),
        replace(large, block_n=128, num_stages=2),
    ):
        if config != chosen:
            yield config


def config_run(config: AttentionConfig, call: Call) -> Run:
    """Our kernel with a configuration, as ``captured`` takes it."""
    return lambda: run_config(call, config)


def compile_one(cell: Cell, config: AttentionConfig) -> str:
    """Compile a configuration into Triton's cache (in a process of its own); what went wrong, or nothing."""
    try:
        run_config(random_call(replace(cell, batch=1, q_len=17, prefix=64), 0), config)
        torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources as reason:
        return f"{config}: {reason}"
    return ""


def sweep(out: Path, limit: float, head_dim: int, *, fp8: bool) -> None:
    """Time every candidate on the grid's cells and those with one row less."""
    started, rows = time.monotonic(), []
    subject = (
        f"attention-sweep{'' if head_dim == 128 else f'-dim{head_dim}'}{'-fp8' if fp8 else ''}"
    )
    cells = [replace(cell, head_dim=head_dim, fp8=fp8) for cell in MAIN]
    cells += [cell.one_less for cell in cells]
    heads = {(cell.q_heads, cell.kv_heads): cell for cell in cells}
    jobs = [(cell, config) for cell in heads.values() for config in candidates(head_dim)]
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        problems = dict(zip(jobs, pool.map(compile_one, *zip(*jobs, strict=True)), strict=True))
    print(*filter(None, problems.values()), f"{time.monotonic() - started:.0f} s", sep="\n")
    for cell in cells:
        if time.monotonic() - started > limit:
            raise SystemExit(f"{limit} s are over at {cell}")
        calls = [random_call(cell, seed) for seed in range(cell.num_pools)]
        expected, _ = reference(calls[0])
        usable = [
            config
            for config in candidates(head_dim)
            if not problems[heads[cell.q_heads, cell.kv_heads], config]
        ]
        graphs = {
            config: captured(
                partial(config_run, config), calls, expected, TOLERANCE[torch.bfloat16]
            )[0]
            for config in usable
        }
        times = interleaved_us(graphs)
        del graphs
        del calls, expected
        torch.cuda.empty_cache()
        ranking = sorted(times, key=times.__getitem__)
        chosen = next(candidates(head_dim))
        found = [{"config": asdict(config), "us": times[config]} for config in ranking]
        rows.append({**asdict(cell), "floor_us": cell.floor_us, "times": found})
        result = {"machine": machine(), "chosen": asdict(chosen), "cells": rows}
        (out / result_name(subject)).write_text(json.dumps(result) + "\n")
        loss = times[chosen] / times[ranking[0]]
        print(f"{cell}: {times[ranking[0]]:.1f} {ranking[0]}, chosen {loss:.3f}", flush=True)


def choose_peers(names: str) -> list[str]:
    """``none``, ``all``, or names of peers and ceilings."""
    every = [*PEERS, *CEILINGS]
    if names in {"none", "all"}:
        return every if names == "all" else []
    unknown = [name for name in names.split(",") if name not in every]
    if unknown:
        raise SystemExit(f"no peer is called {unknown}; there are {', '.join(every)}")
    return names.split(",")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["check", "sweep", "grid"])
    parser.add_argument("--limit", type=float, default=300.0, help="stop after so many seconds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--head-dim", type=int, default=128, help="of the sweep")
    parser.add_argument("--fp8", action="store_true", help="sweep over pools of fp8")
    parser.add_argument(
        "--peers", default="all", help="of the grid: none, all, or names with commas"
    )
    parser.add_argument("--cells", nargs="*", default=[], help="of the grid: groups or cells")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(machine(*PACKAGES), flush=True)
    if arguments.what == "check":
        check(arguments.out, arguments.limit)
    elif arguments.what == "sweep":
        sweep(arguments.out, arguments.limit, arguments.head_dim, fp8=arguments.fp8)
    else:
        grid(arguments.out, arguments.limit, choose_peers(arguments.peers), arguments.cells)


if __name__ == "__main__":
    main()

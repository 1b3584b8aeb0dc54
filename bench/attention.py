"""Measure ``verify_attention`` on a GPU: correctness first, then times, with a sweep over configurations.

A figure is the median of CUDA-graph replays. One graph runs the call once on each of several KV pools,
which together are much larger than the L2 cache, with shuffled slots; the time is divided by their
number. ``floor`` is the larger of bytes (each read or written once) over the memory's rate and operations
over the matrix units' rate.

    python bench/attention.py check                     results against the reference, all dtypes
    python bench/attention.py grid                      the table, chosen configurations
    python bench/attention.py sweep --limit 300         every configuration on a few cells
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddtree import spec
from ddtree.impl.attention import attend
from ddtree.impl.attention_configs import AttentionConfig, choose_config

BYTES_PER_S = 4.3e12  # what copies reach on an H200
FLOP_PER_S = 770e12  # what bf16 matrix products reach there
COLD_BYTES = 400e6  # pools of a cell together, eight times the L2 cache
MAX_POOLS = 12


@dataclass(frozen=True)
class Cell:
    """One shape."""

    batch: int
    q_len: int
    prefix: int
    q_heads: int
    kv_heads: int
    head_dim: int = 128
    page_size: int = 1

    @property
    def floor_us(self) -> float:
        """No kernel can be faster than this."""
        kv = 2 * 2 * self.batch * (self.prefix + self.q_len) * self.kv_heads * self.head_dim
        qo = 2 * 2 * self.batch * self.q_len * self.q_heads * self.head_dim
        flop = 4 * self.batch * self.q_heads * self.q_len * (self.prefix + self.q_len) * self.head_dim
        return 1e6 * max((kv + qo) / BYTES_PER_S, flop / FLOP_PER_S)


GRID = (
    [Cell(1, q, p, 32, 8) for p in (2048, 16384, 65536) for q in (17, 65, 257, 513)]
    + [Cell(b, q, p, 32, 8) for b, p in ((8, 4096), (32, 2048)) for q in (17, 65, 257, 513)]
    + [Cell(1, 17, 16384, 32, 4), Cell(1, 257, 16384, 32, 4), Cell(16, 65, 4096, 32, 4)]
)
CEILING = {"1,17,16384,32,8", "1,17,65536,32,8", "32,17,2048,32,8", "1,65,16384,32,8", "8,65,4096,32,8", "1,257,16384,32,8"}
SWEEP = [*GRID, *(replace(c, q_len=c.q_len - 1) for c in GRID)]
OLD = [Cell(b, q, p, 32, 8) for b, q, p in (
    (32, 17, 2048), (1, 17, 16384), (8, 65, 4096), (1, 65, 16384), (1, 257, 16384), (8, 257, 4096), (32, 513, 2048), (1, 513, 2048),
    (1, 17, 65536), (8, 17, 4096), (1, 65, 65536), (8, 64, 4096), (1, 256, 16384), (32, 16, 2048), (1, 17, 2048),
)]  # fmt: skip

# Peers on one H200 in an earlier run (torch 2.11.0+cu130, bf16): (batch, q_len, prefix, KV heads of 32 query
# heads) -> SGLang 0.5.23 extend_attention_fwd, FlashInfer 0.6.7 paged prefill with a custom mask, microseconds.
RECORDED = {
    (1, 17, 2048, 8): (128, 30.3), (1, 65, 2048, 8): (135, 49), (1, 257, 2048, 8): (146, 144), (1, 513, 2048, 8): (280, 363),
    (1, 17, 16384, 8): (1081, 86.9), (1, 65, 16384, 8): (1085, 235), (1, 257, 16384, 8): (1099, 809), (1, 513, 16384, 8): (2196, 2313),
    (1, 17, 65536, 8): (4269, 309), (1, 65, 65536, 8): (4285, 867), (1, 257, 65536, 8): (4271, 3082), (1, 513, 65536, 8): (8604, 9070),
    (8, 17, 4096, 8): (528, 179), (8, 65, 4096, 8): (553, 603), (8, 257, 4096, 8): (1639, 1725), (8, 513, 4096, 8): (2838, 3048),
    (32, 17, 2048, 8): (1087, 317), (32, 65, 2048, 8): (1154, 927), (32, 257, 2048, 8): (3690, 3004), (32, 513, 2048, 8): (6538, 6191),
    (1, 17, 16384, 4): (1069, 88.0), (1, 257, 16384, 4): (1094, 803), (16, 65, 4096, 4): (1077, 1094),
}  # fmt: skip


def geometric_means(times: list[tuple[Cell, float]]) -> None:
    """Print how far the floor is and how far the recorded peers are behind."""

    def mean(ratios: list[float]) -> str:
        return f"{torch.tensor(ratios).log().mean().exp():.3f} ({len(ratios)} cells, worst {max(ratios):.2f}, least {min(ratios):.2f})" if ratios else "no cell"

    known = [(RECORDED[key], us) for c, us in times if (key := (c.batch, c.q_len, c.prefix, c.kv_heads)) in RECORDED]
    print("geometric means: over the floor where that is 15 us or more", mean([us / c.floor_us for c, us in times if c.floor_us >= 15]))
    print("  SGLang over ours", mean([peers[0] / us for peers, us in known]))
    print("  FlashInfer over ours", mean([peers[1] / us for peers, us in known]), flush=True)


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
        options = {"softcap": None, "sinks": None, "window": None, "return_lse": False, **options}
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return attend(
            self.query, self.key, self.value, self.key_pool, self.value_pool, self.layout, self.mask.words,
            scale=self.query.shape[2] ** -0.5, config=config, num_programs=config.programs_per_sm * sms, **options,
        )  # fmt: skip

    def reference(self, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The same by the reference in float64."""
        return spec.verify_attention(
            self.query, self.key, self.value, self.key_pool, self.value_pool, self.layout, self.mask,
            compute_dtype=torch.float64, **options,
        )  # fmt: skip


@cache
def best_first_tree(q_len: int, depth: int = 15) -> spec.DraftTree:
    """A tree as DDTree builds it: peaked marginals, horizon 15."""
    generator = torch.Generator().manual_seed(q_len)
    logits = 10.0 * torch.randn(1, depth, max(1024, q_len), generator=generator)
    return spec.build_tree(logits.log_softmax(-1), torch.zeros(1, dtype=torch.int64), spec.Budget(q_len - 1))


def make_call(
    q_lens: list[int], prefixes: list[int], q_heads: int, kv_heads: int, head_dim: int,
    dtype: torch.dtype = torch.bfloat16, page_size: int = 1, seed: int = 0, spare_pages: int = 1,
) -> Call:  # fmt: skip
    """Random tensors on the GPU; pages of the requests are shuffled over the pool; equal trees for equal q_len."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    batch, pages = len(q_lens), [-(-p // page_size) for p in prefixes]
    shuffled = torch.randperm(sum(pages) + spare_pages, generator=generator, device="cuda")[: sum(pages)]
    slots = (shuffled[:, None] * page_size + torch.arange(page_size, device="cuda")).split(pages)
    trees = [best_first_tree(q) for q in q_lens]

    def indptr(lengths: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(dtype)

    q_of = indptr(q_lens, torch.int32)
    layout = spec.VerifyLayout(
        qo_indptr=q_of,
        kv_indptr=indptr(prefixes, torch.int32),
        kv_indices=torch.cat([s.flatten()[:p] for s, p in zip(slots, prefixes, strict=True)]),
        mask_indptr=indptr([q * (p + q) for q, p in zip(q_lens, prefixes, strict=True)], torch.int64),
        max_q_len=max(q_lens),
        positions=torch.cat([p + t.depths[0].long() for p, t in zip(prefixes, trees, strict=True)]).cuda(),
        out_cache_loc=torch.full((sum(q_lens),), -1, device="cuda"),
    )
    num_words = -(-max(q_lens) // 32)
    words = torch.cat([torch.nn.functional.pad(tree_words(q), (0, num_words - tree_words(q).shape[1])) for q in q_lens])

    def random(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_dim, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

    def pool() -> Tensor:  # slots that no entry uses hold NaN
        slots = (sum(pages) + spare_pages) * page_size
        tensor = torch.full((slots, kv_heads, head_dim), torch.nan, dtype=dtype, device="cuda")
        tensor[layout.kv_indices] = random(layout.kv_indices.numel(), kv_heads)
        return tensor

    rows = sum(q_lens)
    assert batch == len(prefixes)
    return Call(random(rows, q_heads), random(rows, kv_heads), random(rows, kv_heads), pool(), pool(), layout, spec.BitMask(words.cuda()))


@cache
def tree_words(q_len: int) -> Tensor:
    """Ancestor words of ``best_first_tree``."""
    tree = best_first_tree(q_len)
    layout = spec.plan_verify(tree, torch.zeros(1, dtype=torch.int64), torch.arange(q_len)[None])
    return spec.tree_mask(tree, layout, "bits").words


def error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN stays NaN."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the output: rounding of weights and result
LSE_TOLERANCE = 1e-5  # sums are float32 in every dtype, products of float32 inputs exact


CHECK_OPTIONS: list[dict[str, Any]] = [
    {}, {"window": 40}, {"softcap": 20.0}, {"sinks": True}, {"window": 3, "softcap": 5.0, "sinks": True},
]  # fmt: skip
CHECK_SHAPES: list[tuple[list[int], list[int], int, int, int, int, int]] = [  # q_lens, prefixes, heads q/kv, head dim, page, spare pages
    ([17], [200], 32, 8, 128, 1, 1),
    ([65, 1, 130], [0, 65, 1500], 32, 8, 128, 1, 1),
    ([257], [2048], 32, 8, 128, 1, 1),
    ([513, 33], [64, 4099], 8, 2, 128, 16, 1),
    ([2, 7, 17, 33], [63, 64, 65, 1], 6, 2, 64, 1, 1),
    ([65, 17], [1000, 3], 4, 4, 96, 1, 1),
    ([33], [777], 16, 2, 256, 64, 1),
    ([17] * 40, [100 + 37 * i for i in range(40)], 8, 1, 128, 1, 1),
    ([17, 65], [3000, 65], 32, 8, 128, 1, 1_500_000),  # 3 GB of keys: byte offsets past 2^31
    ([17, 65], [3000, 65], 32, 8, 128, 1, 2_200_000),  # element offsets past 2^31
]


def check_one(job: tuple[torch.dtype, int]) -> list[dict[str, Any]]:
    """Compare one shape in one dtype with the reference, over the options (in a process of its own)."""
    dtype, number = job
    q_lens, prefixes, q_heads, kv_heads, head_dim, page, spare = CHECK_SHAPES[number]
    call = make_call(q_lens, prefixes, q_heads, kv_heads, head_dim, dtype, page, number, spare)
    configs = [choose_config(dtype, head_dim, q_heads // kv_heads, max(q_lens))]
    more = [
        AttentionConfig(64, 64, num_stages=2, odd_m=16, overlap=True),
        AttentionConfig(64, 64, num_stages=2, odd_m=16, paired=True, near=True),
        AttentionConfig(128, 64, num_warps=8, num_stages=4, programs_per_sm=1, odd_m=16),
    ]
    rows = []
    for option in CHECK_OPTIONS:
        given = dict(option)
        if given.pop("sinks", False):
            given["sinks"] = torch.randn(q_heads, device="cuda")
        expected, expected_lse = call.reference(**given, return_lse=True)
        assert expected_lse is not None
        every = dtype is torch.bfloat16 and head_dim <= 128 and not option
        for config in [*configs, *(more if every else [])]:
            row = {"dtype": str(dtype), "shape": CHECK_SHAPES[number], "option": str(option), "config": asdict(config)}
            try:
                torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
                found, found_lse = call.run(config, **given, return_lse=True)
                torch.use_deterministic_algorithms(False)
                again, _ = call.run(config, **given, return_lse=True)
                assert found_lse is not None
                e, e_lse = error(found, expected), error(found_lse, expected_lse)
                same = torch.equal(found, again)
                ok = e <= TOLERANCE[dtype] and e_lse <= LSE_TOLERANCE and same
                rows.append({**row, "error": e, "lse_error": e_lse, "same_bits": same, "ok": ok})
            except Exception as reason:  # noqa: BLE001: reported as a failure
                rows.append({**row, "error": float("nan"), "ok": False, "reason": f"{type(reason).__name__} {str(reason)[:200]}"})
    return rows


def check(out: Path, limit: float, dtypes: list[torch.dtype]) -> bool:
    """Compare with the reference over shapes, dtypes and options; True if all agree."""
    started = time.monotonic()
    jobs = [(dtype, number) for number, shape in enumerate(CHECK_SHAPES) for dtype in dtypes if shape[-1] == 1 or dtype is torch.bfloat16]
    rows = []
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job in as_completed([pool.submit(check_one, job) for job in jobs], timeout=limit):
            rows += job.result()
            print(f"  {len(rows)} checked, {sum(not r['ok'] for r in rows)} disagree, {time.monotonic() - started:.0f} s")
    for row in rows:
        if not row["ok"]:
            print("BAD", row, flush=True)
    for dtype in TOLERANCE:
        mine = [r for r in rows if r["dtype"] == str(dtype) and r["error"] == r["error"] and "lse_error" in r]
        print(f"check {dtype}: worst error {max((r['error'] for r in mine), default=0):.2e}, log-sum-exp {max((r['lse_error'] for r in mine), default=0):.2e}")
    (out / "attention_check.json").write_text(json.dumps(rows, indent=1))
    print(f"check: {sum(r['ok'] for r in rows)} of {len(rows)} agree, {time.monotonic() - started:.0f} s", flush=True)
    return all(r["ok"] for r in rows)


def calls_of(cell: Cell) -> list[Call]:
    """Calls on pools that together outsize the L2 cache."""
    per_pool = 4 * cell.batch * cell.prefix * cell.kv_heads * cell.head_dim
    count = min(max(2, int(COLD_BYTES / per_pool) + 1), MAX_POOLS)
    return [
        make_call([cell.q_len] * cell.batch, [cell.prefix] * cell.batch, cell.q_heads, cell.kv_heads, cell.head_dim, page_size=cell.page_size, seed=i)
        for i in range(count)
    ]


def graph_us(runs: list[Callable[[], Any]], replays: int = 15) -> float:
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
    times = sorted(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))
    return 1e3 * times[len(times) // 2] / len(runs)


def first_kernel_us(calls: list[Call], config: AttentionConfig) -> float:
    """Time without the merge: what it costs."""
    from ddtree.impl import attention

    class Nothing:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *a, **k: None

    merge, attention.merge_kernel = attention.merge_kernel, Nothing()
    try:
        return graph_us([lambda c=c: c.run(config) for c in calls])  # type: ignore[misc]
    finally:
        attention.merge_kernel = merge


def ceiling_us(cell: Cell) -> float:
    """SDPA without a mask on contiguous KV, heads of a group packed into rows: the best backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    group, kv = cell.q_heads // cell.kv_heads, cell.prefix + cell.q_len
    per_pool = 4 * cell.batch * kv * cell.kv_heads * cell.head_dim
    count = min(max(2, int(COLD_BYTES / per_pool) + 1), MAX_POOLS)

    def random(rows: int) -> Tensor:
        return torch.randn(cell.batch, cell.kv_heads, rows, cell.head_dim, device="cuda", dtype=torch.bfloat16)

    sets = [(random(cell.q_len * group), random(kv), random(kv)) for _ in range(count)]
    best = float("inf")
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            try:
                best = min(best, graph_us([lambda s=s: sdpa(*s) for s in sets]))  # type: ignore[misc]
            except RuntimeError as reason:
                print(f"ceiling {backend}: {reason}")
    return best


def candidates(cell: Cell) -> Iterator[AttentionConfig]:
    """The configurations that a sweep tries on a cell."""
    rows = cell.q_len * cell.q_heads // cell.kv_heads
    config = AttentionConfig
    small = config(64, 64, num_stages=3)
    two = config(64, 64, num_stages=2)
    large = config(128, 64, num_warps=8, num_stages=4, programs_per_sm=1)
    yield small
    yield replace(small, merge_splits=16)
    yield replace(small, overlap=True)
    yield replace(small, paired=True)
    yield replace(small, paired=True, near=True)
    yield replace(two, paired=True, near=True)
    yield replace(two, near=True)
    yield two
    yield large
    yield config(128, 128, num_warps=8, num_stages=3, programs_per_sm=1)
    yield config(128, 128, num_warps=8, num_stages=2, programs_per_sm=1)
    yield config(64, 64, num_warps=8, num_stages=3, max_registers=128)
    yield config(128, 32, num_warps=8, num_stages=4, max_registers=128)
    if rows > 64 and 0 < rows % 64 <= 16 and rows // 64 <= 16:
        yield replace(two, odd_m=16)
        yield replace(two, odd_m=16, merge_splits=16)
        yield replace(two, odd_m=16, overlap=True)
        yield replace(two, odd_m=16, paired=True, near=True)
        yield config(64, 32, num_stages=4, odd_m=16)
        yield config(64, 32, num_stages=5, odd_m=16)
        yield config(64, 64, num_warps=8, num_stages=2, max_registers=128, odd_m=16)
        if rows > 128 and 0 < rows % 128 <= 16:
            yield replace(large, odd_m=16)
            yield config(128, 128, num_warps=8, num_stages=2, programs_per_sm=1, odd_m=16)


def label(c: AttentionConfig) -> str:
    """A configuration in short."""
    flags = [name for name in ("paired", "near", "overlap") if getattr(c, name)]
    return f"m{c.block_m}+{c.odd_m} n{c.block_n} w{c.num_warps} s{c.num_stages} p{c.programs_per_sm} r{c.max_registers or ''} merge{c.merge_splits} {' '.join(flags)}"


def compile_one(job: tuple[Cell, AttentionConfig]) -> str:
    """Compile a configuration into Triton's cache (in a process of its own)."""
    cell, config = job
    try:
        make_call([cell.q_len], [64], cell.q_heads, cell.kv_heads, cell.head_dim).run(config)
        torch.cuda.synchronize()
    except Exception as reason:  # noqa: BLE001: a configuration that does not fit is reported, not fatal
        return f"{config}: {type(reason).__name__} {str(reason)[:80]}"
    return ""


@triton.jit
def where_kernel(out, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Note the multiprocessor of each program."""
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + tl.program_id(0), sm)


def multiprocessors() -> list[str]:
    """Which programs share a multiprocessor."""
    out = torch.zeros(264, dtype=torch.int32, device="cuda")
    call = make_call([17], [64], 32, 8, 128)
    call.run(AttentionConfig(64, 64))
    where_kernel[(264,)](out, 1)
    a = out.tolist()
    return [str(a[:8]), str(a[132:140]), f"{sum(x == y for x, y in zip(a[:132], a[132:], strict=True))} of 132 pairs p, p + 132 share one"]


def sweep(out: Path, limit: float, cells: list[Cell]) -> None:
    """Time every candidate on the sweep's cells."""
    started = time.monotonic()
    wanted = {(c.q_heads // c.kv_heads, replace(config, programs_per_sm=1)): c for c in cells for config in candidates(c)}
    jobs = [(cell, config) for (_, config), cell in wanted.items()]
    try:
        print("multiprocessors of programs 0 to 7 and 132 to 139", *multiprocessors(), flush=True)
    except Exception as reason:  # noqa: BLE001
        print("no multiprocessors", reason)
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        problems = {p for p in pool.map(compile_one, jobs) if p}
    print(f"compiled {len(jobs)} in {time.monotonic() - started:.0f} s", *sorted(problems), sep="\n", flush=True)
    rows, best, ready = [], [], time.monotonic()
    for number, cell in enumerate(cells):
        share = ready + (limit - (ready - started)) * (number + 1) / len(cells)
        calls = calls_of(cell)
        big = cell.batch * cell.q_len > 4096  # a reference takes seconds: compare with the first candidate
        expected, _ = calls[0].run(next(candidates(cell))) if big else calls[0].reference()
        results = []
        for config in candidates(cell):
            if time.monotonic() > share and results:
                print("time limit within", cell)
                break
            try:
                found, _ = calls[0].run(config)
                e = error(found, expected)
                if not e <= TOLERANCE[torch.bfloat16]:
                    print(f"WRONG {cell} {config}: {e}", flush=True)
                    continue
                us = graph_us([lambda c=c: c.run(config) for c in calls])  # type: ignore[misc]
            except Exception as reason:  # noqa: BLE001: a configuration that does not fit is left out
                print(f"left out {config}: {type(reason).__name__} {str(reason)[:60]}")
                continue
            results.append((us, config))
            rows.append({"cell": asdict(cell), "config": asdict(config), "us": us, "floor_us": cell.floor_us, "error": e})
        results.sort(key=lambda r: r[0])
        best.append((cell, results[0][0]))
        print(f"\nbatch {cell.batch} q_len {cell.q_len} prefix {cell.prefix} heads {cell.q_heads}/{cell.kv_heads} floor {cell.floor_us:.1f}, {time.monotonic() - started:.0f} s")
        for us, c in results:
            print(f"  {us:8.1f} us {us / cell.floor_us:5.2f}x  {label(c)}", flush=True)
        print(f"  {first_kernel_us(calls, results[0][1]):8.1f} us the first kernel of the best alone; of the first {first_kernel_us(calls, next(candidates(cell))):8.1f}")
        (out / "attention_sweep.json").write_text(json.dumps(rows))
        del calls, expected
        torch.cuda.empty_cache()
    for cell, us in best:
        print(f"best {cell.batch},{cell.q_len},{cell.prefix} {us:.1f} us {us / cell.floor_us:.2f}x")
    geometric_means(best)
    print(f"sweep: {time.monotonic() - started:.0f} s")


def grid(out: Path, limit: float, cells: list[Cell], with_ceiling: bool) -> None:
    """Time the chosen configuration on every cell."""
    started, rows = time.monotonic(), []
    print("batch q_len prefix heads   floor    ours   x floor  ceiling  q_len-1  x floor")
    for cell in cells:
        if time.monotonic() - started > limit:
            print("grid: time limit")
            break
        figures = []
        for shape in (cell, replace(cell, q_len=cell.q_len - 1)):
            config = choose_config(torch.bfloat16, cell.head_dim, cell.q_heads // cell.kv_heads, shape.q_len)
            calls = calls_of(shape)
            found, _ = calls[0].run(config)
            e = error(found, calls[0].reference()[0])
            assert e <= TOLERANCE[torch.bfloat16], f"{shape} {config}: error {e}"
            us = graph_us([lambda c=c: c.run(config) for c in calls])  # type: ignore[misc]
            figures.append({"cell": asdict(shape), "config": asdict(config), "us": us, "floor_us": shape.floor_us, "error": e})
            del calls
            torch.cuda.empty_cache()
        name = f"{cell.batch},{cell.q_len},{cell.prefix},{cell.q_heads},{cell.kv_heads}"
        ceiling = ceiling_us(cell) if with_ceiling and name in CEILING else float("nan")
        rows.append({"q": figures[0], "full": figures[1], "ceiling_us": ceiling})
        a, b = figures
        print(f"{cell.batch:5} {cell.q_len:5} {cell.prefix:6} {cell.q_heads:3}/{cell.kv_heads} {cell.floor_us:7.1f} {a['us']:8.1f} {a['us'] / a['floor_us']:7.2f} {ceiling:9.1f} {b['us']:9.1f} {b['us'] / b['floor_us']:7.2f}", flush=True)
        (out / "attention_grid.json").write_text(json.dumps({"rows": rows, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}))
    for key in ("q", "full"):
        geometric_means([(Cell(**r[key]["cell"]), r[key]["us"]) for r in rows])


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["check", "grid", "sweep"])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each part")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--cells", type=int, nargs="*", help="numbers of the cells to run")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float16", "bfloat16"], help="what check compares")
    parser.add_argument("--no-ceiling", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    cells = SWEEP if "sweep" in arguments.what else GRID
    if arguments.cells is not None:
        cells = [cells[i] for i in arguments.cells]
    for what in arguments.what:
        if what == "check":
            check(arguments.out, arguments.limit, [d for d in TOLERANCE if str(d).removeprefix("torch.") in arguments.dtypes])
        elif what == "grid":
            grid(arguments.out, arguments.limit, cells, not arguments.no_ceiling)
        else:
            sweep(arguments.out, arguments.limit, cells)


if __name__ == "__main__":
    main()

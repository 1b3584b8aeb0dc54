"""The shapes that tree attention is measured on, and random calls of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.peers import Call
from ddtree import spec
from ddtree.peers.pages import store

BYTES_PER_S = 4.3e12  # what copies reach on an H200
FLOP_PER_S = 770e12  # what bf16 matrix products reach there
COLD_BYTES = 400e6  # pools of a cell together, eight times the L2 cache
MAX_POOLS = 12
FP8, FP8_NAN = torch.float8_e4m3fn, 0x7F
KEY_SCALE, VALUE_SCALE = 0.5, 2.0
"""Of fp8 pools. Powers of two: the tree's own rows, given in bf16, are then what a pool can hold exactly."""


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
    fp8: bool = False
    """The pools hold float8_e4m3fn; everything else is bf16."""

    @property
    def floor_us(self) -> float:
        """No kernel can be faster than this: bytes once over the memory's rate, or operations over theirs."""
        entry = self.kv_heads * self.head_dim * 2  # key and value
        pool = self.batch * self.prefix * entry * (1 if self.fp8 else 2)
        tree = self.batch * self.q_len * entry * 2
        qo = 2 * 2 * self.batch * self.q_len * self.q_heads * self.head_dim
        columns = self.batch * (self.prefix + self.q_len)
        flop = 4 * columns * self.q_heads * self.q_len * self.head_dim
        return 1e6 * max((pool + tree + qo) / BYTES_PER_S, flop / FLOP_PER_S)

    @property
    def one_less(self) -> "Cell":
        """The same without one row: full tiles, where the root makes q_len = 2^k + 1."""
        return replace(self, q_len=self.q_len - 1)

    @property
    def num_pools(self) -> int:
        """How many KV pools together outsize the L2 cache."""
        width = 1 if self.fp8 else 2
        per_pool = 2 * width * self.batch * self.prefix * self.kv_heads * self.head_dim
        return min(max(2, int(COLD_BYTES / per_pool) + 1), MAX_POOLS)

    def __str__(self) -> str:
        """Batch, q_len, prefix, heads, and what is not usual."""
        dim = f" dim {self.head_dim}" if self.head_dim != 128 else ""
        page = f" page {self.page_size}" if self.page_size != 1 else ""
        fp8 = " fp8" if self.fp8 else ""
        return (
            f"{self.batch}, {self.q_len}, {self.prefix}, "
            f"{self.q_heads}/{self.kv_heads}{dim}{page}{fp8}"
        )


MAIN = [
    *(Cell(1, q, prefix) for prefix in (2048, 16384, 65536) for q in (17, 65, 257, 513)),
    *(Cell(8, q, 4096) for q in (17, 65, 257, 513)),
    *(Cell(32, q, 2048) for q in (17, 65, 257, 513)),
    Cell(1, 17, 16384, 32, 4),
    Cell(1, 257, 16384, 32, 4),
    Cell(16, 65, 4096, 32, 4),
]
VARIED = [Cell(1, 17, 16384), Cell(1, 257, 16384), Cell(8, 65, 4096), Cell(32, 17, 2048)]
GROUPS: dict[str, list[Cell]] = {
    "main": MAIN,
    "less": [cell.one_less for cell in MAIN],
    "dim64": [replace(cell, head_dim=64) for cell in VARIED],
    "page16": [replace(cell, page_size=16) for cell in VARIED],
    "page64": [replace(cell, page_size=64) for cell in VARIED],
    "fp8": [replace(cell, fp8=True) for cell in VARIED],
}


def choose_cells(names: Sequence[str]) -> list[tuple[str, Cell]]:
    """Groups and cells by the names of groups or the first numbers of cells (``1,17,2048``); none: all."""
    every = [(group, cell) for group, cells in GROUPS.items() for cell in cells]
    chosen = [
        (group, cell)
        for group, cell in every
        if not names
        or group in names
        or any(f"{cell}, ".replace("/", ", ").startswith(_words(name)) for name in names)
    ]
    if not chosen:
        raise SystemExit(f"no cell is called {names}; groups are {', '.join(GROUPS)}")
    return chosen


def _words(name: str) -> str:
    """``1,17`` as a cell's name begins: ``1, 17, ``."""
    return name.replace(" ", "").replace("/", ",").replace(",", ", ") + ", "


def random_call(cell: Cell, seed: int) -> Call:
    """A call of a cell on a pool of its own."""
    batch = cell.batch
    return make_call(
        [cell.q_len] * batch, [cell.prefix] * batch, cell.q_heads, cell.kv_heads, cell.head_dim,
        page_size=cell.page_size, seed=seed, fp8=cell.fp8,
    )  # fmt: skip


def make_call(
    q_lens: list[int], prefixes: list[int], q_heads: int, kv_heads: int, head_dim: int,
    dtype: torch.dtype = torch.bfloat16, page_size: int = 1, seed: int = 0, spare_pages: int = 1,
    device: str = "cuda", *, fp8: bool = False,
) -> Call:  # fmt: skip
    """Random tensors; pages are shuffled over the pool; equal trees for equal q_len."""
    generator = torch.Generator(device=device).manual_seed(seed)
    lens = list(zip(prefixes, q_lens, strict=True))
    pages = [-(-(p + q) // page_size) for p, q in lens]
    shuffled = torch.randperm(sum(pages) + spare_pages, generator=generator, device=device)
    starts = shuffled[: sum(pages), None] * page_size
    slots = [
        part.flatten() for part in (starts + torch.arange(page_size, device=device)).split(pages)
    ]
    trees = [best_first_tree(q) for q in q_lens]

    def indptr(lengths: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)

    layout = spec.VerifyLayout(
        qo_indptr=indptr(q_lens, torch.int32),
        kv_indptr=indptr(prefixes, torch.int32),
        kv_indices=torch.cat([s[:p] for s, p in zip(slots, prefixes, strict=True)]),
        mask_indptr=indptr([q * (p + q) for p, q in lens], torch.int64),
        max_q_len=spec.QLen(max(q_lens)),
        positions=torch.cat(
            [p + t.depths[0].long() for p, t in zip(prefixes, trees, strict=True)]
        ).to(device),
        out_cache_loc=torch.cat([s[p : p + q] for s, (p, q) in zip(slots, lens, strict=True)]),
    )
    num_words = -(-max(q_lens) // 32)
    words = torch.cat([pad(tree_words(q), (0, num_words - tree_words(q).shape[1])) for q in q_lens])

    def random(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_dim, generator=generator, device=device)

    def keys_or_values(scale: float) -> tuple[Tensor, Tensor]:
        """Of the tree, and a pool in which slots that no prefix entry uses hold NaN."""
        own, stored = random(sum(q_lens), kv_heads), random(sum(prefixes), kv_heads)
        num_slots = (sum(pages) + spare_pages) * page_size
        pool = torch.empty(
            num_slots, kv_heads, head_dim, dtype=FP8 if fp8 else dtype, device=device
        )
        if fp8:
            pool.view(torch.uint8).fill_(FP8_NAN)
        else:
            pool.fill_(torch.nan)
        store(pool, layout.kv_indices, stored / scale)
        return ((own / scale).to(pool.dtype).float() * scale).to(dtype), pool

    key_scale, value_scale = (KEY_SCALE, VALUE_SCALE) if fp8 else (None, None)
    key, key_pool = keys_or_values(key_scale or 1.0)
    value, value_pool = keys_or_values(value_scale or 1.0)
    return Call(
        random(sum(q_lens), q_heads).to(dtype), key, value, key_pool, value_pool, layout,
        spec.BitMask(words.to(device)), page_size, key_scale, value_scale,
    )  # fmt: skip


def everything_seen(call: Call) -> spec.BitMask:
    """A mask by which every row sees all nodes of its own tree: what a ceiling computes."""
    num_words = call.mask.words.shape[1]
    bits = [[min(max(q_len - 32 * w, 0), 32) for w in range(num_words)] for _, q_len in call.lens]
    words = torch.tensor([[(1 << n) - 1 for n in row] for row in bits])
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    lengths = torch.tensor([q_len for _, q_len in call.lens])
    return spec.BitMask(words.repeat_interleave(lengths, 0).to(call.mask.words.device))


@cache
def best_first_tree(q_len: int, depth: int = 15) -> spec.DraftTree:
    """A tree as DDTree builds it: peaked marginals, horizon 15."""
    generator = torch.Generator().manual_seed(q_len)
    logits = 10.0 * torch.randn(1, depth, max(1024, q_len), generator=generator)
    return spec.build_tree(
        logits.log_softmax(-1), torch.zeros(1, dtype=torch.int64), spec.Budget(q_len - 1)
    )


@cache
def tree_words(q_len: int) -> Tensor:
    """Ancestor words of ``best_first_tree``."""
    tree = best_first_tree(q_len)
    layout = spec.plan_verify(tree, torch.zeros(1, dtype=torch.int64), torch.arange(q_len)[None])
    return spec.tree_mask(tree, layout, "bits").words

"""Which kernel, tiles, blocks and pipeline ``verify_attention`` uses.

GPUs of compute capability 9 take the Hopper kernel for fp16 and bf16 with head dim 64 or 128. Its
configuration is the best of ``bench/results/attention-hopper-sweep-h200.json`` and of the runs that
``attention.md`` there tells of, and so are the registers that pools of fp8 take.

For the general kernel ``bench/results/attention-sweep-h200.json`` compares 22 configurations on 46 shapes
on an H200 (bf16, head dim 128). One of them, 64 rows by 64 entries, is chosen for all: its times are 1.6 %
(geometric mean) above the best of each shape; ``attention.md`` says what to hold against that figure. Widths
do not enter, because both kernels spread whatever blocks there are evenly over their programs. For head dim
256 ``bench/results/attention-sweep-dim256-h200.json`` compares 7 on the same shapes: 64 rows by 64 entries
with 8 warps is 2.2 % above the best of each, and is chosen on GPUs of compute capability 9, whose shared
memory it fills. Elsewhere no times were taken: what the compiler reports of registers, spills and shared
memory chose blocks of 32 entries.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionConfig:
    """How one launch is compiled and how many programs it has."""

    block_m: int
    """Packed query rows of a tile."""
    block_n: int
    """KV entries of a block; a multiple of 32, the bits of an ancestor word."""
    num_stages: int = 3
    """Depth of the load pipeline: ``num_stages - 1`` blocks are in flight."""
    programs_per_sm: int = 2
    """Programs for each multiprocessor: as many as fit at once, so that one wave does all."""
    num_warps: int = 4


@dataclass(frozen=True)
class HopperConfig(AttentionConfig):
    """How the kernel for Hopper GPUs is compiled."""

    block_m: int = 128
    """Fixed in the kernel: 64 rows for each of two consumers."""
    block_n: int = 64
    num_stages: int = 5
    """Shared buffers for blocks of keys, and as many for values."""
    programs_per_sm: int = 1
    tail_saving: int = 3
    """How much less a block takes in a tail tile than in a full one, in sixteenths."""
    consumer_registers: int = 208
    producer_registers: int = 88


def choose_config(
    dtype: torch.dtype, head_dim: int, capability: int = 0, *, fp8: bool = False
) -> AttentionConfig:
    """The configuration for a dtype and head dim on a GPU of that compute capability (its major number).

    0 chooses what runs everywhere, and reads rows that are not aligned. ``fp8``: so are the pools.
    """
    if capability == 9 and head_dim in (64, 128) and dtype is not torch.float32:
        if fp8 and head_dim == 128:  # the producer converts: 8 % less time with these
            return HopperConfig(consumer_registers=200, producer_registers=104)
        return HopperConfig()
    if dtype is torch.float32:  # no matrix units: small tiles, exact products
        return AttentionConfig(16, 32, num_stages=2)
    if head_dim > 128 and capability == 9:
        return AttentionConfig(64, 64, programs_per_sm=1, num_warps=8)
    if head_dim > 128:  # half the shared memory of that; 4 warps spill 160 bytes a thread on sm_90
        return AttentionConfig(64, 32, programs_per_sm=1, num_warps=8)
    return AttentionConfig(64, 64)


def merge_splits(items: int, tiles: int, num_programs: int) -> int:
    """How many partial results of a row the merge loads at once: 16 where items are cut that often."""
    return 16 if items * tiles * 16 <= num_programs else 8

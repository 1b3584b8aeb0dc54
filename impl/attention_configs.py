"""Which tile, block and pipeline ``verify_attention`` uses for which shape.

A configuration is chosen from what the host knows without a synchronisation: dtype, head dim, group and
``max_q_len``. Prefix lengths and batch never matter to the choice, because the kernel spreads whatever
blocks there are evenly over its programs.
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
    odd_m: int = 0
    """Most rows past full tiles that the tiles' programs share; 0: they make one more tile."""
    paired: bool = False
    near: bool = False
    overlap: bool = False
    merge_m: int = 4
    merge_splits: int = 8
    merge_warps: int = 4
    num_warps: int = 4
    num_stages: int = 3
    """Depth of the load pipeline: ``num_stages - 1`` blocks are in flight."""
    programs_per_sm: int = 2
    """Programs for each multiprocessor: as many as fit at once, so that one wave does all."""
    max_registers: int | None = None
    """Registers of a thread at most, where more would leave fewer programs at once."""


def choose_config(
    dtype: torch.dtype, head_dim: int, group: int, max_q_len: int
) -> AttentionConfig:
    """The configuration for a shape."""
    rows = max_q_len * group
    if dtype is torch.float32:  # no matrix units: small tiles, exact products
        return AttentionConfig(16, 32, num_stages=2, programs_per_sm=2)
    if head_dim > 128:
        return AttentionConfig(64, 32, num_stages=3, programs_per_sm=1)
    if rows <= 64:
        return AttentionConfig(64, 64, num_stages=3)
    return AttentionConfig(128, 64, num_warps=8, num_stages=3, max_registers=128)

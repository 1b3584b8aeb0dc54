"""The likeliest tokens of many rows, exactly, in two launches; see ``README.md`` here.

Both are launched without fused multiply-adds, for the reference's log-probs of logits.
"""

from functools import cache

import torch
import triton
from torch import Tensor

from ddtree.impl.rank_kernels import group_max_kernel, rank_kernel
from ddtree.spec.errors import require
from ddtree.spec.softmax import MAX_VOCAB, TILE

MAX_KEPT = 1024
"""Most tokens kept of a row."""
TOKENS_PER_PROGRAM = TILE
"""Tokens that one program of the pass over the vocabulary reads: a tile of log-softmax."""


def ranked(
    rows: Tensor, kept: int, *, log_probs: bool = True, softmax: bool = False
) -> tuple[Tensor, Tensor]:
    """Return each row's ``kept <= MAX_KEPT`` likeliest tokens in rank order, ties to the smaller id.

    Args:
        rows: ``[batch, horizon, vocab]`` log-probs or logits in float32, float16 or bfloat16.
        kept: how many.
        log_probs: leave out what is above 0, which no log-prob is.
        softmax: rows are logits; rank them by the reference's log-probs, and return those.

    Returns:
        Their values in float32, -inf where fewer are above that, and their ids in int32, each
        ``[batch, horizon, kept]``.

    Raises:
        InputError: a vocabulary above ``MAX_VOCAB`` with softmax.
    """
    batch, horizon, vocab = rows.shape
    require(
        not softmax or vocab <= MAX_VOCAB, "a row has {} logits; expected 1 to {}", vocab, MAX_VOCAB
    )
    shape = (batch, horizon, kept)
    values = rows.new_empty(shape, dtype=torch.float32)
    ids = rows.new_empty(shape, dtype=torch.int32)
    if not values.numel():
        return values, ids
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    strides = rows.stride()[:2]
    group = _group_size(vocab, kept)
    num_groups = triton.cdiv(vocab, group)
    groups_per_program = min(TOKENS_PER_PROGRAM // group, triton.next_power_of_2(num_groups))

    num_tiles = triton.cdiv(num_groups, groups_per_program)
    maxima = rows.new_empty((batch, horizon, num_groups), dtype=torch.float32)
    peaks = sums = None
    if softmax:
        peaks = rows.new_empty((batch, horizon, num_tiles), dtype=torch.float32)
        sums = rows.new_empty((batch, horizon, num_tiles), dtype=torch.int64)
    group_max_kernel[(horizon, num_tiles, batch)](
        rows, maxima, peaks, sums, vocab, num_groups, horizon, *strides,
        LOG_PROBS=log_probs and not softmax, SOFTMAX=softmax, GROUP=group, GROUPS=groups_per_program,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip

    padded_groups, padded_kept = triton.next_power_of_2(num_groups), triton.next_power_of_2(kept)
    widest = max(padded_groups, padded_kept * group)
    rank_kernel[(horizon, batch)](
        rows, maxima, peaks, sums,
        torch.empty_like(ids), torch.empty_like(ids, dtype=torch.int64), values, ids,
        vocab, num_groups, num_tiles, kept, horizon, *strides,
        LOG_PROBS=log_probs and not softmax, SOFTMAX=softmax, GROUP=group,
        NUM_GROUPS=padded_groups, NUM_TILES=triton.next_power_of_2(num_tiles), KEPT=padded_kept,
        num_warps=4 if widest <= 4096 else 8 if widest <= 8192 else 16, enable_fp_fusion=False,
    )  # fmt: skip
    return values, ids


@cache
def _group_size(vocab: int, kept: int) -> int:
    """Return the group size that makes the two selections, of groups and in groups, smallest."""

    def work(group: int) -> int:
        groups: int = triton.next_power_of_2(triton.cdiv(vocab, group))
        return groups + int(triton.next_power_of_2(kept)) * group

    return min((8, 16, 32, 64, 128, 256), key=work)

"""The likeliest tokens of many rows, exactly, in two launches; see ``README.md`` here."""

import torch
import triton
from torch import Tensor

from ddtree.impl.rank_kernels import group_max_kernel, rank_kernel

MAX_KEPT = 1024
"""Most tokens kept of a row."""
TOKENS_PER_PROGRAM = 4096
"""Tokens that one program of the pass over the vocabulary reads."""


def ranked(rows: Tensor, kept: int, *, log_probs: bool = True) -> tuple[Tensor, Tensor]:
    """Return each row's ``kept <= MAX_KEPT`` likeliest tokens in rank order, ties to the smaller id.

    Args:
        rows: ``[batch, horizon, vocab]`` log-probs or logits in float32, float16 or bfloat16.
        kept: how many.
        log_probs: leave out what is above 0, which no log-prob is.

    Returns:
        Their values in float32, -inf where fewer are above that, and their ids in int32, each
        ``[batch, horizon, kept]``.
    """
    batch, horizon, vocab = rows.shape
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

    maxima = rows.new_empty((batch, horizon, num_groups), dtype=torch.float32)
    group_max_kernel[(horizon, triton.cdiv(num_groups, groups_per_program), batch)](
        rows, maxima, vocab, num_groups, horizon, *strides,
        LOG_PROBS=log_probs, GROUP=group, GROUPS=groups_per_program, num_warps=8,
    )  # fmt: skip

    padded_groups, padded_kept = triton.next_power_of_2(num_groups), triton.next_power_of_2(kept)
    widest = max(padded_groups, padded_kept * group)
    rank_kernel[(horizon, batch)](
        rows, maxima,
        torch.empty_like(ids), torch.empty_like(ids, dtype=torch.int64), values, ids,
        vocab, num_groups, kept, horizon, *strides,
        LOG_PROBS=log_probs, GROUP=group, NUM_GROUPS=padded_groups, KEPT=padded_kept,
        num_warps=4 if widest <= 4096 else 8,
    )  # fmt: skip
    return values, ids


def _group_size(vocab: int, kept: int) -> int:
    """Return the group size that makes the two selections, of groups and in groups, smallest."""

    def work(group: int) -> int:
        groups: int = triton.next_power_of_2(triton.cdiv(vocab, group))
        return groups + int(triton.next_power_of_2(kept)) * group

    return min((8, 16, 32, 64, 128, 256), key=work)

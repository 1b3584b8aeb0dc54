"""The target's choice at each query row on the device: argmax or a sample."""

from functools import cache

import torch
import triton
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ddtree.impl.arguments import require_logits
from ddtree.impl.op import op
from ddtree.impl.rank import MAX_KEPT, ranked
from ddtree.impl.sampling_kernels import (
    combine_argmax_kernel,
    cut_kernel,
    sample_kernel,
    sample_ranked_kernel,
    split_argmax_kernel,
    split_weight_kernel,
    uniform_kernel,
)
from ddtree.invariants.streams import apart
from ddtree.spec.contracts import VerifyLayout
from ddtree.spec.errors import require
from ddtree.spec.sampling import Sampling, require_parameters

BLOCK = 2048
"""Tokens that a program looks at at a time."""
PROGRAMS = 1056
"""Programs that fill the device: eight for each of 132 multiprocessors."""
MAX_SPLITS = 64
"""Most splits of one row."""
TOP_P_KEPT = 512
"""Likeliest tokens of a row among which top-p is looked for first."""


def first_argmax(logits: Float[Tensor, "T vocab"]) -> Int64[Tensor, " T"]:
    """Return each row's likeliest token, ties to the smallest id; NaN is least likely."""
    require_logits(logits)
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        _argmax(logits, ids)
    return ids


@op("first_argmax", writes=("ids",))
def _argmax(logits: Tensor, ids: Tensor) -> None:
    """Find each row's likeliest token."""
    rows, vocab = logits.shape
    splits = _num_splits(rows, vocab)
    keys = torch.empty((rows, splits), dtype=torch.int64, device=logits.device)
    split_argmax_kernel[(rows, splits)](
        logits, keys, vocab, logits.stride(0), BLOCK=BLOCK, num_warps=8
    )
    combine_argmax_kernel[(rows,)](
        keys, ids, splits, SPLITS=triton.next_power_of_2(splits), num_warps=1
    )


def sample_rows(
    logits: Float[Tensor, "T vocab"],
    uniforms: Float64[Tensor, " T"],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Int64[Tensor, " T"]:
    """Return each row's sample of the reference's ``target_distribution``.

    Weights and their sums are float64, summed in another order than the reference's: the sample is
    the reference's own unless the uniform number, or top-p, lies within rounding (some 1e-13 of the
    total) of a token's boundary. Greedy and top-k are exact.

    Raises:
        InputError: sampling parameters that define no distribution.
    """
    require_parameters(temperature, top_k, top_p)
    if temperature == 0:
        return first_argmax(logits)
    require_logits(logits)
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        _sample(logits, uniforms, ids, temperature, top_k, top_p)
    return ids


@op("sample_rows", writes=("ids",))
def _sample(
    logits: Tensor,
    uniforms: Tensor,
    ids: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    """Sample each row."""
    rows, vocab = logits.shape
    if top_k is not None and top_k >= vocab:
        top_k = None
    is_cut = top_k is not None or top_p is not None
    if not is_cut or (top_k is not None and top_k > MAX_KEPT):
        tops = first_argmax(logits)[:, None]
        _sample_open(logits, tops, uniforms, None, ids, temperature, top_k, top_p)
    else:
        kept = min(TOP_P_KEPT, vocab) if top_k is None else top_k
        likeliest, ranked_ids = ranked(logits[None], kept, log_probs=False)
        weights = None
        if top_k is None:
            weights = _weights(logits, ranked_ids[0], None, None, temperature)
        splits = 1 if weights is None else weights.shape[1]
        is_open = torch.empty(rows, dtype=torch.int32, device=logits.device)
        sample_ranked_kernel[(rows,)](
            likeliest, ranked_ids, weights, uniforms, ids, is_open,
            kept, splits, _constant(temperature, logits.device),
            None if top_p is None else _constant(top_p, logits.device),
            KEPT=triton.next_power_of_2(kept), SPLITS=triton.next_power_of_2(splits),
        )  # fmt: skip
        if weights is not None and kept < vocab:
            _sample_open(logits, ranked_ids[0], uniforms, is_open, ids, temperature, None, top_p)


def _sample_open(
    logits: Tensor,
    tops: Tensor,
    uniforms: Tensor,
    is_open: Tensor | None,
    ids: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    """Sample the open rows (None: all) into ``ids``, however many tokens they keep."""
    rows, vocab = logits.shape
    # Numbers in float64 have to lie in memory: a kernel's float arguments are float32.
    heat = _constant(temperature, logits.device)
    least_keys = None
    if top_k is not None or top_p is not None:
        least_keys = torch.empty(rows, dtype=torch.int64, device=logits.device)
        cut_kernel[(rows,)](
            logits, tops, is_open, least_keys, vocab, logits.stride(0), tops.stride(0), heat,
            top_k, None if top_p is None else _constant(top_p, logits.device),
            BLOCK=2 * BLOCK, num_warps=16,
        )  # fmt: skip
    weights = _weights(logits, tops, is_open, least_keys, temperature)
    splits = weights.shape[1]
    sample_kernel[(rows,)](
        logits, tops, is_open, least_keys, weights, uniforms, ids,
        vocab, logits.stride(0), tops.stride(0), splits, heat,
        SPLITS=triton.next_power_of_2(splits), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def _weights(
    logits: Tensor,
    tops: Tensor,
    is_open: Tensor | None,
    least_keys: Tensor | None,
    temperature: float,
) -> Float64[Tensor, "T splits"]:
    """Return the weight of each split of each open row."""
    rows, vocab = logits.shape
    splits = _num_splits(rows, vocab)
    weights = torch.empty((rows, splits), dtype=torch.float64, device=logits.device)
    split_weight_kernel[(rows, splits)](
        logits, tops, is_open, least_keys, weights,
        vocab, logits.stride(0), tops.stride(0), _constant(temperature, logits.device),
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return weights


def row_uniforms(sampling: Sampling, layout: VerifyLayout, batch: int) -> Float64[Tensor, " T"]:
    """Return the uniform number of each query row: that of its request's seed and its position.

    The reference's numbers, bit for bit; rows past the last request's are of no meaning.
    """
    num_queries = layout.positions.numel()
    uniforms = torch.empty(num_queries, dtype=torch.float64, device=layout.positions.device)
    if num_queries and batch:
        held = sampling.seed if isinstance(sampling.seed, Tensor) else None
        signed = []
        if held is None:
            for seed in sampling.seeds(batch):
                require(0 <= seed < 2**64, "seed is {}; it must be from 0 to 2**64 - 1", seed)
                signed.append(seed - 2**64 if seed >= 2**63 else seed)
        else:
            require(held.shape == (batch,), "{} seeds for {} requests", len(held), batch)
        _uniforms(layout.qo_indptr, layout.positions, uniforms, signed, held)
    return uniforms


@op("row_uniforms", writes=("uniforms",))
def _uniforms(
    qo_indptr: Tensor, positions: Tensor, uniforms: Tensor, numbers: list[int], held: Tensor | None
) -> None:
    """Draw each row's number."""
    seeds = _seeds(tuple(numbers), uniforms.device) if held is None else held
    batch, num_queries = seeds.numel(), positions.numel()
    uniform_kernel[(triton.cdiv(num_queries, 128),)](
        seeds, qo_indptr, positions, uniforms, batch, num_queries,
        BATCH=triton.next_power_of_2(batch), BLOCK=128,
    )  # fmt: skip


def _num_splits(rows: int, vocab: int) -> int:
    """Return into how many splits a row goes, so that all fill the device."""
    each: int = min(MAX_SPLITS, triton.cdiv(PROGRAMS, max(rows, 1)), triton.cdiv(vocab, 2 * BLOCK))
    return max(1, each)


@cache  # for whatever stream and graph asks for it later, so it has to be there at once
def _constant(value: float, device: torch.device) -> Float64[Tensor, ""]:
    """Return a float64 number on the device."""
    with apart(device):
        return torch.full((), value, dtype=torch.float64, device=device)


@cache  # as above
def _seeds(seeds: tuple[int, ...], device: torch.device) -> Int64[Tensor, " B"]:
    """Return the seeds on the device."""
    with apart(device):
        return torch.tensor(seeds, dtype=torch.int64, device=device)

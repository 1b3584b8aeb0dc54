"""Replay captured rounds over random shapes and hold each to the reference.

Needs a GPU. The graph is captured once a configuration; batch, draft, roots and prefix lengths of
every replay are fresh, and what earlier replays left in the slot table and the pools stays.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree import impl, spec
from ddtree.spec import Budget, Horizon, QLen, Sampling
from tests.impl.bigram import BigramTarget

VOCAB, HORIZON, MAX_CONTEXT = 61, Horizon(5), 150


@dataclass(frozen=True)
class Captured:
    """What one graph is captured for."""

    budget: Budget
    max_batch: int
    page_size: int
    ragged: bool = False
    sampling: Sampling | None = None
    with_buffers: bool = False
    from_logits: bool = False


CAPTURED = {
    "slots, fixed width, buffers": Captured(Budget(17), 4, 1, with_buffers=True),
    "pages of 16, ragged, from logits": Captured(Budget(33), 3, 16, ragged=True, from_logits=True),
    "pages of 4, ragged, cut samples, buffers": Captured(
        Budget(64), 5, 4, ragged=True, sampling=Sampling(0.8, 9, 0.9, seed=11), with_buffers=True
    ),
    "slots, samples": Captured(Budget(8), 9, 1, sampling=Sampling(1.0, seed=5)),
    "slots, top-p samples, listed paths": Captured(
        Budget(100), 2, 1, sampling=Sampling(1.3, None, 0.8, seed=3)
    ),
}


def replay(captured: Captured, replays: int, generator: torch.Generator) -> None:
    """Capture a round and replay it; AssertionError names the first difference."""
    max_batch, page_size, q_len = captured.max_batch, captured.page_size, captured.budget + 1
    table = torch.randn(VOCAB, VOCAB, device="cuda", generator=generator)
    pages = -(-MAX_CONTEXT // page_size)
    num_slots = max_batch * pages * page_size
    order = torch.randperm(max_batch * pages, device="cuda", generator=generator)
    slots = order[:, None] * page_size + torch.arange(page_size, device="cuda")
    slots = slots.view(max_batch, -1)[:, :MAX_CONTEXT].contiguous()
    target = BigramTarget(table, slots, num_slots, page_size, impl.commit_kv)
    buffers = None
    if captured.with_buffers:
        buffers = impl.VerifyBuffers(max_batch, QLen(q_len), MAX_CONTEXT - q_len, device="cuda")
    graph = impl.RoundGraph(
        target, max_batch, HORIZON, VOCAB, captured.budget,
        from_logits=captured.from_logits, ragged=captured.ragged, sampling=captured.sampling,
        buffers=buffers,
    )  # fmt: skip
    for _ in range(replays):
        batch = int(torch.randint(1, max_batch + 1, (), device="cuda", generator=generator))
        shape = (batch, HORIZON, VOCAB)
        logits = (torch.randn(shape, device="cuda", generator=generator) * 2).round()
        roots = torch.randint(0, VOCAB, (batch,), device="cuda", generator=generator)
        prefix_lens = torch.randint(
            0, MAX_CONTEXT - q_len, (batch,), device="cuda", generator=generator, dtype=torch.int32
        )
        log_probs = liked_by(table, roots, logits.log_softmax(-1))
        reference = BigramTarget(
            table.cpu(), target.slot_table[:batch].cpu(), num_slots, page_size, spec.commit_kv
        )
        for into, pool in zip(pools_of(reference), pools_of(target), strict=True):
            into.copy_(pool.cpu())
        expected = spec.verify_round(
            log_probs.cpu(), roots.cpu(), prefix_lens.cpu(), reference, captured.budget,
            from_logits=captured.from_logits, ragged=captured.ragged, sampling=captured.sampling,
        )  # fmt: skip
        same_round(graph.replay(log_probs, roots, prefix_lens), expected, batch)
        same("slot table", target.slot_table[:batch], reference.slot_table)
        for pool, known in zip(pools_of(target), pools_of(reference), strict=True):
            same("pool", pool[:-1].nan_to_num(-1), known[:-1].nan_to_num(-1))


def liked_by(table: Tensor, roots: Tensor, log_probs: Tensor) -> Tensor:
    """Give the target's own continuation a high log-prob, so that paths are accepted."""
    token = roots
    for depth in range(HORIZON):
        token = table[token].argmax(-1)
        log_probs[torch.arange(len(roots), device=roots.device), depth, token] = -0.1
    return log_probs


def pools_of(target: BigramTarget) -> tuple[Tensor, ...]:
    """Return the key and value pools of all layers."""
    return (*target.kv.keys, *target.kv.values)


def same(name: str, found: Tensor, expected: Tensor) -> None:
    """Refuse any difference, with the coordinates of the first."""
    found = found.cpu()
    shapes = (list(found.shape), found.dtype), (list(expected.shape), expected.dtype)
    assert shapes[0] == shapes[1], f"{name}: {shapes[0]} for {shapes[1]}"
    if not torch.equal(found, expected):
        raise AssertionError(f"{name} differs at {(found != expected).nonzero()[:5].tolist()}")


def same_round(found: spec.Round, expected: spec.Round, batch: int) -> None:
    """Compare a captured round's used part with the reference's, and look at its tails."""
    for field in ("token_ids", "parents", "depths", "scores", "num_nodes"):
        same(f"tree {field}", getattr(found.tree, field)[:batch], getattr(expected.tree, field))
    layout, known = found.layout, expected.layout
    rows = int(known.qo_indptr[-1])
    for field in ("qo_indptr", "kv_indptr", "mask_indptr"):
        indptr = getattr(layout, field)
        same(field, indptr[: batch + 1], getattr(known, field))
        same(f"{field} tail", indptr[batch:].diff().any(), torch.tensor(False))
    same("kv_indices", layout.kv_indices[: known.kv_indices.numel()], known.kv_indices)
    same("positions", layout.positions[:rows], known.positions)
    same("out_cache_loc", layout.out_cache_loc[:rows], known.out_cache_loc)
    same("out_cache_loc tail", (layout.out_cache_loc[rows:] != -1).any(), torch.tensor(False))
    bits = int(known.mask_indptr[-1])
    assert isinstance(found.mask, spec.FlatMask)
    assert isinstance(expected.mask, spec.FlatMask)
    same("mask", found.mask.allowed[:bits], expected.mask.allowed)
    same("mask tail", found.mask.allowed[bits:].any(), torch.tensor(False))
    for field in ("nodes", "num_accepted", "bonus"):
        same(field, getattr(found.acceptance, field)[:batch], getattr(expected.acceptance, field))
    for field in ("prefix_lens", "src", "dst"):
        same(field, getattr(found.commit, field)[:batch], getattr(expected.commit, field))
    same("token_ids", found.token_ids[:batch], expected.token_ids)

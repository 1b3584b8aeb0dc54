"""Clean calls, made by the reference itself, and the ways to spoil one field of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddtree.invariants import Call
from ddtree.spec import (
    Budget,
    DraftTree,
    FlatMask,
    Horizon,
    PagedKV,
    VerifyBuffers,
    VerifyLayout,
    accept_greedy,
    build_tree,
    commit_kv,
    plan_verify,
    tree_mask,
)
from ddtree.spec.round import new_tokens

VOCAB = 11


def trees(
    batch: int, budget: int, topk: int | None = None, horizon: int = 7, seed: int = 0
) -> DraftTree:
    """Trees of random drafts; the roots are tokens 1, 2, ..."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(batch, horizon, VOCAB, generator=generator).log_softmax(-1)
    return build_tree(log_probs, torch.arange(1, batch + 1), Budget(budget), topk)


def tables(batch: int, context: int, seed: int = 0) -> Tensor:
    """A shuffled slot for each entry of each request."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(batch * context, generator=generator).reshape(batch, context)


def verify(
    prefixes: Sequence[int],
    budget: int,
    topk: int | None = None,
    *,
    ragged: bool = False,
    horizon: int = 7,
) -> tuple[DraftTree, VerifyLayout, FlatMask]:
    """One verify pass of the reference."""
    tree = trees(len(prefixes), budget, topk, horizon)
    table = tables(len(prefixes), max(prefixes) + budget + 1)
    layout = plan_verify(tree, torch.tensor(prefixes), table, tree.num_nodes if ragged else None)
    return tree, layout, tree_mask(tree, layout, "flat")


def whole_round(
    prefixes: Sequence[int] = (5, 3),
    budget: int = 16,
    topk: int | None = 3,
    horizon: int = 2,
    page_size: int = 1,
) -> Call:
    """A round with every field there is; 13 nodes in 17 rows unless told otherwise."""
    batch, context = len(prefixes), max(prefixes) + budget + 1
    tree = trees(batch, budget, topk, horizon)
    table = tables(batch, context)
    layout = plan_verify(tree, torch.tensor(prefixes), table)
    target_ids = last_children(tree)
    acceptance = accept_greedy(tree, target_ids, layout, Horizon(horizon))
    slots = batch * context
    pool = torch.randn(slots, 1, 2)
    kv = PagedKV((pool,), (pool.clone(),), table.clone(), page_size)
    commit = commit_kv(kv, layout, acceptance)
    return Call.of(
        tree,
        layout,
        tree_mask(tree, layout, "flat"),
        tree_mask(tree, layout, "packed"),
        tree_mask(tree, layout, "dense"),
        tree_mask(tree, layout, "bits"),
        acceptance,
        commit,
        input_ids=tree.token_ids.flatten(),
        root_token_ids=torch.arange(1, batch + 1),
        q_lens=torch.full((batch,), budget + 1),
        prefix_lens=torch.tensor(prefixes),
        num_rows=batch * (budget + 1),
        budget=budget,
        horizon=horizon,
        slot_table=table,
        slot_table_after=kv.slot_table,
        kv_pool_size=slots,
        slot_stride=2,
        vocab_size=VOCAB,
        offset_bits=32,
        target_ids=target_ids,
        commits_before=0,
        emitted=new_tokens(tree, acceptance),
    )


def last_children(tree: DraftTree) -> Tensor:
    """``[B * Q]`` choices that follow each node's last child, so that accepted rows are scattered."""
    choices = torch.zeros_like(tree.token_ids)
    for b, count in enumerate(tree.num_nodes.tolist()):
        for row in range(1, count):
            choices[b, int(tree.parents[b, row])] = tree.token_ids[b, row]
    return choices.flatten()


def captured(
    prefixes: Sequence[int] = (5, 3),
    budget: int = 16,
    topk: int | None = 3,
    horizon: int = 2,
    max_batch: int = 4,
    pad_slot: int = -1,
) -> tuple[DraftTree, VerifyBuffers]:
    """Fixed buffers that hold a smaller batch than they were made for."""
    tree, layout, mask = verify(prefixes, budget, topk, horizon=horizon)
    buffers = VerifyBuffers(max_batch, budget + 1, max(prefixes) + 2, pad_slot)
    buffers.fill(tree, layout, mask)
    return tree, buffers


def field(call: Call, name: str) -> Tensor:
    """A tensor field that the call is known to hold."""
    value = getattr(call, name)
    assert isinstance(value, Tensor)
    return value


def put(call: Call, name: str, at: Any, value: Any) -> Call:
    """The call with one entry of one field changed."""
    changed: Any = field(call, name).clone()
    changed[at] = value
    return replace(call, **{name: changed})


def indptr(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Offsets of consecutive segments."""
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)

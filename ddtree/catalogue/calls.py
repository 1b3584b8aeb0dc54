"""Sound calls, made by the reference itself, and the ways to spoil one field of them."""

from collections.abc import Callable, Sequence
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
    PrefixLen,
    QLen,
    VerifyBuffers,
    VerifyLayout,
    accept_greedy,
    build_tree,
    commit_kv,
    index,
    plan_verify,
    tree_mask,
)
from ddtree.spec.mask import Form
from ddtree.spec.round import new_tokens

VOCAB = 11


def trees(
    batch: int, budget: int, topk: int | None = None, horizon: int = 7, seed: int = 0
) -> DraftTree:
    """Trees of random drafts; the roots are tokens 1, 2, ..."""
    roots = torch.arange(1, batch + 1)
    return build_tree(drafts(batch, horizon, seed), roots, Budget(budget), topk)


def drafts(batch: int, horizon: int = 7, seed: int = 0) -> Tensor:
    """``[batch, horizon, VOCAB]`` random log-probs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, horizon, VOCAB, generator=generator).log_softmax(-1)


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
        draft_log_probs=drafts(batch, horizon),
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
    buffers = VerifyBuffers(max_batch, QLen(budget + 1), max(prefixes) + 2, pad_slot)
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


def tree_of(
    *parents: Sequence[int], tokens: Sequence[Sequence[int]] | None = None, rows: int = 0
) -> DraftTree:
    """Trees written out by hand: the parents of each request's nodes, the root's -1 first.

    Scores are minus the row, which suits any order in which a parent comes first. Tokens are the rows'
    numbers unless told otherwise.
    """
    batch, width = len(parents), max(rows, *(len(p) for p in parents))
    token_ids = torch.zeros(batch, width, dtype=torch.int64)
    above = torch.full((batch, width), -1, dtype=torch.int32)
    depths = torch.zeros(batch, width, dtype=torch.int32)
    scores = torch.full((batch, width), -torch.inf, dtype=torch.float64)
    for b, request in enumerate(parents):
        count = len(request)
        own = tokens[b] if tokens is not None else range(1, count + 1)
        token_ids[b, :count] = torch.tensor(list(own))
        above[b, :count] = torch.tensor(request)
        scores[b, :count] = -torch.arange(count, dtype=torch.float64)
        for row in range(1, count):
            depths[b, row] = depths[b, request[row]] + 1
    return DraftTree(
        token_ids, above, depths, scores, torch.tensor([len(p) for p in parents]).int()
    )


def lay_out(
    tree: DraftTree, prefixes: Sequence[int], form: Form = "flat", *, ragged: bool = False
) -> Call:
    """A verify pass of these trees, slots in order: request b's from ``b * context`` on."""
    batch, context = len(prefixes), max(prefixes) + tree.parents.shape[1]
    table = torch.arange(batch * context).reshape(batch, context)
    q_lens = tree.num_nodes if ragged else None
    layout = plan_verify(tree, torch.tensor(prefixes), table, q_lens)
    return Call.of(tree, layout, tree_mask(tree, layout, form))


def plain(
    prefixes: Sequence[int], budget: int, topk: int | None = 4, horizon: int = 7
) -> Callable[[], Call]:
    """A pass of random trees, as ``verify`` makes it."""
    return lambda: Call.of(*verify(prefixes, budget, topk, horizon=horizon))


def swap(**fields: Any) -> Callable[[Call], Call]:
    """Put these fields in place of the call's."""
    return lambda call: replace(call, **fields)


def spoil(name: str, at: Any, value: Any) -> Callable[[Call], Call]:
    """Change one entry of one field."""
    return lambda call: put(call, name, at, value)


def change(fields: Callable[[Call], dict[str, Any]]) -> Callable[[Call], Call]:
    """Put fields computed from the call in place of its own."""
    return lambda call: replace(call, **fields(call))


def ends(lengths: Sequence[int], like: Tensor) -> Tensor:
    """An indptr of these segments in ``like``'s dtype; what ``like`` has beyond them repeats the end."""
    made = indptr(lengths, like.dtype)
    return torch.cat([made, made[-1:].expand(like.numel() - made.numel())])


def width(
    value: int, fields: Sequence[str] = ("qo_indptr", "mask_indptr", "max_q_len")
) -> Callable[[Call], Call]:
    """The founding bug: these fields made from one configured width, by the engine's own formulas."""

    def spoiled(call: Call) -> Call:
        rows, segments = field(call, "qo_indptr"), field(call, "mask_indptr")
        prefixes = field(call, "kv_indptr").diff().tolist()
        live = [int(n > 0) for n in rows.diff().tolist()]
        wrong: dict[str, Any] = {
            "qo_indptr": ends([value * n for n in live], rows),
            "mask_indptr": ends(
                [n * index.mask_len(p, QLen(value)) for n, p in zip(live, prefixes, strict=True)],
                segments,
            ),
            "max_q_len": value,
        }
        return replace(call, **{name: wrong[name] for name in fields})

    return spoiled


def causal(call: Call) -> Call:
    """The flat mask of one request of a call made causal by row."""
    rows = int(field(call, "qo_indptr")[-1])
    prefix_len = int(field(call, "kv_indptr")[-1])
    seen = torch.ones(rows, index.kv_len(PrefixLen(prefix_len), QLen(rows))).tril(prefix_len).bool()
    return replace(call, custom_mask=seen.flatten())

"""Rows about slots: what is kept, what is overwritten, and what a padded request reads."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddtree.catalogue.calls import captured, change, field, lay_out, put, spoil, swap, tree_of
from ddtree.catalogue.entry import CallFault, Measured, Names, Property, PropertyFault, Right, Row
from ddtree.invariants import Call
from ddtree.spec import Horizon, PagedKV, accept_greedy, commit_kv
from ddtree.spec.contracts import DraftTree, VerifyLayout

TREE = (-1, 0, 0, 0, 1, 1, 2, 3, 3)
"""Nodes 0, 3 and 7 are a path."""
CHOICES = [4, 9, 9, 8, 9, 9, 9, 50, 9]
"""The target's choice at each node of ``TREE``, whose tokens are the rows from 1 on: it takes 0, 3, 7."""


def _accepted(requests: int = 1, page_size: int = 4) -> Call:
    """A pass over ``TREE`` for each request, accepted and committed by the reference."""
    prefixes = [5, 3][:requests]
    call = lay_out(tree_of(*[TREE] * requests), prefixes)
    known = call.known()
    tree = DraftTree(**{name: known[name] for name in DraftTree.__dataclass_fields__})
    layout = VerifyLayout(
        **{name: known[name] for name in VerifyLayout.__dataclass_fields__ if name in known}
    )
    target_ids = torch.tensor(CHOICES * requests)
    acceptance = accept_greedy(tree, target_ids, layout, Horizon(3))
    table = torch.arange(requests * 14).reshape(requests, 14)
    kv = PagedKV((), (), table.clone(), page_size)
    commit = commit_kv(kv, layout, acceptance)
    outcome = Call.of(acceptance, commit).known()
    return replace(
        call,
        **outcome,
        target_ids=target_ids,
        slot_table=table,
        slot_table_after=kv.slot_table,
    )


def _clamped(call: Call) -> dict[str, Tensor]:
    return {"out_cache_loc": field(call, "out_cache_loc").clamp(max=11)}


def _zero_prefix() -> Call:
    """Two requests of two nodes, the first without a prefix."""
    return lay_out(tree_of((-1, 0), (-1, 0)), [0, 5])


ROW_14 = Row(
    14,
    "SGLang issue 15360",
    "scattered accepted rows read as if they were the first ones",
    "rows of a tree addressed as rows of a chain",
    "The accepted nodes of a tree lie anywhere among its rows. Read as a dense prefix, or at the row "
    "stride of a chain, other nodes' KV is kept.",
    (
        CallFault(
            "accepted [0, 3, 7], kept rows 0, 1, 2",
            _accepted,
            swap(src=torch.tensor([[5, 6, 7, -1]])),
            Names("commit_src", 0, 8, 6),
            (Right("nodes", 0, [0, 3, 7, -1]), Right("src", 0, [5, 8, 12, -1])),
            "the sources are rows 0 to 2; the accepted rows are [0, 3, 7]: scattered nodes were read as a "
            "dense prefix",
            captured=False,
        ),
        CallFault(
            "the second request found with a stride of horizon + 1 rows",
            lambda: _accepted(2),
            lambda c: put(
                c, "src", (1, slice(0, 3)), field(c, "out_cache_loc")[4 + torch.tensor([0, 3, 7])]
            ),
            Names("commit_src", 1, 17, 9),
            (Right("src", 1, [17, 20, 24, -1]),),
            "the sources were found with a row stride of horizon + 1 = 4",
            captured=False,
        ),
        CallFault(
            "each node left at its own entry, so that the prefix has holes",
            _accepted,
            swap(dst=torch.tensor([[5, 8, 12, -1]])),
            Names("commit_dst", 0, 6, 8),
            (Right("dst", 0, [5, 6, 7, -1]),),
            captured=False,
        ),
        CallFault(
            "moved from the last to the first: a source is overwritten before it is read",
            lambda: Call(src=torch.tensor([[10, 11, 12]]), dst=torch.tensor([[9, 10, 11]])),
            swap(src=torch.tensor([[12, 11, 10]]), dst=torch.tensor([[11, 10, 9]])),
            Names("commit_order", 0, "an untouched source", 11),
            (Right("src", 0, [10, 11, 12]),),
            captured=False,
        ),
    ),
)

ROW_17 = Row(
    17,
    "vLLM issue 43682",
    "a padded request's length 0 turned into 1",
    "an empty request given an entry that it does not have",
    "Lengths were raised to 1 so that no kernel meets an empty request. The padded request then reads its "
    "first page from a table row of -1.",
    (
        CallFault(
            "a padded request of fixed buffers has one entry",
            lambda: Call.of(*captured((5, 4, 3), 7, 4, 7, 4)),
            spoil("kv_indptr", 4, 13),
            Names("stale_tail", 3, 12, 13),
            (Right("kv_indptr", None, [0, 5, 9, 12, 12]),),
        ),
        CallFault(
            "a real request without a prefix counted as 1",
            lambda: replace(_zero_prefix(), prefix_lens=torch.tensor([0, 5])),
            swap(
                kv_indptr=torch.tensor([0, 1, 6], dtype=torch.int32),
                kv_indices=torch.tensor([-1, 7, 8, 9, 10, 11]),
            ),
            Names("kv_indptr", 0, 0, 1),
            (Right("kv_indptr", None, [0, 0, 5]),),
            "a prefix of 0 was counted as 1",
            captured=False,
        ),
        CallFault(
            "a table row of -1 read for a real prefix",
            lambda: lay_out(tree_of((-1, 0), (-1, 0)), [2, 5]),
            spoil("kv_indices", 0, -1),
            Names("kv_indices", 0, "at least 0", -1),
            (Right("kv_indices", slice(0, 2), [0, 1]),),
        ),
    ),
)

ROW_34 = Row(
    34,
    "SGLang issue 26972",
    "a request's slot row too short for the tree, silently clamped",
    "room that is short by the tree, and an address that is clamped into it",
    "With several branches and pages larger than 1 the tree needs more entries than the row of the slot "
    "table has. The index was clamped to the last one, and several nodes wrote their KV there.",
    (
        CallFault(
            "the last three rows write one slot",
            lambda: lay_out(tree_of(TREE), [5]),
            change(_clamped),
            Names("write_unique", 0, "one writer", 11),
            (Right("out_cache_loc", slice(6, 9), [11, 12, 13]),),
        ),
        CallFault(
            "a table of 12 entries for 14",
            lambda: replace(
                lay_out(tree_of(TREE), [5]), slot_table=torch.arange(14).reshape(1, 14)
            ),
            swap(slot_table=torch.arange(12).reshape(1, 12)),
            Names("slot_table", 0, 14, 12),
            (Right("slot_table", (0, slice(12, 14)), [12, 13]),),
        ),
        CallFault(
            "the tree's rows written from the prefix's last page on",
            lambda: lay_out(tree_of(TREE), [5]),
            change(lambda c: {"out_cache_loc": field(c, "out_cache_loc") - 1}),
            Names("write_disjoint", 0, "a free slot", 4),
            (Right("out_cache_loc", 0, 5),),
        ),
    ),
)


def kept_rows(nodes: Tensor, hidden: Tensor) -> Tensor:
    """The hidden rows of the accepted nodes: what the drafter reads next."""
    return hidden[nodes]


def _first_rows(nodes: Tensor, hidden: Tensor) -> Tensor:
    return hidden[: nodes.numel()]


def _last_rows(nodes: Tensor, hidden: Tensor) -> Tensor:
    return hidden[-nodes.numel() :]


def _without_root(nodes: Tensor, hidden: Tensor) -> Tensor:
    return hidden[nodes[1:]]


def _rows_kept(implementation: Any, nodes: list[int]) -> Measured:
    hidden = torch.arange(max(nodes) + 3)[:, None].expand(-1, 2)
    return Measured(nodes, implementation(torch.tensor(nodes), hidden)[:, 0].tolist())


FEATURES = Property(
    "features",
    "The hidden states handed to the drafter are those of the accepted rows, in order.",
    _rows_kept,
)

ROW_39 = Row(
    39,
    "SGLang pull request 27509",
    "the first n hidden rows kept instead of the accepted ones",
    "rows of a tree addressed as rows of a chain",
    "The drafter reads the target's hidden states of the accepted tokens. It was given the first n rows, "
    "which are the accepted ones only where the best guess was right at every depth.",
    (
        PropertyFault(
            "accepted [0, 2]: rows [0, 1] kept",
            FEATURES,
            kept_rows,
            _first_rows,
            lambda: [0, 2],
            [0, 2],
            [0, 1],
        ),
        PropertyFault(
            "the last rows kept",
            FEATURES,
            kept_rows,
            _last_rows,
            lambda: [0, 2],
            [0, 2],
            [3, 4],
        ),
        PropertyFault(
            "the root's row left out, whose entry is committed too",
            FEATURES,
            kept_rows,
            _without_root,
            lambda: [0, 2],
            [0, 2],
            [2],
        ),
        CallFault(
            "the bonus read at row n - 1 instead of the last accepted row",
            _accepted,
            swap(bonus=torch.tensor([9])),
            Names("bonus", 0, 50, 9),
            (Right("bonus", 0, 50), Right("target_ids", 7, 50)),
            captured=False,
        ),
    ),
)

SLOTS = (ROW_14, ROW_17, ROW_34, ROW_39)

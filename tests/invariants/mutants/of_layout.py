"""Mutants of the layout."""

from dataclasses import replace

import torch

from ddtree.catalogue.calls import width
from ddtree.invariants import Call
from tests.invariants.calls import captured, field, indptr, put, verify, whole_round
from tests.invariants.mutants.kinds import (
    Mutant,
    change,
    short_mask,
    spoil,
    swap,
    with_unused,
)


def _twice(c: Call) -> torch.Tensor:
    slots = field(c, "kv_indices").clone()
    slots[7] = slots[5]
    return slots


def _clamped(c: Call) -> torch.Tensor:
    slots = field(c, "out_cache_loc").clone()
    slots[10:17] = slots[10]
    return slots


def _over_last_node(**sizes: int) -> Call:
    """The first padding row of request 0 is written where its last node is."""
    call = whole_round(**sizes)  # type: ignore[arg-type]
    row = int(field(call, "num_nodes")[0])
    return put(call, "out_cache_loc", row, int(field(call, "out_cache_loc")[row - 1]))


def _over_prefix(c: Call) -> torch.Tensor:
    slots = field(c, "out_cache_loc").clone()
    slots[2] = field(c, "kv_indices")[6]
    return slots


def _by_depth(c: Call) -> torch.Tensor:
    slots = field(c, "out_cache_loc").clone()
    slots[:13] = slots[field(c, "depths")[0, :13].long()]
    return slots


def _exchanged(c: Call) -> torch.Tensor:
    slots = field(c, "kv_indices").clone()
    slots[:2] = slots[:2].flip(0)
    return slots


def _zero_as_one() -> Call:
    call = replace(whole_round(prefixes=(5, 0)), prefix_lens=None)
    return replace(
        call,
        kv_indptr=indptr([5, 1]),
        kv_indices=torch.cat([field(call, "kv_indices"), torch.tensor([-1])]),
    )


def _beside_unused(prefix_lens: list[int]) -> Call:
    """Fixed buffers of three requests, the second unused, with these lengths in ``kv_indptr``."""
    return Call(
        qo_indptr=indptr([4, 0, 4]),
        kv_indptr=indptr(prefix_lens),
        mask_indptr=indptr([36, 0, 28]),
        max_q_len=4,
        prefix_lens=torch.tensor([5, -1, 3]),
        is_captured=True,
    )


def _configured_beside_unused(name: str) -> Call:
    """The founding bug in one indptr of fixed buffers of three requests, the second unused."""
    call = with_unused(Call.of(*verify([5, 3], 16, 3, horizon=2)), 1)
    return width(8, (name,))(call)


def _indptrs_of(q_len: int) -> Call:
    """Fixed buffers without tree, mask and rows, where no more is known than what the indptrs say."""
    layout = captured()[1].layout
    lens = [q_len * (p + q_len) for p in (5, 3)]
    return replace(
        Call.of(layout),
        qo_indptr=indptr([q_len, q_len, 0, 0]),
        mask_indptr=indptr([*lens, 0, 0]),
        kv_indptr=indptr([5, 3, 0, 0]),
        positions=None,
        out_cache_loc=None,
    )


def _siblings_as_chain() -> Call:
    return Call(
        qo_indptr=indptr([3]),
        kv_indptr=indptr([4]),
        positions=torch.tensor([4, 5, 6]),
        parents=torch.tensor([[-1, 0, 0]]),
        depths=torch.tensor([[0, 1, 1]]),
        num_nodes=torch.tensor([3]),
    )


# The whole round: prefixes [5, 3], budget 16, 13 nodes in 17 rows each, accepted rows scattered.
LAYOUT = [
    Mutant(
        "mask_len",
        "width 8 from configuration, q_len 17",
        swap(mask_indptr=torch.tensor([0, 104, 192])),
        0,
        374,
        104,
        "every segment fits width 8; this call's q_len is 17: the width came from configuration",
    ),
    Mutant(
        "mask_len",
        "segments of the prefix alone",
        swap(mask_indptr=indptr([17 * 5, 17 * 3])),
        0,
        374,
        85,
        "the tree's own columns were left out",
    ),
    Mutant(
        "mask_len",
        "full-width segments over a window's KV (sglang #39160)",
        lambda: Call(
            qo_indptr=indptr([4, 4]), kv_indptr=indptr([8, 3]), mask_indptr=indptr([4 * 24, 4 * 7])
        ),
        0,
        48,
        96,
        "fit prefix lengths [20, 3]",
    ),
    Mutant(
        "mask_len",
        "one entry short, for no known reason",
        swap(mask_indptr=torch.tensor([0, 373, 714])),
        0,
        374,
        373,
    ),
    Mutant(
        "mask_indptr",
        "a start that is not 0",
        swap(mask_indptr=torch.tensor([1, 375, 715])),
        None,
        0,
        1,
    ),
    Mutant(
        "mask_indptr",
        "segments that go back",
        swap(mask_indptr=torch.tensor([0, 374, 340])),
        1,
        "at least 374",
        340,
    ),
    Mutant(
        "mask_indptr",
        "a mask that ends before its segments",
        lambda: short_mask([5, 3], 17, 700, capture=False),
        None,
        700,
        714,
    ),
    Mutant(
        "qo_indptr",
        "width 8 from configuration",
        swap(qo_indptr=indptr([8, 8])),
        0,
        17,
        8,
        "every segment fits width 8; this call's q_len is 17: the width came from configuration",
    ),
    Mutant(
        "qo_indptr",
        "the budget in place of budget + 1",
        swap(qo_indptr=indptr([16, 16])),
        0,
        17,
        16,
        "or the budget was taken for budget + 1",
    ),
    Mutant(
        "qo_indptr",
        "an eager request without rows",
        lambda: Call(qo_indptr=indptr([4, 0, 4]), kv_indptr=indptr([5, 2, 3])),
        1,
        "at least 1",
        0,
    ),
    Mutant("qo_indptr", "two requests' rows mixed up", swap(qo_indptr=indptr([18, 16])), 0, 17, 18),
    Mutant(
        "qo_indptr", "a start that is not 0", swap(qo_indptr=torch.tensor([1, 17, 34])), None, 0, 1
    ),
    Mutant(
        "max_q_len",
        "forced to the configured width (sglang #27473)",
        swap(max_q_len=8),
        None,
        17,
        8,
        "leaves out rows 8 to 16",
    ),
    Mutant(
        "max_q_len", "larger than any request of an eager call", swap(max_q_len=32), None, 17, 32
    ),
    Mutant(
        "kv_indptr",
        "the tree's own entries counted (FlashInfer's convention)",
        swap(kv_indptr=indptr([22, 20])),
        0,
        5,
        22,
        "FlashInfer's convention",
    ),
    Mutant(
        "kv_indptr",
        "the tree's entries counted, without prefix_lens",
        change(lambda c: {"kv_indptr": indptr([22, 20]), "prefix_lens": None}),
        0,
        5,
        22,
        "FlashInfer's convention",
    ),
    Mutant("kv_indptr", "one entry too many", swap(kv_indptr=indptr([6, 3])), 0, 5, 6),
    Mutant(
        "mask_len",
        "a configured width beside an unused request",
        lambda: _configured_beside_unused("mask_indptr"),
        0,
        374,
        104,
        "every segment fits width 8; this call's q_len is 17",
    ),
    Mutant(
        "qo_indptr",
        "a configured width beside an unused request",
        lambda: _configured_beside_unused("qo_indptr"),
        0,
        17,
        8,
        "every segment fits width 8; this call's q_len is 17",
    ),
    Mutant(
        "kv_indptr",
        "a stale length beside an unused request",
        lambda: _beside_unused([2, 0, 3]),
        0,
        5,
        2,
    ),
    Mutant(
        "kv_indptr",
        "the roots counted beside an unused request",
        lambda: _beside_unused([6, 0, 4]),
        0,
        5,
        6,
        "every segment is prefix_len + 1: kv_indptr counts the root",
    ),
    Mutant(
        "kv_indptr",
        "an unused request's length of 0 taken for 1",
        lambda: _beside_unused([5, 1, 3]),
        1,
        0,
        1,
        "a prefix of 0 was counted as 1",
    ),
    Mutant(
        "kv_indptr",
        "fewer slots than entries",
        change(lambda c: {"kv_indices": field(c, "kv_indices")[:7]}),
        None,
        "at most 7",
        8,
    ),
    Mutant("kv_indices", "a slot past the pool", spoil("kv_indices", 6, 44), 1, "0 to 43", 44),
    Mutant(
        "kv_indices",
        "length 0 of a padded request turned into 1 reads entry -1 (vllm #43682)",
        lambda: Call(kv_indptr=indptr([2, 1]), kv_indices=torch.tensor([4, 7, -1])),
        1,
        "at least 0",
        -1,
    ),
    Mutant(
        "kv_unique",
        "one slot for two entries",
        change(lambda c: {"kv_indices": _twice(c)}),
        1,
        "distinct slots",
    ),
    Mutant(
        "out_cache_loc",
        "a real row that is not written",
        spoil("out_cache_loc", 18, -1),
        1,
        "0 to 43",
        -1,
    ),
    Mutant(
        "out_cache_loc",
        "a padding row past the pool",
        spoil("out_cache_loc", 15, 50),
        0,
        "-1 to 43",
        50,
    ),
    Mutant(
        "write_unique",
        "a row too narrow, clamped to its last slot (sglang #26972)",
        change(lambda c: {"out_cache_loc": _clamped(c)}),
        0,
        "one writer",
    ),
    Mutant(
        "write_unique",
        "the same in a call without its tree",
        change(
            lambda c: {
                "out_cache_loc": _clamped(c),
                **dict.fromkeys(("num_nodes", "parents", "depths", "token_ids", "scores")),
            }
        ),
        0,
        "one writer",
    ),
    Mutant(
        "out_cache_loc",
        "a node's row unwritten, in a call without its tree",
        change(
            lambda c: {
                "out_cache_loc": torch.where(torch.arange(34) == 12, -1, field(c, "out_cache_loc")),
                **dict.fromkeys(("num_nodes", "parents", "depths", "token_ids", "scores")),
            }
        ),
        0,
        None,
        -1,
    ),
    Mutant(
        "write_unique",
        "a chain's row that padding overwrites",
        lambda: _over_last_node(topk=1, horizon=7),
        0,
        "one writer",
    ),
    Mutant(
        "write_unique",
        "a root alone in its tree whose slot padding overwrites",
        lambda: _over_last_node(budget=4, horizon=0),
        0,
        "one writer",
    ),
    Mutant(
        "write_disjoint",
        "a tree written over another request's prefix",
        change(lambda c: {"out_cache_loc": _over_prefix(c)}),
        0,
        "a free slot",
    ),
    Mutant(
        "slot_table",
        "the tree written at entry prefix_len + depth",
        change(lambda c: {"out_cache_loc": _by_depth(c)}),
        0,
        hint="the slots are those of entries prefix_len + depth",
    ),
    Mutant(
        "slot_table",
        "two prefix entries exchanged",
        change(lambda c: {"kv_indices": _exchanged(c)}),
        0,
    ),
    Mutant(
        "positions",
        "by row, not by depth (mlxcel #1214, TensorRT-LLM #12962)",
        change(lambda c: {"positions": torch.cat([5 + torch.arange(17), 3 + torch.arange(17)])}),
        0,
        6,
        7,
        "positions are prefix_len + row",
    ),
    Mutant(
        "positions",
        "a host mirror of the lengths that is 4 too large (a vLLM port)",
        change(lambda c: {"positions": field(c, "positions") + 4}),
        0,
        5,
        9,
        "off by 4: they fit prefix_len 9",
    ),
    Mutant(
        "positions",
        "parents [-1, 0, 0] seen as a chain (sglang #39287)",
        lambda: _siblings_as_chain(),
        0,
        5,
        6,
        "positions are prefix_len + row",
    ),
    Mutant("positions", "one stale position", spoil("positions", 3, 11), 0, 6, 11),
    Mutant(
        "positions",
        "stale roots, without a tree",
        lambda: Call(
            qo_indptr=indptr([2, 2]), kv_indptr=indptr([5, 3]), positions=torch.tensor([5, 6, 5, 6])
        ),
        1,
        3,
        5,
    ),
    Mutant(
        "input_ids",
        "tokens of the round before",
        change(lambda c: {"input_ids": field(c, "input_ids").roll(1)}),
        0,
    ),
    Mutant(
        "mask_len",
        "columns of the tree alone",
        swap(mask_indptr=indptr([17 * 17, 17 * 17])),
        0,
        374,
        289,
        "every segment is q_len * q_len: the prefix's columns were left out",
    ),
    Mutant(
        "mask_len",
        "prefix_len + budget columns",
        swap(mask_indptr=indptr([17 * 21, 17 * 19])),
        0,
        374,
        357,
        "each row lacks one column",
    ),
    Mutant(
        "mask_len",
        "cumulated twice",
        swap(mask_indptr=torch.tensor([0, 374, 1088])),
        1,
        340,
        714,
        "mask_indptr was cumulated twice",
    ),
    Mutant(
        "mask_len",
        "every request as long as the longest",
        swap(mask_indptr=indptr([374, 374])),
        1,
        340,
        374,
        "the columns of the longest prefix, 5",
    ),
    Mutant(
        "mask_len",
        "lengths that some other prefixes would fit, which stand nowhere else",
        swap(mask_indptr=indptr([17 * 27, 17 * 31])),
        0,
        374,
        459,
        "the segments fit prefix lengths [10, 14]; this call's are [5, 3]",
    ),
    Mutant(
        "mask_len",
        "the prefixes that the positions have",
        change(
            lambda c: {
                "mask_indptr": indptr([17 * 27, 17 * 31]),
                "positions": field(c, "positions") + torch.tensor([5] * 17 + [11] * 17),
            }
        ),
        0,
        374,
        459,
        "fit prefix lengths [10, 14]; this call's are [5, 3]: [10, 14] are the roots' positions",
    ),
    Mutant(
        "max_q_len",
        "right, where both indptrs of fixed buffers are of another width",
        lambda: _indptrs_of(24),
        None,
        "at least 24",
        17,
    ),
    Mutant(
        "positions",
        "one too few behind no prefix: of no other prefix",
        lambda: replace(
            whole_round(prefixes=(0, 3)),
            positions=field(whole_round(prefixes=(0, 3)), "positions") - 1,
        ),
        0,
        0,
        -1,
    ),
    Mutant(
        "mask_len",
        "one request's segment of a windowed prefix: columns of another width would fill it too",
        lambda: replace(whole_round(prefixes=(20,)), mask_indptr=indptr([17 * (8 + 17)])),
        0,
        17 * (20 + 17),
        17 * (8 + 17),
        "the columns of width 5; or: the segments fit prefix lengths [8]; this call's are [20]",
    ),
    Mutant(
        "max_q_len",
        "one row too few",
        swap(max_q_len=16),
        None,
        17,
        16,
        "leaves out row 16 of a request",
    ),
    Mutant(
        "mask_indptr",
        "a mask without the last request's segment",
        change(lambda c: {"custom_mask": field(c, "custom_mask")[:374]}),
        None,
        374,
        714,
        "the missing 340 entries are the segment of request 1",
    ),
    Mutant(
        "kv_indptr",
        "the root counted",
        swap(kv_indptr=indptr([6, 4])),
        1,
        3,
        4,
        "kv_indptr counts the root",
    ),
    Mutant(
        "kv_indptr",
        "the root counted, without prefix_lens",
        change(lambda c: {"kv_indptr": indptr([6, 4]), "prefix_lens": None}),
        0,
        5,
        6,
        "kv_indptr counts the root",
    ),
    Mutant(
        "kv_indptr",
        "length 0 turned into 1, without prefix_lens (vllm #43682)",
        lambda: _zero_as_one(),
        1,
        0,
        1,
        "a prefix of 0 was counted as 1",
    ),
    Mutant(
        "kv_indptr",
        "prefixes cut to a window",
        lambda: Call(kv_indptr=indptr([8, 3]), prefix_lens=torch.tensor([20, 3])),
        0,
        20,
        8,
        "what a window of 8 leaves of the prefixes",
    ),
    Mutant(
        "kv_indptr",
        "an int32 that wrapped",
        lambda: Call(kv_indptr=torch.tensor([0, 2**31 - 1, 5 - 2**31], dtype=torch.int32)),
        1,
        "at least 2147483647",
        5 - 2**31,
        "is 2147483653 - 2^32: the offset overflowed 32 bits",
    ),
    Mutant(
        "kv_indptr",
        "a negative end that is no overflow",
        lambda: Call(kv_indptr=torch.tensor([0, 5, -1], dtype=torch.int32)),
        1,
        "at least 5",
        -1,
    ),
    Mutant(
        "positions",
        "by row, where the parents alone tell the depths",
        lambda: replace(_siblings_as_chain(), depths=None),
        0,
        5,
        6,
        "positions are prefix_len + row",
    ),
    Mutant(
        "qo_indptr",
        "a request without rows",
        lambda: Call(qo_indptr=indptr([3, 0, 3])),
        1,
        "at least 1",
        0,
    ),
]

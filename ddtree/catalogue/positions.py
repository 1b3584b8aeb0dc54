"""Rows about positions and about what an earlier call left behind."""

from dataclasses import replace

import torch

from ddtree.catalogue.attention import BY_ROW, OFF_BY_ONE, ROOTS_WINDOW
from ddtree.catalogue.calls import (
    captured,
    change,
    field,
    lay_out,
    plain,
    put,
    spoil,
    swap,
    tree_of,
)
from ddtree.catalogue.entry import CallFault, Names, Right, Row
from ddtree.invariants import Call

BY_DEPTH = "positions are prefix_len + row: they go by depth, siblings share one"
SIBLINGS = (-1, 0, 0)


def _replay(prefixes: tuple[int, ...], budget: int = 7) -> Call:
    """Fixed buffers for four requests that hold this call."""
    return Call.of(*captured(prefixes, budget, 4, 7, 4))


def _shifted(*shifts: int) -> Call:
    """A call of eight rows a request whose positions are off by so much in each request."""
    call = plain([20, 11], 7)()
    return put(
        call,
        "positions",
        slice(0, 16),
        field(call, "positions") + torch.tensor(shifts).repeat_interleave(8),
    )


ROW_5 = Row(
    5,
    "SGLang issue 39287",
    "a sliding window by row index instead of depth",
    "the row of a node taken for its depth",
    "A window counts positions. Siblings lie in different rows at one position, so a window by row takes "
    "keys from the later of them, one for each row that is no step deeper.",
    (
        BY_ROW,
        OFF_BY_ONE,
        ROOTS_WINDOW,
        CallFault(
            "the positions themselves by row, so that any window is by row",
            lambda: lay_out(tree_of(SIBLINGS), [5]),
            swap(positions=torch.tensor([5, 6, 7])),
            Names("positions", 0, 6, 7),
            (Right("positions", None, [5, 6, 6]),),
            BY_DEPTH,
        ),
    ),
)

ROW_15 = Row(
    15,
    "SGLang issue 24401",
    "stale positions when fewer requests replay than were captured",
    "the tail of fixed buffers left as an earlier call wrote it",
    "A graph of four requests replays three. The fourth's rows still run, at the positions and slots of "
    "the call before, and write where another request may live by now.",
    (
        CallFault(
            "four requests captured, three replayed: old positions behind them",
            lambda: _replay((5, 4, 3)),
            spoil("positions", slice(24, 32), 6),
            Names("stale_tail", None, 0, 6),
            (Right("positions", slice(24, 32), [0] * 8), Right("qo_indptr", 4, 24)),
        ),
        CallFault(
            "old slots behind the call: unused rows write into them",
            lambda: _replay((5, 4, 3)),
            spoil("out_cache_loc", slice(24, 32), 40),
            Names("stale_tail", None, -1, 40),
            (Right("out_cache_loc", slice(24, 32), [-1] * 8),),
        ),
        CallFault(
            "old mask bits behind the call",
            lambda: _replay((5, 4, 3)),
            spoil("custom_mask", slice(8 * 36, 8 * 36 + 8), True),
            Names("stale_tail", None, 0, 1),
            (Right("mask_indptr", 4, 8 * (13 + 12 + 11)),),
        ),
        CallFault(
            "row offsets that still end with the fourth request",
            lambda: _replay((5, 4, 3)),
            spoil("qo_indptr", 4, 32),
            Names("stale_tail", 3, 24, 32),
            (Right("qo_indptr", 4, 24),),
        ),
    ),
)

ROW_28 = Row(
    28,
    "TensorRT-LLM pull request 12962",
    "positions counted back from the last, parents ignored",
    "positions of a tree given out as if it were a chain",
    "New nodes were appended with consecutive positions ending at the last one. Nodes under one parent "
    "share a position, so all but the first of them are too far on.",
    (
        CallFault(
            "parents [1, 1, 0] of three appended nodes, positions in a run",
            lambda: lay_out(tree_of((-1, 0, 1, 1, 0)), [10]),
            swap(positions=torch.tensor([10, 11, 12, 13, 14])),
            Names("positions", 0, 12, 13),
            (Right("positions", None, [10, 11, 12, 12, 11]),),
            BY_DEPTH,
        ),
        CallFault(
            "depths counted from 1: all but the root one too far",
            lambda: lay_out(tree_of((-1, 0, 1, 1, 0)), [10]),
            swap(positions=torch.tensor([10, 12, 13, 13, 12])),
            Names("positions", 0, 11, 12),
            (Right("positions", None, [10, 11, 12, 12, 11]),),
            "every position but the root's is 1 too far",
        ),
        CallFault(
            "a run for each level: the second level begins anew at the root",
            lambda: lay_out(tree_of((-1, 0, 1, 1, 0)), [10]),
            swap(positions=torch.tensor([10, 11, 11, 11, 11])),
            Names("positions", 0, 12, 11),
            (Right("positions", None, [10, 11, 12, 12, 11]),),
        ),
    ),
)

ROW_35 = Row(
    35,
    "llama.cpp issue 26478",
    "positions leave a gap after a round",
    "one round's end and the next round's beginning counted differently",
    "The cache ended at position 16382 and the next batch began at 16384, one entry too far: it counted "
    "the bonus token, whose own KV is only computed in the next pass.",
    (
        CallFault(
            "the cache ends at 16382, the next root stands at 16384",
            lambda: lay_out(tree_of((-1, 0, 0, 1)), [16383]),
            change(lambda c: {"positions": field(c, "positions") + 1}),
            Names("positions", 0, 16383, 16384),
            (Right("positions", 0, 16383),),
            "every position of the request is off by 1: they fit prefix_len 16384, not 16383",
        ),
        CallFault(
            "the next root at the last position that is taken",
            lambda: lay_out(tree_of((-1, 0, 0, 1)), [16383]),
            change(lambda c: {"positions": field(c, "positions") - 1}),
            Names("positions", 0, 16383, 16382),
            (Right("positions", 0, 16383),),
            "every position of the request is off by -1",
        ),
        CallFault(
            "the bonus counted among the committed entries",
            lambda: Call(
                kv_indptr=torch.tensor([0, 16380]),
                num_accepted=torch.tensor([3]),
                committed_lens=torch.tensor([16383]),
            ),
            swap(committed_lens=torch.tensor([16384])),
            Names("commit_len", 0, 16383, 16384),
            (Right("committed_lens", 0, 16383),),
        ),
    ),
)


ROW_40 = Row(
    40,
    "DDTree on vLLM",
    "a replay ignores the new positions tensor",
    "fixed buffers rebound instead of written",
    "A captured graph reads the memory that it was captured with. The round made a new positions tensor "
    "and set the attribute to it; the graph went on reading the old one.",
    (
        CallFault(
            "the positions of the call before",
            lambda: _replay((5, 3)),
            lambda c: put(c, "positions", slice(None), field(_replay((9, 6)), "positions")),
            Names("positions", 0, 5, 9),
            (Right("positions", 0, 5),),
            "every position of the request is off by 4: they fit prefix_len 9, not 5",
        ),
        CallFault(
            "the slots of the call before",
            lambda: replace(
                lay_out(tree_of(SIBLINGS), [5]), slot_table=torch.arange(16).reshape(1, 16)
            ),
            lambda c: put(c, "out_cache_loc", slice(0, 3), torch.tensor([9, 10, 11])),
            Names("slot_table", 0, 5, 9),
            (Right("out_cache_loc", slice(0, 3), [5, 6, 7]),),
            "the slots are those of entries 4 further on",
        ),
        CallFault(
            "the row offsets of a call with other widths",
            lambda: _replay((5, 3), 7),
            lambda c: put(c, "qo_indptr", slice(None), torch.tensor([0, 4, 8, 8, 8])),
            Names("qo_indptr", 0, 8, 4),
            (Right("qo_indptr", 2, 16),),
            "every segment fits width 4; this call's q_len is 8: the width came from configuration or an "
            "earlier fill",
        ),
    ),
)

ROW_41 = Row(
    41,
    "DDTree on vLLM",
    "prefix lengths from a mirror that is only an upper bound",
    "a length kept twice, of which one copy lags or leads",
    "The host kept its own count of each request's entries, raised by the most that a round could accept. "
    "Positions made from it lay 4 to 10 too far on, and drifted.",
    (
        CallFault(
            "positions 4 too far in one request, 10 in the other",
            plain([20, 11], 7),
            lambda _: _shifted(4, 10),
            Names("positions", 0, 20, 24),
            (Right("positions", 0, 20), Right("positions", 8, 11)),
            "every position of the request is off by 4: they fit prefix_len 24, not 20",
            also=(Names("positions", 1, 11, 21),),
        ),
        CallFault(
            "mask segments over the mirror's prefixes",
            lambda: lay_out(tree_of((-1, 0, 1, 1), (-1, 0, 1, 2)), [20, 11]),
            swap(mask_indptr=torch.tensor([0, 4 * 28, 4 * 28 + 4 * 25])),
            Names("mask_len", 0, 96, 112),
            (Right("mask_indptr", 1, 96),),
            "the segments fit prefix lengths [24, 21]; this call's are [20, 11]",
        ),
        CallFault(
            "KV segments of the mirror: they run into slots of the tree",
            lambda: replace(
                lay_out(tree_of((-1, 0, 1, 1), (-1, 0, 1, 2)), [20, 11]),
                prefix_lens=torch.tensor([20, 11]),
            ),
            swap(kv_indptr=torch.tensor([0, 24, 45], dtype=torch.int32)),
            Names("kv_indptr", 0, 20, 24),
            (Right("kv_indptr", 2, 31),),
        ),
    ),
)

ROW_42 = Row(
    42,
    "mlxcel issue 1214",
    "the flat index of a node taken for its position",
    "the row of a node taken for its depth",
    "Positions were the prefix plus the node's place in the list. Right for a chain, wrong from the first "
    "sibling on.",
    (
        CallFault(
            "two siblings, one position apart",
            lambda: lay_out(tree_of((-1, 0, 0, 1)), [5]),
            swap(positions=torch.tensor([5, 6, 7, 8])),
            Names("positions", 0, 6, 7),
            (Right("positions", None, [5, 6, 6, 7]),),
            BY_DEPTH,
        ),
        CallFault(
            "the row of the whole call: a second request begins too far on",
            lambda: lay_out(tree_of(SIBLINGS, SIBLINGS), [5, 3]),
            swap(positions=torch.tensor([5, 6, 7, 6, 7, 8])),
            Names("positions", 1, 3, 6),
            (Right("positions", None, [5, 6, 6, 3, 4, 4]),),
            "positions are prefix_len + the row of the whole call, 3 rows too far",
        ),
        CallFault(
            "the depths themselves by row",
            lambda: lay_out(tree_of((-1, 0, 0, 1)), [5]),
            swap(depths=torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)),
            Names("depth", 0, 1, 2),
            (Right("depths", 0, [0, 1, 1, 2]),),
        ),
    ),
)

POSITIONS = (ROW_5, ROW_15, ROW_28, ROW_35, ROW_40, ROW_41, ROW_42)

"""Mutants of the commit."""

from dataclasses import replace

import torch

from ddtree.invariants import Call
from tests.invariants.calls import field, put, whole_round
from tests.invariants.mutants.kinds import Mutant, change, spoil, swap


def moved() -> Call:
    """A commit that moves KV (pages of 2), told in an order that overwrites a later source."""
    call = whole_round(page_size=2)
    assert call.src is not None and call.dst is not None
    src, dst = call.src.clone(), call.dst.clone()
    dst[0, 1] = src[0, 2]
    return replace(call, src=src, dst=dst)


def _dense_prefix(c: Call) -> torch.Tensor:
    written = field(c, "out_cache_loc").reshape(2, 17)
    counts = field(c, "num_accepted")
    kept = torch.arange(3) < counts[:, None]
    return torch.where(kept, written[:, :3], -1)


def _steps_stride(c: Call) -> torch.Tensor:
    src = field(c, "src").clone()
    count = int(field(c, "num_accepted")[1])
    src[1, :count] = field(c, "out_cache_loc")[3 + field(c, "nodes")[1, :count].long()]
    return src


def _lost(c: Call) -> torch.Tensor:
    table = field(c, "slot_table_after").clone()
    table[0, 9] = table[0, 10]
    return table


# The whole round: prefixes [5, 3], budget 16, 13 nodes in 17 rows each, accepted rows scattered.
COMMIT = [
    Mutant(
        "commit_len",
        "a gap after the round (llama.cpp #26478)",
        change(lambda c: {"committed_lens": field(c, "committed_lens") + 2}),
        0,
        8,
        10,
    ),
    Mutant(
        "commit_src",
        "accepted rows read as a dense prefix (sglang #15360, PR #27509)",
        change(lambda c: {"src": _dense_prefix(c)}),
        0,
        None,
        None,
        "scattered nodes were read as a dense prefix",
    ),
    Mutant(
        "commit_src",
        "a row stride of steps + 1 in place of q_len (sglang #15360)",
        change(lambda c: {"src": _steps_stride(c)}),
        1,
        None,
        None,
        "row stride of horizon + 1 = 3",
    ),
    Mutant("commit_src", "one foreign source", spoil("src", (0, 1), 2), 0, None, 2),
    Mutant(
        "commit_dst",
        "a destination one entry too far",
        change(lambda c: {"dst": field(c, "dst").roll(1, dims=1)}),
        0,
    ),
    Mutant(
        "commit_dst",
        "a moved node in the wrong row, without the table",
        lambda: replace(put(whole_round(page_size=2), "dst", (0, 1), 1), slot_table_after=None),
        0,
        None,
        1,
    ),
    Mutant("commit_order", "a later source overwritten", moved, 0, "an untouched source"),
    Mutant(
        "slot_permutation",
        "a slot lost",
        change(lambda c: {"slot_table_after": _lost(c)}),
        0,
        "the same slots",
    ),
    Mutant(
        "slot_permutation",
        "a table of another size",
        change(lambda c: {"slot_table_after": field(c, "slot_table_after")[:, :-1]}),
        None,
        [2, 22],
        [2, 21],
    ),
    Mutant(
        "prefix_kept",
        "the whole row permuted",
        change(lambda c: {"slot_table_after": field(c, "slot_table_after").roll(1, dims=1)}),
        0,
    ),
    Mutant("commit_once", "the acceptance committed again", swap(commits_before=1), None, 0, 1),
]

"""Mutants of the buffers."""

from dataclasses import replace

import torch

from ddtree.invariants import Call
from tests.invariants.calls import captured, field, tables
from tests.invariants.mutants.kinds import Mutant, buffered, short_mask

LIVE = int(tables(2, 5 + 17)[0, 5])
"""The slot that the first row of ``captured()`` is written to."""

BUFFERS = [
    Mutant(
        "buffer_capacity",
        "a mask without the tree's own columns (sglang #29450)",
        lambda: short_mask([100], 4, 400, capture=True),
        None,
        "at least 416",
        400,
        "without the tree's own columns",
    ),
    Mutant(
        "buffer_capacity",
        "a mask without the padded request's segment (sglang #6309)",
        lambda: short_mask([9, 9, 9, 1], 26, 3 * 26 * 35, capture=True),
        None,
        f"at least {3 * 26 * 35 + 26 * 27}",
        3 * 26 * 35,
        f"the missing {26 * 27} entries",
    ),
    Mutant(
        "buffer_capacity",
        "rows for the configured width",
        lambda: short_mask([5, 3], 17, 714, capture=True, rows=16),
        None,
        "at least 34",
        16,
        "8 rows for each of 2 requests",
    ),
    Mutant(
        "buffer_capacity",
        "rows of the longest context in a mask that may as well lack a request",
        lambda: short_mask([4, 9, 2], 7, 189, capture=True),
        None,
        "at least 252",
        189,
        "189 is 3 * 7 rows of the longest prefix, 9: it was sized without the tree's own columns; or: "
        "the missing 63 entries are the segment of request 2",
    ),
    Mutant(
        "buffer_capacity",
        "a mask one entry too small",
        lambda: short_mask([5, 3], 17, 713, capture=True),
        None,
        "at least 714",
        713,
    ),
    Mutant(
        "buffer_capacity",
        "a query of fewer rows than the indptr gives out",
        lambda: replace(short_mask([5, 3], 17, 714, capture=True), num_rows=33),
        None,
        "at least 34",
        33,
    ),
    Mutant(
        "buffer_capacity",
        "choices for the configured width",
        lambda: replace(
            short_mask([5, 3], 17, 714, capture=True), target_ids=torch.zeros(16, dtype=torch.int64)
        ),
        None,
        "at least 34",
        16,
        "8 rows for each of 2 requests",
    ),
    Mutant(
        "stale_tail",
        "stale positions of a larger batch (sglang #24401)",
        buffered(lambda b: b.layout.positions[34:].fill_(7)),
        None,
        0,
        7,
    ),
    Mutant(
        "stale_tail",
        "an additive mask in a flat mask's buffer",
        lambda: replace(
            Call.of(*captured()),
            custom_mask=torch.where(field(Call.of(*captured()), "custom_mask"), 0.0, -torch.inf),
        ),
        None,
        0,
        "-inf",
    ),
    Mutant(
        "stale_tail",
        "an unused request with a row",
        buffered(lambda b: b.layout.qo_indptr[3:].add_(1)),
        2,
        34,
        35,
    ),
    Mutant(
        "stale_tail",
        "mask bits behind the call",
        buffered(lambda b: b.mask.allowed[800:].fill_(True)),
        None,
        0,
        1,
    ),
    Mutant(
        "stale_tail",
        "slots that unused rows would overwrite",
        buffered(lambda b: b.layout.out_cache_loc[40:].fill_(3)),
        None,
        -1,
        3,
    ),
    Mutant(
        "stale_tail",
        "slots of two kinds behind the call, whose pad slot is not known",
        lambda: replace(
            buffered(lambda b: b.layout.out_cache_loc[36:38].fill_(3))(), pad_slot=None
        ),
        None,
        -1,
        3,
    ),
    Mutant(
        "stale_tail",
        "a pad slot that the call uses",
        lambda: Call.of(*captured(pad_slot=LIVE)),
        None,
        "a slot of no live entry",
        LIVE,
    ),
    Mutant(
        "stale_tail",
        "a pad slot that the call uses and that is not told",
        lambda: replace(Call.of(*captured(pad_slot=LIVE)), pad_slot=None),
        None,
        "a slot of no live entry",
        LIVE,
    ),
    Mutant(
        "stale_tail",
        "tokens behind the call",
        buffered(lambda b: b.token_ids[34:].fill_(2)),
        None,
        0,
        2,
    ),
    Mutant(
        "flat_len",
        "the first to be named says it too",
        lambda: short_mask([100], 4, 400, capture=True),
        None,
        416,
        400,
        "without the tree's own columns",
    ),
    Mutant(
        "stale_tail",
        "a prefix without rows (vllm #43682)",
        lambda: Call(
            is_captured=True, qo_indptr=torch.tensor([0, 8, 8]), kv_indptr=torch.tensor([0, 5, 6])
        ),
        1,
        5,
        6,
    ),
]

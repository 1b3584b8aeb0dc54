"""Mutants of the call as a whole."""

from dataclasses import replace

import torch

from ddtree.invariants import Call
from ddtree.spec.index import INT32_MAX
from tests.invariants.calls import field, verify
from tests.invariants.mutants.kinds import Mutant, change, swap

# The whole round: prefixes [5, 3], budget 16, 13 nodes in 17 rows each, accepted rows scattered.
CALL = [
    Mutant(
        "batch",
        "q ends of four requests beside three lengths (vllm-ascend #7290)",
        lambda: Call(
            qo_indptr=torch.tensor([0, 4, 8, 12, 20]), kv_indptr=torch.tensor([0, 3, 6, 9])
        ),
        None,
        4,
        3,
    ),
    Mutant(
        "batch",
        "the tree has one request less than the layout",
        change(lambda c: {"num_nodes": torch.tensor([13])}),
        None,
        None,
        None,
    ),
    Mutant(
        "batch",
        "a slot table without a request's row",
        change(lambda c: {"slot_table": field(c, "slot_table")[:1]}),
        None,
        2,
        1,
    ),
    Mutant(
        "tree_shape",
        "parents of other trees",
        swap(parents=torch.zeros(2, 9, dtype=torch.int32)),
        None,
        [2, 17],
        [2, 9],
    ),
    Mutant(
        "batch",
        "one request's accepted nodes beside two requests' lengths, without a layout",
        lambda: Call(
            num_accepted=torch.tensor([2]),
            prefix_lens=torch.tensor([2, 3]),
            committed_lens=torch.tensor([4, 5]),
        ),
        None,
        2,
        1,
        "num_accepted is of another batch",
    ),
    Mutant(
        "tree_shape",
        "moves of two steps from places of one",
        lambda: Call(src=torch.tensor([[1]]), dst=torch.tensor([[1, 2]])),
        None,
        None,
        None,
    ),
    Mutant(
        "batch",
        "trees of no request beside a layout of two",
        lambda: replace(
            Call.of(*verify([5, 3], 4)),
            num_nodes=torch.zeros(0, dtype=torch.int32),
            depths=torch.zeros(0, 5, dtype=torch.int32),
        ),
        None,
        0,
        2,
    ),
    Mutant(
        "tree_shape",
        "trees without a root row",
        lambda: Call(token_ids=torch.zeros(2, 0, dtype=torch.int64)),
        None,
        "at least 1 row",
        0,
    ),
    Mutant(
        "rows",
        "positions of another call",
        swap(positions=torch.zeros(16, dtype=torch.int64)),
        None,
        34,
        16,
    ),
    Mutant(
        "dtypes",
        "an additive mask handed on as the flat mask (sglang PR #27509)",
        change(lambda c: {"custom_mask": torch.where(field(c, "custom_mask"), 0.0, -1e9)}),
        None,
        "bool or uint8",
        "torch.float32",
        "additive mask",
    ),
    Mutant(
        "dtypes",
        "positions in 16 bits",
        change(lambda c: {"positions": field(c, "positions").short()}),
        None,
        "int32 or int64",
        "torch.int16",
    ),
    Mutant(
        "index_width",
        "row * vocab in 32 bits (vllm #46560)",
        lambda: Call(num_rows=15409, vocab_size=151936, offset_bits=32),
        None,
        f"at most {INT32_MAX}",
        15409 * 151936 - 1,
    ),
    Mutant(
        "index_width",
        "an int32 mask_indptr of a mask of 2.2e9 entries",
        lambda: Call(
            qo_indptr=torch.tensor([0, 17]),
            kv_indptr=torch.tensor([0, 130_000_000]),
            mask_indptr=torch.tensor([0, (17 * 130_000_017) - 2**32]).int(),
        ),
        None,
        f"at most {INT32_MAX}",
        17 * 130_000_017,
    ),
    Mutant(
        "index_width",
        "slot * stride in 32 bits",
        lambda: Call(kv_pool_size=2_200_000, slot_stride=1024, offset_bits=32),
        None,
        f"at most {INT32_MAX}",
        2_200_000 * 1024 - 1,
    ),
    Mutant(
        "index_width",
        "row * vocab over all rows of a graph, of which the call has 17",
        lambda: Call(
            is_captured=True,
            qo_indptr=torch.tensor([0, 17]),
            kv_indptr=torch.tensor([0, 0]),
            positions=torch.zeros(15408, dtype=torch.int64),
            vocab_size=151936,
            offset_bits=32,
        ),
        None,
        f"at most {INT32_MAX}",
        15408 * 151936 - 1,
    ),
    Mutant(
        "index_width",
        "row * stride of the tree's own keys in 32 bits",
        lambda: Call(num_rows=600_000, slot_stride=4096, offset_bits=32),
        None,
        f"at most {INT32_MAX}",
        600_000 * 4096 - 1,
    ),
]

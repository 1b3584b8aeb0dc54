"""Mutants of the mask."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ddtree.invariants import Call
from ddtree.invariants.diagnosis import reversed_bits
from tests.invariants.calls import field, indptr, put, verify
from tests.invariants.mutants.kinds import Mutant, change, spoil, swap


def _retree(edit: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The round's first request alone, its real tree columns edited in the flat mask."""
    tree, layout, mask = verify([5], 16, 3, horizon=2)
    square = mask.allowed.reshape(17, 22).clone()
    square[:13, 5:18] = edit(square[:13, 5:18])
    return replace(Call.of(tree, layout, mask), custom_mask=square.flatten())


def _one_bit(tree: torch.Tensor) -> torch.Tensor:
    changed = tree.clone()
    changed[1, 2] = True
    return changed


def _no_tree(
    prefixes: list[int], edit: Callable[[torch.Tensor], torch.Tensor], topk: int = 3
) -> Call:
    """A call without its tree, the flat mask edited: 13 nodes in 17 rows, or a chain of 8."""
    _, layout, mask = verify(prefixes, 16, topk, horizon=2 if topk > 1 else 7)
    return Call.of(layout, custom_mask=edit(mask.allowed))


# The whole round: prefixes [5, 3], budget 16, 13 nodes in 17 rows each, accepted rows scattered.
MASK = [
    Mutant(
        "flat_len",
        "a mask made with the configured width",
        swap(custom_mask=verify([5, 3], 7, 3)[2].allowed),
        None,
        714,
        192,
        "every segment fits width 8",
    ),
    Mutant(
        "flat_len",
        "a mask of as many entries as a width would give, which makes no sense with it",
        swap(custom_mask=torch.ones(192, dtype=torch.bool)),
        None,
        714,
        192,
    ),
    Mutant(
        "flat_len",
        "a mask of no width at all",
        swap(custom_mask=torch.ones(713, dtype=torch.bool)),
        None,
        714,
        713,
    ),
    Mutant(
        "packed_len",
        "a mask of shape (10, 15) passed for (10, 20) (flashinfer #3176)",
        lambda: Call(
            qo_indptr=indptr([10]),
            prefix_lens=torch.tensor([10]),
            packed=torch.zeros(19, dtype=torch.uint8),
            byte_indptr=indptr([19]),
        ),
        0,
        25,
        19,
        "10 rows of 15 columns",
    ),
    Mutant(
        "packed_len",
        "a fixed buffer of the same, its segments not told",
        lambda: Call(
            qo_indptr=indptr([10]),
            prefix_lens=torch.tensor([10]),
            packed=torch.zeros(19, dtype=torch.uint8),
            is_captured=True,
        ),
        0,
        25,
        19,
        "10 rows of 15 columns",
    ),
    Mutant(
        "packed_len",
        "segments past the last byte (flashinfer #1005)",
        change(lambda c: {"packed": field(c, "packed")[:-1]}),
        None,
        90,
        89,
    ),
    Mutant(
        "mask_shape",
        "words for 32 nodes where there are 33",
        lambda: Call(qo_indptr=indptr([33]), words=torch.zeros(33, 1, dtype=torch.int32)),
        None,
        2,
        1,
    ),
    Mutant(
        "mask_shape",
        "a dense mask of the configured width",
        swap(bias=torch.zeros(2, 1, 8, 13)),
        None,
        "at least 17",
        8,
    ),
    Mutant(
        "mask_shape",
        "a dense mask without the prefix",
        swap(bias=torch.zeros(2, 1, 17, 17)),
        None,
        "at least 22",
        17,
    ),
    Mutant(
        "mask_shape",
        "fewer rows of words than query rows",
        change(lambda c: {"words": field(c, "words")[:17]}),
        None,
        34,
        17,
    ),
    Mutant(
        "mask_values",
        "a byte that is neither 0 nor 1",
        change(lambda c: {"custom_mask": field(c, "custom_mask").to(torch.uint8) * 255}),
        None,
        "0 or 1",
        255,
    ),
    Mutant(
        "mask_values",
        "a dense mask of 0 and 1",
        change(lambda c: {"bias": (field(c, "bias") == 0).float()}),
        0,
        None,
        1.0,
        "bias is 1 where attending is allowed",
    ),
    Mutant(
        "visibility",
        "inverted, flat (sglang PR #27509)",
        change(lambda c: {"custom_mask": ~field(c, "custom_mask")}),
        0,
        1,
        0,
        "every bit is inverted",
    ),
    Mutant(
        "visibility",
        "inverted, bits",
        change(lambda c: {"words": ~field(c, "words")}),
        0,
        1,
        0,
        "every bit is inverted",
    ),
    Mutant(
        "visibility",
        "inverted, packed",
        change(lambda c: {"packed": ~field(c, "packed")}),
        0,
        1,
        0,
        "every bit is inverted",
    ),
    Mutant(
        "visibility",
        "inverted, dense",
        change(
            lambda c: {
                "bias": torch.where(field(c, "bias") == 0, torch.finfo(torch.float32).min, 0.0)
            }
        ),
        0,
        1,
        0,
        "every bit is inverted",
    ),
    Mutant(
        "visibility",
        "the tree's columns transposed",
        lambda: _retree(lambda tree: tree.T.clone()),
        0,
        None,
        None,
        "transposed",
    ),
    Mutant(
        "visibility",
        "causal by row",
        lambda: _retree(lambda tree: torch.ones_like(tree).tril()),
        0,
        0,
        1,
        "causal by row",
    ),
    Mutant(
        "visibility",
        "every node visible",
        lambda: _retree(torch.ones_like),
        0,
        0,
        1,
        "no tree mask was applied",
    ),
    Mutant("visibility", "one foreign bit", lambda: _retree(_one_bit), 0, 0, 1),
    Mutant("prefix_visible", "a hidden prefix entry", spoil("custom_mask", 3, False), 0, 1, 0),
    Mutant(
        "prefix_visible",
        "a dense mask that hides a prefix entry",
        spoil("bias", (1, 0, 2, 1), torch.finfo(torch.float32).min),
        1,
        1,
        0,
    ),
    Mutant(
        "padding_invisible",
        "a real row that sees the last padding row",
        spoil("custom_mask", 21, True),
        0,
        0,
        1,
    ),
    Mutant(
        "padding_invisible",
        "the same in the bits",
        change(lambda c: {"words": field(c, "words") | (1 << 16)}),
        0,
        0,
        1,
    ),
    Mutant(
        "visibility",
        "packed with bit 7 first",
        change(lambda c: {"packed": reversed_bits(field(c, "packed"))}),
        0,
        None,
        None,
        "LSB first",
    ),
    Mutant(
        "visibility",
        "one request's rows all visible, the other's right (sglang #39160)",
        change(lambda c: {"custom_mask": field(c, "custom_mask") | (torch.arange(714) < 374)}),
        0,
        0,
        1,
    ),
    Mutant(
        "mask_is_tree",
        "inverted, without a prefix and a tree",
        lambda: _no_tree([0, 0], lambda mask: ~mask),
        0,
        [0],
        None,
        "every bit is inverted",
    ),
    Mutant(
        "mask_is_tree",
        "all ones, without a tree",
        lambda: _no_tree([5, 3], torch.ones_like),
        1,
        [0],
        list(range(17)),
    ),
    Mutant(
        "mask_is_tree",
        "a grandparent hidden, without a tree",
        lambda: put(_no_tree([5], lambda mask: mask, topk=1), "custom_mask", 22 * 2 + 5, False),
        0,
        [0, 1, 2],
        [1, 2],
    ),
    Mutant(
        "mask_positions",
        "by row, without a tree",
        lambda: replace(_no_tree([5], lambda mask: mask), positions=5 + torch.arange(17)),
        0,
        6,
        7,
    ),
    Mutant(
        "mask_positions",
        "causal mask of the call before, without a tree (flashinfer #1028)",
        lambda: _no_tree([0], lambda mask: torch.ones(17, 17).tril().bool().flatten()),
        0,
        2,
        1,
    ),
    Mutant(
        "spare_bits",
        "a bit past q_len",
        change(lambda c: {"words": field(c, "words") | (1 << 20)}),
        1,
        0,
        1,
    ),
]

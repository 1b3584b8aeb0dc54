"""Rows about what the mask says: its convention, its columns, and which call it was made for."""

import torch

from ddtree.catalogue.calls import (
    change,
    field,
    lay_out,
    plain,
    spoil,
    swap,
    tree_of,
)
from ddtree.catalogue.entry import CallFault, Names, Right, Row

INVERTED = "every bit is inverted: True means may attend"
BRANCHED = (-1, 0, 0, 1)
FORK = (-1, 0, 0, 2)

ROW_7 = Row(
    7,
    "SGLang issue 39160",
    "the mask of windowed KV read from column 0",
    "KV that was cut, and a mask that was not cut with it",
    "Only the last entries of a long prefix are kept for a windowed layer. The mask still has a column for "
    "every entry, so the first request's rows read the wrong columns and every later request the wrong rows.",
    (
        CallFault(
            "prefixes [20, 3], window 8: KV cut, mask whole",
            plain([20, 3], 7),
            change(
                lambda c: {
                    "kv_indptr": torch.tensor([0, 8, 11], dtype=torch.int32),
                    "kv_indices": field(c, "kv_indices")[12:],
                }
            ),
            Names("mask_len", 0, 8 * 16, 8 * 28),
            (Right("mask_indptr", 1, 224), Right("kv_indptr", 2, 23)),
            "[8, 3] is what a window of 8 leaves of [20, 3]",
            captured=False,
        ),
        CallFault(
            "mask segments cut to the window, KV whole",
            plain([20, 3], 7),
            swap(mask_indptr=torch.tensor([0, 8 * 16, 8 * 16 + 8 * 11])),
            Names("mask_len", 0, 8 * 28, 8 * 16),
            (Right("mask_indptr", 1, 224),),
            "[8, 3] is what a window of 8 leaves of [20, 3]",
        ),
        CallFault(
            "the window cut out of the mask's own bits: real rows lose their prefix",
            plain([20, 3], 7),
            spoil("custom_mask", slice(0, 12), False),
            Names("prefix_visible", 0, 1, 0),
            (Right("custom_mask", slice(0, 21), [True] * 21),),
        ),
    ),
)

ROW_27 = Row(
    27,
    "FlashInfer issue 1028",
    "a wrapper planned with a mask keeps it for the next, causal plan",
    "state of one plan that the next does not replace",
    "One object was planned with a custom mask and then without. The second plan left the mask in place, "
    "and the kernel went on reading it.",
    (
        CallFault(
            "the tree of the plan before: a chain, and now two branches",
            lambda: lay_out(tree_of(BRANCHED), [2]),
            change(lambda _: {"custom_mask": lay_out(tree_of((-1, 0, 1, 2)), [2]).custom_mask}),
            Names("visibility", 0, 0, 1),
            (Right("custom_mask", slice(12, 18), [True, True, True, False, True, False]),),
            "the mask is causal by row: siblings see each other",
        ),
        CallFault(
            "the same in ancestor bits",
            lambda: lay_out(tree_of(BRANCHED), [2], "bits"),
            swap(words=torch.tensor([[0b1], [0b11], [0b101], [0b1101]], dtype=torch.int32)),
            Names("visibility", 0, 1, 0),
            (Right("words", slice(None), [[0b1], [0b11], [0b101], [0b1011]]),),
        ),
        CallFault(
            "the masks of two requests changed places when the batch was sorted anew",
            lambda: lay_out(tree_of(BRANCHED, FORK), [2, 2]),
            change(lambda c: {"custom_mask": field(c, "custom_mask").roll(24)}),
            Names("visibility", 0, 1, 0),
            (Right("mask_indptr", 1, 24),),
        ),
    ),
)

ROW_37 = Row(
    37,
    "SGLang pull request 27509",
    "an additive mask handed to a kernel that reads nonzero as allowed",
    "a mask read by the opposite convention",
    "An additive mask holds 0 where attending is allowed. Read as nonzero = allowed it shows each node "
    "just what is no ancestor of it: the tree is turned inside out.",
    (
        CallFault(
            "nonzero of the additive mask, as bool",
            lambda: lay_out(tree_of(BRANCHED), [2]),
            change(lambda c: {"custom_mask": ~field(c, "custom_mask")}),
            Names("visibility", 0, 1, 0),
            (Right("custom_mask", slice(0, 6), [True, True, True, False, False, False]),),
            INVERTED,
        ),
        CallFault(
            "the additive mask itself, in float",
            lambda: lay_out(tree_of(BRANCHED), [2]),
            change(
                lambda c: {"custom_mask": torch.where(field(c, "custom_mask"), 0.0, -torch.inf)}
            ),
            Names("dtypes", None, "bool or uint8", "torch.float32"),
            (Right("custom_mask", slice(0, 6), [True, True, True, False, False, False]),),
            "this is an additive mask",
        ),
        CallFault(
            "packed bits of what is hidden",
            lambda: lay_out(tree_of(BRANCHED), [2], "packed"),
            change(lambda c: {"packed": ~field(c, "packed")}),
            Names("visibility", 0, 1, 0),
            (Right("packed", None, [0b11000111, 0b01110011, 0b10111101]),),
            INVERTED,
        ),
        CallFault(
            "1 added where attending is allowed, 0 elsewhere",
            lambda: lay_out(tree_of(BRANCHED), [2], "dense"),
            change(lambda c: {"bias": (field(c, "bias") == 0).float()}),
            Names("mask_values", 0, "0 or -3.4028234663852886e+38", 1.0),
            (Right("bias", (0, 0, 0, slice(0, 3)), [0.0, 0.0, 0.0]),),
            "bias is 1 where attending is allowed: an additive mask has 0 there",
        ),
        CallFault(
            "rows and columns exchanged",
            lambda: lay_out(tree_of(BRANCHED), [0]),
            change(lambda c: {"custom_mask": field(c, "custom_mask").reshape(4, 4).T.flatten()}),
            Names("visibility", 0, 0, 1),
            (Right("custom_mask", slice(4, 8), [True, True, False, False]),),
            "the tree's columns are transposed",
        ),
    ),
)

MASKS = (ROW_7, ROW_27, ROW_37)

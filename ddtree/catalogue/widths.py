"""Rows about widths and sizes: who says how many rows, columns and entries a call has."""

from dataclasses import replace
from typing import Any

import torch

from ddtree.catalogue.calls import (
    captured,
    change,
    field,
    indptr,
    lay_out,
    plain,
    spoil,
    swap,
    tree_of,
    verify,
    width,
)
from ddtree.catalogue.entry import CallFault, Names, Right, Row
from ddtree.invariants import Call

FROM_8 = "every segment fits width 8; this call's q_len is 17: the width came from configuration"
EARLIER = "the width came from configuration or an earlier fill"
CHAIN = (-1, 0, 1, 2)


def _buffers(
    prefixes: tuple[int, ...], budget: int, topk: int | None = 4, *, max_batch: int = 4
) -> Call:
    return Call.of(*captured(prefixes, budget, topk, 7, max_batch))


def _packed() -> Call:
    """A packed mask of 10 rows over a prefix of 10."""
    return lay_out(tree_of([-1, *range(9)]), [10], "packed")


def _padded_batch() -> Call:
    """Three requests of 26 rows in a graph of four, whose fourth is given 26 rows over a prefix of 1."""
    return _buffers((30, 20, 10, 1), 25)


def _packed_fields(call: Call) -> dict[str, Any]:
    return {"packed": call.packed, "byte_indptr": call.byte_indptr}


ROW_1 = Row(
    1,
    "SGLang, Triton backend",
    "mask and row offsets made from the configured block size",
    "a width from another source than the call",
    "The backend kept one width from its configuration, the block size 8. A tree of budget 16 is verified "
    "with 17 rows a request, so every mask offset came out short: rows read other rows' bits and attended "
    "to KV that nobody wrote. Budget 7 needs just 8 rows, and there nothing showed.",
    (
        CallFault(
            "all three fields from width 8, one request",
            plain([5], 16),
            width(8),
            Names("mask_len", 0, 374, 104),
            (Right("mask_indptr", 1, 374), Right("qo_indptr", 1, 17), Right("max_q_len", None, 17)),
            FROM_8,
            captured_hint="every segment fits width 8; this call's q_len is 17: " + EARLIER,
            also=(Names("qo_indptr", 0, 17, 8),),
        ),
        CallFault(
            "the same with two requests: 192 entries where there are 714",
            plain([5, 3], 16, topk=1),
            width(8),
            Names("mask_len", 1, 340, 88),
            (Right("mask_indptr", 2, 714),),
            FROM_8,
            captured_hint="every segment fits width 8; this call's q_len is 17: " + EARLIER,
            also=(Names("mask_len", 0, 374, 104),),
        ),
        CallFault(
            "the budget taken for budget + 1",
            plain([5, 3], 16),
            width(16),
            Names("mask_len", 0, 374, 336),
            (Right("mask_indptr", 1, 374),),
            "or the budget was taken for budget + 1",
        ),
        CallFault(
            "fixed buffers that still have the width of an earlier, narrower fill",
            lambda: _buffers((5, 3), 16),
            width(9),
            Names("mask_len", 0, 374, 126),
            (Right("mask_indptr", 4, 714),),
            "every segment fits width 9; this call's q_len is 17: " + EARLIER,
        ),
        CallFault(
            "the rows alone from the configured width: requests overlap",
            plain([5, 3], 16),
            width(8, ("qo_indptr",)),
            Names("qo_indptr", 0, 17, 8),
            (Right("qo_indptr", 2, 34),),
            FROM_8,
            captured_hint="every segment fits width 8; this call's q_len is 17: " + EARLIER,
        ),
    ),
)

ROW_2 = Row(
    2,
    "SGLang issue 29450",
    "a graph's mask buffer without the tree's own columns",
    "a buffer sized by a formula that leaves something out",
    "The buffer had rows times context entries. A row sees its context and the tree beside it, so it needs "
    "as many columns more as the tree has rows.",
    (
        CallFault(
            "1 request of 4 rows over 100 entries: 400 where 416 are needed",
            lambda: Call.of(*captured((100,), 3, None, 7, 1)),
            change(lambda c: {"custom_mask": field(c, "custom_mask")[:400]}),
            Names("buffer_capacity", None, "at least 416", 400),
            (Right("mask_indptr", 1, 416),),
            "400 is q_len * prefix_len: it was sized without the tree's own columns",
        ),
        CallFault(
            "row buffers of budget rows a request: the root has none",
            lambda: Call.of(*captured((5, 3), 16, 4, 7, 2)),
            change(lambda c: {"positions": field(c, "positions")[:32]}),
            Names("buffer_capacity", None, "at least 34", 32),
            (Right("qo_indptr", 2, 34),),
            "the buffer has 16 rows for each of 2 requests; this call's q_len is 17",
        ),
        CallFault(
            "slots for the longest prefix alone, not for the sum",
            lambda: Call.of(*captured((5, 3), 16, 4, 7, 2)),
            change(lambda c: {"kv_indices": field(c, "kv_indices")[:7]}),
            Names("buffer_capacity", None, "at least 8", 7),
            (Right("kv_indptr", 2, 8),),
        ),
    ),
)

ROW_3 = Row(
    3,
    "SGLang issue 6309",
    "a mask for the real requests under a graph of more",
    "a batch counted in two ways: as it is, and as it was padded",
    "A graph for four requests replays a batch of three. The fourth is given 26 rows over a prefix of 1, "
    "the mask only the three real segments: the last 26 rows read past its end.",
    (
        CallFault(
            "26 rows, 3 requests in a graph of 4: 702 entries short",
            _padded_batch,
            change(lambda c: {"custom_mask": field(c, "custom_mask")[: 26 * 138]}),
            Names("buffer_capacity", None, "at least 4290", 3588),
            (Right("mask_indptr", 4, 4290), Right("mask_indptr", 3, 3588)),
            "the missing 702 entries are the segment of request 3",
        ),
        CallFault(
            "mask segments of three requests, rows of four",
            plain([9, 5, 3, 1], 3),
            change(lambda c: {"mask_indptr": field(c, "mask_indptr")[:4]}),
            Names("batch", None, 4, 3),
            (Right("mask_indptr", 4, 4 * (13 + 9 + 7 + 5)),),
            "all other fields speak of 4 requests: mask_indptr is of another batch",
            captured=False,
        ),
        CallFault(
            "positions for three requests, rows of four",
            _padded_batch,
            change(lambda c: {"positions": field(c, "positions")[:78]}),
            Names("buffer_capacity", None, "at least 104", 78),
            (Right("qo_indptr", 4, 104),),
        ),
    ),
)

ROW_9 = Row(
    9,
    "SGLang issues 31221 and 38575",
    "one backend's width mended, another's forgotten",
    "several copies of one computation, of which some were mended",
    "Each backend, and within one the eager and the captured path, computes the widths for itself. Mending "
    "the copy that was reported leaves the others, and a later clean-up brought the old one back.",
    (
        CallFault(
            "rows and launch mended, mask segments forgotten",
            plain([5], 16),
            width(8, ("mask_indptr",)),
            Names("mask_len", 0, 374, 104),
            (Right("mask_indptr", 1, 374),),
            FROM_8,
            captured_hint=FROM_8.removesuffix("configuration") + "configuration or an earlier fill",
        ),
        CallFault(
            "the flat mask mended, the packed one made for 8 rows",
            lambda: lay_out(tree_of([-1, *range(16)]), [5], "packed"),
            change(
                lambda c: {
                    "packed": field(c, "packed")[: 8 * 13 // 8],
                    "byte_indptr": indptr([8 * 13 // 8]),
                }
            ),
            Names("packed_len", 0, 47, 13),
            (Right("byte_indptr", 1, 47),),
            FROM_8,
            captured=False,
        ),
        CallFault(
            "the dense mask of 8 rows",
            lambda: lay_out(tree_of([-1, *range(16)]), [5], "dense"),
            change(lambda c: {"bias": field(c, "bias")[:, :, :8, :13]}),
            Names("mask_shape", None, "at least 17", 8),
            (Right("qo_indptr", 1, 17),),
        ),
        CallFault(
            "bit words for 32 nodes where the budget has grown to 32",
            lambda: lay_out(tree_of([-1, *range(32)]), [5], "bits"),
            change(lambda c: {"words": field(c, "words")[:, :1]}),
            Names("mask_shape", None, 2, 1),
            (Right("qo_indptr", 1, 33),),
        ),
    ),
)

ROW_10 = Row(
    10,
    "SGLang issue 27473",
    "the largest q_len forced to the configured width",
    "a launch sized by a number that is not the call's",
    "The offsets were right and the grid was not: rows from the configured width on were never computed "
    "and kept whatever the output buffer held.",
    (
        CallFault(
            "17 rows, a launch for 8",
            plain([5], 16),
            swap(max_q_len=8),
            Names("max_q_len", None, 17, 8),
            (Right("max_q_len", None, 17),),
            "leaves out rows 8 to 16",
            captured=Names("max_q_len", None, "at least 17", 8),
        ),
        CallFault(
            "a launch for the budget: the last row is left out",
            plain([5, 3], 16),
            swap(max_q_len=16),
            Names("max_q_len", None, 17, 16),
            (Right("max_q_len", None, 17),),
            "leaves out row 16",
            captured=Names("max_q_len", None, "at least 17", 16),
        ),
        CallFault(
            "the mean of a ragged batch",
            lambda: lay_out(tree_of(CHAIN, (-1, 0)), [5, 3], ragged=True),
            swap(max_q_len=3),
            Names("max_q_len", None, 4, 3),
            (Right("qo_indptr", 2, 6), Right("max_q_len", None, 4)),
            "leaves out row 3",
            captured=Names("max_q_len", None, "at least 4", 3),
        ),
    ),
)

ROW_12 = Row(
    12,
    "vLLM issue 46560",
    "row times vocabulary in 32 bits",
    "an address that outgrows the integer it is computed in",
    "Logits of 15408 rows over a vocabulary of 151936 have more entries than 32 bits count. The product "
    "wraps, and rows far into the batch read and write somewhere else.",
    (
        CallFault(
            "15408 rows of 151936 logits",
            lambda: Call(
                qo_indptr=indptr([16] * 963),
                kv_indptr=indptr([0] * 963),
                vocab_size=151936,
                offset_bits=64,
            ),
            swap(offset_bits=32),
            Names("index_width", None, "at most 2147483647", 2341029887),
            (Right("qo_indptr", 963, 15408),),
        ),
        CallFault(
            "slot times heads times head_dim",
            lambda: Call(kv_pool_size=2**21, slot_stride=1024, offset_bits=32),
            swap(kv_pool_size=2**21 + 1),
            Names("index_width", None, "at most 2147483647", 2**31 + 1023),
            (Right("kv_pool_size", None, 2097152),),
        ),
        CallFault(
            "mask segments held in int32, wrapped to a negative end",
            lambda: Call(
                qo_indptr=indptr([64]),
                kv_indptr=indptr([40_000_000]),
                mask_indptr=indptr([64 * 40_000_064]),
            ),
            change(lambda c: {"mask_indptr": field(c, "mask_indptr").to(torch.int32)}),
            Names("index_width", None, "at most 2147483647", 2_560_004_096),
            (Right("mask_indptr", 1, 2_560_004_096),),
        ),
    ),
)

ROW_18 = Row(
    18,
    "vLLM-Ascend issue 7290",
    "four row segments for three requests",
    "per-request arrays that speak of different numbers of requests",
    "The row offsets were padded to the graph's batch and the lengths were not, so a kernel walks one "
    "request more than there are lengths.",
    (
        CallFault(
            "ends [4, 8, 12, 20], three lengths",
            lambda: Call(qo_indptr=indptr([4, 4, 4]), prefix_lens=torch.tensor([5, 5, 5])),
            swap(qo_indptr=indptr([4, 4, 4, 8])),
            Names("batch", None, 3, 4),
            (Right("qo_indptr", 3, 12),),
            captured=False,
        ),
        CallFault(
            "byte segments of two packed masks for three requests",
            lambda: lay_out(tree_of(CHAIN, CHAIN, CHAIN), [4, 5, 6], "packed"),
            change(lambda c: {"byte_indptr": field(c, "byte_indptr")[:3]}),
            Names("batch", None, 3, 2),
            (Right("byte_indptr", 3, 4 + 5 + 5),),
            "all other fields speak of 3 requests: byte_indptr is of another batch",
            captured=False,
        ),
        CallFault(
            "prefix lengths of a larger batch",
            plain([5, 3], 3),
            swap(prefix_lens=torch.tensor([5, 3, 3])),
            Names("batch", None, 2, 3),
            (Right("qo_indptr", 2, 8),),
            "all other fields speak of 2 requests: prefix_lens is of another batch",
            captured=False,
        ),
    ),
)

ROW_24 = Row(
    24,
    "FlashInfer issue 3176",
    "a packed mask of another shape than the call",
    "a mask made for other lengths than it is read with",
    "A mask of 10 rows and 15 columns was handed to a call of 10 rows and 20. Bits carry no shape, so rows "
    "were read at the wrong stride and the end past the buffer.",
    (
        CallFault(
            "(10, 15) for (10, 20): 19 bytes of 25",
            _packed,
            lambda c: replace(
                c, **_packed_fields(lay_out(tree_of([-1, *range(9)]), [5], "packed"))
            ),
            Names("packed_len", 0, 25, 19),
            (Right("byte_indptr", 1, 25),),
            "19 bytes hold 10 rows of 15 columns; a row has prefix_len + q_len = 20",
        ),
        CallFault(
            "the flat mask of a prefix that has grown since",
            lambda: lay_out(tree_of(CHAIN), [10]),
            change(lambda _: {"custom_mask": lay_out(tree_of(CHAIN), [9]).custom_mask}),
            Names("flat_len", None, 56, 52),
            (Right("mask_indptr", 1, 56),),
            captured=False,
        ),
        CallFault(
            "bits packed without a fresh byte for the second request",
            lambda: lay_out(tree_of((-1, 0, 1), (-1, 0, 1)), [4, 5], "packed"),
            change(lambda c: {"packed": field(c, "packed")[:6], "byte_indptr": indptr([2, 4])}),
            Names("packed_len", 0, 3, 2),
            (Right("byte_indptr", 2, 6),),
            captured=False,
        ),
    ),
)

ROW_25 = Row(
    25,
    "FlashInfer issue 1005",
    "a mask bit read past the end",
    "an address that nothing holds to its buffer",
    "The bit's index was computed from the row and column at hand and never held to the length of the "
    "mask, so padded rows read whatever lay behind it.",
    (
        CallFault(
            "the last byte is missing",
            _packed,
            change(lambda c: {"packed": field(c, "packed")[:-1]}),
            Names("packed_len", None, 25, 24),
            (Right("byte_indptr", 1, 25),),
        ),
        CallFault(
            "a prefix slot at the end of the pool",
            lambda: Call.of(*verify([5, 3], 3), kv_pool_size=24),
            spoil("kv_indices", 2, 24),
            Names("kv_indices", 0, "0 to 23", 24),
            (Right("kv_indptr", 2, 8),),
        ),
        CallFault(
            "a row that writes past the pool",
            lambda: Call.of(*verify([5, 3], 3), kv_pool_size=24),
            spoil("out_cache_loc", 0, 24),
            Names("out_cache_loc", 0, "0 to 23", 24),
            (Right("qo_indptr", 2, 8),),
        ),
    ),
)

WIDTHS = (ROW_1, ROW_2, ROW_3, ROW_9, ROW_10, ROW_12, ROW_18, ROW_24, ROW_25)

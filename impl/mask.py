"""Step 3 on the device: the ancestor mask as bits, in one launch, and the forms that others read."""

from typing import Literal, cast, overload

import torch
import triton
from torch import Tensor

from ddtree.impl.arguments import require_layout, require_made_for, require_rows, require_tree
from ddtree.impl.mask_kernels import bits_kernel, packed_kernel, write_rows_kernel
from ddtree.impl.op import op
from ddtree.spec.contracts import (
    BitMask,
    DenseMask,
    DraftTree,
    FlatMask,
    PackedMask,
    PrefixLen,
    TreeMask,
    VerifyLayout,
)
from ddtree.spec.dtypes import require_kind
from ddtree.spec.errors import require
from ddtree.spec.index import bit_words, kv_len, mask_len, packed_len
from ddtree.spec.mask import FORMS, Form, require_form
from ddtree.spec.public import public

QUERIES = 16
"""Query rows of one program of ``bits_kernel``."""
BLOCK = 1024
"""Columns (bytes, where packed) that a program of the other forms handles at a time."""


@overload
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Literal["flat"]) -> FlatMask: ...
@overload
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Literal["packed"]) -> PackedMask: ...
@overload
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Literal["dense"]) -> DenseMask: ...
@overload
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Literal["bits"] = "bits") -> BitMask: ...
@public
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Form = "bits") -> TreeMask:
    """Make the mask of a verify pass from the trees' parents.

    The sizes of ``flat``, ``packed`` and ``dense`` depend on the prefix lengths, which the device
    alone knows: these come in tensors large enough for every call of the layout's sizes, with
    a tail that hides all. ``bits`` needs no such room.

    Args:
        tree: the trees, ``B`` requests.
        layout: the layout made for them.
        form: ``flat``, ``packed``, ``dense`` or ``bits`` (see the classes of those names).

    Returns:
        The mask in that form.

    Raises:
        InputError: an unknown form, a wrong dtype, or a layout of another batch or of more rows a
            request than the trees have.
    """
    require_tree(tree)
    require_layout(layout)
    require_form(form)
    require_made_for(layout, tree)
    num_queries, num_words = layout.positions.numel(), bit_words(layout.max_q_len)
    bits = BitMask(tree.parents.new_empty((num_queries, num_words)))
    if num_queries:
        _bits(tree.parents, layout.qo_indptr, bits.words)
    return bits if form == "bits" else _convert(bits, layout, form)


@op("tree_mask", writes=("words",))
def _bits(parents: Tensor, qo_indptr: Tensor, words: Tensor) -> None:
    """Fill the ancestor bits."""
    batch, rows = parents.shape
    num_queries, num_words = words.shape
    bits_kernel[(triton.cdiv(num_queries, QUERIES),)](
        parents.contiguous(), qo_indptr, words, batch, rows, num_queries, num_words,
        BATCH=triton.next_power_of_2(batch), QUERIES=QUERIES, WORDS=triton.next_power_of_2(num_words),
    )  # fmt: skip


@overload
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Literal["flat"]) -> FlatMask: ...
@overload
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Literal["packed"]) -> PackedMask: ...
@overload
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Literal["dense"]) -> DenseMask: ...
@overload
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Literal["bits"]) -> BitMask: ...
@public
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Form) -> TreeMask:
    """Say the same mask in another form, exactly, in one launch.

    Args:
        mask: a mask of ``layout``'s call in any form.
        layout: the call's layout, from which every width is read.
        form: the form wanted. ``bits`` holds tree columns alone: a prefix entry that ``mask``
            hides is seen there, since to look for one would stall the device.

    Returns:
        The mask in that form, in tensors of the sizes that ``tree_mask`` says.

    Raises:
        InputError: an unknown form, a wrong dtype, or a mask of fewer requests, rows or columns than
            the layout's.
    """
    require_kind("mask", mask, *FORMS)
    require_layout(layout)
    require_form(form)
    _require_size(mask, layout)
    return _convert(mask, layout, form)


def _convert(mask: TreeMask, layout: VerifyLayout, form: Form) -> TreeMask:
    """Read a mask of any form, write another."""
    batch, num_queries = layout.qo_indptr.numel() - 1, layout.positions.numel()
    rows, entries = layout.max_q_len, layout.kv_indices.numel()
    most_bits = rows * (entries + num_queries)  # sum of q * (p + q) where every q is at most `rows`
    max_prefix = cast("PrefixLen", entries // max(batch, 1) if layout.is_captured else entries)
    source, byte_indptr, mask_rows, mask_cols, source_form = _source(mask)
    indptrs = (layout.qo_indptr, layout.kv_indptr, layout.mask_indptr)

    def zeros(size: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return layout.qo_indptr.new_zeros(size, dtype=dtype)

    def write(out: Tensor, out_rows: int, out_cols: int) -> None:
        if num_queries:
            _write_rows(
                source, byte_indptr, *indptrs, out,
                num_queries, kv_len(max_prefix, rows), mask_rows, mask_cols, out_rows, out_cols,
                source_form, form,
            )  # fmt: skip

    match form:
        case "flat":
            flat = zeros(most_bits, torch.bool)
            write(flat, 0, 0)
            return FlatMask(flat)
        case "packed":
            packed = PackedMask(
                zeros(packed_len(most_bits) + batch, torch.uint8), zeros(batch + 1, torch.int64)
            )
            if batch:
                _write_packed(
                    source, byte_indptr, *indptrs, packed.packed, packed.byte_indptr,
                    mask_rows, mask_cols, mask_len(max_prefix, rows), source_form,
                )  # fmt: skip
            return packed
        case "dense":
            columns = kv_len(max_prefix, rows)
            bias = zeros((batch, 1, rows, columns), torch.float32).fill_(
                torch.finfo(torch.float32).min
            )
            bias[:, 0, :, max_prefix:].diagonal(dim1=1, dim2=2).zero_()
            write(bias, rows, columns)
            return DenseMask(bias)
        case "bits":
            words = zeros((num_queries, bit_words(rows)), torch.int32)
            write(words, 0, words.shape[1])
            return BitMask(words)


@op("convert_mask", writes=("out",))
def _write_rows(
    source: Tensor,
    byte_indptr: Tensor | None,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    mask_indptr: Tensor,
    out: Tensor,
    num_queries: int,
    longest: int,
    mask_rows: int,
    mask_cols: int,
    out_rows: int,
    out_cols: int,
    source_form: str,
    form: str,
) -> None:
    """Write the rows of the forms that have some, none of more than ``longest`` entries."""
    batch = qo_indptr.numel() - 1
    shares = out_cols if form == "bits" else triton.cdiv(longest, BLOCK)
    write_rows_kernel[(num_queries, max(1, min(32, shares)))](
        _bytes(source), byte_indptr, qo_indptr, kv_indptr, mask_indptr, _bytes(out),
        batch, mask_rows, mask_cols, out_rows, out_cols,
        FORM=source_form, TO=form, BATCH=triton.next_power_of_2(max(batch, 1)), BLOCK=BLOCK,
    )  # fmt: skip


@op("pack_mask", writes=("packed", "packed_indptr"))
def _write_packed(
    source: Tensor,
    byte_indptr: Tensor | None,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    mask_indptr: Tensor,
    packed: Tensor,
    packed_indptr: Tensor,
    mask_rows: int,
    mask_cols: int,
    longest: int,
    source_form: str,
) -> None:
    """Write the packed form, no request of more than ``longest`` bits."""
    batch = qo_indptr.numel() - 1
    shares = triton.cdiv(longest, 8 * BLOCK)
    packed_kernel[(batch, max(1, min(256, shares)))](
        _bytes(source), byte_indptr, qo_indptr, kv_indptr, mask_indptr, packed, packed_indptr,
        batch, mask_rows, mask_cols,
        FORM=source_form, BATCH=triton.next_power_of_2(batch), BLOCK=BLOCK // 8,
    )  # fmt: skip


def _bytes(mask: Tensor) -> Tensor:
    """A mask as kernels take it: bools are bytes. Not a step for compilers, some of which lack it."""
    return mask.view(torch.uint8) if mask.dtype is torch.bool else mask


def _require_size(mask: TreeMask, layout: VerifyLayout) -> None:
    """Refuse a mask that ends before the rows and requests of the layout do.

    How long a flat mask or a packed segment has to be lies in the indptrs; what is not there hides.
    """
    batch = layout.qo_indptr.shape[0] - 1
    match mask:
        case PackedMask(_, byte_indptr):
            _require_requests("packed", byte_indptr.shape[0] - 1, batch, layout)
        case DenseMask(bias):
            held, _, rows, columns = bias.shape
            _require_requests("dense", held, batch, layout)
            require(
                columns >= rows,
                "dense mask has {} columns and {} rows a request; each row has a column of its own",
                columns,
                rows,
            )
        case BitMask(words):
            require_words(words, layout)


def _require_requests(form: str, held: int, batch: int, layout: VerifyLayout) -> None:
    """Refuse a mask of fewer requests than the layout, and of more where the layout is the call's own."""
    require(
        held >= batch if layout.is_captured else held == batch,
        "{} mask has {} requests; the layout has {}",
        form,
        held,
        batch,
    )


def require_words(words: Tensor, layout: VerifyLayout) -> None:
    """Refuse ancestor bits of fewer rows, or fewer words a row, than the layout's."""
    require_rows("bit mask", words, layout)
    least = bit_words(layout.max_q_len)
    require(
        words.shape[1] >= least,
        "bit mask has {} words a row; max_q_len {} needs {}",
        words.shape[1],
        layout.max_q_len,
        least,
    )


def _source(mask: TreeMask) -> tuple[Tensor, Tensor | None, int, int, Form]:
    """Return a mask's memory, its byte indptr, rows and columns (``is_visible`` says of what), its form."""
    match mask:
        case FlatMask(allowed):
            return allowed, None, 0, allowed.numel(), "flat"
        case PackedMask(packed, byte_indptr):
            return packed, byte_indptr, 0, packed.numel(), "packed"
        case DenseMask(bias):
            return bias, None, bias.shape[2], bias.shape[3], "dense"
        case BitMask(words):
            return words, None, 0, words.shape[1], "bits"

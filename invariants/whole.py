"""Invariants of the call as a whole: its fields speak of the same requests, rows and dtypes."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddtree.invariants import diagnosis
from ddtree.invariants.call import Call
from ddtree.invariants.claimed import index
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.sizes import (
    INDPTRS,
    PER_REQUEST,
    Sizes,
    batch_counts,
    room_counts,
    row_counts,
    total_rows,
)
from ddtree.invariants.violation import Violation

SIDE_BY_SIDE = (("token_ids", "parents", "depths", "scores"), ("nodes", "src", "dst", "emitted"))
"""Fields of one shape."""


def batch(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the number of requests of every field; fixed buffers and slot tables may have room for more."""
    counts, room = batch_counts(call), room_counts(call)
    empty = [n for n in room if n.endswith("indptr") and not call.known()[n].numel()]
    for name in empty:
        yield Violation(
            None, "at least 1 entry", 0, f"{name} is empty: an indptr has at least one entry"
        )
    if empty:
        return
    fields, every = counts if call.is_captured else counts | room, _by_field(counts | room)
    for name, count in counts.items():
        if count != sizes.batch:
            hint = diagnosis.other_batch(name, fields)
            yield Violation(
                None, sizes.batch, count, f"{name} has {count} requests; by field: {every}", hint
            )
    for name, count in room.items():
        if count < sizes.batch or (count > sizes.batch and not call.is_captured):
            hint = diagnosis.other_batch(name, fields)
            numbers = f"{name} has room for {count} requests; by field: {every}"
            yield Violation(None, sizes.batch, count, numbers, hint)
    for name in ("slot_table", "slot_table_after"):
        table = call.known().get(name)
        if table is not None and table.shape[0] < sizes.batch:
            yield Violation(
                None,
                sizes.batch,
                int(table.shape[0]),
                f"{name} has {table.shape[0]} rows; requests by field: {every}",
            )


def _by_field(values: Mapping[Any, object]) -> str:
    """``qo_indptr 2, num_nodes 3``."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def tree_shape(call: Call, _: Sizes) -> Iterator[Violation]:
    """Compare the shapes of fields that are read side by side."""
    known = call.known()
    for names in SIDE_BY_SIDE:
        shapes = {name: list(known[name].shape) for name in names if name in known}
        first = next(iter(shapes.values()), [])
        for shape in shapes.values():
            if shape != first:
                yield Violation(None, first, shape, f"by field: {_by_field(shapes)}")
    for field in ("token_ids", "parents", "depths", "scores", "nodes"):
        if field in known and known[field].shape[0] and not known[field].shape[1]:
            yield Violation(
                None,
                "at least 1 row",
                0,
                f"{field} has shape {list(known[field].shape)}; each request has a root",
            )


def rows(call: Call, _: Sizes) -> Iterator[Violation]:
    """Compare the number of query rows of every field that has one entry a row."""
    counts, total = row_counts(call), total_rows(call)
    for name, count in counts.items():
        if total is not None and count != total:
            yield Violation(
                None, total, count, f"{name} has {count} rows; by field: {_by_field(counts)}"
            )


def dtypes(call: Call, _: Sizes) -> Iterator[Violation]:
    """Look at the dtypes that a kernel would misread without a word."""
    names = ("qo_indptr", "kv_indptr", "mask_indptr", "kv_indices", "positions", "out_cache_loc")
    for name in names:
        value = call.known().get(name)
        if value is not None and value.dtype not in {torch.int32, torch.int64}:
            yield Violation(None, "int32 or int64", str(value.dtype), name)
    mask = call.custom_mask
    if mask is None or mask.dtype in {torch.bool, torch.uint8}:
        return
    hint = ""
    if (
        mask.dtype.is_floating_point
        and mask.numel()
        and bool((mask <= 0).all())
        and bool((mask < 0).any())
    ):
        hint = (
            "this is an additive mask (0 where attending is allowed): read as nonzero = "
            "allowed it is inverted"
        )
    yield Violation(None, "bool or uint8", str(mask.dtype), "custom_mask", hint)


def index_width(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compute the largest offset of every address that is held or computed in 32 bits."""
    for what, largest in _largest_offsets(call, sizes):
        if not index.fits_int32(largest):
            yield Violation(
                None, f"at most {index.INT32_MAX}", largest, f"{what} reaches {largest} in 32 bits"
            )


def _largest_offsets(call: Call, sizes: Sizes) -> Iterator[tuple[str, int]]:
    ends = {
        "qo_indptr": sum(sizes.q_lens or []),
        "kv_indptr": sum(sizes.prefix_lens or []),
        "mask_indptr": sizes.mask_starts[-1],
    }
    for name, end in ends.items():
        value = call.known().get(name)
        if value is not None and value.dtype is torch.int32:
            yield name, end
    if call.offset_bits != 32:
        return
    if call.mask_indptr is not None and sizes.mask_starts[-1]:
        yield "the offset of the flat mask", sizes.mask_starts[-1] - 1
    # a captured graph runs all its rows, those past the call too
    counted = list(row_counts(call).values())
    num_rows = call.num_rows or max([sum(sizes.q_lens or []), *counted])
    if call.vocab_size and num_rows:
        last = index.row_offset(num_rows - 1, call.vocab_size, call.vocab_size - 1)
        yield f"row * vocab, row {num_rows - 1}, vocabulary {call.vocab_size},", last
    if call.slot_stride and num_rows:
        last = index.row_offset(num_rows - 1, call.slot_stride, call.slot_stride - 1)
        yield f"row * stride, row {num_rows - 1}, stride {call.slot_stride},", last
    if call.slot_stride and call.kv_pool_size:
        last = index.row_offset(call.kv_pool_size - 1, call.slot_stride, call.slot_stride - 1)
        yield f"slot * stride, slot {call.kv_pool_size - 1}, stride {call.slot_stride},", last


WHOLE = (
    Invariant(
        "batch",
        "call",
        "All fields speak of the same number of requests.",
        "len(x_indptr) - 1 == B == len(num_nodes) == ...; under capture len(x_indptr) - 1 >= B",
        ("|".join((*INDPTRS, "bias", *PER_REQUEST)),),
        batch,
    ),
    Invariant(
        "tree_shape",
        "call",
        ("Fields that are read side by side have one shape, and each request has a root row."),
        "token_ids, parents, depths, scores: [B, Q]; nodes, src, dst, emitted: [B, H+1]",
        ("|".join(SIDE_BY_SIDE[0] + SIDE_BY_SIDE[1]),),
        tree_shape,
    ),
    Invariant(
        "rows",
        "call",
        ("All fields of one entry a query row have the same number of rows, fixed buffers apart."),
        "len(positions) == len(out_cache_loc) == len(target_ids) == rows of the query == T",
        ("positions|out_cache_loc|num_rows|target_ids|words|input_ids",),
        rows,
    ),
    Invariant(
        "dtypes",
        "call",
        "Index fields are int32 or int64 and a flat mask is bool or uint8.",
        "dtype(x_indptr), dtype(positions), ... in {int32, int64}; dtype(custom_mask) in {bool, uint8}",
        ("qo_indptr|kv_indptr|mask_indptr|kv_indices|positions|out_cache_loc|custom_mask",),
        dtypes,
    ),
    Invariant(
        "index_width",
        "call",
        "No offset that is held or computed in 32 bits exceeds 2147483647.",
        (
            "sum(q_len * (prefix_len + q_len)), (T - 1) * vocab + vocab - 1, (T - 1) * stride + "
            "stride - 1, (slots - 1) * stride + stride - 1 <= 2^31 - 1; under capture T is the "
            "graph's rows"
        ),
        ("qo_indptr|kv_indptr|mask_indptr|offset_bits",),
        index_width,
        proofs=("int32_offsets",),
    ),
)

"""Step 2 on the device: lay the verify pass out, in one launch; the drafter's pass too.

The lengths are known to the device alone, so no tensor's size may depend on them: every tensor has
the size of the largest call of its batch, and the layout says ``is_captured``.
"""

from typing import cast

import torch
import triton
from jaxtyping import Int, Int32, Int64
from torch import Tensor

from ddtree.impl.arguments import (
    require_layout,
    require_requests,
    require_table,
    require_tree,
)
from ddtree.impl.layout_kernels import plan_blocks_kernel, plan_kernel, row_inputs_kernel
from ddtree.impl.op import op
from ddtree.spec.contracts import DraftTree, QLen, VerifyLayout
from ddtree.spec.dtypes import INDEX, LENGTH, require_tensor
from ddtree.spec.errors import require
from ddtree.spec.index import fits_int32
from ddtree.spec.public import public

BLOCK = 1024
"""Prefix slots that one program copies at a time."""


@public
def plan_verify(
    tree: DraftTree,
    prefix_lens: Int[Tensor, " B"],
    slot_table: Int64[Tensor, "B max_context"],
    q_lens: Int[Tensor, " B"] | None = None,
) -> VerifyLayout:
    """Lay out one verify pass.

    Args:
        tree: the trees, padded to Q rows.
        prefix_lens: ``[B]`` committed KV entries of each request, the root not among them. Negative:
            the request is unused and has no rows, as in a graph replayed for a smaller batch.
        slot_table: ``[B, max_context]`` pool slot of each KV entry; row r of a tree is entry
            ``prefix_len + r``.
        q_lens: ``[B]`` query rows of each request, ``num_nodes <= q_len <= Q``. None: Q for all.

    Returns:
        The layout in tensors of full size: ``T = B * Q`` rows and ``B * max_context`` entries of
        ``kv_indices``, which are not written past ``kv_indptr[-1]``. Unused rows have position 0
        and slot -1. To look at the lengths would stall the device: a prefix is taken as
        ``max_context`` entries at most, a q_len as 0 to Q, and debug mode names what is outside.

    Raises:
        InputError: dtypes or shapes that do not agree, a batch of 0, or sizes whose indptr could
            overflow int32.
    """
    require_tree(tree)
    batch = tree.token_ids.shape[0]
    require(batch >= 1, "the tree has 0 requests; a verify pass has at least 1")
    require_tensor("prefix_lens", prefix_lens, LENGTH, (batch,))
    _require_slots(slot_table, batch)
    if q_lens is not None:
        require_tensor("q_lens", q_lens, LENGTH, (batch,))
    layout = _unfilled(tree.depths, slot_table)
    _plan(
        tree.depths, prefix_lens, slot_table, q_lens,
        layout.qo_indptr, layout.kv_indptr, layout.kv_indices,
        layout.mask_indptr, layout.positions, layout.out_cache_loc,
    )  # fmt: skip
    return layout


def plan_blocks(
    prefix_lens: Int32[Tensor, " B"],
    limits: Int32[Tensor, " B"],
    slot_table: Int64[Tensor, "B max_context"],
    roots: Int64[Tensor, " B"],
    token_ids: Int64[Tensor, "B Q"],
) -> tuple[VerifyLayout, Int32[Tensor, " B"], Int64[Tensor, " B"]]:
    """Begin a round: say who takes part in it, and lay out the blocks of its drafter.

    Blocks read a prefix each and write nothing: this is no verify pass. Every place has its block, so that
    block b's rows begin at ``b * Q``; one that takes no part reads no prefix. What the layout holds for
    ``out_cache_loc`` and ``mask_indptr`` means nothing.

    Args:
        prefix_lens: ``[B]`` entries that each place holds. Negative: an unused place.
        limits: ``[B]`` a place that holds as many entries takes no part any more.
        slot_table: ``[B, max_context]`` slots of each place's entries.
        roots: ``[B]`` first token of each block.
        token_ids: ``[B, Q]`` the blocks, whose first tokens are written.

    Returns:
        The layout, the prefix length of who takes part, -1 for the others, and the roots. Both are the
        round's own, whatever becomes of ``prefix_lens`` and ``roots`` before its end.

    Raises:
        InputError: dtypes or shapes that do not agree, no place or no row, tensors whose numbers do not lie
            side by side, or sizes whose indptr could overflow int32.
    """
    require_tensor("token_ids", token_ids, (torch.int64,), ("B", "Q"))
    batch, rows = token_ids.shape
    require(batch >= 1 and rows >= 1, "{} blocks of {} rows; at least 1 of each", batch, rows)
    require_table("token_ids", token_ids, batch, rows)
    for name, tensor, dtype in (
        ("prefix_lens", prefix_lens, torch.int32),
        ("limits", limits, torch.int32),
        ("roots", roots, torch.int64),
    ):
        require_tensor(name, tensor, (dtype,), (batch,))
        require_table(name, tensor, batch)
    _require_slots(slot_table, batch)
    layout = _unfilled(token_ids, slot_table)
    live, begun = torch.empty_like(prefix_lens), torch.empty_like(roots)
    _plan_blocks(
        prefix_lens, limits, slot_table, roots, token_ids, begun, live,
        layout.qo_indptr, layout.kv_indptr, layout.kv_indices, layout.positions,
    )  # fmt: skip
    return layout, live, begun


@op(
    "plan_blocks",
    writes=("token_ids", "begun", "live", "qo_indptr", "kv_indptr", "kv_indices", "positions"),
)
def _plan_blocks(
    prefix_lens: Tensor,
    limits: Tensor,
    slot_table: Tensor,
    roots: Tensor,
    token_ids: Tensor,
    begun: Tensor,
    live: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    positions: Tensor,
) -> None:
    """Fill the layout of blocks."""
    (batch, rows), max_context = token_ids.shape, slot_table.shape[1]
    plan_blocks_kernel[_shares(batch, max_context)](
        prefix_lens, limits, slot_table, roots, token_ids, begun, live,
        qo_indptr, kv_indptr, kv_indices, positions,
        batch, rows, max_context, slot_table.stride(0),
        BATCH=triton.next_power_of_2(batch), ROWS=triton.next_power_of_2(rows), BLOCK=BLOCK,
    )  # fmt: skip


def _require_slots(slot_table: Tensor, batch: int) -> None:
    """Refuse what is no slot table of so many requests."""
    require_tensor("slot_table", slot_table, INDEX, (batch, "max_context"))
    require(
        slot_table.stride(1) == 1,
        "slot_table has strides {}; its entries must lie side by side",
        slot_table.stride(),
    )


def _shares(batch: int, max_context: int) -> tuple[int, int]:
    """Programs of a plan: some for each request share the copy of its prefix slots."""
    return batch, max(1, min(32, triton.cdiv(max_context, BLOCK)))


def _unfilled(rows_of: Tensor, slot_table: Tensor) -> VerifyLayout:
    """A layout of full size for ``[B, Q]`` rows."""
    (batch, rows), max_context = rows_of.shape, slot_table.shape[1]
    require(
        fits_int32(batch * max(max_context, rows)),
        "{} requests of {} entries and {} rows overflow int32's 2147483647: split the batch",
        batch,
        max_context,
        rows,
    )

    def new(size: int, dtype: torch.dtype) -> Tensor:
        return slot_table.new_empty(size, dtype=dtype)

    return VerifyLayout(
        qo_indptr=new(batch + 1, torch.int32),
        kv_indptr=new(batch + 1, torch.int32),
        kv_indices=new(batch * max_context, torch.int64),
        mask_indptr=new(batch + 1, torch.int64),
        max_q_len=cast("QLen", rows),
        positions=new(batch * rows, torch.int64),
        out_cache_loc=new(batch * rows, torch.int64),
        is_captured=True,
    )


@op(
    "plan_verify",
    writes=(
        "qo_indptr",
        "kv_indptr",
        "kv_indices",
        "mask_indptr",
        "positions",
        "out_cache_loc",
    ),
)
def _plan(
    depths: Tensor,
    prefix_lens: Tensor,
    slot_table: Tensor,
    q_lens: Tensor | None,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    mask_indptr: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
) -> None:
    """Fill the layout."""
    batch, rows = depths.shape
    max_context = slot_table.shape[1]
    plan_kernel[_shares(batch, max_context)](
        depths.contiguous(), prefix_lens.contiguous(), slot_table,
        None if q_lens is None else q_lens.contiguous(),
        qo_indptr, kv_indptr, kv_indices, mask_indptr, positions, out_cache_loc,
        batch, rows, max_context, slot_table.stride(0),
        BATCH=triton.next_power_of_2(batch), ROWS=triton.next_power_of_2(rows), BLOCK=BLOCK,
    )  # fmt: skip


def row_inputs(
    tree: DraftTree, layout: VerifyLayout, pad_slot: int
) -> tuple[Int64[Tensor, " T"], Int64[Tensor, " T"]]:
    """Return the token of each query row, and the slot that its KV is written to.

    Rows of no request have token 0; rows without a slot write to ``pad_slot``, which nobody reads.

    Raises:
        InputError: a layout of another batch.
    """
    require_tree(tree)
    require_layout(layout)
    require_requests(layout, "tree", tree.token_ids.shape[0])
    tokens = torch.empty_like(layout.out_cache_loc)
    slots = torch.empty_like(tokens)
    if tokens.numel():
        _row_inputs(tree.token_ids, layout.qo_indptr, layout.out_cache_loc, tokens, slots, pad_slot)
    return tokens, slots


@op("row_inputs", writes=("tokens", "slots"))
def _row_inputs(
    token_ids: Tensor,
    qo_indptr: Tensor,
    out_cache_loc: Tensor,
    tokens: Tensor,
    slots: Tensor,
    pad_slot: int,
) -> None:
    """Launch."""
    (batch, width), num_queries = token_ids.shape, tokens.numel()
    row_inputs_kernel[(triton.cdiv(num_queries, 128),)](
        token_ids.contiguous(), qo_indptr, out_cache_loc, tokens, slots,
        num_queries, batch, width, pad_slot,
        BATCH=triton.next_power_of_2(batch), BLOCK=128,
    )  # fmt: skip

"""Fixed buffers, filled on the device: three launches, whatever the call's lengths."""

import torch
import triton
from torch import Tensor

from ddtree import spec
from ddtree.impl.arguments import require_layout, require_made_for, require_tree
from ddtree.impl.buffers_kernels import fill_kernel, fill_rows_kernel
from ddtree.impl.op import op
from ddtree.spec.contracts import DraftTree, FlatMask, VerifyLayout
from ddtree.spec.dtypes import require_kind
from ddtree.spec.errors import require
from ddtree.spec.public import public

ROWS = 128
"""Query rows of one program."""
ENTRIES = 4096
"""Mask or KV entries of one program."""


class VerifyBuffers(spec.VerifyBuffers):
    """The reference's buffers, whose ``fill`` can be captured in a graph.

    A prefix that is longer than ``max_context`` cannot be refused without a look at the device: what
    does not fit is not written.
    """

    def fill(self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> None:
        """Write a call into the buffers, in place, tails included.

        Args:
            tree: the call's trees.
            layout: the call's layout.
            mask: the call's flat mask.

        Raises:
            InputError: a wrong dtype, a layout of another batch or of more rows a request than the
                trees have, or a batch or a q_len over the capacity, with both numbers. Nothing is written
                then.
        """
        _fill(self, tree, layout, mask)


@public
def _fill(buffers: VerifyBuffers, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> None:
    """Fill the buffers; a function of its own so that debug mode sees it."""
    require_tree(tree)
    require_layout(layout)
    require_kind("mask", mask, FlatMask)
    require_made_for(layout, tree)
    batch = tree.token_ids.shape[0]
    require(
        batch <= buffers.max_batch,
        "batch is {}; the buffers were made for {}",
        batch,
        buffers.max_batch,
    )
    require(
        layout.max_q_len <= buffers.max_q_len,
        "max_q_len is {}; the buffers were made for {}: size them by the largest budget + 1",
        layout.max_q_len,
        buffers.max_q_len,
    )
    into = buffers.layout
    _fill_rows(
        tree.token_ids, layout.qo_indptr, layout.kv_indptr, layout.mask_indptr,
        layout.positions, layout.out_cache_loc,
        into.qo_indptr, into.kv_indptr, into.mask_indptr,
        into.positions, into.out_cache_loc, buffers.token_ids, buffers.pad_slot,
    )  # fmt: skip
    _copy(layout.kv_indices, layout.kv_indptr, into.kv_indices)
    _copy(mask.allowed, layout.mask_indptr, buffers.mask.allowed)


@op(
    "fill_rows",
    writes=(
        "into_qo_indptr",
        "into_kv_indptr",
        "into_mask_indptr",
        "into_positions",
        "into_out_cache_loc",
        "into_token_ids",
    ),
)
def _fill_rows(
    token_ids: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    mask_indptr: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    into_qo_indptr: Tensor,
    into_kv_indptr: Tensor,
    into_mask_indptr: Tensor,
    into_positions: Tensor,
    into_out_cache_loc: Tensor,
    into_token_ids: Tensor,
    pad_slot: int,
) -> None:
    """Copy what has an entry a row or a request, tails included."""
    batch, rows = token_ids.shape
    max_batch, max_rows = into_qo_indptr.numel() - 1, into_token_ids.numel()
    fill_rows_kernel[(triton.cdiv(max_rows, ROWS),)](
        token_ids.contiguous(), qo_indptr, kv_indptr, mask_indptr, positions, out_cache_loc,
        into_qo_indptr, into_kv_indptr, into_mask_indptr,
        into_positions, into_out_cache_loc, into_token_ids,
        batch, rows, max_batch, max_rows, pad_slot,
        BATCH=triton.next_power_of_2(max(batch, 1)), MAX_BATCH=triton.next_power_of_2(max_batch + 1),
        BLOCK=ROWS,
    )  # fmt: skip


@op("fill_entries", writes=("buffer",))
def _copy(content: Tensor, indptr: Tensor, buffer: Tensor) -> None:
    """Copy ``indptr[-1]`` entries, zero the rest."""
    if content.dtype is torch.bool:
        content, buffer = content.view(torch.uint8), buffer.view(torch.uint8)
    if buffer.numel():
        fill_kernel[(triton.cdiv(buffer.numel(), ENTRIES),)](
            content,
            indptr[-1:],
            buffer,
            content.numel(),
            buffer.numel(),
            BLOCK=ENTRIES,
            num_warps=8,
        )

"""Fixed buffers, filled on the device: three launches, whatever the call's lengths."""

import torch
import triton
from torch import Tensor

from ddtree import spec
from ddtree.impl.buffers_kernels import fill_kernel, fill_rows_kernel
from ddtree.spec.contracts import DraftTree, FlatMask, VerifyLayout
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
            InputError: a batch or a q_len over the capacity, with both numbers. Nothing is written
                then.
        """
        _fill(self, tree, layout, mask)


@public
def _fill(buffers: VerifyBuffers, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> None:
    """Fill the buffers; a function of its own so that debug mode sees it."""
    batch = layout.qo_indptr.numel() - 1
    require(
        batch <= buffers.max_batch,
        f"batch is {batch}; the buffers were made for {buffers.max_batch}",
    )
    require(
        layout.max_q_len <= buffers.max_q_len,
        f"max_q_len is {layout.max_q_len}; the buffers were made for {buffers.max_q_len}: "
        "size them by the largest budget + 1",
    )
    into, max_rows = buffers.layout, buffers.token_ids.numel()
    padded_batch = triton.next_power_of_2(max(batch, 1))
    fill_rows_kernel[(triton.cdiv(max_rows, ROWS),)](
        tree.token_ids, layout.qo_indptr, layout.kv_indptr, layout.mask_indptr,
        layout.positions, layout.out_cache_loc,
        into.qo_indptr, into.kv_indptr, into.mask_indptr,
        into.positions, into.out_cache_loc, buffers.token_ids,
        batch, tree.token_ids.shape[1], buffers.max_batch, max_rows, buffers.pad_slot,
        BATCH=padded_batch, MAX_BATCH=triton.next_power_of_2(buffers.max_batch + 1), BLOCK=ROWS,
    )  # fmt: skip
    _copy(layout.kv_indices, layout.kv_indptr[-1:], into.kv_indices)
    _copy(
        mask.allowed.view(torch.uint8),
        layout.mask_indptr[-1:],
        buffers.mask.allowed.view(torch.uint8),
    )


def _copy(content: Tensor, length: Tensor, buffer: Tensor) -> None:
    """Copy ``length`` entries, zero the rest."""
    if buffer.numel():
        fill_kernel[(triton.cdiv(buffer.numel(), ENTRIES),)](
            content, length, buffer, buffer.numel(), BLOCK=ENTRIES, num_warps=8
        )

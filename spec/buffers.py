"""Fixed buffers: the metadata of a verify pass in memory that never moves, as a CUDA graph needs it.

A captured graph reads the same addresses on every replay. So the buffers are allocated once for the
largest call, each call is written into them in place, and whatever a smaller call leaves over is made
inert: unused requests have no rows, so no kernel has work there.
"""

import torch
from torch import Tensor

from ddtree.spec.contracts import DraftTree, FlatMask, PrefixLen, QLen, VerifyLayout
from ddtree.spec.dtypes import require_kind
from ddtree.spec.errors import require, require_int
from ddtree.spec.index import mask_len
from ddtree.spec.public import public


class VerifyBuffers:
    """One preallocated set of verify metadata.

    Capacities are products of the largest call that ever comes, never of a configured width:
    ``max_q_len`` is the largest ``budget + 1``, and the mask has room for the tree's own columns.
    """

    def __init__(
        self,
        max_batch: int,
        max_q_len: QLen,
        max_context: int,
        pad_slot: int = -1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the buffers.

        Args:
            max_batch: most requests of a call.
            max_q_len: most query rows of a request: the largest budget + 1.
            max_context: most committed KV entries (prefix) of a request; the tree's rows come on
                top.
            pad_slot: what unused rows of ``out_cache_loc`` hold: -1 (not written) or a slot that
                the engine keeps for padding.
            device: where the tensors live.

        Raises:
            InputError: a size that is no whole number or below its least.
        """
        require_int("max_batch", max_batch, 1)
        require_int("max_q_len", max_q_len, 1, "the root")
        require_int("max_context", max_context, 0)
        require_int("pad_slot", pad_slot, -1, "not written")
        self.max_batch = max_batch
        self.max_q_len = max_q_len
        self.max_context = max_context
        self.pad_slot = pad_slot

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        max_rows = max_batch * max_q_len
        self.token_ids = zeros(max_rows, torch.int64)
        """``[max_batch * max_q_len]`` input tokens, in row order."""
        self.layout = VerifyLayout(
            qo_indptr=zeros(max_batch + 1, torch.int32),
            kv_indptr=zeros(max_batch + 1, torch.int32),
            kv_indices=zeros(max_batch * max_context, torch.int64),
            mask_indptr=zeros(max_batch + 1, torch.int64),
            max_q_len=max_q_len,
            positions=zeros(max_rows, torch.int64),
            out_cache_loc=zeros(max_rows, torch.int64).fill_(pad_slot),
            is_captured=True,
        )
        """The captured layout: always these tensors, of full size."""
        self.mask = FlatMask(
            zeros(max_batch * mask_len(PrefixLen(max_context), max_q_len), torch.bool)
        )
        """The captured flat mask."""

    def fill(self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> None:
        """Write a call into the buffers, in place.

        The indptrs' tails repeat their last value, so unused requests have no rows; other tails
        hold 0, False, or ``pad_slot``. A batch smaller than the captured one needs nothing more.

        Args:
            tree: the call's trees.
            layout: the call's layout.
            mask: the call's flat mask.

        Raises:
            InputError: a wrong dtype, a layout of another batch or of more rows than the trees, or a
                capacity that is too small, with both numbers. Nothing is written then.
        """
        _fill(self, tree, layout, mask)


@public
def _fill(buffers: VerifyBuffers, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> None:
    """Fill the buffers; a function of its own so that debug mode sees it."""
    require_kind("tree", tree, DraftTree)
    require_kind("layout", layout, VerifyLayout)
    require_kind("mask", mask, FlatMask)
    require_int("max_q_len", layout.max_q_len, 0)
    batch = layout.qo_indptr.numel() - 1
    prefix_lens = layout.kv_indptr.diff()
    longest = int(prefix_lens.max()) if batch else 0
    require(
        batch <= buffers.max_batch,
        f"batch is {batch}; the buffers were made for {buffers.max_batch}",
    )
    require(
        layout.max_q_len <= buffers.max_q_len,
        (
            f"max_q_len is {layout.max_q_len}; the buffers were made for {buffers.max_q_len}: "
            "size them by the largest budget + 1"
        ),
    )
    require(
        longest <= buffers.max_context,
        f"the longest prefix is {longest}; the buffers were made for {buffers.max_context}",
    )
    rows, widths = int(layout.qo_indptr[-1]), layout.qo_indptr.diff().tolist()
    held = tree.token_ids.shape
    require(held[0] == batch, f"the layout has {batch} requests, the tree {held[0]}")
    require(
        max(widths, default=0) <= held[1],
        f"the largest q_len is {max(widths, default=0)}; its tree has {held[1]} rows",
    )
    tokens = [tree.token_ids.new_empty(0)]
    tokens += [tree.token_ids[b, :q_len] for b, q_len in enumerate(widths)]

    into, bits = buffers.layout, int(layout.mask_indptr[-1])
    writes = [  # buffer, its front, what the tail holds
        (into.qo_indptr, layout.qo_indptr, rows),
        (into.kv_indptr, layout.kv_indptr, int(layout.kv_indptr[-1])),
        (into.kv_indices, layout.kv_indices[: int(layout.kv_indptr[-1])], 0),
        (into.mask_indptr, layout.mask_indptr, bits),
        (into.positions, layout.positions[:rows], 0),
        (into.out_cache_loc, layout.out_cache_loc[:rows], buffers.pad_slot),
        (buffers.token_ids, torch.cat(tokens), 0),
        (buffers.mask.allowed, mask.allowed[:bits], 0),
    ]
    # a layout whose max_q_len is not its own passes the checks above
    for buffer, front, _ in writes:
        require(
            front.numel() <= buffer.numel(),
            f"{front.numel()} entries do not fit a buffer of {buffer.numel()}",
        )
    for buffer, front, tail in writes:
        buffer[: front.numel()] = front
        buffer[front.numel() :] = tail

"""Step 6 on the device: keep the accepted nodes' KV, in one launch, or two where KV has to move."""

from functools import cache

import torch
import triton
from torch import Tensor

from ddtree.impl.commit_kernels import commit_slots_kernel, move_kernel
from ddtree.spec.contracts import Acceptance, Commit, PagedKV, VerifyLayout
from ddtree.spec.errors import require
from ddtree.spec.public import public

TILE = 8192
"""Words that one program of the move holds."""


@public
def commit_kv(kv: PagedKV, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
    """Commit the accepted nodes, in place.

    With page size 1 no KV moves: ``kv.slot_table`` is permuted, accepted slots first, the others
    behind them in their order. With larger pages the table stays and the KV of every layer moves.

    Args:
        kv: pools of all layers, alike in shape and dtype and contiguous, and the slot table;
            changed in place.
        layout: the call's layout.
        acceptance: the accepted paths. They are trusted, as is that the tree was laid out with this
            slot table: to look would stall the device.

    Returns:
        The new prefix lengths and, for each accepted node, the slot it was written to and the slot
        that holds it now.

    Raises:
        InputError: shapes that do not agree, a page size below 1, or pools that differ, are not
            contiguous or have rows that are no whole number of 4-byte words.
    """
    batch, width = acceptance.nodes.shape
    require(kv.page_size >= 1, f"page_size is {kv.page_size}; the least is 1")
    require(
        len(kv.keys) == len(kv.values), f"{len(kv.keys)} key pools, {len(kv.values)} value pools"
    )
    require(
        kv.slot_table.shape[0] >= batch,
        f"slot_table has {kv.slot_table.shape[0]} requests, the acceptance {batch}",
    )
    require(
        kv.slot_table.stride(1) == 1,
        f"slot_table has strides {kv.slot_table.stride()}; its entries must lie side by side",
    )
    require(
        layout.qo_indptr.numel() > batch,
        f"the layout has {layout.qo_indptr.numel() - 1} requests, the acceptance {batch}",
    )
    pools = (*kv.keys, *kv.values)
    moves = kv.page_size > 1 and bool(pools)
    row_words = _row_words(pools) if moves else 0

    device = acceptance.nodes.device
    prefix_lens = torch.empty(batch, dtype=torch.int32, device=device)
    src = torch.empty((batch, width), dtype=torch.int64, device=device)
    dst = torch.empty_like(src)
    if not batch:
        return Commit(prefix_lens, src, dst)
    padded_width = triton.next_power_of_2(width)
    commit_slots_kernel[(batch,)](
        acceptance.nodes, acceptance.num_accepted, layout.qo_indptr, layout.kv_indptr,
        kv.slot_table, prefix_lens, src, dst,
        width, kv.slot_table.shape[1], kv.slot_table.stride(0),
        WIDTH=padded_width, ROWS=triton.next_power_of_2(layout.max_q_len), PERMUTE=kv.page_size == 1,
        num_warps=4 if layout.max_q_len <= 128 else 8,
    )  # fmt: skip
    if moves:
        block = min(TILE // padded_width, triton.next_power_of_2(row_words))
        addresses = _addresses(tuple(pool.data_ptr() for pool in pools), pools[0].device)
        move_kernel[(triton.cdiv(row_words, block), batch, len(pools))](
            addresses, src, dst, width, row_words, WIDTH=padded_width, BLOCK=block,
        )  # fmt: skip
    return Commit(prefix_lens, src, dst)


def _row_words(pools: tuple[Tensor, ...]) -> int:
    """Return the 4-byte words of one slot's row, refusing pools that are not alike."""
    first = pools[0]
    for pool in pools:
        require(
            pool.shape[1:] == first.shape[1:] and pool.dtype == first.dtype,
            f"one pool has rows of {list(first.shape[1:])} {first.dtype}, "
            f"another of {list(pool.shape[1:])} {pool.dtype}",
        )
        require(
            pool.is_contiguous(),
            f"a pool of shape {list(pool.shape)} has strides {pool.stride()}; pools must be contiguous",
        )
    row_bytes = first[0].numel() * first.element_size()
    require(
        row_bytes % 4 == 0,
        f"a slot's row takes {row_bytes} bytes; it must be a whole number of 4-byte words",
    )
    return row_bytes // 4


@cache  # a captured graph may hold on to any of them
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the pools' addresses on the device; copied once for each set of pools."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)

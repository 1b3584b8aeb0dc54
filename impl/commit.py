"""Step 6 on the device: keep the accepted nodes' KV, in one launch, or two where KV has to move."""

from functools import cache

import torch
import triton
from jaxtyping import Int, Int32
from torch import Tensor

from ddtree.impl.arguments import require_layout, require_requests, require_table
from ddtree.impl.commit_kernels import commit_slots_kernel, keep_kernel, move_kernel
from ddtree.impl.op import op
from ddtree.spec.contracts import Acceptance, Commit, PagedKV, VerifyLayout
from ddtree.spec.dtypes import require_kind
from ddtree.spec.errors import require, require_int
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
        InputError: dtypes or shapes that do not agree, a page size below 1, or pools that differ, are not
            contiguous or have rows that are no whole number of 4-byte words.
    """
    require_kind("kv", kv, PagedKV)
    require_layout(layout)
    require_kind("acceptance", acceptance, Acceptance)
    batch, width = acceptance.nodes.shape
    require(
        acceptance.num_accepted.shape[0] == batch,
        "Acceptance.num_accepted has {} requests, nodes {}",
        acceptance.num_accepted.shape[0],
        batch,
    )
    require_int("page_size", kv.page_size, 1)
    require(
        len(kv.keys) == len(kv.values), "{} key pools, {} value pools", len(kv.keys), len(kv.values)
    )
    require(
        kv.slot_table.shape[0] >= batch,
        "slot_table has {} requests, the acceptance {}",
        kv.slot_table.shape[0],
        batch,
    )
    require(
        kv.slot_table.stride(1) == 1,
        "slot_table has strides {}; its entries must lie side by side",
        kv.slot_table.stride(),
    )
    require_requests(layout, "acceptance", batch)
    pools = [*kv.keys, *kv.values] if kv.page_size > 1 else []
    if pools:
        _require_alike(pools)

    device = acceptance.nodes.device
    prefix_lens = torch.empty(batch, dtype=torch.int32, device=device)
    src = torch.empty((batch, width), dtype=torch.int64, device=device)
    dst = torch.empty_like(src)
    if not batch:
        return Commit(prefix_lens, src, dst)
    _commit(
        pools, kv.slot_table, acceptance.nodes, acceptance.num_accepted,
        layout.qo_indptr, layout.kv_indptr, prefix_lens, src, dst, layout.max_q_len, kv.page_size,
    )  # fmt: skip
    return Commit(prefix_lens, src, dst)


@op("commit_kv", writes=("pools", "slot_table", "prefix_lens", "src", "dst"))
def _commit(
    pools: list[Tensor],
    slot_table: Tensor,
    nodes: Tensor,
    num_accepted: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    prefix_lens: Tensor,
    src: Tensor,
    dst: Tensor,
    max_q_len: int,
    page_size: int,
) -> None:
    """Permute the slots of the accepted nodes, or move their KV in the pools."""
    batch, width = nodes.shape
    commit_slots_kernel[(batch,)](
        nodes, num_accepted, qo_indptr, kv_indptr, slot_table, prefix_lens, src, dst,
        width, slot_table.shape[1], slot_table.stride(0),
        WIDTH=triton.next_power_of_2(width), ROWS=triton.next_power_of_2(max_q_len), PERMUTE=page_size == 1,
        num_warps=4 if max_q_len <= 128 else 8,
    )  # fmt: skip
    if pools:
        _move(pools, src, dst)


def move_rows(pools: list[Tensor], commit: Commit) -> None:
    """Move what more lies in the slots of a commit: pools beside those that ``commit_kv`` was given.

    Args:
        pools: ``[slots, ...]``, a slot's row each; changed in place. None: nothing is done.
        commit: slots from and to, of which those outside the pools move nothing.

    Raises:
        InputError: as ``commit_kv`` of its pools; a commit whose ``src`` and ``dst`` are not alike.
    """
    require_kind("commit", commit, Commit)
    require_table("Commit.src", commit.src, *commit.src.shape)
    require_table("Commit.dst", commit.dst, *commit.src.shape)
    if not pools:
        return
    _require_alike(pools)
    if commit.src.numel():
        _move(pools, commit.src, commit.dst)


@op("move_rows", writes=("pools",))
def _move(pools: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Move rows of all pools."""
    batch, width = src.shape
    padded_width = triton.next_power_of_2(width)
    row_words = pools[0][0].numel() * pools[0].element_size() // 4
    block = min(TILE // padded_width, triton.next_power_of_2(row_words))
    addresses = _addresses(tuple(pool.data_ptr() for pool in pools), pools[0].device)[0]
    move_kernel[(triton.cdiv(row_words, block), batch, len(pools))](
        addresses, src, dst, width, row_words, min(pool.shape[0] for pool in pools),
        WIDTH=padded_width, BLOCK=block,
    )  # fmt: skip


def keep_accepted(
    num_accepted: Int32[Tensor, " B"], new: Int[Tensor, " B"], held: Int[Tensor, " B"]
) -> None:
    """Write what is new of the requests that accepted something over what is held, in place.

    Raises:
        InputError: shapes that differ, or numbers that do not lie side by side.
    """
    for name, tensor in (("num_accepted", num_accepted), ("new", new), ("held", held)):
        require_table(name, tensor, held.numel())
    if held.numel():
        _keep(num_accepted, new, held)


@op("keep_accepted", writes=("held",))
def _keep(num_accepted: Tensor, new: Tensor, held: Tensor) -> None:
    """Launch."""
    keep_kernel[(triton.cdiv(held.numel(), 128),)](
        num_accepted, new, held, held.numel(), BLOCK=128, num_warps=1
    )


def _require_alike(pools: list[Tensor]) -> None:
    """Refuse pools that are not alike, or whose slots are no whole number of 4-byte words."""
    first = pools[0]
    for pool in pools:
        require(
            pool.shape[1:] == first.shape[1:] and pool.dtype == first.dtype,
            "one pool has rows of {} {}, another of {} {}",
            list(first.shape[1:]),
            first.dtype,
            list(pool.shape[1:]),
            pool.dtype,
        )
        require(
            pool.is_contiguous(),
            "a pool of shape {} has strides {}; pools must be contiguous",
            list(pool.shape),
            pool.stride(),
        )
    row_bytes = first[0].numel() * first.element_size()
    require(
        row_bytes % 4 == 0,
        "a slot's row takes {} bytes; it must be a whole number of 4-byte words",
        row_bytes,
    )


@cache  # a captured graph may hold on to any of them
def _addresses(pointers: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the pools' addresses on the device, and on the host; copied once for each set of pools.

    Without a wait: from pinned memory, which has to outlive the copy.
    """
    require(
        device.type != "cuda" or not torch.cuda.is_current_stream_capturing(),
        "these {} pools are committed to for the first time, and a CUDA graph is being captured: run the "
        "commit once before the capture",
        len(pointers),
    )
    host = torch.tensor(pointers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True), host

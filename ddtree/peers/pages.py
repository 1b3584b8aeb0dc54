"""What a peer with a paged pool is handed: page tables that hold prefix and tree."""

import torch
from torch import Tensor

from ddtree import spec


def store(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows to slots of a pool in its dtype; PyTorch indexes fp8 as bytes alone."""
    if pool.element_size() == 1:
        pool.view(torch.uint8)[slots] = rows.to(pool.dtype).view(torch.uint8)
    else:
        pool[slots] = rows.to(pool.dtype)


def flashinfer_pages(layout: spec.VerifyLayout, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's ``indptr``, ``indices`` and ``last_page_len``, int32: pages that hold prefix **and** tree.

    Entry ``prefix_len + r`` of a request lies in the slot that the verify pass writes row r to; entries
    fill pages in order.
    """
    indptr, indices, last = [0], [], []
    qo, kv = layout.qo_indptr.tolist(), layout.kv_indptr.tolist()
    for b in range(len(qo) - 1):
        slots = torch.cat(
            [layout.kv_indices[kv[b] : kv[b + 1]], layout.out_cache_loc[qo[b] : qo[b + 1]]]
        )
        pages = slots[::page_size] // page_size
        indices.append(pages)
        indptr.append(indptr[-1] + pages.numel())
        last.append((slots.numel() - 1) % page_size + 1)
    device = layout.kv_indices.device
    return (
        torch.tensor(indptr, dtype=torch.int32, device=device),
        torch.cat(indices).int(),
        torch.tensor(last, dtype=torch.int32, device=device),
    )

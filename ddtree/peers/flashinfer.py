"""FlashInfer's paged prefill with a packed custom mask, as SGLang's FlashInfer backend verifies trees."""

from functools import cache

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from ddtree import spec
from ddtree.peers.pages import flashinfer_pages, store


class Paged:
    """``BatchPrefillWithPagedKVCacheWrapper`` (fa2); the tree's KV is written to the pool first."""

    mask_forms = ("packed", "flat")
    dtypes = (torch.float16, torch.bfloat16)
    device = "cuda"
    call_limit = 900.0  # the first call compiles

    def verify_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        layout: spec.VerifyLayout,
        mask: spec.TreeMask,
        *,
        page_size: int = 1,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend."""
        key_pool, value_pool = key_pool.clone(), value_pool.clone()
        rows = int(layout.qo_indptr[-1])
        for pool, own in ((key_pool, key), (value_pool, value)):
            store(pool, layout.out_cache_loc[:rows], own[:rows])
        wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(query.device), backend="fa2")
        packed = spec.convert_mask(mask, layout, "packed")
        wrapper.plan(
            layout.qo_indptr,
            *flashinfer_pages(layout, page_size),
            query.shape[1], key.shape[1], query.shape[2], page_size,
            packed_custom_mask=packed.packed,
            sm_scale=scale, logits_soft_cap=softcap,
            q_data_type=query.dtype, kv_data_type=key_pool.dtype,
        )  # fmt: skip
        # 0.6.7 counts the segments of a mask that comes packed in bits; the kernel reads bytes
        wrapper._mask_indptr_buf = packed.byte_indptr.int()  # noqa: SLF001
        pools = tuple(p.view(-1, page_size, *p.shape[1:]) for p in (key_pool, value_pool))
        output = torch.zeros_like(query)
        output[:rows] = wrapper.run(query[:rows], pools)
        return output


@cache
def _workspace(device: torch.device) -> Tensor:
    """Room for the partial results of split prefixes."""
    return torch.empty(512 * 2**20, dtype=torch.uint8, device=device)

"""PyTorch's attention on padded, contiguous keys and values: SDPA and FlexAttention."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from ddtree import spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Padded(NamedTuple):
    """A ragged batch as dense tensors ``[batch, heads, length, head_dim]``, prefix before tree."""

    query: Tensor
    key: Tensor
    """Prefixes are left-aligned in ``max_prefix`` entries, the tree's follow."""
    value: Tensor
    layout: spec.VerifyLayout

    def rows(self, output: Tensor, like: Tensor) -> Tensor:
        """``[batch, heads, length, head_dim]`` to the call's ``[T, heads, head_dim]``."""
        found = torch.zeros_like(like)
        for b, (start, end) in enumerate(_segments(self.layout.qo_indptr)):
            found[start:end] = output[b, :, : end - start].transpose(0, 1)
        return found


def padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    layout: spec.VerifyLayout,
) -> Padded:
    """Gather each request's prefix from the pool, and set its tree behind; room that is left holds zeros."""
    qo, kv = _segments(layout.qo_indptr), _segments(layout.kv_indptr)
    batch = len(qo)
    most = max((end - start for start, end in qo), default=0)
    prefix = max((end - start for start, end in kv), default=0)
    queries = query.new_zeros(batch, most, *query.shape[1:])
    keys, values = (x.new_zeros(batch, prefix + most, *x.shape[1:]) for x in (key, value))
    for b, ((start, end), (first, last)) in enumerate(zip(qo, kv, strict=True)):
        width, slots = end - start, layout.kv_indices[first:last]
        queries[b, :width] = query[start:end]
        for into, own, pool in ((keys, key, key_pool), (values, value, value_pool)):
            into[b, : last - first] = pool[slots]
            into[b, prefix : prefix + width] = own[start:end]
    queries, keys, values = (x.transpose(1, 2).contiguous() for x in (queries, keys, values))
    return Padded(queries, keys, values, layout)


def _segments(indptr: Tensor) -> list[tuple[int, int]]:
    ends = indptr.tolist()
    return list(pairwise(ends))


class PaddedAttention:
    """A backend that attends on padded, contiguous tensors; what it attends with is ``attend``."""

    mask_forms = ("dense", "flat")
    device = DEVICE

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
        scale: float | None = None,
    ) -> Tensor:
        """Attend: ``[T, q_heads, head_dim]``, as ``spec.verify_attention`` does."""
        given = padded(query, key, value, key_pool, value_pool, layout)
        bias = spec.convert_mask(mask, layout, "dense").bias.to(query.dtype)
        return given.rows(self.attend(given, bias, scale), query)

    def attend(self, given: Padded, bias: Tensor, scale: float | None) -> Tensor:
        """``[batch, q_heads, length, head_dim]`` under an additive mask ``[batch, 1, length, entries]``."""
        raise NotImplementedError


class Sdpa(PaddedAttention):
    """SDPA with a dense additive mask and repeated KV heads, as in the official DDTree code."""

    def attend(self, given: Padded, bias: Tensor, scale: float | None) -> Tensor:
        """Attend."""
        group = given.query.shape[1] // given.key.shape[1]
        keys, values = (kv.repeat_interleave(group, 1) for kv in (given.key, given.value))
        return sdpa(given.query, keys, values, attn_mask=bias, scale=scale)


class Flex(PaddedAttention):
    """``flex_attention`` with a block mask read from the dense one; compiled on a GPU, eager on a CPU."""

    def attend(self, given: Padded, bias: Tensor, scale: float | None) -> Tensor:
        """Attend."""
        seen = bias[:, 0] == 0

        def sees(b: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            visible: Tensor = seen[b, row, column]
            return visible

        batch, rows, columns = seen.shape
        query = given.query
        block_mask = create_block_mask(sees, batch, None, rows, columns, query.device)
        flex: Any = compiled_flex() if query.is_cuda else flex_attention
        output: Tensor = flex(
            query, given.key, given.value, block_mask=block_mask, enable_gqa=True, scale=scale
        )
        return output


@cache
def compiled_flex() -> Callable[..., Any]:
    """``flex_attention``, compiled anew for each shape."""
    torch._dynamo.config.recompile_limit = 10_000  # noqa: SLF001 # past it, PyTorch stops compiling
    return torch.compile(flex_attention, dynamic=False)

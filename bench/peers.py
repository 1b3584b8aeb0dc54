"""Other implementations of tree attention behind one signature, each reading our layout and mask.

An adapter takes a ``Call`` and returns a function without arguments that computes its output
``[T, q_heads, head_dim]`` (of a uniform batch also as ``[batch, q_len, q_heads, head_dim]``). All
conversion happens before, so that the function alone can be timed or captured in a CUDA graph. An adapter
raises ``Refused`` for a call that its peer cannot do, with the reason, and ``ImportError`` where the peer
is not installed (``bench/requirements.txt``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from ddtree import impl, spec
from ddtree.invariants.conformance.backend import Refused
from ddtree.peers.pages import flashinfer_pages, store
from ddtree.peers.pytorch import compiled_flex
from ddtree.peers.sglang import ATTENTION as SGLANG_ATTENTION
from ddtree.peers.sglang import sglang_module

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Call:
    """One verify pass of one layer: what ``verify_attention`` takes."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_pool: Tensor
    """``[slots, kv_heads, head_dim]``, the dtype of query or float8_e4m3fn."""
    value_pool: Tensor
    layout: spec.VerifyLayout
    mask: spec.BitMask
    page_size: int = 1
    key_scale: float | None = None
    """What stored keys and values are multiplied by; None: 1, not given."""
    value_scale: float | None = None

    @property
    def arguments(
        self,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, spec.VerifyLayout, spec.BitMask]:
        """The positional arguments of ``verify_attention``."""
        return (
            self.query, self.key, self.value, self.key_pool, self.value_pool, self.layout, self.mask
        )  # fmt: skip

    @property
    def scales(self) -> dict[str, Any]:
        """The scales that are given, as keyword arguments of ``verify_attention``."""
        named = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        return {name: scale for name, scale in named.items() if scale is not None}

    @property
    def lens(self) -> list[tuple[int, int]]:
        """``(prefix_len, q_len)`` of each request; waits for the device."""
        prefixes, widths = self.layout.kv_indptr.diff(), self.layout.qo_indptr.diff()
        return list(zip(prefixes.tolist(), widths.tolist(), strict=True))


def reference(call: Call, **options: Any) -> tuple[Tensor, Tensor | None]:
    """What all are compared with: the specification in float64."""
    options = {"compute_dtype": torch.float64, **call.scales, **options}
    return spec.verify_attention(*call.arguments, **options)


def ddtree(call: Call) -> Run:
    """Ours, as users call it."""
    return lambda: impl.verify_attention(*call.arguments, **call.scales)[0]


# SGLang: the Triton kernel of its tree verification (TritonAttnBackend.forward_extend).


def sglang(call: Call) -> Run:
    """SGLang's ``extend_attention_fwd`` with a custom mask, called as its engine does.

    ``is_causal`` stays True, as there: the key loop ends at the tile's last row, which is right for trees
    whose parents come first. With fp8 pools it converts query and softmax weights to fp8 for the prefix.
    """
    module = sglang_module(SGLANG_ATTENTION)
    output = torch.empty_like(call.query)
    flat = spec.convert_mask(call.mask, call.layout, "flat").allowed
    layout = call.layout
    arguments = (
        call.query, call.key, call.value, output, call.key_pool, call.value_pool,
        layout.qo_indptr, layout.kv_indptr, layout.kv_indices,
        flat.view(torch.uint8), True, layout.mask_indptr, layout.max_q_len,
        call.key_scale or 1.0, call.value_scale or 1.0,
    )  # fmt: skip

    def run() -> Tensor:
        module.extend_attention_fwd(*arguments)
        return output

    return run


# FlashInfer: the paged prefill wrapper with a custom mask, as SGLang's FlashInfer backend verifies trees.


def flashinfer(call: Call) -> Run:
    """FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper`` (fa2, custom mask); ``run`` alone is timed.

    It finds the tree's keys and values in the pool, at ``out_cache_loc``: they are written there first.
    """
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    layout, page_size = call.layout, call.page_size
    for pool, rows, scale in (
        (call.key_pool, call.key, call.key_scale),
        (call.value_pool, call.value, call.value_scale),
    ):
        store(pool, layout.out_cache_loc, rows / (scale or 1.0))
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(call.query.device), backend="fa2")
    pages = flashinfer_pages(layout, page_size)
    packed = spec.convert_mask(call.mask, layout, "packed")
    wrapper.plan(
        layout.qo_indptr,
        *pages,
        call.query.shape[1], call.key.shape[1], call.query.shape[2], page_size,
        packed_custom_mask=packed.packed,
        q_data_type=call.query.dtype,
        kv_data_type=call.key_pool.dtype,
    )  # fmt: skip
    # 0.6.7 counts the segments of a mask that comes packed in bits; the kernel reads bytes
    wrapper._mask_indptr_buf = packed.byte_indptr.int()  # noqa: SLF001
    pools = tuple(
        pool.view(-1, page_size, *pool.shape[1:]) for pool in (call.key_pool, call.value_pool)
    )
    output = torch.empty_like(call.query)
    scales = {"k_scale": call.key_scale, "v_scale": call.value_scale}
    return partial(wrapper.run, call.query, pools, out=output, **scales)


@cache
def _workspace(device: torch.device) -> Tensor:
    """Room for the partial results of split prefixes, shared by all wrappers: runs follow one another."""
    return torch.empty(512 * 2**20, dtype=torch.uint8, device=device)


# PyTorch: no paged pool, so keys and values of a uniform batch are gathered beforehand.


def sdpa_dense(call: Call) -> Run:
    """``scaled_dot_product_attention`` with a dense additive mask and KV heads repeated for the query heads.

    So the official DDTree code attends.
    """
    query, key, value = contiguous(call)
    group = query.shape[1] // key.shape[1]
    bias = spec.convert_mask(call.mask, call.layout, "dense").bias.to(query.dtype)
    key, value = (kv.repeat_interleave(group, 1) for kv in (key, value))
    return lambda: sdpa(query, key, value, attn_mask=bias).transpose(1, 2)


def sdpa_unmasked(call: Call, backend: SDPBackend) -> Run:
    """No peer but a ceiling: SDPA without any mask, the query heads of a KV group packed into rows.

    It computes something else (every row sees every entry) from contiguous keys and values.
    """
    query, key, value = contiguous(call)
    batch, heads, length, dim = query.shape
    packed = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3).contiguous()

    def run() -> Tensor:
        with sdpa_kernel(backend):
            output = sdpa(packed, key, value)
        return output.view(batch, heads, length, dim).transpose(1, 2)

    return run


def flex(call: Call, *, general: bool = False) -> Run:
    """``flex_attention``, compiled for the shape, with a block mask made beforehand.

    Below 128 rows it takes its decoding kernel, which refuses more than 128 packed rows of a KV group.
    ``general`` asks for the other kernel there.
    """
    query, key, value = contiguous(call)
    if general and query.shape[2] >= 128:
        raise Refused("from q_len 128 on `flex` takes the general kernel itself")
    node = torch.arange(query.shape[2], device=query.device)
    bits = call.mask.words[:, spec.index.bit_word(node)] >> spec.index.bit_shift(node) & 1
    seen = bits.bool().view(query.shape[0], query.shape[2], -1)  # [batch, row, node]
    prefix = key.shape[2] - query.shape[2]

    def sees(b: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        visible: Tensor = (column < prefix) | seen[b, row, (column - prefix).clamp(min=0)]
        return visible

    block_mask = create_block_mask(
        sees, query.shape[0], None, query.shape[2], key.shape[2], device=query.device
    )
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True} if general else {}
    attend: Any = compiled_flex() if query.is_cuda else flex_attention

    def run() -> Tensor:
        output: Tensor = attend(
            query, key, value, block_mask=block_mask, enable_gqa=True, kernel_options=options
        )
        return output.transpose(1, 2)

    return run


def contiguous(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as ``[batch, heads, length, head_dim]``, prefix before tree."""
    if len(set(call.lens)) > 1:
        raise Refused(f"it takes equal lengths; (prefix_len, q_len) are {call.lens}")
    if call.key_pool.dtype != call.query.dtype:
        raise Refused(f"it takes one dtype; query is {call.query.dtype}, KV {call.key_pool.dtype}")
    if call.page_size > 1:
        raise Refused("it has no pages: see page size 1")
    prefix, q_len = call.lens[0]
    batch = len(call.lens)
    found = [call.query.view(batch, q_len, *call.query.shape[1:]).transpose(1, 2).contiguous()]
    for rows, pool in ((call.key, call.key_pool), (call.value, call.value_pool)):
        stored = pool[call.layout.kv_indices].view(batch, prefix, *pool.shape[1:])
        own = rows.view(batch, q_len, *rows.shape[1:])
        found.append(torch.cat([stored, own], 1).transpose(1, 2).contiguous())
    return found[0], found[1], found[2]


PEERS: dict[str, Callable[[Call], Run]] = {
    "sglang": sglang,
    "flashinfer": flashinfer,
    "flex": flex,
    "flex_general": partial(flex, general=True),
    "sdpa_dense": sdpa_dense,
}
CEILINGS: dict[str, Callable[[Call], Run]] = {
    "unmasked_cudnn": partial(sdpa_unmasked, backend=SDPBackend.CUDNN_ATTENTION),
    "unmasked_fa2": partial(sdpa_unmasked, backend=SDPBackend.FLASH_ATTENTION),
}
PACKAGES = ("sglang", "flashinfer-python", "apache-tvm-ffi")
"""Whose versions belong to a result."""

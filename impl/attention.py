"""Step 4: tree attention on a paged KV pool, in two launches and without a synchronisation.

Same function and signature as ``ddtree.spec.verify_attention``. The design in short:

- The query heads of a KV group are rows of one tile, so keys and values are read once for all of them.
- The blocks of all requests and KV heads form one line that is cut into equal spans, one for each group
  of programs, whatever the batch, the prefixes and the widths are: no shape leaves multiprocessors idle.
- The kernel reads every width from the call's own indptrs on the device: the host never waits, and a
  captured launch is right for any later call in the same buffers.
- The prefix needs no mask; tree blocks are masked by ancestor bits, 32 columns a word. Other forms of the
  mask are turned into bits by one launch before.
- Pools of 8-bit floats are converted as they are loaded, exactly; their scales cost no product.
- Partial results are merged in a fixed order by a second launch: equal calls give equal bits.

``attention_kernels`` says how the work is cut, ``attention_hopper_kernels`` what Hopper GPUs do instead of
its first kernel, ``attention_configs`` which of them runs, with which tiles;
``bench/results/attention.md`` holds what was measured.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

from ddtree.impl.arguments import require_layout, require_rows
from ddtree.impl.attention_configs import (
    AttentionConfig,
    HopperConfig,
    choose_config,
    merge_splits,
)
from ddtree.impl.attention_hopper_kernels import attend_hopper_kernel
from ddtree.impl.attention_kernels import RECORD_WORDS, attend_kernel, merge_kernel
from ddtree.impl.mask import convert_mask, require_words
from ddtree.impl.op import IS_INTERPRETED, op
from ddtree.spec.attention import PoolScale, _require_scale, _require_shapes
from ddtree.spec.contracts import BitMask, QLen, TreeMask, VerifyLayout
from ddtree.spec.dtypes import FP8, require_kind, require_tensor
from ddtree.spec.errors import require, require_int, require_number
from ddtree.spec.index import fits_int32
from ddtree.spec.mask import FORMS
from ddtree.spec.public import public

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOG2E = 1.4426950408889634
LEAST_BATCH = 64
"""Smaller batches share one compiled kernel."""
MERGE_M = 4
"""Rows of a tile that one program of the merge does."""


@public
def verify_attention(
    query: Float[Tensor, "T q_heads head_dim"],
    key: Float[Tensor, "T kv_heads head_dim"],
    value: Float[Tensor, "T kv_heads head_dim"],
    key_pool: Float[Tensor, "slots kv_heads head_dim"],
    value_pool: Float[Tensor, "slots kv_heads head_dim"],
    layout: VerifyLayout,
    mask: TreeMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " q_heads"] | None = None,
    window: int | None = None,
    key_scale: PoolScale = None,
    value_scale: PoolScale = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "T q_heads head_dim"], Float[Tensor, "T q_heads"] | None]:
    """Attend from every tree node to the prefix and to its ancestors.

    Sums are float32, products are taken in query's dtype. Two runs of one call on one device model
    give the same bits. Nothing is checked that only the device knows: slots, the indptrs and the contents
    of scales are trusted, and wrong ones may read, or write, memory of others.

    Args:
        query: ``[T, q_heads, head_dim]``; query head h reads KV head ``h // (q_heads / kv_heads)``.
        key: ``[T, kv_heads, head_dim]`` of the tree rows.
        value: like ``key``.
        key_pool: ``[slots, kv_heads, head_dim]``, read at ``layout.kv_indices``; in query's
            dtype, or ``float8_e4m3fn``, which takes half the bytes of bf16.
        value_pool: like ``key_pool``.
        layout: the call's layout.
        mask: the call's mask. Forms other than ``bits`` cost one more launch (``convert_mask``), and a
            prefix entry that they hide is seen.
        scale: factor on the scores; None: ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``, each within about ``1e-7 * softcap`` in
            float32: what is nothing at the 20 to 100 of real models, and 0.1 at a million.
        sinks: ``[q_heads]`` one more score of each head that takes weight and gives no value.
        window: a row sees keys from ``position - window + 1`` on, by tree depth, not by row.
        key_scale: an entry's key is the pool's number times this: a float, or float32 of shape ``[]`` or
            ``[kv_heads]``, not negative; None: 1. It holds for a pool of either dtype, never for ``key``.
        value_scale: the same for values.
        return_lse: also return the natural log of the softmax's denominator, the sink included.
        compute_dtype: float32, the dtype of the sums.

    Returns:
        The output ``[T, q_heads, head_dim]`` in query's dtype and the log-sum-exp ``[T, q_heads]`` in
        float32 or None. Rows past ``qo_indptr[-1]`` and rows that see nothing are 0 (-inf).

    Raises:
        InputError: shapes, dtypes or devices that do not agree or are not supported, a softcap or
            window that is not positive, or a negative scale.
    """
    _require_shapes(query, key, value, key_pool, value_pool, sinks)
    require_layout(layout)
    require_kind("mask", mask, *FORMS)
    require_rows("query", query, layout)
    _require_scale("key_scale", key_scale, key.shape[1])
    _require_scale("value_scale", value_scale, key.shape[1])
    words = (mask if isinstance(mask, BitMask) else convert_mask(mask, layout, "bits")).words
    of_heads: dict[str, Tensor | float | None] = {
        "sinks": sinks,
        "key_scale": key_scale,
        "value_scale": value_scale,
    }
    _require_supported(query, key, value, key_pool, value_pool, layout, words, of_heads)
    require(
        compute_dtype is torch.float32,
        "compute_dtype is {}; the kernels sum in float32",
        compute_dtype,
    )
    if scale is not None:
        require_number("scale", scale)
    if softcap is not None:
        require_number("softcap", softcap)
        require(softcap > 0, "softcap is {}; it must be above 0", softcap)
    if window is not None:
        require_int("window", window, 1, "the row itself")
    output, lse = _attend(
        query, key, value, key_pool, value_pool, words,
        layout.qo_indptr, layout.kv_indptr, layout.kv_indices,
        layout.mask_indptr, layout.positions, layout.out_cache_loc, layout.max_q_len,
        query.shape[2] ** -0.5 if scale is None else scale, softcap, sinks, window,
        *_number_or_tensor(key_scale), *_number_or_tensor(value_scale), return_lse,
    )  # fmt: skip
    return output, lse if return_lse else None


def block_attention(
    query: Float[Tensor, "T q_heads head_dim"],
    key: Float[Tensor, "T kv_heads head_dim"],
    value: Float[Tensor, "T kv_heads head_dim"],
    key_pool: Float[Tensor, "slots kv_heads head_dim"],
    value_pool: Float[Tensor, "slots kv_heads head_dim"],
    layout: VerifyLayout,
    words: Int32[Tensor, "T words"],
) -> Float[Tensor, "T q_heads head_dim"]:
    """Attend from rows that see their prefix and what any bits say; ``verify_attention`` wants a tree's.

    The rows of a draft block see one another, later ones too. Arguments are trusted, and debug mode, whose
    invariants are those of trees, looks at none of them.
    """
    output, _ = _attend(
        query, key, value, key_pool, value_pool, words,
        layout.qo_indptr, layout.kv_indptr, layout.kv_indices,
        layout.mask_indptr, layout.positions, layout.out_cache_loc, layout.max_q_len,
        query.shape[2] ** -0.5, None, None, None, None, None, None, None, False,
    )  # fmt: skip
    return output


def _fake_attend(query: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp without content; the last argument says whether there is one."""
    shape = query.shape[:2] if others[-1] else (0, 0)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), query.new_empty(
        shape, dtype=torch.float32
    )


@op("verify_attention", fake=_fake_attend)
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    words: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    mask_indptr: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    max_q_len: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    key_number: float | None,
    key_scale: Tensor | None,
    value_number: float | None,
    value_scale: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attend with the configuration chosen for the call."""
    layout = VerifyLayout(
        qo_indptr, kv_indptr, kv_indices, mask_indptr, QLen(max_q_len), positions, out_cache_loc
    )
    is_aligned = all(map(_is_aligned, (key, value, key_pool, value_pool)))
    config = choose_config(
        query.dtype, query.shape[2], _capability(query.device) if is_aligned else 0,
        fp8=key_pool.dtype in FP8,
    )  # fmt: skip
    output, lse = attend(
        query, key, value, key_pool, value_pool, layout, words,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        window=window,
        key_scale=key_number if key_scale is None else key_scale,
        value_scale=value_number if value_scale is None else value_scale,
        return_lse=return_lse,
        config=config,
        num_programs=config.programs_per_sm * _num_sms(query.device),
    )  # fmt: skip
    return output, query.new_empty((0, 0), dtype=torch.float32) if lse is None else lse


def _number_or_tensor(scale: PoolScale) -> tuple[float | None, Tensor | None]:
    """A scale as an operator takes it: each kind in a place of its own."""
    return (None, scale) if isinstance(scale, Tensor) else (scale, None)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    layout: VerifyLayout,
    words: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    key_scale: PoolScale = None,
    value_scale: PoolScale = None,
    return_lse: bool,
    config: AttentionConfig,
    num_programs: int,
) -> tuple[Tensor, Tensor | None]:
    """Launch both kernels with a configuration and a number of programs; input is trusted."""
    num_rows, q_heads, head_dim = query.shape
    kv_heads, device = key.shape[1], query.device
    fp8 = "none"
    if key_pool.dtype in FP8:
        fp8 = "native" if _converts_fp8(device) else "bits"
        if fp8 == "bits":
            key_pool, value_pool = key_pool.view(torch.uint8), value_pool.view(torch.uint8)
    has_scales = key_scale is not None or value_scale is not None
    key_factor, value_factor = (
        factor if isinstance(factor, Tensor) else float(1 if factor is None else factor)
        for factor in (key_scale, value_scale)
    )
    if scale < 0:  # the running maximum is taken before the scale, which must not turn it around
        query, scale = -query, -scale
    if isinstance(config, HopperConfig) and fp8 == "native":  # four entries a word, or two
        key, value, key_pool, value_pool = (
            each.view(torch.int32) for each in (key, value, key_pool, value_pool)
        )
    scale = max(scale, 1e-30)  # 0 would make the mask's -inf a NaN
    output = torch.empty(query.shape, dtype=query.dtype, device=device)
    lse = torch.empty(num_rows, q_heads, dtype=torch.float32, device=device) if return_lse else None
    batch, max_rows = layout.qo_indptr.numel() - 1, layout.max_q_len * (q_heads // kv_heads)
    items, tiles = batch * kv_heads, triton.cdiv(max_rows, config.block_m)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    partial = floats(num_programs, 2, config.block_m, head_dim)
    partial_stats = floats(num_programs, 2, 2, config.block_m)
    records = torch.empty(RECORD_WORDS.value, num_programs, dtype=torch.int32, device=device)
    num_records = torch.empty(1, dtype=torch.int32, device=device)
    compiled = {
        "KV_HEADS": kv_heads,
        "GROUP": q_heads // kv_heads,
        "HEAD_DIM": head_dim,
        "HAS_SINKS": sinks is not None,
        "HAS_LSE": return_lse,
    }
    dim = triton.next_power_of_2(head_dim)
    inputs = (
        query, key, value, key_pool, value_pool, words,
        layout.qo_indptr, layout.kv_indptr, layout.kv_indices, layout.positions, sinks,
    )  # fmt: skip
    outputs = output, lse, partial, partial_stats, records, num_records
    sizes = (
        num_rows, batch, words.shape[1],
        query.stride(0), query.stride(1),
        key.stride(0), key.stride(1),
        key_pool.stride(0), key_pool.stride(1),
        words.stride(0),
    )  # fmt: skip
    numbers = scale * LOG2E, 1.0 if softcap is None else softcap, 1 if window is None else window
    options = {
        "BATCH": triton.next_power_of_2(max(batch, LEAST_BATCH)),
        "OFFSET": tl.int32
        if fits_int32(max(_last_offset(key), _last_offset(key_pool)))
        else tl.int64,
        "BLOCK_N": config.block_n,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_WINDOW": window is not None,
        "num_warps": config.num_warps,
    }
    if isinstance(config, HopperConfig):
        assert fp8 != "bits"
        attend_hopper_kernel[(num_programs,)](
            *inputs, key_factor, value_factor, *outputs,
            *sizes, _head_stride(key_factor), _head_stride(value_factor), *numbers,
            **compiled,
            **options,
            HAS_SCALES=has_scales,
            FP8=fp8 == "native",
            STAGES=config.num_stages,
            TAIL_SAVING=config.tail_saving,
            CONSUMER_REGISTERS=config.consumer_registers,
            PRODUCER_REGISTERS=config.producer_registers,
        )  # fmt: skip
    else:
        attend_kernel[(num_programs,)](
            *inputs, key_factor, value_factor, *outputs,
            *sizes, _head_stride(key_factor), _head_stride(value_factor), *numbers,
            **compiled,
            **options,
            DIM=dim,
            BLOCK_M=config.block_m,
            HAS_SCALES=has_scales,
            FP8=fp8,
            num_stages=config.num_stages,
        )  # fmt: skip
    # any grid is right: programs walk the records
    merge_kernel[min(num_programs, items * tiles), triton.cdiv(min(config.block_m, max_rows), MERGE_M)](
        partial, partial_stats, records, num_records, layout.qo_indptr, sinks, output, lse,
        num_programs,
        **compiled,
        DIM=dim,
        BLOCK_M=config.block_m,
        MERGE_M=MERGE_M,
        MERGE_SPLITS=merge_splits(items, tiles, num_programs),
        num_warps=4,
    )  # fmt: skip
    return output, lse


@cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for the CPU, where Triton's interpreter runs one program at a time."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _converts_fp8(device: torch.device) -> bool:
    """Whether Triton converts e4m3 on this device; elsewhere, and in the interpreter, bits are moved."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _head_stride(factor: Tensor | float) -> int | None:
    """Distance between the factors of two KV heads, 0 where one serves all; None: a number, no tensor."""
    if not isinstance(factor, Tensor):
        return None
    return factor.stride(0) if factor.ndim else 0


@cache
def _capability(device: torch.device) -> int:
    """Major number of a device's compute capability; 0 for the CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _is_aligned(tensor: Tensor) -> bool:
    """Whether every row of every head starts where Triton knows that 16 bytes can be copied at once."""
    strides = tensor.stride(0), tensor.stride(1)
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides)


def _last_offset(tensor: Tensor) -> int:
    """Offset of a tensor's last element."""
    return sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _require_supported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    layout: VerifyLayout,
    words: Tensor,
    of_heads: dict[str, Tensor | float | None],
) -> None:
    """Refuse what the kernels cannot read."""
    require_tensor("words", words, (torch.int32,), ("rows", "words"))
    head_dim = query.shape[2]
    require(head_dim in HEAD_DIMS, "head_dim is {}; supported are {}", head_dim, HEAD_DIMS)
    require(query.dtype in DTYPES, "query is {}; supported are {}", query.dtype, DTYPES)
    tensors = {"key": key, "value": value, "key_pool": key_pool, "value_pool": value_pool}
    for name, tensor in tensors.items():
        in_pool = name.endswith("_pool")
        require(
            tensor.dtype == query.dtype or (in_pool and tensor.dtype in FP8),
            "{} is {}, query {}; {}",
            name,
            tensor.dtype,
            query.dtype,
            "a pool may also be float8_e4m3fn" if in_pool else "they must be equal",
        )
    require(
        key_pool.dtype == value_pool.dtype,
        "key_pool is {}, value_pool {}; they must be equal",
        key_pool.dtype,
        value_pool.dtype,
    )
    names = ("qo_indptr", "kv_indptr", "kv_indices", "positions")
    indices = {name: getattr(layout, name) for name in names}
    given = {n: value for n, value in of_heads.items() if isinstance(value, Tensor)}
    for name, tensor in {"query": query, **tensors, "words": words, **indices, **given}.items():
        last = tensor.stride(-1) if tensor.ndim and tensor.shape[-1] != 1 else 1
        require(last == 1, "{} has stride {} in its last dimension; it must be 1", name, last)
        require(
            tensor.device == query.device,
            "{} is on {}, query on {}",
            name,
            tensor.device,
            query.device,
        )
    for one, other in (("key", "value"), ("key_pool", "value_pool")):
        strides = tensors[one].stride(), tensors[other].stride()
        require(
            strides[0] == strides[1],
            "{} has strides {}, {} {}; they must be equal",
            one,
            strides[0],
            other,
            strides[1],
        )
    require_words(words, layout)
    require(
        not (IS_INTERPRETED and query.dtype is torch.bfloat16),
        "query is {}; Triton's interpreter multiplies bfloat16 wrongly: take float32 or float16, or a GPU",
        query.dtype,
    )

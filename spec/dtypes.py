"""What the reference reads: kinds, dtypes and axes. Others would fail inside torch or be misread.

Index fields may be int32 or int64 whatever their annotation says: both are read the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.spec.contracts import (
    Acceptance,
    BitMask,
    DenseMask,
    DraftTree,
    FlatMask,
    PackedMask,
    PagedKV,
    VerifyLayout,
)
from ddtree.spec.errors import InputError, given, require

Dtypes = tuple[torch.dtype, ...]

INDEX: Dtypes = (torch.int32, torch.int64)
"""As an index, uint8 and bool would be read as a mask."""
LENGTH: Dtypes = (torch.int8, torch.int16, *INDEX)
FLOAT: Dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FP8: Dtypes = (torch.float8_e4m3fn,)
"""What a KV pool may hold besides: 1 sign, 4 exponent and 3 mantissa bits, at most 448, no infinity."""

_FIELDS: dict[type, dict[str, Dtypes]] = {
    DraftTree: dict.fromkeys(("token_ids", "parents", "depths", "num_nodes"), INDEX),
    VerifyLayout: dict.fromkeys(
        ("qo_indptr", "kv_indptr", "kv_indices", "mask_indptr", "positions", "out_cache_loc"),
        INDEX,
    ),
    FlatMask: {"allowed": (torch.bool,)},
    PackedMask: {"packed": (torch.uint8,), "byte_indptr": INDEX},
    DenseMask: {"bias": FLOAT},
    BitMask: {"words": INDEX},
    Acceptance: dict.fromkeys(("nodes", "num_accepted", "bonus"), INDEX),
    PagedKV: {"slot_table": INDEX},
}


def indexable(pool: Tensor) -> Tensor:
    """The same memory in a dtype that every PyTorch can index: fp8 as bytes."""
    return pool.view(torch.uint8) if pool.dtype in FP8 else pool


_CHECKED = {
    kind: tuple(
        (field, dtypes, axes, len(axes))
        for field, dtypes in fields.items()
        for axes in [kind.__annotations__[field].dim_str.split()]
    )
    for kind, fields in _FIELDS.items()
}
"""Name, dtypes, axes and number of axes of each field."""


def require_kind(name: str, value: object, *kinds: type) -> None:
    """Refuse what is none of these kinds, and a contract that holds a field that would be misread."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(f"{name} is {given(value)}; expected {wanted}")
    kind = type(value)
    for field, dtypes, axes, ndim in _CHECKED.get(kind, ()):
        content = getattr(value, field)
        # as ``_fits``, quicker: every call of the fast path asks for a dozen fields
        if not (isinstance(content, Tensor) and content.dtype in dtypes and content.ndim == ndim):
            require_tensor(f"{kind.__name__}.{field}", content, dtypes, axes)


def require_tensor(name: str, value: object, wanted: Dtypes, axes: Sequence[str | int]) -> None:
    """Refuse what is no tensor of these dtypes and axes; an axis is its size, or a name for any."""
    if _fits(value, wanted, axes):
        return
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is {given(value)}; expected a tensor")
    dtypes = " or ".join(str(dtype) for dtype in wanted)
    require(value.dtype in wanted, f"{name} has dtype {value.dtype}; expected {dtypes}")
    expected = ", ".join(str(axis) for axis in axes)
    raise InputError(f"{name} has shape {list(value.shape)}; expected [{expected}]")


def _fits(value: object, wanted: Dtypes, axes: Sequence[str | int]) -> bool:
    """Whether a value is a tensor of these dtypes and axes; quick, since every call asks often."""
    if not isinstance(value, Tensor) or value.dtype not in wanted or value.ndim != len(axes):
        return False
    return all(isinstance(axis, str) or value.shape[i] == axis for i, axis in enumerate(axes))

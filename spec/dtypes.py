"""The dtypes that the reference reads. Another one would fail inside torch or be misread without a word.

Index fields may be int32 or int64 whatever their annotation says: both are read the same.
"""

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
from ddtree.spec.errors import require

Dtypes = tuple[torch.dtype, ...]

INDEX: Dtypes = (torch.int32, torch.int64)
"""As an index, uint8 and bool would be read as a mask."""
LENGTH: Dtypes = (torch.int8, torch.int16, *INDEX)
FLOAT: Dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

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


def require_fields(*parts: object) -> None:
    """Refuse contract objects that hold a field of a dtype that would be misread."""
    for part in parts:
        for name, wanted in _FIELDS[type(part)].items():
            require_dtype(f"{type(part).__name__}.{name}", getattr(part, name), wanted)


def require_dtype(name: str, tensor: Tensor, wanted: Dtypes) -> None:
    """Refuse a tensor of another dtype than those wanted."""
    names = " or ".join(str(dtype) for dtype in wanted)
    require(tensor.dtype in wanted, f"{name} has dtype {tensor.dtype}; expected {names}")

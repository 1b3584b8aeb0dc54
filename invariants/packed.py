"""Nested values as JSON beside named tensors: what a file of safetensors can hold of arguments and cases.

Known are numbers, words, dtypes, tensors, tuples, mappings by name, and objects of a table of classes.
Nothing is ever unpickled.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.spec import contracts
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import PagedKV
from ddtree.spec.errors import InputError, of_kind, require
from ddtree.spec.sampling import Sampling

Kinds = Mapping[str, type[Any]]
"""Dataclasses by their names."""

CONTRACTS: Kinds = {
    kind.__name__: kind
    for kind in (
        contracts.DraftTree, contracts.VerifyLayout, contracts.FlatMask, contracts.PackedMask,
        contracts.DenseMask, contracts.BitMask, contracts.Acceptance, contracts.Commit, PagedKV, Sampling,
    )
}  # fmt: skip
_POOLS = ("key_pool", "value_pool", "keys", "values")


def pack(
    value: Any,
    path: str,
    kept: dict[str, Tensor],
    slots: Tensor | None = None,
    kinds: Kinds = CONTRACTS,
) -> Any:
    """A value as JSON; its tensors go to ``kept``, named by ``path``.

    Args:
        value: what is to be written.
        path: what the names of its tensors begin with.
        kept: the tensors so far.
        slots: those that are kept of a KV pool; None: all.
        kinds: the classes that are known.

    Raises:
        InputError: the value holds an object of no known class.
    """
    names = path.split(".")
    name = names[-2] if names[-1].isdigit() else names[-1]
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case Tensor() if slots is not None and name in _POOLS and value.ndim == 3:
            live = slots[(slots >= 0) & (slots < value.shape[0])].to(value.device)
            kept[path], kept[f"{path}.slots"] = value[live], live
            return {"pool": path, "slots": value.shape[0]}
        case Tensor():
            kept[path] = value
            return {"tensor": path}
        case tuple():
            return [pack(item, f"{path}.{i}", kept, slots, kinds) for i, item in enumerate(value)]
        case dict():
            parts = {key: pack(v, f"{path}.{key}", kept, slots, kinds) for key, v in value.items()}
            return {"mapping": parts}
        case VerifyBuffers():
            sizes = ("max_batch", "max_q_len", "max_context", "pad_slot")
            return {"buffers": {size: getattr(value, size) for size in sizes}}
    if is_dataclass(value) and type(value).__name__ in kinds:
        parts = {
            f.name: pack(getattr(value, f.name), f"{path}.{f.name}", kept, slots, kinds)
            for f in fields(value)
        }
        return {"object": type(value).__name__, "fields": parts}
    raise InputError(f"{of_kind(value)} cannot be written")


def unpack(value: Any, tensors: Mapping[str, Tensor], kinds: Kinds = CONTRACTS) -> Any:
    """The value that ``pack`` told.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it told no such thing.
    """
    match value:
        case {"dtype": name}:
            dtype = getattr(torch, name)
            require(isinstance(dtype, torch.dtype), f"{name} is no dtype")
            return dtype
        case {"pool": path, "slots": size}:
            rows = tensors[path]
            pool = rows.new_zeros((int(size), *rows.shape[1:]))
            pool[tensors[f"{path}.slots"]] = rows
            return pool
        case {"tensor": path}:
            return tensors[path]
        case {"mapping": parts}:
            return {key: unpack(part, tensors, kinds) for key, part in parts.items()}
        case {"buffers": sizes}:
            return VerifyBuffers(**sizes)
        case {"object": name, "fields": parts}:
            return kinds[name](
                **{field: unpack(part, tensors, kinds) for field, part in parts.items()}
            )
        case list():
            return tuple(unpack(item, tensors, kinds) for item in value)
    return value

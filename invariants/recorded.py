"""Recorded calls of public functions: a captured call's file that also holds the function's name and its
arguments.

``ddtree check`` reads the fields of the call, ``ddtree replay`` the function and its arguments. The file is
one of
safetensors: the arguments' tensors are named ``argument.<path>``, and the structure stands as JSON in the
file's metadata. Of a KV pool only the slots that the call speaks of are kept. Nothing is ever unpickled.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.capture import (
    FUNCTION,
    VIOLATION,
    kind_of,
    require_kind,
    require_writable,
    save,
)
from ddtree.spec import contracts
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import PagedKV, VerifyLayout
from ddtree.spec.errors import InputError, require
from ddtree.spec.sampling import Sampling

ARGUMENTS = "ddtree.arguments"
PREFIX = "argument."
"""What names of tensors begin with that are arguments, no fields of a call."""

_OBJECTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        contracts.DraftTree, contracts.VerifyLayout, contracts.FlatMask, contracts.PackedMask,
        contracts.DenseMask, contracts.BitMask, contracts.Acceptance, contracts.Commit, PagedKV, Sampling,
    )
}  # fmt: skip
_POOLS = ("key_pool", "value_pool", "keys", "values")


@dataclass(frozen=True)
class Recorded:
    """What a file tells of a function's call."""

    function: str
    arguments: dict[str, Any]


def record(
    path: Path, function: str, given: Mapping[str, Any], call: Call | None, why: str = ""
) -> Path:
    """Write a function's call: its arguments, as far as they can be written, and the fields of the call.

    Args:
        path: ends in ``.safetensors``; replaced if there.
        function: the public name.
        given: its arguments by name.
        call: what an invariant may ask for; None: nothing is known.
        why: what was broken, in one line.

    Raises:
        InputError: a place that cannot be written, or nothing to write.
    """
    path = require_writable(path)
    tensors = {
        name: torch.as_tensor(value) for name, value in (call.known() if call else {}).items()
    }
    metadata = {FUNCTION: function} | ({VIOLATION: why} if why else {})
    slots = _slots(given)
    try:
        kept: dict[str, Tensor] = {}
        structure = {
            name: _plain(value, f"{PREFIX}{name}", kept, slots) for name, value in given.items()
        }
    except InputError:  # a target, a model: then the call alone
        pass
    else:
        tensors |= kept
        metadata[ARGUMENTS] = json.dumps(structure)
    require(bool(tensors), f"nothing of the call of {function} can be written")
    # every tensor by itself: safetensors refuses tensors that share memory
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        save(tensors, temporary, metadata)
        temporary.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"cannot write {path}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read(path: Path) -> Recorded:
    """Read a function's call.

    Raises:
        InputError: no safetensors file, or one without a function or without its arguments.
    """
    require(path.is_file(), f"there is no file {path}")
    require_kind(path)
    require(
        kind_of(path) != ".npz",
        f"{path} names no function: an .npz file holds a call's metadata alone, which `ddtree check` reads",
    )
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names if name.startswith(PREFIX)}
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path} is no safetensors file: {error}") from None
    require(
        FUNCTION in metadata,
        f"{path} names no function: it holds a call's metadata alone, which `ddtree check` reads; debug mode "
        "writes functions with their arguments (action='dump')",
    )
    require(
        ARGUMENTS in metadata,
        f"{path} holds no arguments: {metadata[FUNCTION]} was given what no file holds, such as a model",
    )
    try:
        structure = json.loads(metadata[ARGUMENTS])
        arguments = {name: _made(value, tensors) for name, value in structure.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: the arguments cannot be read: {error}") from None
    return Recorded(metadata[FUNCTION], arguments)


def _slots(given: Mapping[str, Any]) -> Tensor:
    """Pool slots that a call reads or writes."""
    layout = given.get("layout")
    if not isinstance(layout, VerifyLayout):
        return torch.zeros(0, dtype=torch.int64)
    end = min(max(int(layout.kv_indptr[-1]), 0), layout.kv_indices.numel())
    slots = [layout.kv_indices[:end], layout.out_cache_loc]
    table = getattr(given.get("kv"), "slot_table", None)
    if isinstance(table, Tensor):
        slots.append(table.flatten())
    used: Tensor = torch.cat([part.long() for part in slots]).unique()
    return used


def _plain(value: Any, path: str, kept: dict[str, Tensor], slots: Tensor) -> Any:
    """A value as JSON; its tensors go to ``kept``, named by ``path``."""
    name = path.rsplit(".", 1)[-1] if not path.rsplit(".", 1)[-1].isdigit() else path.split(".")[-2]
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case Tensor() if name in _POOLS and value.ndim == 3:
            live = slots[(slots >= 0) & (slots < value.shape[0])].to(value.device)
            kept[path], kept[f"{path}.slots"] = value[live], live
            return {"pool": path, "slots": value.shape[0]}
        case Tensor():
            kept[path] = value
            return {"tensor": path}
        case tuple():
            return [_plain(item, f"{path}.{i}", kept, slots) for i, item in enumerate(value)]
        case VerifyBuffers():
            sizes = ("max_batch", "max_q_len", "max_context", "pad_slot")
            return {"buffers": {size: getattr(value, size) for size in sizes}}
    if is_dataclass(value) and type(value).__name__ in _OBJECTS:
        parts = {
            f.name: _plain(getattr(value, f.name), f"{path}.{f.name}", kept, slots)
            for f in fields(value)
        }
        return {"object": type(value).__name__, "fields": parts}
    raise InputError(f"a {type(value).__name__} cannot be written")


def _made(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that ``_plain`` told."""
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
        case {"buffers": sizes}:
            return VerifyBuffers(**sizes)
        case {"object": name, "fields": parts}:
            return _OBJECTS[name](**{field: _made(part, tensors) for field, part in parts.items()})
        case list():
            return tuple(_made(item, tensors) for item in value)
    return value

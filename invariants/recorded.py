"""Recorded calls of public functions: a captured call's file that also holds the function's name and its
arguments.

``ddtree check`` reads the fields of the call, ``ddtree replay`` the function and its arguments. The file is
one of safetensors: the arguments' tensors are named ``argument.<path>``, and the structure stands as JSON in
the file's metadata (``packed.py``). Of a KV pool only the slots that the call speaks of are kept.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
from ddtree.invariants.packed import pack, unpack
from ddtree.spec.contracts import VerifyLayout
from ddtree.spec.errors import InputError, require

ARGUMENTS = "ddtree.arguments"
PREFIX = "argument."
"""What names of tensors begin with that are arguments, no fields of a call."""


@dataclass(frozen=True)
class Recorded:
    """What a file tells of a function's call."""

    function: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Beside:
    """What a file holds beside a call: tensors by names of their own, and words by theirs."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def record(
    path: Path,
    function: str,
    given: Mapping[str, Any],
    call: Call | None,
    why: str = "",
    beside: Beside | None = None,
) -> Path:
    """Write a function's call: its arguments, as far as they can be written, and the fields of the call.

    Args:
        path: ends in ``.safetensors``; replaced if there.
        function: the public name.
        given: its arguments by name.
        call: what an invariant may ask for; None: nothing is known.
        why: what was broken, in one line.
        beside: what else the file is to hold.

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
            name: pack(value, f"{PREFIX}{name}", kept, slots) for name, value in given.items()
        }
    except InputError:  # a target, a model: then the call alone
        pass
    else:
        tensors |= kept
        metadata[ARGUMENTS] = json.dumps(structure)
    if beside is not None:
        tensors |= beside.tensors
        metadata |= beside.metadata
    require(bool(tensors), f"nothing of the call of {function} can be written")
    # every tensor by itself: safetensors refuses tensors that share memory
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save(path, tensors, metadata)
    return path


def read(path: Path) -> Recorded:
    """Read a function's call.

    Raises:
        InputError: no safetensors file, or one without a function or without its arguments.
    """
    require(not path.is_dir(), f"{path} is a folder, not a file")
    require(path.is_file(), f"there is no file {path}")
    require_kind(path)
    require(
        kind_of(path) != ".npz",
        f"{path} names no function: an .npz file holds a call's metadata alone, which `ddtree check` reads",
    )
    metadata, tensors = held(path, PREFIX)
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
        arguments = {name: unpack(value, tensors) for name, value in structure.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: the arguments cannot be read: {error}") from None
    return Recorded(metadata[FUNCTION], arguments)


def held(path: Path, prefix: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A file's metadata, and its tensors whose names begin with ``prefix``.

    Raises:
        InputError: no safetensors file.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 # no dict
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path} is no safetensors file: {error}") from None


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

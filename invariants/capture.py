"""Captured calls on disk: one ``.safetensors`` or ``.npz`` file, tensors named by ``Call``'s fields.

A file may hold more than that, as engines' dumps do: other fields are not read, and named. Nothing is ever
unpickled, and a file is whole or absent: it is written beside its place and renamed.
"""

import os
import warnings
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.invariants.call import FIELDS, Call
from ddtree.invariants.files import PlaceError, written_whole
from ddtree.spec.errors import InputError, require

SUFFIXES = (".safetensors", ".npz")
FUNCTION = "ddtree.function"
VIOLATION = "ddtree.violation"
"""Metadata of a recorded function (``recorded.py``): its name, and what was broken."""

OTHERS = ("argument.", "case.")
"""What names of tensors begin with that are no fields, and no mistakes either: a recorded function's
arguments (``recorded.py``), and a stored case of conformance (``conformance/stored.py``)."""

_CLOSE = 0.85
"""How much a name must resemble a field's for a suggestion: one or two letters of a dozen."""
_NOTES = {
    "seq_lens": "engines differ in what it counts; prefix_lens is the committed entries alone"
}
"""Names of engines that look like a field and are none for certain."""
_DTYPES = {
    "index": "int32 or int64",
    "float": "a floating dtype",
    "bytes": "uint8",
    "any": "bool or uint8",
    "number": "one int32 or int64",
    "flag": "one bool",
}
"""What a field of each kind is best written as."""


@dataclass(frozen=True)
class Captured:
    """What a file holds."""

    call: Call
    not_read: dict[str, str]
    """Names that are no field of a call, each with what was perhaps meant, or an empty string."""


def dump(path: str | Path, *objects: object, call: Call | None = None, **known: Any) -> Path:
    """Write one captured call and return where.

    Args:
        path: ends in ``.safetensors`` or ``.npz``; replaced if there.
        objects: contract objects, as for ``Call.of``.
        call: or the call itself, in place of objects and fields.
        known: single fields by name.

    Raises:
        InputError: another suffix, no such folder, a place that cannot be written, an unknown field,
            or nothing to write.
    """
    require(
        call is None or not (objects or known), "give dump a call, or what it is made of, not both"
    )
    made = Call.of(*objects, **known) if call is None else call
    tensors = {
        n: torch.as_tensor(v).detach().cpu().contiguous().clone() for n, v in made.known().items()
    }
    path = require_writable(path)
    require(bool(tensors), "the call to dump holds no field")
    save(path, tensors)
    return path


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name, whole or not at all.

    Raises:
        PlaceError: the place cannot be written.
        InputError: the file's kind cannot hold a tensor's dtype.
    """
    arrays: dict[str, Any] = {}
    if path.suffix == ".npz":
        arrays = {name: _to_numpy(name, value) for name, value in tensors.items()}
    try:
        with written_whole(path) as work:
            if path.suffix == ".npz":
                np.savez(work, **arrays)
            else:
                save_file(tensors, work, metadata)
    except (OSError, safetensors.SafetensorError) as error:
        raise PlaceError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}", error
        ) from None


def kind_of(path: Path) -> str:
    """The suffix that a file's first bytes ask for; empty where they are neither kind's."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError:
        return ""
    return ".npz" if head[:4] == b"PK\x03\x04" else ".safetensors" if head[8:] == b"{" else ""


def require_kind(path: Path) -> None:
    """Refuse a file of one kind that bears the suffix of the other.

    Raises:
        InputError: it is so.
    """
    kind = kind_of(path)
    require(
        not kind or kind == path.suffix,
        f"{path} is {'an' if kind == '.npz' else 'a'} {kind} file by its first bytes: rename it to "
        f"{path.with_suffix(kind).name}",
    )


def load(path: str | Path) -> Call:
    """Read one captured call; warn of names in the file that are no field of a call.

    Raises:
        InputError: as ``read``.
    """
    captured = read(path)
    if captured.not_read:
        names = ", ".join(named(name, why) for name, why in captured.not_read.items())
        warnings.warn(f"{path}: not read: {names}", UserWarning, stacklevel=2)
    return captured.call


def read(path: str | Path) -> Captured:
    """Read one captured call, and list what else the file holds.

    Raises:
        InputError: no such file, a file of another kind, no known field at all, or a field of a wrong
            dtype or shape.
    """
    path = _suffixed(path)
    require(not path.is_dir(), f"{path} is a folder, not a file")
    require(path.is_file(), f"there is no file {path}")
    require_kind(path)
    names, arrays = _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    other = {n: _meant(n, arrays) for n in names if n not in FIELDS and not n.startswith(OTHERS)}
    if not arrays and (dumped := function_in(path)):
        raise InputError(f"{path} holds no field of a captured call: {dumped}")
    require(bool(arrays), _no_field(path, other))
    try:
        return Captured(Call(**arrays), other)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def function_in(path: Path) -> str:
    """What a file tells of the function whose arguments it holds; empty where it holds none."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (safetensors.SafetensorError, OSError):
        return ""
    if FUNCTION not in metadata:
        return ""
    why = f", dumped because {metadata[VIOLATION]}" if VIOLATION in metadata else ""
    return f"it holds the arguments of {metadata[FUNCTION]}{why}"


def named(name: str, why: str) -> str:
    """A name that was not read, with what was perhaps meant."""
    return f"{name} ({why})" if why else name


def require_writable(path: str | Path) -> Path:
    """The path, if a captured call can be written there.

    Raises:
        InputError: another suffix, no such folder, or a place that cannot be written.
    """
    path = _suffixed(path)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise PlaceError(f"there is no folder {folder} to write {path.name} to")
    if path.is_dir():
        raise PlaceError(f"cannot write {path}: it is a folder")
    if not os.access(folder, os.W_OK):
        raise PlaceError(f"cannot write {path}: its folder is not writable")
    return path


def _suffixed(path: str | Path) -> Path:
    path = Path(path)
    end = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
    require(
        path.suffix in SUFFIXES or path.is_dir(),
        f"{path} {end}; a captured call is one of {', '.join(SUFFIXES)}",
    )
    return path


def _meant(name: str, present: Iterable[str]) -> str:
    """What a name that is no field was perhaps meant for: a field that the file does not have."""
    if name in _NOTES:
        return _NOTES[name]
    near = get_close_matches(name, FIELDS.keys() - set(present), n=1, cutoff=_CLOSE)
    return f"did you mean {near[0]}?" if near else ""


def _no_field(path: Path, other: dict[str, str]) -> str:
    """The message for a file without any known field: what it holds, and all names that are known."""
    found = ", ".join(named(name, why) for name, why in other.items()) or "nothing"
    known = wrap(", ".join(FIELDS), 76, break_long_words=False)
    return "\n".join(
        [
            f"{path} holds no field of a captured call",
            f"  found: {found}",
            "  known:",
            *(f"    {line}" for line in known),
        ]
    )


Arrays = tuple[list[str], dict[str, Any]]
"""All names of a file, and the tensors of those that are fields."""


def _read_safetensors(path: Path) -> Arrays:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = list(file.keys())
            arrays = {name: file.get_tensor(name) for name in names if name in FIELDS}
    except (safetensors.SafetensorError, OSError, KeyError) as error:
        raise InputError(f"{path} is no safetensors file: {error}") from None
    for name, value in arrays.items():
        _require_signed(path, name, str(value.dtype).removeprefix("torch."))
    return names, arrays


def _read_npz(path: Path) -> Arrays:
    with path.open("rb") as file:
        is_array = file.read(6) == b"\x93NUMPY"
    require(not is_array, f"{path} is one array, no .npz archive of named arrays")
    require(zipfile.is_zipfile(path), f"{path} is no .npz archive, or it is cut short")
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)
            arrays = {name: _array(path, name, archive) for name in names if name in FIELDS}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is a damaged .npz archive: {error}") from None
    return names, arrays


def _array(path: Path, name: str, archive: Any) -> Tensor:
    """One array of the archive; numpy's own advice, to unpickle, is never passed on."""
    try:
        array = archive[name]
    except ValueError:
        raise InputError(
            f"{path}: {name} is no plain array of numbers; write it as {_wanted(name)}"
        ) from None
    _require_signed(path, name, str(array.dtype))
    try:
        # ascontiguousarray makes one axis of none
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    except TypeError:
        raise InputError(
            f"{path}: {name} has dtype {array.dtype}; write it as {_wanted(name)}"
        ) from None


def _require_signed(path: Path, name: str, dtype: str) -> None:
    require(
        dtype not in {"uint16", "uint32", "uint64"},
        f"{path}: {name} has dtype {dtype}; write it as {_wanted(name)}",
    )


def _wanted(name: str) -> str:
    return _DTYPES[FIELDS[name].metadata["kind"]]


def _to_numpy(name: str, value: Tensor) -> np.ndarray[Any, Any]:
    require(
        value.dtype is not torch.bfloat16,
        f"{name} is bfloat16, which .npz cannot hold; write .safetensors",
    )
    array: np.ndarray[Any, Any] = value.numpy()
    return array

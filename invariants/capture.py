"""Captured calls on disk: one ``.safetensors`` or ``.npz`` file, tensors named by ``Call``'s fields.

Nothing is ever unpickled, and a file is whole or absent: it is written beside its place and renamed.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree.invariants.call import FIELDS, Call, unknown_name
from ddtree.spec.errors import InputError, require

SUFFIXES = (".safetensors", ".npz")


def dump(path: str | Path, *objects: object, call: Call | None = None, **known: Any) -> Path:
    """Write one captured call and return where.

    Args:
        path: ends in ``.safetensors`` or ``.npz``; replaced if there.
        objects: contract objects, as for ``Call.of``.
        call: or the call itself, in place of objects and fields.
        known: single fields by name.

    Raises:
        InputError: another suffix, no such folder, an unknown field, or nothing to write.
    """
    path = _suffixed(path)
    require(
        call is None or not (objects or known), "give dump a call, or what it is made of, not both"
    )
    made = Call.of(*objects, **known) if call is None else call
    tensors = {
        n: torch.as_tensor(v).detach().cpu().contiguous().clone() for n, v in made.known().items()
    }
    require(bool(tensors), "the call to dump holds no field")
    require(path.parent.is_dir(), f"there is no folder {path.parent} to write {path.name} to")
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        if path.suffix == ".npz":
            arrays: dict[str, Any] = {n: _to_numpy(n, value) for n, value in tensors.items()}
            np.savez(temporary, **arrays)
        else:
            save_file(tensors, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def load(path: str | Path) -> Call:
    """Read one captured call.

    Raises:
        InputError: no such file, a file of another kind, an unknown field (the nearest right name
            is given), or a field of a wrong dtype or shape.
    """
    path = _suffixed(path)
    require(path.is_file(), f"there is no file {path}")
    arrays = _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    for name in arrays:
        if name not in FIELDS:
            raise InputError(f"{path}: {unknown_name(name)}")
    require(bool(arrays), f"{path} holds no field of a captured call")
    try:
        return Call(**arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _suffixed(path: str | Path) -> Path:
    path = Path(path)
    require(
        path.suffix in SUFFIXES,
        f"{path} ends in {path.suffix!r}; a captured call is one of {', '.join(SUFFIXES)}",
    )
    return path


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError, KeyError) as error:
        raise InputError(f"{path} is no safetensors file: {error}") from None


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            require(
                isinstance(archive, np.lib.npyio.NpzFile), f"{path} is one array, no .npz archive"
            )
            return {
                name: torch.from_numpy(np.ascontiguousarray(archive[name])).reshape(
                    archive[name].shape
                )
                for name in archive.files
            }
    except InputError:
        raise
    except (ValueError, TypeError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is no .npz file of plain arrays: {error}") from None


def _to_numpy(name: str, value: Tensor) -> np.ndarray[Any, Any]:
    require(
        value.dtype is not torch.bfloat16,
        f"{name} is bfloat16, which .npz cannot hold; write .safetensors",
    )
    array: np.ndarray[Any, Any] = value.numpy()
    return array

"""Files written whole or not at all: a run may be killed at any moment."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ddtree.invariants.files import written_whole


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, and its folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as work:
        work.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, indented."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with written_whole(path) as work:
        save_file(whole, work, metadata=dict(metadata))


def sha256(path: Path) -> str:
    """A file's digest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

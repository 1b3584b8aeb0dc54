"""What the file of a failing case tells of the failure, for whoever reads the file alone.

It stands in the file's metadata as JSON; what the rows saw, where that is known, is a tensor of the file.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import safetensors
from torch import Tensor

FAILED = "ddtree.failed"
"""Metadata: the failure."""
SEEN = "case.seen"
"""The tensor's name."""


@dataclass(frozen=True)
class Failed:
    """One property that a backend broke, as the run told it."""

    backend: str
    property: str
    statement: str
    """What must hold."""
    what: str
    """What the backend did otherwise."""
    called: str
    """``smallest case``, or what else the case is."""
    case: str
    note: str = ""
    """What else is known: that it fails only after other calls."""
    seen: Tensor | None = None
    """``[T, entries]`` int8, by ``oracle.seen_sets``: the entries that each row saw; None: not known."""

    def packed(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Metadata and tensors for a file."""
        told = asdict(replace(self, seen=None))
        return {FAILED: json.dumps(told)}, {} if self.seen is None else {SEEN: self.seen}


def failed_in(path: Path) -> Failed | None:
    """The failure that a file tells of; None where it tells of none."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            has_seen = SEEN in file.keys()  # noqa: SIM118 # no dict
            seen = file.get_tensor(SEEN) if has_seen else None
        return Failed(**{**json.loads(metadata[FAILED]), "seen": seen})
    except (safetensors.SafetensorError, OSError, KeyError, ValueError, TypeError):
        return None

"""Cases on disk: a file that ``ddtree check`` and ``ddtree replay`` read, and that holds the whole case too.

The case is what was drawn: the verify pass with its memory, how it is run (eager, in fixed buffers, captured
with an earlier call), and the seed and options that its inputs are made from. Its tensors are named
``case.<path>``; the rest stands as JSON in the file's metadata.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ddtree.invariants.capture import kind_of, require_kind
from ddtree.invariants.conformance.attend import AttentionCase
from ddtree.invariants.conformance.backend import Backend
from ddtree.invariants.conformance.failed import Failed
from ddtree.invariants.conformance.failure import ONLY_AFTER_OTHERS, smallest
from ddtree.invariants.conformance.properties import (
    PROPERTIES,
    Case,
    Property,
    arguments_of,
    captured_call,
    visible_difference,
    visible_rows,
)
from ddtree.invariants.conformance.steps import StepCase
from ddtree.invariants.packed import CONTRACTS, pack, unpack
from ddtree.invariants.recorded import Beside, held, record
from ddtree.invariants.strategies import SlotTable, VerifyCall
from ddtree.spec.errors import InputError, require

PROPERTY, CASE, ALONE = "ddtree.property", "ddtree.case", "ddtree.right-alone"
"""Metadata: which property the case failed, the case, and whether it fails only after other calls."""
PREFIX = "case"
_KINDS = {
    **CONTRACTS,
    **{kind.__name__: kind for kind in (AttentionCase, StepCase, VerifyCall, SlotTable)},
}


@dataclass(frozen=True)
class Told:
    """How a case failed."""

    what: str
    """What the backend does otherwise."""
    was_cut: bool = False
    """Time was up before the case was the smallest."""
    is_alone_right: bool = False
    """A new object of the backend passes it."""


def write(
    folder: Path, backend: Backend, prop: Property, case: Case, failure: Told | None = None
) -> Path:
    """Write a case of a backend, named by both, with what the backend makes of it and how it failed."""
    name = "-".join("".join(c if c.isalnum() else " " for c in f"{backend.name} {prop.id}").split())
    tensors: dict[str, Tensor] = {}
    told = json.dumps(pack(case, PREFIX, tensors, kinds=_KINDS))
    words: dict[str, str] = {}
    rows: dict[str, Tensor] = {}
    if failure is not None:
        words, rows = _failed(backend, prop, case, failure).packed()
        words |= {ALONE: "true"} if failure.is_alone_right else {}
    return record(
        folder / f"{name}.safetensors",
        prop.function,
        arguments_of(case),
        captured_call(backend, case),
        beside=Beside(tensors | rows, {PROPERTY: prop.id, CASE: told} | words),
    )


def _failed(backend: Backend, prop: Property, case: Case, failure: Told) -> Failed:
    """The failure for whoever reads the file alone."""
    seen = None
    if isinstance(case, AttentionCase) and prop.difference is visible_difference:
        seen = visible_rows(backend, case, failure.what)
    return Failed(
        backend.name,
        prop.id,
        prop.statement,
        failure.what,
        smallest(was_cut=failure.was_cut),
        str(case),
        ONLY_AFTER_OTHERS if failure.is_alone_right else "",
        seen,
    )


def read(path: Path) -> tuple[Property, Case, bool]:
    """Read a case, the property that it failed, and whether it did so only after other calls.

    Raises:
        InputError: no such file, one without a case, or of another version.
    """
    require(not path.is_dir(), f"{path} is a folder, not a file")
    require(path.is_file(), f"there is no file {path}")
    require_kind(path)
    metadata, tensors = ({}, {}) if kind_of(path) == ".npz" else held(path, f"{PREFIX}.")
    require(
        metadata.keys() >= {PROPERTY, CASE},
        f"{path} holds no case of ddtree conform, which writes one for each property that is broken",
    )
    found = [prop for prop in PROPERTIES if prop.id == metadata[PROPERTY]]
    require(bool(found), f"{path} is a case of {metadata[PROPERTY]!r}, which is no property here")
    try:
        case = unpack(json.loads(metadata[CASE]), tensors, _KINDS)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: the case cannot be read: {error}") from None
    kind = AttentionCase if found[0].function == "verify_attention" else StepCase
    require(isinstance(case, kind), f"{path}: its case is none of {found[0].id!r}")
    return found[0], case, metadata.get(ALONE) == "true"

"""Reference, checker and tools for draft-tree speculative decoding (DDTree).

``ddtree.generate`` generates text; ``ddtree.spec`` is the reference, ``ddtree.invariants`` the checker,
``ddtree.decoding`` targets, drafters and decoding. The names below are imported when first used, so that
the command line answers at once; ``DDTREE_DEBUG=1`` turns debug mode on at import.
"""

import os
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree.decoding.completion import generate
    from ddtree.decoding.tuning import tune
    from ddtree.invariants import (
        InvariantViolation,
        check,
        debug,
        dump,
        load,
        report,
        violations,
    )
    from ddtree.spec import (
        BlockSize,
        Budget,
        Depth,
        Horizon,
        InputError,
        NumNodes,
        PrefixLen,
        QLen,
        Row,
    )

__version__ = "0.1.0"

__all__ = [
    "BlockSize",
    "Budget",
    "Depth",
    "Horizon",
    "InputError",
    "InvariantViolation",
    "NumNodes",
    "PrefixLen",
    "QLen",
    "Row",
    "__version__",
    "check",
    "debug",
    "dump",
    "generate",
    "load",
    "report",
    "tune",
    "violations",
]

_DECODING = {"generate": "ddtree.decoding.completion", "tune": "ddtree.decoding.tuning"}
_CHECKER = {"InvariantViolation", "check", "debug", "dump", "load", "report", "violations"}


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name not in __all__:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}")
    home = "ddtree.invariants" if name in _CHECKER else _DECODING.get(name, "ddtree.spec")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


def _is_command() -> bool:
    """Whether this process is the ``ddtree`` command, which says itself what is wrong with a setting."""
    return Path(sys.argv[0]).stem == "ddtree" or ("-m", "ddtree") in pairwise(sys.orig_argv)


if os.environ.get("DDTREE_DEBUG"):
    try:
        import_module("ddtree.invariants")
    except ValueError:
        if not _is_command():
            raise

"""What a failure is told as: a backend's exception with its place in the backend's own file, and the case."""

import sysconfig
import traceback
from pathlib import Path

import torch

from ddtree.invariants.conformance.patience import Endless
from ddtree.spec import errors

_OURS = tuple(
    f"{Path(folder).resolve()}/"
    for folder in (
        Path(__file__).parent.parent,  # invariants
        Path(errors.__file__).resolve().parent,  # spec
        Path(errors.__file__).parent.parent / "cli",
    )
)
_LIBRARIES = tuple(
    f"{Path(folder).resolve()}/"
    for folder in (
        Path(torch.__file__).parent,
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    )
)


class WrongResult(Exception):
    """A backend returned what cannot be compared; the message says what, and what was expected."""


ONLY_AFTER_OTHERS = (
    "it fails only after other calls: a new object of the backend passes this case by itself, so what "
    "earlier calls left in it decides"
)
FAILED_AFTER_OTHERS = (
    "when it was written, it failed only after other calls: a new object passed it by itself"
)
HELD_AGAIN = (
    "it was written for a failure: that was mended since, or it fails only after other calls"
)


def smallest(*, was_cut: bool) -> str:
    """What a case is called that shrinking ended with, or that it was at when time was up."""
    return "smallest found (time was up)" if was_cut else "smallest case"


def told_of(error: BaseException) -> str:
    """``it raised ValueError: boom (mine.py:7)``; of a wrong result or a lost call what it is."""
    if isinstance(error, WrongResult):
        return str(error)
    first, place = str(error).strip().splitlines(), place_of(error)
    if isinstance(error, Endless):
        return f"it did not return in time: a loop without an end?{f' ({place})' if place else ''}"
    said = f"{type(error).__name__}{': ' + first[0] if first else ''}"
    return f"it raised {said}{f' ({place})' if place else ''}"


def place_of(error: BaseException) -> str:
    """``file:line`` of the innermost frame neither ours nor a library's, or else of a library's; or empty."""
    frames = [
        (str(Path(f.filename).resolve()), f.lineno)
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith("<")  # <frozen importlib>
    ]
    theirs = [frame for frame in frames if not frame[0].startswith(_OURS)]
    own = [frame for frame in theirs if not frame[0].startswith(_LIBRARIES)]
    if not theirs:
        return ""
    name, line = (own or theirs)[-1]
    path = Path(name)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"

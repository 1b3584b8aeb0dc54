"""What a backend's exception is told as, with its place in the backend's own file."""

import sysconfig
import traceback
from pathlib import Path

import torch

from ddtree.spec import errors

_OURS = tuple(
    f"{Path(folder).resolve()}/"
    for folder in (
        Path(__file__).parent.parent,  # invariants
        Path(errors.__file__).resolve().parent,  # spec
        Path(torch.__file__).parent,
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    )
)


class WrongResult(Exception):
    """A backend returned what cannot be compared; the message says what, and what was expected."""


def told_of(error: BaseException) -> str:
    """``it raised ValueError: boom (mine.py:7)``; of a wrong result what it is."""
    if isinstance(error, WrongResult):
        return str(error)
    first = str(error).strip().splitlines()
    return f"it raised {type(error).__name__}{': ' + first[0] if first else ''} ({place_of(error)})"


def place_of(error: BaseException) -> str:
    """``file:line`` of the innermost frame that is neither ours nor a library's, or else of the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no place known"
    own = [f for f in frames if not str(Path(f.filename).resolve()).startswith(_OURS)]
    # the interpreter's own, such as <frozen importlib>, and the command that called are no backend's
    own = [f for f in own if not f.filename.startswith("<")]
    frame = (own or frames)[-1]
    path = Path(frame.filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{frame.lineno}"

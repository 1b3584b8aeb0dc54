"""What the verbs print: reports on stdout, progress and errors on stderr, files whole or not at all."""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

BROKEN, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit codes: something checked did not hold; the request could not be carried out; Ctrl-C."""


class Say(Protocol):
    """Says what is going on."""

    def __call__(self, text: str, *, passing: bool = False) -> None:
        """Show ``text``."""
        ...


def stdout() -> Console:
    """The console for reports. Made for each use, so that a redirected stdout is respected."""
    return Console(highlight=False)


def stderr() -> Console:
    """The console for progress and errors."""
    return Console(stderr=True, highlight=False)


def command(*words: object) -> str:
    """A command line to copy, its words quoted where a shell needs it."""
    return shlex.join(map(str, words))


def fail(message: str, next_step: str = "", code: int = BAD_INPUT) -> NoReturn:
    """Say what was wrong and what to do next, on stderr, and leave with ``code``."""
    stderr().print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    if next_step:
        stderr().print(Text.assemble(("next: ", "bold"), next_step), soft_wrap=True)
    raise typer.Exit(code)


@contextmanager
def stdout_for_json() -> Iterator[None]:
    """Keep stdout for ``print_json``: what a backend, an engine or a kernel prints goes to stderr."""
    global _reports  # as sys.stdout is
    printed, kept = sys.stdout, (sys.stderr, _apart(sys.stdout))
    _reports, sys.stdout = kept, sys.stderr
    try:
        yield
    finally:
        # after a wrong command line this comes late, with the collected context: another may have begun
        if _reports is kept:
            _reports = None
        if sys.stdout is kept[0]:
            sys.stdout = printed


_reports: tuple[TextIO, TextIO] | None = None
"""While stdout is kept for JSON: what stands in its place, and where JSON goes."""


def _apart(stream: TextIO) -> TextIO:
    """The stream; for the process's own stdout a copy, and file 1 is stderr until the process ends.

    Libraries in C write to file 1, some of them only when the process ends.
    """
    try:
        is_own = stream.fileno() == 1
    except (OSError, ValueError):  # a stream of Python's, without a file
        is_own = False
    if not is_own:
        return stream
    stream.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w")


FOLDED = 12
"""Characters of a column of texts that can still be read."""


def print_table(table: Table) -> None:
    """Print the table; where it does not fit, each row as lines of ``column: value``.

    It does not fit where a word would be broken, but in columns of texts, which fold (``overflow``).
    """
    console = stdout()
    wide = console.options.update(width=10_000)

    def longest(column: Column) -> int:
        cells = [column.header, *column.cells]
        return max(Measurement.get(console, wide, cell).minimum for cell in cells)

    folded = sum(max(0, longest(c) - FOLDED) for c in table.columns if c.overflow == "fold")
    if Measurement.get(console, wide, table).minimum - folded <= console.width:
        console.print(table)
        return
    heads = [" ".join(str(column.header).split()) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for head, cell in zip(heads, row, strict=True):
            text = cell if isinstance(cell, Text) else Text(str(cell))
            if text.plain:
                console.print(Text.assemble((f"{head}: ", "bold"), text), soft_wrap=True)
        console.print()


def print_json(report: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Print one JSON object or list, and nothing else, on stdout; numbers that JSON lacks become null."""
    out = _reports[1] if _reports and sys.stdout is _reports[0] else sys.stdout
    out.write(json.dumps(_plain(report), indent=2) + "\n")  # ASCII: no terminal alters it
    out.flush()


def need(extra: str, *modules: str) -> None:
    """Leave with the install command unless the modules of an extra are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        fail(f"this needs {', '.join(missing)}", f"pip install 'ddtree[{extra}]'")


@contextmanager
def progress(message: str) -> Iterator[Say]:
    """A spinner on stderr; without a terminal, plain lines. Yields the function that says more.

    What is said with ``passing=True`` (a count) is for the spinner alone.
    """
    console = stderr()
    if console.is_terminal:
        with console.status(Text(message)) as status:
            yield lambda text, *, passing=False: status.update(Text(text))  # noqa: ARG005
        return

    def say(text: str, *, passing: bool = False) -> None:
        if not passing:
            console.print(Text(text), soft_wrap=True)

    say(message)
    yield say


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; without a terminal, a line for each thing that begins.

    Yields the function that is told how much is done, of how much, and what is going on.
    """
    console = stderr()
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    said = ""

    def show(done: int, most: int, what: str) -> None:
        nonlocal said
        if console.is_terminal:
            bar.update(task, completed=done, total=most, description=what)
        elif what != said:
            said = what
            console.print(Text(what), soft_wrap=True)

    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)
        yield show


FILES = {".png", ".svg", ".html", ".htm", ".json", ".safetensors", ".npz"}
"""What names of files that ddtree writes end in."""


def writable_folder(path: Path, option: str = "--out") -> Path:
    """The folder that an option names, made where it is missing; leaves when it cannot be written to.

    A name that ends as a file's does is taken for one that was meant as a file.
    """
    if path.suffix.lower() in FILES and not path.is_dir():
        fail(
            f"{path} ends in {path.suffix}, as a file; {option} takes the folder that files are written into",
            f"give a folder: {command(option, path.with_suffix(''))}",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        fail(f"cannot write into {path}: {error.strerror}", f"choose another folder with {option}")
    return path


def require_place(out: Path) -> None:
    """Leave if a file cannot be written there, before any work is done."""
    folder = out.absolute().parent
    if not folder.is_dir():
        fail(
            f"there is no folder {out.parent} to write {out.name} to",
            "make it, or choose another place",
        )
    if out.is_dir():
        fail(f"cannot write {out}: it is a folder", "choose another place")
    probe = folder / f".{out.stem}.{os.getpid()}{out.suffix}"
    try:  # what a folder allows, /proc for one, its mode does not tell
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror}", "choose another place")


def require_file(file: Path, otherwise: str = "") -> None:
    """Leave if there is no such file, before anything heavy is imported to read it."""
    if not file.exists():
        fail(f"there is no file {file}", f"check the path{otherwise and f'; {otherwise}'}")


def write_whole(path: Path, data: bytes) -> str:
    """Write the file, whole or not at all.

    Returns:
        What was done: ``wrote page.html``, or ``overwrote page.html``.
    """
    from ddtree.invariants.files import next_place, written_whole

    told = f"{'overwrote' if path.exists() else 'wrote'} {path}"
    try:
        with written_whole(path) as work:
            work.write_bytes(data)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}", next_place(error))
    return told


def counted(count: int, one: str, many: str = "") -> str:
    """``1 token``, ``2 tokens``."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def _plain(value: Any) -> Any:
    """The value with tuples as lists, paths as text and infinities as null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value

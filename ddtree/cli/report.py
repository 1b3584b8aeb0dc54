"""``ddtree report``: a violation, a conformance run or an isolation as one HTML page."""

import json
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree.cli.captured import read_call
from ddtree.cli.options import Json
from ddtree.cli.output import (
    command,
    fail,
    need,
    print_json,
    require_file,
    require_place,
    stdout,
    write_whole,
)

Html = Annotated[
    Path | None,
    typer.Option("--html", help="Write the outcome as one HTML page too.", metavar="PAGE.html"),
]

RUNS = (
    "a call is what `ddtree dump call.npz` writes, a run what `ddtree conform --json > run.json` or "
    "`ddtree isolate --json > cells.json` does"
)
"""The next step of whoever gave a file that no page is made of."""


def report(
    file: Annotated[
        Path,
        typer.Argument(
            help="A captured call (.safetensors, .npz), or the JSON of [bold]ddtree conform --json[/bold] or "
            "[bold]ddtree isolate --json[/bold]."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page. [dim]Default: beside the file, its name ending in .html.[/dim]",
            metavar="PAGE.html",
        ),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Turn a captured call, a conformance run or an isolation into one HTML page.

    Nothing on the page is loaded from anywhere: send the file to whoever has
    to see it. It reads in light and dark, on a phone, and without JavaScript.

    \b
    Of a call it shows
      what is broken, with the numbers and the likely cause
      each indptr as a ruler: where every segment should be, and where it is
      the draft tree, its accepted path and its padding
      the mask as a heat map: which bits leak, which are hidden
      every invariant: held, broken, not checked and why
    Of a failing case of ddtree conform: the property, what the backend did
    otherwise, and the mask as its rows saw it.
    Of a conformance run: each property, with its smallest failing case drawn.
    Of an isolation: the sentence, the factors, and the crossing behind it.

    Exit code: 0 the page is written, 2 the file cannot be read. Whether a call
    is sound is the exit code of ddtree check.

    \b
    Examples
      ddtree report call.safetensors --open
      ddtree conform mine.py:Mine --json > run.json; ddtree report run.json
      ddtree isolate mine.py:Mine --out cells.json; ddtree report cells.json
      ddtree conform mine.py:Mine --html run.html     the same in one step
    """
    out = file.with_suffix(".html") if out is None else out
    require_page(out)
    require_file(file, RUNS)
    _require_kind(file)
    title, page = _json_page(file) if file.suffix == ".json" else _call_page(file)
    wrote = write_whole(out, page)
    if as_json:
        print_json({"file": file, "page": out, "title": title})
    else:
        stdout().print(f"{title}\n{wrote}", markup=False, soft_wrap=True)
    if is_opened and not webbrowser.open(out.absolute().as_uri()):
        fail(f"no browser could be opened; the page is {out}", "open it by hand")


def _require_kind(file: Path) -> None:
    """Leave if no page is made of files with this suffix."""
    from ddtree.invariants.capture import SUFFIXES

    if file.suffix not in {*SUFFIXES, ".json"} and not file.is_dir():
        end = f"ends in {file.suffix!r}" if file.suffix else "has no suffix"
        fail(f"{file} {end}; a page is made of {', '.join(SUFFIXES)} or .json", RUNS)


def require_page(out: Path) -> None:
    """Leave if a page cannot be written there, before any work is done."""
    if out.suffix not in {".html", ".htm"}:
        fail(f"{out} is to be an HTML page", f"name it {command(out.with_suffix('.html'))}")
    require_place(out)


def _call_page(file: Path) -> tuple[str, bytes]:
    captured = read_call(file)
    from ddtree.invariants.conformance.failed import failed_in
    from ddtree.pictures.pages.call import Source, call_page

    source = Source(file, captured.not_read, _function(file), failed_in(file))
    return call_page(captured.call, source)


def _function(file: Path) -> str | None:
    """The function whose arguments the file holds; None where it holds none."""
    from ddtree.invariants.recorded import read
    from ddtree.spec.errors import InputError

    try:
        return read(file).function
    except InputError:
        return None


def _json_page(file: Path) -> tuple[str, bytes]:
    """The page of a run, told by what the JSON holds."""
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        fail(f"cannot read {file}: {error.strerror}", "check the path")
    except ValueError as error:
        fail(f"{file} is not JSON: {error}", "write it with --json > FILE, or with --out FILE")
    kinds = {"properties": conformance, "cells": isolation, "peers": peers}
    held = [make for key, make in kinds.items() if isinstance(data, dict) and key in data]
    if not held:
        fail(f"{file} is no run that a page can be made of{_other(data)}", RUNS)
    try:
        return held[0](data, file.absolute().parent)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        fail(
            f"{file} is damaged, or of another version: {type(error).__name__}: {error}",
            f"write it anew: {RUNS}",
        )


def _other(data: Any) -> str:
    """What JSON of another verb is better looked at with."""
    names = data if isinstance(data, dict) else {}
    if "not_checked" in names and "file" in names:
        return f": it is what ddtree check says of {names['file']}; give that file"
    if "requests" in names:
        return ": it is a generation; ddtree generate --trace PAGE.html writes one round by round"
    return ""


def conformance(data: dict[str, Any], folder: Path) -> tuple[str, bytes]:
    """The page of ``ddtree conform``."""
    from ddtree.pictures.pages.conformance import conformance_page

    return conformance_page(data, folder)


def isolation(data: dict[str, Any], folder: Path) -> tuple[str, bytes]:  # noqa: ARG001 # as its kin
    """The page of ``ddtree isolate``."""
    need("fuzz", "hypothesis")
    from ddtree.pictures.pages.isolation import isolation_page

    return isolation_page(data)


def peers(data: dict[str, Any], folder: Path) -> tuple[str, bytes]:  # noqa: ARG001 # as its kin
    """The page of a record of many peers."""
    from ddtree.pictures.pages.conformance import record_page

    return record_page(data)

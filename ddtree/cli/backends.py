"""The backend that ``conform`` and ``isolate`` are given: a name, ``module:object`` or ``file.py:object``."""

import importlib
import importlib.util
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree.cli.options import within
from ddtree.cli.output import command, fail, need, print_json, print_table, require_file, stdout

if TYPE_CHECKING:
    from ddtree.invariants.conformance import Backend

BackendName = Annotated[
    str | None,
    typer.Argument(
        metavar="BACKEND",
        help="[bold]module:object[/bold] or [bold]file.py:object[/bold] of yours, or a built-in name; "
        "none: list those.",
    ),
]
Seconds = Annotated[float, typer.Option(callback=within(1), help="Time for everything, roughly.")]


def find(name: str, verb: str) -> tuple["Backend", str]:
    """The backend, and what runs it: the versions of its packages.

    Leaves with a message and a next step if there is none or what it needs is missing.
    """
    module = name.rpartition(":")[0]
    if module.endswith(".py"):
        _require_module(Path(module))
    need("fuzz", "hypothesis")
    # it keeps what it reads of modules in .hypothesis of this folder, unless told another
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(gettempdir()) / "hypothesis"))
    from ddtree.peers.own import interpret_without_gpu

    interpret_without_gpu()  # before anything imports Triton
    from ddtree.catalogue.backends import BACKENDS
    from ddtree.invariants.conformance import Backend
    from ddtree.peers import PEERS, load

    for faulty in BACKENDS:
        if faulty.name == name:
            return Backend.of(faulty.make(), name), f"a demonstration: {faulty.what}"
    peer = PEERS.get(name)
    if peer is None and ":" not in name:
        fail(
            f"there is no built-in backend {name!r}, and yours is named module:object",
            f"ddtree {verb}  (lists the built-in ones)",
        )
    if peer is None:
        return _yours(name), name
    import torch

    if peer.cuda and not torch.cuda.is_available():
        fail(f"{name} needs a CUDA device, and there is none", command("ddtree", verb, "sdpa"))
    try:
        return Backend.of(load(peer.target), name), ", ".join(_versions(peer.packages))
    except ImportError as error:
        fail(f"{name} cannot be imported: {error}", peer.needs)


def _versions(packages: tuple[str, ...]) -> list[str]:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} of no known version")
    return found


def _yours(name: str) -> "Backend":
    """The object of a module on the path or in this folder, or of a file."""
    from ddtree.invariants.conformance import Backend
    from ddtree.invariants.conformance.failure import told_of
    from ddtree.peers import attribute_of
    from ddtree.spec.errors import InputError

    module, _, attribute = name.rpartition(":")
    try:
        loaded = _of_file(Path(module)) if module.endswith(".py") else _of_path(module)
    except (KeyboardInterrupt, typer.Exit):
        raise
    except ImportError as error:
        fail(f"{name} cannot be imported: {error}", "install what it imports, or correct the name")
    except BaseException as error:  # noqa: BLE001 # a module may raise anything, SystemExit too
        fail(f"{name} cannot be imported: {told_of(error)}", "mend the module")
    try:
        found = attribute_of(loaded, attribute)
    except AttributeError as error:
        fail(f"{name}: {error}", "name an object of that module: module:object")
    try:
        return Backend.of(found, name)
    except InputError as error:
        if error.__cause__ is None:
            fail(str(error), "ddtree conform --help  (says what a backend offers)")
        step = f"make the object in the module, mine = {attribute}(...), and name it {module}:mine"
        fail(str(error), step)


def _of_path(module: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(module)


def _require_module(path: Path) -> None:
    """Leave if there is no such file, before anything heavy is imported."""
    require_file(path)
    if path.is_dir():
        fail(f"{path} is a folder, not a file", "check the path")


def _of_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def list_backends(verb: str, *, as_json: bool) -> None:
    """Print the built-in names."""
    from rich.table import Table

    from ddtree.catalogue.backends import BACKENDS
    from ddtree.peers import PEERS

    if as_json:
        print_json(
            [
                *({"backend": n, "what": p.what, "needs_gpu": p.cuda} for n, p in PEERS.items()),
                *({"backend": f.name, "fault": f.what, "needs_gpu": False} for f in BACKENDS),
            ]
        )
        return
    table = Table(header_style="bold", pad_edge=False, box=None)
    for title in ("backend", "what it is"):
        table.add_column(title, overflow="fold")
    for name, peer in PEERS.items():
        table.add_row(name, peer.what + (" (needs a GPU)" if peer.cuda else ""))
    for faulty in BACKENDS:
        table.add_row(faulty.name, f"a fault to try it on: {faulty.what}")
    console = stdout()
    print_table(table)
    console.print(f"\nYours: ddtree {verb} module:object, or file.py:object")

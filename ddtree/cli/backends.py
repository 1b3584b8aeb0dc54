"""The backend that ``conform`` and ``isolate`` are given: a name, ``module:object`` or ``file.py:object``."""

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from ddtree.cli.options import within
from ddtree.cli.output import fail, need, stdout

BackendName = Annotated[
    str | None,
    typer.Argument(
        metavar="BACKEND",
        help="[bold]module:object[/bold] or [bold]file.py:object[/bold] of yours, or a built-in name; "
        "none: list those.",
    ),
]
Seconds = Annotated[float, typer.Option(callback=within(1), help="Time for everything, roughly.")]


def find(name: str, verb: str) -> tuple[Any, str]:
    """The object, and what runs it: the versions of its packages.

    Leaves with a message and a next step if there is none or what it needs is missing.
    """
    need("fuzz", "hypothesis")
    from ddtree.peers.own import interpret_without_gpu

    interpret_without_gpu()  # before anything imports Triton
    from ddtree.catalogue.backends import BACKENDS
    from ddtree.peers import PEERS, load

    for faulty in BACKENDS:
        if faulty.name == name:
            return faulty.make(), f"a demonstration: {faulty.what}"
    peer = PEERS.get(name)
    if peer is None and ":" not in name:
        fail(
            f"there is no built-in backend {name!r}, and yours is named module:object",
            f"ddtree {verb}  (lists the built-in ones)",
        )
    try:
        if peer is not None:
            import torch

            if peer.cuda and not torch.cuda.is_available():
                fail(f"{name} needs a CUDA device, and there is none", f"ddtree {verb} sdpa")
            return load(peer.target), ", ".join(_versions(peer.packages))
        return _yours(name), name
    except ImportError as error:
        step = peer.needs if peer is not None else "install what it imports, or correct the name"
        fail(f"{name} cannot be imported: {error}", step)
    except AttributeError as error:
        fail(f"{name}: {error}", "name an object of that module: module:object")


def _versions(packages: tuple[str, ...]) -> list[str]:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} of no known version")
    return found


def _yours(name: str) -> Any:
    """The object of a module on the path or in this folder, or of a file."""
    from ddtree.peers import load

    module, _, attribute = name.rpartition(":")
    if not module.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return load(name)
    path = Path(module)
    if not path.is_file():
        fail(f"there is no file {path}", "check the path")
    sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return load(f"{path.stem}:{attribute}")


def list_backends(verb: str) -> None:
    """Print the built-in names."""
    from rich.table import Table

    from ddtree.catalogue.backends import BACKENDS
    from ddtree.peers import PEERS

    table = Table(header_style="bold", pad_edge=False, box=None)
    for title in ("backend", "what it is"):
        table.add_column(title, overflow="fold")
    for name, peer in PEERS.items():
        table.add_row(name, peer.what + (" (needs a GPU)" if peer.cuda else ""))
    for faulty in BACKENDS:
        table.add_row(faulty.name, f"a fault to try it on: {faulty.what}")
    console = stdout()
    console.print(table)
    console.print(f"\nYours: ddtree {verb} module:object, or file.py:object")

"""What the scripts that stand for an engine's process share, and how they are run."""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree.invariants import InvariantViolation
from tests.processes import PYTHONPATH, ROOT


def declare_entry_points() -> None:
    """Let ``importlib.metadata`` find what pyproject.toml declares, whatever is installed here."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        groups = tomllib.load(file)["project"]["entry-points"]
    folder = Path(tempfile.mkdtemp()) / "ddtree-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in groups.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    sys.path.insert(0, str(folder.parent))


def caught(do: Callable[[], object]) -> list[Any] | None:
    """What a pass breaks, as its name, request and numbers; None: nothing."""
    try:
        do()
    except InvariantViolation as found:
        return [found.invariant, found.request, found.expected, found.found, found.hint]
    return None


def run_script(module: str, *arguments: str, folder: Path, **environment: str) -> tuple[Any, str]:
    """What a script prints in a process of its own, read from its last line, and what is logged there."""
    environment = {"DDTREE_DEBUG": "1", "DDTREE_DEBUG_DUMP_DIR": str(folder)} | environment
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": PYTHONPATH, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr

"""Files are whole or absent, have the mode of the umask, and nothing writes them in a way of its own."""

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ddtree.cli.output import write_whole
from ddtree.invariants import dump
from ddtree.invariants.files import written_whole
from ddtree.invariants.recorded import record
from train.files import write_bytes, write_json, write_tensors

ROOT = Path(__file__).resolve().parents[2]
ROWS = {"qo_indptr": torch.tensor([0, 3])}


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """One that neither safetensors nor tempfile has of itself."""
    before = os.umask(0o027)
    yield
    os.umask(before)


WRITERS: dict[str, Callable[[Path], object]] = {
    "dump.npz": lambda path: dump(path, qo_indptr=torch.tensor([0, 3])),
    "dump.safetensors": lambda path: dump(path, qo_indptr=torch.tensor([0, 3])),
    "record.safetensors": lambda path: record(path, "f", ROWS, None),
    "page.html": lambda path: write_whole(path, b"page"),
    "card.md": lambda path: write_bytes(path, b"card"),
    "result.json": lambda path: write_json(path, {"tokens": 3}),
    "weights.safetensors": lambda path: write_tensors(path, ROWS, {}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_has_the_mode_of_the_umask(name: str, tmp_path: Path) -> None:
    """Whoever may read other files may read it, and it stands alone in its folder."""
    WRITERS[name](tmp_path / name)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size > 0
    assert oct(path.stat().st_mode & 0o777) == "0o640"


def test_an_exception_leaves_the_old_file(tmp_path: Path) -> None:
    """Half of the new one is gone."""
    path = tmp_path / "a.json"
    path.write_text("old")

    def cut_short() -> None:
        with written_whole(path) as work:
            work.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_short()
    assert (list(tmp_path.iterdir()), path.read_text()) == ([path], "old")


def ways_around(source: str) -> list[str]:
    """What a module makes files with that ``written_whole`` does not govern, by name."""
    found = []
    governed: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.With) and "written_whole" in ast.unparse(node.items[0]):
            governed |= set(ast.walk(node))
        if isinstance(node, ast.Call) and node not in governed:
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            if name in {"save_file", "mkstemp", "mkdtemp", "NamedTemporaryFile", "savez"}:
                found.append(name)
    return found


def test_nothing_is_written_in_another_way() -> None:
    """What gives a file a mode of its own is called nowhere but in a block that mends it."""
    folders = ("spec", "invariants", "impl", "ddtree", "train", "bench", "tools")
    files = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    around = {str(path): found for path in files if (found := ways_around(path.read_text()))}
    assert around == {}
    assert len(files) > 200


def test_ways_around_are_found() -> None:
    """Each by itself; in the block none is."""
    for call in ("safetensors.torch.save_file(t, path)", "save_file(t, p)", "tempfile.mkdtemp()"):
        assert len(ways_around(call)) == 1
        assert not ways_around(f"with written_whole(path) as work:\n    {call}")

"""What the command says to do next: lines that can be copied, and tables that can be read."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.table import Table

from ddtree.cli import output
from ddtree.cli.app import guarded
from ddtree.invariants.capture import SUFFIXES
from ddtree.invariants.files import PlaceError
from tests.cli.conftest import Run

COMMAND = re.compile(
    r"(?:next: |^  |`)(ddtree [a-z]+ [^`(\n]*?|mv [^`\n]*?)(?:  \(|`|$)", re.MULTILINE
)


@pytest.mark.parametrize("name", ["a b.safetensors", "it's.npz", "$HOME;x.npz"])
def test_what_is_to_be_copied_is_quoted(run: Run, tmp_path: Path, name: str) -> None:
    """A shell reads the name of the file as one word, whatever is in it."""
    file = tmp_path / name
    broken = run("dump", file, "--budget", 3, "--fault", "width=2")
    checked = run("check", file)
    other = file.with_suffix(next(s for s in SUFFIXES if s != file.suffix))
    file.rename(other)
    renamed = run("check", other)
    missing = run("check", file)
    for said in (broken.stdout, checked.stdout, renamed.stderr, missing.stderr):
        (line,) = COMMAND.findall(said)
        assert {str(file), str(other)} & set(shlex.split(line)), said


def test_a_dump_says_what_it_overwrote(run: Run, tmp_path: Path) -> None:
    """A file that was there is named as overwritten, as a page is."""
    for told in ("wrote", "overwrote"):
        said = run("dump", tmp_path / "x.npz", "--budget", 3).stdout
        assert f"\n{told} {tmp_path / 'x.npz'}\n" in said


def test_a_missing_file_is_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """Every verb that reads one."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from ddtree.cli.app import app\n"
        "for args in (['check', 'x.npz'], ['show', 'x.npz'], ['replay', 'x.safetensors'],\n"
        "             ['report', 'x.npz'], ['report', 'x.json'], ['conform', 'x.py:Mine'],\n"
        "             ['conform', 'sdpa', '--case', 'x.npz'], ['isolate', 'x.py:Mine'],\n"
        "             ['generate', 'a', '--target', 'x.gguf'], ['tune', '--target', './x'],\n"
        "             ['generate', 'a', '--draft', './x'], ['tune', '--draft', './x'],\n"
        "             ['show', '--prompt', 'a', '--target', './x'],\n"
        "             ['dump', 'y.npz', '--prompt', 'a', '--draft', './x'],\n"
        "             ['generate', '--prompts', 'x.txt'], ['tune', '--prompts', 'x.txt']):\n"
        "    assert CliRunner().invoke(app, args).exit_code == 2, args\n"
        "    assert 'torch' not in sys.modules, args\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize(
    ("error", "following"),
    [
        (OSError(28, "No space left on device", "x.npz"), "make room there, or choose another"),
        (OSError(5, "Input/output error"), "ddtree --help"),
        (
            PlaceError("cannot write x.npz: its folder is not writable"),
            "next: choose another place",
        ),
        (PlaceError("cannot write x.npz: full", OSError(28, "full")), "next: make room there, or"),
    ],
)
def test_an_error_of_a_place_has_a_next_step(
    error: Exception, following: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another place, or room in it; not the help of the verb."""
    with pytest.raises(typer.Exit), guarded():
        raise error
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: ")
    assert following in said[1]


def test_a_table_that_does_not_fit_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each value where a word would be broken; texts may fold, and nothing is left out."""
    table = Table("tokens", "verify\npasses")
    table.add_column("prompt", overflow="fold")
    table.add_row("16", "4", "a-word-that-is-longer-than-it-may-be")
    for columns, is_table in ((80, True), (40, True), (30, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        output.print_table(table)
        said = capsys.readouterr().out
        assert ("\u2503" in said) is is_table, said
        assert max(map(len, said.splitlines())) <= columns or not is_table
    assert said == "tokens: 16\nverify passes: 4\nprompt: a-word-that-is-longer-than-it-may-be\n\n"

"""The pages tell the truth: their Python examples run, their commands print what they show.

In a page, ``python`` blocks share one namespace and one working folder, in order; one that says
``# in NAME.py`` is that file too, which must name nothing that it does not import. In a ``console``
block each ``$ ddtree ...`` line is run there by the shell and must succeed; the lines below it, if
any, are its output, where ``...`` alone on a line stands for any lines.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "spec/*.md", "invariants/*.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
)
IN_FILE = re.compile(r"# in (\w+\.py)$", re.MULTILINE)
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield (command, stated output) of a console block."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        assert command.startswith("ddtree "), f"only ddtree commands can be run: {command}"
        yield command, output.strip()


def matches(stated: str, printed: str) -> bool:
    """Return whether ``printed`` is ``stated``, with ``...`` lines standing for any lines."""
    pattern = "\n".join(
        "(?s:.*)" if line.strip() == "..." else re.escape(line.rstrip())
        for line in stated.splitlines()
    )
    text = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    return re.fullmatch(pattern, text) is not None


def run_page(text: str, name: str, folder: Path) -> None:
    """Run every block of a page inside ``folder``.

    Raises:
        AssertionError: a command failed or printed something else than the page states.
        Exception: whatever a Python block raises.
    """
    namespace: dict[str, object] = {"__name__": name}
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for match in BLOCK.finditer(text):
        language, block = match.groups()
        if language == "python":
            if file := IN_FILE.search(block):
                (folder / file[1]).write_text(block, encoding="utf-8")
                ruff = [
                    sys.executable,
                    "-m",
                    "ruff",
                    "check",
                    "--isolated",
                    "--select=F821",
                    file[1],
                ]
                done = subprocess.run(ruff, cwd=folder, capture_output=True, text=True, check=False)
                assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
            lines_before = text.count("\n", 0, match.start(2))
            exec(compile("\n" * lines_before + block, name, "exec"), namespace)
            continue
        for command, stated in commands(block):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env={**os.environ, "PATH": search, "COLUMNS": "100", "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{name}: $ {command}\n{done.stdout}"
            if stated:
                shown = f"{name}: $ {command}\nstated:\n{stated}\nprinted:\n{done.stdout}"
                assert matches(stated, done.stdout), shown


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example of the page runs as written and prints what the page says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run_page((ROOT / page).read_text(encoding="utf-8"), str(page), tmp_path)


def test_readme_has_examples() -> None:
    """The README is among the pages and shows both kinds of example."""
    languages = {match[1] for match in BLOCK.finditer((ROOT / "README.md").read_text("utf-8"))}
    assert languages == {"python", "console"}


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert 1 == 2\n```\n",
        "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n",
        "```python\ndef f():  # in mine.py\n    return spec\n```\n",
        "```console\n$ ddtree no-such-verb\n```\n",
        "```console\n$ ddtree --help\nNothing of the kind.\n```\n",
        "```console\n$ rm -rf build\n```\n",
    ],
)
def test_wrong_page_fails(text: str, tmp_path: Path) -> None:
    """A page with a failing example, command or stated output does not pass."""
    with pytest.raises(AssertionError):
        run_page(text, "wrong.md", tmp_path)


def test_stated_output_may_leave_lines_out() -> None:
    """Three dots alone on a line stand for any lines, and for nothing less than what they cover."""
    assert matches("first\n...\nlast", "first\n1\n2\nlast\n")
    assert matches("first\n...", "first\n1")
    assert not matches("first\n...\nlast", "first\n1\n2\n")
    assert not matches("first", "first\nsecond")

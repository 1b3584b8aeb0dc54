"""mypy and pyright refuse the wrong lines of ``typing_tests/``, with the stated messages, and no others."""

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from ddtree.spec import index

ROOT = Path(__file__).resolve().parents[2]
FILES = ("typing_tests/right.py", "typing_tests/wrong.py")
Line = tuple[str, int]
"""A file and a line's number."""


def stated(file: str, text: str) -> dict[Line, list[str]]:
    """The messages that each line of a file asks for."""
    messages = {}
    for number, line in enumerate(text.splitlines(), start=1):
        _, *wanted = re.split(r"\s+# E: ", line)
        if wanted:
            messages[file, number] = wanted
    return messages


def all_stated() -> dict[Line, list[str]]:
    """The messages that the files ask for."""
    wanted: dict[Line, list[str]] = {}
    for file in FILES:
        wanted |= stated(file, (ROOT / file).read_text(encoding="utf-8"))
    return wanted


def said_by_mypy(files: Iterable[str | Path]) -> dict[Line, list[str]]:
    """What mypy says of the files, line by line."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--no-error-summary",
            "--hide-error-codes",
            *map(str, files),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    found: dict[Line, list[str]] = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"(.+?):(\d+): error: (.*)", line)
        if match:
            found.setdefault((match[1], int(match[2])), []).append(match[3])
    return found


def differences(
    wanted: dict[Line, list[str]], found: dict[Line, list[str]], *, messages: bool = True
) -> list[str]:
    """Lines that should have been refused and were not, refused and should not, or with another message."""
    lines = []
    for file, number in sorted(wanted.keys() | found.keys()):
        asked, said = wanted.get((file, number), []), found.get((file, number), [])
        if asked and not said:
            lines.append(f"{file}:{number}: passes, and should be refused: {asked}")
        elif said and not asked:
            lines.append(f"{file}:{number}: is refused, and should pass: {said}")
        elif messages and sorted(asked) != sorted(said):
            lines.append(f"{file}:{number}: is refused by {said}, not by {asked}")
    return lines


def test_mypy() -> None:
    """Every wrong line is refused with its message, and nothing else is."""
    assert differences(all_stated(), said_by_mypy(FILES)) == []


def test_every_confusion_is_tried() -> None:
    """The files try the confusions that have happened: width, row, window, form, and the number of each."""
    text = " ".join(message for messages in all_stated().values() for message in messages)
    for pair in (
        '"BlockSize"; expected "QLen"', '"Budget"; expected "QLen"', '"int"; expected "QLen"',
        '"NumNodes"; expected "QLen"', '"Depth"; expected "Row"', '"QLen"; expected "Budget"',
        '"PackedMask"; expected "FlatMask"',
    ):  # fmt: skip
        assert pair in text
    assert len(all_stated()) >= 35


@pytest.mark.skipif(shutil.which("node") is None, reason="pyright needs Node.js")
def test_pyright() -> None:
    """Pyright refuses the same lines, in its own words."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pyright",
            "-p",
            "typing_tests",
            "--pythonpath",
            sys.executable,
            "--outputjson",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[Line, list[str]] = {}
    for item in json.loads(done.stdout)["generalDiagnostics"]:
        file = str(Path(item["file"]).relative_to(ROOT))
        found.setdefault((file, item["range"]["start"]["line"] + 1), []).append(item["message"])
    assert differences(all_stated(), found, messages=False) == []


WRONG = """
from ddtree import BlockSize, QLen
from ddtree.spec.index import bit_words
bit_words(QLen(8))  # E: Argument 1 to "bit_words" has incompatible type "BlockSize"; expected "QLen"
bit_words(BlockSize(8))
bit_words(BlockSize(8))  # E: Argument 1 to "bit_words" has incompatible type "Budget"; expected "QLen"
bit_words(BlockSize(8))  # E: Argument 1 to "bit_words" has incompatible type "BlockSize"; expected "QLen"
"""


def test_a_wrong_line_that_passes_is_reported(tmp_path: Path) -> None:
    """A line that should fail and passes, one that fails unasked and one with another message are named."""
    file = tmp_path / "some_lines.py"
    file.write_text(WRONG, encoding="utf-8")
    found = {(str(file), line): said for (_, line), said in said_by_mypy([file]).items()}
    lines = differences(stated(str(file), WRONG), found)
    assert [line.split(": ")[1].split(",")[0].split(" by ")[0] for line in lines] == [
        "passes", "is refused", "is refused"
    ]  # fmt: skip
    assert [int(line.split(":")[1]) for line in lines] == [4, 5, 6]


def test_stub_is_of_the_formulas() -> None:
    """The types of ``spec/index.pyi`` are those of every formula, argument by argument."""
    tree = ast.parse((ROOT / "spec" / "index.pyi").read_text(encoding="utf-8"))
    typed = {
        (node.name, tuple(argument.arg for argument in node.args.args))
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    formulas = {
        (name, tuple(inspect.signature(value).parameters))
        for name, value in vars(index).items()
        if inspect.isfunction(value)
    }
    assert typed == formulas

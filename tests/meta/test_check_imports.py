"""The import lint: each rule fails on a wrong twin, and passes on what is right beside it."""

from pathlib import Path

import pytest

from tools.check_imports import main, problems, repository_files


def found(source: str, path: str) -> list[str]:
    return [sentence for _, sentence in problems(source, Path(path))]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("spec/a.py", "import ddtree.invariants"),
        ("spec/a.py", "import ddtree.impl.mask"),
        ("spec/a.py", "import ddtree"),
        ("spec/a.py", "from ddtree import check"),
        ("spec/a.py", "from ddtree import invariants"),
        ("spec/a.py", "from ddtree.invariants import check"),
        ("spec/a.py", "from ddtree.decoding.target import HFTarget"),
        ("spec/a.py", "from .. import invariants"),
        ("spec/a.py", "from ..invariants import check"),
        ("spec/deep/a.py", "from ...impl import mask"),
        ("spec/a.py", "def f():\n    from ddtree.impl import mask"),
        ("spec/a.py", "import_module('ddtree.impl')"),
        ("invariants/a.py", "from ddtree.impl import mask"),
        ("invariants/a.py", "from ddtree.decoding import generate"),
        ("invariants/a.py", "import ddtree.cli"),
        ("impl/a.py", "from ddtree.decoding import generate"),
    ],
)
def test_wrong_direction_is_found(path: str, source: str) -> None:
    """Every import against the direction of the layers is one finding that names the module."""
    sentences = found(source, path)
    assert len(sentences) == 1
    assert "may import of ddtree only" in sentences[0]


@pytest.mark.parametrize("path", ["spec/a.py", "tests/test_a.py", "ddtree/cli/a.py"])
@pytest.mark.parametrize(
    "source",
    [
        "import spec",
        "import spec.tree",
        "from spec import tree",
        "from spec.tree import build_tree",
        "import invariants",
        "from impl.mask import tree_mask",
        "importlib.import_module('spec.tree')",
        "__import__('spec')",
    ],
)
def test_plain_folder_import_is_found(path: str, source: str) -> None:
    """The linked folders are imported through ddtree alone, wherever the import stands."""
    sentences = found(source, path)
    assert len(sentences) == 1
    assert sentences[0].startswith("import ddtree.")


def test_future_annotations_beside_jaxtyping_are_found() -> None:
    """Postponed annotations are refused with jaxtyping and left alone without it."""
    future = "from __future__ import annotations\n"
    assert len(found(future + "from jaxtyping import Float", "tests/a.py")) == 1
    assert len(found(future + "import jaxtyping", "spec/a.py")) == 1
    assert found(future + "import torch", "spec/a.py") == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("spec/a.py", "import torch\nfrom ddtree.spec.errors import require"),
        ("spec/a.py", "from ddtree.spec import index"),
        ("spec/a.py", "from . import index\nfrom .errors import require"),
        ("invariants/a.py", "from ddtree.spec import index\nfrom ddtree.invariants import table"),
        ("impl/a.py", "from ddtree.spec import index\nfrom ddtree.invariants import debug"),
        ("ddtree/decoding/a.py", "from ddtree.invariants import check\nimport ddtree"),
        ("tests/a.py", "import ddtree\nfrom ddtree.impl import mask"),
        ("tests/a.py", "import specific"),
    ],
)
def test_right_direction_passes(path: str, source: str) -> None:
    """What the layers allow is no finding."""
    assert found(source, path) == []


def test_command_reports_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command names file and line and returns 1; a clean file gives 0 and no output."""
    monkeypatch.setattr("tools.check_imports.ROOT", tmp_path)
    (tmp_path / "spec").mkdir()
    wrong, right = tmp_path / "spec" / "wrong.py", tmp_path / "spec" / "right.py"
    wrong.write_text("import torch\nimport ddtree.impl\n")
    right.write_text("import torch\n")
    assert main([str(right)]) == 0
    assert capsys.readouterr().out == ""
    assert main([]) == 1
    assert capsys.readouterr().out.startswith("spec/wrong.py:2: spec may import")


def test_every_file_is_linted_once_and_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """The repository itself obeys; its links are not followed, so no file is read twice."""
    files = [file.resolve() for file in repository_files()]
    assert len(files) == len(set(files)) > 10
    assert main([]) == 0, capsys.readouterr().out

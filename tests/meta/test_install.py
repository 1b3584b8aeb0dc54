"""What is installed: the wheel's files, the base dependencies, types live at run time."""

import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("spec", "invariants")

# Two-dimensional log-probs: in debug mode the annotation refuses them before the function runs.
WRONG_SHAPE = """
import torch, ddtree
from ddtree import spec
with ddtree.debug():
    try:
        spec.build_tree(torch.zeros(3, 5), torch.zeros(1, dtype=torch.int64), ddtree.Budget(4))
    except ddtree.InvariantViolation as violation:
        print(violation.invariant)
print(ddtree.__file__)
"""


def python(code: str, *, cwd: Path, first: Path | None = None, only: Path | None = None) -> str:
    """Run ``code`` in an isolated Python and return what it prints.

    Packages come from ``first`` before all else, or from ``only`` and nowhere else.
    """
    flags = ["-I", "-S"] if only else ["-I"]
    head = f"import sys; sys.path.insert(0, {str(only or first)!r})\n" if only or first else ""
    done = subprocess.run(
        [sys.executable, *flags, "-c", head + code],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the installed backend; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT),
        ],
        check=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def sources(folder: Path) -> set[str]:
    return {
        str(file.relative_to(folder))
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_wheel_holds_the_linked_folders_as_files(wheel: Path) -> None:
    """Every file behind a link is in the wheel under ddtree, with the marker of a typed package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "ddtree/py.typed" in names
    for link in LINKED:
        behind = {f"ddtree/{link}/{name}" for name in sources(ROOT / link)}
        assert f"ddtree/{link}/__init__.py" in behind
        assert behind <= names
    assert {f"ddtree/drafters/{name}" for name in sources(ROOT / "drafters")} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ddtree"}


def test_wheel_names_the_hooks_to_the_engines(wheel: Path) -> None:
    """SGLang and vLLM find the hooks by the entry points of the installed package."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")]
        told = archive.read(name).decode()
    assert "[sglang.srt.plugins]\nddtree = ddtree.hooks:sglang" in told
    assert "[vllm.general_plugins]\nddtree = ddtree.hooks:vllm" in told


def test_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """The links survive the source archive: the wheel built from it holds the same files."""
    build = [sys.executable, "-m", "hatchling", "build", "-d"]
    subprocess.run([*build, tmp_path, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="tar")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    subprocess.run([*build, tmp_path, "-t", "wheel"], cwd=unpacked, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as again, zipfile.ZipFile(wheel) as first:
        assert set(again.namelist()) == set(first.namelist())


def test_wheel_works_with_live_shape_checks(wheel: Path, tmp_path: Path) -> None:
    """Installed from the wheel, debug mode refuses a wrong shape by its annotation."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    invariant, file = python(WRONG_SHAPE, cwd=tmp_path, first=tmp_path / "installed").splitlines()
    assert invariant == "types"
    assert Path(file).is_relative_to(tmp_path / "installed")


def test_editable_install_works_with_live_shape_checks(tmp_path: Path) -> None:
    """Installed in place, debug mode refuses a wrong shape by its annotation, from any folder."""
    invariant, file = python(WRONG_SHAPE, cwd=tmp_path).splitlines()
    assert invariant == "types"
    assert Path(file) == ROOT / "ddtree" / "__init__.py"


def closure(requirements: list[str]) -> set[str]:
    """Return the installed distributions that ``requirements`` lead to, no extra asked for."""
    names: set[str] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        names.add(name)
        todo += map(Requirement, found.requires or [])
    return names


@pytest.fixture(scope="module")
def base_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay out the packages of an install without extras, as links to those of this one."""
    folder = tmp_path_factory.mktemp("base")
    for name in closure(distribution("ddtree").requires or []):
        for file in distribution(name).files or []:
            link = folder / file.parts[0]
            if file.parts[0] != ".." and not link.exists():
                link.symlink_to(str(distribution(name).locate_file(file.parts[0])))
    (folder / "ddtree").symlink_to(ROOT / "ddtree")
    return folder


def test_base_excludes_the_extras(base_install: Path) -> None:
    """The base is what the README says, and nothing of the extras comes with it."""
    names = {file.name for file in base_install.iterdir()}
    assert {"torch", "jaxtyping", "beartype", "safetensors", "numpy"} <= names
    assert not {"typer", "rich", "transformers", "gguf", "matplotlib", "hypothesis", "z3"} & names


def test_base_install_checks_a_call_from_a_file(base_install: Path, tmp_path: Path) -> None:
    """With the base alone, a captured call is written, read and checked, in debug mode too."""
    code = """
import torch, ddtree
from ddtree import spec
with ddtree.debug():
    log_probs = torch.log_softmax(torch.arange(35.0).reshape(1, 7, 5).sin(), -1)
    tree = spec.build_tree(log_probs, torch.tensor([3]), ddtree.Budget(16))
    slots = torch.arange(64)[None]
    layout = spec.plan_verify(tree, torch.tensor([5]), slots)
    mask = spec.tree_mask(tree, layout, form="flat")
ddtree.check(tree, layout, mask)
ddtree.dump("call.safetensors", tree, layout, mask)
print(ddtree.violations(ddtree.load("call.safetensors")))
"""
    assert python(code, cwd=tmp_path, only=base_install).strip() == "[]"


def test_command_without_its_extra_says_what_to_install(base_install: Path, tmp_path: Path) -> None:
    """Without typer and rich the command exits with 2, as for all that is no verdict, and names the extra."""
    code = """
import sys
import ddtree.__main__
sys.stderr = sys.stdout
try:
    ddtree.__main__.main()
except SystemExit as exit:
    print(exit.code)
"""
    said = python(code, cwd=tmp_path, only=base_install).splitlines()
    assert said[0] == "error: the ddtree command needs typer and rich"
    assert said[1].startswith("next: pip install 'ddtree[cli]'")
    assert said[2] == "2"

"""Lint: who may import whom, and how.

The reference knows nothing of its checker, the checker nothing of what it checks. Each rule has a
wrong twin in ``tests/meta/test_check_imports.py`` that shows it to fail.

Usage: ``python tools/check_imports.py [FILE ...]`` (default: every Python file of the repository).
Prints ``path:line: what is wrong`` and exits with 1 if there is any such line.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LAYERS = {
    "spec": frozenset({"spec"}),
    "invariants": frozenset({"spec", "invariants"}),
    "impl": frozenset({"spec", "invariants", "impl"}),
}
"""For each linked folder, the parts of ``ddtree`` that its files may import."""

FOLDERS = ("spec", "invariants", "impl", "ddtree", "tests", "tools", "bench", "train")


def imported_modules(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) of all that a module imports, functions' own imports included.

    ``package`` is the dotted package of the module; relative names are resolved against it. Of
    ``from a import b`` the name is ``a.b``, since b may be a module. Calls of ``import_module``
    and ``__import__`` with a literal name count as imports.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=module, names=names, level=level):
                parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                for alias in names:
                    yield (
                        node.lineno,
                        ".".join([*parents, *([module] if module else []), alias.name]),
                    )
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def problems(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) for each broken rule of ``source``, the text of file ``path``.

    Raises:
        SyntaxError: ``source`` is not Python.
    """
    tree = ast.parse(source, str(path))
    layer = path.parts[0]
    package = ".".join(path.parent.parts if layer not in LAYERS else ("ddtree", *path.parent.parts))
    modules = list(imported_modules(tree, package))

    for line, module in modules:
        head, *rest = module.split(".")
        if head in LAYERS:
            yield line, f"import ddtree.{module}, not {module}: the folder would be loaded twice"
        elif head == "ddtree" and layer in LAYERS and (rest or [""])[0] not in LAYERS[layer]:
            allowed = ", ".join(sorted(LAYERS[layer]))
            yield line, f"{layer} may import of ddtree only {allowed}: not {module}"

    if any(module.split(".")[0] == "jaxtyping" for _, module in modules):
        for line, module in modules:
            if module == "__future__.annotations":
                yield (
                    line,
                    "no `from __future__ import annotations` beside jaxtyping: shapes go unchecked",
                )


def repository_files() -> Iterator[Path]:
    """Yield every Python file once: the links inside ``ddtree`` are not followed."""
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def main(arguments: list[str]) -> int:
    """Lint the files named, or all; return the exit code."""
    files = [Path(argument).resolve() for argument in arguments] or list(repository_files())
    found = 0
    for file in files:
        path = file.relative_to(ROOT)
        for line, sentence in problems(file.read_text(encoding="utf-8"), path):
            print(f"{path}:{line}: {sentence}")
            found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

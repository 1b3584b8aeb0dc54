"""Engines' own modules from their wheels, on a machine without the engines' dependencies.

``make engines`` puts the wheels' files under ``.engines``. Of an engine the modules that are named run as
they are; the others, which those import at their top for names that a CPU test never calls, are stubs.
"""

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ENGINES = Path(__file__).resolve().parents[2] / ".engines"


def needs(*names: str) -> str:
    """Why a test cannot run: the engines that are not there, and the next step. Empty: all are."""
    missing = [name for name in names if not (ENGINES / name).is_dir()]
    return f"needs {', '.join(missing)} under .engines: make engines" if missing else ""


class Anything:
    """What a stub's names are: callable, false, decorates nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take anything."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Leave a decorated function as it is."""
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, _: object) -> "Anything":
        return self

    def __or__(self, _: object) -> "Anything":
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False


class Values(SimpleNamespace):
    """Settings: those that are given, anything else for the others."""

    def __getattr__(self, name: str) -> Anything:
        return Anything().__getattr__(name)


class StubClass(type):
    """A class that has every member."""

    def __getattr__(cls, name: str) -> Anything:
        return Anything().__getattr__(name)


class Stub(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = StubClass(name, (), {}) if name[:1].isupper() else Anything()
        setattr(self, name, value)
        return value


class Engine(MetaPathFinder, Loader):
    """Finds an engine's modules: those named in its files, the others as stubs with given members."""

    def __init__(self, folder: Path, real: Iterable[str], known: dict[str, dict[str, Any]]) -> None:
        """Serve the package that lies in ``folder``, from now on."""
        self.folder, self.real, self.known = folder, frozenset(real), known
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the engine."""
        top, *rest = name.split(".")
        if top != self.folder.name:
            return None
        if name not in self.real:
            return ModuleSpec(name, self, is_package=True)
        file = self.folder.joinpath(*rest)
        if file.is_dir():
            places = [str(file)]
            return importlib.util.spec_from_file_location(
                name, file / "__init__.py", submodule_search_locations=places
            )
        return importlib.util.spec_from_file_location(name, file.with_suffix(".py"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a stub."""
        module = Stub(spec.name)
        module.__path__ = []
        vars(module).update(self.known.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it was made."""

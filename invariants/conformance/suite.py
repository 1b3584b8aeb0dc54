"""A pytest class that holds a backend to every property that it offers.

    from ddtree.invariants.conformance.suite import Conformance

    class TestMine(Conformance):
        backend = Mine

Each property is a test of its own; what the backend does not offer is skipped, with the reason. A test that
fails tells the smallest failing case, and where it was written.
"""

import shlex
from inspect import ismethod
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ddtree.invariants.conformance.backend import Backend
from ddtree.invariants.conformance.failure import ONLY_AFTER_OTHERS, smallest
from ddtree.invariants.conformance.fuzz import hold
from ddtree.invariants.conformance.properties import PROPERTIES, Property
from ddtree.spec.errors import InputError


class Conformance:
    """Subclass it, named ``Test...``, with a ``backend``."""

    backend: ClassVar[Any]
    """What ``Backend.of`` takes: an object, a class, a module or a function."""
    examples: ClassVar[int] = 60
    seconds: ClassVar[float] = 20.0
    """Time of one property."""
    seed: ClassVar[int] = 0

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test a property; a single one, which says so, where there is no backend."""
        if metafunc.function.__name__ == "test_conforms":
            has_backend = getattr(metafunc.cls, "backend", None) is not None
            props = [pytest.param(prop, id=prop.id) for prop in PROPERTIES]
            metafunc.parametrize("prop", props if has_backend else [pytest.param(None, id="none")])

    def test_conforms(self, prop: Property | None, tmp_path: Path) -> None:
        """The backend does what the reference does."""
        if prop is None:
            name = type(self).__name__
            said = f"{name} has no backend to hold to the reference: write backend = YOURS in it"
            pytest.fail(said, pytrace=False)
        backend, said = _backend(self)
        if backend is None:
            pytest.fail(said, pytrace=False)
        if why := prop.offered(backend):
            pytest.skip(why)
        result = hold(
            backend,
            prop,
            examples=self.examples,
            seconds=self.seconds,
            seed=self.seed,
            folder=tmp_path,
        )
        if result.state == "refused":
            pytest.skip(f"every case was refused: {', '.join(result.refused)}")
        assert result.state == "holds", (
            f"{prop.id}: {prop.statement}\n"
            f"  {smallest(was_cut=result.was_cut)}: {result.case}\n"
            f"  {result.what}{f'; {ONLY_AFTER_OTHERS}' if result.is_alone_right else ''}\n"
            f"  {shlex.join(['ddtree', 'check', str(result.file)])}"
        )


def _backend(suite: Conformance) -> tuple[Backend | None, str]:
    """The suite's backend; or None, and why there is none."""
    given = suite.backend
    if ismethod(given) and given.__self__ is suite:  # a function as an attribute of the class
        given = given.__func__
    try:
        return Backend.of(given), ""
    except InputError as error:
        return None, str(error)

"""A pytest class that holds a backend to every property that it offers.

    from ddtree.invariants.conformance.suite import Conformance

    class TestMine(Conformance):
        backend = Mine

Each property is a test of its own; what the backend does not offer is skipped, with the reason. A test that
fails tells the smallest failing case, and where it was written.
"""

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

    @pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.id)
    def test_conforms(self, prop: Property, tmp_path: Path) -> None:
        """The backend does what the reference does."""
        try:
            backend = Backend.of(self.backend)
        except InputError as error:
            pytest.fail(str(error), pytrace=False)
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
            f"  ddtree check {result.file}"
        )

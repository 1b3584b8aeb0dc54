"""Fuzz a backend's functions, shrink what fails to its smallest case, and write that as a file."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import Flaky, NoSuchExample

from ddtree import spec
from ddtree.invariants.conformance.backend import Backend, Refused
from ddtree.invariants.conformance.calls import dealt
from ddtree.invariants.conformance.failure import FAILED_AFTER_OTHERS, HELD_AGAIN, told_of
from ddtree.invariants.conformance.properties import PROPERTIES, Case, Property
from ddtree.invariants.conformance.stored import Told, read, write
from ddtree.spec.errors import InputError, require

MOST = 3
"""Requests of a call."""
State = Literal["holds", "broken", "refused", "not offered"]
"""``holds``: no case failed, of those that ran (``was_cut``: not all of them); ``refused``: none ran."""


@dataclass(frozen=True)
class Result:
    """What came of one property."""

    property: Property
    state: State
    examples: int = 0
    """Cases that ran, up to the first that failed: what shrinking tries is not counted."""
    refused: Counter[str] = field(default_factory=Counter)
    """Cases that the backend refused, by the reason."""
    what: str = ""
    """Of the smallest failing case what differs; of a property that is not offered why."""
    case: Case | None = None
    """The smallest failing case."""
    was_cut: bool = False
    """Time was up: of what is broken before shrinking ended, so a smaller case may fail too; of what holds
    before all cases ran, so one of the others may fail."""
    is_alone_right: bool = False
    """A new object of the backend passes the failing case: it fails only after other calls."""
    note: str = ""
    """Of what holds: that not all cases ran, or what it may mean that a case does that was written for a
    failure."""
    file: Path | None = None
    seconds: float = 0.0


def conform(
    backend: Any,
    name: str = "",
    *,
    only: str = "",
    examples: int = 60,
    seconds: float = 50.0,
    seed: int = 0,
    folder: Path | None = None,
) -> Iterator[Result]:
    """Hold a backend to every property that it offers, one after the other.

    Args:
        backend: what ``Backend.of`` takes.
        name: what to call it.
        only: a part of the ids of the properties to run.
        examples: most cases drawn for a property; shrinking what fails tries more.
        seconds: time for all of them; what a property leaves is the others'. Shrinking counts.
        seed: of what is drawn.
        folder: where the smallest failing cases are written; None: nowhere.

    Raises:
        InputError: nothing is offered, or no property bears ``only``.
    """
    held = Backend.of(backend, name)
    chosen = [prop for prop in PROPERTIES if only in prop.id or only == prop.function]
    require(
        bool(chosen), f"no property is called {only!r}; known are {', '.join(map(repr, ids()))}"
    )
    left = [prop for prop in chosen if not prop.offered(held)]
    end = time.monotonic() + seconds
    for prop in chosen:
        if why := prop.offered(held):
            yield Result(prop, "not offered", what=why)
            continue
        share = max(end - time.monotonic(), 1.0) / max(len(left), 1)
        left.remove(prop)
        yield hold(held, prop, examples=examples, seconds=share, seed=seed, folder=folder)


def ids() -> list[str]:
    """The ids of all properties."""
    return [prop.id for prop in PROPERTIES]


def hold(
    backend: Backend,
    prop: Property,
    *,
    examples: int = 60,
    seconds: float = 10.0,
    seed: int = 0,
    folder: Path | None = None,
) -> Result:
    """Fuzz one property."""
    start = time.monotonic()
    search = _Search(backend, prop, start + seconds)
    search.run(MOST, examples, seed)
    if search.smallest is not None:
        was_cut = False
        # hypothesis drops no request from the middle of a case: look among fewer from the start
        for most in range(1, MOST):
            narrower = _Search(backend, prop, max(search.end, time.monotonic() + seconds / 4))
            narrower.run(most, examples, seed)
            was_cut |= narrower.was_cut
            if narrower.smallest is not None:
                search = replace(search, smallest=narrower.smallest, was_cut=False)
                break
        search.was_cut |= was_cut
    spent = time.monotonic() - start
    if search.smallest is None:
        state: State = "holds" if search.ran else "refused"
        tried = search.ran + search.refused.total()
        cut = f"so far: {tried} of {examples} cases, time was up"
        return Result(
            prop, state, search.ran, search.refused, was_cut=search.was_cut,
            note=cut if search.ran and search.was_cut else "", seconds=spent,
        )  # fmt: skip
    case, what = search.smallest
    is_alone_right = _passes_alone(backend, prop, case)
    file = None
    if folder is not None:
        failure = Told(what, was_cut=search.was_cut, is_alone_right=is_alone_right)
        file = write(folder, backend, prop, case, failure)
    return Result(
        prop, "broken", search.ran, search.refused, what, case, search.was_cut, is_alone_right,
        file=file, seconds=spent,
    )  # fmt: skip


def _passes_alone(backend: Backend, prop: Property, case: Case) -> bool:
    """Whether a backend made anew passes a case that failed after others: earlier calls leave something."""
    try:
        fresh = backend.anew()
        return fresh is not None and not told(prop.difference, fresh, case)
    except (Refused, InputError):
        return False  # not known


def again(backend: Any, path: Path, name: str = "") -> Result:
    """Hold a backend to one stored case, as the run did that wrote it.

    Raises:
        InputError: the file holds no case, or one that the reference itself does not pass.
    """
    held = Backend.of(backend, name)
    prop, case, is_alone_right = read(path)
    if why := prop.offered(held):
        return Result(prop, "not offered", what=why)
    wrong = told(prop.difference, Backend.of(spec), case)
    require(not wrong, f"{path}: the reference itself fails this case, so it is damaged: {wrong}")
    start = time.monotonic()
    try:
        what = told(prop.difference, held, case)
    except Refused as reason:
        return Result(prop, "refused", refused=Counter([str(reason)]))
    spent = time.monotonic() - start
    if not what:
        note = FAILED_AFTER_OTHERS if is_alone_right else HELD_AGAIN
        return Result(prop, "holds", 1, is_alone_right=is_alone_right, note=note, seconds=spent)
    return Result(prop, "broken", 1, what=what, case=case, file=path, seconds=spent)


class _TimeIsUp(BaseException):
    """Leaves hypothesis, which lets nothing but this kind of exception through."""


@dataclass
class _Search:
    """What ``find`` asks of each case; the last one that fails is the smallest."""

    backend: Backend
    prop: Property
    end: float
    ran: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    smallest: tuple[Case, str] | None = None
    was_cut: bool = False
    is_tried: bool = False
    """The next case was tried before."""

    def run(self, most: int, examples: int, seed: int) -> None:
        """Fuzz calls of up to ``most`` requests until one fails and is shrunk, or time is up."""
        random, wanted = Random(seed), dealt(self.prop.max_q_len, seed)  # noqa: S311 # no secret
        with suppress(_TimeIsUp):
            for number, width in zip(range(examples), wanted, strict=False):
                # hypothesis tries the smallest case before any other; it is tried here once, as the first
                self.is_tried = number > 0
                quiet = settings(
                    max_examples=1 + self.is_tried,
                    database=None,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                    phases=(Phase.generate, Phase.shrink),
                )
                cases = self.prop.cases(self.backend, most, width)
                with suppress(NoSuchExample, Flaky):
                    find(cases, self.fails, settings=quiet, random=random)
                if self.smallest is not None:
                    return

    def fails(self, case: Case) -> bool:
        """Whether the backend does otherwise than it should; a case that it refuses does not count."""
        if self.is_tried:
            self.is_tried = False
            return False
        if time.monotonic() > self.end and (self.ran or self.refused):
            self.was_cut = True
            raise _TimeIsUp
        is_drawn = self.smallest is None  # else it is shrunk
        try:
            what = told(self.prop.difference, self.backend, case)
        except Refused as reason:
            self.refused[str(reason)] += is_drawn
            return False
        self.ran += is_drawn
        if what:
            self.smallest = (case, what)
        return bool(what)


def told(difference: Callable[[Backend, Any], str], backend: Backend, case: Case) -> str:
    """The difference; an exception of the backend is one.

    Raises:
        Refused: the backend does not take the case.
    """
    try:
        with warnings.catch_warnings(), backend.patience.for_a_call():
            warnings.simplefilter("ignore")  # a backend's own, of thousands of calls
            return difference(backend, case)
    except (Refused, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 # a backend may raise anything, SystemExit too
        return told_of(error)

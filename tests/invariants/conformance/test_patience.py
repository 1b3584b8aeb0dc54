"""Calls that do not end: interrupted where that can be done, told with their place, and waited for once."""

import re
import signal
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ddtree import spec
from ddtree.invariants.conformance import Backend, cells
from ddtree.invariants.conformance import isolate as isolation
from ddtree.invariants.conformance.attend import AttentionCase
from ddtree.invariants.conformance.fuzz import hold
from ddtree.invariants.conformance.isolate import isolate
from ddtree.invariants.conformance.patience import Endless, Patience
from ddtree.invariants.conformance.properties import PROPERTIES


class LoopsBehindFive:
    """A choice of tiles that ends for five rows at most (lucebox #61)."""

    call_limit = 0.4

    def verify_attention(self, *arguments: Any) -> Any:
        """Attend, or loop."""
        rows, tile = arguments[0].shape[0], 4
        while rows > 5 and tile:
            tile = max(tile // 2, 1)
        return spec.verify_attention(*arguments)


def test_a_loop_without_an_end_is_told_with_its_place() -> None:
    """The smallest case, the file and a line of the loop; only the first call is waited for at length."""
    prop = next(prop for prop in PROPERTIES if prop.id == "visible set")
    start = time.monotonic()
    result = hold(Backend.of(LoopsBehindFive), prop, seconds=2)
    assert result.state == "broken"
    assert result.what.startswith("it did not return in time: a loop without an end? (")
    place, line = result.what.rstrip(")").rpartition("(")[2].split(":")
    assert Path(place).name == Path(__file__).name
    first = LoopsBehindFive.verify_attention.__code__.co_firstlineno
    assert int(line) in {first + 3, first + 4}
    assert isinstance(result.case, AttentionCase)
    assert int(result.case.call.layout.qo_indptr[-1]) > 5
    assert time.monotonic() - start < 40


def test_isolation_goes_on_past_calls_that_do_not_end() -> None:
    """Each is a failure like others, and the cause is what all of them have in common."""

    class LoopsBehindEight(LoopsBehindFive):
        call_limit = 0.05

        def verify_attention(self, *arguments: Any) -> Any:
            while int(arguments[5].qo_indptr[1]) > 8:
                pass
            return spec.verify_attention(*arguments)

    found = isolate(LoopsBehindEight, "loops", seconds=60, calls=50)
    assert re.match(r"fails iff q_len.* > 8", found.sentence), found.sentence
    assert "in every such call it did not return in time" in found.cause


def test_numbers_beside_the_grid_are_tried_before_nothing_is_said_to_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One wrong width, 37, which no combination of the grid has (lucebox #61: 36 + 1)."""
    whole = cells.grid
    monkeypatch.setattr(isolation, "grid", lambda seed: islice(whole(seed), 8))

    def verify_attention(*arguments: Any) -> Any:
        output, _ = spec.verify_attention(*arguments)
        return output * (int(arguments[5].qo_indptr[1]) != 37)

    found = isolate(verify_attention, "tiles", seconds=60, calls=60)
    assert any(t.failed and any(t.failed) and t.cell.q_len == 37 for t in found.tried)
    assert "q_len == 37" in found.sentence, found.sentence


def test_one_lost_call_shortens_the_wait_for_the_next() -> None:
    """To ten times what the slowest took that returned, and a second."""
    patience = Patience(30.0)
    with patience.for_a_call():
        pass
    patience.limit = 0.05
    with pytest.raises(Endless), patience.for_a_call():
        time.sleep(5)
    patience.limit = 30.0
    start = time.monotonic()
    with pytest.raises(Endless), patience.for_a_call():
        time.sleep(10)
    assert 0.9 < time.monotonic() - start < 5


def test_a_timer_of_anothers_is_left_alone() -> None:
    """A test run with a timeout of its own keeps it, and its handler."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 60.0)
        handler = signal.getsignal(signal.SIGALRM)
        with Patience(0.05).for_a_call():
            time.sleep(0.1)
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_nothing_is_left_behind() -> None:
    """Neither timer nor handler, whether a call returned or was lost."""
    before = signal.getsignal(signal.SIGALRM)
    for seconds in (0.0, 0.2):
        try:
            with Patience(0.1).for_a_call():
                time.sleep(seconds)
        except Endless:
            assert seconds
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_thread_has_no_timer() -> None:
    """Calls of other threads run as long as they do."""
    ended: list[bool] = []

    def run() -> None:
        with Patience(0.05).for_a_call():
            time.sleep(0.1)
            ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [True]

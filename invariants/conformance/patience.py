"""How long one call of a backend may take: a loop that does not end must not keep its failure to itself.

A call is interrupted by a timer of the process, so only in the main thread, only where no one else uses that
timer, and only in Python code: a kernel that never ends cannot be stopped from here.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CALL_LIMIT = 60.0
"""Seconds; a first call may compile."""


class Endless(BaseException):
    """A call was interrupted; no ``Exception``, so that a backend's own handlers let it pass."""


class Patience:
    """The time that calls have. Once one was lost, no other waits much longer than those that returned."""

    def __init__(self, limit: float = CALL_LIMIT) -> None:
        self.limit = limit
        self._slowest = 0.0
        self._is_lost = False

    @contextmanager
    def for_a_call(self) -> Iterator[None]:
        """Interrupt what is run inside when its time is up.

        Raises:
            Endless: the time is up.
        """
        start = time.monotonic()
        try:
            with _timer(min(self.limit, 1 + 10 * self._slowest) if self._is_lost else self.limit):
                yield
        except Endless:
            self._is_lost = True
            raise
        self._slowest = max(self._slowest, time.monotonic() - start)


@contextmanager
def _timer(seconds: float) -> Iterator[None]:
    """Raise ``Endless`` in what is run inside after so many seconds, and again if it is swallowed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer") or any(signal.getitimer(signal.ITIMER_REAL)):
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise Endless

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

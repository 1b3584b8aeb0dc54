"""What debug mode does with a violation: count it, log it, dump the call, raise."""

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddtree.invariants.settings import Settings
from ddtree.invariants.violation import InvariantViolation
from ddtree.spec.errors import InputError

logger = logging.getLogger("ddtree.debug")


class Counts:
    """What this process saw, by labels; the same in Prometheus where ``prometheus-client`` is installed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in _METRICS}
        self._metrics: dict[str, Any] | None = None

    def add(self, name: str, *labels: str, by: int = 1) -> None:
        """Count ``by`` more under these labels."""
        with self._lock:
            self._counts[name][labels] += by
            if self._metrics is None:
                self._metrics = _prometheus()
            metric = self._metrics.get(name)
        if metric is not None:
            metric.labels(*labels).inc(by)

    def read(self, name: str) -> dict[tuple[str, ...], int]:
        """What was counted under a name, by labels."""
        with self._lock:
            return dict(self._counts[name])

    def __repr__(self) -> str:
        """All counts, by name and labels."""
        with self._lock:
            told = {name: dict(counts) for name, counts in self._counts.items() if counts}
        return f"Counts({told})"

    def after_fork(self) -> None:
        """Begin anew in a child process: its lock may have been held by a thread that it does not have."""
        self._lock = threading.Lock()
        self._counts = {name: Counter() for name in _METRICS}


_METRICS = {
    "calls": ("Calls that debug mode looked at.", ("function", "level")),
    "violations": ("Broken invariants, the first of each call.", ("invariant", "function")),
    "shadows": ("Calls that were also run on the reference.", ("function", "outcome")),
    "dumps": ("Calls that were written to files.", ("function",)),
}
"""Name, what it counts, labels. In Prometheus: ``ddtree_debug_calls_total`` and so on."""


def _prometheus() -> dict[str, Any]:
    """The counters in Prometheus's registry; none where it is not installed or has them already."""
    if find_spec("prometheus_client") is None:
        return {}
    from prometheus_client import Counter as Metric

    return {
        name: Metric(f"ddtree_debug_{name}", text, labels)
        for name, (text, labels) in _METRICS.items()
    }


counts = Counts()
os.register_at_fork(after_in_child=counts.after_fork)
_numbers = itertools.count(1)

Dump = Callable[[Path], object]
"""Writes what is known of a call to a path."""


def act(
    violation: InvariantViolation, settings: Settings, function: str, dump: Dump | None = None
) -> None:
    """Do with a violation what the settings say, and return unless one of them is to raise.

    Raises:
        InvariantViolation: the violation itself.
    """
    counts.add("violations", violation.invariant, function)
    if "dump" in settings.actions and dump is not None:
        violation.dump = dumped(violation, settings, function, dump)
    if "log" in settings.actions or (
        "dump" in settings.actions and "raise" not in settings.actions
    ):
        logger.error("%s", violation)
    if "raise" in settings.actions:
        raise violation


def dumped(violation: InvariantViolation, settings: Settings, function: str, dump: Dump) -> str:
    """Write a violation's call; return where, or why not: a checker that fails must not stop a server."""
    number = next(_numbers)
    if number > settings.max_dumps:
        return f"not written: {settings.max_dumps} calls have been (max_dumps)"
    stamp = time.strftime("%Y%m%dT%H%M%S")
    name = f"{stamp}-{os.getpid()}-{number}-{function.replace('.', '_')}-{violation.invariant}"
    path = settings.dump_dir / f"{name}.safetensors"
    try:
        dump(path)
    except (InputError, OSError) as error:
        return f"not written: {error}"
    counts.add("dumps", function)
    return str(path)


def labels(name: str) -> Mapping[tuple[str, ...], int]:
    """What this process counted under a name of ``_METRICS``."""
    return counts.read(name)

"""Hold calls to the captured check, on a GPU by replaying a graph, and compare with the eager checker."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddtree.impl import CapturedCheck
from ddtree.impl.check import Found
from ddtree.invariants import Call, InvariantViolation, violations
from ddtree.invariants.sizes import claimed_sizes, sizes_of
from ddtree.invariants.streams import beside, capturing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(call: Call) -> Call:
    """The call with its tensors where the kernels run."""
    moved: dict[str, Any] = {
        name: value.to(DEVICE) for name, value in call.known().items() if isinstance(value, Tensor)
    }
    return replace(call, **moved)


def has_tensors(call: Call) -> bool:
    """Whether there is anything on the device to check."""
    return any(isinstance(value, Tensor) for value in call.known().values())


def run(check: CapturedCheck, times: int = 1) -> None:
    """Launch so often, and, where there is a GPU, in replays of a captured graph: once more there."""
    if DEVICE == "cpu":
        for _ in range(times):
            check.launch()
        return
    with beside(check.device):
        check.launch()  # kernels are compiled here
    with capturing() as graph:
        check.launch()
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()


def differences(name: str, make: Callable[[], Call], *, level: Any = "full") -> list[str]:
    """What the captured check says otherwise than the eager one, in sentences."""
    call = make()
    if not has_tensors(call):
        return []
    expected = next(iter(violations(call)), None)
    check = CapturedCheck(on_device(call), level=level)
    run(check)
    checked, broken = check.counts
    doubted = check.doubts
    found, polled = check.found, check.poll()
    wrong = []
    if bool(broken) != (expected is not None) and not doubted:
        wrong.append(f"{name}: {broken} broken of {checked}, the checker says {expected}")
    if expected is None and doubted:
        wrong.append(f"{name}: doubted")
    if told(polled) != told(expected):
        wrong.append(f"{name}: polled {told(polled)}, the checker says {told(expected)}")
    is_claimed = sizes_of(call) == claimed_sizes(call)  # else the host has weighed other fields
    if expected is not None and is_claimed and not same_numbers(found, expected):
        wrong.append(f"{name}: the device says {found}, the checker {told(expected)}")
    return wrong


def told(violation: InvariantViolation | None) -> tuple[Any, ...] | None:
    """All that a violation says, but where it was seen."""
    if violation is None:
        return None
    names = ("invariant", "request", "expected", "found", "hint", "detail", "also")
    return tuple(getattr(violation, name) for name in names)


def same_numbers(found: Found | None, expected: InvariantViolation) -> bool:
    """Whether the device's own record says the same, as far as its numbers go."""
    if found is None:
        return False
    numbers = zip(found[2:4], (expected.expected, expected.found), strict=True)
    same = all(have is None or have == want for have, want in numbers)
    return same and (found.invariant, found.request) == (expected.invariant, expected.request)

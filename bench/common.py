"""What the benchmarks share: where results lie, what machine this is, how a time is taken."""

import math
import platform
from collections.abc import Callable, Hashable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from ddtree.invariants.streams import capturing

Name = TypeVar("Name", bound=Hashable)
RESULTS = Path(__file__).resolve().parent / "results"


def machine(*packages: str) -> dict[str, str]:
    """What a result was measured on, with the versions of the packages named."""
    found = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def result_name(subject: str) -> str:
    """The file of a subject's result on this GPU: ``attention-h200.json``."""
    gpu = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")
    return f"{subject}-{gpu}.json"


def error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN stays NaN."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean of what multiplies; NaN where there is nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


class Captured:
    """Several calls captured in one CUDA graph, to be replayed and timed."""

    def __init__(self, runs: Sequence[Callable[[], Any]]) -> None:
        for run in runs[:2]:  # compiles and warms what is lazy
            run()
        torch.cuda.synchronize()
        self.runs, self.count = runs, len(runs)  # a graph owns none of what its calls read
        with capturing() as self.graph:
            for run in runs:
                run()
        self.graph.replay()  # the first upload

    def replay_us(self, replays: int) -> list[float]:
        """Microseconds of one call, from each of so many replays."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        self.graph.replay()
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [1e3 * a.elapsed_time(b) / self.count for a, b in pairwise(events)]


def median(values: Sequence[float]) -> float:
    """The middle one (of an even number, the upper)."""
    return sorted(values)[len(values) // 2]


def interleaved_us(
    captured: dict[Name, Captured], budget_s: float = 0.02, least: int = 3, most: int = 15
) -> dict[Name, float]:
    """Median microseconds of one call of each, taken in two rounds of opposite order.

    A GPU slows under load, so whoever always runs first would seem faster. A round replays each graph
    for about ``budget_s`` seconds, ``least`` to ``most`` times.
    """
    replays = {
        name: min(max(int(budget_s * 1e6 / (it.replay_us(1)[0] * it.count)), least), most)
        for name, it in captured.items()
    }
    times: dict[Name, list[float]] = {name: [] for name in captured}
    for order in (list(captured), list(captured)[::-1]):
        for name in order:
            times[name] += captured[name].replay_us(replays[name])
    return {name: median(found) for name, found in times.items()}

"""What all tests share: hypothesis profiles, no network, which tests run where."""

import os
from collections.abc import Callable, Generator
from functools import partial
from importlib.util import find_spec
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # set before Transformers is imported: a download fails

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # before Triton is imported: kernels run in its interpreter
    )
    if find_spec("triton") is not None:
        from tests.interpreter import hurry

        hurry()

PROFILE = os.environ.get("DDTREE_PROFILE", "quick")

# No deadline: the first example of a property pays for imports, and shared cores are slow at times.
# For the same reason a slow draw is no failure. Quick runs repeat the same examples, so that CI's
# verdict belongs to the change; long runs look for new ones and print how to repeat them.
SLOW = [HealthCheck.too_slow]
settings.register_profile(
    "quick", max_examples=30, derandomize=True, deadline=None, suppress_health_check=SLOW
)
settings.register_profile(
    "long", max_examples=2000, print_blob=True, deadline=None, suppress_health_check=SLOW
)
settings.register_profile(  # a mutant is killed by any failure, however large
    "mutants", settings.get_profile("quick"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(PROFILE)


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker and what it starts one thread: as many workers as cores share the machine.

    More threads than cores wait for each other in loops: such a process takes six times as long.
    """
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"


def roomy(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call a function from a frame so large that all above it lie in one block of memory.

    Python keeps frames in blocks of 16 KiB. A loop that calls a function past the end of one asks the
    system for a block at each call, and gives it back: a hundred times the price of a call.
    """
    __tracebackhide__ = True
    return function(**arguments)


roomy.__code__ = roomy.__code__.replace(co_stacksize=70_000)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run each test in a roomy frame."""
    test = pyfuncitem.obj
    pyfuncitem.obj = partial(roomy, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


def pytest_report_header() -> str:
    """Say what a run can show."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"ddtree: profile {PROFILE}, torch {torch.__version__}, {device}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, counted as deselected, what this profile or machine cannot run."""
    unavailable = set()
    if PROFILE != "long":
        unavailable.add("long")
    if not torch.cuda.is_available():
        unavailable.add("gpu")
    left_out = [item for item in items if any(map(item.get_closest_marker, unavailable))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

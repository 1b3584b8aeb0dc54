"""What the tests of the kernels share."""

import gc
from collections.abc import Iterator

import pytest
import torch

from ddtree.impl.check import InGraphs


@pytest.fixture(autouse=True)
def no_violation_is_left() -> Iterator[None]:
    """What a replay broke is told to the next call, whoever makes it: no test leaves that to another."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        gc.collect()  # graphs, and their checks, that lie in cycles with a caught exception
        list(InGraphs().poll())

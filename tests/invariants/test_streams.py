"""Streams of our own: none of PyTorch's pool, and never part of a capture."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ddtree.invariants.streams import apart, beside, capturing, own_stream, uncollected


class Holder:
    """Something that a reference cycle keeps until the collector comes."""

    def __init__(self, held: object) -> None:
        self.itself, self.held = self, held


def make_garbage(count: int) -> None:
    """Enough of it to make the collector run."""
    for _ in range(count):
        Holder(None)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_rests_and_is_then_as_it_was(was_enabled: bool) -> None:
    """Also where the capture fails; a cycle that was dropped is freed later."""
    runs: list[str] = []
    gc.collect()
    gc.callbacks.append(lambda phase, _: runs.append(phase))
    try:
        if not was_enabled:
            gc.disable()
        with pytest.raises(KeyError), uncollected(), uncollected():  # noqa: PT012 # several threads capture
            make_garbage(10 * gc.get_threshold()[0])
            assert runs == []
            raise KeyError
        assert gc.isenabled() == was_enabled
        make_garbage(10 * gc.get_threshold()[0])
        assert bool(runs) == was_enabled
    finally:
        gc.callbacks.pop()
        gc.enable()


def test_the_collector_rests_until_the_last_of_several_ends() -> None:
    """Captures of two threads, of which the one that began first ends first."""
    first, second = uncollected(), uncollected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_what_is_apart_on_a_cpu_just_runs() -> None:
    """The driver, which may be missing, is not asked."""
    made = torch.zeros(2)
    with apart(made.device):
        made.add_(1)
    assert made.tolist() == [1, 1]


@pytest.mark.gpu
def test_a_graph_that_is_garbage_does_not_end_a_capture() -> None:
    """It lies in a cycle, and the captured function makes enough objects for the collector to run."""
    held = torch.zeros(1, device="cuda")
    with capturing() as graph:
        held.add_(1)
    Holder(graph)
    del graph
    with capturing() as graph:
        make_garbage(10 * gc.get_threshold()[0])
        held.add_(2)
    gc.collect()
    graph.replay()
    assert held.item() == 2


@pytest.mark.gpu
def test_a_stream_is_of_one_device_and_use_and_not_of_the_pool() -> None:
    """PyTorch hands out 32; another thread, which has not used the device yet, gets one too."""
    device = torch.device("cuda", 0)
    pool = {torch.cuda.Stream().cuda_stream for _ in range(64)}  # noqa: TID251 # looked at alone
    assert len(pool) == 32
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(own_stream, device, "of another thread").result()
    mine = own_stream(device, "of this one")
    assert len({mine.cuda_stream, other.cuda_stream} - pool) == 2
    assert own_stream(torch.device("cuda"), "of this one") is mine
    with torch.cuda.stream(mine):
        assert torch.cuda.current_stream() == mine
        assert torch.arange(4, device=device).sum().item() == 6


@pytest.mark.gpu
def test_what_is_apart_runs_during_a_capture() -> None:
    """Copies from and to the host and new memory, all there at once; none of it is replayed."""
    device = torch.device("cuda", 0)
    held = torch.zeros(2, device=device)
    with capturing() as graph:
        held.add_(1)
        with apart(device):
            made = torch.tensor([5.0, 6.0], device=device)
            made[1] = 7  # a copy from the host, which a capture refuses
            assert made.tolist() == [5, 7]
        held.add_(made)
        with apart(device):
            made.fill_(3)
    assert (held.tolist(), made.tolist()) == ([0, 0], [3, 3])
    made[0] = 10
    graph.replay()
    assert (held.tolist(), made.tolist()) == ([11, 4], [10, 3])


@pytest.mark.gpu
def test_what_is_beside_comes_in_between() -> None:
    """Behind what the current stream has before, ahead of what it gets later."""
    device = torch.device("cuda", 0)
    held = torch.zeros(2**20, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**8)  # what its name says, on the device
    held.add_(1)
    with beside(device):
        assert torch.cuda.current_stream() == own_stream(device, "beside")
        torch.cuda._sleep(10**8)
        held.mul_(10)
    held.add_(2)
    assert (held == 12).all()

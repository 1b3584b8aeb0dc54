"""CUDA streams that belong to nobody else, and what a thread may do while a stream is captured.

``torch.cuda.Stream()`` makes no stream: it hands out, in turn, the 32 that PyTorch keeps for a device, and
the one that ``torch.cuda.graph`` captures on is among them. Who draws one may so hold the very stream that is
being captured, by this thread or another: work put there does not run but becomes part of the graph, or ends
the capture with an error. The streams of this module are the driver's own making.

A graph that is freed while a stream is captured ends that capture too. Python's collector frees what lies in
reference cycles whenever it happens to run, so it rests while ``capturing`` does its work.
"""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: the stream does not wait for the default stream, nor that for it."""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

_streams: dict[tuple[int, str], torch.cuda.ExternalStream] = {}
"""By device and use. Streams cost memory on the device, and the allocator keeps what was freed on each, so
there is one of each for the life of the process."""
_rests: list[bool] = []
"""For each that lets the collector rest, in the order of their beginnings: whether it was at work then. All
but the first found it at rest. Each that ends takes the last entry: the first is for whoever ends last."""
_lock = threading.RLock()
"""Taken anew by who holds it: finalizers of what the collector frees meanwhile may ask for a stream."""


def own_stream(device: torch.device, use: str) -> torch.cuda.ExternalStream:
    """The stream of a CUDA device for one use; it is made when it is first asked for."""
    torch.cuda.init()
    index = device.index
    if index is None:  # of a bare "cuda"
        index = torch.cuda.current_device()
    with _lock:
        if (index, use) not in _streams:
            made = torch.cuda.ExternalStream(_create(index), torch.device("cuda", index))
            _streams[index, use] = made
        return _streams[index, use]


def _create(index: int) -> int:
    """Make a stream in the device's primary context, which a thread that was just begun has not entered."""
    device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    with relaxed():
        _call("cuDeviceGet", ctypes.byref(device), index)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxPushCurrent_v2", context)
        try:
            _call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(context))
    assert stream.value is not None
    return stream.value


def _call(function: str, *arguments: object) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if code:
        raise RuntimeError(f"{function} failed: CUDA error {code}")


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread allocate, load kernels and wait, whatever stream is being captured by whomever.

    The driver forbids that to every thread while one captures, and ends the capture of who does it
    nevertheless. What the current stream's capture would have to contain stays forbidden.
    """
    mode = ctypes.c_int(RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@contextmanager
def capturing() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what this thread launches into a new graph, while nothing is collected as garbage."""
    graph = torch.cuda.CUDAGraph()
    with uncollected(), torch.cuda.graph(graph):  # noqa: TID251 # the one place
        yield graph


@contextmanager
def uncollected() -> Iterator[None]:
    """Let Python's collector rest, in all threads: the driver lets none of them free a graph.

    Threads begin and end as they like: the last to end wakes it.
    """
    with _lock:
        _rests.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _rests.pop():
                gc.enable()


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """On a CUDA device a stream that begins behind the current one, which goes on behind it."""
    stream, current = own_stream(device, "beside"), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Run at once, and to the end, what is part of no graph although the current stream may be captured.

    It waits for no other stream's work. What it reads has to be there already.
    """
    if device.type != "cuda":
        yield
        return
    with relaxed():
        stream, done = own_stream(device, "apart"), torch.cuda.Event()
        with torch.cuda.stream(stream):
            yield
        done.record(stream)
        done.synchronize()

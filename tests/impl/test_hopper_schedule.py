"""Which blocks the Hopper kernel attends, and how, without such a GPU.

Triton's interpreter does not know Gluon, but the schedule is plain arithmetic: its functions' own source is
run here with PyTorch in place of Gluon's language, for every program of a launch one after another.
"""

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree.impl import attention_hopper_kernels as kernels
from ddtree.impl.attention_configs import HopperConfig
from ddtree.spec import index
from tests.impl.test_attention import Call

CONFIG = HopperConfig()
BLOCK_M, BLOCK_N = CONFIG.block_m, CONFIG.block_n
GROUP = 3
KV_HEADS = 2


class Pointer:
    """A tensor's address, and one of its elements."""

    def __init__(self, tensor: Tensor, offset: Tensor | int = 0) -> None:
        """Point to an element, or to several."""
        self.tensor, self.offset = tensor.flatten().cpu(), offset

    def __add__(self, offset: Any) -> "Pointer":
        """Move on."""
        return Pointer(self.tensor, self.offset + offset)


class Language:
    """What the schedule uses of Gluon's language, on PyTorch's tensors; layouts mean nothing here."""

    int32, int64 = torch.int32, torch.int64
    BlockedLayout = SliceLayout = staticmethod(lambda *_: None)
    num_warps = staticmethod(lambda: 4)
    where, sum = staticmethod(torch.where), staticmethod(torch.sum)
    arange = staticmethod(lambda start, stop, _: torch.arange(start, stop))
    full = staticmethod(lambda shape, number, dtype, _: torch.full(shape, number, dtype=dtype))
    # the kernel scans sums alone
    associative_scan = staticmethod(lambda numbers, axis, _: numbers.cumsum(axis))

    @staticmethod
    def minimum(a: Any, b: Any) -> Tensor:
        """The smaller of each two."""
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def maximum(a: Any, b: Any) -> Tensor:
        """The larger of each two."""
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def max(a: Tensor, axis: int | None = None) -> Tensor:
        """The largest."""
        return a.amax() if axis is None else a.amax(axis)

    @staticmethod
    def load(place: Pointer, mask: Tensor | None = None, other: int = 0) -> Tensor:
        """Elements; outside the mask nothing is read, and inside it the tensor's end is an error."""
        offset = torch.as_tensor(place.offset)
        if mask is None:
            return place.tensor[offset]
        return torch.where(mask, place.tensor[torch.where(mask, offset, 0)], other)


def schedule() -> dict[str, Any]:
    """The module of the kernel on PyTorch: its functions, those of addresses and the language."""
    names: dict[str, Any] = {**vars(kernels), "gl": Language}
    for name, kernel in vars(kernels).items():
        if hasattr(index, name):
            names[name] = getattr(index, name)
        elif hasattr(kernel, "fn"):
            names[name] = FunctionType(kernel.fn.__code__, names)
        elif hasattr(kernel, "value"):
            names[name] = kernel.value
    return names


def segments(call: Call, num_programs: int, window: int | None) -> Iterator[tuple[Any, ...]]:
    """All (request, KV head, tile, full blocks, masked blocks, how many of these are in the pool's units)."""
    names = schedule()
    function: Callable[[str], Any] = names.__getitem__
    layout, has_window = call.layout, window is not None
    batch, num_words = layout.qo_indptr.numel() - 1, call.mask.words.shape[1]
    positions, bound = Pointer(layout.positions), window or 1
    indptrs = (Pointer(layout.qo_indptr), Pointer(layout.kv_indptr), batch, bound)
    masks = (Pointer(call.mask.words), call.mask.words.stride(0), num_words, positions)
    request, blocks, max_rows, _ = function("_requests")(*indptrs, GROUP, 64, BLOCK_N, has_window)
    full_tiles, side_by_side, groups, tails = function("_programs")(
        max_rows, num_programs, CONFIG.tail_saving
    )
    full_programs = groups * side_by_side
    for program in range(int(full_programs + tails)):
        is_full = program < full_programs
        tiles, in_line, first_tile, base, count = (
            (side_by_side, full_tiles // side_by_side, 0, 0, groups)
            if is_full
            else (1, torch.tensor(1), full_tiles, full_programs, tails)
        )
        share, ends, num_units, span = function("_spans")(blocks, count, in_line * KV_HEADS)
        unit = (program - base) // tiles * span
        end = torch.minimum(unit + span, num_units)
        while unit < end:
            b, q_start, q_len, _, prefix_len, kv_head, _, item_start, item_stop, stop, tile = (
                function("_segment")(
                    unit, end, program - base, request, blocks, share, ends, tiles, in_line, first_tile,
                    indptrs, KV_HEADS,
                )
            )  # fmt: skip
            if tile * BLOCK_M < q_len * GROUP:
                block, full_start, full_stop, block_stop = function("_full_blocks")(
                    unit, item_start, item_stop, stop, prefix_len, q_start, q_len, tile, positions, bound,
                    GROUP, BLOCK_N, has_window,
                )  # fmt: skip
                num_front, num_pooled, num_rest = function("_rest_blocks")(
                    block, full_start, full_stop, block_stop, index.num_blocks(prefix_len, BLOCK_N),
                    q_start, q_len, tile, masks, GROUP, BLOCK_N,
                )  # fmt: skip
                rest = [
                    int(block + i if i < num_front else full_stop + i - num_front)
                    for i in range(int(num_rest))
                ]
                yield (
                    int(b), int(kv_head), int(tile),
                    list(range(int(full_start), int(full_stop))), rest, int(num_pooled),
                )  # fmt: skip
            unit = stop


def visible(call: Call, request: int, window: int | None) -> tuple[Tensor, int]:
    """[rows, entries] what a request's rows see, the tree from a new block on; blocks of the prefix."""
    layout = call.layout
    start, stop = layout.qo_indptr[request : request + 2].tolist()
    prefix_len = int(layout.kv_indptr[request + 1] - layout.kv_indptr[request])
    rows, blocks = stop - start, index.num_blocks(prefix_len, BLOCK_N)
    positions = layout.positions[start:stop].cpu()
    bits = (call.mask.words[start:stop, :, None].cpu() >> torch.arange(32)) & 1
    sees = torch.cat([torch.ones(rows, prefix_len), bits.flatten(1)[:, :rows]], 1).bool()
    if window is not None:
        keys = torch.cat([torch.arange(prefix_len), positions])
        sees &= keys >= index.window_start(positions, window)[:, None]
    apart = torch.zeros(rows, (blocks + index.num_blocks(rows, BLOCK_N)) * BLOCK_N).bool()
    apart[:, :prefix_len] = sees[:, :prefix_len]
    apart[:, blocks * BLOCK_N : blocks * BLOCK_N + rows] = sees[:, prefix_len:]
    return apart, blocks


@pytest.mark.parametrize("num_programs", [1, 2, 132])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 40, 70, 900])
@pytest.mark.parametrize(
    ("q_lens", "prefixes", "is_deep"),
    [
        ([65, 17, 5], [1000, 130, 64], False),
        ([1, 5, 17, 2, 3, 4, 5, 1], [0, 63, 64, 65, 127, 128, 129, 134], False),
        ([200, 90], [65, 128], True),
    ],
)
def test_every_entry_is_attended_once(
    q_lens: list[int], prefixes: list[int], is_deep: bool, window: int | None, num_programs: int
) -> None:
    """What rows see is attended once, without a mask where all see all, the pool before the tree."""
    call = Call(q_lens, prefixes, GROUP, kv_heads=KV_HEADS, is_deep=is_deep)
    sees = [visible(call, b, window) for b in range(len(q_lens))]
    attended = {
        (b, kv_head, tile): torch.zeros(apart.shape[1], dtype=torch.int64)
        for b, (apart, _) in enumerate(sees)
        for kv_head in range(KV_HEADS)
        for tile in range(index.num_blocks(q_lens[b] * GROUP, BLOCK_M))
    }
    for b, kv_head, tile, full, rest, num_pooled in segments(call, num_programs, window):
        apart, prefix_blocks = sees[b]
        rows = apart[tile * BLOCK_M // GROUP : -(-(tile + 1) * BLOCK_M // GROUP)]
        for j in full + rest:
            attended[b, kv_head, tile][j * BLOCK_N : (j + 1) * BLOCK_N] += 1
        for j in full:
            assert rows[:, j * BLOCK_N : (j + 1) * BLOCK_N].all()
        assert all(j < prefix_blocks for j in full + rest[:num_pooled])
        assert all(j >= prefix_blocks for j in rest[num_pooled:])
    for (b, _, tile), times in attended.items():
        rows = sees[b][0][tile * BLOCK_M // GROUP : -(-(tile + 1) * BLOCK_M // GROUP)]
        assert times.max() <= 1
        assert bool((times > 0)[rows.any(0)].all())

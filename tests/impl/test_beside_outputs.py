"""What a loop launches beside a round writes its outputs, all of them, and nothing beside them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddtree.impl.layers import add_norm, embed_norm, gate, split_heads
from ddtree.impl.layout import plan_blocks
from ddtree.impl.products import norm_gate, norm_heads, product_add
from ddtree.impl.record import pack_record
from tests.impl.cases import DEVICE, case, moved

MARGIN = 4096
"""Bytes before and behind a tensor, more than the lanes of a block that a mask has to cut off."""
MARK = 0x5A


class Fenced(TorchDispatchMode):
    """Gives tensors without content marked memory, with a margin on both sides."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] not in {"empty", "empty_like", "new_empty"}:
            return made
        size = made.numel() * made.element_size()
        whole = torch.full((size + 2 * MARGIN,), MARK, dtype=torch.uint8, device=made.device)
        self.memory.append(whole)
        return whole[MARGIN : MARGIN + size].view(made.dtype).view(made.shape)

    def broken(self) -> list[int]:
        """Places, in bytes from a tensor's beginning or end, that were written to."""
        edges = [edge != MARK for one in self.memory for edge in (one[:MARGIN], one[-MARGIN:])]
        return [int(at) for edge in edges for at in edge.nonzero()]


def random(*shape: int) -> Tensor:
    """Numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize(("batch", "rows"), [(1, 3), (3, 5)])
def test_nothing_is_written_beside_outputs(batch: int, rows: int) -> None:
    """No size is a power of two, so that every block is cut off by a mask."""
    c = case(4, "normal", batch, 4, 11, rows - 1)
    lens = torch.full((batch,), 3, dtype=torch.int32, device=DEVICE)
    table, roots = torch.arange(9 * batch, device=DEVICE).view(batch, 9), lens.long()
    given = moved(c.tree, DEVICE), moved(c.layout, DEVICE), moved(c.acceptance, DEVICE)
    logits = random(c.layout.positions.numel(), 11)
    x, norm, weight, angles = random(rows, 37), random(37), random(5 * 6, 37), random(9, 6)
    blocks, at = torch.zeros(batch, rows).long().to(DEVICE), torch.arange(rows, device=DEVICE)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    rope = angles, angles
    with Fenced() as fenced:
        layout, live, begun = plan_blocks(lens, lens + 1, table, roots, blocks)
        records = [pack_record(*given, of) for of in (None, logits)]
        normed = [*add_norm(x, x, norm, 0.1), *embed_norm(x, at[None], starts, rows, norm, 0.1)]
        heads = split_heads(random(rows, 30), rope, at, (3, 1), (None, None))
        few = norm_heads(x, norm, 0.1, weight, None, rope, at, (3, 1))
        gated = gate(random(rows, 2 * 37)), norm_gate(x, norm, 0.1, weight[:26])
        added = product_add(x, weight[:13], None, random(rows, 13))
    assert len(fenced.memory) >= 20
    assert fenced.broken() == []
    for one in (live, begun, layout.positions, *records, *normed, *heads, *few, *gated, added):
        marks = (one.contiguous().view(torch.uint8).view(*one.shape, -1) == MARK).all(-1)
        assert not marks.any()


def test_a_write_beside_an_output_is_seen() -> None:
    """One element too far, on either side."""
    with Fenced() as fenced:
        made = torch.empty(3, device=DEVICE)
        made.as_strided((1,), (1,), made.storage_offset() + 3).fill_(1.0)
        made.as_strided((1,), (1,), made.storage_offset() - 1).fill_(1.0)
    assert fenced.broken() == [*range(MARGIN - 4, MARGIN), *range(4)]

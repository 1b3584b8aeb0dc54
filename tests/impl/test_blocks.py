"""How a round of the loop begins and ends on the device: blocks, and what is kept of who accepted."""

import pytest
import torch

from ddtree.impl.commit import keep_accepted, move_rows
from ddtree.impl.layout import BLOCK, plan_blocks
from ddtree.spec import Commit, InputError
from tests.impl.cases import DEVICE


@pytest.mark.parametrize(("batch", "rows", "context"), [(1, 1, 3), (5, 4, 9), (3, 16, BLOCK + 7)])
def test_blocks_follow_the_prefixes_of_who_takes_part(batch: int, rows: int, context: int) -> None:
    """Unused places, places at their limit and beyond, prefixes of none and of all entries."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        held = torch.randint(-1, context + 1, (batch,), generator=generator, dtype=torch.int32)
        limits = torch.randint(0, context + 2, (batch,), generator=generator, dtype=torch.int32)
        held[seed % batch], limits[seed % batch] = context, context + 1
        table = torch.randperm(batch * (context + 2), generator=generator).view(batch, -1)
        table = table[:, :context]  # rows lie apart
        roots = torch.randint(0, 50, (batch,), generator=generator)
        block = torch.full((batch, rows), 99, device=DEVICE)
        given = held.to(DEVICE), limits.to(DEVICE), table.to(DEVICE), roots.to(DEVICE)
        layout, live, begun = plan_blocks(*given, block)

        takes_part = (held >= 0) & (held < limits)
        assert live.tolist() == torch.where(takes_part, held, -1).tolist()
        assert begun.tolist() == roots.tolist() == block[:, 0].tolist()
        assert begun.data_ptr() != given[3].data_ptr()
        assert (block[:, 1:] == 99).all()
        lens = torch.where(takes_part, held, 0)
        assert layout.qo_indptr.tolist() == [rows * b for b in range(batch + 1)]
        assert layout.kv_indptr.tolist() == [0, *lens.cumsum(0).tolist()]
        expected = torch.cat([table[b, :n] for b, n in enumerate(lens.tolist())])
        assert torch.equal(layout.kv_indices[: len(expected)].cpu(), expected)
        positions = lens[:, None] + torch.arange(rows)
        assert torch.equal(layout.positions.cpu(), positions.flatten().long())
        assert layout.max_q_len == rows
        for tensor, before in zip(given, (held, limits, table, roots), strict=True):
            assert torch.equal(tensor.cpu(), before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_only_who_accepted_has_news(dtype: torch.dtype) -> None:
    """More requests than one program does."""
    counts = torch.arange(300, dtype=torch.int32) % 3
    new, held = torch.arange(300, dtype=dtype), torch.full((300,), -7, dtype=dtype)
    found = held.to(DEVICE)
    keep_accepted(counts.to(DEVICE), new.to(DEVICE), found)
    assert torch.equal(found.cpu(), torch.where(counts > 0, new, held))


def test_rows_of_further_pools_follow_a_commit() -> None:
    """Rows that are source and target at once too; -1 moves nothing, and what is not alike is refused."""
    before = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 2, 2)
    pools = [pool.to(DEVICE, copy=True) for pool in before]
    src, dst = torch.tensor([[1, 3, 4], [5, -1, -1]]), torch.tensor([[1, 2, 3], [0, -1, -1]])
    commit = Commit(torch.zeros(2, dtype=torch.int32), src, dst)
    moved = Commit(*(tensor.to(DEVICE) for tensor in (commit.prefix_lens, src, dst)))
    move_rows(pools, moved)
    for pool, was in zip(pools, before, strict=True):
        expected = was.clone()
        for source, target in ((3, 2), (4, 3), (5, 0)):
            expected[target] = was[source]
        assert torch.equal(pool.cpu(), expected)
    with pytest.raises(InputError, match="pools must be contiguous"):
        move_rows([pools[0].transpose(1, 2)], moved)

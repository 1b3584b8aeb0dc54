"""How a round of the loop goes on the device: blocks, inputs of rows, and what is kept of who accepted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ddtree.impl import commit
from ddtree.impl.commit import TILE, keep_accepted, move_rows
from ddtree.impl.commit_kernels import move_kernel
from ddtree.impl.layout import BLOCK, plan_blocks, row_inputs
from ddtree.spec import Commit, InputError
from tests.impl.cases import DEVICE, case, differences, moved


@pytest.mark.parametrize(
    ("batch", "rows", "context"), [(1, 1, 3), (5, 4, 9), (2, 3, 0), (3, 16, BLOCK + 7)]
)
def test_blocks_follow_the_prefixes_of_who_takes_part(batch: int, rows: int, context: int) -> None:
    """Unused places, places at their limit and beyond, prefixes of none and of all entries, no entries."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        held = torch.randint(-1, context + 1, (batch,), generator=generator, dtype=torch.int32)
        limits = torch.randint(0, context + 2, (batch,), generator=generator, dtype=torch.int32)
        held[seed % batch], limits[seed % batch] = context, context + 1
        wide = torch.randperm(batch * (context + 2), generator=generator).view(batch, -1)
        table = wide[:, :context]
        roots = torch.randint(0, 50, (batch,), generator=generator)
        block = torch.full((batch, rows), 99, device=DEVICE)
        given = (
            held.to(DEVICE, copy=True), limits.to(DEVICE, copy=True),
            wide.to(DEVICE, copy=True)[:, :context],  # rows lie apart
            roots.to(DEVICE, copy=True),
        )  # fmt: skip
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


@pytest.mark.parametrize(("batch", "budget"), [(1, 0), (3, 4), (5, 66)])
def test_rows_have_their_trees_tokens_and_their_slots(batch: int, budget: int) -> None:
    """Ragged requests, more rows than one program does; rows past the last have token 0 and the pad slot."""
    c = case(7, "normal", batch, 3, 11, budget)
    layout = c.layout
    starts = layout.qo_indptr.tolist()
    expected_tokens, expected_slots = [], layout.out_cache_loc.tolist()
    for b, start in enumerate(starts[:-1]):
        expected_tokens += c.tree.token_ids[b, : starts[b + 1] - start].tolist()
    unused = -len(expected_tokens) % 128 + 1  # a program has 128 rows: the last has one
    expected_tokens += [0] * unused
    expected_slots += [31] * unused
    larger = replace(
        layout,
        positions=torch.cat([layout.positions, torch.zeros(unused, dtype=torch.int64)]),
        out_cache_loc=torch.cat([layout.out_cache_loc, torch.full((unused,), -1)]),
        is_captured=True,
    )
    tokens, slots = row_inputs(moved(c.tree, DEVICE), moved(larger, DEVICE), 31)
    assert tokens.tolist() == expected_tokens
    assert slots.tolist() == expected_slots


def test_blocks_whose_indptr_overflows_are_refused() -> None:
    """By their rows as by the entries of their prefixes."""
    lens = torch.zeros(2, dtype=torch.int32, device="meta")
    for context, rows in ((3, 2**30), (2**30, 3)):
        table = torch.empty(2, context, dtype=torch.int64, device="meta")
        blocks = torch.empty(2, rows, dtype=torch.int64, device="meta")
        words = f"2 requests of {context} entries and {rows} rows overflow"
        with pytest.raises(InputError, match=words):
            plan_blocks(lens, lens, table, lens.long(), blocks)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_only_who_accepted_has_news(dtype: torch.dtype) -> None:
    """More requests than one program does."""
    counts = torch.arange(257, dtype=torch.int32) % 3
    new, held = torch.arange(257, dtype=dtype), torch.full((257,), -7, dtype=dtype)
    found = held.to(DEVICE, copy=True)
    keep_accepted(counts.to(DEVICE), new.to(DEVICE), found)
    assert torch.equal(found.cpu(), torch.where(counts > 0, new, held))


def test_rows_of_further_pools_follow_a_commit() -> None:
    """Rows that are source and target at once too; -1 moves nothing, and what is not alike is refused."""
    before = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 2, 2)
    pools = [pool.to(DEVICE, copy=True) for pool in before]
    src, dst = torch.tensor([[1, 3, 4], [5, -1, -1]]), torch.tensor([[1, 2, 3], [0, -1, -1]])
    lens = torch.zeros(2, dtype=torch.int32)
    done = Commit(*(tensor.to(DEVICE) for tensor in (lens, src, dst)))
    move_rows(pools, done)
    for pool, was in zip(pools, before, strict=True):
        expected = was.clone()
        for source, target in ((3, 2), (4, 3), (5, 0)):
            expected[target] = was[source]
        assert torch.equal(pool.cpu(), expected)
    with pytest.raises(InputError, match="pools must be contiguous"):
        move_rows([pools[0].transpose(1, 2)], done)


def test_rows_of_pools_unlike_in_size_alone_move_where_all_have_the_slots() -> None:
    """The smaller pool's last slot is one; a slot past it moves in none of them."""
    before = [torch.arange(size * 3, dtype=torch.float32).view(size, 1, 3) for size in (6, 4)]
    pools = [pool.to(DEVICE, copy=True) for pool in before]
    src, dst = torch.tensor([[3, 4]], device=DEVICE), torch.tensor([[0, 1]], device=DEVICE)
    move_rows(pools, Commit(torch.zeros(1, dtype=torch.int32, device=DEVICE), src, dst))
    for pool, was in zip(pools, before, strict=True):
        assert torch.equal(pool.cpu(), torch.cat([was[3:4], was[1:]]))


def test_kv_moves_in_the_smallest_pages() -> None:
    """Of two slots: the table stays."""
    c = replace(case(9, "normal", 3, 4, 11, 17), page_size=2)
    assert c.acceptance.num_accepted.tolist() == [3, 4, 2]
    assert not differences("commit_kv", c)


@pytest.mark.parametrize("width", [1, 3])
def test_rows_longer_than_a_program_holds(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of no power of two; a program holds a tile, of all steps together, and no word is left out."""
    before = torch.arange(3 * (TILE + 3), dtype=torch.int32).view(torch.float16).view(3, 1, -1)
    pool = before.to(DEVICE, copy=True)
    src = torch.tensor([[2, 0, 1][:width]], device=DEVICE)
    dst = torch.tensor([[0, 2, 1][:width]], device=DEVICE)
    blocks: list[int] = []

    class Watched:
        """The kernel, which tells its block."""

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, BLOCK: int, **named: Any) -> None:
                blocks.append(BLOCK)
                move_kernel[grid](*args, BLOCK=BLOCK, **named)

            return launch

    monkeypatch.setattr(commit, "move_kernel", Watched())
    move_rows([pool], Commit(torch.zeros(1, dtype=torch.int32, device=DEVICE), src, dst))
    moved_rows = before[[2, 1, 2 if width == 1 else 0]]
    assert torch.equal(pool.view(torch.int32).cpu(), moved_rows.view(torch.int32))
    assert blocks == [TILE // {1: 1, 3: 4}[width]]


def test_nothing_new_is_kept_and_nothing_moved_of_no_requests() -> None:
    """Nothing is launched, and the pools stay."""
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    keep_accepted(none, none, none.clone())
    pool = torch.full((3, 1, 2), 7.0, device=DEVICE)
    nowhere = torch.empty((0, 4), dtype=torch.int64, device=DEVICE)
    move_rows([pool], Commit(none, nowhere, nowhere))
    assert (pool == 7).all()

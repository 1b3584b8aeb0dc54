"""What only the device knows is never refused: whatever it is, nothing outside the call's memory changes."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree import impl
from ddtree.invariants import InvariantViolation, debug
from ddtree.spec import (
    Acceptance,
    Budget,
    DraftTree,
    FlatMask,
    Horizon,
    PagedKV,
    QLen,
    VerifyLayout,
)
from tests.impl.cases import DEVICE

ROWS, CONTEXT = 11, 30
GENERATOR = torch.Generator().manual_seed(0)
DRAFT = torch.randn(2, 4, 50, generator=GENERATOR).log_softmax(-1).to(DEVICE)
SLOTS = torch.randperm(100, generator=GENERATOR)[: 2 * CONTEXT].view(2, CONTEXT).to(DEVICE)


def tensor(*values: Any) -> Tensor:
    """Numbers on the device."""
    return torch.tensor(values, device=DEVICE)


@cache
def drafted() -> DraftTree:
    """Two trees of 11 rows."""
    return impl.build_tree(DRAFT, tensor(1, 2), Budget(ROWS - 1))


def fields(layout: VerifyLayout) -> dict[str, list[int]]:
    """A layout's numbers, those of ``kv_indices`` that were written."""
    used = int(layout.kv_indptr[-1])
    found = {name: part.tolist() for name, part in vars(layout).items() if isinstance(part, Tensor)}
    return found | {"kv_indices": found["kv_indices"][:used]}


@pytest.mark.parametrize(
    ("prefix_lens", "q_lens", "taken"),
    [
        ((5, 3), (-1, 11), ((5, 3), (0, 11))),
        ((5, 3), (500, 11), ((5, 3), (11, 11))),
        ((5, 3), (11, 12), ((5, 3), (11, 11))),
        ((500, 3), (11, 11), ((30, 3), (11, 11))),
        ((5, 2**31 - 1), (7, -(2**31)), ((5, 30), (7, 0))),
    ],
)
def test_lengths_that_do_not_fit_are_cut(
    prefix_lens: tuple[int, int], q_lens: tuple[int, int], taken: tuple[tuple[int, ...], ...]
) -> None:
    """A plan of lengths outside is that of the nearest that fit, tails and all."""
    tree = drafted()
    found = impl.plan_verify(tree, tensor(*prefix_lens), SLOTS, tensor(*q_lens))
    expected = impl.plan_verify(tree, tensor(*taken[0]), SLOTS, tensor(*taken[1]))
    assert fields(found) == fields(expected)
    assert found.qo_indptr.tolist() == [0, taken[1][0], sum(taken[1])]
    assert found.kv_indptr.tolist() == [0, taken[0][0], sum(taken[0])]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("path", "count", "prefix_len"),
    [
        ((0, 7, 2, 2, 9), 5, 5),
        ((0, -40, 2000, 3, 4), 5, 5),
        ((0, 1, 2, 3, 4), 1000, 5),
        ((0, 1, 2, 3, 4), 5, 28),
        ((0, 1, 2, 3, 4), 5, -40),
    ],
)
def test_a_commit_writes_in_its_own_memory(
    path: tuple[int, ...], count: int, prefix_len: int, page_size: int
) -> None:
    """Whatever the path, the count, the prefix and the slots are: other rows and memory around stay."""
    layout = impl.plan_verify(drafted(), tensor(5, 3), SLOTS)
    layout = replace(layout, kv_indptr=tensor(0, prefix_len, prefix_len + 3).int())
    around = torch.full((4, CONTEXT), -7, device=DEVICE)
    around[1:3] = SLOTS
    memory = torch.arange(140, dtype=torch.float32, device=DEVICE)[:, None, None].repeat(1, 1, 2)
    before, pool = memory.clone(), memory[20:80]  # slots from 60 on are outside
    nodes = tensor(path, (0, -1, -1, -1, -1)).int()
    accepted = Acceptance(nodes, tensor(count, 0).int(), tensor(0, 0))
    impl.commit_kv(PagedKV((pool,), (pool,), around[1:3], page_size), layout, accepted)
    assert (around[::3] == -7).all()
    assert torch.equal(around[2], SLOTS[1])
    assert torch.equal(memory[:20], before[:20]) and torch.equal(memory[80:], before[80:])


@pytest.mark.parametrize("level", ["cheap", "full"])
def test_debug_mode_names_rows_that_are_not_there(level: str) -> None:
    """Fewer query rows, or choices, than the indptr gives out: named before the function refuses them."""
    tree = drafted()
    layout = impl.plan_verify(tree, tensor(5, 3), SLOTS)
    mask = impl.tree_mask(tree, layout)
    query, pool = torch.zeros(20, 1, 64, device=DEVICE), torch.zeros(100, 1, 64, device=DEVICE)
    with debug(level=level), pytest.raises(InvariantViolation) as caught:
        impl.verify_attention(query, query, query, pool, pool, layout, mask)
    numbers = caught.value.invariant, caught.value.expected, caught.value.found
    assert numbers == ("buffer_capacity", "at least 22", 20)
    with debug(level=level), pytest.raises(InvariantViolation) as caught:
        impl.accept_greedy(tree, torch.arange(5, device=DEVICE), layout, Horizon(4))
    numbers = caught.value.invariant, caught.value.expected, caught.value.found
    assert numbers == ("buffer_capacity", "at least 22", 5)


def test_debug_mode_names_requests_that_are_left_out() -> None:
    """An acceptance of one request of two: fixed buffers may hold more, but none that have rows."""
    layout = impl.plan_verify(drafted(), tensor(5, 3), SLOTS)
    one = Acceptance(tensor((0, -1)).int(), tensor(1).int(), tensor(7))
    with debug(), pytest.raises(InvariantViolation) as caught:
        impl.commit_kv(PagedKV((), (), SLOTS.clone()), layout, one)
    violation = caught.value
    numbers = violation.invariant, violation.request, violation.expected, violation.found
    assert numbers == ("stale_tail", 1, 11, 22)


def test_a_fill_reads_no_mask_past_its_end() -> None:
    """A flat mask that is too short for its indptr counts as False behind its end."""
    tree = drafted()
    layout = impl.plan_verify(tree, tensor(5, 3), SLOTS)
    longer = torch.ones(2000, dtype=torch.bool, device=DEVICE)
    buffers = impl.VerifyBuffers(2, QLen(ROWS), CONTEXT, device=DEVICE)
    buffers.fill(tree, layout, FlatMask(longer[:100]))
    assert buffers.mask.allowed.nonzero().flatten().tolist() == list(range(100))


def test_a_tree_cut_out_of_a_wider_one_is_read_as_it_is() -> None:
    """The first rows of wider trees lie apart in memory; every step reads them as their copy."""
    whole = drafted()
    cut = DraftTree(
        whole.token_ids[:, :6],
        whole.parents[:, :6],
        whole.depths[:, :6],
        whole.scores[:, :6],
        whole.num_nodes.clamp(max=6),
    )
    copied = DraftTree(*(part.contiguous() for part in vars(cut).values()))
    assert not cut.parents.is_contiguous() and copied.parents.is_contiguous()
    layouts = [impl.plan_verify(tree, tensor(5, 3), SLOTS) for tree in (cut, copied)]
    assert fields(layouts[0]) == fields(layouts[1])
    masks = [impl.tree_mask(tree, layouts[0]).words for tree in (cut, copied)]
    assert torch.equal(*masks)
    ids = whole.token_ids[:, 1].repeat_interleave(6)
    found = [impl.accept_greedy(tree, ids, layouts[0], Horizon(4)) for tree in (cut, copied)]
    assert found[0].nodes.tolist() == found[1].nodes.tolist()
    assert int(found[0].num_accepted.min()) > 1

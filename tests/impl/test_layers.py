"""What stands between a layer's matrix products, against the same formulas in PyTorch."""

import pytest
import torch
from torch import Tensor

from ddtree.impl.layers import (
    GATE_BLOCK,
    add_norm,
    embed_norm,
    gate,
    split_heads,
    write_context,
)
from tests.impl.cases import DEVICE

EPS = 0.25
"""Large, so that its place in the root shows."""


def random(*shape: int) -> Tensor:
    """Numbers that differ from shape to shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    """The root-mean-square norm of the last axis; without a weight as it is."""
    return x if weight is None else weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("width", [5, 2049])
@pytest.mark.parametrize("has_residual", [False, True])
def test_add_norm(width: int, *, has_residual: bool) -> None:
    """The sum and its norm, over widths beside a power of two; without a residual the sum is ``x``."""
    x, weight = random(3, width), random(width)
    residual = random(4, width)[1:] if has_residual else None
    result, total = add_norm(x, residual, weight, EPS)
    expected = x if residual is None else x + residual
    torch.testing.assert_close(total, expected, rtol=0, atol=0)
    torch.testing.assert_close(result, normed(expected, weight))


def test_totals_may_lie_side_by_side() -> None:
    """A residual that is a part of longer rows, and a sum that becomes one; its neighbours stay."""
    x, weight = random(3, 5), random(5)
    wide, into = random(3, 15), torch.full((3, 20), 77.0, device=DEVICE)
    result, total = add_norm(x, wide[:, 5:10], weight, EPS, into[:, 10:15])
    expected = x + wide[:, 5:10]
    assert torch.equal(into[:, 10:15], expected)
    assert total.data_ptr() == into[:, 10:15].data_ptr()
    assert (into[:, :10] == 77).all()
    assert (into[:, 15:] == 77).all()
    torch.testing.assert_close(result, normed(expected, weight))


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5])
def test_embed_norm(factor: float) -> None:
    """Ragged requests, one of no rows; rows past the last one have token 0, and so has one past its tree."""
    table, weight = random(7, 5), random(5)
    tokens = torch.tensor([[3, 1, 6], [2, 2, 2], [5, 4, 1]], device=DEVICE)
    starts = torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=DEVICE)
    looked_up = [3, 1, 5, 4, 1, 0, 0, 0]
    result, total = embed_norm(table, tokens, starts, 8, weight, EPS, factor)
    expected = factor * table[looked_up]
    assert torch.equal(total, expected)
    torch.testing.assert_close(result, normed(expected, weight))
    # fixed buffers: the layout is of more requests than there are trees
    result, total = embed_norm(table, tokens[:1], starts, 3, weight, EPS)
    assert torch.equal(total, table[[3, 1, 0]])


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "has_norms", "has_pools"),
    [(4, 2, True, True), (1, 3, False, False), (0, 2, True, True)],
)
def test_split_heads(q_heads: int, kv_heads: int, *, has_norms: bool, has_pools: bool) -> None:
    """Queries and keys are normalised and turned by their position's angles; both kinds of KV are kept."""
    head_dim, positions, slots = 6, torch.tensor([7, 0, 7]), torch.tensor([4, 1, 0])
    rows, angles = random(3, (q_heads + 2 * kv_heads) * head_dim), random(9, head_dim)
    norms = (random(head_dim), random(head_dim) + 1) if has_norms else (None, None)
    pools = torch.full((2, 5, kv_heads, head_dim), 77.0, device=DEVICE)
    query, key, value = split_heads(
        rows, (angles.cos(), angles.sin()), positions.to(DEVICE), (q_heads, kv_heads), norms,
        EPS, (pools[0], pools[1]) if has_pools else None, slots.to(DEVICE),
    )  # fmt: skip

    def turned(x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        of_rows = angles[positions.to(DEVICE), None]
        return x * of_rows.cos() + torch.cat([-two, one], -1) * of_rows.sin()

    heads = rows.unflatten(1, (-1, head_dim)).split([q_heads, kv_heads, kv_heads], 1)
    torch.testing.assert_close(query, turned(normed(heads[0], norms[0])))
    torch.testing.assert_close(key, turned(normed(heads[1], norms[1])))
    torch.testing.assert_close(value, heads[2])
    for pool, written in zip(pools, (key, value), strict=True):
        expected = torch.full_like(pool, 77.0)
        if has_pools:
            expected[slots.to(DEVICE)] = written
        assert torch.equal(pool, expected)


@pytest.mark.parametrize(("kv_heads", "has_norms"), [(3, True), (1, False)])
def test_contexts_of_all_layers_are_written_at_once(kv_heads: int, *, has_norms: bool) -> None:
    """As ``split_heads`` would layer by layer; rows without a slot nowhere, and nothing else is touched."""
    layers, head_dim, num_slots = 3, 6, 5
    positions, slots = torch.tensor([7, 0, 7, 2]), torch.tensor([4, -1, 0, 2])
    rows, angles = random(layers, 4, 2 * kv_heads * head_dim), random(9, head_dim)
    rows[:, 1] = torch.nan  # of the row without a slot
    norms = random(layers, head_dim) if has_norms else None
    pools = torch.full((layers, 2, num_slots, kv_heads, head_dim), 77.0, device=DEVICE)
    expected = pools.clone()
    rope = angles.cos(), angles.sin()
    positions, slots = positions.to(DEVICE), slots.to(DEVICE)
    write_context(rows, rope, positions, norms, EPS, pools, slots)
    has_slot = slots >= 0
    for layer in range(layers):
        split_heads(
            rows[layer][has_slot], rope, positions[has_slot], (0, kv_heads),
            (None, None if norms is None else norms[layer]), EPS,
            (expected[layer, 0], expected[layer, 1]), slots[has_slot],
        )  # fmt: skip
    assert torch.equal(pools, expected)
    assert (pools[:, :, [1, 3]] == 77).all()


def test_heads_of_a_row_without_a_slot_go_to_no_pool() -> None:
    """A negative slot is left out; the row's queries, keys and values come all the same."""
    rows, angles = random(2, 3 * 6), random(9, 6)
    pools = torch.full((2, 3, 1, 6), 77.0, device=DEVICE)
    slots, positions = torch.tensor([-1, 1], device=DEVICE), torch.tensor([3, 4], device=DEVICE)
    _, key, value = split_heads(
        rows,
        (angles.cos(), angles.sin()),
        positions,
        (1, 1),
        pools=(pools[0], pools[1]),
        slots=slots,
    )
    assert torch.equal(pools[0, 1], key[1])
    assert torch.equal(pools[1, 1], value[1])
    assert torch.equal(value, rows[:, None, 12:])
    assert (pools[:, [0, 2]] == 77).all()


def test_a_norm_of_heads_adds_nothing_unless_told() -> None:
    """Without ``eps`` a head of equal numbers is normalised to 1, however small they are."""
    rows, still = torch.full((1, 18), 1e-3, device=DEVICE), torch.zeros(1, 6, device=DEVICE)
    ones = torch.ones(6, device=DEVICE)
    position = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    query, key, value = split_heads(rows, (still + 1, still), position, (1, 1), (ones, ones))
    for found, expected in ((query, 1.0), (key, 1.0), (value, 1e-3)):
        torch.testing.assert_close(found, torch.full_like(found, expected))


@pytest.mark.parametrize("width", [5, GATE_BLOCK + 1])
def test_gate(width: int) -> None:
    """``silu(gate) * up``, the gate's half first, over widths beside a block's."""
    both = random(2, 2 * width)
    expected = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
    torch.testing.assert_close(gate(both), expected)


def test_no_rows_give_none() -> None:
    """Nothing is launched, and the shapes are right."""
    angles = random(9, 6)
    assert add_norm(random(0, 5), random(0, 5), random(5), EPS)[1].shape == (0, 5)
    tokens, starts = torch.zeros(1, 1).long().to(DEVICE), torch.zeros(2).int().to(DEVICE)
    assert embed_norm(random(3, 5), tokens, starts, 0, random(5), EPS)[0].shape == (0, 5)
    query, key, value = split_heads(random(0, 48), (angles, angles), torch.empty(0).long(), (4, 2))
    assert [each.shape for each in (query, key, value)] == [(0, 4, 6), (0, 2, 6), (0, 2, 6)]
    assert gate(random(0, 10)).shape == (0, 5)
    pools, none = torch.full((2, 2, 3, 1, 6), 77.0), torch.empty(0).long()
    write_context(random(2, 0, 12), (angles, angles), none, None, EPS, pools, none)
    assert (pools == 77).all()

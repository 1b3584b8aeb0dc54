"""Products of few rows with what stands around them, against the launches one by one."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.impl import products
from ddtree.impl.layers import add_norm, gate, split_heads
from ddtree.impl.products import (
    BLOCK_K,
    BLOCK_N,
    MOST_SUMS,
    SHARED,
    _tiles,
    norm_gate,
    norm_heads,
    product_add,
)
from tests.impl.cases import DEVICE

EPS = 0.25
"""Large, so that its place in the root shows."""
SIZES = [(1, 5), (17, BLOCK_K), (65, 2 * BLOCK_K + 3)]
"""Rows and width: a few, full tiles, beyond them."""


def random(*shape: int) -> Tensor:
    """Numbers that differ from shape to shape, small enough for sums of many."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE) / 4


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize(
    ("head_dim", "heads", "has_norms", "has_bias"),
    [(64, (2, 1), True, False), (96, (1, 3), False, True)],
)
def test_norm_heads(
    rows: int, width: int, head_dim: int, heads: tuple[int, int], *, has_norms: bool, has_bias: bool
) -> None:
    """The norm, the product, the heads' norms and their rotation; what lies beside the inputs is NaN."""
    outputs = (heads[0] + 2 * heads[1]) * head_dim
    held = torch.full((rows + 1, width), torch.nan, device=DEVICE)
    x = held[:rows].copy_(random(rows, width))
    weight, norm = random(outputs, width), random(width)
    bias = random(outputs) if has_bias else None
    norms = (random(head_dim), random(head_dim) + 1) if has_norms else (None, None)
    angles = random(9, head_dim) * 20
    rope, positions = (angles.cos(), angles.sin()), torch.arange(rows, device=DEVICE) * 5 % 9
    found = norm_heads(x, norm, EPS, weight, bias, rope, positions, heads, norms, EPS)
    normed, _ = add_norm(x, None, norm, EPS)
    expected = split_heads(F.linear(normed, weight, bias), rope, positions, heads, norms, EPS)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_norm_gate(rows: int, width: int) -> None:
    """The norm, both products and the gate; outputs that fill no block."""
    x, weight, norm = random(rows, width), random(2 * 19, width), random(width)
    normed, _ = add_norm(x, None, norm, EPS)
    found = norm_gate(x, norm, EPS, weight)
    torch.testing.assert_close(found, gate(F.linear(normed, weight)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_add(rows: int, width: int, *, has_bias: bool) -> None:
    """The product, with its bias, on top of the residual, which stays as it is."""
    x, weight, residual = random(rows, width), random(19, width), random(rows, 19)
    bias, before = random(19) if has_bias else None, residual.clone()
    found = product_add(x, weight, bias, residual)
    torch.testing.assert_close(found, residual + F.linear(x, weight, bias), atol=2e-5, rtol=2e-5)
    assert torch.equal(residual, before)


def test_products_in_half_precision_round_where_products_of_their_own_do() -> None:
    """float16: sums in float32, rounded before the head's norm, the gate and the residual."""
    x, norm = random(5, 40).half(), random(40).half()
    weight, angles = random(3 * 64, 40).half(), random(9, 64) * 20
    rope, positions = (angles.cos().half(), angles.sin().half()), torch.arange(5, device=DEVICE)
    normed, _ = add_norm(x, None, norm, EPS)

    def linear(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() @ b.double().T).half()

    ones = random(64).half()
    found = norm_heads(x, norm, EPS, weight, None, rope, positions, (1, 1), (ones, ones), EPS)
    expected = split_heads(linear(normed, weight), rope, positions, (1, 1), (ones, ones), EPS)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=2**-9)
    gated = norm_gate(x, norm, EPS, weight)
    torch.testing.assert_close(gated, gate(linear(normed, weight)), atol=1e-7, rtol=2**-9)
    total = product_add(x, weight, None, random(5, 192).half())
    torch.testing.assert_close(total, random(5, 192).half() + linear(x, weight), atol=0, rtol=2**-9)


TILES = [
    (1, 16, torch.bfloat16, (16, 128, 4)),
    (17, 16, torch.bfloat16, (32, 128, 4)),
    (64, 128, torch.bfloat16, (32, 128, 2)),
    (64, 64, torch.bfloat16, (64, 128, 3)),
    (16, 256, torch.bfloat16, (16, 64, 2)),
    (16, 32, torch.float32, (16, 128, 4)),
    (33, 128, torch.float32, (32, 64, 2)),
    (300, 16, torch.float32, (256, 32, 2)),
]
"""Rows, outputs of a program, dtype; rows and columns of a step, and how many of them are on their way."""


@pytest.mark.parametrize(("rows", "outputs", "dtype", "expected"), TILES)
def test_which_tiles_so_many_rows_take(
    rows: int, outputs: int, dtype: torch.dtype, expected: tuple[int, int, int]
) -> None:
    """The most that registers and shared memory hold, in a table."""
    assert _tiles(torch.empty(rows, 7, dtype=dtype), outputs) == expected


def test_tiles_of_every_size_fit() -> None:
    """Powers of two of 16 at least, as matrix units want; two steps or more, so that loads overlap sums."""
    for dtype in (torch.float16, torch.float32):
        for rows in range(1, 130):
            for outputs in (16, 32, 64, 128, 256):
                block_m, block_k, stages = _tiles(torch.empty(rows, 7, dtype=dtype), outputs)
                assert {block_m, block_k} <= {16, 32, 64, 128, 256}
                assert block_m * outputs <= MOST_SUMS
                assert 2 <= stages <= 4
                assert stages * (block_m + outputs) * block_k * dtype.itemsize <= SHARED


def test_how_many_outputs_a_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's halves padded to matrix units and no further; gate and up of a block; a block."""
    told: list[int] = []

    def tiles(x: Tensor, outputs: int) -> tuple[int, int, int]:
        told.append(outputs)
        return _tiles(x, outputs)

    monkeypatch.setattr(products, "_tiles", tiles)
    x, norm, position = random(1, 5), random(5), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for head_dim in (64, 96, 128, 256):
        angles = random(1, head_dim)
        norm_heads(x, norm, EPS, random(3 * head_dim, 5), None, (angles, angles), position, (1, 1))
    norm_gate(x, norm, EPS, random(6, 5))
    product_add(x, random(7, 5), None, random(1, 7))
    assert told == [64, 128, 128, 256, 2 * BLOCK_N, BLOCK_N]


def test_no_rows_give_none() -> None:
    """Nothing is launched, and the shapes are right."""
    x, norm, angles = random(0, 5), random(5), random(9, 64)
    positions = torch.empty(0, dtype=torch.int64, device=DEVICE)
    found = norm_heads(x, norm, EPS, random(256, 5), None, (angles, angles), positions, (2, 1))
    assert [each.shape for each in found] == [(0, 2, 64), (0, 1, 64), (0, 1, 64)]
    assert norm_gate(x, norm, EPS, random(14, 5)).shape == (0, 7)
    assert product_add(x, random(7, 5), None, random(0, 7)).shape == (0, 7)

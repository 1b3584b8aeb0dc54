"""Log-softmax: near the true one, and the same bits however it is computed."""

import math
import random
import struct
from decimal import Context, Decimal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hs
from torch import Tensor

from ddtree.spec import Budget, InputError, build_tree
from ddtree.spec.exact import exponential, log_1p, split_steps, weight_steps
from ddtree.spec.softmax import MAX_VOCAB, ROW_REACH, TILE, TILE_REACH, log_softmax
from tests.spec.test_tree import assert_equal

INF = math.inf
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@hs.composite
def logits(draw: hs.DrawFn, max_vocab: int = 3 * TILE) -> Tensor:
    """Rows [2, vocab] of any scale, dtype and share of -inf; often with ties."""
    vocab = draw(hs.sampled_from([1, 2, 7, TILE - 1, TILE, TILE + 1, max_vocab]))
    g = torch.Generator().manual_seed(draw(hs.integers(0, 2**32)))
    value = torch.randn(2, vocab, generator=g) * 2.0 ** draw(hs.integers(-30, 14))
    if draw(hs.booleans()):
        value = value.round()
    value += draw(hs.sampled_from([0.0, 0.0, -7.5, 1e4, -6e4]))
    if draw(hs.booleans()):
        value = value.masked_fill(torch.rand(2, vocab, generator=g) < 0.7, -INF)
    return value.to(draw(hs.sampled_from(DTYPES))).clamp(max=6e4)


def bits_of(number: float) -> int:
    """A Python float's bits."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def float_of(bits: int) -> float:
    """The Python float of the low 64 bits."""
    bits &= 2**64 - 1
    return float(struct.unpack("d", struct.pack("Q", bits))[0])


def plain(row: list[float], order: random.Random) -> list[float]:
    """Log-softmax of one row on Python floats and ints, each sum in an order of its own."""
    tiles = [row[start : start + TILE] for start in range(0, len(row), TILE)]
    peak = max(row)
    if peak == -INF:
        return row
    whole, part = -(2**40), 0
    for tile in order.sample(tiles, len(tiles)):
        base = max(tile)
        steps = 0
        for value in order.sample(tile, len(tile)):
            if value >= base - TILE_REACH and value > -INF:
                steps += weight_steps(exponential(value - base, bits_of, float_of), bits_of)
        if base >= peak - ROW_REACH:
            weight = exponential(base - peak, bits_of, float_of) * (float(steps) * 2.0**-10)
            more = split_steps(weight, bits_of)
            whole, part = whole + more[0], part + more[1]
    total = float(whole) * 2.0**-40 + float(part) * 2.0**-91
    log_total = log_1p(total, bits_of, float_of)
    return [(value - peak) - log_total for value in row]


@given(logits())
@example(torch.full((1, 5), -INF))
@example(torch.tensor([[0.0, -17.0, -18.0]]))
@example(torch.tensor([[-30.0] * TILE + [0.0, -80.0], [0.0] * TILE + [5.0, -INF]]))
def test_is_within_one_unit_of_the_true_log_softmax(value: Tensor) -> None:
    """Of float32's last place, or within 2**-39; -inf stays -inf, and a row of it too."""
    found, true = log_softmax(value), value.double().log_softmax(-1)
    true = true.masked_fill(value == -INF, -INF)  # a row of -inf alone has no softmax
    is_one = true > torch.finfo(torch.float32).min
    assert torch.equal(found == -INF, ~is_one)
    near = true[is_one].float().abs()
    unit = (torch.nextafter(near, torch.tensor(INF)) - near).double()
    assert ((found.double()[is_one] - true[is_one]).abs() <= unit.clamp(min=2.0**-39)).all()
    assert (found <= 0).all()


@given(logits(TILE + 300), hs.randoms(use_true_random=False))
@example(torch.full((1, 3), 1.5), random.Random(0))
def test_any_order_of_the_sums_gives_the_same_bits(value: Tensor, order: random.Random) -> None:
    """Torch's vectors and Python's floats, summed in shuffled orders, agree to the last bit."""
    found = log_softmax(value)
    for row, expected in zip(value.float().tolist(), found, strict=True):
        assert torch.equal(torch.tensor(plain(row, order), dtype=torch.float64).float(), expected)


@given(logits(2 * TILE), hs.integers(0, 2**32))
def test_tokens_may_change_places_within_their_tile(value: Tensor, seed: int) -> None:
    """So may whole tiles: each token keeps its log-prob's bits."""
    g = torch.Generator().manual_seed(seed)
    found = log_softmax(value)
    inner = torch.randperm(min(TILE, value.shape[1]), generator=g)
    order = torch.arange(value.shape[1])
    order[: len(inner)] = inner
    if value.shape[1] == 2 * TILE:
        order = order.roll(TILE)
    assert torch.equal(log_softmax(value[:, order]), found[:, order])


@given(logits(), hs.sampled_from([-8.0, 1.0, 64.0]))
def test_depends_on_differences_alone(value: Tensor, shift: float) -> None:
    """Logits moved by a number that rounds none of them have the same log-probs."""
    moved = value.double() + shift
    if torch.equal(moved.float().double(), moved):
        assert torch.equal(log_softmax(moved.float()), log_softmax(value))


@given(logits())
def test_larger_logits_have_log_probs_no_smaller(value: Tensor) -> None:
    """The order of tokens is the logits' order, so that group maxima find the likeliest."""
    found = log_softmax(value).gather(1, value.float().argsort(-1))
    assert (found[:, 1:] >= found[:, :-1]).all()


def test_rows_do_not_depend_on_each_other() -> None:
    """A row alone, in a batch and in another dtype that holds it has the same log-probs."""
    value = torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = log_softmax(value)
    assert torch.equal(log_softmax(value[1, 2]), found[1, 2])
    assert torch.equal(log_softmax(value.float()), found)
    assert torch.equal(log_softmax(value.double()), found)


@given(hs.floats(-700, 0))
@example(0.0)
@example(-0.0)
@example(-5e-324)
@example(-math.log(2) / 2)
def test_exponential(x: float) -> None:
    """Within 2**-28.5 of itself, at most 1, and 1 at 0."""
    found = exponential(x, bits_of, float_of)
    assert found == pytest.approx(math.exp(x), rel=2**-28.5, abs=0)
    assert 0 < found <= 1 and (found == 1) >= (x == 0)


@given(hs.floats(0, 2.0**40) | hs.floats(0, 4) | hs.floats(0, 1e-6))
def test_log_1p(x: float) -> None:
    """Within 2**-50 of itself."""
    assert log_1p(x, bits_of, float_of) == pytest.approx(math.log1p(x), rel=2**-50, abs=0)


@pytest.mark.parametrize("x", [0.4, 0.4142135, math.sqrt(2) - 1])
def test_log_1p_takes_all_terms_of_its_series(x: float) -> None:
    """Up to sqrt(2) the last two terms are worth 2**-50: with them it is within 2**-51 of itself."""
    true = (1 + Decimal(x)).ln(Context(prec=40))
    assert abs(Decimal(log_1p(x, bits_of, float_of)) - true) <= true * Decimal(2.0**-51)


@given(hs.floats(0, 2.0**52), hs.floats(0, 1))
@example(2.0**52, 1.0)
@example(2.0**52 - 0.5, 0.5)
def test_steps(steps: float, weight: float) -> None:
    """Numbers become whole steps that are right to half of the last one."""
    whole, part = split_steps(steps, bits_of)
    assert whole == round(steps)
    assert abs((steps - whole) * 2.0**51 - part) <= 0.5
    assert abs(weight_steps(weight, bits_of) - weight * 2.0**50) <= 0.5


@given(logits(300), hs.integers(0, 40), hs.none() | hs.integers(1, 5))
def test_a_tree_from_logits_is_that_of_their_log_probs(
    value: Tensor, budget: int, topk: int | None
) -> None:
    """Ties that rounding to float32 makes included."""
    roots = torch.tensor([5])
    found = build_tree(value[None], roots, Budget(budget), topk, from_logits=True)
    assert_equal(found, build_tree(log_softmax(value)[None], roots, Budget(budget), topk))


def test_logits_whose_log_probs_tie_rank_by_token_id() -> None:
    """Two logits a hair apart far below the peak share a log-prob: the smaller id comes first."""
    value = torch.tensor([[[0.0, -1e-8, -2e-8, 30.0]]])
    assert value.unique().numel() == 4
    tree = build_tree(value, torch.tensor([1]), Budget(4), from_logits=True)
    assert tree.token_ids.tolist() == [[1, 3, 0, 1, 2]]
    above = build_tree(value.flip(-1), torch.tensor([1]), Budget(4), from_logits=True)
    assert above.token_ids.tolist() == [[1, 0, 1, 2, 3]]


def test_rows_of_minus_infinity_give_no_nodes() -> None:
    """Nor does a vocabulary's -inf part; no depth below an empty one is reached."""
    value = torch.tensor([[[0.0, -INF], [-INF, -INF], [1.0, 1.0]]])
    tree = build_tree(value, torch.tensor([1]), Budget(5), from_logits=True)
    assert tree.num_nodes.tolist() == [2] and tree.scores[0, :2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("wrong", [math.nan, INF])
def test_nan_and_infinite_logits_are_refused(wrong: float) -> None:
    """With the place and the number."""
    value = torch.zeros(1, 2, 3)
    value[0, 1, 2] = wrong
    with pytest.raises(InputError, match=rf"\[0, 1, 2\] is {wrong}; a logit is finite or -inf"):
        build_tree(value, torch.tensor([1]), Budget(3), from_logits=True)


def test_vocabularies_over_the_limit_are_refused() -> None:
    """A row whose sums might not fit."""
    with pytest.raises(InputError, match=f"a row has {MAX_VOCAB + 1} logits"):
        log_softmax(torch.zeros(1).expand(MAX_VOCAB + 1))


def test_sums_of_the_largest_vocabulary_fit() -> None:
    """4194304 tokens are 2**10 tiles, each at most 2**12 weights of 2**50 steps: 2**62, and no more do."""
    assert MAX_VOCAB == 4194304
    assert MAX_VOCAB // TILE * weight_steps(1.0, bits_of) * 2**12 <= 2**72


def test_the_likeliest_token_is_told_how_much_others_weigh() -> None:
    """Of two tokens 30 apart it has -exp(-30), which has 105 of its steps of 2**-50."""
    for last in ([], [-INF]):
        assert log_softmax(torch.tensor([0.0, -30.0, *last]))[0] == pytest.approx(
            -math.exp(-30), rel=0.5 / 105, abs=0
        )


def test_float32s_lowest_number_is_a_log_prob() -> None:
    """What lies below it is -inf."""
    lowest = torch.finfo(torch.float32).min
    assert log_softmax(torch.tensor([0.0, lowest])).tolist() == [0.0, lowest]
    assert log_softmax(torch.tensor([1e38, lowest])).tolist() == [0.0, -INF]

"""The target's distribution against an independent definition; Philox against published vectors."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hs

from ddtree.spec.contracts import QLen, VerifyLayout
from ddtree.spec.errors import InputError
from ddtree.spec.sampling import (
    Sampling,
    first_argmax,
    philox,
    position_uniforms,
    row_uniforms,
    sample,
    target_distribution,
)
from tests import oracles

ONES = 0xFFFFFFFF
VECTORS = [  # counter, key, output: philox4x32-10 in Random123's kat_vectors
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (ONES, ONES, ONES, ONES),
        (ONES, ONES),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
words = hs.integers(0, ONES)


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], output: tuple[int, ...]
) -> None:
    """Random123's known answers for philox4x32-10, from spec and from the oracle."""
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key)) == output
    assert oracles.philox4x32(counter, key) == output


@given(hs.integers(0, 2**64 - 1), hs.lists(hs.integers(0, 2**40), min_size=1, max_size=5))
@example(0, [0])
@example(2**64 - 1, [0, 2**32 - 1, 2**32])
def test_a_uniform_is_the_first_53_bits_of_its_position(seed: int, positions: list[int]) -> None:
    """The uniform of (seed, position) is the oracle's first 53 bits, whatever else is asked for."""
    expected = []
    for position in positions:
        counter = (position & ONES, position >> 32, 0, 0)
        first, second, _, _ = oracles.philox4x32(counter, (seed & ONES, seed >> 32))
        expected.append((first << 32 | second) >> 11)
    uniforms = position_uniforms(seed, torch.tensor(positions))
    assert uniforms.dtype == torch.float64
    assert (uniforms * 2**53).tolist() == expected
    assert ((uniforms >= 0) & (uniforms < 1)).all()


def test_requests_with_one_seed_get_different_streams() -> None:
    """One seed for a batch is a seed for each request, and neighbours do not share numbers."""
    seeds = Sampling(seed=5).seeds(3)
    streams = [position_uniforms(seed, torch.arange(50)).tolist() for seed in seeds]
    assert seeds == [5, 6, 7]
    assert len({number for stream in streams for number in stream}) == 150
    assert Sampling(seed=(9, 4)).seeds(2) == [9, 4]


@given(
    hs.lists(hs.integers(-30, 30) | hs.just(-1000), min_size=1, max_size=7),
    hs.sampled_from([0.0, 0.25, 1.0, 3.0]),
    hs.none() | hs.integers(1, 8),
    hs.none() | hs.sampled_from([0.01, 0.47, 0.93, 1.0]),
)
@example([0, 0, 0, 0], 1.0, 2, None)
@example([0, 0, 0, 0], 1.0, None, 0.47)
@example([-1000, 3], 1.0, None, 0.93)
@example([0, 0, 0, 0], 1.0, None, 0.5)  # two reach it exactly
def test_equals_the_independent_definition(
    logits: list[int], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Temperature, then top-k, then top-p, ties by token id; -1000 stands for -inf."""
    row = [-math.inf if logit == -1000 else logit / 4 for logit in logits]
    if max(row) == -math.inf:
        return
    found = target_distribution(torch.tensor([row]), temperature, top_k, top_p)[0]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(
        oracles.truncated(row, temperature, top_k, top_p), rel=1e-12, abs=1e-15
    )


def test_written_out() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8 under each truncation, by hand."""
    logits = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    for arguments, expected in [
        ((1.0, None, None), [1 / 8, 1 / 2, 1 / 8, 1 / 4]),
        ((0.5, None, None), [1 / 22, 16 / 22, 1 / 22, 4 / 22]),  # squares, renormalised
        ((1.0, 3, None), [1 / 7, 4 / 7, 0, 2 / 7]),  # of the tied eighths the smaller token id
        ((1.0, None, 0.7), [0, 2 / 3, 0, 1 / 3]),
        ((1.0, 2, 0.6), [0, 1, 0, 0]),  # after top-k the best has 2/3, which reaches 0.6
        ((0.0, None, None), [0, 1, 0, 0]),
    ]:
        assert target_distribution(logits, *arguments)[0].tolist() == pytest.approx(expected)
    assert target_distribution(logits)[0].tolist() == pytest.approx([1 / 8, 1 / 2, 1 / 8, 1 / 4])


def test_of_many_ties_the_smallest_tokens_are_kept() -> None:
    """More than a sort that is not stable leaves in order."""
    kept = target_distribution(torch.zeros(1, 33), 1.0, 5)[0]
    assert kept.tolist() == pytest.approx([1 / 5] * 5 + [0.0] * 28)


def test_a_tiny_temperature_leaves_the_likeliest() -> None:
    """Ties share; nothing overflows."""
    logits = torch.tensor([[-3.0, 5.0, 5.0]])
    assert target_distribution(logits, 1e-308).tolist() == [[0.0, 0.5, 0.5]]


@given(hs.lists(hs.integers(0, 3), min_size=1, max_size=9))
def test_the_argmax_of_a_tie_is_the_smallest_token(levels: list[int]) -> None:
    """As Python's index of the maximum, on float32 and on bfloat16."""
    logits = torch.tensor([levels]).float()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert first_argmax(logits.to(dtype)).tolist() == [levels.index(max(levels))]


@given(hs.lists(hs.integers(0, 4), min_size=1, max_size=6).filter(any), hs.integers(0, 2**53 - 1))
@example([1, 1, 0], 2**53 - 1)
@example([0, 0, 3], 0)
@example([1, 1, 1, 1], 2**52)
def test_a_sample_inverts_the_distribution_function(shares: list[int], number: int) -> None:
    """Token v is chosen between the sums up to v and up to v included, and never has probability 0."""
    total = sum(shares)
    if total & total - 1:  # keep to eighths, quarters and so on, whose sums are exact
        shares = [*shares, (1 << total.bit_length()) - total]
        total = sum(shares)
    probs = torch.tensor([shares], dtype=torch.float64) / total
    token = int(sample(probs, torch.tensor([number / 2**53], dtype=torch.float64)))
    assert sum(shares[:token]) * 2**53 <= number * total < sum(shares[: token + 1]) * 2**53


def test_a_sample_is_of_the_shares_of_the_sum() -> None:
    """Sums need not be 1, and one so small that u times it rounds onto it gives no token of share 0."""
    smallest = 5e-324
    for shares, number, token in [
        ([1.0, 1.0, 2.0], 0.49, 1),
        ([1.0, 1.0, 2.0], 0.6, 2),
        ([smallest, 0.0], 0.9, 0),
    ]:
        probs = torch.tensor([shares], dtype=torch.float64)
        uniform = torch.tensor([number], dtype=torch.float64)
        assert sample(probs, uniform).tolist() == [token]


def test_seeds_may_lie_in_a_tensor() -> None:
    """In the bits of int64, one for each request; the numbers are those of the seeds."""
    seeds = (5, 2**64 - 1)
    held = Sampling(seed=torch.tensor([5, -1]))
    assert held.seeds(2) == list(seeds)
    with pytest.raises(InputError, match="2 seeds for 3 requests"):
        held.seeds(3)


def test_a_row_draws_the_number_of_its_requests_seed_and_its_position() -> None:
    """Prefixes 4 and 7, three rows and one; siblings stand at one position and share its number."""
    layout = VerifyLayout(
        torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 4, 11], dtype=torch.int32),
        torch.arange(11), torch.tensor([0, 21, 29]), QLen(3), torch.tensor([4, 5, 5, 7]),
        torch.tensor([4, 5, 6, 18]),
    )  # fmt: skip
    found = row_uniforms(Sampling(seed=5), layout, 2)
    expected = [
        oracles.philox4x32((position, 0, 0, 0), (seed, 0))[:2]
        for seed, position in [(5, 4), (5, 5), (5, 5), (6, 7)]
    ]
    assert (found * 2**53).tolist() == [(high << 32 | low) >> 11 for high, low in expected]

"""Every function of ``impl`` against the same function of ``spec``, on fresh inputs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ddtree import impl, spec
from tests.impl.cases import FUNCTIONS, KINDS, case, differences

SIZES = {  # batch, horizon, vocab, budget
    "one node": (1, 1, 1, 1),
    "root alone": (3, 2, 5, 0),
    "nothing drafted": (2, 0, 7, 6),
    "budget 7": (2, 7, 13, 7),
    "a word and one": (1, 5, 33, 32),
    "few candidates": (5, 3, 3, 33),
    "many tokens": (1, 3, 1009, 17),
}
LARGE = {
    "two words": (2, 15, 67, 64),
    "many requests": (33, 3, 13, 8),
    "many groups": (1, 7, 5003, 67),
    "deep": (1, 31, 9, 129),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN and the largest integers: an unwritten output shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_impl_equals_spec(name: str, size: str) -> None:
    """Integers, masks, scores and moved KV are the reference's own."""
    seed = list(SIZES).index(size)
    kind = KINDS[seed % len(KINDS)]
    assert not differences(name, case(seed, kind, *SIZES[size]))


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_every_kind_of_draft_are_equal(kind: str) -> None:
    """Ties, missing candidates, zeros and scores beyond float32 leave trees bit-equal."""
    assert not differences("build_tree", case(7, kind, 2, 4, 33, 16))


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("kind", KINDS)
def test_impl_equals_spec_at_larger_sizes(name: str, size: str, kind: str) -> None:
    """The same where trees need several words, tiles and groups."""
    assert not differences(name, case(len(kind), kind, *LARGE[size]))


def test_a_difference_is_reported_with_its_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a bonus that is one too large is found."""
    c = case(3, "normal", 2, 3, 9, 8)

    def wrong(*args: object) -> spec.Acceptance:
        right = spec.accept_greedy(*args)  # type: ignore[arg-type]
        return replace(right, bonus=right.bonus + 1)

    monkeypatch.setattr(impl, "accept_greedy", wrong)
    lines = differences("accept_greedy", c)
    assert [line.split(":")[0] for line in lines] == ["acceptance.bonus[0]", "acceptance.bonus[1]"]


def test_memory_is_poisoned() -> None:
    """What a launcher allocates does not hold a plausible value by luck."""
    like = torch.zeros(1)
    assert like.new_empty(3).isnan().all()
    assert (like.new_empty(3, dtype=torch.int32) == 2**31 - 1).all()

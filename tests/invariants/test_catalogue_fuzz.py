"""The properties of the catalogue: sound implementations hold on any case, mutants are found by chance."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as hs

from ddtree.catalogue import CATALOGUE, PropertyFault
from ddtree.catalogue.attention import AttentionCase, all_ones
from ddtree.catalogue.calls import tree_of
from ddtree.catalogue.sampling import Proposal, Walk
from ddtree.catalogue.text import TextCase
from ddtree.invariants import strategies as st
from ddtree.spec import plan_verify, tree_mask

FAULTS = {
    f"{row.number}: {member.what}": member
    for row in CATALOGUE
    for member in row.members
    if isinstance(member, PropertyFault)
}


def shares(tokens: int, whole: int, least: int = 0) -> hs.SearchStrategy[tuple[float, ...]]:
    """Distributions whose shares are multiples of 1 / whole."""
    cuts = hs.lists(
        hs.integers(0, whole - least * tokens), min_size=tokens - 1, max_size=tokens - 1
    )
    return cuts.map(
        lambda found: tuple(
            (b - a + least) / whole
            for a, b in zip(
                [0, *sorted(found)], [*sorted(found), whole - least * tokens], strict=True
            )
        )
    )


def tree_case(call: st.VerifyCall, window: int | None) -> AttentionCase:
    return AttentionCase(call.layout, tree_mask(call.tree, call.layout, "flat"), window)


def paths(parents: list[int]) -> list[list[int]]:
    """The rank path of each node of a tree with these parents."""
    found: list[list[int]] = [[]]
    children = [0] * (len(parents) + 1)
    for parent in parents:
        found.append([*found[parent], children[parent]])
        children[parent] += 1
    return found[1:]


@hs.composite
def parents(draw: hs.DrawFn) -> list[int]:
    return [draw(hs.integers(0, row)) for row in range(draw(hs.integers(0, 6)))]


def walk(tokens: list[int], probs: list[tuple[float, ...]]) -> Walk:
    tree = tree_of((-1, *[0] * len(tokens)), tokens=([0, *tokens],))
    layout = plan_verify(tree, torch.tensor([2]), torch.arange(8)[None])
    return Walk(tree, layout, tuple(probs[: len(tokens) + 1]))


TOKENS = hs.integers(0, 10)
CASES: dict[str, hs.SearchStrategy[Any]] = {
    "attention": hs.one_of(
        hs.builds(tree_case, st.verify_calls(), hs.none() | hs.integers(1, 6)),
        hs.builds(
            lambda q, p: all_ones([q], [p]), hs.sampled_from([1, 64, 65, 130]), hs.integers(0, 9)
        ),
        hs.builds(
            lambda call: tree_case(call, None),
            st.verify_calls(max_q_len=90, max_batch=1, max_prefix=70),
        ),
    ),
    "features": hs.sets(hs.integers(1, 20), max_size=6).map(lambda nodes: [0, *sorted(nodes)]),
    "tie": hs.lists(
        hs.lists(hs.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=3
    ).map(lambda rows: torch.tensor(rows, dtype=torch.float32)),
    "depths": parents().map(paths),
    "tiles": hs.integers(1, 1100),
    "lossless": hs.builds(Proposal, shares(3, 100), shares(3, 100, least=1)),
    "independent": hs.builds(
        walk,
        hs.lists(hs.integers(0, 2), min_size=1, max_size=2, unique=True),
        hs.lists(shares(3, 10), min_size=3, max_size=3),
    ),
    "text": hs.builds(
        TextCase,
        hs.lists(TOKENS, min_size=1, max_size=4).map(tuple),
        hs.integers(1, 14),
        hs.none() | TOKENS,
        TOKENS,
    ),
    "accepted": TOKENS,
}


@pytest.mark.parametrize("name", CASES)
@given(data=hs.data())
def test_sound_implementations_hold(name: str, data: hs.DataObject) -> None:
    """Whatever the case, every sound implementation of a property's faults holds."""
    case = data.draw(CASES[name])
    for sound in {fault.sound for fault in FAULTS.values() if fault.property.id == name}:
        fault = next(fault for fault in FAULTS.values() if fault.property.id == name)
        measured = fault.property.measure(sound, case)
        assert measured.holds, measured


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fuzzing_finds_the_mutant(fault: PropertyFault) -> None:
    """Random cases alone break the property for the mutant."""
    found = find(
        CASES[fault.property.id],
        lambda case: not fault.property.measure(fault.mutant, case).holds,
        settings=settings(
            max_examples=2000,
            derandomize=True,
            database=None,
            phases=(Phase.generate,),  # the smallest case stands in the catalogue
            deadline=None,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        ),
    )
    assert not fault.property.measure(fault.mutant, found).holds


def test_every_property_is_fuzzed() -> None:
    """No property of the catalogue is without random cases, and none is left over."""
    assert {fault.property.id for fault in FAULTS.values()} == set(CASES)

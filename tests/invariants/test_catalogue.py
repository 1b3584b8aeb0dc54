"""The catalogue: every fault is named as it says, and its sound twin is clean and right."""

import pytest
from torch import Tensor

from ddtree.catalogue import CATALOGUE, CallFault, Pair, PropertyFault, named, pairs
from ddtree.catalogue.run import met
from ddtree.invariants import TABLE, violations

PAIRS = dict(pairs())
CALLS = {
    f"{row.number}: {member.what}": member
    for row in CATALOGUE
    for member in row.members
    if isinstance(member, CallFault)
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_broken_call_is_named(pair: Pair) -> None:
    """The broken call is named by its invariant, request and numbers, with its cause or with none."""
    assert [str(v) for v in violations(pair.sound)] == []
    violation = named(pair.broken, pair.names)
    assert violation is not None, "\n".join(map(str, violations(pair.broken)))
    assert pair.hint in violation.hint
    assert bool(pair.hint) == bool(violation.hint), violation.hint


@pytest.mark.parametrize("fault", CALLS.values(), ids=CALLS)
def test_the_sound_call_holds_the_right_numbers(fault: CallFault) -> None:
    """The sound twin holds the values that the row says by hand; other places named too are named."""
    sound = fault.sound()
    assert fault.right
    for name, at, value in fault.right:
        found = getattr(sound, name)
        if isinstance(found, Tensor):
            found = found.tolist() if at is None else found[at].tolist()
        assert found == value, f"{name}[{at}]"
    broken = fault.spoil(sound)
    for names in fault.also:
        assert named(broken, names) is not None, "\n".join(map(str, violations(broken)))


PROPERTIES = {
    f"{row.number}: {member.what}": member
    for row in CATALOGUE
    for member in row.members
    if isinstance(member, PropertyFault)
}


@pytest.mark.parametrize("fault", PROPERTIES.values(), ids=PROPERTIES)
def test_a_mutant_breaks_its_property(fault: PropertyFault) -> None:
    """On its smallest case the mutant yields the wrong number that the row says, the sound twin the right."""
    case = fault.case()
    assert fault.property.measure(fault.sound, case) == (fault.expected, fault.expected)
    assert fault.property.measure(fault.mutant, case) == (fault.expected, fault.found)
    assert fault.expected != fault.found


@pytest.mark.parametrize("fault", CALLS.values(), ids=CALLS)
def test_debug_mode_passes_the_sound_call(fault: CallFault) -> None:
    """No public function stops the sound call; the broken one is stopped by an invariant, if by anything."""
    sound = fault.sound()
    assert met(sound) is None
    stopped = met(fault.spoil(sound))
    assert stopped is None or stopped.by in {row.id for row in TABLE} | {"types"}


def test_every_row_has_kin() -> None:
    """Each row holds its fault and two more of its kind at least, all told apart by their words."""
    assert len(CATALOGUE) == len({row.number for row in CATALOGUE}) == 34
    for row in CATALOGUE:
        assert len({member.what for member in row.members}) == len(row.members) >= 3, row.number


def test_most_pairs_fit_one_memory() -> None:
    """A replay can write most broken calls into the sound ones' tensors."""
    captured = [pair for pair in PAIRS.values() if pair.path == "captured"]
    assert sum(pair.same_shapes for pair in captured) >= 40

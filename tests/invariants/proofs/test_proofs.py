"""Every proof holds, every wrong twin is refuted, and a counterexample is a call that the checker refuses."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree.invariants import TABLE, dump, load, report
from ddtree.invariants.proofs import PROOFS, Proof, Twin, prove
from ddtree.invariants.proofs.integers import Scope
from ddtree.invariants.proofs.proof import Claim, Formulas, Goal
from ddtree.spec import index

FORMULAS = {
    name
    for name, value in vars(index).items()
    if inspect.isfunction(value) and value.__module__ == index.__name__
}


@pytest.fixture(scope="module")
def called() -> set[str]:
    """The formulas that the proofs run so far have called."""
    return set()


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.name)
def test_proved(proof: Proof, tmp_path: Path) -> None:
    """The proof holds, each twin has a counterexample, and where that is a call, check names the fault."""
    outcome = prove(proof)
    assert not outcome.problems
    for refutation in outcome.refutations:
        twin = refutation.twin
        assert refutation.counterexample is not None, twin.name
        assert refutation.counterexample.broken, twin.name
        case = refutation.case
        if case is None:
            continue
        dump(tmp_path / "case.safetensors", call=case.call)
        broken = [
            violation.invariant for violation in report(load(tmp_path / "case.safetensors")).broken
        ]
        assert case.invariant in broken, (twin.name, broken)
        assert report(case.sound).ok, twin.name


def test_every_formula_is_proved() -> None:
    """Each formula of the module is called by a goal of some proof."""
    formulas = Formulas()
    for proof in PROOFS:
        for goal in proof.goals:
            goal(formulas, Scope())
    assert formulas.called == FORMULAS


def test_names() -> None:
    """Names are unique, and each invariant's proofs exist."""
    names = [proof.name for proof in PROOFS]
    assert len(set(names)) == len(names)
    for proof in PROOFS:
        assert len({twin.name for twin in proof.twins}) == len(proof.twins), proof.name
        assert all(goal.__doc__ for goal in proof.goals), proof.name
    assert {name for row in TABLE for name in row.proofs} <= set(names)


def _false(f: Formulas, s: Scope) -> Claim:
    """A segment is as long as the prefix."""
    prefix_len, q_len = s.naturals("prefix_len q_len")
    return Claim({}, {"length == prefix": f.mask_len(prefix_len, q_len) == prefix_len})


def _empty(f: Formulas, s: Scope) -> Claim:
    """Nothing is below 0 and above it."""
    (number,) = s.naturals("number")
    return Claim({"below": number < 0}, {"above": f.kv_len(number, 0) > 0})


def _divides_negatives(f: Formulas, s: Scope) -> Claim:
    """A row of a negative address: floor and truncation part here."""
    (offset,) = s.naturals("offset")
    return Claim({}, {"row <= 0": f.row_of(-1 - offset, 3) <= 0})


def _divides_by_nothing(f: Formulas, s: Scope) -> Claim:
    """A chunk of no splits."""
    (splits,) = s.naturals("splits")
    return Claim(
        {},
        {
            "a chunk is no shorter than nothing": f.chunk_len(0, splits, 1)
            == f.chunk_len(0, splits, 1)
        },
    )


def _true(f: Formulas, s: Scope) -> Claim:
    """A prefix is no longer than all entries."""
    prefix_len, q_len = s.naturals("prefix_len q_len")
    return Claim({}, {"prefix <= all": f.kv_len(prefix_len, q_len) >= prefix_len})


TWIN = Twin("shrinks", "The tree is taken away.", {"kv_len": lambda p, q: p - q})


@pytest.mark.parametrize(
    ("goal", "says"),
    [
        (_false, "not (length == prefix)"),
        (_empty, "no numbers satisfy its assumptions"),
        (_divides_negatives, "divides numbers from 0 on by a number from 1 on"),
        (_divides_by_nothing, "divides numbers from 0 on by a number from 1 on"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_what_is_no_proof(goal: Goal, says: str) -> None:
    """A false claim, an empty one, and a division on which floor and truncation may part are told."""
    outcome = prove(Proof("none", "Not so.", (goal,), (TWIN,)))
    assert not outcome.ok
    assert says in " ".join(outcome.problems)


def test_twins_that_prove_nothing() -> None:
    """A twin that is right after all fails its proof, as does a proof without a twin."""
    assert prove(Proof("sound", "So.", (_true,), (TWIN,))).ok
    right = replace(TWIN, formulas={"kv_len": index.kv_len})
    outcome = prove(Proof("sound", "So.", (_true,), (TWIN, right)))
    assert not outcome.ok and outcome.refutations[1].counterexample is None
    assert not prove(Proof("sound", "So.", (_true,), ())).ok


@pytest.mark.parametrize("divisor", [-7, -3, -1, 1, 2, 7])
def test_division_is_pythons(divisor: int) -> None:
    """The prover's integers divide as Python's do, whatever the signs."""
    import z3

    from ddtree.invariants.proofs.integers import Int

    for dividend in range(-8, 9):
        number = Int(z3.IntVal(dividend), Scope())
        by = Int(z3.IntVal(divisor), Scope())
        for found, right in (
            (number // divisor, dividend // divisor),
            (dividend // by, dividend // divisor),
            (number % divisor, dividend % divisor),
            (dividend % by, dividend % divisor),
        ):
            simplified: Any = z3.simplify(found.term)
            assert simplified.as_long() == right

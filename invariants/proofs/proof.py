"""What a proof is, and how one is run.

A proof is a list of *goals*. A goal is a function of the formulas and of a scope of integers; it gives
what is assumed and what must follow, for all integers. Run with ``ddtree.spec.index`` itself every goal must
hold; run with a wrong *twin* of one formula, or without one assumption, some goal must fail, and the
prover's numbers show where.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import z3

from ddtree.invariants.call import Call
from ddtree.invariants.proofs.integers import Int, Scope, Truth, term_of
from ddtree.spec import index

Numbers = dict[str, int]
LIMIT_MS = 30_000
"""Longest that the prover may think about one question; a proof takes seconds."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 256, 4096, 2**16, 2**20, None)
"""Bounds on all variables, tried in turn for a counterexample: the smallest numbers are the clearest."""


class Formulas:
    """The formulas of ``ddtree.spec.index``, some of them wrong; notes which ones a goal calls."""

    def __init__(self, wrong: Mapping[str, Callable[..., Any]] | None = None) -> None:
        """Replace the formulas named in ``wrong``."""
        self._wrong = wrong or {}
        self.called: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The formula of that name."""
        right = getattr(index, name)  # a wrong twin of no formula is an error
        self.called.add(name)
        wrong = self._wrong.get(name)
        return right if wrong is None else wrong


@dataclass(frozen=True)
class Claim:
    """For all numbers: where everything that is given holds, everything that is shown does."""

    given: Mapping[str, Truth]
    """Assumptions, each with a name by which a twin may leave it out."""
    shows: Mapping[str, Truth]
    where: Mapping[str, Int] = field(default_factory=dict)
    """Further numbers that a counterexample shows: addresses, ends of segments."""


Goal = Callable[[Formulas, Scope], Claim]


@dataclass(frozen=True)
class Case:
    """A counterexample as a captured call that the checker refuses."""

    invariant: str
    call: Call
    sound: Call
    """The same call made with the right formula."""


@dataclass(frozen=True)
class Twin:
    """One way to get it wrong, which must be refuted."""

    name: str
    why: str
    """The mistake in one sentence."""
    formulas: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Wrong formulas by the name of the right one."""
    without: str = ""
    """An assumption to leave out instead."""
    case: Callable[[Numbers], Case] | None = None
    """The counterexample as a call; None where it cannot be one."""


@dataclass(frozen=True)
class Proof:
    """A statement about the index arithmetic, for all sizes."""

    name: str
    statement: str
    goals: tuple[Goal, ...]
    twins: tuple[Twin, ...]


@dataclass(frozen=True)
class Counterexample:
    """Numbers for which a goal does not hold."""

    goal: str
    broken: tuple[str, ...]
    """What should have been shown and is false."""
    numbers: Numbers
    """The goal's variables."""
    where: Numbers
    """What follows from them."""

    def __str__(self) -> str:
        """The numbers, then what is false."""
        numbers = ", ".join(f"{k} = {v}" for k, v in (self.numbers | self.where).items())
        return f"{numbers}: not ({'; '.join(self.broken)})"


@dataclass(frozen=True)
class Refutation:
    """What became of a twin: refuted where there is a counterexample."""

    twin: Twin
    counterexample: Counterexample | None

    @property
    def case(self) -> Case | None:
        """The counterexample as a captured call, where it can be one."""
        if self.twin.case is None or self.counterexample is None:
            return None
        return self.twin.case(self.counterexample.numbers | self.counterexample.where)


@dataclass(frozen=True)
class Outcome:
    """What became of a proof."""

    proof: Proof
    problems: tuple[str, ...]
    """Why it is no proof: empty where it is one."""
    formulas: tuple[str, ...]
    """Names of the formulas of ``ddtree.spec.index`` that its goals call."""
    refutations: tuple[Refutation, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all goals hold and every twin is refuted."""
        return not self.problems and all(r.counterexample for r in self.refutations)


def prove(proof: Proof) -> Outcome:
    """Show every goal with the right formulas, and that every wrong twin fails."""
    start = perf_counter()
    formulas = Formulas()
    problems = [problem for goal in proof.goals for problem in _show(goal, formulas)]
    refutations = tuple(Refutation(twin, _refute(proof, twin)) for twin in proof.twins)
    if not proof.twins:
        problems.append("it has no wrong twin, so nothing says that it can fail")
    return Outcome(
        proof,
        tuple(problems),
        tuple(sorted(formulas.called)),
        refutations,
        perf_counter() - start,
    )


def _show(goal: Goal, formulas: Formulas) -> list[str]:
    """Why a goal does not hold; nothing where it does."""
    scope = Scope()
    claim = goal(formulas, scope)
    name = goal.__name__
    if _counterexample(name, scope, claim.given, claim, {"False": z3.BoolVal(val=False)}) is None:
        return [f"{name}: no numbers satisfy its assumptions, so it says nothing"]
    shown = dict(claim.shows)
    for dividend, divisor in scope.divisions:
        text = f"{dividend} over {divisor} divides numbers from 0 on by a number from 1 on"
        shown[" ".join(text.split())] = z3.And(dividend >= 0, divisor > 0)
    problems = []
    for what, truth in shown.items():
        solver = _solver(scope, claim.given)
        solver.add(z3.Not(truth))
        verdict = _check(solver)
        if verdict == z3.sat:
            example = _counterexample(name, scope, claim.given, claim, {what: truth})
            problems.append(f"{name}: {example or what}")
        elif verdict == z3.unknown:
            problems.append(f"{name}: undecided ({solver.reason_unknown()}): {what}")
    return problems


def _refute(proof: Proof, twin: Twin) -> Counterexample | None:
    """The smallest counterexample to a twin, in the first goal that has one."""
    for goal in proof.goals:
        scope, formulas = Scope(), Formulas(twin.formulas)
        claim = goal(formulas, scope)
        if twin.without not in claim.given and not formulas.called & twin.formulas.keys():
            continue  # the mistake is not in this goal
        given = {name: truth for name, truth in claim.given.items() if name != twin.without}
        found = _counterexample(goal.__name__, scope, given, claim, claim.shows)
        if found is not None:
            return found
    return None


def _counterexample(
    goal: str, scope: Scope, given: Mapping[str, Truth], claim: Claim, shows: Mapping[str, Truth]
) -> Counterexample | None:
    """Numbers for which what is given holds and what should be shown does not; as small as can be."""
    for most in SIZES:
        solver = _solver(scope, given)
        if most is not None:
            solver.add(*scope.no_larger(most))
        solver.add(z3.Not(z3.And(*shows.values())))
        if _check(solver) != z3.sat:
            continue
        model = solver.model()

        def value(term: Any, model: Any = model) -> int:
            return int(model.eval(term, model_completion=True).as_long())

        broken = tuple(
            what
            for what, truth in shows.items()
            if not z3.is_true(model.eval(truth, model_completion=True))
        )
        return Counterexample(
            goal,
            broken,
            {name: value(term) for name, term in scope.variables.items()},
            {name: value(term_of(number)) for name, number in claim.where.items()},
        )
    return None


def _solver(scope: Scope, given: Mapping[str, Truth]) -> Any:
    """A solver that knows what is given."""
    solver = z3.Solver()
    solver.set("timeout", LIMIT_MS)
    solver.set("ctrl_c", False)  # Python's handler stays: z3's own takes Ctrl-C for "unknown"
    solver.add(*scope.bounds, *given.values())
    return solver


def _check(solver: Any) -> Any:
    """The solver's verdict.

    Raises:
        KeyboardInterrupt: Ctrl-C, also where z3 took it: an interrupted question has no answer.
    """
    verdict = solver.check()
    if verdict == z3.unknown and "interrupted from keyboard" in solver.reason_unknown():
        raise KeyboardInterrupt
    return verdict

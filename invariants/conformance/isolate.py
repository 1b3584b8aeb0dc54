"""Find which factor decides where a backend fails, as the founding bug was found: cross them, and compare.

Compared is what each row of its attention saw; of a backend without one, the layout that it plans.
"""

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, get_args

from ddtree.invariants.conformance import oracle
from ddtree.invariants.conformance.attend import AttentionCase, Execution, attend
from ddtree.invariants.conformance.backend import Backend, Refused
from ddtree.invariants.conformance.causes import cause_of
from ddtree.invariants.conformance.cells import (
    Cell,
    Number,
    Prefixes,
    Widths,
    at,
    can_be,
    captured_q_len,
    case_of,
    grid,
    max_q_len,
    num_nodes,
    plain_sweeps,
    prefix_lens,
    q_lens,
    sweep,
)
from ddtree.invariants.conformance.decide import (
    BEFORE,
    FACTORS,
    NUMBERS,
    Condition,
    Decision,
    Factors,
    Observation,
    Rule,
    decide,
)
from ddtree.invariants.conformance.failure import place_of, told_of
from ddtree.invariants.conformance.plans import judge
from ddtree.invariants.conformance.suspects import suspected
from ddtree.spec.errors import require


@dataclass(frozen=True)
class Tried:
    """One call of the backend."""

    cell: Cell
    failed: tuple[bool, ...] | None
    """For each request; None: the backend refused the call."""
    what: str = ""
    """What was wrong, or why it was refused."""
    ended: str = ""
    """The exception, where the call gave no output: ``ValueError (mine.py:7)``."""


@dataclass(frozen=True)
class Isolation:
    """What was tried, and what it says."""

    name: str
    tried: tuple[Tried, ...]
    decision: Decision
    unsteady: tuple[Cell, ...] = ()
    """Cells that came out otherwise when run again."""
    function: str = "verify_attention"
    """What was called: the attention, or ``plan_verify`` of a backend that has none."""
    cause: str = ""
    """What explains the failures, where they say so; empty: the rule is all that is known."""

    @property
    def is_short(self) -> bool:
        """Whether so few calls were answered that nothing can be told."""
        return answered(self.tried) < ENOUGH

    @property
    def observations(self) -> list[Observation]:
        """One for each request that was not refused."""
        return list(_observations(self.tried))

    @property
    def refused(self) -> Counter[str]:
        """Refused calls by the reason."""
        return Counter(t.what for t in self.tried if t.failed is None)

    @property
    def sentence(self) -> str:
        """The finding."""
        return _sentence(self)

    @property
    def headline(self) -> str:
        """The finding with the backend's name."""
        return headline(self.name, self.sentence)

    @property
    def example(self) -> Tried | None:
        """The failing call with the least in it."""
        return _plainest(self.tried)

    @property
    def table(self) -> list[dict[str, Any]]:
        """For each level of each factor how many requests failed, of how many.

        Numbers beside each other that fail alike (all, none, some) are one level, ``9 to 66``.
        """
        seen = self.observations
        rows: list[dict[str, Any]] = []
        for factor in FACTORS:
            runs: list[tuple[list[Any], list[bool]]] = []
            for level in sorted({o.factors[factor] for o in seen}):
                own = [o.failed for o in seen if o.factors[factor] == level]
                alike = runs and {*runs[-1][1]} == {*own} and factor in NUMBERS
                if alike:
                    runs[-1][0].append(level)
                    runs[-1][1].extend(own)
                else:
                    runs.append(([level], own))
            for levels, own in runs:
                level = levels[0] if len(levels) == 1 else f"{levels[0]} to {levels[-1]}"
                rows.append(
                    {"factor": factor, "level": level, "failed": sum(own), "requests": len(own)}
                )
        return rows

    def data(self) -> dict[str, Any]:
        """Everything, as plain values: for a report or a file."""
        return {
            "backend": self.name,
            "function": self.function,
            "sentence": self.sentence,
            "rules": [rule.text for rule in self.decision.rules],
            "factors": [c.factor for rule in self.decision.rules[:1] for c in rule.conditions],
            "table": self.table,
            "refused": dict(self.refused),
            "unsteady": len(self.unsteady),
            "cells": [{**asdict(t.cell), "failed": t.failed, "what": t.what} for t in self.tried],
        }


def isolate(
    backend: Any, name: str = "", *, seconds: float = 40.0, calls: int = 10_000, seed: int = 0
) -> Isolation:
    """Cross all factors on a backend's attention, or plan, as far as time allows, and decide.

    Args:
        backend: what ``Backend.of`` takes.
        name: what to call it.
        seconds: time for the calls.
        calls: most calls.
        seed: order of the calls.

    Raises:
        InputError: the backend offers neither.
    """
    held = Backend.of(backend, name)
    crossed = [name for name in PATHS_OF if name in held.functions]
    require(
        bool(crossed),
        f"{held.name} offers neither {' nor '.join(PATHS_OF)}; it offers {', '.join(held.functions)}",
    )
    function = crossed[0]
    start = time.monotonic()
    tried: dict[Cell, Tried] = {}

    def spent() -> float:
        """Share of the time."""
        return (time.monotonic() - start) / seconds

    def each(cells: Iterable[Cell], share: float) -> None:
        """Try them until that share of the time or of the calls is spent."""
        for cell in cells:
            if tried and max(spent(), len(tried) / calls) > share:
                return
            if cell not in tried:
                tried[cell] = run(held, cell, function)

    one_width = function == "plan_verify" and not held.accepts(function, "q_lens")

    def had(cells: Iterable[Cell]) -> Iterator[Cell]:
        """Those of an execution that the function has, and of widths that it can be told."""
        return (
            cell
            for cell in cells
            if cell.execution in PATHS_OF[function] and not (one_width and cell.widths != "equal")
        )

    each(had(grid(seed)), 0.5)
    failing = _plainest(tried.values())
    if failing is None:  # a number that the grid does not have may fail
        each(had(plain_sweeps()), 0.7)
        failing = _plainest(tried.values())
    if failing is not None:
        sweeps: tuple[tuple[Number, float], ...] = (("q_len", 0.65), ("prefix_len", 0.75))
        for factor, share in sweeps:
            swept = list(sweep(failing.cell, factor))
            each(swept, share)
            for value in _lone(swept, tried, factor):
                others = (at(cell, factor, value) for cell in islice(had(grid(seed)), MORE))
                each(filter(can_be, others), share + 0.05)
    unsteady: list[Cell] = []
    for cell in [cell for cell, t in tried.items() if t.failed is not None][:AGAIN]:
        if spent() > 0.85:
            break
        if run(held, cell, function).failed != tried[cell].failed:
            unsteady.append(cell)
    results = tuple(tried.values())
    is_told = not unsteady and answered(results) >= ENOUGH
    decision = decide(list(_observations(results))) if is_told else Decision(())
    cause = ""
    if not unsteady and failing is not None:
        cause = _cause(held, results, decision, function, start + seconds)
    return Isolation(held.name, results, decision, tuple(unsteady), function, cause)


def answered(tried: Iterable[Tried]) -> int:
    """Calls that the backend did not refuse."""
    return sum(t.failed is not None for t in tried)


ENOUGH = 20
"""Fewest calls that anything is told from: what fails in one call of seven is met in 20 nearly always."""
AGAIN = 40
"""Calls that are run again, to see whether they come out the same."""
PATHS_OF: dict[str, tuple[Execution, ...]] = {
    "verify_attention": ("eager", "buffers", "replay"),
    "plan_verify": ("eager",),
}
"""What can be crossed, the first that a backend offers, and the executions that it has."""


def _cause(
    backend: Backend, tried: tuple[Tried, ...], decision: Decision, function: str, until: float
) -> str:
    """What all failing calls have in common: their exception, a known wrong computation, a number."""
    failing = [t for t in tried if t.failed and any(t.failed)]
    rules = decision.rules
    such = " failing" if len(rules) != 1 else " such" if rules[0].conditions else ""
    if len({t.ended for t in failing}) == 1 and failing[0].ended:
        what = failing[0].what
        if any(t.what != what for t in failing):  # messages with numbers of the call
            what = f"it raised {failing[0].ended}"
        if what.startswith("it raised"):
            return what.replace("it raised", f"every{such} call raises", 1)
        return f"in every{such} call {what}"
    if function == "verify_attention":
        what = suspected(backend, [t.cell for t in failing], until)
        if what:
            return what
    return cause_of(rules[0]) if len(rules) == 1 else ""


MORE = 60
"""Combinations that are tried beside where one number alone comes out otherwise than all others."""


def _lone(swept: list[Cell], tried: dict[Cell, Tried], factor: str) -> list[int]:
    """Values at which a sweep comes out otherwise than nearly everywhere: at most three of them."""
    values: dict[bool, list[int]] = {True: [], False: []}
    for cell in swept:
        known = tried.get(cell)
        if known is not None and known.failed is not None:
            values[any(known.failed)].append(getattr(cell, factor))
    fewest = min(values.values(), key=len)
    return fewest if len(fewest) <= 3 else []


def run(backend: Backend, cell: Cell, function: str = "verify_attention") -> Tried:
    """Call the backend once; which requests came out wrong."""
    case = case_of(cell, backend.dtypes[0])
    try:
        with warnings.catch_warnings(), backend.patience.for_a_call():
            warnings.simplefilter("ignore")  # a backend's own, of thousands of calls
            if function == "plan_verify":
                wrong, what = judge(backend, case.call)
            else:
                wrong, what = _seen(backend, case)
    except Refused as reason:
        return Tried(cell, None, str(reason))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 # a backend may raise anything, SystemExit too
        ended = f"{type(error).__name__} ({place_of(error) or 'of a built-in'})"
        return Tried(cell, (True,) * cell.batch, told_of(error), ended)
    return Tried(cell, tuple(b in wrong for b in range(cell.batch)), what)


def _seen(backend: Backend, case: AttentionCase) -> tuple[list[int], str]:
    """Requests of which a row sees another set than it should, and what the first of them sees."""
    result = attend(backend, case, lambda call, slots: oracle.inputs(case, call, slots))
    wrong = oracle.wrong_rows(case, result)
    return list(wrong), oracle.explain(case, result, wrong) if wrong else ""


def _observations(tried: Any) -> Iterator[Observation]:
    for each in tried:
        for b, failed in enumerate(each.failed or ()):
            factors: Factors = asdict(each.cell)
            within = {name: of(each.cell) for name, of in _OF_EACH.items()}
            factors |= {name: values[b] for name, values in within.items()}
            factors |= {
                "position": b,
                "widest": max(each.cell.q_len, captured_q_len(each.cell)),
                "max_q_len": max_q_len(each.cell),
            }
            factors |= {"prefixes": "equal"} if each.cell.batch == 1 else {}
            yield Observation(factors, failed, within)


_OF_EACH = {"q_len": q_lens, "num_nodes": num_nodes, "prefix_len": prefix_lens}


def _plainest(tried: Iterable[Tried]) -> Tried | None:
    """The failing call with the least in it."""
    paths = ("eager", "buffers", "replay")

    def size(t: Tried) -> tuple[Any, ...]:
        c = t.cell
        flags = (c.batch, c.page_size, c.branching, c.padding, paths.index(c.execution))
        return (*flags, *_shape(c), c.q_len, c.prefix_len)

    return min((t for t in tried if t.failed and any(t.failed)), key=size, default=None)


def _shape(cell: Cell) -> tuple[int, int]:
    """How far from the plainest its widths and prefixes lie."""
    return get_args(Widths).index(cell.widths), get_args(Prefixes).index(cell.prefixes)


def headline(name: str, sentence: str) -> str:
    """A finding with its backend, which is the subject of a sentence that has none."""
    return f"{name}{'' if sentence.startswith('fails ') else ':'} {sentence}"


def _sentence(found: Isolation) -> str:
    seen = found.observations
    calls = f"{len([t for t in found.tried if t.failed is not None])} calls"
    if not seen:
        reason = next(iter(found.refused), "")
        return f"cannot tell: it refused every call ({reason})"
    if found.unsteady:
        again = len(found.unsteady)
        return f"cannot tell: the same call gives now this, now that ({again} of 40 when run again)"
    fails = any(o.failed for o in seen)
    if found.is_short:
        count = answered(found.tried)
        wrong = sum(any(t.failed or ()) for t in found.tried)
        of_all = f"{count} call{'s' * (count > 1)}"
        if not fails:
            return f"nothing failed in {of_all}: too few to tell"
        cause = f": {found.cause}" if found.cause else ""
        return f"{wrong} of {of_all} failed: too few to tell where{cause}"
    if not fails:
        return f"nothing fails: {calls}, {len(seen)} requests"
    rules = found.decision.rules
    cause = f": {found.cause}" if found.cause else ""
    if not rules:
        nearest, missed = found.decision.nearest, found.decision.missed
        tail = (
            ""
            if nearest is None
            else f"; nearest is `{nearest.text}`, which {missed} requests pass"
        )
        return (
            f"cannot tell: no rule of up to three conditions fits {len(seen)} requests{tail}{cause}"
        )
    if len(rules) > 1:
        others = " from ".join(f"`{rule.text}`" for rule in rules)
        return f"cannot tell {others}: no call has one without the other{cause}"
    rule = rules[0]
    head = "fails always" if not rule.conditions else f"fails iff {rule.text}"
    parts = [head + _alike(rule, seen), *_no_matter(rule, seen)]
    accident = (
        f" ({rule.accidents} of {rule.covered} such requests come out right by accident)"
        if rule.accidents
        else ""
    )
    return "; ".join(parts) + cause + accident + _remark(rule)


def _alike(rule: Rule, seen: list[Observation]) -> str:
    """``, eager and replay alike``: unless the rule speaks of the execution, or only one was seen."""
    paths = {o.factors["execution"] for o in seen}
    spoken = {condition.factor for condition in rule.conditions}
    if spoken & {"execution", "earlier"} or not {"eager", "replay"} <= paths:
        return ""
    return ", eager and replay alike"


def _remark(rule: Rule) -> str:
    """Where requests differ, whose numbers count beside the request's own."""
    told = {_NUMBER_OF.get(c.factor, c.factor) for c in rule.conditions if c.scope == BEFORE}
    return "".join(
        f"; where {name} differs within the call, that of a request before it counts too"
        for name in sorted(told)
    )


_NUMBER_OF = {"widths": "q_len", "prefixes": "prefix_len"}


def _no_matter(rule: Rule, seen: list[Observation]) -> list[str]:
    """``branching and padding do not matter``: factors that were varied and that the rule leaves out."""
    spoken = {condition.factor for condition in rule.conditions}
    spoken |= {"batch"} if "position" in spoken else set()
    spoken |= (
        {"position"} if "batch" in spoken or any(map(_is_of_place, rule.conditions)) else set()
    )
    spoken |= {_NUMBER_OF[factor] for factor in spoken & {*_NUMBER_OF}}
    names = {
        "branching": "branching", "padding": "padding", "prefix_len": "prefix", "position": "batch position",
        "page_size": "page size",
    }  # fmt: skip
    free = [
        called
        for factor, called in names.items()
        if factor not in spoken and len({o.factors[factor] for o in seen}) > 1
        if not _spared(factor, rule, seen)
    ]
    if not free:
        return []
    listed = free[0] if len(free) == 1 else f"{', '.join(free[:-1])} and {free[-1]}"
    return [f"{listed} {'does' if len(free) == 1 else 'do'} not matter"]


def _spared(factor: str, rule: Rule, seen: list[Observation]) -> bool:
    """Whether what passed under the rule is all of a level of the factor: then that is no accident."""
    told: dict[Any, list[bool]] = {}
    for i, o in enumerate(seen):
        if rule.truth >> i & 1:
            told.setdefault(o.factors[factor], []).append(o.failed)
    return any(len(own) >= 4 and not any(own) for own in told.values())


def _is_of_place(condition: Condition) -> bool:
    """Whether it speaks of where in the batch a request stands."""
    return condition.scope not in {"", BEFORE} or "first request" in condition.text

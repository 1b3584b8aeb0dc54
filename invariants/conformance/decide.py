"""Which factors decide failure: the smallest rule that all observations bear out.

An observation is one request of one call: its factors, and whether it failed. A rule is at most three
conditions that all hold, or two of which one holds. A wrong computation can be right by accident and a right
one cannot fail by accident, so a rule must cover every failure, and may cover a few requests that passed.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Factors = dict[str, Any]
ACCIDENTS = 0.1
"""Largest share of the requests under a rule that may have passed."""
PRICE = 25.0
"""What that share costs, in conditions: one more condition must explain a twenty-fifth of them."""
FACTORS = (
    "q_len", "num_nodes", "prefix_len", "branching", "padding", "execution", "earlier",
    "position", "batch", "page_size",
)  # fmt: skip
"""What is crossed, in the order in which it is told."""


@dataclass(frozen=True)
class Observation:
    """One request of one call."""

    factors: Factors
    failed: bool


@dataclass(frozen=True)
class Condition:
    """One condition on one factor."""

    text: str
    factor: str
    holds: Callable[[Factors], bool]
    number: int | None = None
    """The number that it compares with."""
    relation: str = ""
    """``!=``, ``==``, ``>`` or ``<=`` of a number, else empty."""


@dataclass(frozen=True)
class Rule:
    """Conditions that decide failure."""

    conditions: tuple[Condition, ...]
    joined: str = "and"
    accidents: int = 0
    """Requests under the rule that passed."""
    covered: int = 0
    """Requests under the rule."""

    @property
    def text(self) -> str:
        """``q_len != 8 and execution is eager``; ``always`` where no condition is needed."""
        return f" {self.joined} ".join(c.text for c in self.conditions) or "always"

    @property
    def cost(self) -> float:
        """Few conditions and few accidents are cheap."""
        extra = 0.25 * (self.joined == "or")
        share = self.accidents / max(self.covered, 1)
        return len(self.conditions) + extra + PRICE * share


@dataclass(frozen=True)
class Decision:
    """What the observations say."""

    rules: tuple[Rule, ...]
    """The smallest rules; several if the observations cannot tell them apart; none if nothing fits."""
    nearest: Rule | None = None
    """Where nothing fits, the rule that misses the fewest."""
    missed: int = 0
    """What it misses."""


_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    ">": operator.gt,
    "<=": operator.le,
    "==": operator.eq,
}
"""The plainest first."""


def _compares(
    factor: str, relation: Callable[[Any, Any], bool], value: object
) -> Callable[[Factors], bool]:
    return lambda factors: relation(factors[factor], value)


def _divides(factor: str, size: int, *, whole: bool) -> Callable[[Factors], bool]:
    return lambda factors: (factors[factor] % size == 0) == whole


def conditions_of(observations: Sequence[Observation]) -> list[Condition]:
    """Every condition that the observations can tell from none, the plainest first."""
    named: list[Condition] = []

    def add(text: str, factor: str, holds: Callable[[Factors], bool], **number: Any) -> None:
        named.append(Condition(text, factor, holds, **number))

    add("the tree branches", "branching", lambda f: f["branching"])
    add("the tree is a chain", "branching", lambda f: not f["branching"])
    add("num_nodes < q_len", "padding", lambda f: f["padding"])
    add("num_nodes == q_len", "padding", lambda f: not f["padding"])
    for path in ("eager", "buffers", "replay"):
        called = "fixed buffers" if path == "buffers" else path
        add(f"execution is {called}", "execution", _compares("execution", operator.eq, path))
        add(f"execution is not {called}", "execution", _compares("execution", operator.ne, path))
    for size in ("smaller", "larger"):
        text = f"the replay follows a {size} call"
        add(text, "earlier", _compares("earlier", operator.eq, size))
    add("the request is not the first", "position", lambda f: f["position"] > 0)
    add("the request is the first", "position", lambda f: f["position"] == 0)
    add("the request is the last", "position", lambda f: f["position"] == f["batch"] - 1)
    add("the request is not the last", "position", lambda f: f["position"] < f["batch"] - 1)
    add("the batch has several requests", "batch", lambda f: f["batch"] > 1)
    add("the request is alone", "batch", lambda f: f["batch"] == 1)
    add("page_size > 1", "page_size", lambda f: f["page_size"] > 1)
    add("page_size == 1", "page_size", lambda f: f["page_size"] == 1)
    for factor in ("q_len", "num_nodes", "prefix_len"):
        values = sorted({o.factors[factor] for o in observations})
        for relation, compare in _RELATIONS.items():
            for value in values:
                if relation == "!=" and value in (values[0], values[-1]):
                    continue  # at an end it says no more than `>` and `<=` do
                text = f"{factor} {relation} {value}"
                holds = _compares(factor, compare, value)
                add(text, factor, holds, number=value, relation=relation)
        for tile in (4, 8, 16, 32):
            text = f"{factor} is no multiple of {tile}"
            add(text, factor, _divides(factor, tile, whole=False))
            add(
                text.replace("no multiple", "a multiple"),
                factor,
                _divides(factor, tile, whole=True),
            )
    for value in sorted({o.factors["widest"] for o in observations}):
        # told after q_len and as of that factor: without a captured call the two are one
        text = f"q_len, or that of the call captured before, > {value}"
        add(text, "q_len", _compares("widest", operator.gt, value))
    return named


def decide(observations: Sequence[Observation]) -> Decision:
    """The smallest rule by which a request fails, or several that no observation tells apart."""
    every = (1 << len(observations)) - 1
    failed = _bits(o.failed for o in observations)
    if not failed:
        return Decision(())
    groups: dict[int, list[Condition]] = {}
    for condition in conditions_of(observations):
        truth = _bits(condition.holds(o.factors) for o in observations)
        if truth not in {0, every}:
            groups.setdefault(truth, []).append(condition)

    def rule(truth: int, parts: Iterable[int], joined: str = "and") -> Rule:
        conditions = tuple(
            sorted((groups[part][0] for part in parts), key=lambda c: FACTORS.index(c.factor))
        )
        return Rule(conditions, joined, (truth & ~failed).bit_count(), truth.bit_count())

    found: list[tuple[Rule, tuple[int, ...]]] = [(rule(every, ()), ())]
    covering = [truth for truth in groups if not failed & ~truth]
    for size in (1, 2, 3):
        for parts in combinations(covering, size):
            truth = every
            for part in parts:
                truth &= part
            found.append((rule(truth, parts), parts))
    pure = [
        truth
        for truth in groups
        if (truth & ~failed).bit_count() <= ACCIDENTS * truth.bit_count() and truth & failed
    ]
    for one, other in combinations(pure, 2):
        if not failed & ~(one | other):
            found.append((rule(one | other, (one, other), "or"), (one, other)))

    found.sort(key=lambda pair: pair[0].cost)
    fitting = [pair for pair in found if pair[0].accidents <= ACCIDENTS * pair[0].covered]
    if not fitting:
        nearest = min((pair[0] for pair in found), key=lambda r: r.accidents)
        return Decision((), nearest, nearest.accidents)
    best, parts = fitting[0]
    return Decision((best, *_others(best, parts, groups)))


def _others(best: Rule, parts: tuple[int, ...], groups: dict[int, list[Condition]]) -> list[Rule]:
    """The same rule with a condition on another factor that all observations take for the same."""
    others = []
    taken = {condition.factor for condition in best.conditions}
    for part in parts:
        first = groups[part][0]
        for condition in groups[part][1:]:
            if condition.factor not in taken:
                taken.add(condition.factor)
                changed = tuple(condition if c is first else c for c in best.conditions)
                others.append(Rule(changed, best.joined, best.accidents, best.covered))
    return others


def _bits(values: Iterable[bool]) -> int:
    """One bit for each value, the first lowest."""
    return int("".join("1" if value else "0" for value in values)[::-1] or "0", 2)

"""Which factors decide failure: the smallest rule that all observations bear out.

An observation is one request of one call: its factors, and whether it failed. A rule is at most three
conditions that all hold, or two of which one holds. A wrong computation can be right by accident and a right
one cannot fail by accident, so a rule must cover every failure, and may cover a few requests that passed.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

Factors = dict[str, Any]
ACCIDENTS = 0.1
"""Largest share of the requests under a rule that may have passed."""
PRICE = 25.0
"""What that share costs, in conditions: one more condition must explain a twenty-fifth of them."""
FACTORS = (
    "q_len", "num_nodes", "prefix_len", "branching", "padding", "execution", "earlier",
    "position", "batch", "page_size", "prefixes", "widths",
)  # fmt: skip
"""What is crossed, in the order in which it is told."""
NUMBERS = ("q_len", "num_nodes", "prefix_len")
"""Factors of many levels, of which each request of a call has its own."""


@dataclass(frozen=True)
class Observation:
    """One request of one call."""

    factors: Factors
    failed: bool
    within: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """A number of each request of the call, where they are not all the same."""

    def all_of(self, number: str) -> tuple[int, ...]:
        """That number of each request of the call."""
        return self.within.get(number) or (self.factors[number],) * self.factors["batch"]


@dataclass(frozen=True)
class Condition:
    """One condition on one factor."""

    text: str
    factor: str
    number: int | None = None
    """The number that it compares with."""
    relation: str = ""
    """``!=``, ``==``, ``>`` or ``<=`` of a number, else empty."""
    scope: str = ""
    """Whose number counts; empty: the request's own."""


@dataclass(frozen=True)
class Rule:
    """Conditions that decide failure."""

    conditions: tuple[Condition, ...]
    joined: str = "and"
    accidents: int = 0
    """Requests under the rule that passed."""
    covered: int = 0
    """Requests under the rule."""
    truth: int = 0
    """Which they are, as bits."""

    @property
    def text(self) -> str:
        """``q_len != 8 and execution is eager``; ``always`` where no condition is needed."""
        return f" {self.joined} ".join(c.text for c in self.conditions) or "always"


@dataclass(frozen=True)
class Decision:
    """What the observations say."""

    rules: tuple[Rule, ...]
    """The smallest rules; several if the observations cannot tell them apart; none if nothing fits."""
    nearest: Rule | None = None
    """Where nothing fits, the rule that misses the fewest."""
    missed: int = 0
    """What it misses."""


_SCOPES: dict[str, Callable[[tuple[int, ...], int], tuple[int, ...]]] = {
    "": lambda values, b: values[b : b + 1],
    "up to it": lambda values, b: values[: b + 1],
    " of a request before it": lambda values, b: values[:b],
    " of the first request": lambda values, _: values[:1],
    " of a request of the call": lambda values, _: values,
}
"""Whose number counts, in words behind its name: the request's own, or its and those before it, and so on.

Where all requests of a call have the same number, the first two are the same; so they are told in the same
words, and the second adds a remark."""
BEFORE = "up to it"


class _Levels:
    """For each value of a column the observations that have it, as bits."""

    def __init__(self, values: Iterable[int | None]) -> None:
        self.of: dict[int, int] = {}
        for i, value in enumerate(values):
            if value is not None:
                self.of[value] = self.of.get(value, 0) | 1 << i
        self.some = self.where(lambda _: True)

    def where(self, holds: Callable[[int], bool]) -> int:
        """Observations whose value is such."""
        found = 0
        for value, bits in self.of.items():
            if holds(value):
                found |= bits
        return found


def conditions_of(observations: Sequence[Observation]) -> dict[int, list[Condition]]:
    """Every condition by the observations that it holds for, as bits; the plainest first.

    What holds for all or for none is left out: no observation tells it.
    """
    every = (1 << len(observations)) - 1
    groups: dict[int, list[Condition]] = {}

    def add(text: str, factor: str, truth: int, **more: Any) -> None:
        if truth not in {0, every}:
            groups.setdefault(truth, []).append(Condition(text, factor, **more))

    def where(text: str, factor: str, holds: Callable[[Factors], bool]) -> None:
        add(text, factor, _bits(holds(o.factors) for o in observations))

    def either(text: str, opposite: str, factor: str, holds: Callable[[Factors], bool]) -> None:
        where(text, factor, holds)
        where(opposite, factor, lambda f: not holds(f))

    either("the tree branches", "the tree is a chain", "branching", lambda f: f["branching"])
    either("num_nodes < q_len", "num_nodes == q_len", "padding", lambda f: f["padding"])
    for path in ("eager", "buffers", "replay"):
        called = "fixed buffers" if path == "buffers" else path
        is_path = _is("execution", path)
        either(f"execution is {called}", f"execution is not {called}", "execution", is_path)
    for size in ("smaller", "larger"):
        where(f"the replay follows a {size} call", "earlier", _is("earlier", size))
    either(
        "the request is not the first", "the request is the first", "position",
        lambda f: f["position"] > 0,
    )  # fmt: skip
    either(
        "the request is the last", "the request is not the last", "position",
        lambda f: f["position"] == f["batch"] - 1,
    )  # fmt: skip
    for place, name in ((1, "the second"), (2, "the third of three")):
        where(f"the request is {name}", "position", _is("position", place))
    either(
        "the batch has several requests", "the request is alone", "batch", lambda f: f["batch"] > 1
    )
    for count, word in ((2, "two"), (3, "three")):
        where(f"the batch has {word} requests", "batch", _is("batch", count))
    either("page_size > 1", "page_size == 1", "page_size", lambda f: f["page_size"] > 1)
    within = {factor: [o.all_of(factor) for o in observations] for factor in NUMBERS}
    places = [o.factors["position"] for o in observations]
    for factor in NUMBERS:
        values = sorted({o.factors[factor] for o in observations})
        for scope, of in _SCOPES.items():
            called = factor if scope == BEFORE else factor + scope
            chosen = [of(own, b) for own, b in zip(within[factor], places, strict=True)]
            least = _Levels(min(c, default=None) for c in chosen)
            most = _Levels(max(c, default=None) for c in chosen)
            for relation in ("!=", ">", "<=", *(("==",) if not scope else ())):
                for value in values:
                    if relation == "!=" and value in (values[0], values[-1]):
                        continue  # at an end it says no more than `>` and `<=` do
                    truth = _compared(least, most, relation, value)
                    if scope and truth == least.some:
                        continue  # there is such a request, whatever its number
                    text = f"{called} {relation} {value}"
                    add(text, factor, truth, number=value, relation=relation, scope=scope)
            if scope:
                continue
            for tile in (4, 8, 16, 32):
                truth = least.where(partial(_is_no_multiple, tile))
                add(f"{factor} is no multiple of {tile}", factor, truth)
                add(f"{factor} is a multiple of {tile}", factor, every & ~truth)
    widest = _Levels(o.factors["widest"] for o in observations)
    for value in sorted({o.factors["widest"] for o in observations}):
        # told after q_len and as of that factor: without a captured call the two are one
        text = f"q_len, or that of the call captured before, > {value}"
        add(text, "q_len", widest.where(partial(operator.lt, value)))
    for factor, told, plural in (
        ("q_len", "widths", "widths"), ("prefix_len", "prefixes", "prefix lengths"),
    ):  # fmt: skip
        lists = within[factor]
        truth = _bits(len(set(own)) > 1 for own in lists)
        add(f"{plural} differ within the call", told, truth)
        add(f"{plural} are equal within the call", told, every & ~truth)
        for scope in ("", BEFORE, " of a request before it"):
            called = factor if scope == BEFORE else factor + scope
            chosen = [_SCOPES[scope](own, b) for own, b in zip(lists, places, strict=True)]

            def beside(
                text: str, holds: Callable[[int, int], bool], others: Iterable[int],
                chosen: Any = chosen, told: str = told, scope: str = scope,
            ) -> None:  # fmt: skip
                pairs = zip(chosen, others, strict=True)
                truth = _bits(any(holds(value, other) for value in own) for own, other in pairs)
                add(text, told, truth, scope=scope)

            first = [own[0] for own in lists]
            longest, shortest = [max(own) for own in lists], [min(own) for own in lists]
            if factor == "q_len":
                beside(
                    f"{called} < max_q_len", operator.lt,
                    [o.factors["max_q_len"] for o in observations],
                )  # fmt: skip
            beside(f"{called} < that of another request", operator.lt, longest)
            beside(f"{called} > that of another request", operator.gt, shortest)
            beside(f"{called} != that of the first request", operator.ne, first)
            beside(f"{called} > that of the first request", operator.gt, first)
            beside(f"{called} < that of the first request", operator.lt, first)
    return groups


def _is(factor: str, level: object) -> Callable[[Factors], bool]:
    return lambda factors: bool(factors[factor] == level)


def _is_no_multiple(tile: int, value: int) -> bool:
    return value % tile != 0


def _compared(least: _Levels, most: _Levels, relation: str, value: int) -> int:
    """Observations of which one of the numbers compares so."""
    if relation == ">":
        return most.where(lambda v: v > value)
    if relation == "<=":
        return least.where(lambda v: v <= value)
    alike = least.of.get(value, 0) & most.of.get(value, 0)
    return alike if relation == "==" else least.some & ~alike


def decide(observations: Sequence[Observation]) -> Decision:
    """The smallest rule by which a request fails, or several that no observation tells apart."""
    every = (1 << len(observations)) - 1
    failed = _bits(o.failed for o in observations)
    if not failed:
        return Decision(())
    groups = conditions_of(observations)

    def passes(truth: int) -> int:
        return (truth & ~failed).bit_count()

    def rule(conditions: Iterable[Condition], truth: int, joined: str) -> Rule:
        ordered = sorted(conditions, key=lambda c: FACTORS.index(c.factor))
        return Rule(tuple(ordered), joined, passes(truth), truth.bit_count(), truth)

    found: list[tuple[float, tuple[int, ...], str, int]] = []

    def consider(parts: tuple[int, ...], truth: int, joined: str = "and") -> None:
        share = passes(truth) / truth.bit_count()
        extra = 0.25 * (joined == "or")
        found.append((len(parts) + extra + PRICE * share, parts, joined, truth))

    covering = [truth for truth in groups if not failed & ~truth]
    least = _least(covering)
    for size in (0, 1, 2, 3):
        for parts in combinations(least, size):
            truth = every
            for part in parts:
                truth &= part
            consider(parts, truth)
    pure = [
        truth
        for truth in groups
        if passes(truth) <= ACCIDENTS * truth.bit_count() and truth & failed
    ]
    for i, one in enumerate(pure):
        missing = failed & ~one
        for other in pure[i + 1 :]:
            if not missing & ~other:
                consider((one, other), one | other, "or")

    found.sort(key=lambda each: each[0])
    fitting = [each for each in found if passes(each[3]) <= ACCIDENTS * each[3].bit_count()]
    _, parts, joined, truth = fitting[0] if fitting else min(found, key=lambda e: passes(e[3]))
    if joined == "and":  # of what says the same beside the other conditions, the plainest
        for i in range(len(parts)):
            plainest = _as_good(parts, i, truth, covering)[0]
            parts = (*parts[:i], plainest, *parts[i + 1 :])
    best = [groups[part][0] for part in parts]
    chosen = rule(best, truth, joined)
    if not fitting:
        return Decision((), chosen, chosen.accidents)
    rules, taken = [chosen], {_kind(condition) for condition in best}
    for i, part in enumerate(parts):
        for other in _as_good(parts, i, truth, covering) if joined == "and" else [part]:
            if other != part and (other & part in {other, part}):
                continue  # one says the other and more: no second explanation
            for condition in groups[other]:
                if _kind(condition) not in taken:
                    taken.add(_kind(condition))
                    rules.append(rule([*best[:i], condition, *best[i + 1 :]], truth, joined))
    return Decision(tuple(rules))


def _as_good(parts: tuple[int, ...], place: int, truth: int, covering: Sequence[int]) -> list[int]:
    """What may stand at that place of the rule, for it to hold for the same requests; in their order."""
    rest = -1
    for part in parts[:place] + parts[place + 1 :]:
        rest &= part
    return [other for other in covering if other & rest == truth]


def _kind(condition: Condition) -> str:
    """What makes two conditions two explanations: their factors, and of places each by itself."""
    return condition.text if condition.factor == "position" else condition.factor


def _least(covering: Sequence[int]) -> list[int]:
    """Those that hold no other, in their order: joined to others, what holds another says no more than it."""
    kept: list[int] = []
    for truth in sorted(covering, key=int.bit_count):
        if all(other & ~truth for other in kept):
            kept.append(truth)
    return [truth for truth in covering if truth in set(kept)]


def _bits(values: Iterable[bool]) -> int:
    """One bit for each value, the first lowest."""
    return int("".join("1" if value else "0" for value in values)[::-1] or "0", 2)

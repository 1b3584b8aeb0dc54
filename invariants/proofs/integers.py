"""Integers of the theorem prover that behave as Python's.

``z3``'s own integers lack ``//`` and round another way where the divisor is negative. These wrap them
once, so that the formulas of ``ddtree.spec.index`` take them as they take ints and tensors.
"""

from typing import Any

import z3

Truth = Any
"""A proposition of the prover: what comparisons of ``Int`` give."""


class Scope:
    """Where a claim's integers come from: the variables that it names and the divisions that it makes."""

    def __init__(self) -> None:
        """Start without variables."""
        self.variables: dict[str, Any] = {}
        self.bounds: list[Truth] = []
        """What the variables' kinds say of them."""
        self.divisions: list[tuple[Any, Any]] = []
        """Every dividend and divisor, so that a proof can show that floor and truncation agree."""

    def naturals(self, names: str) -> "tuple[Int, ...]":
        """New variables, each at least 0, of the names in ``names``."""
        numbers = tuple(self.integer(name) for name in names.split())
        self.bounds += [number >= 0 for number in numbers]
        return numbers

    def integer(self, name: str) -> "Int":
        """A new variable of either sign."""
        self.variables[name] = z3.Int(name)
        return Int(self.variables[name], self)

    def no_larger(self, most: int) -> list[Truth]:
        """No variable is farther from 0 than ``most``."""
        return [z3.And(-most <= term, term <= most) for term in self.variables.values()]


class Int:
    """An integer expression with Python's arithmetic."""

    def __init__(self, term: Any, scope: Scope) -> None:
        """Wrap a term of the prover."""
        self.term = term
        self.scope = scope

    def _new(self, term: Any) -> "Int":
        return Int(term, self.scope)

    def __add__(self, other: Any) -> "Int":
        return self._new(self.term + term_of(other))

    def __radd__(self, other: Any) -> "Int":
        return self._new(term_of(other) + self.term)

    def __sub__(self, other: Any) -> "Int":
        return self._new(self.term - term_of(other))

    def __rsub__(self, other: Any) -> "Int":
        return self._new(term_of(other) - self.term)

    def __mul__(self, other: Any) -> "Int":
        return self._new(self.term * term_of(other))

    def __rmul__(self, other: Any) -> "Int":
        return self._new(term_of(other) * self.term)

    def __floordiv__(self, other: Any) -> "Int":
        divisor = term_of(other)
        self.scope.divisions.append((self.term, divisor))
        # z3's remainder is never negative: that is floor division where the divisor is positive
        return self._new(z3.If(divisor > 0, self.term / divisor, -self.term / -divisor))

    def __mod__(self, other: Any) -> "Int":
        divisor = term_of(other)
        self.scope.divisions.append((self.term, divisor))
        return self._new(z3.If(divisor > 0, self.term % divisor, -(-self.term % -divisor)))

    def __rfloordiv__(self, other: Any) -> "Int":
        return self._new(term_of(other)) // self

    def __rmod__(self, other: Any) -> "Int":
        return self._new(term_of(other)) % self

    def __le__(self, other: Any) -> Truth:
        return self.term <= term_of(other)

    def __lt__(self, other: Any) -> Truth:
        return self.term < term_of(other)

    def __ge__(self, other: Any) -> Truth:
        return self.term >= term_of(other)

    def __gt__(self, other: Any) -> Truth:
        return self.term > term_of(other)

    def __eq__(self, other: object) -> Truth:
        return self.term == term_of(other)

    def __ne__(self, other: object) -> Truth:
        return self.term != term_of(other)

    __hash__ = None  # type: ignore[assignment]  # == gives a proposition, so there is no dict of these


def term_of(value: Any) -> Any:
    """The prover's term of an ``Int`` or of a Python int."""
    return value.term if isinstance(value, Int) else z3.IntVal(value)


def every(*truths: Truth) -> Truth:
    """All of them hold."""
    return z3.And(*truths)


def implies(cause: Truth, effect: Truth) -> Truth:
    """``effect`` holds where ``cause`` does."""
    return z3.Implies(cause, effect)


def within(low: Any, value: Any, high: Any) -> Truth:
    """``low <= value < high``."""
    return z3.And(term_of(low) <= term_of(value), term_of(value) < term_of(high))


def pick(condition: Truth, yes: Any, no: Any, scope: Scope) -> Int:
    """``yes`` where the condition holds, else ``no``: a kernel's ``tl.where``."""
    return Int(z3.If(condition, term_of(yes), term_of(no)), scope)

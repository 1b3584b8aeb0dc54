"""What a broken invariant says: which one, for which request, with which numbers, and why."""

from dataclasses import dataclass

Value = int | float | str | list[int]
"""A number found or expected, or a list of them; a word where no number says it."""


@dataclass(frozen=True)
class Violation:
    """One place where an invariant does not hold, as its checker found it."""

    request: int | None
    """The request; None where the call as a whole is meant."""
    expected: Value
    found: Value
    detail: str = ""
    """Where it was found, and the formula with its numbers."""
    hint: str = ""
    """The cause, where the numbers give it away; empty otherwise."""


class InvariantViolation(AssertionError):
    """A call breaks an invariant.

    An ``AssertionError``, not a ``ValueError``: it says that the program is wrong, and a server that
    catches bad input must not swallow it. The message is complete enough for a bug report.
    """

    def __init__(
        self,
        invariant: str,
        request: int | None,
        expected: Value,
        found: Value,
        hint: str = "",
        *,
        detail: str = "",
        statement: str = "",
        formula: str = "",
        where: str = "",
        also: tuple[str, ...] = (),
    ) -> None:
        super().__init__(invariant, request, expected, found, hint)
        self.invariant = invariant
        self.request = request
        self.expected = expected
        self.found = found
        self.hint = hint
        self.detail = detail
        self.statement = statement
        self.formula = formula
        self.where = where
        self.also = also
        self.dump = ""
        """The file that the call was written to, or why it was not; empty where none was asked for."""

    def __str__(self) -> str:
        place = "" if self.request is None else f" in request {self.request}"
        where = f", {self.where}" if self.where else ""
        lines = [
            f"{self.invariant} is broken{place}{where}: expected {self.expected}, found {self.found}"
        ]
        named = {
            "invariant": self.statement,
            "formula": self.formula,
            "numbers": self.detail,
            "hint": self.hint,
            "also broken": ", ".join(self.also),
            "dump": self.dump,
        }
        return "\n".join(lines + [f"  {name}: {text}" for name, text in named.items() if text])

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the way from a worker process: the keyword fields travel as state."""
        return (type(self), self.args, self.__dict__)

"""The error for bad input: what was given and what is wanted, with the numbers."""

from math import isfinite
from numbers import Integral, Real
from typing import Any


class InputError(ValueError):
    """A public function was given input outside its contract."""


def require(condition: bool, message: str) -> None:
    """Raise ``InputError(message)`` unless ``condition`` holds."""
    if not condition:
        raise InputError(message)


def require_int(name: str, value: Any, least: int, why: str = "") -> None:
    """Refuse what is no whole number, and one below ``least``; ``why`` says what the least is."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    require(whole, f"{name} is {given(value)}; expected a whole number")
    require(value >= least, f"{name} is {value}; the least is {least}{why and f', {why}'}")


def require_number(name: str, value: Any) -> None:
    """Refuse what is no finite number."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    require(number and isfinite(value), f"{name} is {given(value)}; expected a finite number")


def given(value: object) -> str:
    """What was given, in a few words: a plain value itself, of others the kind and shape."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {list(shape)}" if isinstance(shape, tuple) else ""
    return f"a {type(value).__name__}{of_shape}"

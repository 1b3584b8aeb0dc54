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


def require_int(name: str, value: Any, least: int, why: str = "", *, most: int = 2**63 - 1) -> None:
    """Refuse what is no whole number, and one outside its bounds; ``why`` says what the least is."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    require(whole, f"{name} is {given(value)}; expected a whole number")
    require(int(value) >= least, f"{name} is {value}; the least is {least}{why and f', {why}'}")
    require(value <= most, f"{name} is {value}; the most is {most}")


def require_bool(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    require(isinstance(value, bool), f"{name} is {given(value)}; expected True or False")


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

"""The error for bad input: what was given and what is wanted, with the numbers."""

from math import inf
from numbers import Integral, Real
from typing import Any


class InputError(ValueError):
    """A public function was given input outside its contract."""


def require(condition: bool, message: str, *numbers: object) -> None:
    """Raise ``InputError(message)`` unless ``condition`` holds.

    ``numbers`` fill the message's braces, and only then: where calls are frequent, or traced with sizes
    that are symbols, text should not be made for nothing.
    """
    if not condition:
        raise InputError(message.format(*numbers) if numbers else message)


def require_int(name: str, value: Any, least: int, why: str = "", *, most: int = 2**63 - 1) -> None:
    """Refuse what is no whole number, and one outside its bounds; ``why`` says what the least is."""
    if type(value) is not int and not _is_a(Integral, value):  # the common kind first: it is quick
        raise InputError(f"{name} is {given(value)}; expected a whole number")
    if not least <= value <= most:
        require(
            value >= least, "{} is {}; the least is {}{}", name, value, least, why and f", {why}"
        )
        require(value <= most, "{} is {}; the most is {}", name, value, most)


def require_bool(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {given(value)}; expected True or False")


def require_number(name: str, value: Any) -> None:
    """Refuse what is no finite number."""
    if not ((type(value) is float or _is_a(Real, value)) and abs(value) < inf):
        raise InputError(f"{name} is {given(value)}; expected a finite number")


def require_text(name: str, text: str) -> None:
    """Refuse a string that is no Unicode text: no tokenizer, file or terminal takes half a surrogate pair."""
    at = next((i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
    if at is not None:
        code = ord(text[at])
        # how Python keeps a byte of the command line that it could not decode
        is_byte = 0xDC80 <= code <= 0xDCFF
        what = (
            f"the byte 0x{code - 0xDC00:02x}" if is_byte else f"half a surrogate pair, U+{code:04X}"
        )
        raise InputError(f"{name} is not UTF-8: character {at} is {what}")


def _is_a(kind: type, value: Any) -> bool:
    """Whether a value is a number of that kind, as True and False are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def given(value: object) -> str:
    """What was given, in a few words: a plain value itself, of others the kind and shape."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {list(shape)}" if isinstance(shape, tuple) else ""
    return f"{of_kind(value)}{of_shape}"


def of_kind(value: object) -> str:
    """The kind of a value with its article: ``a Tensor``, ``an Acceptance``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"

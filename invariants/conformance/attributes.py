"""What a backend says of itself, checked before its functions run: a wrong word is no wrong output."""

import reprlib
from collections.abc import Callable, Mapping
from math import isfinite
from numbers import Real
from typing import Any, get_args

import torch

from ddtree.invariants.conformance.failure import told_of
from ddtree.spec.errors import InputError
from ddtree.spec.mask import Form

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference of an attention's output, over 1 or the number expected: some roundings of the dtype."""
LONGEST = 1e9
"""Seconds; a timer of the process takes no more."""


def read(thing: Any, attribute: str, name: str) -> Any:
    """An attribute of an object; None where it has none.

    Raises:
        InputError: asking for it raises.
    """
    try:
        return getattr(thing, attribute, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 # a property may raise anything, SystemExit too
        raise InputError(f"{name}: {attribute} cannot be read: {told_of(error)}") from None


def checked(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes, lists as tuples and a device by its name.

    Args:
        name: what the backend is called.
        given: every attribute of ``ATTRIBUTES`` by its name.

    Raises:
        InputError: one is not what it must be; the message says what stands there and what is allowed.
    """
    made: dict[str, Any] = {}
    for attribute, check in ATTRIBUTES.items():
        value = given[attribute]
        try:
            made[attribute] = check(value, made)
        except _NotAllowedError as error:
            raise InputError(f"{name}: {attribute} is {reprlib.repr(value)}; {error}") from None
    return made


class _NotAllowedError(Exception):
    """The message says what is allowed."""


def _some_of(words: tuple[Any, ...]) -> Callable[[Any, Any], tuple[Any, ...]]:
    """One or more of these words, all of one type, in a tuple or a list."""
    kind = type(words[0])

    def check(value: Any, _made: Any) -> tuple[Any, ...]:
        is_listed = isinstance(value, tuple | list)
        if not is_listed or not value or not all(type(w) is kind and w in words for w in value):
            known = ", ".join(map(repr, words))
            raise _NotAllowedError(f"allowed is a tuple of one or more of {known}")
        return tuple(value)

    return check


def _tolerances(value: Any, made: dict[str, Any]) -> dict[torch.dtype, float]:
    dtypes = made["dtypes"]
    allowed = f"allowed is a mapping with a finite number from 0 on for each of {', '.join(map(str, dtypes))}"
    if not isinstance(value, Mapping):
        raise _NotAllowedError(allowed)
    if missing := [str(dtype) for dtype in dtypes if dtype not in value]:
        raise _NotAllowedError(f"{allowed}; it has none for {', '.join(missing)}")
    for dtype in dtypes:
        if not _is_number(value[dtype]) or value[dtype] < 0:
            raise _NotAllowedError(allowed)
    return dict(value)


def _device(value: Any, _made: Any) -> str:
    allowed = "allowed is a device that torch can use here, such as 'cpu'"
    if not isinstance(value, str | torch.device):
        raise _NotAllowedError(allowed)
    try:
        torch.zeros(1, device=value).cpu()  # the copy refuses meta, which holds no numbers
    except (RuntimeError, AssertionError) as error:  # by torch's kind of device
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise _NotAllowedError(f"{allowed}, and that cannot be used: {why}") from None
    return str(value)


def _capture(value: Any, _made: Any) -> Any:
    if value is not None and not callable(value):
        raise _NotAllowedError("allowed is a function that takes what verify_attention takes")
    return value


def _any_mask(value: Any, _made: Any) -> bool:
    if not isinstance(value, bool):
        raise _NotAllowedError("allowed is True or False")
    return value


def _call_limit(value: Any, _made: Any) -> float:
    if not _is_number(value) or not 0 < value <= LONGEST:
        raise _NotAllowedError(f"allowed is a number of seconds over 0, at most {LONGEST:g}")
    return float(value)


def _is_number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Real) and isfinite(value)


ATTRIBUTES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "mask_forms": _some_of(get_args(Form)),
    "dtypes": _some_of(tuple(TOLERANCES)),
    "tolerances": _tolerances,
    "device": _device,
    "capture": _capture,
    "any_mask": _any_mask,
    "call_limit": _call_limit,
}
"""Each with its check; a later one may ask what an earlier one is."""

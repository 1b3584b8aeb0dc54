"""The decorator of public functions: the one place where debug mode looks into a call.

The reference knows nothing of the checker. A checker that wants to see every public call sets
``observer``; with none set, a call costs one comparison.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Observer(Protocol):
    """Sees each public call."""

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run ``function(*args, **kwargs)``, looking at what goes in and what comes out."""


_observer: Observer | None = None


def set_observer(observer: Observer | None) -> Observer | None:
    """Install ``observer`` for the whole process (None: none) and return the one before."""
    global _observer, _observed
    if observer is not None and _observed is _observe:
        # here and not above: it loads the compiler, and Triton before anyone could choose its interpreter
        _observed = cast("Observer", torch.compiler.disable(_observe))
    before, _observer = _observer, observer
    return before


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a public function: debug mode sees each of its calls."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _observer is None:
            return function(*args, **kwargs)
        result: R = _observed(function, args, kwargs)
        return result

    return call


def _observe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Let the observer run a call."""
    assert _observer is not None
    return _observer(function, args, kwargs)


_observed: Observer = _observe
"""The same, left to Python by ``torch.compile``: an observed call interrupts the compiled graph."""

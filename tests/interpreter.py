"""Triton's interpreter, quicker: the same results without work that it repeats.

To run a kernel it puts functions of its own in place of the language's, and the language's back afterwards.
Which ones, it finds by going through all names of the language: at each launch, and once more at each call of
one device function by another, where all are replaced. It makes a table of dtypes whenever it looks one up,
and takes an exclusive or (a sort has many) one number after the other.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import interpreter

tl = interpreter.tl
PLAIN = {
    "_patch_lang": interpreter._patch_lang,
    "_get_np_dtype": interpreter._get_np_dtype,
    "generic_reduce": interpreter.ReduceOps.generic_reduce,
}
"""The three as they come."""


def hurry() -> None:
    """Once a process: replace the three."""
    interpreter._patch_lang = patched_once(PLAIN["_patch_lang"], interpreter._LangPatchScope)
    interpreter._get_np_dtype = known_by_name(PLAIN["_get_np_dtype"])
    interpreter.ReduceOps.generic_reduce = with_xor(PLAIN["generic_reduce"])


def patched_once(search: Any, scope_type: Any) -> Any:
    """``_patch_lang`` that searches once a process and replaces once a launch."""
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    replaced: list[tuple[Any, str, Any]] = []
    launches: list[Any] = []

    class Scope(scope_type):  # type: ignore[misc]
        """What a launch replaced, until ``restore``."""

        def restore(self) -> None:
            super().restore()
            launches.remove(self)

    def patch_lang(_function: Any) -> Any:
        if launches:
            return None  # a device function's call, which restores nothing
        if not replaced:
            found = search(everything)
            replaced.extend((of, name, getattr(of, name)) for of, name, _ in found._changes)
            found.restore()
        scope = Scope()
        launches.append(scope)
        for change in replaced:
            scope.set_attr(*change)
        return scope

    return patch_lang


def known_by_name(look_up: Any) -> Any:
    """``_get_np_dtype`` that remembers; types of blocks have no hash, and all types a name."""
    known: dict[str, Any] = {}

    def get_np_dtype(dtype: Any) -> Any:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = look_up(dtype)
        return found

    return get_np_dtype


def with_xor(one_by_one: Any) -> Any:
    """``generic_reduce`` that leaves an exclusive or along an axis to NumPy."""

    def generic_reduce(self: Any, given: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return one_by_one(self, given)
        (one,) = given
        found = np.bitwise_xor.reduce(one.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(found, one.dtype)]

    return generic_reduce

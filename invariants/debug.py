"""Debug mode: every public call is checked, what goes in before it runs and what comes out after.

Off, a public call costs one comparison (``spec.public``). On, an observer of the whole process holds each
call to its annotations (jaxtyping and beartype, contract objects included) and then to the table.
"""

import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from inspect import isasyncgenfunction, isclass, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypeVar, cast, get_type_hints, overload
from weakref import ref

import torch
from beartype import beartype
from beartype.door import is_bearable
from jaxtyping import Shaped, TypeCheckError, jaxtyped
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ddtree.invariants.call import Call
from ddtree.invariants.checks import check
from ddtree.invariants.violation import InvariantViolation
from ddtree.spec import contracts
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import DraftTree, PagedKV
from ddtree.spec.errors import InputError
from ddtree.spec.public import Observer, set_observer
from ddtree.spec.round import Round
from ddtree.spec.softmax import log_softmax

F = TypeVar("F", bound=Callable[..., Any])

VARIABLE = "DDTREE_DEBUG"
_ON, _OFF = {"1", "on", "true", "yes"}, {"", "0", "off", "false", "no"}


class Debugging:
    """Debug mode for a while: what ``debug()`` makes. One object may be used again, nested too."""

    def __enter__(self) -> None:
        _enter()

    def __exit__(self, *_: object) -> None:
        _leave()

    def __call__(self, function: F) -> F:
        """Turn debug mode on while ``function`` runs; a coroutine or generator runs until its end."""
        if isasyncgenfunction(function) or isclass(function) or not callable(function):
            raise TypeError(
                f"debug cannot decorate {function!r}: it decorates functions, coroutine functions and "
                "generator functions; for a part of another's body write `with ddtree.debug():`"
            )
        run: Any  # pyright: ignore[reportRedeclaration]  # one of three
        if iscoroutinefunction(function):

            async def run(*args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportRedeclaration]
                with self:
                    return await function(*args, **kwargs)
        elif isgeneratorfunction(function):

            def run(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return (yield from function(*args, **kwargs))
        else:

            def run(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        return cast(F, wraps(function)(run))


@overload
def debug() -> Debugging: ...
@overload
def debug(function: F, /) -> F: ...
def debug(function: Any = None, /) -> Any:
    """Turn debug mode on for the whole process, as a context or as a decorator.

    ``with debug():``, ``@debug()`` and ``@debug`` all work. It is off again when the last of nested or
    concurrent uses ends, however it ends. An observer that was installed before is back then. A decorated
    coroutine or generator has it on from its first step to its last, its pauses included: the mode is the
    process's.

    Raises:
        TypeError: what is to be decorated is no function, or an async generator function.
    """
    return Debugging() if function is None else Debugging()(function)


def is_on() -> bool:
    """Whether debug mode is on."""
    return _uses > 0


def wanted(value: str | None) -> bool:
    """What the variable DDTREE_DEBUG asks for.

    Raises:
        InputError: a value that is neither on nor off.
    """
    word = (value or "").strip().lower()
    if word not in _ON | _OFF:
        raise InputError(
            f"{VARIABLE} is {value!r}; understood are 1, on, true, yes, 0, off, false, no"
        )
    return word in _ON


_lock = threading.Lock()
_uses = 0
_before: Observer | None = None


def _enter() -> None:
    global _uses, _before
    with _lock:
        _uses += 1
        if _uses == 1:
            _before = set_observer(_observe)


def _leave() -> None:
    global _uses, _before
    with _lock:
        _uses -= 1
        if _uses == 0:
            set_observer(_before)
            _before = None


_checking = threading.local()
"""``on`` while this thread is inside a check: what a check calls is not checked."""


def _observe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run one public call, checked. Public calls inside it are observed in their turn."""
    if getattr(_checking, "on", False):
        return function(*args, **kwargs)
    try:
        return _checked(function)(*args, **kwargs)
    except TypeCheckError as error:
        raise _types(function, error) from error


@cache
def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its checks around it, made once."""
    signature = inspect.signature(function)
    name = _name(function)

    @wraps(function)
    def body(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        with _guard():
            for argument, value in given.items():
                _check_fields(name, argument, value)
            entry = _entry(given)
            _check(entry, f"on entry to {name}")
        result = function(*args, **kwargs)
        if name == "commit_kv":
            _remember_commit(given)
        with _guard():
            _check_fields(name, "its result", result)
            _check(_exit(entry, given, result), f"on return from {name}")
        return result

    typed: Callable[..., Any] = jaxtyped(typechecker=beartype)(body)
    return typed


@contextmanager
def _guard() -> Iterator[None]:
    _checking.on = True
    try:
        yield
    finally:
        _checking.on = False


def _name(function: Callable[..., Any]) -> str:
    return "VerifyBuffers.fill" if function.__name__ == "_fill" else function.__qualname__


def _check(known: dict[str, Any], where: str) -> None:
    if known:
        check(call=Call(**known), where=where)


# what a call tells, by the kinds and names of its arguments

_PARTS = (
    contracts.DraftTree,
    contracts.VerifyLayout,
    contracts.FlatMask,
    contracts.PackedMask,
    contracts.DenseMask,
    contracts.BitMask,
    contracts.Acceptance,
    contracts.Commit,
    PagedKV,
)
_BY_NAME = (
    "draft_log_probs",
    "root_token_ids",
    "prefix_lens",
    "slot_table",
    "q_lens",
    "target_ids",
    "horizon",
    "budget",
)


def _entry(given: dict[str, Any]) -> dict[str, Any]:
    """The fields that the arguments tell. Buffers about to be filled still hold another call: not they."""
    known = Call.of(*(value for value in given.values() if isinstance(value, _PARTS))).known()
    known |= {name: given[name] for name in _BY_NAME if given.get(name) is not None}
    if given.get("from_logits") is True:
        known["draft_log_probs"] = _log_probs(given["draft_log_probs"])
    for name, axes in _AXES.items():
        value = given.get(name)
        if isinstance(value, Tensor):
            known |= {field: value.shape[axis] for field, axis in axes.items()}
    if "slot_table" in known:
        known["slot_table"] = known["slot_table"].clone()  # a commit permutes it in place
    if isinstance(given.get("kv"), PagedKV):
        known["commits_before"] = _commits_before(given)
    tree = given.get("tree")
    if (
        "slot_table" in given
        and "q_lens" in given
        and given["q_lens"] is None
        and isinstance(tree, DraftTree)
    ):
        batch, rows = tree.token_ids.shape
        known["q_lens"] = torch.full((batch,), rows)  # plan_verify's default: all rows of the tree
    return known


def _log_probs(draft_logits: Tensor) -> Tensor:
    """The log-probs that a tree of logits is made of; NaN where a logit is NaN or +inf."""
    is_one = draft_logits < torch.inf
    logits = draft_logits.detach().masked_fill(~is_one, -torch.inf)
    made = torch.cat([log_softmax(request) for request in logits.split(1)])  # wide: one at a time
    return made.masked_fill(~is_one, torch.nan)


_commits: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The last commit to each slot table: the acceptance, its nodes and the prefixes, as they were then."""


def _commits_before(given: dict[str, Any]) -> int:
    """Whether this very acceptance was the last thing committed to this table, on these prefixes.

    A call that reuses its tensors has other prefixes or other nodes in them, so contents count too.
    """
    last = _commits.get(given["kv"].slot_table)
    if last is None or last[0]() is not given["acceptance"]:
        return 0
    _, nodes, kv_indptr = last
    same = torch.equal(nodes, given["acceptance"].nodes)
    return int(same and torch.equal(kv_indptr, given["layout"].kv_indptr))


def _remember_commit(given: dict[str, Any]) -> None:
    acceptance: contracts.Acceptance = given["acceptance"]
    snapshot = (ref(acceptance), acceptance.nodes.clone(), given["layout"].kv_indptr.clone())
    _commits[given["kv"].slot_table] = snapshot


_AXES: dict[str, dict[str, int]] = {
    "query": {"num_rows": 0},
    "key_pool": {"kv_pool_size": 0},
    "target_logits": {"num_rows": 0, "vocab_size": 1},
    "draft_log_probs": {"horizon": 1, "vocab_size": 2},
}
"""Fields that the axes of a tensor argument tell."""


def _exit(entry: dict[str, Any], given: dict[str, Any], result: Any) -> dict[str, Any]:
    """The fields of the entry and of what came out."""
    known = dict(entry)
    for value in result if isinstance(result, tuple) else (result,):
        if isinstance(value, (*_PARTS, Round)):
            known |= Call.of(value).known()
    kv, filled = given.get("kv"), given.get("buffers")
    if isinstance(kv, PagedKV):
        known["slot_table_after"] = kv.slot_table
    if isinstance(filled, VerifyBuffers) and result is None:
        known |= Call.of(filled).known()
    return known


# types


def _types(function: Callable[..., Any], error: TypeCheckError) -> InvariantViolation:
    """Jaxtyping's error, told as a violation that names the argument."""
    text = str(error)
    argument = re.search(r"typechecking parameter '(\w+)'", text)
    expected, found = (
        re.search(rf"{label}: (.+)", text) for label in ("Expected type", "Actual value")
    )
    return _type_violation(
        _name(function),
        argument[1] if argument else "its result",
        expected[1].rstrip(".").removeprefix("<class '").removesuffix("'>")
        if expected
        else "its annotation",
        found[1].rstrip(".") if found else "another type",
    )


def _type_violation(function: str, argument: str, expected: str, found: str) -> InvariantViolation:
    return InvariantViolation(
        "types",
        None,
        expected,
        found,
        detail=f"{argument} of {function}",
        statement="Every argument and result has the type, dtype and shape that its annotation says.",
        where=f"in {argument} of {function}",
    )


def _check_fields(function: str, argument: str, value: object) -> None:
    """Hold the tensors of contract objects to their annotations, the axes of one object together."""
    if isinstance(value, (VerifyBuffers, tuple)):
        parts = value if isinstance(value, tuple) else (value.layout, value.mask)
        for part in parts:
            _check_fields(function, argument, part)
        return
    if (
        not is_dataclass(value)
        or isinstance(value, type)
        or not isinstance(value, (*_PARTS, Round))
    ):
        return
    if isinstance(value, Round):
        for spec in fields(value):
            _check_fields(function, f"{argument}.{spec.name}", getattr(value, spec.name))
        return
    hints = get_type_hints(type(value))
    with jaxtyped("context"):
        for spec in fields(value):
            content, hint = getattr(value, spec.name), hints[spec.name]
            _bind_axes(content, hint)
            if not is_bearable(content, hint):
                found = (
                    f"{content.dtype} {list(content.shape)}"
                    if isinstance(content, Tensor)
                    else type(content).__name__
                )
                wanted_type = getattr(hint, "__name__", str(hint))
                raise _type_violation(function, f"{argument}.{spec.name}", wanted_type, found)


def _bind_axes(content: object, hint: Any) -> None:
    """Tell jaxtyping the size of an axis ``B`` where it first meets ``B+1``."""
    axes = getattr(hint, "dim_str", "").split()
    if isinstance(content, Tensor) and content.ndim == len(axes):
        for size, axis in zip(content.shape, axes, strict=True):
            base = axis.removesuffix("+1")
            if base != axis and size:
                known_axis: Any = Shaped[Tensor, f" {base}"]
                is_bearable(torch.empty(size - 1, device="meta"), known_axis)


if wanted(os.environ.get(VARIABLE)):
    _enter()

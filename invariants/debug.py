"""Debug mode: every public call is checked, what goes in before it runs and what comes out after.

Off, a public call costs one comparison (``spec.public``). On, an observer of the whole process holds each
call to its annotations (jaxtyping and beartype, contract objects included) and then to the table. Where a
CUDA graph is being captured Python will not run again, so there the observer hands the call to ``capture``,
which ``ddtree.impl``
installs: it puts the check into the graph.
"""

import inspect
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, wraps
from inspect import isasyncgenfunction, isclass, iscoroutinefunction, isgeneratorfunction
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, get_type_hints, overload
from weakref import ref

import torch
from beartype import beartype
from beartype.door import is_bearable
from jaxtyping import Shaped, TypeCheckError, jaxtyped
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ddtree.invariants.actions import act, counts
from ddtree.invariants.call import Call, on_host
from ddtree.invariants.capture import dump as dump_call
from ddtree.invariants.checks import check, check_cheaply
from ddtree.invariants.recorded import record
from ddtree.invariants.settings import Settings, level_of, settings
from ddtree.invariants.shadow import FAST, Shadow
from ddtree.invariants.violation import InvariantViolation
from ddtree.spec import contracts
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import DraftTree, PagedKV
from ddtree.spec.public import Observer, set_observer
from ddtree.spec.round import Round
from ddtree.spec.softmax import log_softmax

F = TypeVar("F", bound=Callable[..., Any])


class Debugging:
    """Debug mode for a while: what ``debug()`` makes. One object may be used again, nested too."""

    def __init__(self, chosen: Settings) -> None:
        self.settings = chosen

    def __enter__(self) -> None:
        _enter(self.settings)

    def __exit__(self, *_: object) -> None:
        _leave(self.settings)

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
def debug(
    *,
    level: str | None = None,
    action: str | Sequence[str] | None = None,
    sample: float | None = None,
    dump_dir: str | Path | None = None,
    max_dumps: int | None = None,
    poll: float | None = None,
    trap: bool | None = None,
) -> Debugging: ...
@overload
def debug(function: F, /) -> F: ...
def debug(function: Any = None, /, **chosen: Any) -> Any:
    """Turn debug mode on for the whole process, as a context or as a decorator.

    ``with debug():``, ``@debug()`` and ``@debug`` all work. It is off again when the last of nested or
    concurrent uses ends, however it ends; of several the newest counts. An observer that was installed
    before is back then. A decorated coroutine or generator has it on from its first step to its last, its
    pauses included: the mode is the process's.

    What is not given is taken from the environment: ``DDTREE_DEBUG``, ``DDTREE_DEBUG_ACTION`` and so on.

    Args:
        function: what to decorate.
        level: ``"cheap"``: types, shapes, indptrs and lengths; ``"full"``: the whole table (default);
            ``"shadow"``: that, and a fraction of the fast path's calls is run on the reference too and
            compared.
        action: ``"raise"`` (default), ``"log"``, ``"count"``, ``"dump"``, or several: ``"log,dump"``.
        sample: fraction of each function's calls that are looked at, evenly spread; under ``"shadow"`` all
        are
            checked and this fraction is compared. Default 1. Captured graphs are checked at every replay.
        dump_dir: folder for dumped calls. Default: the working folder.
        max_dumps: most files that one process writes. Default 16.
        poll: seconds between looks at the records of captured checks, by a thread of its own. None: they are
            looked at in each public call and each ``RoundGraph.replay`` alone.
        trap: a captured check that finds something broken traps at once.

    Raises:
        TypeError: what is to be decorated is no function, or an async generator function.
        InputError: a setting that there is not.
    """
    made = Debugging(settings(**chosen))
    return made if function is None else made(function)


def is_on() -> bool:
    """Whether debug mode is on."""
    return bool(_uses)


def current() -> Settings | None:
    """The settings in force; None: debug mode is off."""
    uses = _uses
    return uses[-1] if uses else None


_lock = threading.Lock()
_uses: tuple[Settings, ...] = ()
"""The settings of each use, the newest last; replaced, never changed, so that readers need no lock."""
_before: Observer | None = None


def _enter(chosen: Settings) -> None:
    global _uses, _before
    with _lock:
        if not _uses:
            _before = set_observer(_observe)
        _uses = (*_uses, chosen)
    if chosen.poll is not None:
        _start_polling(chosen)


def _leave(chosen: Settings) -> None:
    global _uses, _before
    with _lock:
        last = len(_uses) - 1 - next(i for i, used in enumerate(reversed(_uses)) if used is chosen)
        _uses = _uses[:last] + _uses[last + 1 :]
        if not _uses:
            set_observer(_before)
            _before = None


def _after_fork() -> None:
    """Let debug mode go on in a forked worker, whose parent's threads it does not have.

    A lock may have been held by one of them. And a computation that PyTorch shares among threads waits
    for them for ever, once the parent has made one; data loaders' workers compute with one thread too.
    """
    global _lock
    _lock = threading.Lock()
    if is_on():
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)


# captured checks


class Capture(Protocol):
    """Checks inside graphs, as ``ddtree.impl`` installs them."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""

    def insert(self, known: dict[str, Any], function: str, where: str, chosen: Settings) -> None:
        """Put a check of these fields into the graph."""

    def poll(self) -> Iterator[tuple[InvariantViolation, Call, str]]:
        """What captured checks have told of since the last poll: violation, call, function."""


capture: Capture | None = None


def install_capture(installed: Capture) -> None:
    """Hand over calls that are made while a graph is captured."""
    global capture
    capture = installed


def poll() -> None:
    """Do what the settings say with what captured checks have told of. Nothing waits for the device.

    Raises:
        InvariantViolation: the first, if the action is to raise.
    """
    chosen = current()
    if chosen is None:
        return
    with suppress(IndexError):
        raise _pending.popleft()
    _look(chosen)


def _look(chosen: Settings) -> None:
    for violation, call, function in capture.poll() if capture is not None else ():

        def write(path: Path, call: Call = call) -> object:
            return dump_call(path, call=call)

        act(violation, chosen, function, write)


_pending: deque[InvariantViolation] = deque()
"""Violations that the polling thread found: each next call raises one."""


def _start_polling(chosen: Settings) -> None:
    """Poll every so often while these settings are in use."""

    def run() -> None:
        while chosen.poll is not None and any(used is chosen for used in _uses):
            time.sleep(chosen.poll)
            newest = current()
            try:
                if newest is not None:
                    _look(newest)
            except InvariantViolation as violation:
                _pending.append(violation)

    threading.Thread(target=run, name="ddtree.debug", daemon=True).start()


# calls

_checking = threading.local()
"""``on`` while this thread is in a check, whose own calls are not checked; ``look``: its innermost call."""


@dataclass
class _Look:
    """One call that is looked at."""

    function: Callable[..., Any]
    settings: Settings
    is_captured: bool
    is_compared: bool
    given: dict[str, Any]
    outer: "_Look | None"
    state: str = "not run"
    result: Any = None
    is_broken: bool = False
    """Whether a violation was found in it, or in a call inside it."""
    told: set[str] = field(default_factory=set)
    """Violations found in the outermost call and those inside it: the same one again is no news."""

    def __post_init__(self) -> None:
        if self.outer is not None:
            self.told = self.outer.told

    @property
    def name(self) -> str:
        return _name(self.function)

    def act(self, violation: InvariantViolation, known: dict[str, Any]) -> None:
        """Do what the settings say."""
        look: _Look | None = self
        while look is not None:
            look.is_broken, look = True, look.outer
        numbers = (violation.invariant, violation.request, violation.expected, violation.found)
        told = str(numbers)  # lists and NaN compare by their text
        if told in self.told:
            return
        self.told.add(told)
        why = str(violation).splitlines()[0]

        def write(path: Path) -> object:
            with suppress(ValueError, TypeError):  # fields of a wrong kind: the arguments alone
                return record(path, self.name, self.given, Call(**known), why)
            return record(path, self.name, self.given, None, why)

        act(violation, self.settings, self.name, None if self.is_captured else write)

    def check(self, known: dict[str, Any], where: str) -> None:
        """Hold fields to the table, or have the graph do it."""
        if not known:
            return
        if self.is_captured:
            assert capture is not None
            capture.insert(known, self.name, where, self.settings)
            return
        try:
            held = check_cheaply if self.settings.level == "cheap" else check
            held(call=Call(**known), where=where)
        except InvariantViolation as violation:
            self.act(violation, known)


def _observe(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run one public call, checked. Public calls inside it are observed in their turn."""
    chosen = current()
    if chosen is None or getattr(_checking, "on", False):
        return function(*args, **kwargs)
    is_captured = capture is not None and capture.is_capturing()
    if not is_captured:
        poll()
    is_chosen = is_captured or _is_chosen(function, chosen.sample)
    if not is_chosen and chosen.level != "shadow":
        return function(*args, **kwargs)
    counts.add("calls", _name(function), chosen.level)
    is_compared = is_chosen and chosen.level == "shadow" and not is_captured
    outer = getattr(_checking, "look", None)
    look = _checking.look = _Look(function, chosen, is_captured, is_compared, {}, outer)
    try:
        return _checked(function)(*args, **kwargs)
    except TypeCheckError as error:
        violation = _types(function, error)
        if "raise" in chosen.actions or look.state == "running":
            counts.add("violations", "types", look.name)
            raise violation from error
        look.act(violation, {})
        return look.result if look.state == "done" else function(*args, **kwargs)
    finally:
        _checking.look = outer


@cache
def _counter(_: Callable[..., Any]) -> "count[int]":
    """A count of each function's own."""
    return count(1)


def _is_chosen(function: Callable[..., Any], sample: float) -> bool:
    """Whether this call of a function is one of those looked at: every so many, the first among them."""
    if sample >= 1:
        return True
    number = next(_counter(function))
    return (sample > 0 and int((number - 1) * sample) != int((number - 2) * sample)) or (
        number == 1 and sample > 0
    )


@cache
def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its checks around it, made once."""
    signature = inspect.signature(function)
    name = _name(function)

    @wraps(function)
    def body(*args: Any, **kwargs: Any) -> Any:
        look: _Look = _checking.look
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = look.given = dict(bound.arguments)
        with _guard():
            _check_types(look, given)
            entry = _entry(given, look.is_captured) | _sized(function, given.values())
            look.check(entry, f"on entry to {name}")
            shadow = Shadow.of(function, given) if look.is_compared else None
        look.state = "running"
        result = look.result = function(*args, **kwargs)
        look.state = "done"
        if name == "commit_kv" and not look.is_captured:
            _remember_commit(given)
        with _guard():
            _check_types(look, {"its result": result})
            look.check(
                _exit(entry, given, result) | _sized(function, (result,)), f"on return from {name}"
            )
            if shadow is not None:
                _compare(look, shadow, result, entry)
        return result

    typed: Callable[..., Any] = jaxtyped(typechecker=beartype)(body)
    return typed


def _check_types(look: _Look, values: dict[str, Any]) -> None:
    """Hold contract objects to the annotations of their fields."""
    try:
        for argument, value in values.items():
            _check_fields(look.name, argument, value)
    except InvariantViolation as violation:
        look.act(violation, {})


def _compare(look: _Look, shadow: Shadow, result: Any, entry: dict[str, Any]) -> None:
    """Run the reference on what the call was given, and compare."""
    violation = shadow.violation(result, look.given, f"on return from {look.name}")
    outcome = "refused" if shadow.refused else "same" if violation is None else "other"
    counts.add("shadows", look.name, outcome)
    if violation is not None and not look.is_broken:  # else it is what follows from what was told
        look.given = shadow.given  # as it was before the call changed it
        look.act(violation, entry)


@contextmanager
def _guard() -> Iterator[None]:
    _checking.on = True
    try:
        with on_host():
            yield
    finally:
        _checking.on = False


def _name(function: Callable[..., Any]) -> str:
    return "VerifyBuffers.fill" if function.__name__ == "_fill" else function.__qualname__


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
_SIZED = (contracts.FlatMask, contracts.PackedMask, contracts.DenseMask)
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


def _entry(given: dict[str, Any], is_captured: bool = False) -> dict[str, Any]:
    """The fields that the arguments tell. Buffers about to be filled still hold another call: not they."""
    known = Call.of(*(value for value in given.values() if isinstance(value, _PARTS))).known()
    known |= {name: given[name] for name in _BY_NAME if given.get(name) is not None}
    if given.get("from_logits") is True:
        if is_captured:  # a softmax of every replay's draft would weigh more than the round
            del known["draft_log_probs"]
        else:
            known["draft_log_probs"] = _log_probs(given["draft_log_probs"])
    for name, axes in _AXES.items():
        value = given.get(name)
        if isinstance(value, Tensor):
            known |= {field: value.shape[axis] for field, axis in axes.items()}
    if "slot_table" in known:
        known["slot_table"] = known["slot_table"].clone()  # a commit permutes it in place
    if isinstance(given.get("kv"), PagedKV) and not is_captured:
        known["commits_before"] = _commits_before(given)
    tree = given.get("tree")
    if (
        "slot_table" in given
        and "q_lens" in given
        and given["q_lens"] is None
        and isinstance(tree, DraftTree)
    ):
        rows = torch.full_like(tree.num_nodes, tree.token_ids.shape[1])
        known["q_lens"] = rows  # plan_verify's default: all rows of the tree
    if "q_lens" in known and "prefix_lens" in known:
        asked, prefix_lens = known["q_lens"], known["prefix_lens"]
        if isinstance(asked, Tensor) and asked.shape == prefix_lens.shape:
            is_used = prefix_lens.to(asked.device) >= 0  # a negative one marks an unused request
            known["q_lens"] = asked.where(is_used, 0)
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


def _sized(function: Callable[..., Any], values: Iterable[object]) -> dict[str, Any]:
    """That masks of the fast path are as long as the longest call's, whatever the layout says of itself."""
    is_fast = function.__module__.startswith(FAST)
    return {"is_captured": True} if is_fast and any(isinstance(v, _SIZED) for v in values) else {}


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
    wanted = (
        expected[1].rstrip(".").removeprefix("<class '").removesuffix("'>")
        if expected
        else "its annotation"
    )
    sizes = {axis: int(size) for axis, size in re.findall(r"^(\w+)=(\d+)$", text, re.MULTILINE)}
    return _type_violation(
        _name(function),
        argument[1] if argument else "its result",
        wanted + _with_sizes(wanted, sizes),
        found[1].rstrip(".") if found else "another type",
    )


def _with_sizes(annotation: str, sizes: Mapping[str, int]) -> str:
    """The sizes of an annotation's axes that other tensors have said before it: `` with B = 2``."""
    axes = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", annotation))
    told = ", ".join(f"{axis} = {sizes[axis]}" for axis in axes if axis in sizes)
    return told and f" with {told}"


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
    sizes: dict[str, int] = {}
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
                wanted = getattr(hint, "__name__", str(hint))
                wanted += _with_sizes(wanted, sizes)
                raise _type_violation(function, f"{argument}.{spec.name}", wanted, found)
            sizes |= _axes(content, hint)


def _bind_axes(content: object, hint: Any) -> None:
    """Tell jaxtyping the size of an axis ``B`` where it first meets ``B+1``."""
    for axis, size in _axes(content, hint).items():
        if f"{axis}+1" in hint.dim_str.split() and size >= 0:
            known_axis: Any = Shaped[Tensor, f" {axis}"]
            is_bearable(torch.empty(size, device="meta"), known_axis)


def _axes(content: object, hint: Any) -> dict[str, int]:
    """The sizes of the axes that an annotation names; of ``B+1`` that of ``B``."""
    axes = getattr(hint, "dim_str", "").split()
    if not isinstance(content, Tensor) or content.ndim != len(axes):
        return {}
    return {
        axis.removesuffix("+1"): size - axis.endswith("+1")
        for size, axis in zip(content.shape, axes, strict=True)
    }


if level_of(os.environ.get("DDTREE_DEBUG")):
    _enter(settings())

"""What the catalogue is made of: rows, their kinds, and the members of each kind.

A row is a fault that a real engine had. Its first member rebuilds it in its smallest numbers; the others
are of the same kind and no engine's that we know of. A member is data and a mutation: a sound call and
what spoils it (``CallFault``), or a sound implementation and its mutant (``PropertyFault``). Nothing here
is random, and nothing is computed before it is asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree.invariants import Call, InvariantViolation, violations
from ddtree.invariants.violation import Value


class Names(NamedTuple):
    """What the checker must say of a broken call."""

    invariant: str
    request: int | None
    expected: Value
    found: Value


class Right(NamedTuple):
    """A number that the sound call must hold, worked out by hand."""

    field: str
    at: Any
    """Index into the field; None: the field itself."""
    value: Any


class Pair(NamedTuple):
    """One sound call and its broken twin."""

    path: str
    """``eager``, or ``captured``: both in fixed buffers, longer than the call."""
    sound: Call
    broken: Call
    names: Names
    hint: str

    @property
    def same_shapes(self) -> bool:
        """Whether the broken call could be written into the sound one's tensors."""
        return shapes(self.sound) == shapes(self.broken)


@dataclass(frozen=True)
class CallFault:
    """A fault that a call carries: an invariant names it."""

    what: str
    sound: Callable[[], Call]
    spoil: Callable[[Call], Call]
    names: Names
    right: tuple[Right, ...]
    """Values of the sound call."""
    hint: str = ""
    """Part of the hint that must be given; empty: none may be."""
    captured: Names | bool = True
    """The same call in fixed buffers: named alike, by other numbers, or not made (False)."""
    captured_hint: str | None = None
    """The hint there, where it is another."""
    also: tuple[Names, ...] = field(default=())
    """Other places where the same call must be named."""

    def pairs(self) -> Iterator[Pair]:
        """The calls as they are, then in fixed buffers where there is such a variant."""
        sound = self.sound()
        broken = self.spoil(sound)
        path = "captured" if sound.is_captured else "eager"
        yield Pair(path, sound, broken, self.names, self.hint)
        if self.captured is False or sound.is_captured or sound.qo_indptr is None:
            return
        names = self.names if self.captured is True else self.captured
        hint = self.hint if self.captured_hint is None else self.captured_hint
        yield Pair("captured", in_buffers(sound), in_buffers(broken), names, hint)


class Measured(NamedTuple):
    """What a property came to: it holds where both are equal."""

    expected: Value
    found: Value

    @property
    def holds(self) -> bool:
        """Whether the implementation did what it should."""
        return self.expected == self.found


@dataclass(frozen=True)
class Property:
    """What every right implementation does, whatever the case."""

    id: str
    statement: str
    measure: Callable[[Any, Any], Measured]
    """``(implementation, case)`` to what is expected and what was found."""


@dataclass(frozen=True)
class PropertyFault:
    """A fault of an implementation that no single call shows: a fuzzed property finds it."""

    what: str
    property: Property
    sound: Callable[..., Any]
    mutant: Callable[..., Any]
    case: Callable[[], Any]
    """The smallest case that shows it."""
    expected: Value
    found: Value


Member = CallFault | PropertyFault


@dataclass(frozen=True)
class Row:
    """One fault that an engine had, and its kind."""

    number: int
    """Its name, and its own for good: a number that no row has stays free."""
    source: str
    """Engine and issue."""
    fault: str
    """What went wrong, in a line."""
    kind: str
    """What all members have in common."""
    story: str
    members: tuple[Member, ...]
    """The engine's own fault first."""


def shapes(call: Call) -> dict[str, Any]:
    """Shape and dtype of every tensor of a call, and the names of its other fields."""
    return {
        name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
        for name, value in call.known().items()
    }


def named(call: Call, names: Names) -> InvariantViolation | None:
    """The violation that says just this, if there is one."""
    for violation in violations(call):
        said = (violation.invariant, violation.request, violation.expected, violation.found)
        if said == names:
            return violation
    return None


SPARE = 3
"""Entries by which the fixed buffers of a captured variant are longer than the call."""


def in_buffers(call: Call) -> Call:
    """The same call in fixed buffers with room to spare: indptrs repeat their end, the rest is inert."""
    known = call.known()
    pad = -1 if call.pad_slot is None else call.pad_slot
    tails: dict[str, Any] = {
        "positions": 0,
        "input_ids": 0,
        "out_cache_loc": pad,
        "custom_mask": 0,
        "kv_indices": 0,
    }
    longer: dict[str, Any] = {}
    for name in ("qo_indptr", "kv_indptr", "mask_indptr"):
        if name in known:
            longer[name] = torch.cat([known[name], known[name][-1:]])
    for name, value in tails.items():
        if name in known:
            longer[name] = torch.cat([known[name], known[name].new_full((SPARE,), value)])
    requests = next(
        (
            known[name].shape[0]
            for name in ("num_nodes", "parents", "token_ids", "q_lens", "prefix_lens")
            if name in known
        ),
        known["qo_indptr"].numel() - 1,
    )
    longer |= {"is_captured": True, "pad_slot": pad, "batch_size": requests}
    return replace(call, **longer)

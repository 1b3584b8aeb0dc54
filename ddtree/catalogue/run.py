"""Running the catalogue: is every fault caught as it should be, and at which public call?"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ddtree.catalogue.entry import CallFault, Member, PropertyFault, Right, named
from ddtree.invariants import Call, InvariantViolation, debug, violations
from ddtree.invariants.violation import Value
from ddtree.spec import (
    Horizon,
    InputError,
    VerifyBuffers,
    accept_greedy,
    build_tree,
    commit_kv,
    verify_attention,
)
from ddtree.spec.contracts import (
    Acceptance,
    BitMask,
    Budget,
    DenseMask,
    DraftTree,
    FlatMask,
    PackedMask,
    PagedKV,
    TreeMask,
    VerifyLayout,
)


class Met(NamedTuple):
    """The first public call of a round that does not let a broken call pass."""

    at: str
    """``on entry to verify_attention``."""
    by: str
    """The invariant that is named there, or ``InputError`` where the function itself refuses."""


@dataclass(frozen=True)
class Outcome:
    """What came of one member."""

    caught_by: str
    """The invariant, or the property."""
    met: Met | None
    """Where debug mode meets it first; a property is met by fuzzing. None: no public call holds it."""
    expected: Value
    found: Value
    hint: str
    sound: str
    """The right numbers of the sound twin."""
    message: str
    """The violation as ``ddtree check`` prints it."""
    ok: bool
    """Caught as the member says, on every path, and the sound twin is clean."""


def run(member: Member) -> Outcome:
    """Check one member and its sound twin."""
    return _run_property(member) if isinstance(member, PropertyFault) else _run_call(member)


def _run_property(fault: PropertyFault) -> Outcome:
    case, held = fault.case(), fault.property
    right, wrong = held.measure(fault.sound, case), held.measure(fault.mutant, case)
    return Outcome(
        caught_by=held.id,
        met=Met("fuzzing", held.id),
        expected=wrong.expected,
        found=wrong.found,
        hint="",
        sound=f"found {right.found}",
        message=(
            f"property {held.id} is broken: expected {wrong.expected}, found {wrong.found}\n"
            f"  property: {held.statement}"
        ),
        ok=right.holds and (wrong.expected, wrong.found) == (fault.expected, fault.found),
    )


def _run_call(fault: CallFault) -> Outcome:
    ok, first = True, None
    for pair in fault.pairs():
        violation = named(pair.broken, pair.names)
        ok = ok and violation is not None and pair.hint in violation.hint
        ok = ok and not violations(pair.sound)
        first = first or violation
    names = fault.names
    return Outcome(
        caught_by=names.invariant,
        met=met(fault.spoil(fault.sound())),
        expected=names.expected,
        found=names.found,
        hint="" if first is None else first.hint,
        sound=", ".join(_said(right) for right in fault.right),
        message="" if first is None else str(first),
        ok=ok,
    )


def _said(right: Right) -> str:
    """``mask_indptr[1] == 374``."""
    return f"{right.field}{_index(right.at)} == {right.value}"


def _index(at: Any) -> str:
    if at is None:
        return ""
    parts = at if isinstance(at, tuple) else (at,)
    shown = [
        f"{part.start or ''}:{part.stop or ''}" if isinstance(part, slice) else str(part)
        for part in parts
    ]
    return f"[{', '.join(shown)}]"


def met(call: Call) -> Met | None:
    """Run a call through the public functions of a round, debug mode on, until one stops it.

    None: no public function takes what the call holds, or none of them finds anything.
    """
    for function in _RUNS:
        try:
            with debug():
                function(call)
        except InvariantViolation as violation:
            return Met(violation.where, violation.invariant)
        except InputError:
            return Met(f"refused by {function.__name__.strip('_')}", "InputError")
        except _Unknown:
            continue
    return None


class _Unknown(Exception):
    """The call does not hold what the function takes."""


def _made(kind: Callable[..., Any], call: Call, **renamed: str) -> Any:
    """A contract object from the call's fields."""
    known = call.known()
    names = {renamed.get(name, name): name for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    optional = {"is_captured"}
    if not names.keys() <= known.keys() | optional:
        raise _Unknown
    return kind(**{field: known[name] for name, field in names.items() if name in known})


def _mask(call: Call) -> TreeMask:
    for kind, renamed in (
        (FlatMask, {"allowed": "custom_mask"}),
        (PackedMask, {}),
        (DenseMask, {}),
        (BitMask, {}),
    ):
        try:
            mask: TreeMask = _made(kind, call, **renamed)
        except _Unknown:
            continue
        return mask
    raise _Unknown


def _build_tree(call: Call) -> None:
    known = call.known()
    if not {"draft_log_probs", "root_token_ids"} <= known.keys():
        raise _Unknown
    build_tree(known["draft_log_probs"], known["root_token_ids"], Budget(8))


def _fill(call: Call) -> None:
    if call.is_captured:
        raise _Unknown
    tree, layout = _made(DraftTree, call), _made(VerifyLayout, call)
    mask = _mask(call)
    if not isinstance(mask, FlatMask):
        raise _Unknown
    buffers = VerifyBuffers(
        len(tree.num_nodes), tree.parents.shape[1], max(0, *layout.kv_indptr.diff().tolist())
    )
    buffers.fill(tree, layout, mask)


def _verify_attention(call: Call) -> None:
    layout, mask = _made(VerifyLayout, call), _mask(call)
    rows = max(layout.positions.numel(), int(layout.qo_indptr.max()))
    slots = max([*layout.kv_indices.tolist(), *layout.out_cache_loc.tolist(), 0]) + 1
    query = torch.zeros(rows, 1, 2)
    pool = torch.zeros(call.kv_pool_size or slots, 1, 2)
    verify_attention(query, query, query, pool, pool, layout, mask)


def _accept_greedy(call: Call) -> None:
    tree, layout = _made(DraftTree, call), _made(VerifyLayout, call)
    chosen = call.target_ids
    if chosen is None:
        chosen = torch.zeros(layout.positions.numel(), dtype=torch.int64)
    accept_greedy(tree, chosen, layout, Horizon(int(tree.depths.max())))


def _commit_kv(call: Call) -> None:
    layout, acceptance = _made(VerifyLayout, call), _made(Acceptance, call)
    table = call.known().get("slot_table")
    if table is None:
        raise _Unknown
    commit_kv(PagedKV((), (), table.clone(), 4), layout, acceptance)


_RUNS = (_build_tree, _fill, _verify_attention, _accept_greedy, _commit_kv)

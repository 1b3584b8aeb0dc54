"""Checking one call against the whole table."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddtree.invariants.call import Call, on_host
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.sizes import Sizes, claimed_sizes, sizes_of
from ddtree.invariants.table import TABLE
from ddtree.invariants.violation import InvariantViolation, Violation
from ddtree.spec.contracts import Acceptance, Commit, DraftTree, TreeMask, VerifyLayout
from ddtree.spec.errors import given, require

_STRUCTURE = {"batch", "tree_shape"}
"""Where these are broken nothing else can be addressed, so nothing else is checked."""


@dataclass(frozen=True)
class Report:
    """What a check of one call came to."""

    held: tuple[str, ...]
    broken: tuple[InvariantViolation, ...]
    """In the order of the table, each request and place by itself."""
    not_checked: dict[str, str]
    """Invariant: why."""

    @property
    def ok(self) -> bool:
        """No invariant is broken; those not checked are not known to hold."""
        return not self.broken

    def __str__(self) -> str:
        lines = [str(violation) for violation in self.broken]
        lines.append(f"held: {', '.join(self.held) or 'none'}")
        lines += [f"not checked: {name} ({why})" for name, why in self.not_checked.items()]
        return "\n".join(lines)


def report(call: Call, where: str = "") -> Report:
    """Check every invariant that the call's fields allow.

    Args:
        call: the call; what it does not hold is not checked.
        where: what is being checked, for the message: "on entry to verify_attention".

    Raises:
        InputError: what is given is no ``Call``.
    """
    _require_call(call)
    with on_host():
        return _report(call.on_cpu(), where)


def _report(call: Call, where: str) -> Report:
    sizes = sizes_of(call)
    held: list[str] = []
    broken: dict[str, list[Violation]] = {}
    not_checked: dict[str, str] = {}
    for row in TABLE:
        causes = [name for name in broken if name in _STRUCTURE or name in row.given]
        missing = row.missing(call, sizes)
        if causes or missing:
            lacks = " and ".join(need.replace("|", "/") for need in missing)
            not_checked[row.id] = f"{causes[0]} is broken" if causes else f"no {lacks}"
            continue
        found = list(row.check(call, sizes))
        if found:
            broken[row.id] = found
        elif unread := _unread(row, call, sizes, broken):
            not_checked[row.id] = unread
        else:
            held.append(row.id)
    raised = tuple(
        _violation(row, found, where, tuple(name for name in broken if name != row.id))
        for row in TABLE
        for found in broken.get(row.id, ())
    )
    return Report(tuple(held), raised, not_checked)


def _unread(row: Invariant, call: Call, sizes: Sizes, broken: Iterable[str]) -> str:
    """Why an invariant that found nothing wrong does not hold for all that: it could not look everywhere."""
    reasons = [] if row.unread is None else [row.unread(call, sizes, name) for name in broken]
    return next(filter(None, reasons), "")


def violations(call: Call, where: str = "") -> list[InvariantViolation]:
    """Everything that is broken, in the order of the table."""
    return list(report(call, where).broken)


def check(
    tree: DraftTree | None = None,
    layout: VerifyLayout | None = None,
    mask: TreeMask | None = None,
    acceptance: Acceptance | None = None,
    commit: Commit | None = None,
    buffers: object | None = None,
    *,
    call: Call | None = None,
    where: str = "",
    **known: Any,
) -> None:
    """Raise the first broken invariant of a call, by the order of the table.

    Args:
        tree: the call's trees, and so on: whatever there is of it.
        layout: its layout.
        mask: its mask, in any form.
        acceptance: what was accepted.
        commit: what was committed.
        buffers: ``VerifyBuffers`` that hold the call; in place of layout and mask.
        call: a captured call; what is given beside it wins.
        where: what is being checked, for the message.
        known: single fields of ``Call`` by name, such as ``prefix_lens`` or ``kv_pool_size``.

    Raises:
        InvariantViolation: the first broken one; ``also`` names the others.
        InputError: an unknown field or one of a wrong kind, or nothing to check.
    """
    require(
        buffers is None or (layout is None and mask is None),
        "give the buffers, or the layout and mask, not both: buffers hold their own",
    )
    parts = Call.of(tree, layout, mask, buffers, acceptance, commit, **known)
    if call is not None:
        _require_call(call)
    whole = parts if call is None else replace(call, **parts.known())
    require(bool(whole.known()), "there is nothing to check: give a tree, a layout, a mask, ...")
    for violation in violations(whole, where):
        raise violation


CHEAP = (
    "batch", "tree_shape", "rows", "dtypes", "index_width", "num_nodes", "budget", "mask_len", "mask_indptr",
    "qo_indptr", "max_q_len", "kv_indptr", "flat_len", "packed_len", "mask_shape", "buffer_capacity",
    "num_accepted", "commit_len",
)  # fmt: skip
"""Invariants that shapes, indptrs and lengths tell: the level ``cheap``."""
_SMALL = (
    "qo_indptr", "kv_indptr", "mask_indptr", "byte_indptr", "q_lens", "prefix_lens", "num_nodes",
    "num_accepted", "committed_lens",
)  # fmt: skip
"""What they read; of all other tensors the shape alone."""


def check_cheaply(*, call: Call, where: str = "") -> None:
    """Hold a call to the invariants of ``CHEAP``, and to the whole table once one of them is broken.

    Reads indptrs and lengths alone, and takes the widths as they are claimed: a width that is wrong
    everywhere alike takes ``check``.

    Raises:
        InvariantViolation: as ``check`` raises it.
    """
    with on_host():
        known: dict[str, Any] = {
            name: value.detach().cpu()
            if name in _SMALL
            else torch.zeros((), dtype=value.dtype).expand(value.shape)
            for name, value in call.known().items()
            if isinstance(value, Tensor)
        }
        claimed = replace(call, **known)
        sizes = claimed_sizes(claimed)
        for row in TABLE:
            if (
                row.id in CHEAP
                and not row.missing(claimed, sizes)
                and any(True for _ in row.check(claimed, sizes))
            ):
                check(call=call, where=where)


def _require_call(call: object) -> None:
    require(
        isinstance(call, Call),
        f"call is {given(call)}; expected a Call (Call.of makes one from trees, layouts, masks, ...)",
    )


def _violation(
    row: Invariant, found: Violation, where: str, also: tuple[str, ...]
) -> InvariantViolation:
    return InvariantViolation(
        row.id,
        found.request,
        found.expected,
        found.found,
        found.hint,
        detail=found.detail,
        statement=row.statement,
        formula=row.formula,
        where=where,
        also=also,
    )

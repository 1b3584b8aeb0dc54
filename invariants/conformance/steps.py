"""The steps of a round around the attention: what a backend's function returns beside the reference's.

Compared is what a contract promises, not how memory happens to look: real rows of a mask, the entries that a
commit leaves, values of any integer dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ddtree import spec
from ddtree.invariants.call import Call
from ddtree.invariants.checks import violations
from ddtree.invariants.conformance.backend import Backend
from ddtree.invariants.conformance.failure import WrongResult
from ddtree.invariants.shadow import copied
from ddtree.invariants.strategies import VerifyCall
from ddtree.spec import contracts
from ddtree.spec.contracts import Acceptance, PagedKV, VerifyLayout
from ddtree.spec.dtypes import indexable
from ddtree.spec.errors import of_kind
from ddtree.spec.mask import read_mask


@dataclass(frozen=True)
class StepCase:
    """One call of one function."""

    function: str
    arguments: dict[str, Any]
    """Positional ones, by the names that they have in ``ddtree.spec``."""
    options: dict[str, Any] = field(default_factory=dict)
    call: VerifyCall | None = None
    """The verify pass that the arguments are of."""

    def __str__(self) -> str:
        """``2 requests, q_len 3, num_nodes 2 and 3, prefix_len 0 and 5``, or the shape of the draft."""
        if self.call is not None:
            call = self.call
            numbers = {
                "q_len": call.layout.qo_indptr.diff(),
                "num_nodes": call.tree.num_nodes,
                "prefix_len": call.prefix_lens,
            }
            parts = [f"{name} {_spaced(value)}" for name, value in numbers.items()]
            parts.append(f"page size {call.slots.page_size}")
        else:
            batch, horizon, vocab = self.arguments["draft_log_probs"].shape
            parts = [f"batch {batch}, horizon {horizon}, vocab {vocab}"]
            parts.append(f"budget {self.arguments['budget']}")
        return ", ".join([*parts, *(f"{k} {v}" for k, v in self.options.items() if _is_plain(v))])


def step_difference(backend: Backend, case: StepCase) -> str:
    """What the backend's function does otherwise than the reference's; empty: nothing."""
    right = copied(case.arguments)
    expected = getattr(spec, case.function)(*right.values(), **case.options)
    found, mine = run(backend, case)
    return compared(case, found, expected, mine, right)


def compared(
    case: StepCase, found: Any, expected: Any, mine: dict[str, Any], right: dict[str, Any]
) -> str:
    """What of a result is not as expected, given the arguments as both left them; empty: nothing.

    Raises:
        WrongResult: the result is of another kind.
    """
    if changed := _changed(case, mine):
        return f"it wrote into its input: {changed}"
    try:
        return _COMPARE[case.function](case, found, expected, mine, right)
    except (AttributeError, TypeError):
        if isinstance(found, type(expected)):
            raise
        raise WrongResult(
            f"{case.function} returned {of_kind(found)}, expected {of_kind(expected)}"
        ) from None


def run(backend: Backend, case: StepCase) -> tuple[Any, dict[str, Any]]:
    """The backend's result, and the arguments as it left them; it runs on its device, on copies."""
    arguments, options = (copied(given, backend.device) for given in (case.arguments, case.options))
    result = backend.functions[case.function](*arguments.values(), **options)
    is_contract = type(result).__module__ == contracts.__name__
    return (
        copied(result) if is_contract else result,
        copied(arguments),
    )


def _changed(case: StepCase, left: dict[str, Any]) -> str:
    """The first number of an argument that is another after the call; a commit is given its KV to change."""
    for name, value in case.arguments.items():
        if name == "kv":
            continue
        held, was = ({"": v} if isinstance(v, Tensor) else _tensors(v) for v in (left[name], value))
        for part, tensor in was.items():
            if line := _differs(f"{name}{part}", held[part], tensor):
                return line.replace("expected", "it was")
    return ""


def _tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of a contract's object, ``.parents`` and so on; of anything else none."""
    parts = (
        {f".{f.name}": getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {}
    )
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


def call_of(backend: Backend, case: StepCase) -> Call:
    """The captured call of a case, with the backend's own result for ``ddtree check`` to judge."""
    known: dict[str, Any] = {}
    objects: list[object] = []
    if case.call is not None:
        call = case.call
        objects = [call.tree, call.layout, spec.tree_mask(call.tree, call.layout, "flat")]
        known = {
            "prefix_lens": call.prefix_lens,
            "slot_table": call.slots.table,
            "kv_pool_size": call.slots.num_slots,
            "q_lens": call.q_lens,
        }
    for name in ("draft_log_probs", "root_token_ids", "budget", "target_ids", "horizon"):
        if name in case.arguments:
            known[name] = case.arguments[name]
    try:
        result, _ = run(backend, case)
        return Call.of(*objects, case.arguments.get("acceptance"), result, **known)
    except Exception:  # noqa: BLE001 # it raises, or its result is no contract's: the input alone is told
        return Call.of(*objects, case.arguments.get("acceptance"), **known)


Compare = Callable[[StepCase, Any, Any, dict[str, Any], dict[str, Any]], str]


def _fields(_case: StepCase, found: Any, expected: Any, *_: Any) -> str:
    """All tensors of a contract's object."""
    for spec_field in fields(expected):
        name = spec_field.name
        if line := _differs(name, getattr(found, name), getattr(expected, name)):
            return line
    return ""


def _layout(case: StepCase, found: VerifyLayout, expected: VerifyLayout, *_: Any) -> str:
    """The invariants first, since they name the cause; then the numbers, of real rows."""
    assert case.call is not None
    call = case.call
    known = Call.of(
        call.tree, found, prefix_lens=call.prefix_lens, slot_table=call.slots.table,
        q_lens=call.q_lens,
    )  # fmt: skip
    for broken in violations(known):
        where = "" if broken.request is None else f" in request {broken.request}"
        hint = f" ({broken.hint})" if broken.hint else ""
        return (
            f"{broken.invariant} is broken{where}: expected {broken.expected}, "
            f"found {broken.found}{hint}"
        )
    end = int(expected.kv_indptr[-1])
    if line := _differs("kv_indices", found.kv_indices[:end], expected.kv_indices[:end]):
        return line
    rows = _real_rows(call)
    for name in ("positions", "out_cache_loc"):
        if line := _differs(name, getattr(found, name)[rows], getattr(expected, name)[rows]):
            return line
    return ""


def _mask(case: StepCase, found: Any, expected: Any, *_: Any) -> str:
    """What real rows see, as the reference reads it."""
    assert case.call is not None
    layout = case.call.layout
    for b, nodes in enumerate(case.call.tree.num_nodes.tolist()):
        mine, right = (read_mask(mask, layout, b)[:nodes] for mask in (found, expected))
        if line := _differs(f"the mask of request {b}", mine, right):
            return line
    return ""


def _commit(
    _case: StepCase, found: Any, expected: Any, mine: dict[str, Any], right: dict[str, Any]
) -> str:
    """Lengths, and what lies at each committed entry, whether slots or contents were moved."""
    if line := _differs("prefix_lens", found.prefix_lens, expected.prefix_lens):
        return line
    kv, known = mine["kv"], right["kv"]
    for b, length in enumerate(expected.prefix_lens.tolist()):
        for name in ("keys", "values"):
            for layer, (pool, other) in enumerate(
                zip(getattr(kv, name), getattr(known, name), strict=True)
            ):
                held, wanted = (
                    indexable(p)[table[b, :length]]
                    for p, table in ((pool, kv.slot_table), (other, known.slot_table))
                )
                if line := _differs(f"{name} of layer {layer}, request {b}", held, wanted):
                    return line
        slots = kv.slot_table[b]
        if slots.unique().numel() != slots.numel():
            return f"request {b} has a slot twice in its table after the commit"
    return ""


_COMPARE: dict[str, Compare] = {
    "build_tree": _fields,
    "plan_verify": _layout,
    "tree_mask": _mask,
    "convert_mask": _mask,
    "accept_greedy": _fields,
    "accept_sampled": _fields,
    "commit_kv": _commit,
}


def _differs(name: str, found: Tensor, expected: Tensor) -> str:
    """The first number that differs; dtypes may."""
    found = found.detach().cpu()
    if found.shape != expected.shape:
        return f"{name} has shape {list(found.shape)}; expected {list(expected.shape)}"
    wrong = (found.double() != expected.double()).nonzero()
    if not wrong.numel():
        return ""
    at = tuple(wrong[0].tolist())
    return f"{name}{list(at)} is {found[at].item()}; expected {expected[at].item()}"


def _real_rows(call: VerifyCall) -> Tensor:
    """Rows of the call that are nodes."""
    starts = call.layout.qo_indptr.tolist()
    nodes = call.tree.num_nodes.tolist()
    return torch.cat([torch.arange(s, s + n) for s, n in zip(starts, nodes, strict=False)])


def paged_kv(call: VerifyCall, layers: int = 2) -> PagedKV:
    """Pools whose every number differs."""
    slots = call.slots.num_slots
    numbers = torch.arange(2 * layers * slots * 2, dtype=torch.float32)
    pools = numbers.reshape(2 * layers, slots, 1, 2).unbind()
    return PagedKV(pools[:layers], pools[layers:], call.slots.table.clone(), call.slots.page_size)


def liked_choices(call: VerifyCall, acceptance: Acceptance, spare: int) -> Tensor:
    """``[T]`` target choices that accept just that path; elsewhere the token ``spare``."""
    choices = torch.full((int(call.layout.qo_indptr[-1]),), spare, dtype=torch.int64)
    for b, start in enumerate(call.layout.qo_indptr[:-1].tolist()):
        count = int(acceptance.num_accepted[b])
        path = acceptance.nodes[b, :count].tolist()
        for node, child in pairwise(path):
            choices[start + node] = call.tree.token_ids[b, child]
        choices[start + path[-1]] = acceptance.bonus[b]
    return choices


def _spaced(value: Tensor) -> str:
    values = value.tolist()
    return " and ".join(map(str, values)) if len(set(values)) > 1 else str(values[0])


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, Tensor)

"""The shadow: a call of the fast path, run on the reference too, and the two results compared.

Integers and masks must be equal, floats within ``TOLERANCE``. The fast path's tensors may be longer than
the call (``impl/README.md``), so what lies behind the call is not compared.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ddtree.invariants.violation import InvariantViolation
from ddtree.spec import index
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import (
    Acceptance,
    Commit,
    DenseMask,
    DraftTree,
    FlatMask,
    PackedMask,
    PagedKV,
    PrefixLen,
    QLen,
    VerifyLayout,
)
from ddtree.spec.errors import InputError

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Most difference between floats of the two, relative to the largest of the tensor (at least 1): kernels
add in another order, and round once more where products are taken in the inputs' dtype."""
FAST = "ddtree.impl"
"""Functions of this package have a reference of the same name in ``ddtree.spec``."""
NAMES = (
    "build_tree", "plan_verify", "tree_mask", "convert_mask", "verify_attention",
    "accept_greedy", "accept_sampled", "commit_kv", "VerifyBuffers.fill",
)  # fmt: skip
"""Functions that can be run again; a whole round needs a model, but each of its steps is one of these."""
INDPTRS = ("qo_indptr", "kv_indptr", "mask_indptr")


class Shadow:
    """One call's arguments, kept on the CPU as they were before the call ran."""

    def __init__(self, function: str, given: Mapping[str, Any]) -> None:
        self.function = function
        layout = given.get("layout")
        self.given = {name: copied(_cut(value, layout)) for name, value in given.items()}
        self.refused = ""
        """Why the reference did not run; it refuses what the fast path trusts."""

    @classmethod
    def of(cls, function: Callable[..., Any], given: Mapping[str, Any]) -> "Shadow | None":
        """The shadow of a fast call; None where there is no reference to run."""
        name = "VerifyBuffers.fill" if function.__name__ == "_fill" else function.__qualname__
        if name not in NAMES or not function.__module__.startswith(FAST):
            return None
        return cls(name, given)

    def reference(self) -> dict[str, Any]:
        """What the reference makes of the call, by name; empty where it refuses it."""
        arguments = copied(self.given)
        used = _used(self.function, arguments)
        if used is not None:
            arguments = {name: _of_used(name, value, used) for name, value in arguments.items()}
        try:
            result = run(import_module("ddtree.spec"), self.function, arguments)
        except InputError as error:
            self.refused = str(error)
            return {}
        if used is not None:
            result = _with_unused(result, used)
            if "kv" in arguments:  # tables of unused requests stay as they are
                table = self.given["kv"].slot_table.clone()
                table[_padded(used, table.shape[0])] = arguments["kv"].slot_table
                arguments["kv"] = replace(arguments["kv"], slot_table=table)
        return outcome(self.function, result, arguments, self.given.get("layout"))

    def violation(
        self, result: Any, given: Mapping[str, Any], where: str
    ) -> InvariantViolation | None:
        """Run the reference and compare: the result, and what of ``given`` the call changed."""
        known = self.reference()
        if self.refused:
            return None
        found = outcome(
            self.function,
            copied(result),
            copied(given),
            self.given.get("layout"),
        )
        told = difference(found, known)
        if told is None:
            return None
        name, want, have, detail = told
        return InvariantViolation(
            "shadow",
            None,
            want,
            have,
            detail=f"{name} of {self.function}{detail}",
            statement="A fast function gives what the reference gives.",
            where=where,
        )


def run(package: Any, function: str, arguments: Mapping[str, Any]) -> Any:
    """Run a public function of ``ddtree.spec`` or ``ddtree.impl`` by its name."""
    if function == "VerifyBuffers.fill":
        rest = {name: value for name, value in arguments.items() if name != "buffers"}
        arguments["buffers"].fill(**rest)
        return None
    return getattr(package, function)(**arguments)


def _used(function: str, given: Mapping[str, Any]) -> Bool[Tensor, " B"] | None:
    """Which requests are used, where some are not and the reference would refuse them."""
    if function == "plan_verify":
        used = given["prefix_lens"] >= 0
    elif function in {"accept_greedy", "accept_sampled", "commit_kv"}:
        layout = given["layout"]
        batch = (given["acceptance"].nodes if "kv" in given else given["tree"].token_ids).shape[0]
        indptrs = [getattr(layout, field) for field in INDPTRS]
        if any(indptr.numel() <= batch for indptr in indptrs):
            return None
        used = torch.stack([indptr[: batch + 1].diff() != 0 for indptr in indptrs]).any(dim=0)
    else:
        return None
    return None if bool(used.all()) else used


def _of_used(name: str, value: Any, used: Bool[Tensor, " B"]) -> Any:
    """What an argument says of the used requests. The others have no rows or entries in any of them."""
    match value:
        case DraftTree() | Acceptance():
            return replace(value, **{field: part[used] for field, part in vars(value).items()})
        case VerifyLayout():
            kept = _padded(used, value.qo_indptr.numel() - 1)
            kept = torch.cat([kept.new_ones(1), kept])
            indptrs = {field: getattr(value, field)[kept] for field in INDPTRS}
            return replace(value, **indptrs)
        case PagedKV():
            table = value.slot_table
            return replace(value, slot_table=table[_padded(used, table.shape[0])])
        case Tensor() if name in {"prefix_lens", "slot_table", "q_lens"}:
            return value[used]
    return value


def _with_unused(result: Any, used: Bool[Tensor, " B"]) -> Any:
    """The reference's result with the unused requests, as the fast path has them."""

    def spread(part: Tensor, fill: int) -> Tensor:
        whole = part.new_full((used.numel(), *part.shape[1:]), fill)
        whole[used] = part
        return whole

    match result:
        case VerifyLayout():
            end = torch.cat([used.new_zeros(1), used]).cumsum(0)
            return replace(result, **{field: getattr(result, field)[end] for field in INDPTRS})
        case Acceptance(nodes, num_accepted, bonus):
            return Acceptance(spread(nodes, -1), spread(num_accepted, 0), spread(bonus, 0))
        case Commit(prefix_lens, src, dst):
            return Commit(spread(prefix_lens, 0), spread(src, -1), spread(dst, -1))
    return result


def _padded(used: Bool[Tensor, " B"], size: int) -> Bool[Tensor, " size"]:
    """The used requests, and all that fixed buffers or tables hold past the batch."""
    return torch.cat([used, used.new_ones(size - used.numel())])


def _cut(value: Any, layout: VerifyLayout | None) -> Any:
    """A mask as long as its call: the fast path's are as long as the longest, which the reference refuses."""
    if layout is None or layout.is_captured:
        return value
    match value:
        case FlatMask():
            return FlatMask(value.allowed[: _read(layout, layout.mask_indptr, index.mask_len)])
        case PackedMask():
            end = _read(
                layout, value.byte_indptr, lambda p, q: index.packed_len(index.mask_len(p, q))
            )
            return replace(value, packed=value.packed[:end])
    return value


def _read(layout: VerifyLayout, starts: Tensor, length: Callable[[PrefixLen, QLen], int]) -> int:
    """Entries of a mask that a call may read: to where its last segment is said to end, or does end.

    In a sound call both are the same; a faulty one must come to the reference as it was.
    """
    told: list[int] = starts.tolist()
    prefixes, widths = layout.kv_indptr.diff().tolist(), layout.qo_indptr.diff().tolist()
    sizes = zip(told, prefixes, widths, strict=False)  # a faulty indptr may be of another batch
    return max([told[-1], *(start + length(PrefixLen(p), QLen(q)) for start, p, q in sizes)])


def copied(value: Any, device: str | torch.device = "cpu") -> Any:
    """A copy on a device, of contract objects, buffers and named arguments too."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, Mapping):
        return {name: copied(item, device) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(copied(item, device) for item in value)
    if isinstance(value, VerifyBuffers):
        made = VerifyBuffers(
            value.max_batch, value.max_q_len, value.max_context, value.pad_slot, device
        )
        made.layout, made.mask = copied(value.layout, device), copied(value.mask, device)
        made.token_ids = copied(value.token_ids, device)
        return made
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: copied(getattr(value, f.name), device) for f in fields(value)}
        )
    return value


def outcome(
    function: str, result: Any, arguments: Mapping[str, Any], layout: VerifyLayout | None
) -> dict[str, Any]:
    """Everything that a call brought about, by name, cut to the call."""
    found = dict(_parts("result", result, layout))
    if function == "commit_kv":
        kv = arguments["kv"]
        found["slot_table"] = kv.slot_table
        held = kv.slot_table[kv.slot_table >= 0].unique()
        for name in ("keys", "values"):
            found |= {f"{name}[{i}]": pool[held] for i, pool in enumerate(getattr(kv, name))}
    if function == "VerifyBuffers.fill":
        buffers = arguments["buffers"]
        found |= dict(_tensors("buffers.layout", buffers.layout))
        found |= {"buffers.mask": buffers.mask.allowed, "buffers.token_ids": buffers.token_ids}
    return found


def _parts(name: str, value: Any, layout: VerifyLayout | None) -> Iterator[tuple[str, Any]]:
    """The parts of a result that must agree."""
    match value:
        case None:
            return
        case Tensor():
            end = int(layout.qo_indptr[-1]) if layout is not None else value.shape[0]
            yield name, value[:end]
        case tuple():
            for i, item in enumerate(value):
                yield from _parts(f"{name}[{i}]", item, layout)
        case VerifyLayout():
            rows, entries = int(value.qo_indptr[-1]), int(value.kv_indptr[-1])
            yield from (
                (f"{name}.{field}", getattr(value, field))
                for field in ("qo_indptr", "kv_indptr", "mask_indptr")
            )
            yield f"{name}.kv_indices", value.kv_indices[:entries]
            yield f"{name}.positions", value.positions[:rows]
            yield f"{name}.out_cache_loc", value.out_cache_loc[:rows]
        case FlatMask():
            assert layout is not None
            yield f"{name}.allowed", value.allowed[: int(layout.mask_indptr[-1])]
        case PackedMask():
            yield f"{name}.byte_indptr", value.byte_indptr
            yield f"{name}.packed", value.packed[: int(value.byte_indptr[-1])]
        case DenseMask():
            assert layout is not None
            columns = value.bias.shape[3] - value.bias.shape[2]
            sizes = zip(
                layout.qo_indptr.diff().tolist(), layout.kv_indptr.diff().tolist(), strict=True
            )
            for b, (q_len, prefix_len) in enumerate(sizes):
                seen = value.bias[b, 0, :q_len]
                yield f"{name}.bias[{b}], prefix", seen[:, :prefix_len]
                yield f"{name}.bias[{b}], tree", seen[:, columns : columns + q_len]
        case _ if is_dataclass(value):
            cut = int(layout.qo_indptr[-1]) if layout is not None else None
            for path, tensor in _tensors(name, value):
                yield path, tensor[:cut] if path.endswith(".words") else tensor


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            yield f"{name}.{field.name}", part


def difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[str, int | float | str, int | float | str, str] | None:
    """The first difference of two outcomes: its name, the two values, and where; None where there is none."""
    if found.keys() != expected.keys():
        return "what came out", ", ".join(expected), ", ".join(found), ""
    for name, want in expected.items():
        have = found[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            kinds = (f"{value.dtype} {list(value.shape)}" for value in (want, have))
            return name, next(kinds), next(kinds), ""
        if want.dtype.is_floating_point:
            a, b = have.double(), want.double()
            finite = torch.where(b.isfinite(), b.abs(), 0)
            largest = max(1.0, float(finite.max()) if finite.numel() else 0.0)
            exact = name.endswith((".scores", ".bias")) or "keys[" in name or "values[" in name
            limit = 0.0 if exact else TOLERANCE.get(want.dtype, 0.0) * largest
            bad = ~((a == b) | ((a - b).abs() <= limit) | (a.isnan() & b.isnan()))
        else:
            bad = have != want
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            return (
                name,
                want[at].item(),
                have[at].item(),
                f" at {list(at)}; {int(bad.sum())} differ",
            )
    return None

"""Known wrong computations, each run beside a backend: named where every failing call comes out as its."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree import spec
from ddtree.invariants.conformance import oracle
from ddtree.invariants.conformance.attend import AttentionCase, attend, output_of
from ddtree.invariants.conformance.backend import Backend
from ddtree.invariants.conformance.cells import Cell, case_of
from ddtree.spec.contracts import FlatMask, VerifyLayout
from ddtree.spec.errors import InputError
from ddtree.spec.mask import read_mask

MOST = 24
"""Failing calls that each is compared on."""
LOOKED_AT = 200
"""Failing calls that are looked at for these: what reads past the pool cannot be compared."""
FEWEST = 4
"""Failing calls that must be comparable before anything is named."""
Change = Callable[[VerifyLayout, FlatMask], tuple[VerifyLayout, FlatMask]]


class Suspect(NamedTuple):
    """One wrong computation."""

    what: str
    change: Change
    """What it makes of the layout and the mask that the reference then attends with."""


def suspected(backend: Backend, failing: Sequence[Cell]) -> str:
    """The one wrong computation that gives the backend's outputs on all of these; empty: none, or several."""
    left = list(SUSPECTS)
    judged = dict.fromkeys(left, 0)
    for cell in failing[:LOOKED_AT]:
        if all(judged[suspect] >= MOST for suspect in left):
            break
        case = case_of(cell, backend.dtypes[0])
        try:
            found = _outputs(backend, case)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 # a backend may raise anything
            found = None
        for suspect in list(left):
            try:
                wrong = _outputs(backend_of(suspect, backend), case)
            except InputError:  # it would read past the pool: what memory holds there nobody knows
                continue
            judged[suspect] += 1
            if found is None or not _alike(backend, case, found, wrong):
                left.remove(suspect)
        if not left:
            return ""
    named = [suspect.what for suspect in left if judged[suspect] >= FEWEST]
    return named[0] if len(named) == 1 else ""


def backend_of(suspect: Suspect, beside: Backend) -> Backend:
    """The reference on what the suspect makes of a call."""

    def verify_attention(*arguments: Any) -> Tensor:
        query, key, value, key_pool, value_pool, layout, mask = arguments
        layout, mask = suspect.change(layout, mask)
        return spec.verify_attention(query, key, value, key_pool, value_pool, layout, mask)[0]

    return Backend(suspect.what, {"verify_attention": verify_attention}, device=beside.device)


def _outputs(backend: Backend, case: AttentionCase) -> Tensor:
    """The output of the call's rows on the oracle's inputs."""
    rows = int(case.call.layout.qo_indptr[-1])
    with warnings.catch_warnings(), backend.patience.for_a_call():
        warnings.simplefilter("ignore")
        result = attend(backend, case, lambda call, slots: oracle.inputs(case, call, slots))
    # what sees nothing is 0 for the reference and NaN for others
    return output_of(result, rows).double().nan_to_num(0.0)


def _alike(backend: Backend, case: AttentionCase, found: Tensor, wrong: Tensor) -> bool:
    """Whether the outputs of all real rows are the same."""
    call, most = case.call, backend.tolerances[case.dtype]
    starts = call.layout.qo_indptr[:-1].tolist()
    real = torch.cat(
        [torch.arange(s, s + int(n)) for s, n in zip(starts, call.tree.num_nodes, strict=True)]
    )
    if found.shape != wrong.shape:
        return False
    difference = (found - wrong)[real].abs() / wrong[real].abs().clamp(min=1)
    return bool((difference <= most).all())


def _of_mask(change: Callable[[Tensor, int], Tensor]) -> Change:
    """Change each request's ``[q_len, kv]`` matrix, given its prefix length."""

    def changed(layout: VerifyLayout, mask: FlatMask) -> tuple[VerifyLayout, FlatMask]:
        allowed = mask.allowed.clone()
        for b, prefix_len in enumerate(layout.kv_indptr.diff().tolist()):
            start = int(layout.mask_indptr[b])
            matrix = change(read_mask(mask, layout, b).clone(), prefix_len).flatten()
            allowed[start : start + matrix.numel()] = matrix
        return layout, FlatMask(allowed)

    return changed


def _of_tree(change: Callable[[Tensor], Tensor]) -> Change:
    """Change each request's ``[q_len, q_len]`` block."""
    return _of_mask(lambda seen, p: torch.cat([seen[:, :p], change(seen[:, p:])], dim=1))


def _shifted(by: int, layout: VerifyLayout, mask: FlatMask) -> tuple[VerifyLayout, FlatMask]:
    return replace(layout, kv_indices=layout.kv_indices + by), mask


def _no_prefix(seen: Tensor, prefix_len: int) -> Tensor:
    return torch.cat([torch.zeros_like(seen[:, :prefix_len]), seen[:, prefix_len:]], dim=1)


SUSPECTS = (
    Suspect(
        "rows see what sees them: the tree block of the mask is read transposed", _of_tree(lambda s: s.T)
    ),
    Suspect("rows see just what they should not: the mask is inverted", _of_mask(lambda s, _: ~s)),
    Suspect("the tree block of the mask is inverted", _of_tree(lambda s: ~s)),
    Suspect("rows see the whole tree: its mask is not read", _of_tree(torch.ones_like)),
    Suspect(
        "rows see all rows before them: a causal mask stands for the tree's",
        _of_tree(lambda s: torch.ones_like(s).tril()),
    ),
    Suspect("rows see no row of the tree, not even themselves", _of_tree(torch.zeros_like)),
    Suspect("rows do not see the prefix", _of_mask(_no_prefix)),
    *(
        Suspect(
            f"the prefix is read from `kv_indices {'+' if by > 0 else '-'} {abs(by)}`", partial(_shifted, by)
        )
        for size in (1, 2, 4)
        for by in (size, -size)
    ),
)  # fmt: skip
"""Each differs from all others on some call."""

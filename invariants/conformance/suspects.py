"""Known wrong computations, each run beside a backend: named where every failing call comes out as its."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree import spec
from ddtree.invariants.conformance import oracle
from ddtree.invariants.conformance.attend import AttentionCase, attend, output_of
from ddtree.invariants.conformance.backend import Backend
from ddtree.invariants.conformance.cells import Cell, case_of
from ddtree.spec.contracts import FlatMask, VerifyLayout
from ddtree.spec.errors import InputError, require
from ddtree.spec.mask import read_mask

MOST = 24
"""Failing calls that each is compared on."""
LOOKED_AT = 200
"""Failing calls that are looked at for these: what reads past the pool cannot be compared."""
FEWEST = 4
"""Failing calls that must be comparable before anything is named."""
Change = Callable[[VerifyLayout, FlatMask, int], tuple[VerifyLayout, FlatMask]]
"""Of a layout, a mask and the size of its pages."""


class Suspect(NamedTuple):
    """One wrong computation."""

    what: str
    change: Change = lambda layout, mask, _: (layout, mask)
    """What it makes of the layout and the mask that the reference then attends with."""
    stale: tuple[str, ...] = ()
    """Fields of both that a replay reads as they were when it was captured."""


def suspected(backend: Backend, failing: Sequence[Cell], until: float = inf) -> str:
    """The wrong computation that gives the backend's outputs on all of these, or two; empty: none or more.

    When ``time.monotonic()`` passes ``until``, none is named: what was not compared is not known.
    """
    left = list(SUSPECTS)
    judged = dict.fromkeys(left, 0)
    for cell in failing[:LOOKED_AT]:
        if all(judged[suspect] >= MOST for suspect in left):
            break
        if time.monotonic() > until:
            return ""
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
    # one that reads past the pool where another gives what was found explains less than that
    most = max(judged[suspect] for suspect in left)
    named = [suspect.what for suspect in left if judged[suspect] == most >= FEWEST]
    return " or ".join(named) if len(named) <= 2 else ""


def backend_of(suspect: Suspect, beside: Backend) -> Backend:
    """The reference on what the suspect makes of a call."""

    def verify_attention(*arguments: Any, page_size: int = 1) -> Tensor:
        query, key, value, key_pool, value_pool, layout, mask = arguments
        layout, mask = suspect.change(layout, mask, page_size)
        return spec.verify_attention(query, key, value, key_pool, value_pool, layout, mask)[0]

    def capture(*arguments: Any, page_size: int = 1) -> Callable[[], Tensor]:
        *tensors, layout, mask = arguments
        layout, mask = (_frozen(thing, suspect.stale) for thing in (layout, mask))
        return lambda: verify_attention(*tensors, layout, mask, page_size=page_size)

    functions = {"verify_attention": verify_attention}
    return Backend(suspect.what, functions, device=beside.device, capture=capture)


def _frozen(thing: Any, names: Sequence[str]) -> Any:
    """A layout or a mask whose fields of these names are copies."""
    own = {f.name: getattr(thing, f.name).clone() for f in fields(thing) if f.name in names}
    return replace(thing, **own)


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

    def changed(layout: VerifyLayout, mask: FlatMask, _: int) -> tuple[VerifyLayout, FlatMask]:
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


def _shifted(
    slots: int, pages: int, layout: VerifyLayout, mask: FlatMask, page_size: int
) -> tuple[VerifyLayout, FlatMask]:
    by = slots + pages * page_size
    return replace(layout, kv_indices=layout.kv_indices + by), mask


def _max_q_len_wide(
    layout: VerifyLayout, mask: FlatMask, _: int, *, segments: bool
) -> tuple[VerifyLayout, FlatMask]:
    """Read rows of the mask as if each request had ``max_q_len`` of them; where segments begin too, or not.

    Raises:
        InputError: that lies behind the mask.
    """
    allowed, width, end = mask.allowed.clone(), layout.max_q_len, 0
    rows = layout.qo_indptr.diff().tolist()
    for b, (q_len, prefix_len) in enumerate(
        zip(rows, layout.kv_indptr.diff().tolist(), strict=True)
    ):
        start = int(layout.mask_indptr[b])
        first = end if segments else start
        end += width * (prefix_len + width)
        if not q_len:
            continue
        row, column = torch.arange(q_len)[:, None], torch.arange(prefix_len + q_len)
        places = (first + row * (prefix_len + width) + column).flatten()
        require(int(places[-1]) < allowed.numel(), "it reads behind the mask")
        allowed[start : start + places.numel()] = mask.allowed[places]
    return layout, FlatMask(allowed)


def _prefix_of_the_first(
    layout: VerifyLayout, mask: FlatMask, _: int
) -> tuple[VerifyLayout, FlatMask]:
    first = int(layout.kv_indptr[1])

    def cut(seen: Tensor, prefix_len: int) -> Tensor:
        seen[:, min(first, prefix_len) : prefix_len] = False
        return seen

    return _of_mask(cut)(layout, mask, _)


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
    Suspect(
        "no more of a prefix is read than the first request's has", _prefix_of_the_first
    ),
    Suspect(
        "the mask is read with `max_q_len` where q_len belongs, in its rows",
        partial(_max_q_len_wide, segments=False),
    ),
    Suspect(
        "the mask is read with `max_q_len` where q_len belongs, in its rows and in where segments begin",
        partial(_max_q_len_wide, segments=True),
    ),
    *(
        Suspect(
            f"the prefix is read from `kv_indices {'+' if by > 0 else '-'} {abs(by)}`",
            partial(_shifted, by, 0),
        )
        for size in (1, 2, 4, 16)
        for by in (size, -size)
    ),
    Suspect("the prefix is read one page further on", partial(_shifted, 0, 1)),
    Suspect("the prefix is read one page back", partial(_shifted, 0, -1)),
    *(
        Suspect(f"a replay reads {', '.join(names)} as captured, not as filled since", stale=names)
        for names in (
            ("qo_indptr",), ("kv_indptr",), ("mask_indptr",), ("qo_indptr", "kv_indptr", "mask_indptr"),
            ("kv_indices",), ("allowed",),
        )
    ),
)  # fmt: skip
"""Each differs from all others on some call."""

"""What a backend's ``plan_verify`` makes of each request: for isolation where there is no attention."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ddtree.invariants.conformance.backend import Backend
from ddtree.invariants.conformance.steps import StepCase, compared, run
from ddtree.invariants.strategies import VerifyCall
from ddtree.spec.contracts import VerifyLayout

INDPTRS = ("qo_indptr", "kv_indptr", "mask_indptr")


def judge(backend: Backend, call: VerifyCall) -> tuple[list[int], str]:
    """Requests that the backend's layout is wrong for, and what is wrong; empty: nothing.

    Raises:
        WrongResult: it returned no layout.
    """
    arguments = {
        "tree": call.tree,
        "prefix_lens": call.prefix_lens,
        "slot_table": call.slots.table,
    }
    options = {} if call.q_lens is None else {"q_lens": call.q_lens}
    case = StepCase("plan_verify", arguments, options, call)
    found, left = run(backend, case)
    what = compared(case, found, call.layout, left, arguments)
    if not what:
        return [], ""
    wrong = list(_wrong(call, found)) if _is_readable(found, call.layout) else []
    everyone = list(range(len(call.prefix_lens)))
    return wrong or everyone, what  # what is wrong of no single request is wrong of all


def _is_readable(found: VerifyLayout, expected: VerifyLayout) -> bool:
    """Whether each request has its place in every indptr."""
    return all(getattr(found, name).shape == getattr(expected, name).shape for name in INDPTRS)


def _wrong(call: VerifyCall, found: VerifyLayout) -> Iterator[int]:
    """Requests whose own numbers differ: their sizes and what they hold, wherever in the call they stand.

    So a width that is wrong for one request is not told of those behind it, whose offsets it moves.
    """
    for b, nodes in enumerate(call.tree.num_nodes.tolist()):
        mine, right = _own(found, b, nodes), _own(call.layout, b, nodes)
        if not all(torch.equal(m, r) for m, r in zip(mine, right, strict=True)):
            yield b


def _own(layout: VerifyLayout, b: int, nodes: int) -> list[Tensor]:
    """A request's three sizes, its prefix's slots, and the positions and slots of its nodes."""
    ends = [getattr(layout, name)[b : b + 2].long() for name in INDPTRS]
    row, (first, last) = int(ends[0][0]), ends[1].tolist()
    held = (
        layout.kv_indices[first:last],
        layout.positions[row : row + nodes],
        layout.out_cache_loc[row : row + nodes],
    )
    return [*(e.diff() for e in ends), *(part.long() for part in held)]

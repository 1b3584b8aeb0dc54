"""What a host reads of a round, packed into one tensor in one launch, or two with margins."""

import torch
import triton
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.impl.arguments import (
    require_layout,
    require_logits,
    require_requests,
    require_rows,
    require_tree,
)
from ddtree.impl.op import op
from ddtree.impl.record_kernels import pack_kernel, split_top_two_kernel
from ddtree.spec.contracts import Acceptance, DraftTree, VerifyLayout
from ddtree.spec.dtypes import FLOAT, INDEX, require_kind, require_tensor

BLOCK = 2048
"""Tokens that a program looks at at a time."""
MAX_SPLITS = 16
"""Most splits of one row."""


def record_fields(width: int, rows: int, *, has_margins: bool) -> dict[str, int]:
    """The fields of a request's record, in order, with how many numbers each has."""
    fields = {
        "token_ids": width, "nodes": width, "num_accepted": 1, "bonus": 1, "num_nodes": 1,
        "tree_ids": rows, "parents": rows, "depths": rows, "scores": rows,
    }  # fmt: skip
    return fields | ({"margins": width, "runner_up_ids": width} if has_margins else {})


def pack_record(
    tree: DraftTree,
    layout: VerifyLayout,
    acceptance: Acceptance,
    logits: Float[Tensor, "T vocab"] | None,
) -> Int64[Tensor, "B fields"]:
    """Return each request's ``record_fields``, scores and margins as the bits of float64.

    ``token_ids`` are the accepted tokens without the root, then the bonus, then -1. With ``logits`` a margin
    is what the two largest of an accepted node's row differ by, in their dtype, and the runner-up the second
    one's token: of equals the smaller id comes first, and NaN is least. Past a path's end both are 0. A
    vocabulary of one token has no second: the margin is infinite.

    Args:
        tree: the trees.
        layout: the call's layout, by which a request's first row is found.
        acceptance: the accepted paths; trusted.
        logits: the target's; float64 is rounded to float32. None: the record has no margins.

    Raises:
        InputError: kinds, dtypes or shapes that do not agree, an empty vocabulary, or a row's logits that do
            not lie side by side.
    """
    require_tree(tree)
    require_layout(layout)
    require_kind("acceptance", acceptance, Acceptance)
    (batch, width), rows = acceptance.nodes.shape, tree.token_ids.shape[1]
    require_tensor("DraftTree.scores", tree.scores, (torch.float64,), (batch, rows))
    for name in ("num_accepted", "bonus"):
        require_tensor(f"Acceptance.{name}", getattr(acceptance, name), INDEX, (batch,))
    require_requests(layout, "acceptance", batch)
    if logits is not None:
        require_tensor("logits", logits, FLOAT, ("rows", "vocab"))
        require_logits(logits)
        require_rows("logits", logits, layout)
    fields = record_fields(width, rows, has_margins=logits is not None)
    packed = torch.empty(
        (batch, sum(fields.values())), dtype=torch.int64, device=tree.token_ids.device
    )
    if batch:
        _pack(
            tree.token_ids, tree.parents, tree.depths, tree.scores, tree.num_nodes,
            acceptance.nodes, acceptance.num_accepted, acceptance.bonus,
            layout.qo_indptr, logits, packed,
        )  # fmt: skip
    return packed


@op("pack_record", writes=("packed",))
def _pack(
    token_ids: Tensor,
    parents: Tensor,
    depths: Tensor,
    scores: Tensor,
    num_nodes: Tensor,
    nodes: Tensor,
    num_accepted: Tensor,
    bonus: Tensor,
    qo_indptr: Tensor,
    logits: Tensor | None,
    packed: Tensor,
) -> None:
    """Launch."""
    (batch, width), rows = nodes.shape, token_ids.shape[1]
    tree = [part.contiguous() for part in (token_ids, parents, depths, scores, num_nodes)]
    nodes, num_accepted, bonus = (part.contiguous() for part in (nodes, num_accepted, bonus))
    keys, splits = None, 1
    if logits is not None:
        vocab = logits.shape[1]
        splits = min(MAX_SPLITS, triton.cdiv(vocab, BLOCK))
        keys = torch.empty((batch, width, splits, 2), dtype=torch.int64, device=logits.device)
        split_top_two_kernel[(width, splits, batch)](
            logits, nodes, num_accepted, qo_indptr, keys, width, vocab, logits.stride(0),
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    pack_kernel[(batch,)](
        *tree, nodes, num_accepted, bonus, keys, logits, packed,
        width, rows, packed.shape[1], 2 * splits,
        WIDTH=triton.next_power_of_2(width), ROWS=triton.next_power_of_2(rows),
        KEYS=triton.next_power_of_2(2 * splits),
    )  # fmt: skip

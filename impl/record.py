"""What a host reads of a round, packed into one tensor in two launches."""

import torch
import triton
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.impl.op import op
from ddtree.impl.record_kernels import pack_kernel, split_top_two_kernel
from ddtree.spec.contracts import Acceptance, DraftTree, VerifyLayout

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
    one's token: of equals the smaller id comes first, and NaN is least. Past a path's end both are 0.
    """
    (batch, width), rows = acceptance.nodes.shape, tree.token_ids.shape[1]
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
        token_ids, parents, depths, scores, num_nodes, nodes, num_accepted, bonus, keys, logits, packed,
        width, rows, packed.shape[1], 2 * splits,
        WIDTH=triton.next_power_of_2(width), ROWS=triton.next_power_of_2(rows),
        KEYS=triton.next_power_of_2(2 * splits),
    )  # fmt: skip

"""One small call written out by hand: prefix 2, a root with children 1 and 2, 1 with child 3, padding 4."""

from dataclasses import dataclass

import torch

from ddtree.spec.contracts import Acceptance, DraftTree, FlatMask, QLen, VerifyLayout

INF = float("inf")
ROWS = """
    11 1....
    11 11...
    11 1.1..
    11 11.1.
    11 ....1
"""


@dataclass(frozen=True)
class Known:
    """The parts of the call."""

    tree: DraftTree
    layout: VerifyLayout
    mask: FlatMask
    acceptance: Acceptance


def known_call() -> Known:
    """Nodes 0, 1 and 3 are accepted."""
    return Known(
        DraftTree(
            token_ids=torch.tensor([[10, 11, 12, 13, 0]]),
            parents=torch.tensor([[-1, 0, 0, 1, -1]], dtype=torch.int32),
            depths=torch.tensor([[0, 1, 1, 2, 0]], dtype=torch.int32),
            scores=torch.tensor([[0.0, -1.0, -2.0, -3.0, -INF]], dtype=torch.float64),
            num_nodes=torch.tensor([4], dtype=torch.int32),
        ),
        VerifyLayout(
            qo_indptr=torch.tensor([0, 5], dtype=torch.int32),
            kv_indptr=torch.tensor([0, 2], dtype=torch.int32),
            kv_indices=torch.tensor([0, 1]),
            mask_indptr=torch.tensor([0, 35]),
            max_q_len=QLen(5),
            positions=torch.tensor([2, 3, 3, 4, 2]),
            out_cache_loc=torch.arange(2, 7),
        ),
        FlatMask(torch.tensor([sign == "1" for sign in "".join(ROWS.split())])),
        Acceptance(
            nodes=torch.tensor([[0, 1, 3, -1]], dtype=torch.int32),
            num_accepted=torch.tensor([3], dtype=torch.int32),
            bonus=torch.tensor([9]),
        ),
    )

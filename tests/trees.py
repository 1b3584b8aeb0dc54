"""Draft trees written out by hand."""

from collections.abc import Sequence

import torch

from ddtree.spec.contracts import DraftTree
from tests.oracles import ancestors


def tree_of(parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> DraftTree:
    """A tree for each request; rows after the first that have parent -1 are padding.

    Depths are counted up the parents; scores are minus the row, which suits any such order.
    """
    counts = [1 + sum(parent >= 0 for parent in request) for request in parents]
    rows = range(len(parents[0]))
    return DraftTree(
        torch.tensor(tokens),
        torch.tensor(parents, dtype=torch.int32),
        torch.tensor(
            [[len(ancestors(request, row)) - 1 for row in rows] for request in parents],
            dtype=torch.int32,
        ),
        torch.tensor(
            [[-float(row) if row < count else -torch.inf for row in rows] for count in counts],
            dtype=torch.float64,
        ),
        torch.tensor(counts, dtype=torch.int32),
    )

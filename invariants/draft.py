"""Invariants of the draft: log-probs that have an order, and a tree that is made of them.

The log-probs are ``[B, horizon, vocab]`` and stay where they are: on a GPU only what was found is copied.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.sizes import Sizes
from ddtree.invariants.violation import Violation


def log_probs(call: Call, _: Sizes) -> Iterator[Violation]:
    """Look for the first NaN, or value above 0, of each request."""
    assert call.draft_log_probs is not None
    bad = ~(call.draft_log_probs <= 0)  # NaN compares as False
    if not bool(bad.any()):
        return
    for b in bad.flatten(1).any(dim=1).nonzero().flatten().tolist():
        depth, token = bad[b].nonzero()[0].tolist()
        value = float(call.draft_log_probs[b, depth, token])
        yield Violation(
            b,
            "at most 0",
            "nan" if value != value else value,  # noqa: PLR0124 # NaN alone differs from itself
            f"draft_log_probs[{b}, {depth}, {token}]",
        )


def _nodes(call: Call, b: int) -> list[tuple[int, int, int, int]]:
    """(row, parent, depth, token) of each drafted node whose depth and token the draft has."""
    assert call.parents is not None and call.depths is not None and call.token_ids is not None
    assert call.num_nodes is not None and call.draft_log_probs is not None
    horizon, vocab = call.draft_log_probs.shape[1:]
    count = int(call.num_nodes[b])
    fields = (call.parents, call.depths, call.token_ids)
    rows = zip(range(count), *(field[b, :count].tolist() for field in fields), strict=True)
    return [
        (row, parent, depth, token)
        for row, parent, depth, token in rows
        if row and 1 <= depth <= horizon and 0 <= token < vocab
    ]


def path_score(call: Call, _: Sizes) -> Iterator[Violation]:
    """Compare each node's score with its parent's plus its own log-prob."""
    assert call.draft_log_probs is not None and call.scores is not None
    exact = call.scores.dtype is torch.float64
    for b in range(call.scores.shape[0]):
        nodes = _nodes(call, b)
        if not nodes:
            continue
        rows, parents, depths, tokens = (
            torch.tensor(column) for column in zip(*nodes, strict=True)
        )
        device = call.draft_log_probs.device
        own = call.draft_log_probs[b][(depths - 1).to(device), tokens.to(device)]
        expected = call.scores[b, parents].double() + own.float().cpu().double()
        found = call.scores[b, rows].double()
        # a score kept in fewer bits than 64 is rounded at every step
        near = torch.zeros_like(expected) if exact else 1e-5 * expected.abs().clamp(min=1)
        wrong = ~((found == expected) | ((found - expected).abs() <= near))
        for i in wrong.nonzero().flatten().tolist()[:1]:
            row, parent, depth, token = nodes[i]
            want, have = float(expected[i]), float(found[i])
            yield Violation(
                b,
                want if expected[i].isfinite() else str(want),
                have if found[i].isfinite() else str(have),
                f"scores[{b}, {row}]; its parent {parent} has {float(call.scores[b, parent])}, token {token} "
                f"at depth {depth} {float(own[i])}",
            )


def best_candidates(call: Call, _: Sizes) -> Iterator[Violation]:
    """Compare the children of each node with the first ranks of their depth."""
    assert call.draft_log_probs is not None and call.num_nodes is not None
    for b in range(call.num_nodes.numel()):
        nodes = _nodes(call, b)
        most = Counter[tuple[int, int]]((parent, depth) for _, parent, depth, _ in nodes)
        kept = {depth: max(n for (_, d), n in most.items() if d == depth) for _, depth in most}
        ranked = {d: _ranked(call.draft_log_probs[b, d - 1], k) for d, k in kept.items()}
        seen = Counter[int]()
        for row, parent, depth, token in nodes:
            rank = seen[parent]
            seen[parent] += 1
            best = ranked[depth]
            if rank < len(best) and token != best[rank]:
                yield Violation(
                    b,
                    f"token {best[rank]}",
                    f"token {token}",
                    f"row {row} is child {rank} of node {parent}; rank {rank} of depth {depth} is token "
                    f"{best[rank]}",
                )
                break


def _ranked(row: Tensor, kept: int) -> list[int]:
    """The first ``kept`` tokens of one depth: log-prob descending, then token id ascending."""
    row = row.float()
    least = row.topk(min(kept, row.numel())).values[-1]
    ids = (row >= least).nonzero().flatten()  # ascending ids
    return ids[row[ids].sort(descending=True, stable=True).indices[:kept]].tolist()


DRAFT = (
    Invariant(
        "log_probs",
        "draft",
        "The drafter's log-probs are numbers of at most 0; -inf marks what cannot be drafted.",
        "draft_log_probs[b, d, t] <= 0",
        ("draft_log_probs",),
        log_probs,
    ),
)

_TREE = ("num_nodes", "parent_order", "depth", "log_probs", "root")
_NEEDS = ("draft_log_probs", "token_ids", "parents", "depths", "num_nodes")

DRAFTED_TREE = (
    Invariant(
        "best_candidates",
        "tree",
        "The children of a node are the first ranks of their depth, in order; ties go by token id.",
        "token of child i of a node at depth d == i-th of draft_log_probs[b, d] by (-log-prob, token id)",
        _NEEDS,
        best_candidates,
        _TREE,
    ),
    Invariant(
        "path_score",
        "tree",
        "A node's score is its parent's plus its own log-prob, summed in float64.",
        (
            "scores[b, r] == scores[b, parents[b, r]] + draft_log_probs[b, depths[b, r] - 1, "
            "token_ids[b, r]]"
        ),
        (*_NEEDS, "scores"),
        path_score,
        _TREE,
    ),
)

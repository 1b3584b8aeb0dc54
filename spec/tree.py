"""Step 1: build the draft tree, best first.

One drafter pass gives, for each depth d, a distribution q_d over the vocabulary that does not depend
on the path. A path's score is the sum of its log-probs; the tree of ``budget`` nodes with the largest
sum of path probabilities consists of the ``budget`` best paths, and every prefix of a path scores at
least as much as the path, so taking paths best first yields a tree (paper, section 3; README.md here).
"""

import heapq

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.spec.contracts import Budget, DraftTree
from ddtree.spec.dtypes import FLOAT, INDEX, require_tensor
from ddtree.spec.errors import require, require_bool, require_int
from ddtree.spec.index import q_len_of
from ddtree.spec.public import public
from ddtree.spec.softmax import log_softmax

Candidates = list[tuple[float, int]]
"""Candidates of one depth in rank order: (log-prob, token id)."""


@public
def build_tree(
    draft_log_probs: Float[Tensor, "B horizon vocab"],
    root_token_ids: Int64[Tensor, " B"],
    budget: Budget,
    topk: int | None = None,
    *,
    from_logits: bool = False,
) -> DraftTree:
    """Build one best-first draft tree for each request.

    Nodes are ordered by score descending, then by rank path (lexicographic); ranks within a depth
    order by log-prob descending, then token id ascending. So the tree is a function of its input
    alone, ties included, and ``tree(budget)`` is a prefix of ``tree(budget + 1)``.

    Args:
        draft_log_probs: ``[B, horizon, vocab]`` natural log-probs of each depth, read as float32;
            -inf marks what cannot be drafted. Horizon 0 drafts nothing.
        root_token_ids: ``[B]`` bonus tokens of the round before.
        budget: most non-root nodes; the tree has ``Q = budget + 1`` rows.
        topk: candidates kept at each depth; 1 makes a chain. None: ``min(budget, vocab)``, which
            loses nothing.
        from_logits: ``draft_log_probs`` holds logits: take ``softmax.log_softmax`` of them, whose
            bits are the same on every device.

    Returns:
        The trees, padded to Q rows; with too few candidates, fewer nodes.

    Raises:
        InputError: a budget or topk that is no whole number or too small, dtypes or shapes that do
            not agree, a negative token, a log-prob that is NaN or above 0, or a logit that is NaN or
            +inf.
    """
    require_bool("from_logits", from_logits)
    require_int("budget", budget, 0, "a tree of the root alone")
    if topk is not None:
        require_int("topk", topk, 1, "a chain")
    require_tensor("draft_log_probs", draft_log_probs, FLOAT, ("batch", "horizon", "vocab"))
    batch, _, vocab = draft_log_probs.shape
    require(vocab >= 1, "draft_log_probs has an empty vocabulary (last dimension 0)")
    require_tensor("root_token_ids", root_token_ids, INDEX, (batch,))
    least = int(root_token_ids.min()) if batch else 0
    require(least >= 0, f"root_token_ids holds {least}; a token is at least 0")
    kept = min(budget if topk is None else topk, vocab)

    q_len = q_len_of(budget)
    token_ids = torch.zeros(batch, q_len, dtype=torch.int64, device="cpu")
    parents = torch.full((batch, q_len), -1, dtype=torch.int32, device="cpu")
    depths = torch.zeros(batch, q_len, dtype=torch.int32, device="cpu")
    scores = torch.full((batch, q_len), -torch.inf, dtype=torch.float64, device="cpu")
    num_nodes = torch.zeros(batch, dtype=torch.int32, device="cpu")
    log_probs = draft_log_probs.detach().float().cpu()
    if from_logits:
        _require_logits(log_probs)
        log_probs = torch.cat([log_softmax(request) for request in log_probs.split(1)])
    else:
        _require_log_probs(log_probs)

    for b in range(batch):
        candidates = [_ranked(row, kept) for row in log_probs[b]] if kept else []
        nodes = _best_first(candidates, budget)
        token_ids[b, 0] = root_token_ids[b]
        scores[b, 0] = 0.0
        for row, (score, path, parent) in enumerate(nodes, start=1):
            token_ids[b, row] = candidates[len(path) - 1][path[-1]][1]
            parents[b, row] = parent
            depths[b, row] = len(path)
            scores[b, row] = score
        num_nodes[b] = 1 + len(nodes)

    device = draft_log_probs.device
    return DraftTree(*(t.to(device) for t in (token_ids, parents, depths, scores, num_nodes)))


def _require_log_probs(log_probs: Tensor) -> None:
    """Refuse NaN and values above 0, naming the first."""
    bad = ~(log_probs <= 0)
    if bad.any():
        b, depth, token = (int(i) for i in bad.nonzero()[0])
        value = log_probs[b, depth, token].item()
        require(
            False,
            f"draft_log_probs[{b}, {depth}, {token}] is {value}; a log-prob is at most 0 and "
            "not NaN (for logits, apply log_softmax first)",
        )


def _require_logits(logits: Tensor) -> None:
    """Refuse NaN and +inf, naming the first."""
    bad = ~(logits < torch.inf)
    if bad.any():
        b, depth, token = (int(i) for i in bad.nonzero()[0])
        value = logits[b, depth, token].item()
        require(
            False,
            f"draft_log_probs[{b}, {depth}, {token}] is {value}; a logit is finite or -inf",
        )


def _ranked(row: Tensor, kept: int) -> Candidates:
    """Rank one depth's tokens: log-prob descending, then token id ascending; -inf left out."""
    threshold = row.topk(kept).values[-1]
    ids = ((row >= threshold) & (row > -torch.inf)).nonzero().flatten()  # ascending ids
    values, order = row[ids].sort(descending=True, stable=True)
    return list(zip(values[:kept].tolist(), ids[order[:kept]].tolist(), strict=True))


def _best_first(
    candidates: list[Candidates], budget: int
) -> list[tuple[float, tuple[int, ...], int]]:
    """Pop the ``budget`` best paths: (score, rank path, parent's row), in order.

    A path is pushed once: by its sibling of one rank less, or as first child by its parent. Both
    sort before it, so the heap always holds the best path that is left.
    """
    nodes: list[tuple[float, tuple[int, ...], int]] = []
    heap: list[
        tuple[float, tuple[int, ...], int, float]
    ] = []  # (-score, path, parent, parent's score)

    def push(path: tuple[int, ...], parent: int, parent_score: float) -> None:
        depth, rank = len(path), path[-1]
        if depth <= len(candidates) and rank < len(candidates[depth - 1]):
            score = parent_score + candidates[depth - 1][rank][0]
            heapq.heappush(heap, (-score, path, parent, parent_score))

    push((0,), 0, 0.0)
    while heap and len(nodes) < budget:
        negated, path, parent, parent_score = heapq.heappop(heap)
        nodes.append((-negated, path, parent))
        push((*path[:-1], path[-1] + 1), parent, parent_score)
        push((*path, 0), len(nodes), -negated)
    return nodes

"""Invariants of the draft tree."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ddtree.invariants import diagnosis
from ddtree.invariants.call import Call
from ddtree.invariants.claimed import index
from ddtree.invariants.invariant import Invariant, first_bad
from ddtree.invariants.sizes import Sizes
from ddtree.invariants.violation import Violation


def _real(num_nodes: Tensor, like: Tensor) -> Tensor:
    """``[B, Q]``: the row is a real node."""
    return torch.arange(like.shape[1]) < num_nodes[:, None]


def num_nodes(call: Call, _: Sizes) -> Iterator[Violation]:
    """Count against the rows of the tree."""
    assert call.num_nodes is not None
    padded = next((t for t in (call.token_ids, call.parents) if t is not None), None)
    bad, right = call.num_nodes < 1, "at least 1"
    if padded is not None:
        most = padded.shape[1]
        bad, right = bad | (call.num_nodes > most), f"1 to {most}"
    for b in bad.nonzero().flatten().tolist():
        yield Violation(b, right, int(call.num_nodes[b]), "the root counts")


def budget(call: Call, _: Sizes) -> Iterator[Violation]:
    """Count against the budget."""
    assert call.num_nodes is not None and call.budget is not None
    most = index.q_len_of(call.budget)
    for b in (call.num_nodes > most).nonzero().flatten().tolist():
        yield Violation(
            b, f"at most {most}", int(call.num_nodes[b]), f"budget {call.budget} + 1 = {most}"
        )


def root(call: Call, _: Sizes) -> Iterator[Violation]:
    """Look at row 0 of each request."""
    known = call.known()
    for name, right in (("parents", -1), ("depths", 0), ("scores", 0)):
        if name in known:
            for b in (known[name][:, 0] != right).nonzero().flatten().tolist():
                yield Violation(b, right, known[name][b, 0].item(), f"{name}[{b}, 0]")
    if call.token_ids is not None and call.root_token_ids is not None:
        for b in (call.token_ids[:, 0] != call.root_token_ids).nonzero().flatten().tolist():
            yield Violation(
                b,
                int(call.root_token_ids[b]),
                int(call.token_ids[b, 0]),
                f"token_ids[{b}, 0] is not the bonus token of the round before",
            )


def parent_order(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare each real node's row with its parent's."""
    assert call.parents is not None and call.num_nodes is not None
    row = torch.arange(call.parents.shape[1])
    bad = (
        _real(call.num_nodes, call.parents)
        & (row > 0)
        & ((call.parents < 0) | (call.parents >= row))
    )
    for b, r in first_bad(bad):
        found = int(call.parents[b, r])
        hint = diagnosis.nodes_counted(call, sizes) if found == -1 else ""
        yield Violation(b, f"0 to {r - 1}", found, f"parents[{b}, {r}]", hint)


def depth(call: Call, _: Sizes) -> Iterator[Violation]:
    """Compare each real node's depth with its parent's."""
    assert call.depths is not None and call.parents is not None and call.num_nodes is not None
    real = _real(call.num_nodes, call.parents)
    real[:, :1] = False  # the root has its own invariant
    expected = call.depths.gather(1, torch.where(real, call.parents, 0).long()) + 1
    for b, r in first_bad(real & (call.depths != expected)):
        parent = int(call.parents[b, r])
        yield Violation(
            b,
            int(expected[b, r]),
            int(call.depths[b, r]),
            f"depths[{b}, {r}]; its parent {parent} is at depth {int(call.depths[b, parent])}",
        )
    if call.horizon is not None:
        for b, r in first_bad(real & (call.depths == expected) & (call.depths > call.horizon)):
            yield Violation(
                b,
                f"at most {call.horizon}",
                int(call.depths[b, r]),
                f"depths[{b}, {r}]; the horizon is {call.horizon}",
            )


def siblings_distinct(call: Call, _: Sizes) -> Iterator[Violation]:
    """Look for two children of one node with one token."""
    assert call.token_ids is not None and call.parents is not None and call.num_nodes is not None
    for b, count in enumerate(call.num_nodes.tolist()):
        seen: dict[tuple[int, int], int] = {}
        children = zip(
            call.parents[b, :count].tolist(), call.token_ids[b, :count].tolist(), strict=True
        )
        for r, child in enumerate(children):
            if child in seen:
                yield Violation(
                    b,
                    "distinct tokens",
                    child[1],
                    f"rows {seen[child]} and {r} are both token {child[1]} under node {child[0]}",
                )
                break
            seen[child] = r


def best_first(call: Call, _: Sizes) -> Iterator[Violation]:
    """Compare each score with the one before it."""
    assert call.scores is not None and call.num_nodes is not None
    real = _real(call.num_nodes, call.scores)
    for b, r in first_bad(real & ~call.scores.isfinite()):
        yield Violation(
            b,
            "a finite score",
            str(float(call.scores[b, r])),
            f"scores[{b}, {r}]: candidates without a finite log-prob never become nodes",
        )
    rises = real[:, 1:] & (call.scores[:, 1:] > call.scores[:, :-1])
    for b, r in first_bad(rises):
        yield Violation(
            b,
            f"at most {float(call.scores[b, r])}",
            float(call.scores[b, r + 1]),
            f"scores[{b}, {r + 1}] after scores[{b}, {r}]",
        )


def tie_order(call: Call, _: Sizes) -> Iterator[Violation]:
    """Compare the rank paths of rows of equal score, and the tokens of such siblings."""
    assert call.scores is not None and call.num_nodes is not None
    assert call.token_ids is not None and call.parents is not None
    for b, count in enumerate(call.num_nodes.tolist()):
        last: dict[int, int] = {}
        parents, tokens = call.parents[b, :count].tolist(), call.token_ids[b, :count].tolist()
        scores = call.scores[b, :count].tolist()
        for r, parent in enumerate(parents):
            before = last.get(parent)
            if before is not None and scores[before] == scores[r] and tokens[before] > tokens[r]:
                yield Violation(
                    b,
                    f"token {tokens[r]} before {tokens[before]}",
                    f"token {tokens[before]} before {tokens[r]}",
                    f"rows {before} and {r} tie at {scores[r]} under node {parent}",
                )
                break
            last[parent] = r
        else:
            paths = _rank_paths(parents, tokens)
            for r, (above, below) in enumerate(pairwise(paths)):
                if scores[r] == scores[r + 1] and above > below:
                    yield Violation(
                        b,
                        f"rank path {below} before {above}",
                        f"rank path {above} before {below}",
                        f"rows {r} and {r + 1} tie at {scores[r]}; a rank path is the rank of each node "
                        "on the way from the root among its depth's candidates",
                    )
                    break


def _rank_paths(parents: list[int], tokens: list[int]) -> list[list[int]]:
    """The rank path of each row; none where the ranks do not follow from the tree.

    In a best-first tree a node's children are the first ranks of their depth in order, since a better
    candidate under the same node comes first. So a node's rank is its place among its siblings, if
    that gives each token of a depth one rank and each rank one token.
    """
    paths: list[list[int]] = [[]]
    children = [0] * len(parents)
    by_rank: dict[tuple[int, int], int] = {}
    by_token: dict[tuple[int, int], int] = {}
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        rank, depth = children[parent], len(paths[parent])
        children[parent] += 1
        if by_rank.setdefault((depth, rank), token) != token:
            return []
        if by_token.setdefault((depth, token), rank) != rank:
            return []
        paths.append([*paths[parent], rank])
    return paths


def padding(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look at the rows from num_nodes on."""
    assert call.num_nodes is not None
    known = call.known()
    for name, right in (("parents", -1), ("token_ids", 0), ("depths", 0), ("scores", -torch.inf)):
        if name in known:
            value = known[name]
            for b, r in first_bad(~_real(call.num_nodes, value) & (value != right)):
                count = int(call.num_nodes[b])
                found: int | float = value[b, r].item()
                yield Violation(
                    b,
                    right,
                    found,
                    f"{name}[{b}, {r}], num_nodes {count}",
                    diagnosis.nodes_counted(call, sizes),
                )


def token_range(call: Call, _: Sizes) -> Iterator[Violation]:
    """Compare real nodes' tokens with the vocabulary."""
    assert call.token_ids is not None and call.num_nodes is not None
    end = call.vocab_size
    bad = call.token_ids < 0 if end is None else (call.token_ids < 0) | (call.token_ids >= end)
    for b, r in first_bad(bad & _real(call.num_nodes, call.token_ids)):
        yield Violation(
            b,
            "at least 0" if end is None else f"0 to {end - 1}",
            int(call.token_ids[b, r]),
            f"token_ids[{b}, {r}]",
        )


TREE = (
    Invariant(
        "num_nodes",
        "tree",
        "A tree has its root and no more nodes than rows.",
        "1 <= num_nodes[b] <= Q",
        ("num_nodes",),
        num_nodes,
    ),
    Invariant(
        "budget",
        "tree",
        "A tree holds at most budget nodes besides its root.",
        "num_nodes[b] <= budget + 1",
        ("num_nodes", "budget"),
        budget,
    ),
    Invariant(
        "root",
        "tree",
        ("Row 0 is the root: no parent, depth 0, score 0, the bonus token of the round before."),
        "parents[b, 0] == -1, depths[b, 0] == 0, scores[b, 0] == 0, token_ids[b, 0] == root_token_ids[b]",
        ("parents|depths|scores|token_ids",),
        root,
    ),
    Invariant(
        "parent_order",
        "tree",
        "A node's parent is a row before it.",
        "0 <= parents[b, r] < r for 1 <= r < num_nodes[b]",
        ("parents", "num_nodes"),
        parent_order,
        ("num_nodes",),
    ),
    Invariant(
        "depth",
        "tree",
        "A node is one deeper than its parent and no deeper than the horizon.",
        "depths[b, r] == depths[b, parents[b, r]] + 1 <= horizon",
        ("depths", "parents", "num_nodes"),
        depth,
        ("num_nodes", "parent_order"),
    ),
    Invariant(
        "siblings_distinct",
        "tree",
        "Children of one node have distinct tokens.",
        "(parents[b, r], token_ids[b, r]) differ for 0 <= r < num_nodes[b]",
        ("token_ids", "parents", "num_nodes"),
        siblings_distinct,
        ("num_nodes", "parent_order"),
    ),
    Invariant(
        "best_first",
        "tree",
        "Scores are finite and never rise from row to row.",
        "-inf < scores[b, r + 1] <= scores[b, r] for r + 1 < num_nodes[b]",
        ("scores", "num_nodes"),
        best_first,
        ("num_nodes",),
    ),
    Invariant(
        "tie_order",
        "tree",
        (
            "Rows of equal score come in the order of their rank paths, and so siblings by token id, "
            "on every device and rank."
        ),
        (
            "scores equal, r < s  =>  path(r) < path(s); parents equal too  =>  token_ids[b, r] < "
            "token_ids[b, s]"
        ),
        ("scores", "token_ids", "parents", "num_nodes"),
        tie_order,
        ("num_nodes", "parent_order"),
    ),
    Invariant(
        "padding",
        "tree",
        "Rows from num_nodes on are padding: token 0, no parent, depth 0, score -inf.",
        (
            "token_ids[b, r] == 0, parents[b, r] == -1, depths[b, r] == 0, scores[b, r] == "
            "-inf for r >= num_nodes[b]"
        ),
        ("num_nodes", "parents|token_ids|depths|scores"),
        padding,
        ("num_nodes",),
    ),
    Invariant(
        "token_range",
        "tree",
        "Tokens of real nodes are of the vocabulary.",
        "0 <= token_ids[b, r] < vocab_size for r < num_nodes[b]",
        ("token_ids", "num_nodes"),
        token_range,
        ("num_nodes",),
    ),
)

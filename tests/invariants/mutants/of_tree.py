"""Mutants of the tree."""

import torch

from ddtree.invariants import Call
from tests.invariants.calls import field, whole_round
from tests.invariants.mutants.kinds import Mutant, change, spoil, swap, tied


def _twin(c: Call) -> torch.Tensor:
    """The second child of the root given the first one's token."""
    tokens, parents = field(c, "token_ids").clone(), field(c, "parents")
    first, second = (parents[0] == 0).nonzero().flatten().tolist()[:2]
    tokens[0, second] = tokens[0, first]
    return tokens


def _token_zero() -> Call:
    """Trees whose node 2 is token 0, counted as ``(token_ids != 0).sum()``."""
    call = whole_round()
    tokens = torch.where(field(call, "token_ids")[0] == 0, 10, field(call, "token_ids")[0])[None, :]
    tokens[0, 13:] = 0
    tokens[0, 2] = 0
    parents = field(call, "parents")[:1]
    return Call(token_ids=tokens, parents=parents, num_nodes=(tokens != 0).sum(dim=1))


def _cousins(tokens: list[int], parents: list[int]) -> Call:
    """A first candidate of probability 1/2 twice, then one of probability 1: all rows but the root tie."""
    half = [0.0] + [-0.6931471805599453] * 4
    return Call(
        token_ids=torch.tensor([tokens]),
        parents=torch.tensor([parents]),
        scores=torch.tensor([half], dtype=torch.float64),
        num_nodes=torch.tensor([5]),
    )


def _without_root() -> Call:
    """Five nodes, one of them token 0, counted as four."""
    return Call(
        token_ids=torch.tensor([[3, 0, 5, 7, 2]]),
        parents=torch.tensor([[-1, 0, 0, 1, 2]]),
        num_nodes=torch.tensor([4]),
    )


_BEST = int(field(whole_round(), "token_ids")[0, 1])


# The whole round: prefixes [5, 3], budget 16, 13 nodes in 17 rows each, accepted rows scattered.
TREE = [
    Mutant("num_nodes", "a tree without its root", spoil("num_nodes", 1, 0), 1, "1 to 17", 0),
    Mutant(
        "num_nodes",
        "a count of no node, alone",
        lambda: Call(num_nodes=torch.tensor([2, 0])),
        1,
        "at least 1",
        0,
    ),
    Mutant("num_nodes", "more nodes than rows", spoil("num_nodes", 0, 18), 0, "1 to 17", 18),
    Mutant("budget", "a node over the budget", swap(budget=11), 0, "at most 12", 13),
    Mutant("root", "a root with a parent", spoil("parents", (1, 0), 0), 1, -1, 0),
    Mutant(
        "root",
        "the root's token replaced by the mask token (hipfire #483)",
        spoil("token_ids", (0, 0), 9),
        0,
        1,
        9,
    ),
    Mutant("parent_order", "a parent after its child", spoil("parents", (0, 4), 7), 0, "0 to 3", 7),
    Mutant("parent_order", "a second root", spoil("parents", (1, 2), -1), 1, "0 to 1", -1),
    Mutant("depth", "a depth that skips a level", spoil("depths", (0, 12), 3), 0, 2, 3),
    Mutant("depth", "a node below the horizon", swap(horizon=1), 0, "at most 1", 2),
    Mutant(
        "siblings_distinct",
        "one token twice under one node",
        change(lambda c: {"token_ids": _twin(c)}),
        0,
        "distinct tokens",
    ),
    Mutant(
        "best_first",
        "a NaN score (-inf log-probs in the official builder)",
        spoil("scores", (0, 3), float("nan")),
        0,
        "a finite score",
        "nan",
    ),
    Mutant("best_first", "a score that rises", spoil("scores", (1, 12), -0.001), 1, None, -0.001),
    Mutant(
        "tie_order",
        "near-ties broken another way (sglang #31071)",
        tied,
        0,
        "token 4 before 5",
        "token 5 before 4",
    ),
    Mutant(
        "padding",
        "token 0 counted as padding (sglang PR #27509)",
        lambda: _token_zero(),
        0,
        -1,
        None,
        "token 0 is a token",
    ),
    Mutant("padding", "a stale parent in padding", spoil("parents", (1, 16), 3), 1, -1, 3),
    Mutant("padding", "a stale token in padding", spoil("token_ids", (0, 14), 6), 0, 0, 6),
    Mutant(
        "padding",
        "a stale score in padding",
        spoil("scores", (0, 16), -9.0),
        0,
        -float("inf"),
        -9.0,
    ),
    Mutant(
        "token_range",
        "a token outside the vocabulary",
        spoil("token_ids", (1, 5), 11),
        1,
        "0 to 10",
        11,
    ),
    Mutant("token_range", "a negative token", spoil("token_ids", (0, 5), -1), 0, "0 to 10", -1),
    Mutant(
        "tie_order",
        "cousins of one score by level, not by rank path",
        lambda: _cousins([0, 0, 1, 0, 0], [-1, 0, 0, 1, 2]),
        0,
        "rank path [0, 0] before [1]",
        "rank path [1] before [0, 0]",
    ),
    Mutant(
        "parent_order",
        "num_nodes is the width of the rows",
        swap(num_nodes=torch.tensor([17, 17])),
        0,
        "0 to 12",
        -1,
        "padding was counted",
    ),
    Mutant(
        "padding",
        "the root not counted, or the one token 0",
        lambda: _without_root(),
        0,
        -1,
        None,
        "or: the root was not counted",
    ),
    Mutant(
        "padding",
        "the root not counted, no token 0",
        lambda: Call(parents=torch.tensor([[-1, 0, 0]]), num_nodes=torch.tensor([2])),
        0,
        -1,
        0,
    ),
    Mutant(
        "log_probs",
        "NaN in a drafter's log-probs",
        spoil("draft_log_probs", (1, 0, 3), float("nan")),
        1,
        "at most 0",
        "nan",
    ),
    Mutant(
        "log_probs",
        "logits where log-probs belong",
        spoil("draft_log_probs", (0, 1, 3), 0.5),
        0,
        "at most 0",
        0.5,
    ),
    Mutant(
        "path_score",
        "a score without the log-prob of its own depth",
        spoil("scores", (0, 1), -0.125),
        0,
        None,
        -0.125,
    ),
    Mutant(
        "path_score",
        "a score in float32 that is off by more than its rounding",
        change(lambda c: {"scores": field(c, "scores").float() * 1.001}),
        0,
    ),
    Mutant(
        "best_candidates",
        "a draft whose best token has become another",
        spoil("draft_log_probs", (0, 0, _BEST), -9.0),
        0,
        None,
        f"token {_BEST}",
    ),
]

"""Mutants of the acceptance."""

import torch

from ddtree.invariants import Call
from tests.invariants.calls import field
from tests.invariants.mutants.kinds import Mutant, change, spoil


def _jump(c: Call) -> torch.Tensor:
    nodes, parents = field(c, "nodes").clone(), field(c, "parents")
    other = (parents[0, :13] != nodes[0, 1]) & (torch.arange(13) > nodes[0, 1])
    nodes[0, 2] = int(other.nonzero()[0])
    return nodes


def _other_choice(c: Call, row: int) -> torch.Tensor:
    choices = field(c, "target_ids").clone()
    choices[row] = 10 if choices[row] != 10 else 9
    return choices


def _early() -> Call:
    """A chain whose walk stopped at the root although the bonus is the root's child."""
    return Call(
        token_ids=torch.tensor([[1, 5, 6]]),
        parents=torch.tensor([[-1, 0, 1]]),
        num_nodes=torch.tensor([3]),
        nodes=torch.tensor([[0, -1, -1]]),
        num_accepted=torch.tensor([1]),
        bonus=torch.tensor([5]),
    )


# The whole round: prefixes [5, 3], budget 16, 13 nodes in 17 rows each, accepted rows scattered.
ACCEPTANCE = [
    Mutant("num_accepted", "the root not counted", spoil("num_accepted", 1, 0), 1, "1 to 3", 0),
    Mutant("num_accepted", "more than the horizon", spoil("num_accepted", 0, 4), 0, "1 to 3", 4),
    Mutant(
        "accepted_end",
        "a node behind the end",
        change(lambda c: {"num_accepted": field(c, "num_accepted") - 1}),
        0,
        2,
        3,
    ),
    Mutant("accepted_end", "-1 inside the path", spoil("nodes", (0, 1), -1), 0, 3, 2),
    Mutant(
        "accepted_path",
        "a path that does not start at the root",
        spoil("nodes", (0, 0), 1),
        0,
        0,
        1,
    ),
    Mutant("accepted_path", "a jump to another branch", change(lambda c: {"nodes": _jump(c)}), 0),
    Mutant("accepted_path", "padding accepted", spoil("nodes", (1, 2), 15), 1, "1 to 12", 15),
    Mutant(
        "choice",
        "another token than the target chose",
        change(lambda c: {"target_ids": _other_choice(c, 0)}),
        0,
    ),
    Mutant("bonus", "a bonus that is not the target's", spoil("bonus", 1, 9), 1, 0, 9),
    Mutant(
        "bonus",
        "no bonus",
        change(lambda c: {"bonus": field(c, "bonus") * 0 - 1, "target_ids": None}),
        0,
        "a token id",
        -1,
    ),
    Mutant("walk_end", "a walk that stops too early", lambda: _early(), 0, 2, 1),
    Mutant(
        "emitted",
        "the root emitted again",
        change(lambda c: {"emitted": field(c, "emitted").roll(1, dims=1)}),
        0,
    ),
]

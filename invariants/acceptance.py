"""Invariants of acceptance: a path from the root along the target's own choices, then the bonus."""

from collections.abc import Iterator

from ddtree.invariants.call import Call
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.sizes import Sizes
from ddtree.invariants.violation import Violation


def _paths(call: Call, sizes: Sizes) -> Iterator[tuple[int, list[int]]]:
    """(request, accepted rows) where the count is sound; idle requests accept nothing."""
    assert call.nodes is not None and call.num_accepted is not None
    for b, count in enumerate(call.num_accepted.tolist()):
        if b not in sizes.idle:
            yield b, call.nodes[b, :count].tolist()


def num_accepted(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the count with the room of the path and the size of the tree."""
    assert call.num_accepted is not None
    limits = {"horizon + 1": call.nodes.shape[1]} if call.nodes is not None else {}
    if call.horizon is not None:
        limits["horizon + 1"] = min(limits.get("horizon + 1", call.horizon + 1), call.horizon + 1)
    for b, count in enumerate(call.num_accepted.tolist()):
        most = dict(limits)
        if call.num_nodes is not None:
            most["num_nodes"] = int(call.num_nodes[b])
        least = min(most, key=most.__getitem__, default="")
        if b not in sizes.idle and (count < 1 or (least and count > most[least])):
            top = f"1 to {most[least]}" if least else "at least 1"
            yield Violation(b, top, count, f"the root counts; {most}")


def accepted_end(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look for -1 inside the path and for nodes after it."""
    assert call.nodes is not None and call.num_accepted is not None
    for b, count in enumerate(call.num_accepted.tolist()):
        row = call.nodes[b].tolist()
        filled = sum(node != -1 for node in row)
        broken = -1 in row[:count] or any(node != -1 for node in row[count:])
        if broken and b not in sizes.idle:
            yield Violation(b, count, filled, f"nodes[{b}] is {row}; num_accepted is {count}")


def accepted_path(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Follow the path from the root, child by child."""
    assert call.parents is not None
    for b, path in _paths(call, sizes):
        if path[0] != 0:
            yield Violation(b, 0, path[0], f"nodes[{b}] is {path}; it starts at the root")
            continue
        nodes = call.parents.shape[1] if call.num_nodes is None else int(call.num_nodes[b])
        for i in range(1, len(path)):
            if not 0 < path[i] < nodes:
                yield Violation(
                    b, f"1 to {nodes - 1}", path[i], f"nodes[{b}, {i}] is no real node but the root"
                )
                break
            parent = int(call.parents[b, path[i]])
            if parent != path[i - 1]:
                yield Violation(
                    b,
                    path[i - 1],
                    parent,
                    (
                        f"node {path[i]} follows node {path[i - 1]} in nodes[{b}] = {path}; its parent is "
                        f"{parent}"
                    ),
                )
                break


def choice(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare each accepted token with the target's choice at the node before."""
    assert call.target_ids is not None and call.token_ids is not None
    for b, path in _paths(call, sizes):
        targets = _choices(call, sizes, b, path)
        for i in range(1, len(path)):
            token = int(call.token_ids[b, path[i]])
            if targets and token != targets[i - 1]:
                yield Violation(
                    b,
                    targets[i - 1],
                    token,
                    (
                        f"node {path[i]} of nodes[{b}] = {path}; the target chose {targets[i - 1]} at "
                        f"node {path[i - 1]}"
                    ),
                )
                break


def bonus(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the bonus with the target's choice at the last node and with the vocabulary."""
    assert call.bonus is not None
    for b, path in _paths(call, sizes):
        found = int(call.bonus[b])
        targets = _choices(call, sizes, b, path) if call.target_ids is not None else []
        if targets and found != targets[-1]:
            yield Violation(
                b,
                targets[-1],
                found,
                f"bonus[{b}]; the target chose {targets[-1]} at node {path[-1]}, the last of {path}",
            )
        elif found < 0 or (call.vocab_size is not None and found >= call.vocab_size):
            yield Violation(b, "a token id", found, f"bonus[{b}]; vocabulary {call.vocab_size}")


def walk_end(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look for a child of the last node that carries the bonus: the walk should have gone on."""
    assert call.bonus is not None and call.token_ids is not None and call.parents is not None
    assert call.num_nodes is not None
    for b, path in _paths(call, sizes):
        nodes, token = int(call.num_nodes[b]), int(call.bonus[b])
        below = (call.parents[b, :nodes] == path[-1]) & (call.token_ids[b, :nodes] == token)
        if bool(below.any()):
            child = int(below.nonzero()[0])
            yield Violation(
                b,
                len(path) + 1,
                len(path),
                f"the bonus {token} is node {child}, a child of the last accepted node {path[-1]}",
            )


def emitted(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the new tokens with the accepted ones and the bonus."""
    assert call.emitted is not None and call.bonus is not None and call.token_ids is not None
    for b, path in _paths(call, sizes):
        tokens = call.token_ids[b].tolist()
        expected = [tokens[node] for node in path[1:]] + [int(call.bonus[b])]
        expected += [-1] * (call.emitted.shape[1] - len(expected))
        found = call.emitted[b].tolist()
        if found != expected:
            yield Violation(
                b, expected, found, f"emitted[{b}]; nodes {path}, bonus {int(call.bonus[b])}"
            )


def _choices(call: Call, sizes: Sizes, b: int, path: list[int]) -> list[int]:
    """The target's choice at each accepted node; empty where the call has no row for one."""
    assert call.target_ids is not None
    if sizes.q_lens is None:
        return []
    rows = [sizes.row_starts[b] + node for node in path]
    return call.target_ids[rows].tolist() if max(rows) < call.target_ids.numel() else []


_SOUND = ("num_accepted", "accepted_end")
_PATH = (*_SOUND, "num_nodes", "accepted_path")

ACCEPTANCE = (
    Invariant(
        "num_accepted",
        "acceptance",
        "At least the root is accepted, and no more than the tree and the horizon allow.",
        "1 <= num_accepted[b] <= min(horizon + 1, num_nodes[b])",
        ("num_accepted",),
        num_accepted,
    ),
    Invariant(
        "accepted_end",
        "acceptance",
        "The path has num_accepted nodes and -1 after them.",
        "nodes[b, i] == -1 exactly for i >= num_accepted[b]",
        ("nodes", "num_accepted"),
        accepted_end,
        ("num_accepted",),
    ),
    Invariant(
        "accepted_path",
        "acceptance",
        "The path starts at the root and each node is a child of the one before.",
        "nodes[b, 0] == 0, parents[b, nodes[b, i]] == nodes[b, i - 1]",
        ("nodes", "num_accepted", "parents"),
        accepted_path,
        _SOUND,
    ),
    Invariant(
        "choice",
        "acceptance",
        "Each accepted token is the target's choice at the node before.",
        "token_ids[b, nodes[b, i]] == target_ids[qo_indptr[b] + nodes[b, i - 1]]",
        ("nodes", "num_accepted", "parents", "token_ids", "target_ids", "q_len"),
        choice,
        _PATH,
    ),
    Invariant(
        "bonus",
        "acceptance",
        "The bonus is the target's choice at the last accepted node.",
        "bonus[b] == target_ids[qo_indptr[b] + nodes[b, num_accepted[b] - 1]]",
        ("bonus", "nodes", "num_accepted"),
        bonus,
        _PATH,
    ),
    Invariant(
        "walk_end",
        "acceptance",
        "The walk ends only where no child carries the bonus.",
        "no r: parents[b, r] == nodes[b, num_accepted[b] - 1] and token_ids[b, r] == bonus[b]",
        ("bonus", "nodes", "num_accepted", "parents", "token_ids", "num_nodes"),
        walk_end,
        _PATH,
    ),
    Invariant(
        "emitted",
        "acceptance",
        "The new tokens are the accepted ones after the root, then the bonus, then -1.",
        "emitted[b] == [token_ids[b, nodes[b, 1:]]..., bonus[b], -1, ...]",
        ("emitted", "bonus", "nodes", "num_accepted", "token_ids", "parents"),
        emitted,
        _PATH,
    ),
)

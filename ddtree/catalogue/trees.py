"""Rows about the tree itself: how it is built, ordered, counted and tiled."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddtree.catalogue.calls import change, field, lay_out, put, spoil, swap, tree_of
from ddtree.catalogue.entry import CallFault, Measured, Names, Property, PropertyFault, Right, Row
from ddtree.invariants import Call
from ddtree.spec import Budget, build_tree
from ddtree.spec.sampling import first_argmax

HALF = -0.6931471805599453


def _built(log_probs: Tensor, budget: int) -> Call:
    """The reference's tree of one request."""
    tree = build_tree(log_probs[None], torch.tensor([0]), Budget(budget))
    return Call.of(tree, draft_log_probs=log_probs[None], root_token_ids=torch.tensor([0]))


def _two_finite() -> Tensor:
    """Two depths with two finite candidates of five each."""
    row = torch.full((2, 5), -torch.inf)
    row[:, 1], row[:, 3] = -0.5, -1.0
    return row


def naive_tree(log_probs: Tensor, budget: int) -> Call:
    """A best-first builder that steps from a node to its next sibling by score differences.

    The next sibling's score is the node's less the node's log-prob plus the sibling's. Where both are
    -inf that is -inf + inf + -inf: NaN, which orders before nothing and after nothing in a heap.
    """
    values, tokens = (t.tolist() for t in log_probs.sort(dim=1, descending=True, stable=True))
    rows: list[tuple[float, int, int, int]] = []  # score, token, parent, depth
    heap: list[tuple[float, tuple[int, ...], int]] = [(-values[0][0], (0,), 0)]
    while heap and len(rows) < budget:
        negated, path, parent = heapq.heappop(heap)
        depth, rank = len(path), path[-1]
        rows.append((-negated, tokens[depth - 1][rank], parent, depth))
        if rank + 1 < len(values[0]):
            step = values[depth - 1][rank + 1] - values[depth - 1][rank]
            heapq.heappush(heap, (negated - step, (*path[:-1], rank + 1), parent))
        if depth < len(values):
            heapq.heappush(heap, (negated - values[depth][0], (*path, 0), len(rows)))
    scores, ids, parents, depths = zip((0.0, 0, -1, 0), *rows, strict=True)
    return Call(
        token_ids=torch.tensor([ids]),
        parents=torch.tensor([parents], dtype=torch.int32),
        depths=torch.tensor([depths], dtype=torch.int32),
        scores=torch.tensor([scores], dtype=torch.float64),
        num_nodes=torch.tensor([len(scores)], dtype=torch.int32),
        draft_log_probs=log_probs[None],
    )


def _tied(tokens: Sequence[int]) -> Call:
    """A root with two children of probability 1/2 each."""
    return Call(
        token_ids=torch.tensor([[0, *tokens]]),
        parents=torch.tensor([[-1, 0, 0]], dtype=torch.int32),
        scores=torch.tensor([[0.0, HALF, HALF]], dtype=torch.float64),
        num_nodes=torch.tensor([3], dtype=torch.int32),
    )


def _cousins(tokens: Sequence[int], parents: Sequence[int]) -> Call:
    """A first candidate of probability 1/2 twice, then one of probability 1: all rows but the root tie."""
    return Call(
        token_ids=torch.tensor([tokens]),
        parents=torch.tensor([parents], dtype=torch.int32),
        scores=torch.tensor([[0.0, HALF, HALF, HALF, HALF]], dtype=torch.float64),
        num_nodes=torch.tensor([5], dtype=torch.int32),
    )


def last_argmax(logits: Tensor) -> Tensor:
    """The likeliest token, ties to the largest id: another rank's choice."""
    return logits.shape[1] - 1 - logits.flip(1).argmax(dim=1)


def _choices(implementation: Any, logits: Tensor) -> Measured:
    least = [next(t for t, x in enumerate(row) if x == max(row)) for row in logits.tolist()]
    return Measured(least, implementation(logits).tolist())


CHOICE = Property(
    "tie",
    "Equal logits go to the smallest token id, whoever asks and wherever the row lies.",
    _choices,
)

ROW_19 = Row(
    19,
    "SGLang issue 31071",
    "ranks break near-ties differently and diverge",
    "an order that the input alone does not decide",
    "Each rank of a tensor-parallel server ranked the candidates itself. Equal scores came out in another "
    "order on one of them; from there on the ranks verified different trees.",
    (
        CallFault(
            "two equal siblings, the larger token first",
            lambda: _tied([4, 5]),
            spoil("token_ids", (0, slice(1, 3)), torch.tensor([5, 4])),
            Names("tie_order", 0, "token 4 before 5", "token 5 before 4"),
            (Right("token_ids", 0, [0, 4, 5]),),
        ),
        CallFault(
            "cousins of one score level by level, not by rank path",
            lambda: _cousins([0, 0, 0, 1, 0], [-1, 0, 1, 0, 3]),
            lambda _: _cousins([0, 0, 1, 0, 0], [-1, 0, 0, 1, 2]),
            Names("tie_order", 0, "rank path [0, 0] before [1]", "rank path [1] before [0, 0]"),
            (Right("parents", 0, [-1, 0, 1, 0, 3]),),
        ),
        PropertyFault(
            "the target's own tie by the last of the equal logits",
            CHOICE,
            first_argmax,
            last_argmax,
            lambda: torch.tensor([[1.0, 3.0, 3.0, 0.0]]),
            [1],
            [2],
        ),
        CallFault(
            "a tie at the edge of the budget: the larger token is kept",
            lambda: _built(torch.tensor([[HALF - 1, HALF, HALF, HALF]]), 2),
            spoil("token_ids", (0, 2), 3),
            Names("best_candidates", 0, "token 2", "token 3"),
            (Right("token_ids", 0, [0, 1, 2]),),
        ),
    ),
)


def masks_of(choices: Sequence[Sequence[int]]) -> list[int]:
    """Depths of the nodes that these rank paths name, the root first; a parent is found by its path."""
    depths: dict[tuple[int, ...], int] = {(): 0}
    for path in choices:
        depths[tuple(path)] = depths[tuple(path[:-1])] + 1
    return list(depths.values())


def _inner_nodes_first(choices: Sequence[Sequence[int]]) -> list[int]:
    """The same from a table of inner nodes, whose width is that of the fullest level."""
    inner = [tuple(path) for path in choices if any(tuple(path) == tuple(p[:-1]) for p in choices)]
    width = max(len(path) for path in inner)  # raises where no node but the root has a child
    return [0, *[min(len(path), width + 1) for path in choices]]


def _from_first_child(choices: Sequence[Sequence[int]]) -> list[int]:
    """The same, beginning with the first path whether there is one or not."""
    return [0, len(choices[0]), *[len(path) for path in choices[1:]]]


def _depth_from_last(choices: Sequence[Sequence[int]]) -> list[int]:
    """The same, the depth of a level taken from its last path."""
    return [0, *[len(choices[-1])] * len(choices)]


def _depths(implementation: Any, choices: list[list[int]]) -> Measured:
    expected = [0, *[len(path) for path in choices]]
    try:
        return Measured(expected, implementation(choices))
    except (ValueError, IndexError) as error:
        return Measured(expected, type(error).__name__)


DEPTHS = Property(
    "depths",
    "Every tree has its depths, the root alone and a single level included.",
    _depths,
)

ROW_30 = Row(
    30,
    "TensorRT-LLM issue 10323",
    "a tree of depth 1 raises",
    "a smallest tree that the code has no case for",
    "Tables were sized by the inner nodes besides the root. A tree of one level has none, and the maximum "
    "of nothing raised.",
    (
        PropertyFault(
            "[[0], [1], [2], [3]]",
            DEPTHS,
            masks_of,
            _inner_nodes_first,
            lambda: [[0], [1], [2], [3]],
            [0, 1, 1, 1, 1],
            "ValueError",
        ),
        PropertyFault(
            "the root alone",
            DEPTHS,
            masks_of,
            _from_first_child,
            list[list[int]],
            [0],
            "IndexError",
        ),
        PropertyFault(
            "one branch deeper than the rest",
            DEPTHS,
            masks_of,
            _depth_from_last,
            lambda: [[0], [0, 0], [1]],
            [0, 1, 2, 1],
            [0, 1, 1, 1],
        ),
    ),
)


def tiles_of(rows: int) -> list[int]:
    """Rows of each tile: 32, 16 or 8 as long as they fill one, the last one padded."""
    left, tiles = rows, list[int]()
    while left > 0:
        tile = next((size for size in (32, 16, 8) if size <= left), 8)
        tiles.append(tile)
        left -= tile
    return tiles


def _whole_tiles_only(rows: int) -> list[int]:
    """The same without padding: what no tile fills is never taken."""
    left, tiles = rows, list[int]()
    while left > 0 and len(tiles) < _ENDLESS:
        tile = next((size for size in (32, 16, 8) if size <= left), 0)
        tiles.append(tile)
        left -= tile
    return tiles


def _rounded_down(rows: int) -> list[int]:
    """Tiles of 8, as many as fit: the rows behind them are left out."""
    return [8] * (rows // 8)


def _by_nodes(rows: int) -> list[int]:
    """Tiles for the drafted nodes: the root has no row of its own."""
    return tiles_of(rows - 1)


_ENDLESS = 1000


def _tiles(implementation: Any, rows: int) -> Measured:
    """Tiles may be padded, but end with the tile that holds the last row."""
    tiles = implementation(rows)
    if len(tiles) >= _ENDLESS:
        return Measured("every row in one tile", "no end")
    covered = sum(tiles)
    enough = bool(tiles) and covered >= rows > covered - tiles[-1]
    return Measured(
        "every row in one tile", "every row in one tile" if enough else f"{covered} rows"
    )


TILES = Property("tiles", "The tiles of a launch hold every row once, whatever the budget.", _tiles)

ROW_32 = Row(
    32,
    "lucebox issue 61",
    "the choice of tiles loops forever at some budgets",
    "a loop over sizes that ends for some of them only",
    "Tiles were taken off until none was left to take. The root makes rows of budgets 36, 56 and 64 one "
    "more than tiles divide, and the last row was never taken.",
    (
        PropertyFault(
            "budget 64: 65 rows",
            TILES,
            tiles_of,
            _whole_tiles_only,
            lambda: 65,
            "every row in one tile",
            "no end",
        ),
        PropertyFault(
            "budget 36: 37 rows, the last five left out",
            TILES,
            tiles_of,
            _rounded_down,
            lambda: 37,
            "every row in one tile",
            "32 rows",
        ),
        PropertyFault(
            "budget 56: tiles of the drafted nodes, one row short",
            TILES,
            tiles_of,
            _by_nodes,
            lambda: 57,
            "every row in one tile",
            "56 rows",
        ),
    ),
)

_ZERO = ((-1, 0, 0, 1, 2),)
_ZERO_TOKENS = ([3, 0, 5, 7, 2],)


def _counted() -> Call:
    """Five nodes in eight rows, one of them token 0."""
    return Call.of(tree_of(*_ZERO, tokens=_ZERO_TOKENS, rows=8))


ROW_38 = Row(
    38,
    "SGLang pull request 27509",
    "a tree's size counted as its tokens that are not 0",
    "padding told by a value that real rows may hold",
    "Unused rows hold token 0, and the rows that do not were counted. Token 0 is a token: a tree that "
    "drafts it lost a node, and its last node with it.",
    (
        CallFault(
            "five nodes, one of them token 0, counted as four",
            _counted,
            change(lambda c: {"num_nodes": (field(c, "token_ids") != 0).sum(dim=1).int()}),
            Names("padding", 0, -1, 2),
            (Right("num_nodes", None, [5]), Right("token_ids", (0, 1), 0)),
            "num_nodes counts the tokens that are not 0 ([4]); [5] rows are nodes: token 0 is a token",
        ),
        CallFault(
            "counted up to the first token 0",
            _counted,
            swap(num_nodes=torch.tensor([1], dtype=torch.int32)),
            Names("padding", 0, -1, 0),
            (Right("num_nodes", None, [5]),),
        ),
        CallFault(
            "counted by the width of the rows",
            _counted,
            swap(num_nodes=torch.tensor([8], dtype=torch.int32)),
            Names("parent_order", 0, "0 to 4", -1),
            (Right("num_nodes", None, [5]),),
            "num_nodes is the width of the trees, 8 rows",
        ),
        CallFault(
            "rows at the root's position counted as padding: the root itself is one",
            lambda: replace(lay_out(tree_of((-1, 0, 0, 1)), [5])),
            change(lambda c: {"num_nodes": (field(c, "positions") > 5).sum()[None].int()}),
            Names("padding", 0, -1, 1),
            (Right("num_nodes", None, [4]),),
        ),
    ),
)

ROW_43 = Row(
    43,
    "the published DDTree code",
    "log-probs of -inf give NaN scores and corrupt the heap",
    "a number that has no order put into an order",
    "A sibling's score is had by taking the node's own log-prob off and adding the sibling's. With -inf on "
    "both sides that is NaN, and a heap that holds a NaN pops in any order.",
    (
        CallFault(
            "two finite candidates of five at each depth, budget 8",
            lambda: _built(_two_finite(), 8),
            lambda _: naive_tree(_two_finite(), 12),
            Names("best_first", 0, "a finite score", "-inf"),
            (Right("num_nodes", None, [7]), Right("scores", (0, 6), -2.0)),
            also=(Names("path_score", 0, "-inf", "nan"),),
        ),
        CallFault(
            "NaN among the drafter's log-probs",
            lambda: _built(_two_finite(), 8),
            spoil("draft_log_probs", (0, 1, 2), torch.nan),
            Names("log_probs", 0, "at most 0", "nan"),
            (Right("draft_log_probs", (0, 1, 2), -torch.inf),),
        ),
        CallFault(
            "logits in place of log-probs",
            lambda: _built(_two_finite(), 8),
            spoil("draft_log_probs", (0, 0, 1), 2.5),
            Names("log_probs", 0, "at most 0", 2.5),
            (Right("draft_log_probs", (0, 0, 1), -0.5),),
        ),
        CallFault(
            "a node of a candidate that cannot be drafted, its score made finite",
            lambda: _built(_two_finite(), 8),
            lambda c: put(c, "token_ids", (0, 2), 2),
            Names("path_score", 0, "-inf", -1.0),
            (Right("token_ids", (0, 2), 1),),
        ),
    ),
)
TREES = (ROW_19, ROW_30, ROW_32, ROW_38, ROW_43)

"""Verify passes for a fuzzer of few examples: each a handful of integers, so that sizes vary and shrink well.

The strategies of ``ddtree.invariants.strategies`` draw trees node by node; here a tree is its width, how many
of its rows are nodes, and a shape.
"""

from collections.abc import Iterator
from random import Random

import torch
from hypothesis import strategies as hs

from ddtree.invariants.strategies import AWKWARD_BUDGETS, SlotTable, VerifyCall
from ddtree.spec.contracts import DraftTree
from ddtree.spec.layout import plan_verify

MAX_Q_LEN = 67
"""Past two words of bits and a tile of 64."""
OPEN_Q_LEN = 131
"""Past a tile of 128, for masks that do not hide what lies behind a tile of rows."""
MAX_PREFIX = 40
SHAPES = ("chain", "star", "binary", "random")
OFTEN = 10_000
"""How much likelier a width that is wanted is drawn than each smaller one, which it shrinks to."""


def dealt(max_q_len: int, seed: int) -> Iterator[int]:
    """Widths in an order that leaves out none: hypothesis, left alone, draws few of them again and again.

    The smallest, the awkward ones, then all others, and then all anew.
    """
    random = Random(seed)  # noqa: S311 # no secret
    awkward = {budget + 1 for budget in (*AWKWARD_BUDGETS, 127, 128, 129)}
    rest = set(range(1, max_q_len + 1)) - awkward
    yield 1
    for kind in (awkward - {1}, rest):
        order = sorted(width for width in kind if width <= max_q_len)
        random.shuffle(order)
        yield from order
    while True:
        order = list(range(1, max_q_len + 1))
        random.shuffle(order)
        yield from order


def widths(max_q_len: int, wanted: int | None = None) -> hs.SearchStrategy[int]:
    """Widths up to ``max_q_len``; nearly always the wanted one, if one is, which shrinks to smaller ones."""
    most = max_q_len if wanted is None else wanted
    return hs.sampled_from([*range(1, most + 1), *([] if wanted is None else [wanted] * OFTEN)])


@hs.composite
def calls(
    draw: hs.DrawFn,
    max_batch: int = 3,
    *,
    ragged: bool | None = None,
    max_q_len: int = MAX_Q_LEN,
    page_size: int | None = None,
    wanted: int | None = None,
) -> VerifyCall:
    """Verify passes of up to ``max_batch`` requests; the smallest is one root without a prefix.

    Args:
        draw: given by hypothesis.
        max_batch: most requests.
        ragged: whether requests have widths of their own; None: now and then.
        max_q_len: most rows of a request.
        page_size: of the pool; None: 1, 4 or 16.
        wanted: the width to draw, unless a smaller one does; None: any.
    """
    batch = draw(hs.integers(1, max_batch))
    width = draw(widths(max_q_len, wanted))
    nodes, prefixes, trees = [], [], []
    for _ in range(batch):
        prefixes.append(draw(hs.one_of(hs.integers(0, MAX_PREFIX), hs.just(0))))
        nodes.append(width - draw(hs.one_of(hs.just(0), hs.integers(0, width - 1))))
        trees.append(parents(draw(hs.sampled_from(SHAPES)), nodes[-1], draw(hs.integers(0, 255))))
    tree = tree_of(trees, width)
    prefix_lens = torch.tensor(prefixes, dtype=torch.int32)
    context = max(prefixes) + width + draw(hs.integers(0, 3))
    page = draw(hs.sampled_from((1, 4, 16))) if page_size is None else page_size
    slots = slot_table(page, batch, context, draw(hs.integers(0, 255)))
    own = draw(hs.booleans()) if ragged is None else ragged
    q_lens = None
    if own:
        spare = [draw(hs.integers(0, width - n)) for n in nodes]
        q_lens = torch.tensor([n + s for n, s in zip(nodes, spare, strict=True)]).int()
    layout = plan_verify(tree, prefix_lens, slots.table, q_lens)
    return VerifyCall(tree, prefix_lens, slots, q_lens, layout)


def parents(shape: str, count: int, seed: int = 0) -> list[int]:
    """The rows' parents: a chain, all children of the root, two children each, or any row before."""
    match shape:
        case "chain":
            return list(range(-1, count - 1))
        case "star":
            return [-1] + [0] * (count - 1)
        case "binary":
            return [-1] + [(row - 1) // 2 for row in range(1, count)]
        case "random":
            random = Random(seed)  # noqa: S311 # no secret
            return [-1] + [random.randrange(row) for row in range(1, count)]
    raise ValueError(shape)


def tree_of(requests: list[list[int]], width: int) -> DraftTree:
    """Trees of these parents; a token is its rank among its siblings, so token 0 is common."""
    batch = len(requests)
    token_ids = torch.zeros(batch, width, dtype=torch.int64)
    above = torch.full((batch, width), -1, dtype=torch.int32)
    depths = torch.zeros(batch, width, dtype=torch.int32)
    scores = torch.full((batch, width), -torch.inf, dtype=torch.float64)
    for b, rows in enumerate(requests):
        children, depth = [0] * len(rows), [0] * len(rows)
        tokens = [0] * len(rows)
        for row, parent in enumerate(rows[1:], start=1):
            tokens[row], depth[row] = children[parent], depth[parent] + 1
            children[parent] += 1
        count = len(rows)
        token_ids[b, :count], above[b, :count] = torch.tensor(tokens), torch.tensor(rows).int()
        depths[b, :count] = torch.tensor(depth).int()
        scores[b, :count] = -torch.arange(count).double()
    return DraftTree(
        token_ids, above, depths, scores, torch.tensor([len(r) for r in requests]).int()
    )


def slot_table(page_size: int, batch: int, context: int, seed: int = 0) -> SlotTable:
    """Whole pages for each request, shuffled (seed 0: in order), and one that is nobody's."""
    pages = -(-context // page_size)
    order = list(range(batch * pages + 1))
    if seed:
        Random(seed).shuffle(order)  # noqa: S311 # no secret
    first = torch.tensor(order[: batch * pages]) * page_size
    table = (first[:, None] + torch.arange(page_size)).reshape(batch, -1)[:, :context]
    return SlotTable(table.contiguous(), page_size, (batch * pages + 1) * page_size)

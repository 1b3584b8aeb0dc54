"""The walk against sequential decoding; sampling against the exact distribution, by enumeration."""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hs
from torch import Tensor

from ddtree.invariants import strategies as st
from ddtree.spec.accept import accept_greedy, accept_sampled
from ddtree.spec.contracts import Acceptance, Budget, DraftTree, Horizon, VerifyLayout
from ddtree.spec.layout import plan_verify
from ddtree.spec.tree import build_tree
from tests import oracles
from tests.trees import tree_of

VOCAB = 8
LAST_UNIFORM = 1 - 2.0**-53


def lay_out(tree: DraftTree, q_lens: Tensor | None = None) -> VerifyLayout:
    """A layout without prefixes."""
    batch, rows = tree.token_ids.shape
    slots = torch.arange(batch * rows).reshape(batch, rows)
    return plan_verify(tree, torch.zeros(batch, dtype=torch.int32), slots, q_lens)


def accepted(tree: DraftTree, acceptance: Acceptance, b: int) -> tuple[tuple[int, ...], int]:
    """The accepted tokens below the root, and the bonus."""
    count = int(acceptance.num_accepted[b])
    nodes = acceptance.nodes[b, :count].tolist()
    assert nodes[0] == 0
    assert acceptance.nodes[b, count:].tolist() == [-1] * (acceptance.nodes.shape[1] - count)
    assert [int(tree.parents[b, node]) for node in nodes[1:]] == nodes[:-1]
    return tuple(tree.token_ids[b, nodes[1:]].tolist()), int(acceptance.bonus[b])


def test_written_out() -> None:
    """A root with children 1 (token 4) and 2 (token 5), and 3 (token 6) below 1, by hand."""
    tree = tree_of(parents=[[-1, 0, 0, 1, -1]], tokens=[[9, 4, 5, 6, 0]])
    layout = lay_out(tree)
    for choices, nodes, bonus in [
        ([7, 0, 0, 0, 0], [0, -1, -1, -1], 7),  # no child: the bonus at once
        ([5, 6, 6, 0, 0], [0, 2, -1, -1], 6),  # node 2 has no child 6; node 1's does not count
        ([4, 6, 0, 3, 0], [0, 1, 3, -1], 3),  # down to the leaf
        ([0, 4, 4, 4, 4], [0, -1, -1, -1], 0),  # token 0 of the padding row is no child
    ]:
        found = accept_greedy(tree, torch.tensor(choices), layout, Horizon(3))
        assert found.nodes.tolist() == [nodes]
        assert found.num_accepted.tolist() == [sum(node >= 0 for node in nodes)]
        assert found.bonus.tolist() == [bonus]


@given(st.arbitrary_trees(vocab=3, max_q_len=17) | st.trees(max_vocab=3, max_budget=17), hs.data())
def test_the_walk_equals_sequential_decoding(tree: DraftTree, data: hs.DataObject) -> None:
    """With a table as target the tokens are those of decoding one at a time, ragged or fixed."""
    table: bytes = data.draw(hs.binary(min_size=64, max_size=64))

    def choose(path: tuple[int, ...]) -> int:
        place = sum((token + 1) * 5**i for i, token in enumerate(path))
        return int(table[place % 64] % 4)  # token 3 is never drafted

    q_lens = data.draw(st.q_lens(tree))
    layout = lay_out(tree, q_lens)
    target_ids = torch.full((int(layout.qo_indptr[-1]),), 2)  # padding rows choose too
    every = []
    for b, count in enumerate(tree.num_nodes.tolist()):
        start = int(layout.qo_indptr[b])
        paths = oracles.token_paths(tree.token_ids[b].tolist(), tree.parents[b].tolist(), count)
        for node, path in enumerate(paths):
            target_ids[start + node] = choose(path)
        every.append(set(paths))
    horizon = Horizon(max(int(tree.depths.max()), data.draw(hs.integers(0, 7))))
    acceptance = accept_greedy(tree, target_ids, layout, horizon)
    assert acceptance.nodes.shape == (len(every), horizon + 1)
    for b, paths_of_b in enumerate(every):
        assert accepted(tree, acceptance, b) == oracles.sequential(choose, paths_of_b, horizon)


Parameters = tuple[float, int | None, float | None]
PARAMETERS: list[Parameters] = [
    (1.0, None, None),
    (0.5, None, None),
    (2.0, 2, None),
    (1.0, None, 0.61),
    (0.7, 2, 0.9),
    (1.0, 1, None),
    (0.0, None, None),
]


def emit(tree: DraftTree, logits: Tensor, uniforms: Tensor, parameters: Parameters) -> list[Tensor]:
    """Tokens of every request of a batch that repeats one tree: ``uniforms`` is [repeats, Q]."""
    repeats, rows = uniforms.shape
    many = DraftTree(
        tree.token_ids.expand(repeats, -1),
        tree.parents.expand(repeats, -1),
        tree.depths.expand(repeats, -1),
        tree.scores.expand(repeats, -1),
        tree.num_nodes.expand(repeats),
    )
    temperature, top_k, top_p = parameters
    acceptance = accept_sampled(
        many,
        logits.repeat(repeats, 1),
        lay_out(many),
        Horizon(int(tree.depths.max())),
        uniforms.flatten(),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    assert rows == tree.token_ids.shape[1]
    return [
        torch.tensor([*tokens, bonus])
        for tokens, bonus in (accepted(many, acceptance, b) for b in range(repeats))
    ]


def cells(logits: Tensor, parameters: Parameters) -> tuple[list[list[Fraction]], list[list[float]]]:
    """At every node the exact probability of each token, and a uniform from the middle of its cell.

    Found by bisection on ``accept_sampled`` itself, on a tree of the root alone.
    """
    root = build_tree(torch.zeros(1, 0, logits.shape[1]), torch.tensor([0]), Budget(0))
    weights, middles = [], []
    for row in logits:

        def sample(uniform: float, row: Tensor = row) -> int:
            return int(
                emit(root, row[None], torch.tensor([[uniform]], dtype=torch.float64), parameters)[0]
            )

        weight = oracles.cut_points(sample, logits.shape[1])
        starts = [sum(weight[:token], Fraction(0)) for token in range(len(weight))]
        weights.append(weight)
        middles.append(
            [
                (start * 2**53 + w * 2**53 // 2) // 1 / 2.0**53
                for start, w in zip(starts, weight, strict=True)
            ]
        )
    return weights, middles


def enumerate_emitted(
    tree: DraftTree, logits: Tensor, parameters: Parameters
) -> dict[tuple[int, ...], Fraction]:
    """The exact distribution of the emitted tokens: every cell of every node, run and weighed."""
    weights, middles = cells(logits, parameters)
    support = [[token for token, w in enumerate(row) if w > 0] for row in weights]
    choices = list(product(*support))
    uniforms = torch.tensor(
        [[middles[node][token] for node, token in enumerate(choice)] for choice in choices],
        dtype=torch.float64,
    )
    emitted: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for choice, tokens in zip(choices, emit(tree, logits, uniforms, parameters), strict=True):
        weight = Fraction(1)
        for node, token in enumerate(choice):
            weight *= weights[node][token]
        emitted[tuple(tokens.tolist())] += weight
    assert sum(emitted.values()) == 1
    return emitted


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize(
    "parents", [[-1], [-1, 0], [-1, 0, 0], [-1, 0, 1, 0], [-1, 0, 0, 0], [-1, 0, 1, 2]]
)
def test_emitted_tokens_have_exactly_the_targets_distribution(
    parents: Sequence[int], parameters: Parameters
) -> None:
    """Summed over every cell of every node, each emitted sequence has the target's probability.

    The target's probability of a sequence is the product of its truncated distribution at each node
    along it, from an independent definition. Two of the nodes' logits tie.
    """
    siblings = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    tree = tree_of([parents], [siblings])  # tokens 0, 1, 2 among siblings
    generator = torch.Generator().manual_seed(len(parents))
    logits = torch.randn(len(parents), 3, generator=generator, dtype=torch.float64)
    logits[0, 1] = logits[0, 2]
    emitted = enumerate_emitted(tree, logits, parameters)

    paths = oracles.token_paths(siblings, parents, len(parents))
    probs = {
        path: oracles.truncated(logits[node].tolist(), *parameters)
        for node, path in enumerate(paths)
    }
    expected: dict[tuple[int, ...], float] = {}
    for path in paths:
        reach = 1.0
        for i, token in enumerate(path):
            reach *= probs[path[:i]][token]
        for token in range(3):
            if (*path, token) not in probs and reach * probs[path][token] > 0:
                expected[*path, token] = reach * probs[path][token]
    assert emitted.keys() == expected.keys()
    for sequence, probability in expected.items():
        assert float(emitted[sequence]) == pytest.approx(probability, rel=1e-12)


@given(
    hs.lists(hs.integers(-6, 6), min_size=1, max_size=5),
    hs.sampled_from(PARAMETERS),
)
@example([0, 0, 0], (1.0, None, 0.61))
@example([5, -5], (0.0, None, None))
def test_each_nodes_cells_have_the_truncated_probabilities(
    logits: list[int], parameters: Parameters
) -> None:
    """Cut by bisection to 2^-53, the cells are as long as the independent probabilities."""
    weights, _ = cells(torch.tensor([logits]).double() / 2, parameters)
    expected = oracles.truncated([logit / 2 for logit in logits], *parameters)
    assert sum(weights[0]) == 1
    assert [float(w) for w in weights[0]] == pytest.approx(expected, rel=1e-12, abs=2e-16)
    assert [w > 0 for w in weights[0]] == [p > 0 for p in expected]


@pytest.mark.parametrize("uniform", [0.0, LAST_UNIFORM])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_the_edges_of_the_uniforms_choose_tokens_that_are_possible(
    uniform: float, parameters: Parameters
) -> None:
    """0 chooses the first possible token and 1 - 2^-53 the last, never one of probability 0."""
    logits = torch.tensor([[-torch.inf, 1.0, 3.0, 0.5, -torch.inf]])
    root = build_tree(torch.zeros(1, 0, 5), torch.tensor([0]), Budget(0))
    kept = oracles.truncated(logits[0].tolist(), *parameters)
    possible = [token for token, probability in enumerate(kept) if probability > 0]
    [tokens] = emit(root, logits, torch.tensor([[uniform]], dtype=torch.float64), parameters)
    assert tokens.tolist() == [possible[0] if uniform == 0 else possible[-1]]


@given(st.arbitrary_trees(batch=1, vocab=3, max_q_len=9), hs.data())
def test_one_uniform_for_each_depth_gives_sequential_sampling(
    tree: DraftTree, data: hs.DataObject
) -> None:
    """If rows of a depth share a uniform, the tokens are those of sampling one at a time with it."""
    numbers = data.draw(hs.lists(hs.floats(0, LAST_UNIFORM), min_size=8, max_size=8))
    count = int(tree.num_nodes)
    paths = oracles.token_paths(tree.token_ids[0].tolist(), tree.parents[0].tolist(), count)
    levels = data.draw(hs.binary(min_size=4 * len(tree.parents[0]), max_size=200))
    rows = tree.parents.shape[1]
    logits = torch.tensor([levels[i] % 7 for i in range(4 * rows)]).double().reshape(rows, 4)
    uniforms = torch.tensor([numbers[int(depth)] for depth in tree.depths[0]], dtype=torch.float64)
    [tokens] = emit(tree, logits, uniforms[None], (1.0, None, None))

    def choose(path: tuple[int, ...]) -> int:
        probs = logits[paths.index(path)].softmax(0).cumsum(0)
        return int((probs <= numbers[len(path)] * probs[-1]).sum())

    reached, bonus = oracles.sequential(choose, set(paths), int(tree.depths.max()))
    assert tokens.tolist() == [*reached, bonus]

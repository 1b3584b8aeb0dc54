"""Best-first trees against a full sort of all paths, and against every subset of nodes."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hs
from torch import Tensor

from ddtree.invariants import strategies as st
from ddtree.spec.contracts import Budget, DraftTree
from ddtree.spec.errors import InputError
from ddtree.spec.tree import build_tree
from tests import oracles

INF = math.inf


def roots(batch: int) -> Tensor:
    """Root tokens 1, 2, 3 and so on."""
    return torch.arange(1, batch + 1)


def nodes(tree: DraftTree, b: int) -> list[tuple[tuple[int, ...], float]]:
    """(token path, score) of request b's non-root nodes, in row order."""
    real = int(tree.num_nodes[b])
    paths = oracles.token_paths(tree.token_ids[b].tolist(), tree.parents[b].tolist(), real)
    return list(zip(paths[1:], tree.scores[b, 1:real].tolist(), strict=True))


def assert_equal(left: DraftTree, right: DraftTree) -> None:
    """All five fields are equal."""
    for name in ("token_ids", "parents", "depths", "scores", "num_nodes"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name


@hs.composite
def drafts(draw: hs.DrawFn, max_batch: int = 2, max_horizon: int = 4, max_vocab: int = 5) -> Tensor:
    """Draft log-probs of small sizes; horizon 0 and vocab 1 included."""
    batch, horizon = draw(hs.integers(1, max_batch)), draw(hs.integers(0, max_horizon))
    return draw(st.draft_log_probs(batch, horizon, draw(hs.integers(1, max_vocab))))


def test_written_out() -> None:
    """The tree of a small draft, with every number worked out by hand.

    Halves and quarters: depth 1 is {0: 1/2, 1: 1/4, 2: 1/4}, depth 2 is {0: 1/4, 1: 1/4, 2: 1/2}.
    Paths: (0) 1/2; (0,2) 1/4, then (1) 1/4 and (2) 1/4, whose rank paths (0,0) < (1) < (2) break
    the tie; then the eighths (0,0), (0,1), (1,2), (2,2) by rank path.
    """
    half, quarter = math.log(0.5), math.log(0.25)
    draft = torch.tensor([[[half, quarter, quarter], [quarter, quarter, half]]])
    tree = build_tree(draft, torch.tensor([7]), Budget(9))
    assert tree.token_ids.tolist() == [[7, 0, 2, 1, 2, 0, 1, 2, 2, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 0, 1, 1, 3, 4, 3]]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 1, 2, 2, 2, 2, 2]]
    assert tree.num_nodes.tolist() == [10]
    mass = tree.scores.exp()[0].tolist()
    assert mass == pytest.approx(
        [1, 1 / 2, 1 / 4, 1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 16]
    )


@given(drafts(), st.budgets(), hs.none() | hs.integers(1, 5))
@example(torch.zeros(1, 3, 2), Budget(8), None)
@example(torch.tensor([[[-INF, -0.5, -INF, -1.0]] * 4]), Budget(8), None)
@example(torch.full((1, 2, 3), -INF), Budget(7), None)
def test_equals_a_full_sort_of_all_paths(draft: Tensor, budget: Budget, topk: int | None) -> None:
    """The nodes are the best rank paths in order of score, then rank path; the scores are exact."""
    tree = build_tree(draft, roots(len(draft)), budget, topk)
    for b, row in enumerate(draft.tolist()):
        expected = oracles.best_first(row, budget, topk)
        assert nodes(tree, b) == [(tokens, score) for _, tokens, score in expected]


@given(drafts(max_batch=1, max_horizon=2, max_vocab=3) | drafts(1, 3, 2))
def test_is_the_optimal_surrogate(draft: Tensor) -> None:
    """No valid tree of as many nodes holds more probability, whatever the budget."""
    best = oracles.best_surrogates(draft[0].tolist()) if draft.shape[1] else [0.0]
    for budget in range(len(best) + 1):
        tree = build_tree(draft, roots(1), Budget(budget))
        mass = tree.scores[0, 1 : int(tree.num_nodes)].exp().sum().item()
        assert mass == pytest.approx(best[min(budget, len(best) - 1)], rel=1e-12)


@given(drafts(max_batch=1), hs.none() | hs.integers(1, 3))
def test_every_budget_is_a_prefix_of_the_next(draft: Tensor, topk: int | None) -> None:
    """tree(budget) is the first rows of the largest tree, for every budget up to one too many."""
    largest = build_tree(draft, roots(1), Budget(70), topk)
    for budget in range(69):
        tree = build_tree(draft, roots(1), Budget(budget), topk)
        size = int(tree.num_nodes)
        assert size == min(budget + 1, int(largest.num_nodes))
        for name in ("token_ids", "parents", "depths", "scores"):
            assert torch.equal(getattr(tree, name)[0, :size], getattr(largest, name)[0, :size])


@given(drafts(), st.budgets())
def test_topk_of_the_whole_vocabulary_is_the_default(draft: Tensor, budget: Budget) -> None:
    """The default topk loses nothing: keeping every candidate gives the same tree."""
    whole = build_tree(draft, roots(len(draft)), budget, draft.shape[2])
    assert_equal(build_tree(draft, roots(len(draft)), budget), whole)


@given(drafts(), st.budgets())
def test_topk_1_is_a_chain(draft: Tensor, budget: Budget) -> None:
    """With one candidate a depth each node's parent is the row before it."""
    tree = build_tree(draft, roots(len(draft)), budget, 1)
    for b in range(len(draft)):
        real = int(tree.num_nodes[b])
        assert tree.parents[b, :real].tolist() == list(range(-1, real - 1))
        assert real <= draft.shape[1] + 1


@given(drafts(max_batch=3), st.budgets(17), hs.none() | hs.integers(1, 3))
def test_a_row_does_not_depend_on_its_batch(
    draft: Tensor, budget: Budget, topk: int | None
) -> None:
    """A request's tree is the same alone and in a batch."""
    together = build_tree(draft, roots(len(draft)), budget, topk)
    for b in range(len(draft)):
        alone = build_tree(draft[b : b + 1], roots(len(draft))[b : b + 1], budget, topk)
        for name in ("token_ids", "parents", "depths", "scores", "num_nodes"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[b]), name


@given(drafts(max_batch=3), st.budgets(17))
def test_form_of_the_result(draft: Tensor, budget: Budget) -> None:
    """Shapes, dtypes, the root and the padding are the contract's."""
    batch = len(draft)
    tree = build_tree(draft, roots(batch), budget)
    assert tree.token_ids.dtype == torch.int64
    assert tree.parents.dtype == tree.depths.dtype == tree.num_nodes.dtype == torch.int32
    assert tree.scores.dtype == torch.float64
    for b in range(batch):
        real = int(tree.num_nodes[b])
        assert tree.token_ids.shape == (batch, budget + 1)
        assert tree.token_ids[b, 0] == b + 1
        assert tree.parents[b, 0] == -1
        assert tree.depths[b, 0] == 0
        assert tree.scores[b, 0] == 0
        assert tree.scores[b, :real].isfinite().all()
        assert (tree.token_ids[b, real:] == 0).all()
        assert (tree.parents[b, real:] == -1).all()
        assert (tree.depths[b, real:] == 0).all()
        assert (tree.scores[b, real:] == -INF).all()


@pytest.mark.parametrize("budget", [0, 1, 2, 255, 256, 1023, 1024])
@pytest.mark.parametrize("rounding", [torch.float32, torch.bfloat16])
def test_large_budgets(budget: int, rounding: torch.dtype) -> None:
    """Up to 1024 nodes of a wide draft, ties of bfloat16 included, equal the full sort."""
    logits = torch.randn(1, 3, 12, generator=torch.Generator().manual_seed(budget))
    draft = logits.log_softmax(-1).to(rounding).float()
    tree = build_tree(draft, roots(1), Budget(budget))
    expected = oracles.best_first(draft[0].tolist(), budget)
    assert nodes(tree, 0) == [(tokens, score) for _, tokens, score in expected]


def test_equal_logits_rank_by_token_id() -> None:
    """Of a uniform draft the siblings come in order of token id."""
    tree = build_tree(torch.full((1, 1, 50), math.log(1 / 50)), roots(1), Budget(50))
    assert tree.token_ids[0, 1:].tolist() == list(range(50))


def test_two_finite_entries_and_budget_8() -> None:
    """A row with two finite entries and budget 8 gives two nodes, finite scores and six padding rows."""
    draft = torch.full((1, 1, 12), -INF)
    draft[0, 0, [4, 9]] = math.log(0.5)
    tree = build_tree(draft, roots(1), Budget(8))
    assert tree.num_nodes.tolist() == [3]
    assert tree.token_ids.tolist() == [[1, 4, 9, 0, 0, 0, 0, 0, 0]]
    assert not tree.scores.isnan().any()


@given(drafts(max_batch=2, max_horizon=3), hs.data())
def test_nan_is_refused_with_its_place(draft: Tensor, data: hs.DataObject) -> None:
    """A NaN anywhere raises an error that names where it is."""
    if draft.numel() == 0:
        return
    place = [data.draw(hs.integers(0, size - 1)) for size in draft.shape]
    draft[tuple(place)] = math.nan
    with pytest.raises(InputError, match=rf"\[{place[0]}, {place[1]}, {place[2]}\] is nan"):
        build_tree(draft, roots(len(draft)), Budget(4))


def test_the_draft_is_left_alone() -> None:
    """Building a tree does not change its input."""
    draft = torch.randn(2, 3, 5).log_softmax(-1)
    before = draft.clone()
    build_tree(draft, roots(2), Budget(7))
    assert torch.equal(draft, before)

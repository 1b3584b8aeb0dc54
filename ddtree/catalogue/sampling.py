"""Rows about the distribution of what is emitted: shared noise, and proposals that nothing was drawn from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ddtree.catalogue.calls import tree_of
from ddtree.catalogue.entry import Measured, Property, PropertyFault, Row
from ddtree.spec import Horizon, accept_sampled, plan_verify
from ddtree.spec.contracts import DraftTree, VerifyLayout

CELLS = 100
"""Cells of the unit interval that stand for one random number: exact for probabilities in hundredths."""

Probs = tuple[float, ...]


@dataclass(frozen=True)
class Proposal:
    """One position: the target's distribution and the drafter's, in hundredths."""

    target: Probs
    draft: Probs


def draw(probs: Sequence[float], u: float) -> int:
    """The token whose share of the unit interval holds ``u``."""
    end = 0.0
    for token, share in enumerate(probs):
        end += share
        if u < end:
            return token
    return max(token for token, share in enumerate(probs) if share)


def emitted(
    case: Proposal,
    *,
    shared: str = "",
    residual: str = "difference",
    drawn: Callable[[Probs], Probs] | None = None,
) -> list[float]:
    """The distribution of one emitted token: draft, accept with target / draft, else draw the residual.

    The draft's number goes through all its cells and the others count by their shares: no estimate.

    Args:
        case: the two distributions.
        shared: ``residual`` draws it with the draft's number, ``accept`` accepts with it.
        residual: ``difference`` is what the target has more than the draft, ``target`` the whole target.
        drawn: what the drafter really draws from, where that is not what it says.
    """
    target, draft = case.target, case.draft
    rest = [
        max(p - q, 0.0) if residual == "difference" else p
        for p, q in zip(target, draft, strict=True)
    ]
    total = sum(rest)
    left = [share / total for share in rest] if total > 1e-12 else list(target)
    source = draft if drawn is None else drawn(draft)
    found = [0.0] * len(target)
    numbers = [(i + 0.5) / CELLS for i in range(CELLS)]
    for u in numbers:
        token = draw(source, u)
        ratio = min(1.0, target[token] / draft[token])
        accepted = float(u < ratio) if shared == "accept" else ratio
        found[token] += accepted / CELLS
        again = draw(left, u)
        for other, share in enumerate(left):
            weight = float(other == again) if shared == "residual" else share
            found[other] += (1 - accepted) * weight / CELLS
    return found


def _distribution(implementation: Any, case: Proposal) -> Measured:
    return Measured(_percent(case.target), _percent(implementation(case)))


def _percent(probs: Sequence[float]) -> list[int]:
    """Tenths of a percent: less than that is rounding."""
    return [round(1000 * share) for share in probs]


LOSSLESS = Property(
    "lossless",
    "Every emitted token has exactly the target's distribution (here in tenths of a percent).",
    _distribution,
)


@dataclass(frozen=True)
class Walk:
    """A tree of two depths and the target's distribution at each of its rows."""

    tree: DraftTree
    layout: VerifyLayout
    probs: tuple[Probs, ...]


Numbers = Callable[[int, list[float]], list[float]]


def a_number_a_depth(rows: int, numbers: list[float]) -> list[float]:
    """A row's number: the root's own, and one for all rows below it, which lie at one position."""
    return [numbers[0], *[numbers[1]] * (rows - 1)]


def _one_for_all(rows: int, numbers: list[float]) -> list[float]:
    return [numbers[0]] * rows


def _mirrored(rows: int, numbers: list[float]) -> list[float]:
    return [numbers[0], *[1 - numbers[0]] * (rows - 1)]


def _pairs(implementation: Numbers, case: Walk) -> Measured:
    """The joint distribution of the first two tokens where the first is drafted, by every pair of numbers."""
    rows, grid = len(case.probs), 10
    logits = torch.tensor(case.probs).log()
    expected: dict[tuple[int, int], float] = {}
    found: dict[tuple[int, int], float] = {}
    numbers = [(i + 0.5) / grid for i in range(grid)]
    children = case.tree.parents[0].tolist()
    for row in range(1, rows):
        first = int(case.tree.token_ids[0, row])
        for second, share in enumerate(case.probs[row]):
            if children[row] == 0 and share:
                expected[first, second] = case.probs[0][first] * share
    for u, v in product(numbers, numbers):
        uniforms = torch.tensor(implementation(rows, [u, v]), dtype=torch.float64)
        accepted = accept_sampled(case.tree, logits, case.layout, Horizon(1), uniforms)
        if int(accepted.num_accepted) == 2:
            first = int(case.tree.token_ids[0, int(accepted.nodes[0, 1])])
            pair = first, int(accepted.bonus)
            found[pair] = found.get(pair, 0.0) + 1 / grid**2
    keys = sorted(expected | found)
    return Measured(
        _percent([expected.get(key, 0.0) for key in keys]),
        _percent([found.get(key, 0.0) for key in keys]),
    )


INDEPENDENT = Property(
    "independent",
    "Tokens at different positions are drawn with different random numbers: pairs have the target's joint "
    "distribution.",
    _pairs,
)


def two_branches() -> Walk:
    """A root with two drafted tokens of three; every distribution in tenths."""
    tree = tree_of((-1, 0, 0), tokens=([0, 0, 1],))
    layout = plan_verify(tree, torch.tensor([4]), torch.arange(8)[None])
    return Walk(tree, layout, ((0.5, 0.3, 0.2), (0.5, 0.5, 0.0), (0.2, 0.8, 0.0)))


def _sharper(draft: Probs) -> Probs:
    """The likeliest token alone: a drafter that draws greedily and says that it samples."""
    return tuple(float(share == max(draft)) for share in draft)


def _topk(draft: Probs) -> Probs:
    """The two likeliest tokens, drawn from; the others are still in the distribution that is reported."""
    kept = sorted(draft)[-2]
    total = sum(share for share in draft if share >= kept)
    return tuple(share / total if share >= kept else 0.0 for share in draft)


def _shifted(draft: Probs) -> Probs:
    """The distribution of the position before."""
    return (*draft[1:], draft[0])


ROW_21 = Row(
    21,
    "vLLM issue 54282",
    "the draft and the residual drawn with one noise",
    "random numbers used twice where each draw needs its own",
    "A token that is rejected is drawn again from what the target has more than the draft. Drawn with the "
    "number that drew the rejected one, it is no free draw: given the rejection the number is known in part.",
    (
        PropertyFault(
            "a token that must come up in 60 % of draws comes up in 63 %",
            LOSSLESS,
            emitted,
            lambda case: emitted(case, shared="residual"),
            lambda: Proposal((0.35, 0.60, 0.05), (0.95, 0.03, 0.02)),
            [350, 600, 50],
            [350, 630, 20],
        ),
        PropertyFault(
            "the draft and its acceptance drawn with one noise",
            LOSSLESS,
            emitted,
            lambda case: emitted(case, shared="accept"),
            lambda: Proposal((0.5, 0.5), (0.9, 0.1)),
            [500, 500],
            [560, 440],
        ),
        PropertyFault(
            "one number for all depths of a tree",
            INDEPENDENT,
            a_number_a_depth,
            _one_for_all,
            two_branches,
            [250, 250, 60, 240],
            [500, 0, 0, 300],
        ),
        PropertyFault(
            "the number of one depth mirrored for the next",
            INDEPENDENT,
            a_number_a_depth,
            _mirrored,
            two_branches,
            [250, 250, 60, 240],
            [0, 500, 0, 300],
        ),
    ),
)

ROW_22 = Row(
    22,
    "Transformers issue 32867",
    "the proposal distribution is not the one drawn from",
    "acceptance that divides by another distribution than the draft's",
    "Acceptance weighs the target's probability against the draft's. Given other probabilities than the "
    "token was drawn with, it lets some tokens through too often.",
    (
        PropertyFault(
            "drawn greedily, weighed as if sampled",
            LOSSLESS,
            emitted,
            lambda case: emitted(case, drawn=_sharper),
            lambda: Proposal((0.3, 0.3, 0.4), (0.6, 0.3, 0.1)),
            [300, 300, 400],
            [500, 0, 500],
        ),
        PropertyFault(
            "drawn after top-k, weighed before it",
            LOSSLESS,
            emitted,
            lambda case: emitted(case, drawn=_topk),
            lambda: Proposal((0.2, 0.3, 0.5), (0.45, 0.3, 0.25)),
            [200, 300, 500],
            [267, 400, 333],
        ),
        PropertyFault(
            "weighed by the distribution of another position",
            LOSSLESS,
            emitted,
            lambda case: emitted(case, drawn=_shifted),
            lambda: Proposal((0.5, 0.3, 0.2), (0.6, 0.3, 0.1)),
            [500, 300, 200],
            [250, 100, 650],
        ),
        PropertyFault(
            "a rejected token drawn from the whole target",
            LOSSLESS,
            emitted,
            lambda case: emitted(case, residual="target"),
            lambda: Proposal((0.5, 0.5), (0.9, 0.1)),
            [500, 500],
            [700, 300],
        ),
    ),
)

SAMPLING = (ROW_21, ROW_22)

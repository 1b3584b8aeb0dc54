"""Acceptance read off texts: the rounds that decoding a text by draft trees would have had.

Which path of a tree is accepted depends on the target's choices alone, and those are the text. So trees are
drafted at every place of a text, and the rounds are read off: a round at place a that accepts d drafted
tokens is followed by one at a + d + 1. That is exact, for every budget at once, since tree(n) is a prefix
of tree(n + 1), and it holds for sampled text too, as a round follows the child that equals the sample.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.decoding.drafter import Drafter
from ddtree.decoding.target import HFTarget
from ddtree.spec.contracts import Budget, DraftTree
from ddtree.spec.index import horizon_of
from ddtree.spec.tree import build_tree

PLACES = 16
"""Places whose drafts are held, and whose trees are built, at once."""


@dataclass
class Rounds:
    """How many rounds yielded how many tokens: ``counts[n]`` of them n, the bonus included."""

    counts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, tokens: Iterable[int]) -> "Rounds":
        """The rounds that yielded so many tokens each."""
        rounds = cls()
        for count in tokens:
            rounds.add(count)
        return rounds

    def add(self, tokens: int) -> None:
        """Count a round."""
        self.counts += [0] * (tokens + 1 - len(self.counts))
        self.counts[tokens] += 1

    @property
    def rounds(self) -> int:
        """How many."""
        return sum(self.counts)

    @property
    def length(self) -> float:
        """Acceptance length: tokens a round on average; NaN without rounds."""
        tokens = sum(n * count for n, count in enumerate(self.counts))
        return tokens / self.rounds if self.rounds else float("nan")

    @property
    def by_depth(self) -> tuple[float, ...]:
        """The share of rounds that accept at least 1, 2, 3, ... drafted tokens."""
        reached = range(2, len(self.counts))  # a round that accepts n yields n + 1
        return tuple(sum(self.counts[n:]) / self.rounds for n in reached)

    def __add__(self, other: "Rounds") -> "Rounds":
        """The rounds of both."""
        total = Rounds(list(self.counts))
        total.counts += [0] * (len(other.counts) - len(total.counts))
        for n, count in enumerate(other.counts):
            total.counts[n] += count
        return total


def follow(depths: Sequence[int]) -> list[int]:
    """Tokens of each round of a text, from the drafted tokens that a round at each place would accept."""
    tokens, place = [], 0
    while place < len(depths):
        tokens.append(depths[place] + 1)
        place += tokens[-1]
    return tokens


def tree_at(
    log_probs: Float[Tensor, "B H V"],
    roots: Int64[Tensor, " B"],
    budget: int,
    topk: int | None = None,
) -> DraftTree:
    """The drafts' trees, by the kernels where the drafts are on a GPU."""
    if log_probs.is_cuda:
        from ddtree import impl

        return impl.build_tree(log_probs, roots, Budget(budget), topk)
    return build_tree(log_probs, roots, Budget(budget), topk)


def rows_along(
    tree: DraftTree, following: Int64[Tensor, "B horizon"]
) -> Int64[Tensor, "B horizon"]:
    """The tree's row of the path along ``following`` at each depth; past all rows once it leaves the tree.

    Rows are in best-first order and tree(n) is a prefix of tree(n + 1), so the depth reached by the tree of
    any smaller budget is the number of rows that do not exceed it.
    """
    count = tree.token_ids.shape[1]
    rows, at = [], torch.zeros_like(following[:, 0])
    real = torch.arange(count, device=at.device) < tree.num_nodes[:, None]
    for depth in range(following.shape[1]):
        matches = (
            (tree.parents == at[:, None]) & (tree.token_ids == following[:, depth, None]) & real
        )
        at = torch.where(matches.any(1), matches.long().argmax(1), count)
        rows.append(at)
    return torch.stack(rows, 1)


def rows_of_text(
    target: HFTarget,
    drafter: Drafter,
    text: Int64[Tensor, " length"],
    prompt_len: int,
    *,
    budget: int,
    topks: Sequence[int | None],
    on_place: Callable[[], None] = lambda: None,
) -> dict[int | None, Int64[Tensor, "places horizon"]]:
    """Draft at every place of a text that a whole horizon follows; ``rows_along`` of each topk's trees.

    Args:
        target: reads the text once where the drafter wants its hidden states.
        drafter: of one request; it is reset.
        text: prompt and new tokens, on the CPU.
        prompt_len: tokens of the prompt; the first new token is the first place's root.
        budget: of the trees; those of smaller ones are their prefixes.
        topks: candidates kept at each depth.
        on_place: told of each place.
    """
    horizon = horizon_of(drafter.block_size)
    features = None
    if drafter.target_layer_ids:
        target.reset(drafter.target_layer_ids)
        target.prefill(text)
        features = target.features()
    drafter.reset()
    found: dict[int | None, list[Tensor]] = {topk: [] for topk in topks}
    known = 0
    every = torch.arange(prompt_len, max(prompt_len, text.numel() - horizon))
    for places in every.split(PLACES) if len(every) else ():
        drafts = []
        for place in places.tolist():
            new = None if features is None else features[known:place]
            drafts.append(drafter.draft(text[: place + 1], new)[0])
            known = place
            on_place()
        log_probs = torch.stack(drafts)
        roots = text[places].to(log_probs.device)
        following = text[places[:, None] + torch.arange(1, horizon + 1)].to(log_probs.device)
        for topk, rows in found.items():
            tree = tree_at(log_probs, roots, budget, topk)
            rows.append(rows_along(tree, following).cpu())
    empty = torch.zeros(0, horizon, dtype=torch.int64)
    return {topk: torch.cat([empty, *rows]) for topk, rows in found.items()}

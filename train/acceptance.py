"""Acceptance on given texts: how many tokens a round of draft-tree decoding would have yielded there.

Which path of a tree is accepted depends on the target's choices alone, and those are the text. So the
trees at all places of a text are drafted at once, and the rounds that decoding it would have had are
read off: a round at place a that accepts d drafted tokens is followed by one at a + d + 1. For sampled text
the same holds, since a round follows the child that equals the sample.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.decoding.dflash_model import DFlashModel
from ddtree.spec.contracts import Budget, DraftTree
from ddtree.spec.tree import build_tree
from train.blocks import draft_logits, draft_states
from train.data import Corpus
from train.llama import Llama

BUDGETS = (8, 16, 32, 64, 128, 256)
PLACES = 128
"""Places of a text drafted at once."""


@dataclass
class Rounds:
    """How many rounds yielded how many tokens: ``counts[n]`` of them n, the bonus included."""

    counts: list[int] = field(default_factory=list)

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

    def __add__(self, other: "Rounds") -> "Rounds":
        """The rounds of both."""
        total = Rounds(list(self.counts))
        total.counts += [0] * (len(other.counts) - len(total.counts))
        for n, count in enumerate(other.counts):
            total.counts[n] += count
        return total


Kind = tuple[str, int]
"""``("chain" | "tree", budget)``."""


@torch.no_grad()
def acceptance(
    drafter: DFlashModel,
    llama: Llama,
    corpus: Corpus,
    *,
    budgets: Sequence[int] = BUDGETS,
    on_text: Callable[[int], None] = lambda _: None,
) -> list[dict[Kind, Rounds]]:
    """The rounds of each text, by kind of tree and budget.

    A round is counted only where a whole horizon of the text follows, since the rest is not known.

    Args:
        drafter: in the target's dtype, on its device.
        llama: the target.
        corpus: texts of the target, on the device.
        budgets: of the trees and, as the longest chain, of the chains.
        on_text: told how many texts are done.
    """
    horizon = drafter.config.block_size - 1
    found = []
    for i in range(len(corpus)):
        start, length = int(corpus.prompt_lens[i]), int(corpus.lengths[i])
        text = corpus.token_ids[i, :length].long()
        places = torch.arange(start, max(start, length - horizon), device=text.device)
        chains, trees = _depths(drafter, llama, text, places, max(budgets))
        by_kind: dict[Kind, Rounds] = {}
        for budget in budgets:
            by_kind["chain", budget] = _follow(chains.clamp_max(budget).tolist())
            by_kind["tree", budget] = _follow((trees <= budget).sum(1).tolist())
        found.append(by_kind)
        on_text(i + 1)
    return found


def total(found: Iterable[dict[Kind, Rounds]]) -> dict[Kind, Rounds]:
    """The rounds of several texts together."""
    sums: dict[Kind, Rounds] = {}
    for by_kind in found:
        for kind, rounds in by_kind.items():
            sums[kind] = sums.get(kind, Rounds()) + rounds
    return sums


def _depths(
    drafter: DFlashModel,
    llama: Llama,
    text: Int64[Tensor, " length"],
    places: Int64[Tensor, " places"],
    budget: int,
) -> tuple[Int64[Tensor, " places"], Int64[Tensor, "places horizon"]]:
    """At each place: how deep a chain of first guesses goes along the text, and the row of the tree
    that holds the text's token at each depth (past all rows where none does)."""
    horizon = drafter.config.block_size - 1
    _, features = llama.read(text[None], drafter.config.target_layer_ids)
    assert features is not None
    chains, trees = [places.new_zeros(0)], [places.new_zeros(0, horizon)]
    for part in places.split(PLACES) if len(places) else ():
        states = draft_states(drafter, llama.embedding, text[None], features, part[None])[0]
        log_probs = torch.log_softmax(draft_logits(drafter, llama.head, states).float(), -1)
        following = text[part[:, None] + torch.arange(1, horizon + 1, device=part.device)]
        is_first = log_probs.argmax(-1) == following
        chains.append(is_first.long().cumprod(1).sum(1))
        tree = _build(log_probs, text[part], budget)
        trees.append(rows_along(tree, following))
    return torch.cat(chains), torch.cat(trees)


def _build(log_probs: Float[Tensor, "B H V"], roots: Int64[Tensor, " B"], budget: int) -> DraftTree:
    if log_probs.is_cuda:
        from ddtree import impl

        return impl.build_tree(log_probs, roots, Budget(budget))
    return build_tree(log_probs, roots, Budget(budget))


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


def _follow(depths: list[int]) -> Rounds:
    rounds, place = Rounds(), 0
    while place < len(depths):
        rounds.add(depths[place] + 1)
        place += depths[place] + 1
    return rounds

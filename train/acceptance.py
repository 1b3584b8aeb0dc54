"""Acceptance on given texts: the trees at all their places are drafted at once, and the rounds read off
(`ddtree/decoding/acceptance.py` says why that is exact).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from ddtree.decoding.acceptance import Rounds, follow, rows_along, tree_at
from ddtree.decoding.dflash_model import DFlashModel
from train.blocks import draft_logits, draft_states
from train.data import Corpus
from train.llama import Llama

BUDGETS = (8, 16, 32, 64, 128, 256)
PLACES = 128
"""Places of a text drafted at once."""


Kind = tuple[str, int]
"""``("chain" | "tree", budget)``."""


@dataclass(frozen=True)
class Drafted:
    """What was drafted at each place of one text."""

    start: int
    """The first place: the text's first new token."""
    chains: Int64[Tensor, " places"]
    """How deep a chain of first guesses goes along the text."""
    trees: Int64[Tensor, "places horizon"]
    """The row of the tree that holds the text's token at each depth, past all rows where none does."""

    def rounds(
        self, budgets: Sequence[int] = BUDGETS, *, end: int | None = None
    ) -> dict[Kind, Rounds]:
        """The rounds of the text, or of its first ``end`` tokens, by kind of tree and budget.

        A round is counted only where a whole horizon of the text follows, since the rest is not known.
        """
        count = len(self.trees)
        if end is not None:
            count = min(count, max(0, end - self.trees.shape[1] - self.start))
        by_kind: dict[Kind, Rounds] = {}
        for budget in budgets:
            chains = self.chains[:count].clamp_max(budget)
            by_kind["chain", budget] = Rounds.of(follow(chains.tolist()))
            trees = (self.trees[:count] <= budget).sum(1)
            by_kind["tree", budget] = Rounds.of(follow(trees.tolist()))
        return by_kind


@torch.no_grad()
def drafted(
    drafter: DFlashModel, llama: Llama, corpus: Corpus, budget: int = BUDGETS[-1]
) -> Iterator[Drafted]:
    """Draft trees of so many nodes at all places of each text.

    Args:
        drafter: in the target's dtype, on its device.
        llama: the target.
        corpus: texts of the target, on the device.
        budget: of the trees; smaller ones are their first nodes.
    """
    horizon = drafter.config.block_size - 1
    for i in range(len(corpus)):
        start, length = int(corpus.prompt_lens[i]), int(corpus.lengths[i])
        text = corpus.token_ids[i, :length].long()
        places = torch.arange(start, max(start, length - horizon), device=text.device)
        yield Drafted(start, *_depths(drafter, llama, text, places, budget))


def acceptance(
    drafter: DFlashModel, llama: Llama, corpus: Corpus, *, budgets: Sequence[int]
) -> list[dict[Kind, Rounds]]:
    """The rounds of each text, by kind of tree and budget; arguments as ``drafted`` takes them."""
    return [text.rounds(budgets) for text in drafted(drafter, llama, corpus, max(budgets))]


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
        tree = tree_at(log_probs, text[part], budget)
        trees.append(rows_along(tree, following))
    return torch.cat(chains), torch.cat(trees)

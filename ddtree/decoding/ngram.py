"""Prompt lookup: draft from what followed earlier occurrences of the text's last tokens.

No weights, no target features: any target can use it. It drafts well where text repeats itself
(code, lists, quotations, loops) and falls back on the text's own token counts elsewhere.
"""

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from ddtree.spec.contracts import BlockSize
from ddtree.spec.errors import require
from ddtree.spec.index import horizon_of

LENGTH_WEIGHT = 16.0  # one token more of agreement outweighs this many shorter matches
RECENCY_WEIGHT = 0.5  # the newest of equal matches weighs up to this much more than the oldest
BACKOFF = 0.02  # share of the token counts, so that a tree can branch where all matches agree


class NGramDrafter:
    """Lets every earlier occurrence of a suffix of the text vote for the tokens that followed."""

    def __init__(self, vocab_size: int, block_size: int, max_ngram: int = 4) -> None:
        """Draft ``block_size - 1`` tokens ahead; block size 1 drafts nothing.

        Args:
            vocab_size: of the target.
            block_size: tokens of one block, root included, at least 1.
            max_ngram: longest suffix that is told apart from a longer one, at least 1.
        """
        require(vocab_size >= 1, f"vocab_size must be at least 1, got {vocab_size}")
        require(block_size >= 1, f"block_size must be at least 1, got {block_size}")
        require(max_ngram >= 1, f"max_ngram must be at least 1, got {max_ngram}")
        self.vocab_size = vocab_size
        self.block_size = BlockSize(block_size)
        self.max_ngram = max_ngram
        self.target_layer_ids: tuple[int, ...] = ()

    def reset(self) -> None:
        """Nothing to forget: each draft is a function of the tokens alone."""

    def draft(
        self,
        token_ids: Int64[Tensor, " length"],
        features: Float[Tensor, "new width"] | None = None,
    ) -> Float32[Tensor, "1 horizon vocab"]:
        """Log-probs after the last of ``token_ids``; see ``Drafter.draft``.

        Raises:
            InputError: no tokens, or a token outside the vocabulary.
        """
        ids = token_ids.cpu()  # sums on the CPU have one order: the draft repeats bit for bit
        require(ids.numel() >= 1, "the n-gram drafter needs at least one token")
        if self.block_size == 1:
            return torch.empty(1, 0, self.vocab_size, device=token_ids.device)
        low, high = int(ids.min()), int(ids.max())
        require(
            low >= 0 and high < self.vocab_size,
            f"token ids reach from {low} to {high}; the vocabulary has {self.vocab_size}",
        )
        counts = torch.bincount(ids, minlength=self.vocab_size).double()
        counts /= counts.sum()
        votes = match_weights(ids, self.max_ngram)
        rows = [
            _mixed(self._votes_at(ids, votes, depth), counts)
            for depth in range(1, horizon_of(self.block_size) + 1)
        ]
        return torch.stack(rows).log().float().clamp(max=0)[None].to(token_ids.device)

    def _votes_at(
        self, ids: Int64[Tensor, " length"], votes: Float64[Tensor, " places"], depth: int
    ) -> Float64[Tensor, " vocab"]:
        """Weight of each token at ``depth``. A place near the end goes round: its text repeats."""
        place = torch.arange(votes.numel())
        period = ids.numel() - 1 - place
        followed = ids[place + 1 + (depth - 1) % period]
        return torch.bincount(followed, weights=votes, minlength=self.vocab_size)


def match_weights(ids: Int64[Tensor, " length"], max_ngram: int) -> Float64[Tensor, " length-1"]:
    """Weight of each earlier place: by how many tokens up to it agree with the last ones."""
    places = ids.numel() - 1
    length = torch.zeros(places, dtype=torch.float64)
    alive = torch.ones(places, dtype=torch.bool)
    for back in range(min(max_ngram, places)):
        # place p agrees one token further when ids[p - back] == ids[last - back]
        alive[:back] = False
        alive[back:] &= ids[: places - back] == ids[places - back]
        length += alive
    recency = 1 + RECENCY_WEIGHT * torch.arange(places, dtype=torch.float64) / max(places, 1)
    return torch.where(length > 0, LENGTH_WEIGHT**length * recency, 0.0)


def _mixed(
    votes: Float64[Tensor, " vocab"], counts: Float64[Tensor, " vocab"]
) -> Float64[Tensor, " vocab"]:
    """The votes with a light share of the token counts; the counts alone where nobody votes."""
    total = votes.sum()
    if total == 0:
        return counts
    return (1 - BACKOFF) * votes / total + BACKOFF * counts

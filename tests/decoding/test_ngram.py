"""The n-gram drafter: what it proposes, worked out by hand."""

import pytest
import torch

from ddtree.decoding import NGramDrafter
from ddtree.decoding.ngram import BACKOFF, LENGTH_WEIGHT, match_weights
from ddtree.spec import Budget, InputError, build_tree


def _best(text: list[int], block_size: int, max_ngram: int = 4, vocab: int = 12) -> list[int]:
    draft = NGramDrafter(vocab, block_size, max_ngram).draft(torch.tensor(text))
    return draft[0].argmax(-1).tolist()


def test_follows_the_earlier_occurrence() -> None:
    """After a repeated passage the draft is what followed it before."""
    assert _best([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], block_size=5) == [4, 5, 6, 7]


def test_goes_round_where_the_text_repeats() -> None:
    """A loop that is shorter than the horizon is continued for as long as the horizon is."""
    assert _best([9, 1, 2, 3, 1, 2, 3], block_size=8) == [1, 2, 3, 1, 2, 3, 1]


def test_longer_match_wins_over_more_and_newer_matches() -> None:
    """One place that agrees in three tokens outweighs several that agree in one."""
    text = [1, 2, 3, 7, 3, 8, 3, 8, 3, 8, 1, 2, 3]
    assert _best(text, block_size=2) == [7]
    assert _best(text, block_size=2, max_ngram=1) == [8]


def test_newer_of_equal_matches_wins() -> None:
    """Between two equally long matches the newer one wins."""
    assert _best([1, 5, 9, 1, 6, 9, 1], block_size=2) == [6]


def test_match_lengths() -> None:
    """Each earlier place weighs by the number of tokens that agree, and nothing without any."""
    weights = match_weights(torch.tensor([2, 3, 1, 2, 3, 3, 2, 3]), max_ngram=4)
    lengths = [
        0 if w == 0 else int(torch.log(w) / torch.log(torch.tensor(LENGTH_WEIGHT))) for w in weights
    ]
    # the last tokens are 3 2 3: place 1 agrees in "2 3", place 4 too, place 5 in "3" alone
    assert lengths == [0, 2, 0, 0, 2, 1, 0]


def test_log_probs_are_normalised_and_know_nothing_of_unseen_tokens() -> None:
    """Each depth's probabilities sum to 1, none above 1; tokens not in the text have none."""
    draft = NGramDrafter(12, 8).draft(torch.tensor([1, 2, 3, 1, 2]))
    assert draft.shape == (1, 7, 12)
    assert draft.dtype == torch.float32
    assert torch.allclose(draft.exp().sum(-1), torch.ones(1, 7))
    assert draft.max() <= 0
    assert torch.isneginf(draft[..., [0, *range(4, 12)]]).all()


def test_trees_can_branch_where_all_matches_agree() -> None:
    """The share of the token counts gives every depth a second candidate."""
    draft = NGramDrafter(12, 4).draft(torch.tensor([1, 2, 3, 1, 2, 3]))
    assert (torch.isfinite(draft[0]).sum(-1) == 3).all()
    assert draft[0, 0].exp()[[2, 3]].tolist() == pytest.approx([BACKOFF / 3] * 2)
    tree = build_tree(draft, torch.tensor([3]), Budget(16), 4)
    assert int(tree.num_nodes) == 17


def test_one_token_of_context() -> None:
    """A single token is all that is known: it is proposed again."""
    assert _best([5], block_size=3) == [5, 5]


def test_block_size_one_drafts_nothing() -> None:
    """Block size 1 has horizon 0: plain decoding."""
    assert NGramDrafter(12, 1).draft(torch.tensor([1, 2])).shape == (1, 0, 12)


def test_drafts_repeat_bit_for_bit() -> None:
    """The same text gives the same bits, whatever was drafted in between."""
    text = torch.randint(0, 40, (300,), generator=torch.Generator().manual_seed(1))
    drafter = NGramDrafter(40, 8)
    first = drafter.draft(text)
    drafter.draft(text[:100])
    assert torch.equal(first, drafter.draft(text))


def test_bad_input_is_refused() -> None:
    """Sizes below 1, no tokens and foreign tokens are refused with the numbers."""
    with pytest.raises(InputError, match="block_size must be at least 1, got 0"):
        NGramDrafter(12, 0)
    with pytest.raises(InputError, match="max_ngram must be at least 1, got 0"):
        NGramDrafter(12, 2, 0)
    with pytest.raises(InputError, match="at least one token"):
        NGramDrafter(12, 2).draft(torch.tensor([], dtype=torch.int64))
    with pytest.raises(InputError, match="from -1 to 3; the vocabulary has 12"):
        NGramDrafter(12, 2).draft(torch.tensor([3, -1]))

"""Rows about the text as a whole: where it ends, what is taken out of it, what the drafter is shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.catalogue.entry import Measured, Property, PropertyFault, Row
from ddtree.decoding.decoding import Generation
from ddtree.decoding.generate import generate
from ddtree.invariants.exact_target import ExactTarget
from ddtree.spec import BlockSize
from ddtree.spec.contracts import Acceptance, Commit, DraftTree, FlatMask, VerifyLayout

VOCAB = 11
CONTEXT = 64


@dataclass(frozen=True)
class TextCase:
    """A text to be written by an exact target."""

    prompt: tuple[int, ...]
    new_tokens: int
    stop: int | None = None
    """Token that ends the text."""
    mask: int = 0
    """Token that stands for "to be drafted"."""


class DecodingTarget:
    """One request of an exact target, from its prompt on."""

    max_context = CONTEXT
    vocab_size = VOCAB

    def __init__(self) -> None:
        self.reset()

    def reset(self, feature_layer_ids: tuple[int, ...] = ()) -> None:
        """Begin a new request."""
        self.prefix_len = 0
        self.exact = ExactTarget([[]], torch.arange(CONTEXT)[None], CONTEXT, VOCAB)

    @property
    def slot_table(self) -> Tensor:
        """The exact target's."""
        return self.exact.slot_table

    def prefill(self, token_ids: Tensor) -> Tensor:
        """Append the prompt; logits after its last token."""
        prompt = token_ids.tolist()
        self.exact = ExactTarget([prompt], torch.arange(CONTEXT)[None], CONTEXT, VOCAB)
        self.prefix_len = len(prompt)
        return torch.tensor(self.exact.linear(prompt)[1][-1])

    def rewind(self, prefix_len: int) -> None:
        """Drop all entries from ``prefix_len`` on."""
        self.prefix_len = prefix_len

    def features(self) -> None:
        """There are none."""

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Tensor:
        """The exact target's logits."""
        return self.exact.forward(tree, layout, mask)

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """The exact target's commit."""
        commit = self.exact.commit(layout, acceptance)
        self.prefix_len = int(commit.prefix_lens[0])
        return commit


class KnowingDrafter:
    """Drafts what the target will say, so that whole paths are accepted."""

    block_size = BlockSize(6)
    target_layer_ids: tuple[int, ...] = ()

    def reset(self) -> None:
        """Nothing is kept."""

    def draft(self, token_ids: Tensor, features: Tensor | None = None) -> Tensor:
        """Log-probs of the five tokens that follow."""
        text = token_ids.tolist()
        exact = ExactTarget([[]], torch.arange(1)[None], 1, VOCAB)
        logits = torch.full((1, self.block_size - 1, VOCAB), -4.0)
        for depth, token in enumerate(exact.greedy(text, self.block_size - 1)):
            logits[0, depth, token] = 0.0
        return logits.log_softmax(-1)


def right_text(case: TextCase) -> list[int]:
    """The prompt and the target's own tokens, one at a time, to the stop token or the last one asked for."""
    exact = ExactTarget([[]], torch.arange(1)[None], 1, VOCAB)
    new = exact.greedy(case.prompt, case.new_tokens)
    if case.stop in new:
        new = new[: new.index(case.stop) + 1]
    return [*case.prompt, *new]


def _rounds(case: TextCase, stop_ids: Sequence[int]) -> Generation:
    return generate(
        DecodingTarget(),
        KnowingDrafter(),
        torch.tensor(case.prompt),
        budget=5,
        max_new_tokens=case.new_tokens,
        topk=1,
        stop_ids=stop_ids,
    )


def written(case: TextCase) -> list[int]:
    """The text by draft trees."""
    stop_ids = () if case.stop is None else (case.stop,)
    return [*case.prompt, *_rounds(case, stop_ids).token_ids]


def _until(case: TextCase, ended: Callable[[Sequence[int]], bool]) -> list[int]:
    """Whole rounds until ``ended`` says so of a round's tokens."""
    made = _rounds(case, ())
    text = [*case.prompt, made.token_ids[0]]
    for one in made.rounds:
        text += one.new_token_ids
        if ended(one.new_token_ids):
            break
    return text


def _whole_rounds(case: TextCase) -> list[int]:
    """Every token of the round that holds the stop token."""
    return _until(case, lambda new: case.stop in new)


def _last_of_round(case: TextCase) -> list[int]:
    """Ends only where a round's last token is the stop token."""
    return _until(case, lambda new: new[-1] == case.stop)


def _without_stop(case: TextCase) -> list[int]:
    """The stop token taken off, as where it is written to the cache but not returned."""
    text = written(case)
    return text[:-1] if text[-1] == case.stop else text


def _text(implementation: Callable[[TextCase], list[int]], case: TextCase) -> Measured:
    return Measured(right_text(case), implementation(case))


TEXT = Property(
    "text",
    "The text is the prompt and the target's own tokens, each of them, up to and with the stop token.",
    _text,
)


def _without_masks(case: TextCase) -> list[int]:
    return [token for token in written(case) if token != case.mask]


def _to_first_mask(case: TextCase) -> list[int]:
    text = written(case)
    return text[: text.index(case.mask)] if case.mask in text else text


def _without_trailing_masks(case: TextCase) -> list[int]:
    text = written(case)
    while text and text[-1] == case.mask:
        text.pop()
    return text


BLOCK = 6
MASK = VOCAB
"""Of the toy drafter's block: a token of its own, outside the vocabulary."""


def root_first(root: int, masks: list[int]) -> list[int]:
    """The drafter's block: the root, then masks."""
    return [root, *masks[1:]]


def _root_masked(_: int, masks: list[int]) -> list[int]:
    return masks


def _root_last(root: int, masks: list[int]) -> list[int]:
    return [*masks[:-1], root]


def _root_twice(root: int, masks: list[int]) -> list[int]:
    return [root, root, *masks[2:]]


def follower(token: int) -> int:
    """The token that follows, for target and drafter alike."""
    return (3 * token + 1) % (VOCAB + 1)


def _accepted_of(implementation: Callable[[int, list[int]], list[int]], root: int) -> Measured:
    """Accepted drafted tokens of one block; the drafter reads what stands in it and fills the masks in."""
    block = implementation(root, [MASK] * BLOCK)
    drafted, last = list[int](), block[0]
    for token in block[1:]:
        last = follower(last) if token == MASK else token
        drafted.append(last)
    accepted, expected = 0, follower(root)
    for token in drafted:
        if token != expected:
            break
        accepted, expected = accepted + 1, follower(token)
    return Measured(BLOCK - 1, accepted)


ACCEPTED = Property(
    "accepted",
    "A drafter that knows the target's continuation has its whole block accepted.",
    _accepted_of,
)

ROW_44 = Row(
    44,
    "the published DDTree code",
    "the final clean-up strips tokens of the prompt",
    "a value taken for a marker although it is also content",
    "Drafted slots hold the mask token until they are filled, and at the end every mask token was taken "
    "out of the text. The prompt may hold one, and so may the answer.",
    (
        PropertyFault(
            "a prompt that holds the mask token",
            TEXT,
            written,
            _without_masks,
            lambda: TextCase((7, 3, 7, 1), 4, mask=7),
            [7, 3, 7, 1, 4, 2, 6, 0],
            [3, 1, 4, 2, 6, 0],
        ),
        PropertyFault(
            "the text cut at its first mask token",
            TEXT,
            written,
            _to_first_mask,
            lambda: TextCase((5, 3, 7, 1), 4, mask=7),
            [5, 3, 7, 1, 7, 8, 2, 0],
            [5, 3],
        ),
        PropertyFault(
            "mask tokens at the end stripped, although the target chose one",
            TEXT,
            written,
            _without_trailing_masks,
            lambda: TextCase((5, 3, 7, 1), 4, mask=0),
            [5, 3, 7, 1, 7, 8, 2, 0],
            [5, 3, 7, 1, 7, 8, 2],
        ),
    ),
)

ROW_45 = Row(
    45,
    "hipfire issue 483",
    "slot 0 of the draft block masked instead of holding the root",
    "a block shifted by one against its positions",
    "The block begins with the root, whose token is known; the others are masks to be filled. With slot 0 "
    "masked too the drafter does not know what to continue, and hardly a token is accepted.",
    (
        PropertyFault(
            "slot 0 masked: none of five tokens accepted",
            ACCEPTED,
            root_first,
            _root_masked,
            lambda: 4,
            5,
            0,
        ),
        PropertyFault(
            "the root in the last slot",
            ACCEPTED,
            root_first,
            _root_last,
            lambda: 4,
            5,
            0,
        ),
        PropertyFault(
            "the root in the first two slots: every draft is one position late",
            ACCEPTED,
            root_first,
            _root_twice,
            lambda: 4,
            5,
            0,
        ),
    ),
)

ROW_46 = Row(
    46,
    "lucebox issue 414",
    "generation goes on past a stop token inside an accepted path",
    "an end that is looked for at a round's end only",
    "One round accepts several tokens. The stop token was looked for in the last of them alone, so one in "
    "the middle of a path ended nothing.",
    (
        PropertyFault(
            "a stop token at depth 2 of a path of 5: the rest of the round is kept",
            TEXT,
            written,
            _whole_rounds,
            lambda: TextCase((1, 2, 3), 12, stop=7),
            [1, 2, 3, 9, 8, 7],
            [1, 2, 3, 9, 8, 7, 10, 0, 10, 4],
        ),
        PropertyFault(
            "the last token of each round alone is looked at",
            TEXT,
            written,
            _last_of_round,
            lambda: TextCase((1, 2, 3), 12, stop=7),
            [1, 2, 3, 9, 8, 7],
            [1, 2, 3, 9, 8, 7, 10, 0, 10, 4, 0, 4, 10, 6, 0],
        ),
        PropertyFault(
            "the stop token itself is lost",
            TEXT,
            written,
            _without_stop,
            lambda: TextCase((1, 2, 3), 12, stop=7),
            [1, 2, 3, 9, 8, 7],
            [1, 2, 3, 9, 8],
        ),
    ),
)

TEXTS = (ROW_44, ROW_45, ROW_46)

"""What a decoding run gives back, and how two runs compare."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ddtree.decoding.stops import FinishReason
from ddtree.spec.contracts import Acceptance, DraftTree

T = TypeVar("T")

TIE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 1.0}
"""Logit margins below which two passes over the same tokens may choose differently.

The order of summation depends on how many rows a pass has, so its logits differ in the last digits. On
the embedded target they differ by up to 1e-4 in float32 and by 0.75 in bfloat16 between a tree pass
and one token at a time; a margin is the difference of two of them.
"""


@dataclass(frozen=True)
class Choices:
    """The tokens that a run chose, and how close each choice was."""

    token_ids: tuple[int, ...]
    """New tokens, the stop token included; the prompt is not among them."""
    margins: tuple[float, ...]
    """Largest logit minus second largest at each token; empty where tokens were sampled."""
    runner_up_ids: tuple[int, ...]
    """Token of the second largest logit; empty where tokens were sampled."""


@dataclass(frozen=True)
class RoundStats:
    """One round of draft-tree decoding."""

    tree: DraftTree
    acceptance: Acceptance
    new_token_ids: tuple[int, ...]
    """Tokens that the round added to the text, cut at a stop token or at the last one wanted."""
    draft_seconds: float | None
    """Of the whole batch of the round, as ``verify_seconds``. None: the device drafts and verifies in one,
    and ``verify_seconds`` has both."""
    verify_seconds: float

    @property
    def num_nodes(self) -> int:
        """Real nodes of the tree, root included."""
        return int(self.tree.num_nodes[0])

    @property
    def num_accepted(self) -> int:
        """Accepted nodes, root included; as many tokens, bonus included, does the round yield."""
        return int(self.acceptance.num_accepted[0])


@dataclass(frozen=True)
class Generation(Choices):
    """A run of draft-tree decoding."""

    rounds: tuple[RoundStats, ...]
    finish_reason: FinishReason
    """What ended it: the number of tokens, a stop token, or a stop string."""
    prefill_seconds: float

    @property
    def stopped(self) -> bool:
        """Whether a stop token or string ended it (or else the number of tokens)."""
        return self.finish_reason != "length"

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round yielded on average; the first token comes from the prefill."""
        return (len(self.token_ids) - 1) / len(self.rounds) if self.rounds else 0.0

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """How many rounds accepted how many nodes, root included."""
        counts = [r.num_accepted for r in self.rounds]
        return {n: counts.count(n) for n in sorted(set(counts))}


@dataclass(frozen=True)
class Comparison:
    """Whether two runs chose the same tokens, and what happened where they first did not."""

    equal: bool
    index: int | None = None
    """First differing token; tokens before it are equal. None where all are."""
    expected_id: int | None = None
    """The baseline's token there; None where the baseline had ended."""
    found_id: int | None = None
    expected_margin: float | None = None
    """The baseline's own margin between its two best logits there."""
    found_margin: float | None = None
    is_tie: bool = False
    """Both runs were torn between the same two tokens by less than float error. What follows a tie
    may differ freely, so equality is known up to ``index`` only."""

    def __str__(self) -> str:
        """One sentence."""
        if self.equal:
            return "equal, token for token"
        margins = f"margins {self.expected_margin} (baseline) and {self.found_margin}"
        what = "a tie below float error" if self.is_tie else "DIFFERENT"
        return f"{what} at token {self.index}: {self.expected_id} and {self.found_id}, {margins}"


def compare(found: Choices, expected: Choices, dtype: torch.dtype = torch.float32) -> Comparison:
    """Compare a run with its baseline, token for token.

    Args:
        found: the run in question.
        expected: the baseline, ``autoregressive``'s.
        dtype: of the target's weights, which sets what counts as a tie (``TIE_TOLERANCE``).
    """
    pairs = list(zip(found.token_ids, expected.token_ids, strict=False))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if index == len(found.token_ids) == len(expected.token_ids):
        return Comparison(equal=True)
    found_id, expected_id = _at(found.token_ids, index), _at(expected.token_ids, index)
    found_margin, expected_margin = _at(found.margins, index), _at(expected.margins, index)
    torn = {found_id, _at(found.runner_up_ids, index)}
    is_tie = (
        found_margin is not None
        and expected_margin is not None
        and max(found_margin, expected_margin) < TIE_TOLERANCE[dtype]
        and torn == {expected_id, _at(expected.runner_up_ids, index)}
    )
    return Comparison(False, index, expected_id, found_id, expected_margin, found_margin, is_tie)


def top_two(
    logits: Float[Tensor, "rows vocab"],
) -> tuple[Float64[Tensor, " rows"], Int64[Tensor, " rows"]]:
    """Margin between the two largest logits of each row, and the second one's token."""
    best, chosen = logits.max(dim=-1)
    second, runner_up = logits.scatter(-1, chosen[:, None], -torch.inf).max(dim=-1)
    return (best - second).double(), runner_up


def _at(values: tuple[T, ...], index: int) -> T | None:
    return values[index] if index < len(values) else None

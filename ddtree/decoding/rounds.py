"""What drafts and verifies for the loop: a round of all held requests, launched and then read.

``HostRounds`` are driven step by step from the host, for any target and drafter. ``device_rounds`` holds
those whose state stays on the device.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.decoding.batch import BatchTarget
from ddtree.decoding.decoding import Generation, RoundStats, top_two
from ddtree.decoding.drafter import Drafter
from ddtree.decoding.processors import Processor, process_tree
from ddtree.decoding.stops import FinishReason
from ddtree.spec import round as spec_round
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import (
    Acceptance,
    Budget,
    Commit,
    DraftTree,
    VerifyLayout,
)
from ddtree.spec.mask import Form
from ddtree.spec.round import Round
from ddtree.spec.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """One text to be written."""

    prompt_ids: Int64[Tensor, " n"]
    max_new_tokens: int
    """Exactly so many come unless something ends the text before."""
    prompt_logits: Float[Tensor, " vocab"] | None = None
    """Logits after the prompt where the place that the request takes holds the prompt already."""


@dataclass
class Held:
    """A request in its place."""

    index: int
    request: Request
    sampling: Sampling | None
    prefill_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    runner_up_ids: list[int] = field(default_factory=list)
    rounds: list[RoundStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prompt: list[int] = self.request.prompt_ids.tolist()

    @property
    def text(self) -> list[int]:
        """Prompt and tokens; the last one is the next round's root."""
        return [*self._prompt, *self.tokens]

    @property
    def prefix_len(self) -> int:
        """Committed entries: all but the root."""
        return len(self._prompt) + len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Tokens that the text may still have."""
        return self.request.max_new_tokens - len(self.tokens)

    def result(self, reason: FinishReason) -> Generation:
        """What was made of the request."""
        return Generation(
            token_ids=tuple(self.tokens),
            margins=tuple(self.margins),
            runner_up_ids=tuple(self.runner_up_ids),
            rounds=tuple(self.rounds),
            finish_reason=reason,
            prefill_seconds=self.prefill_seconds,
        )


@dataclass(frozen=True)
class News:
    """What a round has brought a request."""

    token_ids: list[int]
    margins: list[float]
    """Of each token; nothing where tokens were sampled."""
    runner_up_ids: list[int]
    tree: DraftTree
    acceptance: Acceptance
    draft_seconds: float | None
    verify_seconds: float

    def stats(self, kept: Sequence[int]) -> RoundStats:
        """The round's statistics where only some of its tokens came into the text."""
        return RoundStats(
            self.tree, self.acceptance, tuple(kept), self.draft_seconds, self.verify_seconds
        )


Read = Callable[[], dict[int, News]]
"""Waits for a round, and gives each place its news."""


class Rounds(Protocol):
    """How the loop's rounds are run."""

    @property
    def ahead(self) -> int:
        """Rounds that may be launched before the one before them is read."""
        ...

    def begin(self, place: int, held: Held) -> None:
        """A request has begun in a place: the target has read its prompt, the first token is chosen."""
        ...

    def launch(self, held: Mapping[int, Held]) -> Read:
        """Run a round of the requests that are held, by place."""
        ...


class HostDrafters:
    """A drafter for each place, which drafts from what the host has read."""

    def __init__(self, drafter: Drafter, target: BatchTarget) -> None:
        """Each place drafts with a shallow copy of its own."""
        self._drafters = [drafter, *(copy.copy(drafter) for _ in range(target.max_batch - 1))]
        self._target = target
        self._device = target.slot_table.device
        self._features: dict[int, Tensor | None] = {}
        """By place: hidden states that the drafter has not seen."""

    def begin(self, place: int, held: Held) -> None:
        """Forget the request before; take the prompt's features."""
        self._drafters[place].reset()
        self.accepted(place, held.prefix_len)

    def draft(self, batch: Sequence[tuple[int, Held | None]]) -> Float[Tensor, "B horizon vocab"]:
        """Log-probs for the places given, on the target's device; unused ones get even log-probs."""
        drafts = [self._draft(place, held) if held else None for place, held in batch]
        some = next(draft for draft in drafts if draft is not None)
        even = torch.full_like(some, -math.log(some.shape[1]))
        return moved(
            torch.stack([even if draft is None else draft for draft in drafts]), self._device
        )

    def accepted(self, place: int, count: int) -> None:
        """Take the features of so many entries that the last pass has added."""
        if self._drafters[place].target_layer_ids:
            self._features[place] = self._target.take_features(place, count)

    def _draft(self, place: int, held: Held) -> Float[Tensor, "horizon vocab"]:
        return self._drafters[place].draft(torch.tensor(held.text), self._features.get(place))[0]


class HostRounds:
    """Rounds that are driven from the host, and read before the next is drafted."""

    ahead = 0

    def __init__(
        self,
        target: BatchTarget,
        drafter: Drafter,
        processors: Sequence[Processor],
        *,
        budget: int,
        topk: int | None,
        is_greedy: bool,
        ragged: bool,
        buffers: VerifyBuffers | None,
    ) -> None:
        self._target = target
        self._drafters = HostDrafters(drafter, target)
        self._watched = Watched(target, processors)
        self._verify_round = _round_for(target)
        self._device = target.slot_table.device
        self._budget = budget
        self._is_greedy = is_greedy
        self._topk, self._ragged, self._buffers = topk, ragged, buffers

    def begin(self, place: int, held: Held) -> None:
        """Begin to draft for the request."""
        self._drafters.begin(place, held)

    def launch(self, held: Mapping[int, Held]) -> Read:
        """Draft and verify. The target's tokens are not waited for yet."""
        begin = time.perf_counter()
        places = self._target.line_up(sorted(held))
        batch = [(place, held.get(place)) for place in places]
        roots = torch.tensor([one.tokens[-1] if one else 0 for _, one in batch])
        drafts = self._drafters.draft(batch)
        drafted = time.perf_counter()

        room = min(self._target.max_context - one.prefix_len - 1 for one in held.values())
        self._watched.contexts = [one.text if one else None for _, one in batch]
        result = self._verify_round(
            drafts,
            moved(roots, self._device),
            self._target.prefix_lens,
            self._watched,
            Budget(min(self._budget, room)),
            topk=self._topk,
            sampling=_sampling_of([one for _, one in batch]),
            ragged=self._ragged,
            buffers=self._buffers,
        )

        def read() -> dict[int, News]:
            found = _read(result, self._watched.logits if self._is_greedy else None)
            seconds = (drafted - begin, time.perf_counter() - drafted)
            news = {}
            for b, (place, one) in enumerate(batch):
                if one is not None:
                    tokens = [token for token in found.tokens[b] if token >= 0]
                    self._drafters.accepted(place, len(tokens))
                    margins, runner_ups = found.margins[b], found.runner_up_ids[b]
                    of_one = request_of(result.tree, result.acceptance, b)
                    news[place] = News(tokens, margins, runner_ups, *of_one, *seconds)
            return news

        return read


class Watched:
    """The target as a round sees it: its logits processed, and kept for the margins."""

    def __init__(self, target: BatchTarget, processors: Sequence[Processor] = ()) -> None:
        self._target = target
        self._processors = processors
        self.mask_form: Form = target.mask_form
        self.contexts: Sequence[Sequence[int] | None] = ()
        self.logits: Tensor = torch.empty(0)

    @property
    def slot_table(self) -> Int64[Tensor, "B max_context"]:
        """The target's."""
        return self._target.slot_table

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: Any) -> Float[Tensor, "T vocab"]:
        """The target's logits, processed."""
        logits = self._target.forward(tree, layout, mask)  # in the form that it asked for
        if self._processors:
            logits = process_tree(self._processors, self.contexts, tree, layout, logits)
        self.logits = logits
        return logits

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """The target's."""
        return self._target.commit(layout, acceptance)


def path_rows(result: Round, num_rows: int) -> Int64[Tensor, "B W"]:
    """The row of each accepted node among ``num_rows``; some row past a path's end."""
    starts = result.layout.qo_indptr[: len(result.token_ids), None].long()
    return (starts + result.acceptance.nodes.clamp(min=0)).clamp(max=num_rows - 1)


def request_of(tree: DraftTree, acceptance: Acceptance, b: int) -> tuple[DraftTree, Acceptance]:
    """The tree and the acceptance of request b alone."""
    own = slice(b, b + 1)
    return (
        DraftTree(
            tree.token_ids[own],
            tree.parents[own],
            tree.depths[own],
            tree.scores[own],
            tree.num_nodes[own],
        ),
        Acceptance(acceptance.nodes[own], acceptance.num_accepted[own], acceptance.bonus[own]),
    )


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for the device."""
    if tensor.device == device or device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class _Found:
    """What the host reads of a round, a list for each request."""

    tokens: list[list[int]]
    margins: list[list[float]]
    runner_up_ids: list[list[int]]


def _read(result: Round, logits: Tensor | None) -> _Found:
    """Bring a round's tokens, and with ``logits`` the margins along its paths, to the host at once."""
    batch, width = result.token_ids.shape
    parts = [result.token_ids]
    if logits is not None:
        rows = path_rows(result, len(logits))
        margins, runner_ups = top_two(logits[rows.flatten()])
        parts += [margins.view(torch.int64).view(batch, width), runner_ups.view(batch, width)]
    host = torch.stack(parts).cpu()  # waits for the round
    if logits is None:
        empty: list[list[float]] = [[]] * batch
        return _Found(host[0].tolist(), empty, [[]] * batch)
    return _Found(host[0].tolist(), host[1].view(torch.float64).tolist(), host[2].tolist())


def _round_for(target: BatchTarget) -> Callable[..., Round]:
    """The round that speaks the target's mask form."""
    if target.mask_form == "flat":
        return spec_round.verify_round
    from ddtree.impl import verify_round

    return verify_round


def _sampling_of(batch: Sequence[Held | None]) -> Sampling | None:
    """The sampling of a round: all requests' own seeds; of unused places, any."""
    samplings = [held.sampling if held else None for held in batch]
    common = next(sampling for held, sampling in zip(batch, samplings, strict=True) if held)
    if common is None:
        return None
    seeds = [sampling.seeds(1)[0] if sampling else 0 for sampling in samplings]
    return replace(common, seed=seeds)

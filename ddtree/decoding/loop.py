"""The loop: draft, verify and read the new tokens of a batch of requests, round after round.

Requests that are done leave at once, and waiting ones take their places. One request is a batch of one.
The host waits for the device once a round, where it reads the new tokens (and once more where logits
processors, which are Python, have to know the trees).
"""

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.decoding.batch import BatchTarget
from ddtree.decoding.decoding import Generation, RoundStats, top_two
from ddtree.decoding.drafter import Drafter
from ddtree.decoding.processors import Processor, process, process_tree
from ddtree.decoding.stops import FinishReason, Stops
from ddtree.spec import round as spec_round
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import (
    Acceptance,
    Budget,
    Commit,
    DraftTree,
    FlatMask,
    VerifyLayout,
)
from ddtree.spec.errors import require
from ddtree.spec.mask import Form
from ddtree.spec.round import Round
from ddtree.spec.sampling import (
    Sampling,
    first_argmax,
    position_uniforms,
    sample,
    target_distribution,
)

OnNews = Callable[[int, Sequence[int], FinishReason | None], None]
"""Told a request's index, its new tokens as they come, and with the last of them what ended it."""


@dataclass(frozen=True)
class Request:
    """One text to be written."""

    prompt_ids: Int64[Tensor, " n"]
    max_new_tokens: int
    """Exactly so many come unless something ends the text before."""
    prompt_logits: Float[Tensor, " vocab"] | None = None
    """Logits after the prompt where the place that the request takes holds the prompt already."""


@dataclass
class _Held:
    """A request in its place."""

    index: int
    request: Request
    drafter: Drafter
    sampling: Sampling | None
    prefill_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    runner_up_ids: list[int] = field(default_factory=list)
    rounds: list[RoundStats] = field(default_factory=list)
    features: Tensor | None = None
    """Hidden states that the drafter has not seen."""

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

    def draft(self) -> Float[Tensor, "horizon vocab"]:
        """Log-probs of what may follow."""
        return self.drafter.draft(torch.tensor(self.text), self.features)[0]

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


def decode(
    target: BatchTarget,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    budget: int,
    topk: int | None = None,
    sampling: Sampling | None = None,
    stops: Stops | None = None,
    processors: Sequence[Processor] = (),
    ragged: bool = False,
    buffers: VerifyBuffers | None = None,
    on_news: OnNews | None = None,
) -> list[Generation]:
    """Decode requests by draft trees: the target's own tokens, several a round and request.

    A request's text depends on its prompt and seed, not on the requests beside it or on when its turn
    comes (up to float error, where a target's matrix products depend on the rows of a pass).

    Args:
        target: verifies the trees, ``max_batch`` requests at a time.
        drafter: proposes them. Each place drafts with a shallow copy of its own.
        requests: what to decode. They begin in order.
        budget: most non-root nodes of a tree. Where the context of a request has room for fewer, fewer
            are drafted.
        topk: candidates kept at each depth; 1: a chain; None: all that the budget can use.
        sampling: how the target chooses; None: greedily. One seed s gives request i the seed s + i.
        stops: what ends a text before its number of tokens.
        processors: applied to the target's logits along each path (``processors.py``).
        ragged: verify ``num_nodes`` rows instead of ``budget + 1``.
        buffers: run the rounds through fixed buffers, as under a captured graph.
        on_news: told the tokens of each request as they come.

    Returns:
        For each request its tokens, with the margin of each greedy choice, and statistics.

    Raises:
        InputError: bad arguments, or a request that exceeds the target's context. Nothing is begun then.
    """
    require(budget >= 0, f"budget must be at least 0, got {budget}")
    for request in requests:
        require_lengths(target.max_context, request.prompt_ids, request.max_new_tokens)
        require(
            request.prompt_logits is None or not drafter.target_layer_ids,
            "prompt_logits cannot be used with a drafter that reads features",
        )
    loop = _Loop(target, drafter, requests, sampling, stops or Stops(), processors, on_news)
    options = {"topk": topk, "ragged": ragged, "buffers": buffers}
    while loop.waiting or loop.held:
        loop.admit(budget)
        if loop.held:
            loop.round(budget, **options)
    return [loop.done[i] for i in range(len(requests))]


class _Loop:
    """Requests that wait, that are held in the target's places, and that are done."""

    def __init__(
        self,
        target: BatchTarget,
        drafter: Drafter,
        requests: Sequence[Request],
        sampling: Sampling | None,
        stops: Stops,
        processors: Sequence[Processor],
        on_news: OnNews | None,
    ) -> None:
        self.waiting = deque(enumerate(requests))
        self.held: dict[int, _Held] = {}
        """By place."""
        self.done: dict[int, Generation] = {}
        """By index."""
        self._target = target
        self._stops = stops
        self._processors = processors
        self._on_news = on_news
        self._is_greedy = is_greedy(sampling)
        self._samplings = _samplings(sampling, len(requests))
        self._drafters = [drafter, *(copy.copy(drafter) for _ in range(target.max_batch - 1))]
        self._watched = _Watched(target, processors)
        self._verify_round = _round_for(target)
        self._device = target.slot_table.device
        target.watch(drafter.target_layer_ids)

    def admit(self, budget: int) -> None:
        """Begin waiting requests in free places, as long as there is memory for them."""
        for place in range(self._target.max_batch):
            while self.waiting and place not in self.held:
                index, request = self.waiting[0]
                entries = request.prompt_ids.numel() + request.max_new_tokens + budget - 1
                reserve = min(entries, self._target.max_context)
                if self.held and not self._target.can_begin(reserve):
                    return  # in turn: a shorter one does not overtake
                self.waiting.popleft()
                self._begin(place, index, request, reserve)

    def _begin(self, place: int, index: int, request: Request, reserve: int) -> None:
        drafter = self._drafters[place]
        drafter.reset()
        held = self.held[place] = _Held(index, request, drafter, self._samplings[index])
        begin = time.perf_counter()
        ids, logits = request.prompt_ids, request.prompt_logits
        if logits is None:
            logits = self._target.begin(place, ids, reserve)
            if drafter.target_layer_ids:
                held.features = self._target.take_features(place, ids.numel())
        else:
            self._target.rewind(place, ids.numel())
        if self._processors:
            logits = process(self._processors, ids[None].to(logits.device), logits[None])[0]
        first = choose(logits, ids.numel() - 1, held.sampling)
        margins, runner_ups = (found.tolist() for found in top_two(logits[None]))
        held.prefill_seconds = time.perf_counter() - begin
        self._add(place, [first], margins, runner_ups)

    def round(self, budget: int, **options: Any) -> None:
        """Draft, verify, and read the new tokens of all held requests."""
        begin = time.perf_counter()
        places = self._target.line_up(sorted(self.held))
        batch = [self.held.get(place) for place in places]
        roots = torch.tensor([held.tokens[-1] if held else 0 for held in batch])
        drafts = _stack([held.draft() if held else None for held in batch])
        drafts = _to(drafts, self._device)
        drafted = time.perf_counter()

        room = min(self._target.max_context - held.prefix_len - 1 for held in self.held.values())
        self._watched.contexts = [held.text if held else None for held in batch]
        result = self._verify_round(
            drafts,
            _to(roots, self._device),
            self._target.prefix_lens,
            self._watched,
            Budget(min(budget, room)),
            sampling=self._sampling_of(batch),
            **options,
        )
        found = _read(result, self._watched.logits if self._is_greedy else None)

        seconds = (drafted - begin, time.perf_counter() - drafted)
        for b, (place, held) in enumerate(zip(places, batch, strict=True)):
            if held is None:
                continue
            new = [token for token in found.tokens[b] if token >= 0]
            if held.drafter.target_layer_ids:
                held.features = self._target.take_features(place, len(new))
            tree, acceptance = _request_of(result, b)
            stats = partial(
                RoundStats, tree, acceptance, draft_seconds=seconds[0], verify_seconds=seconds[1]
            )
            self._add(place, new, found.margins[b], found.runner_up_ids[b], stats)

    def _add(
        self,
        place: int,
        new: Sequence[int],
        margins: Sequence[float],
        runner_up_ids: Sequence[int],
        stats: Callable[..., RoundStats] | None = None,
    ) -> None:
        """Add tokens to a request, up to its end; a request that has ended leaves its place."""
        held = self.held[place]
        kept, reason = self._stops.cut(held.tokens, new, held.room)
        held.tokens += kept
        if self._is_greedy:
            held.margins += margins[: len(kept)]
            held.runner_up_ids += runner_up_ids[: len(kept)]
        if stats is not None:
            held.rounds.append(stats(new_token_ids=tuple(kept)))
        if reason is not None:
            self.done[held.index] = held.result(reason)
            del self.held[place]
            self._target.free(place)
        if self._on_news:
            self._on_news(held.index, kept, reason)

    def _sampling_of(self, batch: Sequence[_Held | None]) -> Sampling | None:
        """The sampling of a round: all requests' own seeds; of unused places, any."""
        samplings = [held.sampling if held else None for held in batch]
        common = next(sampling for held, sampling in zip(batch, samplings, strict=True) if held)
        if common is None:
            return None
        seeds = [sampling.seeds(1)[0] if sampling else 0 for sampling in samplings]
        return replace(common, seed=seeds)


class _Watched:
    """The target as a round sees it: its logits processed, and kept for the margins."""

    def __init__(self, target: BatchTarget, processors: Sequence[Processor]) -> None:
        self._target = target
        self._processors = processors
        self.mask_form: Form = target.mask_form
        self.contexts: Sequence[Sequence[int] | None] = ()
        self.logits: Tensor = torch.empty(0)

    @property
    def slot_table(self) -> Int64[Tensor, "B max_context"]:
        return self._target.slot_table

    def forward(
        self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask
    ) -> Float[Tensor, "T vocab"]:
        logits = self._target.forward(tree, layout, mask)
        if self._processors:
            logits = process_tree(self._processors, self.contexts, tree, layout, logits)
        self.logits = logits
        return logits

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        return self._target.commit(layout, acceptance)


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
        starts = result.layout.qo_indptr[:batch, None].long()
        rows = (starts + result.acceptance.nodes.clamp(min=0)).clamp(max=len(logits) - 1)
        margins, runner_ups = top_two(logits[rows.flatten()])
        parts += [margins.view(torch.int64).view(batch, width), runner_ups.view(batch, width)]
    host = torch.stack(parts).cpu()  # waits for the round
    if logits is None:
        empty: list[Any] = [[]] * batch
        return _Found(host[0].tolist(), empty, empty)
    return _Found(host[0].tolist(), host[1].view(torch.float64).tolist(), host[2].tolist())


def _request_of(result: Round, b: int) -> tuple[DraftTree, Acceptance]:
    """The tree and the acceptance of request b alone."""
    tree, acceptance, own = result.tree, result.acceptance, slice(b, b + 1)
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


def _stack(drafts: Sequence[Tensor | None]) -> Float[Tensor, "B horizon vocab"]:
    """The drafts of a round; unused places get even log-probs."""
    some = next(draft for draft in drafts if draft is not None)
    even = torch.full_like(some, -math.log(some.shape[1]))
    return torch.stack([even if draft is None else draft for draft in drafts])


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for the device."""
    if tensor.device == device or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _round_for(target: BatchTarget) -> Callable[..., Round]:
    """The round that speaks the target's mask form."""
    if target.mask_form == "flat":
        return spec_round.verify_round
    from ddtree.impl import verify_round

    return verify_round


def _samplings(sampling: Sampling | None, count: int) -> list[Sampling | None]:
    """Each request's own sampling."""
    if sampling is None:
        return [None] * count
    return [replace(sampling, seed=seed) for seed in sampling.seeds(count)]


def is_greedy(sampling: Sampling | None) -> bool:
    """Whether the target's likeliest token is the choice."""
    return sampling is None or sampling.temperature == 0


def choose(logits: Float[Tensor, " vocab"], position: int, sampling: Sampling | None) -> int:
    """The token after ``position``, chosen as a round chooses it."""
    row = logits[None]
    if sampling is None or sampling.temperature == 0:
        return int(first_argmax(row))
    probs = target_distribution(row, sampling.temperature, sampling.top_k, sampling.top_p)
    at = torch.tensor([position], device=logits.device)
    return int(sample(probs, position_uniforms(sampling.seeds(1)[0], at)))


def require_lengths(max_context: int, prompt_ids: Tensor, max_new_tokens: int) -> None:
    """Refuse a prompt that is none, and more tokens than the context holds.

    Raises:
        InputError: with the numbers.
    """
    require(
        prompt_ids.ndim == 1 and prompt_ids.numel() >= 1,
        f"prompt_ids has shape {list(prompt_ids.shape)}; expected [n] with at least one token",
    )
    require(max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {max_new_tokens}")
    total = prompt_ids.numel() + max_new_tokens
    require(
        total <= max_context,
        f"{prompt_ids.numel()} prompt tokens and {max_new_tokens} new ones make {total}; "
        f"the target's context holds {max_context}",
    )

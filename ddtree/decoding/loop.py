"""The loop: draft, verify and read the new tokens of a batch of requests, round after round.

Requests that are done leave at once, and waiting ones take their places. One request is a batch of one.
``rounds.py`` and ``device_rounds.py`` run the rounds. The host waits for the device where it reads a
round's new tokens: on the device's own rounds while the next one is running already. It also waits where a
request begins, for its first token, and once more a round where logits processors, which are Python, have
to know the trees.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree.decoding.batch import BatchTarget
from ddtree.decoding.capabilities import require_tokens
from ddtree.decoding.decoding import Generation, RoundStats, top_two
from ddtree.decoding.drafter import Drafter
from ddtree.decoding.ngram import NGramDrafter
from ddtree.decoding.processors import Processor, process
from ddtree.decoding.rounds import Held, HostRounds, News, Read, Request, Rounds
from ddtree.decoding.stops import FinishReason, Stops
from ddtree.decoding.target import HFTarget
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.errors import InputError, require
from ddtree.spec.sampling import (
    Sampling,
    first_argmax,
    position_uniforms,
    sample,
    target_distribution,
)

OnNews = Callable[[int, Sequence[int], FinishReason | None], None]
"""Told a request's index, its new tokens as they come, and with the last of them what ended it."""
OnRound = Callable[[int, RoundStats], None]
"""Told a request's index and each of its rounds, just before the tokens of it."""


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
    on_device: bool | None = None,
    on_news: OnNews | None = None,
    on_round: OnRound | None = None,
) -> list[Generation]:
    """Decode requests by draft trees: the target's own tokens, several a round and request.

    A request's text depends on its prompt and seed, not on the requests beside it or on when its turn
    comes (up to float error, where a target's matrix products depend on the rows of a pass).

    Args:
        target: verifies the trees, ``max_batch`` requests at a time.
        drafter: proposes them. Each place drafts with a shallow copy of its own.
        requests: what to decode. They begin in order.
        budget: most non-root nodes of a tree; 0: plain decoding, and the drafter is not used. Where the
            context of a request has room for fewer, fewer are drafted.
        topk: candidates kept at each depth; 1: a chain; None: all that the budget can use.
        sampling: how the target chooses; None: greedily. One seed s gives request i the seed s + i.
        stops: what ends a text before its number of tokens.
        processors: applied to the target's logits along each path (``processors.py``).
        ragged: verify ``num_nodes`` rows instead of ``budget + 1``.
        buffers: run the rounds through fixed buffers, as under a captured graph.
        on_device: keep the rounds' state on the device, where a CUDA device captures them in one graph: of a
            ``PagedTarget`` without processors and buffers, where every context has room for a whole tree
            at its end, with a DFlash drafter or one that reads no features (which drafts on the host). True:
            insist; False: never; None: on a CUDA device, where it can be.
        on_news: told the tokens of each request as they come.
        on_round: told the rounds, as the result has them.

    Returns:
        For each request its tokens, with the margin of each greedy choice, and statistics.

    Raises:
        InputError: bad arguments, a request that exceeds the target's context, or ``on_device`` where that
            cannot be. Nothing is begun then.
    """
    require(budget >= 0, f"budget must be at least 0, got {budget}")
    if budget == 0:
        drafter = NGramDrafter(target.vocab_size, 1)  # nothing is drafted where nothing is verified
    require_requests(target, requests)
    require(
        not drafter.target_layer_ids or all(one.prompt_logits is None for one in requests),
        "prompt_logits cannot be used with a drafter that reads features",
    )
    target.watch(drafter.target_layer_ids)
    rounds = _rounds_for(
        target, drafter, requests, processors, budget=budget, topk=topk, sampling=sampling,
        ragged=ragged, buffers=buffers, on_device=on_device,
    )  # fmt: skip
    loop = _Loop(
        target, rounds, requests, sampling, stops or Stops(), processors, on_news, on_round
    )
    while loop.waiting or loop.held:
        loop.admit(budget)
        loop.round()
    return [loop.done[i] for i in range(len(requests))]


class _Loop:
    """Requests that wait, that are held in the target's places, and that are done."""

    def __init__(
        self,
        target: BatchTarget,
        rounds: Rounds,
        requests: Sequence[Request],
        sampling: Sampling | None,
        stops: Stops,
        processors: Sequence[Processor],
        on_news: OnNews | None,
        on_round: OnRound | None,
    ) -> None:
        self.waiting = deque(enumerate(requests))
        self.held: dict[int, Held] = {}
        """By place."""
        self.done: dict[int, Generation] = {}
        """By index."""
        self._target = target
        self._rounds = rounds
        self._launched: deque[tuple[Mapping[int, Held], Read]] = deque()
        """Rounds that are not read yet, with who was held when they were launched."""
        self._stops = stops
        self._processors = processors
        self._on_news, self._on_round = on_news, on_round
        self._is_greedy = is_greedy(sampling)
        self._samplings = _samplings(sampling, len(requests))

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
        held = self.held[place] = Held(index, request, self._samplings[index])
        begin = time.perf_counter()
        ids, logits = request.prompt_ids, request.prompt_logits
        if logits is None:
            logits = self._target.begin(place, ids, reserve)
        else:
            self._target.rewind(place, ids.numel())
        if self._processors:
            logits = process(self._processors, ids[None].to(logits.device), logits[None])[0]
        first = choose(logits, ids.numel() - 1, held.sampling)
        margins, runner_ups = (found.tolist() for found in top_two(logits[None]))
        held.prefill_seconds = time.perf_counter() - begin
        self._add(place, [first], margins, runner_ups)
        if place in self.held:
            self._rounds.begin(place, held)

    def round(self) -> None:
        """Launch a round of all held requests, unless those that run end them all; read one that is due."""
        count = len(self._launched)
        if any(held.room > count for held in self.held.values()):  # a round gives a token at least
            self._launched.append((dict(self.held), self._rounds.launch(self.held)))
            if count < self._rounds.ahead:
                return
        if not self.held:
            return
        launched, read = self._launched.popleft()
        for place, news in read().items():
            if self.held.get(place) is launched[place]:  # or else it has ended since
                self._add(place, news.token_ids, news.margins, news.runner_up_ids, news)

    def _add(
        self,
        place: int,
        new: Sequence[int],
        margins: Sequence[float],
        runner_up_ids: Sequence[int],
        news: News | None = None,
    ) -> None:
        """Add tokens to a request, up to its end; a request that has ended leaves its place."""
        held = self.held[place]
        kept, reason = self._stops.cut(held.tokens, new, held.room)
        held.tokens += kept
        if self._is_greedy:
            held.margins += margins[: len(kept)]
            held.runner_up_ids += runner_up_ids[: len(kept)]
        if news is not None:
            held.rounds.append(news.stats(kept))
            if self._on_round:
                self._on_round(held.index, held.rounds[-1])
        if reason is not None:
            self.done[held.index] = held.result(reason)
            del self.held[place]
            self._target.free(place)
        if self._on_news:
            self._on_news(held.index, kept, reason)


def _rounds_for(
    target: BatchTarget,
    drafter: Drafter,
    requests: Sequence[Request],
    processors: Sequence[Processor],
    *,
    budget: int,
    topk: int | None,
    sampling: Sampling | None,
    ragged: bool,
    buffers: VerifyBuffers | None,
    on_device: bool | None,
) -> Rounds:
    """Rounds on the device where they are wanted and can be, or else those of the host."""
    is_cuda = target.slot_table.device.type == "cuda"
    if on_device or (on_device is None and is_cuda and target.mask_form != "flat"):
        from ddtree.decoding.device_rounds import device_rounds  # needs Triton

        found = device_rounds(
            target, drafter, requests, budget=budget, topk=topk, sampling=sampling, ragged=ragged,
            is_watched=bool(processors) or buffers is not None,
        )  # fmt: skip
        if not isinstance(found, str):
            return found
        require(not on_device, f"these rounds cannot be run on the device: {found}")
    return HostRounds(
        target, drafter, processors, budget=budget, topk=topk, is_greedy=is_greedy(sampling),
        ragged=ragged, buffers=buffers,
    )  # fmt: skip


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


def require_requests(target: BatchTarget | HFTarget, requests: Sequence[Request]) -> None:
    """Refuse a prompt that is none, that the target has no tokens for, or that exceeds its context.

    Raises:
        InputError: with the numbers, and of several prompts which it is.
    """
    for i, request in enumerate(requests):
        try:
            require_lengths(target.max_context, request.prompt_ids, request.max_new_tokens)
            require_tokens(request.prompt_ids, target.vocab_size, 0, target.max_context)
        except InputError as error:
            which = f"prompt {i}: " if len(requests) > 1 else ""
            raise InputError(f"{which}{error}") from None


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

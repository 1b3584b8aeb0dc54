"""Choosing the budget: what a round costs on this machine, what it yields, and which tree pays best.

A larger tree yields more tokens a round, and its verify pass costs more. Costs come from rounds of the real
loop: the real target, the real prefixes, the batch full. Yields are read off texts that the target wrote
(``acceptance.py``): exactly the rounds that those texts would have had, at every budget and topk. What is
extrapolated is that other prompts accept as these do, and that a round costs the same at every topk.
"""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from ddtree.decoding.acceptance import Rounds, follow, rows_of_text
from ddtree.decoding.batch import BatchTarget
from ddtree.decoding.completion import (
    NGRAM_BLOCK_SIZE,
    Prompt,
    attention_of,
    batch_target,
    drafter_of,
    encode_all,
    prompts_of,
)
from ddtree.decoding.drafter import Drafter
from ddtree.decoding.generate import autoregressive, stop_ids_of
from ddtree.decoding.loop import decode, require_requests
from ddtree.decoding.restored import as_it_was
from ddtree.decoding.rounds import Request
from ddtree.decoding.stops import Stops
from ddtree.decoding.target import HFTarget
from ddtree.decoding.tuning_results import (
    Accepted,
    Cost,
    Key,
    Plain,
    Times,
    Tuning,
    key_of,
    store,
)
from ddtree.spec.errors import require, require_int
from ddtree.spec.index import horizon_of
from ddtree.spec.sampling import Sampling

PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a Python function that returns the n-th prime number.",
    "List the seven days of the week and one thing to do on each.",
    "Summarise the plot of a story about a lost dog in three sentences.",
    "Translate into French: the train leaves at eight o'clock in the morning.",
    'Return a JSON array of three people, each with "name", "age" and "city".',
)
"""What is decoded where no prompts are given: questions, code, a list, structured text."""
BUDGETS = (3, 7, 15, 31, 63)
"""Measured on a CPU: ``q_len`` is one more, so that it fills tiles."""
BUDGETS_CUDA = (7, 15, 31, 63, 127, 255)
TOPKS: tuple[int | None, ...] = (1, 2, 4, 8, None)
SWEEPS = 2
"""Through all budgets, there and back: a machine that slows down wrongs nobody."""
SWEEP_UNITS = 16
"""A cost's share of the progress, in tokens."""

OnProgress = Callable[[int, int, str], None]
"""Told how much is done, of how much, and what is going on."""


def tune(
    model: Any,
    tokenizer: Any,
    prompts: Prompt | Sequence[Prompt] | None = None,
    *,
    drafter: str | Path = "ngram",
    budgets: Sequence[int] | None = None,
    topks: Sequence[int | None] = TOPKS,
    batch_size: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    rounds: int = 8,
    attention: Literal["auto", "dense", "paged"] = "auto",
    on_progress: OnProgress | None = None,
) -> Tuning:
    """Measure on this machine, store the result, and return it: ``budget="auto"`` then uses it.

    Args:
        model: a Transformers causal LM; it stays where it is, and is given back as ``ddtree.generate`` does.
        tokenizer: the model's.
        prompts: like those that will come; None: a few questions (``PROMPTS``).
        drafter: as ``ddtree.generate`` takes it, by name.
        budgets: to be measured, each at least 1; None: some that suit the device.
        topks: to be compared; None: all candidates.
        batch_size: requests that will be decoded at once.
        max_new_tokens: of each text, on which acceptance is read.
        temperature: of the texts; 0: greedy.
        rounds: timed for each budget, at most.
        attention: as ``ddtree.generate`` takes it.
        on_progress: told how far it is.

    Raises:
        InputError: as ``measure``, and if the cache folder cannot be written.
    """
    require_int("batch_size", batch_size, 1)
    require_int("max_new_tokens", max_new_tokens, 1)
    if budgets is None:
        budgets = BUDGETS_CUDA if model.device.type == "cuda" else BUDGETS
    require(bool(budgets), "there is no budget to measure")
    ids = encode_all(tokenizer, default_prompts(tokenizer, prompts))
    attention = attention_of(model, attention)
    size = max(prompt.numel() for prompt in ids) + max_new_tokens + max(budgets)
    with as_it_was(model):
        target, one = batch_target(model, batch_size, attention, size)
        key = key_of(model, drafter, attention, batch_size, NGRAM_BLOCK_SIZE)
        tuning = measure(
            target,
            HFTarget(model),
            drafter_of(drafter, one),
            ids,
            key=key,
            budgets=budgets,
            topks=topks,
            max_new_tokens=max_new_tokens,
            stops=Stops(stop_ids_of(model)),
            temperature=temperature,
            rounds=rounds,
            on_progress=on_progress,
        )
    store(tuning)
    return tuning


def default_prompts(
    tokenizer: Any, prompts: Prompt | Sequence[Prompt] | None = None
) -> Sequence[Prompt]:
    """The prompts given, or ours: questions where the tokenizer has a chat template, else texts."""
    if prompts is not None:
        return prompts_of(prompts)
    if getattr(tokenizer, "chat_template", None):
        return [[{"role": "user", "content": text}] for text in PROMPTS]
    return PROMPTS


def measure(
    target: BatchTarget,
    plain: HFTarget,
    drafter: Drafter,
    prompts: Sequence[Int64[Tensor, " n"]],
    *,
    key: Key,
    budgets: Sequence[int],
    topks: Sequence[int | None],
    max_new_tokens: int,
    stops: Stops,
    temperature: float = 0.0,
    rounds: int = 8,
    on_progress: OnProgress | None = None,
) -> Tuning:
    """Decode the prompts plainly, read acceptance off the texts, and time rounds of every budget.

    Args:
        target: of ``key.batch_size`` places; its rounds are timed.
        plain: of the same model: writes the texts.
        drafter: of one request.
        prompts: token ids.
        key: what the result holds for.
        budgets, topks, max_new_tokens, temperature, rounds: as ``tune`` takes them.
        stops: what ends a text.
        on_progress: told how far it is.

    Raises:
        InputError: a budget or topk below 1, a drafter that drafts nothing, texts too short to read
            anything off, or more tokens than the context holds.
    """
    budgets = sorted(set(budgets))
    for name, values in {"budget": budgets, "topk": [k for k in topks if k is not None]}.items():
        for value in values:
            require_int(name, value, 1)
    require(bool(budgets) and bool(topks), "there is no budget or no topk to measure")
    require(bool(prompts), "there are no prompts to measure with")
    require_int("rounds", rounds, 1)
    horizon = horizon_of(drafter.block_size)
    require(horizon >= 1, f"the drafter's block size is {drafter.block_size}: it drafts nothing")
    require(
        max_new_tokens > horizon,
        f"max_new_tokens is {max_new_tokens}; a round is read off {horizon + 1}, the drafter's block size",
    )
    require_requests(plain, [Request(prompt, max_new_tokens) for prompt in prompts])
    run = _Run(target, plain, drafter, prompts, max_new_tokens, stops, temperature, rounds)
    most = len(prompts) * 2 * max_new_tokens + SWEEPS * (len(budgets) + 2) * SWEEP_UNITS
    say = _Progress(on_progress, most)

    texts = [run.text(i, say) for i in range(len(prompts))]
    rows = [
        rows_of_text(
            plain,
            drafter,
            torch.cat([prompt, torch.tensor(text)]),
            prompt.numel(),
            budget=budgets[-1],
            topks=topks,
            on_place=lambda: say(1, "drafting along the texts"),
        )
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    accepted = [_accepted(rows, budget, topk) for topk in topks for budget in budgets]
    if not accepted[0].rounds:
        longest = max(map(len, texts))
        require(
            False,
            f"no text has the {horizon + 1} new tokens that a round is read off (the longest has {longest}): "
            "ask for more new tokens, or give prompts that the target answers at length",
        )
    say.at(len(prompts) * 2 * max_new_tokens)
    plain_cost, costs = run.costs(budgets, rows, topks[-1], say)
    say.at(most)
    lens = [prompt.numel() for prompt in prompts]
    longest = max(length + len(text) for length, text in zip(lens, texts, strict=True))
    return Tuning(
        key=key,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: version(name) for name in ("torch", "transformers")},
        prompts=len(prompts),
        prefix_lens=(min(lens), longest),
        new_tokens=sum(map(len, texts)),
        temperature=temperature,
        horizon=horizon,
        plain=plain_cost,
        costs=tuple(costs),
        accepted=tuple(accepted),
    )


def _accepted(rows: Sequence[dict[int | None, Tensor]], budget: int, topk: int | None) -> Accepted:
    """The rounds of all texts together, and of the texts that accept least and most."""
    each = [Rounds.of(_tokens(of_text[topk], budget)) for of_text in rows]
    whole = sum(each, Rounds())
    lengths = [found.length for found in each if found.rounds] or [float("nan")]
    return Accepted(
        budget, topk, whole.rounds, whole.length, min(lengths), max(lengths), whole.by_depth
    )


def _tokens(rows: Int64[Tensor, "places horizon"], budget: int) -> list[int]:
    """Tokens of each round that decoding the text with the budget has."""
    return follow((rows <= budget).sum(1).tolist())


class _Progress:
    """How far a run is."""

    def __init__(self, told: OnProgress | None, most: int) -> None:
        self._told = told or (lambda _done, _most, _what: None)
        self._done, self._most = 0, most

    def __call__(self, units: int, what: str) -> None:
        self._done = min(self._done + units, self._most)
        self._told(self._done, self._most, what)

    def at(self, done: int) -> None:
        """So much is done: texts may end early."""
        self._done = done


class _Run:
    """The prompts with what decodes them."""

    def __init__(
        self,
        target: BatchTarget,
        plain: HFTarget,
        drafter: Drafter,
        prompts: Sequence[Tensor],
        max_new_tokens: int,
        stops: Stops,
        temperature: float,
        rounds: int,
    ) -> None:
        self.target, self.plain, self.drafter = target, plain, drafter
        self.prompts, self.stops = prompts, stops
        self.max_new_tokens, self.temperature, self.rounds = max_new_tokens, temperature, rounds

    def sampling(self, prompts: Sequence[int]) -> Sampling | None:
        """Each prompt's seed is its number: its text is always the same."""
        return Sampling(self.temperature, seed=list(prompts)) if self.temperature > 0 else None

    def text(self, i: int, say: _Progress) -> list[int]:
        """The target's own text."""
        found = autoregressive(
            self.plain,
            self.prompts[i],
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.stops,
            sampling=self.sampling([i]),
            on_tokens=lambda _: say(1, "decoding the prompts plainly"),
        )
        return list(found.token_ids)

    def costs(
        self,
        budgets: Sequence[int],
        rows: Sequence[dict[int | None, Tensor]],
        topk: int | None,
        say: _Progress,
    ) -> tuple[Plain, list[Cost]]:
        """Sweep through plain decoding, budget 0 and all budgets."""
        draft: dict[int, list[float]] = {budget: [] for budget in (0, *budgets)}
        verify: dict[int, list[float]] = {budget: [] for budget in (0, *budgets)}
        steps: list[float] = []
        for sweep in range(min(SWEEPS, self.rounds)):
            timed = (self.rounds + SWEEPS - 1 - sweep) // SWEEPS  # an odd one is the first sweep's
            wanted = 1 + timed  # the first of each run warms up, and is left out
            order = list(draft) if sweep % 2 == 0 else list(draft)[::-1]
            steps += self._steps(rows, wanted)
            say(SWEEP_UNITS, "timing plain decoding")
            for budget in order:
                drafted, verified = self._rounds(budget, rows, topk, wanted)
                draft[budget] += drafted
                verify[budget] += verified
                say(SWEEP_UNITS, f"timing rounds of q_len {budget + 1}")
        costs = [
            Cost(
                budget,
                len(verify[budget]),
                Times.of(draft[budget]) if draft[budget] else None,
                Times.of(verify[budget]),
            )
            for budget in draft
        ]
        alone, zero = Times.of(steps), costs[0].verify_ms
        batch = self.target.max_batch
        if batch / zero.median > 1 / alone.median:
            together = f"a pass of q_len 1 for the {batch} requests of the batch"
            return Plain(zero, 1e3 * batch / zero.median, together), costs
        return Plain(
            alone, 1e3 / alone.median, "the model's own pass, one request after the other"
        ), costs

    def _steps(self, rows: Sequence[dict[int | None, Tensor]], wanted: int) -> list[float]:
        """Seconds of plain passes, the first left out."""
        i = self._longest(rows, 0, None)[0]
        moments: list[float] = []
        autoregressive(
            self.plain,
            self.prompts[i],
            max_new_tokens=min(1 + wanted, self.max_new_tokens),
            stop_ids=self.stops,
            sampling=self.sampling([i]),
            on_tokens=lambda _: moments.append(time.perf_counter()),
        )
        passes = [after - before for before, after in pairwise(moments)]
        return passes[1:] or passes

    def _rounds(
        self,
        budget: int,
        rows: Sequence[dict[int | None, Tensor]],
        topk: int | None,
        wanted: int,
    ) -> tuple[list[float], list[float]]:
        """Seconds of drafting, if apart, and of the rest, of rounds in which every place is taken."""
        order = self._longest(rows, budget, topk)
        chosen = [order[i % len(order)] for i in range(self.target.max_batch)]
        requests = []
        for i in chosen:
            tokens = _tokens(rows[i][topk], budget)[:wanted]  # as long as the rounds wanted take
            requests.append(Request(self.prompts[i], 1 + sum(tokens)))
        found = decode(
            self.target,
            self.drafter,
            requests,
            budget=budget,
            topk=topk,
            sampling=self.sampling(chosen),
        )
        full = min(len(one.rounds) for one in found)
        timed = found[0].rounds[min(1, full - 1) : min(wanted, full)]
        drafted = [r.draft_seconds for r in timed if r.draft_seconds is not None]
        return drafted, [r.verify_seconds for r in timed]

    @staticmethod
    def _longest(
        rows: Sequence[dict[int | None, Tensor]], budget: int, topk: int | None
    ) -> list[int]:
        """The texts that rounds can be read off, those with the most rounds first."""
        counts = {
            i: len(_tokens(found[topk if topk in found else next(iter(found))], budget))
            for i, found in enumerate(rows)
        }
        return sorted((i for i in counts if counts[i]), key=lambda i: (-counts[i], i))

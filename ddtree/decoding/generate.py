"""Decode: draft-tree rounds (``generate``) and one token at a time (``autoregressive``)."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.decoding.decoding import Choices, Generation, RoundStats, top_two
from ddtree.decoding.drafter import Drafter
from ddtree.decoding.target import HFTarget
from ddtree.spec import round as spec_round
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import Acceptance, Budget, Commit, DraftTree, FlatMask, VerifyLayout
from ddtree.spec.errors import require
from ddtree.spec.mask import Form
from ddtree.spec.round import Round, Target
from ddtree.spec.sampling import (
    Sampling,
    first_argmax,
    position_uniforms,
    sample,
    target_distribution,
)

OnTokens = Callable[[Sequence[int]], None]
"""Told the new tokens of each round as they come."""


class DecodingTarget(Target, Protocol):
    """A target that holds one request from its prompt on: an ``HFTarget`` or a ``PagedRequest``.

    One with a ``mask_form`` other than flat is served by the round of ``ddtree.impl``.
    """

    @property
    def max_context(self) -> int:
        """Most KV entries, prompt and tree included."""
        ...

    @property
    def prefix_len(self) -> int:
        """Committed KV entries."""
        ...

    def reset(self, feature_layer_ids: tuple[int, ...] = ()) -> None:
        """Begin a new request."""
        ...

    def prefill(self, token_ids: Int64[Tensor, " n"]) -> Float[Tensor, " vocab"]:
        """Append the prompt; logits after its last token."""
        ...

    def rewind(self, prefix_len: int) -> None:
        """Drop all entries from ``prefix_len`` on."""
        ...

    def features(self) -> Float[Tensor, "new width"] | None:
        """Hidden states for the drafter of the entries committed since the last call."""
        ...


def generate(
    target: DecodingTarget,
    drafter: Drafter,
    prompt_ids: Int64[Tensor, " n"],
    *,
    budget: int,
    max_new_tokens: int,
    topk: int | None = None,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
    ragged: bool = False,
    buffers: VerifyBuffers | None = None,
    on_tokens: OnTokens | None = None,
    prompt_logits: Float[Tensor, " vocab"] | None = None,
) -> Generation:
    """Decode by draft trees: the target's own tokens, several a round.

    Args:
        target: verifies the trees.
        drafter: proposes them.
        prompt_ids: ``[n]`` tokens, at least one.
        budget: most non-root nodes of a tree. Where the context has room for fewer, fewer are
            drafted.
        max_new_tokens: exactly so many tokens come unless a stop token does first.
        topk: candidates kept at each depth; 1: a chain; None: all that the budget can use.
        sampling: how the target chooses; None: greedily. A seed repeats.
        stop_ids: tokens that end the text, wherever in an accepted path they stand.
        ragged: verify ``num_nodes`` rows instead of ``budget + 1``.
        buffers: run the rounds through fixed buffers, as under a captured graph.
        on_tokens: told each round's tokens as they come.
        prompt_logits: what ``target.prefill(prompt_ids)`` gave: the target already holds the
            prompt and is cut back to it. Not with drafters that read the target's features.

    Returns:
        The tokens, with the margin of each choice, and statistics of each round.

    Raises:
        InputError: bad arguments, or prompt and new tokens that exceed the target's context.
    """
    require(budget >= 0, f"budget must be at least 0, got {budget}")
    _require_lengths(target, prompt_ids, max_new_tokens)
    drafter.reset()
    begin = time.perf_counter()
    layer_ids = drafter.target_layer_ids
    logits = _start(target, prompt_ids, layer_ids, prompt_logits)
    prefill_seconds = time.perf_counter() - begin

    recorder = _Recorder(target)
    verify_round = _round_for(recorder)
    first = _choose(logits, prompt_ids.numel() - 1, sampling)
    margins, runner_ups = top_two(logits[None])
    tokens, rounds = [first], list[RoundStats]()
    if on_tokens:
        on_tokens(tokens[:])
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        begin = time.perf_counter()
        text = torch.cat([prompt_ids, prompt_ids.new_tensor(tokens)])
        draft = drafter.draft(text, target.features())
        drafted = time.perf_counter()
        room = target.max_context - target.prefix_len - 1
        result = verify_round(
            draft.to(target.slot_table.device),
            target.slot_table.new_tensor(tokens[-1:]),
            target.slot_table.new_tensor([target.prefix_len]),
            recorder,
            Budget(min(budget, room)),
            topk,
            ragged=ragged,
            sampling=sampling,
            buffers=buffers,
        )
        count = int(result.acceptance.num_accepted[0])
        found = result.token_ids[0, :count].tolist()
        new = _cut(found, max_new_tokens - len(tokens), stop_ids)
        path = result.acceptance.nodes[0, : len(new)].long()
        more_margins, more_runner_ups = top_two(recorder.logits[path])
        margins += more_margins
        runner_ups += more_runner_ups
        tokens += new
        seconds = (drafted - begin, time.perf_counter() - drafted)
        rounds.append(RoundStats(result.tree, result.acceptance, tuple(new), *seconds))
        if on_tokens:
            on_tokens(new)
    greedy = _is_greedy(sampling)
    return Generation(
        token_ids=tuple(tokens),
        margins=tuple(margins) if greedy else (),
        runner_up_ids=tuple(runner_ups) if greedy else (),
        rounds=tuple(rounds),
        stopped=tokens[-1] in stop_ids,
        prefill_seconds=prefill_seconds,
    )


def autoregressive(
    target: HFTarget,
    prompt_ids: Int64[Tensor, " n"],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
    on_tokens: OnTokens | None = None,
    prompt_logits: Float[Tensor, " vocab"] | None = None,
) -> Choices:
    """Decode one token a pass through the model's own path: no tree, no layout, no mask of ours.

    Args, Raises: as ``generate``. With one seed, ``generate`` samples the same tokens.
    """
    _require_lengths(target, prompt_ids, max_new_tokens)
    logits = _start(target, prompt_ids, (), prompt_logits)
    tokens, margins, runner_ups = list[int](), list[float](), list[int]()
    while True:
        margin, runner_up = top_two(logits[None])
        margins += margin
        runner_ups += runner_up
        tokens.append(_choose(logits, target.prefix_len - 1, sampling))
        if on_tokens:
            on_tokens(tokens[-1:])
        if len(tokens) == max_new_tokens or tokens[-1] in stop_ids:
            break
        logits = target.step(tokens[-1])
    if not _is_greedy(sampling):
        return Choices(tuple(tokens), (), ())
    return Choices(tuple(tokens), tuple(margins), tuple(runner_ups))


def stop_ids_of(model: Any) -> tuple[int, ...]:
    """The end tokens of a model's generation configuration, or else of its configuration."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


class _Recorder:
    """The target, with the logits of its last pass kept for the margins."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.mask_form: Form = getattr(target, "mask_form", "flat")
        self.logits: Tensor = torch.empty(0)

    @property
    def slot_table(self) -> Int64[Tensor, "B max_context"]:
        return self._target.slot_table

    def forward(
        self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask
    ) -> Float[Tensor, "T vocab"]:
        self.logits = self._target.forward(tree, layout, mask)
        return self.logits

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        return self._target.commit(layout, acceptance)


def _round_for(recorder: _Recorder) -> Callable[..., Round]:
    """The round that speaks the target's mask form."""
    if recorder.mask_form == "flat":
        return spec_round.verify_round
    from ddtree.impl import verify_round

    return verify_round


def _require_lengths(target: DecodingTarget, prompt_ids: Tensor, max_new_tokens: int) -> None:
    require(
        prompt_ids.ndim == 1 and prompt_ids.numel() >= 1,
        f"prompt_ids has shape {list(prompt_ids.shape)}; expected [n] with at least one token",
    )
    require(max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {max_new_tokens}")
    total = prompt_ids.numel() + max_new_tokens
    require(
        total <= target.max_context,
        f"{prompt_ids.numel()} prompt tokens and {max_new_tokens} new ones make {total}; "
        f"the target's context holds {target.max_context}",
    )


def _start(
    target: DecodingTarget,
    prompt_ids: Tensor,
    layer_ids: tuple[int, ...],
    prompt_logits: Tensor | None,
) -> Float[Tensor, " vocab"]:
    """Logits after the prompt: by a prefill, or by cutting the target back to an earlier one."""
    if prompt_logits is None:
        target.reset(layer_ids)
        return target.prefill(prompt_ids)
    require(not layer_ids, "prompt_logits cannot be used with a drafter that reads features")
    target.rewind(prompt_ids.numel())
    return prompt_logits


def _is_greedy(sampling: Sampling | None) -> bool:
    return sampling is None or sampling.temperature == 0


def _choose(logits: Float[Tensor, " vocab"], position: int, sampling: Sampling | None) -> int:
    """The token after ``position``, chosen as a round chooses it."""
    row = logits[None]
    if sampling is None or sampling.temperature == 0:
        return int(first_argmax(row))
    probs = target_distribution(row, sampling.temperature, sampling.top_k, sampling.top_p)
    at = torch.tensor([position], device=logits.device)
    return int(sample(probs, position_uniforms(sampling.seeds(1)[0], at)))


def _cut(tokens: list[int], room: int, stop_ids: Collection[int]) -> list[int]:
    """The tokens up to and with the first stop token, ``room`` at most."""
    stop = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: min(stop, room)]

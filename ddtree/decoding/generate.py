"""Decode one request: by draft trees (``generate``) and one token at a time (``autoregressive``)."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.decoding.batch import BatchTarget, DecodingTarget, SeparateTargets
from ddtree.decoding.decoding import Choices, Generation, top_two
from ddtree.decoding.drafter import Drafter
from ddtree.decoding.loop import choose, decode, is_greedy, require_lengths
from ddtree.decoding.processors import Processor, process
from ddtree.decoding.rounds import Request
from ddtree.decoding.stops import Stops
from ddtree.decoding.target import HFTarget
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.sampling import Sampling

OnTokens = Callable[[Sequence[int]], None]
"""Told the new tokens of each round as they come."""


def generate(
    target: DecodingTarget | BatchTarget,
    drafter: Drafter,
    prompt_ids: Int64[Tensor, " n"],
    *,
    budget: int,
    max_new_tokens: int,
    topk: int | None = None,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] | Stops = (),
    processors: Sequence[Processor] = (),
    ragged: bool = False,
    buffers: VerifyBuffers | None = None,
    on_tokens: OnTokens | None = None,
    prompt_logits: Float[Tensor, " vocab"] | None = None,
) -> Generation:
    """Decode one request by draft trees: a batch of one of ``loop.decode``.

    Args:
        target: verifies the trees.
        drafter: proposes them.
        prompt_ids: ``[n]`` tokens, at least one.
        budget: most non-root nodes of a tree. Where the context has room for fewer, fewer are
            drafted.
        max_new_tokens: exactly so many tokens come unless something ends the text before.
        topk: candidates kept at each depth; 1: a chain; None: all that the budget can use.
        sampling: how the target chooses; None: greedily. A seed repeats.
        stop_ids: tokens that end the text, wherever in an accepted path they stand; or ``Stops``, which
            may have strings too.
        processors: applied to the target's logits along each path (``processors.py``).
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
    batch = target if isinstance(target, BatchTarget) else SeparateTargets([target])
    found = decode(
        batch,
        drafter,
        [Request(prompt_ids, max_new_tokens, prompt_logits)],
        budget=budget,
        topk=topk,
        sampling=sampling,
        stops=Stops.of(stop_ids),
        processors=processors,
        ragged=ragged,
        buffers=buffers,
        on_news=on_tokens and (lambda _index, tokens, _reason: on_tokens(tokens)),
    )
    return found[0]


def autoregressive(
    target: HFTarget,
    prompt_ids: Int64[Tensor, " n"],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] | Stops = (),
    processors: Sequence[Processor] = (),
    on_tokens: OnTokens | None = None,
    prompt_logits: Float[Tensor, " vocab"] | None = None,
) -> Choices:
    """Decode one token a pass through the model's own path: no tree, no layout, no mask of ours.

    Args, Raises: as ``generate``. With one seed, ``generate`` samples the same tokens.
    """
    require_lengths(target.max_context, prompt_ids, max_new_tokens)
    stops, reason = Stops.of(stop_ids), None
    if prompt_logits is None:
        target.reset()
        logits = target.prefill(prompt_ids)
    else:
        target.rewind(prompt_ids.numel())
        logits = prompt_logits
    tokens, margins, runner_ups = list[int](), list[float](), list[int]()
    while reason is None:
        if tokens:
            logits = target.step(tokens[-1])
        if processors:
            text = torch.cat([prompt_ids, prompt_ids.new_tensor(tokens)])
            logits = process(processors, text[None].to(logits.device), logits[None])[0]
        margin, runner_up = (found.tolist() for found in top_two(logits[None]))
        margins += margin
        runner_ups += runner_up
        token = choose(logits, target.prefix_len - 1, sampling)
        _, reason = stops.cut(tokens, [token], max_new_tokens - len(tokens))
        tokens.append(token)
        if on_tokens:
            on_tokens([token])
    if not is_greedy(sampling):
        return Choices(tuple(tokens), (), ())
    return Choices(tuple(tokens), tuple(margins), tuple(runner_ups))


def stop_ids_of(model: Any) -> tuple[int, ...]:
    """The end tokens of a model's generation configuration, or else of its configuration."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()

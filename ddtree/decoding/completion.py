"""``ddtree.generate``: from prompts to texts, for a Transformers model and its tokenizer."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from ddtree.decoding.batch import BatchTarget, SeparateTargets
from ddtree.decoding.capabilities import context_of
from ddtree.decoding.decoding import Generation
from ddtree.decoding.dflash import DFlashDrafter
from ddtree.decoding.drafter import Drafter
from ddtree.decoding.generate import stop_ids_of
from ddtree.decoding.loop import decode
from ddtree.decoding.ngram import NGramDrafter
from ddtree.decoding.processors import Processor
from ddtree.decoding.restored import as_it_was
from ddtree.decoding.rounds import Request
from ddtree.decoding.stops import FinishReason, Stops, TextStream
from ddtree.decoding.target import HFTarget
from ddtree.spec.errors import (
    InputError,
    given,
    require,
    require_int,
    require_number,
    require_text,
)
from ddtree.spec.sampling import Sampling

if TYPE_CHECKING:
    from ddtree.decoding.paged import PagedTarget  # needs Triton
    from ddtree.decoding.tuning_results import Rate

NGRAM_BLOCK_SIZE = 8

Prompt = str | Sequence[int] | Tensor | Sequence[Mapping[str, Any]]
"""A text, token ids, or the messages of a chat, which go through the tokenizer's chat template."""


@dataclass(frozen=True)
class Completion(Generation):
    """What was generated for one prompt."""

    prompt_ids: tuple[int, ...]
    """The prompt's tokens, none left out."""
    text: str
    """The new tokens as text, special tokens left out, cut before a stop string."""


@dataclass(frozen=True)
class Piece:
    """New tokens of one request, as they come."""

    index: int
    """Which prompt."""
    token_ids: tuple[int, ...]
    text: str
    """Text that has become certain; all pieces of a request together are its text. It waits for whole
    characters, and for what may be the beginning of a stop string to be none."""
    finish_reason: FinishReason | None
    """What ended the text, with its last piece."""


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: str | Path | Drafter = "ngram",
    budget: int | Literal["auto"] = 16,
    topk: int | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    logits_processor: Sequence[Processor] = (),
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int = 8,
    attention: Literal["auto", "dense", "paged"] = "auto",
    stream: Callable[[Piece], None] | None = None,
) -> list[Completion]:
    """Generate text by draft trees: the model's own text, several tokens a forward pass.

    At temperature 0 the text is that of greedy decoding (in float32 up to ties below rounding); above,
    every token has exactly the distribution that ``model.generate`` would sample it from. What a prompt
    yields does not depend on the prompts beside it.

    Args:
        model: a Transformers causal LM; it stays where it is, and is given back in the mode (training or
            evaluation) and with the attention that it had. Its ``generation_config`` gives the stop tokens
            and nothing else.
        tokenizer: the model's.
        prompts: one, or a sequence of them: texts, token ids, or chats (lists of messages).
        drafter: ``"ngram"`` (prompt lookup, no weights), ``"embedded"`` (the DFlash drafter that comes
            with ddtree, for the embedded target), the folder or the hub name of a DFlash checkpoint, or a
            ``Drafter``.
        budget: most non-root nodes of a tree; ``"auto"``: budget and topk as ``ddtree.tune`` or the
            command ``ddtree tune`` found them best on this machine (plain decoding, where that is
            faster); the choice is logged to the logger ``ddtree``, with a warning where the machine was
            too busy for it to be trusted.
        topk: candidates kept at each depth; 1: a chain; None: all that the budget can use.
        max_new_tokens: exactly so many come unless something ends the text before.
        temperature: 0: greedy.
        top_k: sample from the k likeliest tokens; None: from all.
        top_p: sample from the fewest likeliest tokens whose probabilities reach it.
        repetition_penalty: divides the logits of tokens of the prompt and the text (Transformers'
            ``RepetitionPenaltyLogitsProcessor``); 1: none.
        logits_processor: Transformers' logits processors, applied before the temperature; each must be
            a function of a row's tokens and scores alone.
        seed: one for each prompt, or one for all: prompt i then uses ``seed + i``.
        stop: strings that end a text; they are cut off it, while ``token_ids`` keeps their tokens.
        stop_token_ids: tokens that end a text; None: the model's own.
        batch_size: prompts decoded at once; when one is done the next takes its place.
        attention: ``"paged"``: the kernels of ``ddtree.impl`` on a paged pool, all trees in one pass;
            ``"dense"``: Transformers' own attention under a dense mask, tree by tree; ``"auto"``: paged
            on a CUDA device, dense elsewhere.
        stream: told each request's tokens and text as they come.

    Returns:
        A completion for each prompt, in order: ``text``, ``token_ids``, ``finish_reason``, and the
        statistics of its rounds (``rounds``, ``tokens_per_round``, ``acceptance_histogram``).

    Raises:
        InputError: an empty prompt or one of tokens that the model does not have, arguments that make no
            sense (``top_k`` or ``top_p`` at temperature 0 too), a prompt and new tokens that exceed the
            model's context, a model or drafter that cannot be served, or budget ``"auto"`` where
            nothing has been measured.
    """
    require_int("batch_size", batch_size, 1)
    require_int("max_new_tokens", max_new_tokens, 1)
    if budget != "auto":
        require_int("budget", budget, 0)
    ids = encode_all(tokenizer, prompts_of(prompts))
    if not ids:
        return []
    attention = attention_of(model, attention)
    if budget == "auto":
        require(topk is None, f"topk is {topk}; budget 'auto' chooses it: leave it out")
        best = _tuned(model, drafter, attention, min(batch_size, len(ids)))
        budget, topk = best.budget, best.topk
    sampling = Sampling(temperature, top_k, top_p, seed)
    for name, value in {"top_k": top_k, "top_p": top_p}.items():
        require(
            temperature != 0 or value is None,
            f"{name} cannot be given with temperature 0, which does not sample",
        )
    strings = stops_of(stop)
    stop_ids = stop_ids_of(model) if stop_token_ids is None else tuple(stop_token_ids)
    stops = Stops(stop_ids, strings, decoder(tokenizer))
    processors = processors_of(repetition_penalty, logits_processor)
    sizes = [prompt.numel() + max_new_tokens + budget for prompt in ids]
    streams = [TextStream(stops) for _ in ids]

    def on_news(index: int, tokens: Sequence[int], reason: FinishReason | None) -> None:
        if stream is not None:
            text = streams[index](tokens, finished=reason is not None)
            stream(Piece(index, tuple(tokens), text, reason))

    with as_it_was(model):
        target, one = batch_target(model, min(batch_size, len(ids)), attention, max(sizes))
        found = decode(
            target,
            drafter_of(drafter, one),
            [Request(prompt, max_new_tokens) for prompt in ids],
            budget=budget,
            topk=topk,
            sampling=sampling,
            stops=stops,
            processors=processors,
            on_news=on_news,
        )
    return [
        Completion(**vars(one), prompt_ids=tuple(prompt.tolist()), text=stops.text(one.token_ids))
        for one, prompt in zip(found, ids, strict=True)
    ]


def encode_all(tokenizer: Any, prompts: Sequence[Any]) -> list[Int64[Tensor, " n"]]:
    """The token ids of each; an error says which of several it is."""
    one = len(prompts) == 1
    return [
        encode(tokenizer, prompt, "the prompt" if one else f"prompt {i}")
        for i, prompt in enumerate(prompts)
    ]


def encode(tokenizer: Any, prompt: Any, name: str = "the prompt") -> Int64[Tensor, " n"]:
    """The token ids of a ``Prompt``; ``name`` is what errors call it.

    Raises:
        InputError: a prompt of another kind, one without a token, text that is none, or a chat without a
            template.
    """
    if isinstance(prompt, str):
        require_text(name, prompt)
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, Tensor):
        require(
            prompt.numel() == prompt.shape[-1:].numel() and not prompt.is_floating_point(),
            f"{name} is {given(prompt)}, {prompt.dtype}; expected the token ids of one prompt, integers of "
            "shape [n]; several prompts are a list",
        )
        ids = prompt.flatten().tolist()
    elif _is_chat(prompt):
        require(
            bool(getattr(tokenizer, "chat_template", None)),
            f"{name} is a chat, and the tokenizer has no chat template: give its text",
        )
        text = _templated(tokenizer, prompt, name)
        require_text(f"{name}, a chat,", text)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        ids = list(prompt)
    else:
        raise InputError(
            f"{name} is {given(prompt)}; expected a text, token ids, or messages of a chat"
        )
    require(bool(ids), f"{name} is empty: it has no token")
    far = next((token for token in ids if not -(2**63) <= token < 2**63), None)
    require(far is None, f"{name} holds the token id {far}, which fits no int64")
    return torch.tensor(ids)


def _templated(tokenizer: Any, chat: Sequence[Mapping[str, Any]], name: str) -> str:
    """A chat as the tokenizer's template writes it.

    Raises:
        InputError: messages that are none, or that the template cannot write.
    """
    for i, message in enumerate(chat):
        names = ", ".join(map(repr, message)) or "nothing"
        require(
            "role" in message,
            f"message {i} of {name}, a chat, holds {names}; expected {{'role': 'user', 'content': ...}}",
        )
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of the model's
        raise InputError(
            f"the tokenizer's chat template cannot write {name}: "
            f"{type(error).__name__}: {error}; expected messages {{'role': ..., 'content': ...}}"
        ) from error


def stops_of(stop: Any) -> tuple[str, ...]:
    """Stop strings, from one or several.

    Raises:
        InputError: what is none.
    """
    strings = (stop,) if isinstance(stop, str) else stop
    is_several = isinstance(strings, Sequence | set | frozenset)
    wrong = [one for one in strings if not isinstance(one, str)] if is_several else [stop]
    if wrong:
        raise InputError(
            f"stop {'holds' if is_several else 'is'} {given(wrong[0])}; expected a string or a list of them; "
            "tokens that end a text go into stop_token_ids"
        )
    return tuple(strings)


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Tokens to text: special tokens left out, nothing cleaned up, so that text only ever grows."""

    def decode(token_ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    return decode


def processors_of(repetition_penalty: float, logits_processor: Any = ()) -> tuple[Processor, ...]:
    """The processors in Transformers' order: the penalty first.

    Raises:
        InputError: a penalty that is none, one processor that stands alone, or what is no processor.
    """
    require(
        isinstance(logits_processor, Sequence) and all(map(callable, logits_processor)),
        f"logits_processor is {given(logits_processor)}; expected a list of processors, one too: [processor]",
    )
    require_number("repetition_penalty", repetition_penalty)
    require(
        repetition_penalty > 0,
        f"repetition_penalty is {repetition_penalty}; it must be above 0 (1: none)",
    )
    if repetition_penalty == 1:
        return tuple(logits_processor)
    from transformers import RepetitionPenaltyLogitsProcessor

    return (RepetitionPenaltyLogitsProcessor(float(repetition_penalty)), *logits_processor)


def batch_target(
    model: Any, max_batch: int, attention: str, max_context: int
) -> "tuple[BatchTarget, HFTarget | PagedTarget]":
    """A target for so many requests of so many entries at most, as far as the model has positions.

    Returns:
        The target of the batch, and one of those that it consists of.

    Raises:
        InputError: an unknown word, or a model that cannot be served.
    """
    attention = attention_of(model, attention)
    size = min(max_context, context_of(model) or max_context)
    if attention == "paged":
        from ddtree.decoding.paged import PagedTarget

        paged = PagedTarget(model, max_batch=max_batch, max_context=size)
        return paged, paged
    dense = [HFTarget(model, max_context=size) for _ in range(max_batch)]
    return SeparateTargets(dense), dense[0]


def attention_of(model: Any, attention: str) -> Literal["dense", "paged"]:
    """``"auto"`` as it is meant on the model's device.

    Raises:
        InputError: an unknown word.
    """
    if attention == "auto":
        return "paged" if model.device.type == "cuda" else "dense"
    if attention == "dense":
        return "dense"
    require(
        attention == "paged", f"attention is {attention!r}; it must be one of auto, dense, paged"
    )
    return "paged"


def _tuned(model: Any, drafter: object, attention: str, batch_size: int) -> "Rate":
    """What was measured to be the best; logged, with a warning where the measurement is not to be trusted."""
    from ddtree.decoding.tuning_results import key_of, require_tuning

    if not isinstance(drafter, str | Path):
        raise InputError(
            f"budget 'auto' looks up what was measured by the drafter's name; given {given(drafter)}"
        )
    key = key_of(model, drafter, attention, batch_size, NGRAM_BLOCK_SIZE)
    call = f"ddtree.tune(model, tokenizer, drafter={str(drafter)!r}, batch_size={batch_size})"
    tuning = require_tuning(key, call)
    log = logging.getLogger("ddtree")
    log.info("budget auto: %s", tuning)
    if tuning.noise:
        log.warning("budget auto: %s", tuning.noise)
    return tuning.best


def drafter_of(drafter: str | Path | Drafter, target: "HFTarget | PagedTarget") -> Drafter:
    """The drafter of that name for the target, or itself."""
    if not isinstance(drafter, str | Path):
        missing = [name for name in _DRAFTER if not hasattr(drafter, name)]
        require(
            not missing,
            f"drafter is {given(drafter)}, without {', '.join(missing)}; expected 'ngram', 'embedded', the "
            "folder or hub name of a DFlash checkpoint, or a ddtree.decoding.Drafter",
        )
        return drafter
    if drafter == "ngram":
        return NGramDrafter(target.vocab_size, NGRAM_BLOCK_SIZE)
    return DFlashDrafter.load(drafter, target)


_DRAFTER = ("block_size", "target_layer_ids", "reset", "draft")


def prompts_of(prompts: Any) -> Sequence[Prompt]:
    """A sequence of prompts, of one where one was given."""
    if isinstance(prompts, str | Tensor) or _is_chat(prompts):
        return [prompts]
    require(
        isinstance(prompts, Sequence), f"prompts is {given(prompts)}; expected one or a sequence"
    )
    one = len(prompts) > 0 and all(isinstance(token, int) for token in prompts)
    several: Sequence[Prompt] = [prompts] if one else prompts
    return several


def _is_chat(prompt: object) -> bool:
    """Whether it is a list of messages."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) for message in prompt)
    )

"""``ddtree generate``: decode by draft trees, and show what the trees were worth."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ddtree.cli.options import (
    BlockSize,
    Budget,
    Chat,
    Draft,
    Json,
    MaxNewTokens,
    Seed,
    Target,
    TopK,
    topk_of,
    within,
)
from ddtree.cli.output import BROKEN, print_json, progress, stdout

if TYPE_CHECKING:
    from torch import Tensor

    from ddtree.cli.models import Pair
    from ddtree.decoding.decoding import Comparison, Generation

BAR = 40
"""Longest bar of the histogram, in characters."""


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer or to continue.")],
    target: Target = "embedded",
    draft: Draft = "ngram",
    budget: Budget = 16,
    topk: TopK = "all",
    block_size: BlockSize = None,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Annotated[
        float, typer.Option(callback=within(0), help="0: greedy. Above: sample, losslessly.")
    ] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(callback=within(1), help="When sampling: keep the k likeliest tokens."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="When sampling: keep this much probability, in (0, 1].")
    ] = None,
    seed: Seed = 0,
    chat: Chat = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Check every call against the invariants.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare/--no-compare", help="Decode one token at a time too, and compare."),
    ] = True,
    as_json: Json = False,
) -> None:
    """Generate text by draft trees: the target's own text, several tokens a pass.

    Streams the text, then tells tokens a round, how many nodes were accepted
    how often, and whether plain decoding, one token a pass, gives the same
    text. Exit code 1 if it does not.

    \b
    Examples
      ddtree generate "Name three rivers in Europe."
      ddtree generate "1, 2, 3, 4, 1, 2, 3," --raw --budget 32 --topk 4
      ddtree generate "Tell me a story." --temperature 0.8 --top-p 0.95 --seed 7
      ddtree generate "Hello" --target ./my-model --draft ./my-dflash
      ddtree generate "Hello" --debug
    """
    kept = topk_of(topk)
    if top_p is not None and not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p} is not in (0, 1]", param_hint="--top-p")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise typer.BadParameter(
            "--top-k and --top-p shape sampling, and --temperature 0 does not sample; "
            "give a temperature above 0, or leave them out",
            param_hint="--temperature",
        )
    from ddtree import decoding, invariants
    from ddtree.cli.models import load_pair
    from ddtree.spec.sampling import Sampling

    pair = load_pair(target, draft, block_size)
    ids = pair.encode(prompt, chat)
    sampling = Sampling(temperature, top_k, top_p, seed) if temperature > 0 else None
    streamer = Streamer(pair, quiet=as_json)
    watch = progress("decoding by draft trees") if as_json else nullcontext()
    with watch, invariants.debug() if debug else nullcontext():
        found = decoding.generate(
            pair.target,
            pair.drafter,
            ids,
            budget=budget,
            topk=kept,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=pair.stop_ids,
            on_tokens=streamer,
        )
    streamer.end()
    why = _why_not_compared(compare, temperature)
    compared = None if why else _compare(pair, ids, found, max_new_tokens)
    if as_json:
        print_json(_report(prompt, pair, found, compared, why))
    else:
        _print(pair, found, compared, why, debug)
    if compared is not None and not (compared.equal or compared.is_tie):
        raise typer.Exit(BROKEN)


class Streamer:
    """Prints text as its tokens come; a character that lacks bytes waits for its next token."""

    def __init__(self, pair: "Pair", *, quiet: bool) -> None:
        self._pair = pair
        self._quiet = quiet
        self._token_ids: list[int] = []
        self._printed = ""

    def __call__(self, token_ids: Sequence[int]) -> None:
        """Take new tokens."""
        self._token_ids += token_ids
        text = self._pair.text(self._token_ids)
        if not text.endswith("\ufffd"):
            self._print(text)

    def end(self) -> None:
        """Print what waited, and end the line."""
        self._print(self._pair.text(self._token_ids))
        if not self._quiet:
            sys.stdout.write("\n")

    def _print(self, text: str) -> None:
        if not self._quiet:
            sys.stdout.write(text[len(self._printed) :])
            sys.stdout.flush()
        self._printed = text


def histogram(generation: "Generation") -> list[str]:
    """How many rounds accepted how many nodes, as bars of text."""
    counts = generation.acceptance_histogram
    most = max(counts.values(), default=1)
    return [
        f"{accepted:>3} {'node ' if accepted == 1 else 'nodes'} {count:>4} "
        + "█" * max(1, round(BAR * count / most))
        for accepted, count in counts.items()
    ]


def _why_not_compared(compare: bool, temperature: float) -> str:
    if not compare:
        return "not asked for (--no-compare)"
    if temperature > 0:
        return (
            "sampled text: near the edge between two tokens float error alone can change a sample, "
            "and no margin tells such a case from a fault. Use --temperature 0 to compare"
        )
    return ""


def _compare(pair: "Pair", ids: "Tensor", found: "Generation", max_new_tokens: int) -> "Comparison":
    from ddtree import decoding

    done = 0
    with progress(f"decoding up to {max_new_tokens} tokens one at a time, to compare") as say:

        def count(token_ids: Sequence[int]) -> None:
            nonlocal done
            done += len(token_ids)
            say(f"decoding one token at a time, to compare: {done}/{max_new_tokens}", passing=True)

        expected = decoding.autoregressive(
            pair.target,
            ids,
            max_new_tokens=max_new_tokens,
            stop_ids=pair.stop_ids,
            on_tokens=count,
        )
    return decoding.compare(found, expected, pair.target.dtype)


def _print(
    pair: "Pair", found: "Generation", compared: "Comparison | None", why: str, debug: bool
) -> None:
    console = stdout()
    rounds = len(found.rounds)
    console.print()
    console.print(
        f"{len(found.token_ids)} tokens in {rounds} verify passes: "
        f"{found.tokens_per_round:.2f} tokens a round (the first token comes with the prompt)"
    )
    if rounds:
        console.print("accepted nodes of a round, root included, and how many rounds:")
        for line in histogram(found):
            console.print(line, soft_wrap=True)
    if debug:
        console.print("debug mode: every call held to the invariants")
    verdict = Text(f"no: {why}") if compared is None else pair.verdict(compared)
    console.print(Text.assemble("compared with plain decoding: ", verdict))


def _report(
    prompt: str, pair: "Pair", found: "Generation", compared: "Comparison | None", why: str
) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": pair.text(list(found.token_ids)),
        "token_ids": found.token_ids,
        "stopped": found.stopped,
        "verify_passes": len(found.rounds),
        "tokens_per_round": found.tokens_per_round,
        "acceptance_histogram": found.acceptance_histogram,
        "rounds": [
            {
                "num_nodes": one.num_nodes,
                "num_accepted": one.num_accepted,
                "new_token_ids": one.new_token_ids,
                "draft_seconds": one.draft_seconds,
                "verify_seconds": one.verify_seconds,
            }
            for one in found.rounds
        ],
        "compared": None if compared is None else {**vars(compared), "message": str(compared)},
        "why_not_compared": why or None,
    }

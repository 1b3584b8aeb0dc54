"""``ddtree generate``: decode by draft trees, and show what the trees were worth."""

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ddtree.cli.options import (
    Attention,
    BlockSize,
    Budget,
    Chat,
    Device,
    Draft,
    Json,
    MaxNewTokens,
    Seed,
    Target,
    TopK,
    refuse_given,
    topk_of,
    within,
)
from ddtree.cli.output import (
    BROKEN,
    INTERRUPTED,
    counted,
    print_json,
    progress,
    stderr,
    stdout,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ddtree.cli.models import Pair
    from ddtree.decoding.decoding import Comparison, Generation
    from ddtree.spec.sampling import Sampling

BAR = 40
"""Longest bar of the histogram, in characters."""
INTERRUPTION = "interrupted"


def generate(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The text to answer or to continue.")],
    target: Target = "embedded",
    draft: Draft = "ngram",
    budget: Budget = 16,
    topk: TopK = "all",
    block_size: BlockSize = None,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Annotated[
        float,
        typer.Option(
            callback=within(0),
            help="0: greedy. Above: sample, losslessly; then the text is not compared with plain "
            "decoding, since float error alone can change a sample.",
        ),
    ] = 0.0,
    top_k: Annotated[
        int | None,
        typer.Option(callback=within(1), help="When sampling: keep the k likeliest tokens."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="When sampling: keep this much probability, in (0, 1].")
    ] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    attention: Attention = "auto",
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
    text. Exit code 1 if it does not. Ctrl-C stops and tells what there is.

    \b
    Examples
      ddtree generate "Name three rivers in Europe."
      ddtree generate "1, 2, 3, 4, 1, 2, 3," --raw --budget 32 --topk 4
      ddtree generate "Tell me a story." --temperature 0.8 --top-p 0.95 --seed 7
      ddtree generate "Hello" --target ./my-model --draft ./my-dflash
      ddtree generate "Hello" --device cuda
      ddtree generate "Hello" --debug
    """
    kept = topk_of(topk)
    if top_p is not None and not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p} is not in (0, 1]", param_hint="--top-p")
    if temperature == 0:
        refuse_given(ctx, ("top_k", "top_p", "seed"), "with --temperature 0, which does not sample")
    from ddtree import invariants
    from ddtree.cli.models import load_pair
    from ddtree.spec.sampling import Sampling

    pair = load_pair(target, draft, block_size, attention, device)
    ids = pair.encode(prompt, chat)
    sampling = Sampling(temperature, top_k, top_p, seed) if temperature > 0 else None
    streamer = Streamer(pair, quiet=as_json)
    found = compared = None
    try:
        with invariants.debug() if debug else nullcontext():
            found = _decode(pair, ids, streamer, budget, kept, max_new_tokens, sampling)
        streamer.end()
        why = _why_not_compared(compare, temperature)
        compared = None if why else _compare(pair, ids, found, max_new_tokens)
    except KeyboardInterrupt:
        why = INTERRUPTION
        if found is None:
            streamer.end()
        stderr().print(why)
    if as_json:
        print_json(_report(prompt, pair, streamer, found, compared, why))
    else:
        _print(pair, streamer, found, compared, why, debug)
    if why == INTERRUPTION:
        raise typer.Exit(INTERRUPTED)
    if compared is not None and not (compared.equal or compared.is_tie):
        raise typer.Exit(BROKEN)


class Streamer:
    """Prints text as its tokens come; a character that lacks bytes waits for its next token.

    It remembers the tokens of each round, which are all there is of a run that is interrupted.
    """

    def __init__(self, pair: "Pair", *, quiet: bool) -> None:
        self._pair = pair
        self.quiet = quiet
        self._printed = ""
        self.token_ids: list[int] = []
        self.rounds: list[tuple[int, ...]] = []

    def __call__(self, token_ids: Sequence[int]) -> None:
        """Take new tokens: one with the prompt, then those of each round."""
        if self.token_ids:
            self.rounds.append(tuple(token_ids))
        self.token_ids += token_ids
        text = self._pair.text(self.token_ids)
        if not text.endswith("\ufffd"):
            self._print(text)

    def end(self) -> None:
        """Print what waited, and end the line."""
        self._print(self._pair.text(self.token_ids))
        if not self.quiet:
            sys.stdout.write("\n")

    def _print(self, text: str) -> None:
        if not self.quiet:
            sys.stdout.write(text[len(self._printed) :])
            sys.stdout.flush()
        self._printed = text

    @property
    def tokens_per_round(self) -> float:
        """Tokens of a round on average; the first token comes with the prompt."""
        return sum(map(len, self.rounds)) / len(self.rounds) if self.rounds else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """How many rounds gave how many tokens: with the first token they add up to the text."""
        return dict(sorted(Counter(map(len, self.rounds)).items()))


def bars(histogram: dict[int, int]) -> list[str]:
    """The histogram as bars of text."""
    most = max(histogram.values(), default=1)
    return [
        f"{tokens:>3} {'token ' if tokens == 1 else 'tokens'} {count:>4} "
        + "█" * max(1, round(BAR * count / most))
        for tokens, count in histogram.items()
    ]


def _decode(
    pair: "Pair",
    ids: "Tensor",
    streamer: Streamer,
    budget: int,
    topk: int | None,
    max_new_tokens: int,
    sampling: "Sampling | None",
) -> "Generation":
    """Decode by draft trees, with progress until the text streams; all along when it does not."""
    from ddtree import decoding

    with ExitStack() as until_text:
        say = until_text.enter_context(progress("reading the prompt"))

        def on_tokens(token_ids: Sequence[int]) -> None:
            if streamer.quiet:
                done = len(streamer.token_ids) + len(token_ids)
                say(f"decoding by draft trees: {done}/{max_new_tokens}", passing=True)
            else:
                until_text.close()  # a spinner and a text do not share a line
            streamer(token_ids)

        return decoding.generate(
            pair.target,
            pair.drafter,
            ids,
            budget=budget,
            topk=topk,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=pair.stop_ids,
            on_tokens=on_tokens,
        )


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
    with progress(
        f"decoding up to {counted(max_new_tokens, 'token')} one at a time, to compare"
    ) as say:

        def count(token_ids: Sequence[int]) -> None:
            nonlocal done
            done += len(token_ids)
            say(f"decoding one token at a time, to compare: {done}/{max_new_tokens}", passing=True)

        expected = decoding.autoregressive(
            pair.plain,
            ids,
            max_new_tokens=max_new_tokens,
            stop_ids=pair.stop_ids,
            on_tokens=count,
        )
    return decoding.compare(found, expected, pair.plain.dtype)


def _print(
    pair: "Pair",
    streamer: Streamer,
    found: "Generation | None",
    compared: "Comparison | None",
    why: str,
    debug: bool,
) -> None:
    console = stdout()
    console.print()
    passes = counted(len(streamer.rounds), "verify pass", "verify passes")
    per_round = f": {streamer.tokens_per_round:.2f} tokens a round" if streamer.rounds else ""
    console.print(
        f"{counted(len(streamer.token_ids), 'token')} in {passes}{per_round} "
        "(the first token comes with the prompt)"
    )
    if streamer.rounds:
        console.print(
            "tokens of a round (accepted drafts and one of the target's own), and how many rounds:"
        )
        for line in bars(streamer.histogram):
            console.print(line, soft_wrap=True)
    cut = _cut(found)
    if cut:
        console.print(f"the last round had {counted(cut, 'token')} more, past the end of the text")
    if debug:
        console.print("debug mode: every call held to the invariants")
    verdict = Text(f"no: {why}") if compared is None else pair.verdict(compared)
    console.print(Text.assemble("compared with plain decoding: ", verdict))


def _cut(found: "Generation | None") -> int:
    """Tokens of the last round past a stop token or the number asked for."""
    if found is None or not found.rounds:
        return 0
    return found.rounds[-1].num_accepted - len(found.rounds[-1].new_token_ids)


def _report(
    prompt: str,
    pair: "Pair",
    streamer: Streamer,
    found: "Generation | None",
    compared: "Comparison | None",
    why: str,
) -> dict[str, Any]:
    details = [
        {
            "num_nodes": one.num_nodes,
            "num_accepted": one.num_accepted,
            "draft_seconds": one.draft_seconds,
            "verify_seconds": one.verify_seconds,
        }
        for one in (found.rounds if found else ())
    ] or [{} for _ in streamer.rounds]
    return {
        "prompt": prompt,
        "text": pair.text(streamer.token_ids),
        "token_ids": streamer.token_ids,
        "stopped": found is not None and found.stopped,
        "interrupted": why == INTERRUPTION,
        "verify_passes": len(streamer.rounds),
        "tokens_per_round": streamer.tokens_per_round,
        "acceptance_histogram": streamer.histogram,
        "rounds": [
            {"new_token_ids": new, **detail}
            for new, detail in zip(streamer.rounds, details, strict=True)
        ],
        "compared": None if compared is None else {**vars(compared), "message": str(compared)},
        "why_not_compared": why or None,
    }

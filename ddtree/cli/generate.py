"""``ddtree generate``: decode by draft trees, and show what the trees were worth."""

import codecs
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ddtree.cli.options import (
    AUTO,
    Attention,
    BlockSize,
    BudgetOrAuto,
    Chat,
    Device,
    Draft,
    Dtype,
    Json,
    MaxNewTokens,
    Seed,
    Target,
    TopK,
    budget_of,
    given_options,
    is_text,
    refuse_given,
    topk_of,
    within,
)
from ddtree.cli.output import (
    BROKEN,
    INTERRUPTED,
    command,
    counted,
    fail,
    print_json,
    print_table,
    progress,
    stderr,
    stdout,
    write_whole,
)
from ddtree.cli.report import require_page

if TYPE_CHECKING:
    from torch import Tensor

    from ddtree.cli.models import Pair
    from ddtree.decoding.decoding import Comparison, Generation, RoundStats
    from ddtree.decoding.stops import FinishReason, Stops
    from ddtree.spec.sampling import Sampling

BAR = 40
"""Longest bar of the histogram, in characters."""
SHORT = 32
"""Characters of a prompt in the table."""
WANTED = 'give a JSON value a line, "text" or {"prompt": "text"}, or name the file .txt'
"""What to do where a line of a .jsonl file is no prompt."""
INTERRUPTION = "interrupted"
PAIR = ("target", "draft", "block_size", "device", "dtype", "attention")
"""Parameters that say what decodes, those of ``ddtree tune`` too."""


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(callback=is_text, help="The texts to answer or to continue."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File of further prompts: one a line, or, in a .jsonl file, a JSON string or an "
            'object with "prompt" a line.',
        ),
    ] = None,
    target: Target = "embedded",
    draft: Draft = AUTO,
    budget: BudgetOrAuto = "16",
    topk: TopK = "all",
    block_size: BlockSize = None,
    max_new_tokens: MaxNewTokens = 64,
    batch_size: Annotated[
        int,
        typer.Option(
            callback=within(1, 1024),
            help="Prompts decoded at once; when one is done the next takes its place.",
        ),
    ] = 8,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            callback=is_text,
            help="Text that ends the answer, and is cut off it; repeat it for several.",
        ),
    ] = None,
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
    repetition_penalty: Annotated[
        float,
        typer.Option(
            callback=within(1e-3),
            help="Divide the logits of tokens that were there before, along each path of a tree too; "
            "1: do not.",
        ),
    ] = 1.0,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    attention: Attention = "auto",
    chat: Chat = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Check every call against the invariants.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare/--no-compare", help="Decode one token at a time too, and compare."),
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write every round, its tree and the text so far, as one HTML page.",
            metavar="PAGE.html",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate text by draft trees: the target's own text, several tokens a pass.

    One prompt's text streams, followed by tokens a round and how many nodes
    were accepted how often; several are decoded at once, with a table in the
    end. Says whether plain decoding, one token a pass, gives the same text:
    exit code 1 if it does not. Ctrl-C stops and tells what there is. With
    --temperature, prompt number i (from 0) samples with seed --seed + i.

    \b
    Examples
      ddtree generate "Name three rivers in Europe."
      ddtree generate "Name a river." "Name a sea." --max-new-tokens 16
      ddtree generate --prompts prompts.txt --batch-size 16 --json
      ddtree generate "1, 2, 3, 4, 1, 2, 3," --raw --budget 32 --topk 4 --stop 9
      ddtree generate "Hello" --budget auto      (after: ddtree tune)
      ddtree generate "Tell me a story." --temperature 0.8 --top-p 0.95 --seed 7
      ddtree generate "Hello" --draft ngram      (prompt lookup)
      ddtree generate "Hello" --target ./my-model --draft ./my-dflash
      ddtree generate "Hello" --target Qwen/Qwen3-4B \\
        --draft z-lab/Qwen3-4B-DFlash-b16 --device cuda --dtype bfloat16
      ddtree generate "Hello" --debug
      ddtree generate "Count to ten." --trace trace.html
    """
    most, kept = budget_of(budget), topk_of(topk)
    if most is None:
        refuse_given(ctx, ("topk",), "with --budget auto, which chooses it")
    if top_p is not None and not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p} is not in (0, 1]", param_hint="--top-p")
    if temperature == 0:
        refuse_given(ctx, ("top_k", "top_p", "seed"), "with --temperature 0, which does not sample")
    if trace is not None:
        require_page(trace)
    texts = [*(prompt or ()), *(read_prompts(prompts) if prompts else ())]
    if not texts:
        fail("there is no prompt", 'give one or more: ddtree generate "Hello", or --prompts FILE')
    strings = tuple(stop or ())
    from ddtree.cli.models import encode, load_pair, require_places, require_tuned, tuned

    require_places(target, draft)
    from ddtree import invariants
    from ddtree.decoding.completion import processors_of
    from ddtree.decoding.stops import Stops, require_strings
    from ddtree.spec.sampling import Sampling

    require_strings(strings)
    batch = min(batch_size, len(texts))
    measure = f"ddtree tune {given_options(ctx, PAIR)}--batch-size {batch}"
    named = (target, draft, block_size, attention, device, dtype)
    if most is None:
        require_tuned(*named, batch_size=batch, command=measure)
    pair = load_pair(*named, lambda tokenizer: encode(tokenizer, texts, chat))
    if most is None:
        best = tuned(pair, block_size, batch, measure)
        most, kept = best.budget, best.topk
    stops = Stops(pair.stop_ids, strings, pair.text)
    is_shown = len(texts) == 1 and not as_json
    ids = encode(pair.tokenizer, texts, chat)
    pair.require_room(ids, max_new_tokens)
    run = Run(
        pair,
        stops,
        [
            Written(text, own, stops, is_shown=is_shown)
            for text, own in zip(texts, ids, strict=True)
        ],
        max_new_tokens,
        processors_of(repetition_penalty),
    )
    sampling = Sampling(temperature, top_k, top_p, seed) if temperature > 0 else None
    why = _why_not_compared(compare, temperature)
    try:
        with invariants.debug() if debug else nullcontext():
            _decode(run, most, kept, batch_size, sampling)
        if not why:
            _compare(run)
    except KeyboardInterrupt:
        why = INTERRUPTION
    except Exception:
        for one in run.written:
            if one.token_ids:
                one.end()  # what is said of it begins on a line of its own
        raise
    for one in run.written:
        one.end()
    if why == INTERRUPTION:
        stderr().print(why)  # after the text's line has ended
    if trace is not None:
        about: dict[str, object] = {
            "target": target,
            "drafter": pair.draft,
            "budget": f"{most} (auto)" if budget == "auto" else str(most),
            "topk": "all" if kept is None else str(kept),
        }
        if any(one.token_ids for one in run.written):
            with progress("drawing the rounds"):
                wrote = write_whole(trace, _traced(run, about))
            stderr().print(wrote, markup=False, soft_wrap=True)
        else:
            stderr().print(
                f"{trace} is not written: there is no token yet", markup=False, soft_wrap=True
            )
    if as_json:
        requests = [_report(one, why) for one in run.written]
        chosen = {"budget": most, "topk": kept}  # with --budget auto, what that chose
        print_json({**chosen, "requests": requests, "interrupted": why == INTERRUPTION})
    elif is_shown:
        _print(run, run.written[0], why, debug)
    else:
        _print_table(run, why, debug)
    if why == INTERRUPTION:
        raise typer.Exit(INTERRUPTED)
    if any(one.compared and not (one.compared.equal or one.compared.is_tie) for one in run.written):
        raise typer.Exit(BROKEN)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file, empty lines left out; leaves where a line of JSON is none."""
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # editors of Windows put it there
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        fail(
            f"{path}, line {number}: not UTF-8 ({error.reason})",
            f"convert it: {command('iconv', '-f', 'latin1', '-t', 'utf-8', path)} > utf8{path.suffix}",
        )
    from ddtree.spec.errors import InputError, require_text

    lines = [
        (number, line)
        for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1)
        if line.strip()
    ]
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            value = json.loads(line)
        except ValueError as error:
            fail(f"{path}, line {number}: not JSON: {error}", WANTED)
        value = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(value, str):
            fail(
                f'{path}, line {number}: neither a string nor an object with a string "prompt"',
                WANTED,
            )
        try:
            require_text(f"{path}, line {number}: it", value)  # JSON may escape what is no text
        except InputError as error:
            fail(str(error), WANTED)
        prompts.append(value)
    return prompts


class Written:
    """What has come of one prompt: its tokens are all there is of a run that is interrupted."""

    def __init__(
        self, prompt: str, prompt_ids: "Tensor", stops: "Stops", *, is_shown: bool
    ) -> None:
        from ddtree.decoding.stops import TextStream

        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.is_shown = is_shown
        self.token_ids: list[int] = []
        self.rounds: list[tuple[int, ...]] = []
        self.stats: list[RoundStats] = []
        """Of the rounds; an interruption may leave one more."""
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.found: Generation | None = None
        self.compared: Comparison | None = None
        self._stream = TextStream(stops)
        self._is_ended = False

    def __call__(self, token_ids: Sequence[int], reason: "FinishReason | None") -> None:
        """Take new tokens: one with the prompt, then those of each round."""
        if self.token_ids:
            self.rounds.append(tuple(token_ids))
        self.token_ids += token_ids
        self.finish_reason = reason
        self._show(token_ids, is_last=reason is not None)

    def end(self) -> None:
        """Show what waited, and end the line; once."""
        if not self._is_ended:
            self._is_ended = True
            self._show((), is_last=True)
            if self.is_shown:
                sys.stdout.write("\n")
                sys.stdout.flush()  # before stderr goes on

    def _show(self, token_ids: Sequence[int], *, is_last: bool) -> None:
        piece = self._stream(token_ids, finished=is_last)
        self.text += piece
        if self.is_shown:
            sys.stdout.write(piece)
            sys.stdout.flush()

    @property
    def tokens_per_round(self) -> float:
        """Tokens of a round on average; the first token comes with the prompt."""
        return sum(map(len, self.rounds)) / len(self.rounds) if self.rounds else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """How many rounds gave how many tokens: with the first token they add up to the text."""
        return dict(sorted(Counter(map(len, self.rounds)).items()))


@dataclass
class Run:
    """What one call of the command works on."""

    pair: "Pair"
    stops: "Stops"
    written: list[Written]
    max_new_tokens: int
    processors: Sequence[Any] = field(default_factory=tuple)


def bars(histogram: dict[int, int]) -> list[str]:
    """The histogram as bars of text."""
    most = max(histogram.values(), default=1)
    return [
        f"{tokens:>3} {'token ' if tokens == 1 else 'tokens'} {count:>4} "
        + "█" * max(1, round(BAR * count / most))
        for tokens, count in histogram.items()
    ]


def _decode(
    run: Run, budget: int, topk: int | None, batch_size: int, sampling: "Sampling | None"
) -> None:
    """Decode by draft trees, with progress until a text streams; all along where none does."""
    from ddtree import decoding

    written = run.written
    sizes = [one.prompt_ids.numel() + run.max_new_tokens + budget for one in written]
    target = run.pair.target(min(batch_size, len(written)), max(sizes))
    with ExitStack() as until_text:
        say = until_text.enter_context(
            progress(f"reading {'the prompt' if len(written) == 1 else 'the prompts'}")
        )

        def on_news(index: int, token_ids: Sequence[int], reason: "FinishReason | None") -> None:
            if written[index].is_shown:
                until_text.close()  # a spinner and a text do not share a line
            written[index](token_ids, reason)
            if not written[index].is_shown:
                done = sum(len(one.token_ids) for one in written)
                say(
                    f"decoding by draft trees: {done}/{len(written) * run.max_new_tokens} tokens",
                    passing=True,
                )

        found = decoding.decode(
            target,
            run.pair.drafter,
            [decoding.Request(one.prompt_ids, run.max_new_tokens) for one in written],
            budget=budget,
            topk=topk,
            sampling=sampling,
            stops=run.stops,
            processors=run.processors,
            on_news=on_news,
            on_round=lambda index, stats: written[index].stats.append(stats),
        )
    for one, generation in zip(written, found, strict=True):
        one.found = generation
        one.end()


def _traced(run: Run, about: dict[str, object]) -> bytes:
    """The page of all rounds, of an interrupted run those until then."""
    from ddtree.pictures.pages.trace import Texts, Traced, trace_page

    prompts = [
        Traced(
            one.prompt,
            one.token_ids,
            one.stats[: len(one.rounds)],
            ENDS[one.finish_reason] if one.finish_reason else "the interruption",
        )
        for one in run.written
        if one.token_ids  # those that wait come last
    ]
    return trace_page(prompts, Texts(run.pair.token_text, run.pair.whole_text), about)[1]


def _why_not_compared(compare: bool, temperature: float) -> str:
    if not compare:
        return "not asked for (--no-compare)"
    if temperature > 0:
        return (
            "sampled text: near the edge between two tokens float error alone can change a sample, "
            "and no margin tells such a case from a fault. Use --temperature 0 to compare"
        )
    return ""


def _compare(run: Run) -> None:
    from ddtree import decoding

    done, most = 0, len(run.written) * run.max_new_tokens
    with progress(f"decoding up to {counted(most, 'token')} one at a time, to compare") as say:

        def count(token_ids: Sequence[int]) -> None:
            nonlocal done
            done += len(token_ids)
            say(f"decoding one token at a time, to compare: {done}/{most}", passing=True)

        for one in run.written:
            assert one.found is not None
            expected = decoding.autoregressive(
                run.pair.plain,
                one.prompt_ids,
                max_new_tokens=run.max_new_tokens,
                stop_ids=run.stops,
                processors=run.processors,
                on_tokens=count,
            )
            one.compared = decoding.compare(one.found, expected, run.pair.plain.dtype)


def _print(run: Run, one: Written, why: str, debug: bool) -> None:
    console = stdout()
    console.print()
    passes = counted(len(one.rounds), "verify pass", "verify passes")
    per_round = f": {one.tokens_per_round:.2f} tokens a round" if one.rounds else ""
    console.print(
        f"{counted(len(one.token_ids), 'token')} in {passes}{per_round} "
        "(the first token comes with the prompt)"
    )
    if one.rounds:
        console.print(
            "tokens of a round (accepted drafts and one of the target's own), and how many rounds:"
        )
        for line in bars(one.histogram):
            console.print(line, soft_wrap=True)
    cut = _cut(one.found)
    if cut:
        console.print(f"the last round had {counted(cut, 'token')} more, past the end of the text")
    _print_end(debug)
    if one.compared is None:
        console.print(Text(f"not compared with plain decoding: {why}"))
    else:
        verdict = run.pair.verdict(one.compared)
        console.print(Text.assemble("compared with plain decoding: ", verdict))


def _print_table(run: Run, why: str, debug: bool) -> None:
    """Each prompt's text, then a table of what the trees were worth."""
    console = stdout()
    for number, one in enumerate(run.written):
        console.print(Text(f"{number}: {_short(one.prompt)}", "bold"), soft_wrap=True)
        console.print(Text(one.text), soft_wrap=True)
        console.print()
    table = Table("#")
    table.add_column("prompt", overflow="fold")
    for head in ("tokens", "ended by", "verify passes", "tokens a round", "plain"):
        table.add_column(head)
    for number, one in enumerate(run.written):
        plain = Text("-") if one.compared is None else _word(one.compared)
        table.add_row(
            str(number),
            Text(_short(one.prompt)),
            str(len(one.token_ids)),
            ENDS[one.finish_reason] if one.finish_reason else "-",
            str(len(one.rounds)),
            f"{one.tokens_per_round:.2f}" if one.rounds else "-",
            plain,
        )
    print_table(table)
    if any(one.rounds for one in run.written):
        console.print(
            "the first token comes with the prompt, and is in no verify pass", soft_wrap=True
        )
    _print_end(debug)
    for number, one in enumerate(run.written):
        if one.compared and not one.compared.equal:
            console.print(Text.assemble(f"prompt {number}: ", run.pair.verdict(one.compared)))
    if why:
        console.print(Text(f"not compared with plain decoding: {why}"))


ENDS = {"length": "its length", "stop_token": "a stop token", "stop_string": "a stop string"}


def _word(compared: "Comparison") -> Text:
    if compared.equal:
        return Text("equal", "green")
    return Text("equal up to a tie", "yellow") if compared.is_tie else Text("DIFFERENT", "red")


def _short(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= SHORT else line[: SHORT - 1] + "…"


def _print_end(debug: bool) -> None:
    if debug:
        stdout().print("debug mode: every call held to the invariants")


def _cut(found: "Generation | None") -> int:
    """Tokens of the last round past a stop or the number asked for."""
    if found is None or not found.rounds:
        return 0
    return found.rounds[-1].num_accepted - len(found.rounds[-1].new_token_ids)


def _report(one: Written, why: str) -> dict[str, Any]:
    details = [
        {
            "num_nodes": stats.num_nodes,
            "num_accepted": stats.num_accepted,
            "draft_seconds": stats.draft_seconds,
            "verify_seconds": stats.verify_seconds,
        }
        for stats in one.stats[: len(one.rounds)]
    ]
    compared = one.compared
    return {
        "prompt": one.prompt,
        "text": one.text,
        "token_ids": one.token_ids,
        "finish_reason": one.finish_reason,
        "verify_passes": len(one.rounds),
        "tokens_per_round": one.tokens_per_round,
        "acceptance_histogram": one.histogram,
        "rounds": [
            {"new_token_ids": new, **detail}
            for new, detail in zip(one.rounds, details, strict=True)
        ],
        "compared": None if compared is None else {**vars(compared), "message": str(compared)},
        "why_not_compared": None if compared else why or None,
    }

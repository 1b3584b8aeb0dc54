"""``ddtree tune``: measure what rounds cost and yield on this machine, and recommend a tree."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from ddtree.cli.generate import read_prompts
from ddtree.cli.options import (
    AUTO,
    Attention,
    BlockSize,
    Chat,
    Device,
    Draft,
    Dtype,
    Json,
    Target,
    topk_of,
    within,
)
from ddtree.cli.output import (
    counted,
    fail,
    need,
    print_json,
    print_table,
    progress_bar,
    require_place,
    stdout,
    write_whole,
)

if TYPE_CHECKING:
    from ddtree.decoding.tuning_results import Tuning


def tune(
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File of prompts like those that will come, as ddtree generate reads it. "
            "[dim]Default: six questions of ours.[/dim]",
        ),
    ] = None,
    target: Target = "embedded",
    draft: Draft = AUTO,
    block_size: BlockSize = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            help="Budgets to measure. [dim]Default: 3,7,15,31,63; on a GPU 7,15,31,63,127,255 "
            "(q_len is one more, and fills tiles).[/dim]"
        ),
    ] = None,
    topks: Annotated[
        str, typer.Option(help="Candidates kept at each depth, to be compared; 1: a chain.")
    ] = "1,2,4,8,all",
    batch_size: Annotated[
        int, typer.Option(callback=within(1, 1024), help="Prompts that will be decoded at once.")
    ] = 1,
    max_new_tokens: Annotated[
        int, typer.Option(callback=within(1), help="Of each text that acceptance is read off.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(callback=within(0), help="Of the texts; 0: greedy.")
    ] = 0.0,
    rounds: Annotated[
        int, typer.Option(callback=within(1, 1000), help="Timed for each budget, at most.")
    ] = 8,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    attention: Attention = "auto",
    chat: Chat = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it too: a .png or .svg file.", dir_okay=False)
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--store/--no-store", help="Keep the result, for ddtree generate --budget auto."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Find the budget and topk that decode fastest on this machine.

    A larger tree yields more tokens a round, but its verify pass costs more.
    How much of each depends on machine, model, drafter and prompts, so this
    measures: rounds of the real loop are timed at every budget, and plain
    decoding beside them; acceptance is read off texts that the target writes
    to the prompts, exactly as decoding them would go, for every budget and
    topk at once. Recommended is what gives most tokens a second. On a CPU
    that often is plain decoding; then it says so. About a minute for the
    embedded target on two idle cores; time grows with the model, the prompts,
    --max-new-tokens, the budgets and --rounds, and on a busy machine, where
    the result is worth little: then it says so too.

    Columns "topk ..." hold tokens a round; at "even at" tokens a round trees
    of that budget are as fast as plain decoding.

    Taken for granted: that other prompts accept as these do, and that a round
    costs the same at every topk and, but for the prefixes, everywhere in a
    text. Prompts like yours make the better measurement.

    \b
    Examples
      ddtree tune
      ddtree tune --prompts mine.txt --batch-size 8 --plot tuning.png
      ddtree tune --budgets 4,8,16 --topks 1,all --max-new-tokens 128
      ddtree tune --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 \\
        --device cuda --dtype bfloat16
      ddtree generate "Hello" --budget auto
    """
    if plot is not None and plot.suffix not in {".png", ".svg"}:
        raise typer.BadParameter(f"{plot} ends in neither .png nor .svg", param_hint="--plot")
    if plot is not None:
        need("plots", "matplotlib")
        require_place(plot)
    wanted = _budgets(budgets) if budgets is not None else None
    kept = list(dict.fromkeys(topk_of(word.strip(), "--topks") for word in topks.split(",")))
    texts = read_prompts(prompts) if prompts else None
    if texts == []:
        fail(f"there is no prompt in {prompts}", "give one a line")
    from ddtree.cli.models import NGRAM_BLOCK_SIZE, block_size_of, encode, load_pair, require_places

    require_places(target, draft)
    from ddtree.decoding import tuning
    from ddtree.decoding.stops import Stops
    from ddtree.decoding.tuning_results import key_of, store

    least = block_size_of(target, draft, block_size)
    if max_new_tokens < least:
        fail(
            f"--max-new-tokens is {max_new_tokens}; a round is read off {least}, the drafter's block size",
            f"give {least} or more; several times as many say more",
        )
    asked = texts or tuning.PROMPTS
    pair = load_pair(
        target, draft, block_size, attention, device, dtype, lambda it: encode(it, asked, chat)
    )
    on_gpu = pair.plain.device.type == "cuda"
    wanted = wanted or (tuning.BUDGETS_CUDA if on_gpu else tuning.BUDGETS)
    ids = encode(pair.tokenizer, asked, chat)
    pair.require_room(ids, max_new_tokens)
    size = max(prompt.numel() for prompt in ids) + max_new_tokens + max(wanted)
    named = block_size or NGRAM_BLOCK_SIZE
    with progress_bar() as on_progress:
        found = tuning.measure(
            pair.target(batch_size, size),
            pair.plain,
            pair.drafter,
            ids,
            key=key_of(pair.plain.model, pair.draft, pair.attention, batch_size, named),
            budgets=wanted,
            topks=kept,
            max_new_tokens=max_new_tokens,
            stops=Stops(pair.stop_ids),
            temperature=temperature,
            rounds=rounds,
            on_progress=on_progress,
        )
    where = store(found) if keep else None
    if plot is not None:
        from ddtree.pictures.tuning import render

        write_whole(plot, render(found, "svg" if plot.suffix == ".svg" else "png"))
    if as_json:
        print_json({**found.as_json(), "stored": where, "plot": plot})
    else:
        _print(found, where, plot)


def _budgets(text: str) -> tuple[int, ...]:
    """Read ``--budgets``."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= 4096 for word in words):
        raise typer.BadParameter(
            f"{text!r} is no list of whole numbers from 1 to 4096, such as 7,15,31",
            param_hint="--budgets",
        )
    return tuple(map(int, words))


def _print(found: "Tuning", where: Path | None, plot: Path | None) -> None:
    console = stdout()
    console.print(Text(str(found.key), "bold"), soft_wrap=True)
    plain = found.plain
    console.print(
        Text(
            f"plain decoding: {plain.ms.median:.1f} ms a pass, {plain.tokens_per_second:.3g} tokens/s "
            f"({plain.how})"
        ),
        soft_wrap=True,
    )
    print_table(_costs(found))
    print_table(_yields(found))
    best = found.best
    style = "bold green" if best.budget else "bold yellow"
    console.print(Text(str(found), style), soft_wrap=True)
    if found.noise:
        console.print(Text(found.noise, "bold yellow"), soft_wrap=True)
    shortest, longest = found.prefix_lens
    console.print(
        Text(
            f"read off {found.new_tokens} tokens of {counted(found.prompts, 'text')} at temperature "
            f"{found.temperature:g}, prefixes of {shortest} to {longest}; other prompts accept more or "
            "less, and longer prefixes cost more: tune on prompts like yours (--prompts)"
        ),
        soft_wrap=True,
    )
    if where is not None:
        console.print(Text(f"stored for --budget auto: {where}"), soft_wrap=True)
    if plot is not None:
        console.print(Text(f"drawn: {plot}"), soft_wrap=True)


def _costs(found: "Tuning") -> Table:
    """What a round costs."""
    heads = ("budget", "q_len", "draft\nms", "verify\nms", "quartiles", "rounds\ntimed")
    table = Table(*heads, box=SIMPLE)
    for cost in found.costs:
        low, high = cost.verify_ms.low, cost.verify_ms.high
        table.add_row(
            str(cost.budget), str(cost.q_len),
            f"{cost.draft_ms.median:.1f}" if cost.draft_ms else "in verify",
            f"{cost.verify_ms.median:.1f}", f"{low:.1f} to {high:.1f}", str(cost.rounds),
        )  # fmt: skip
    return table


def _yields(found: "Tuning") -> Table:
    """Tokens a round by topk, and what the best of them gives."""
    topks = list(dict.fromkeys(each.topk for each in found.accepted))
    heads = (f"topk\n{topk or 'all'}" for topk in topks)  # narrow: a terminal has 80 columns
    table = Table("budget", *heads, "even\nat", "tokens\n/s", "by\nprompt", box=SIMPLE)
    for budget in (cost.budget for cost in found.costs[1:]):
        rates = [rate for rate in found.rates if rate.budget == budget]
        lengths = [each.tokens_per_round for each in found.accepted if each.budget == budget]
        rate = max(rates, key=lambda rate: rate.tokens_per_second)
        table.add_row(
            str(budget), *(f"{length:.2f}" for length in lengths), f"{found.even_at(budget):.2f}",
            f"{rate.tokens_per_second:.3g}", f"{rate.lowest:.3g} to {rate.highest:.3g}",
            style="bold green" if budget == found.best.budget else "",
        )  # fmt: skip
    return table

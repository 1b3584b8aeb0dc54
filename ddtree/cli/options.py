"""Options that several verbs share, and what their words mean."""

import shlex
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree.cli.output import fail, stdout_for_json


def within(low: float, high: float = inf) -> Callable[[Any], Any]:
    """A callback that refuses numbers outside ``[low, high]``, NaN and infinity too, and says which."""

    def check(value: Any) -> Any:
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if number is not None and not (low <= number <= high and number < inf):
                whole = "" if isinstance(number, int) else " and finite"
                most = f" and at most {high}" if high < inf else whole
                raise typer.BadParameter(f"{number}; it must be at least {low}{most}")
        return value

    return check


def one_of(*words: str) -> Callable[[str], str]:
    """A callback that refuses all other words."""

    def check(value: str) -> str:
        if value not in words:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(words)}")
        return value

    return check


def is_text(value: str | list[str] | None) -> str | list[str] | None:
    """A callback that refuses arguments with bytes that are not UTF-8."""
    texts = [value] if isinstance(value, str) else value or []
    if not all(map(_is_utf8, texts)):
        from ddtree.spec.errors import InputError, require_text

        try:
            for i, text in enumerate(texts):
                require_text("it" if len(texts) == 1 else f"number {i}", text)
        except InputError as error:
            raise typer.BadParameter(str(error)) from error
    return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


Target = Annotated[
    str,
    typer.Option(
        help="The model that verifies: [bold]embedded[/bold] (SmolLM2-135M), a folder, a .gguf "
        "file, or the name of a model in the local Hugging Face cache."
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        help="The drafter: [bold]embedded[/bold] (trained for the embedded target), [bold]ngram[/bold] "
        "(prompt lookup, no weights), or a DFlash checkpoint: its folder or its name in the local Hugging "
        "Face cache. [bold]auto[/bold]: embedded for the embedded target; ngram for others, and with "
        "--block-size."
    ),
]
Budget = Annotated[
    int, typer.Option(callback=within(0, 4096), help="Most drafted nodes of a tree.")
]


def _check_budget(text: str) -> str:
    """Refuse what is neither ``auto`` nor a budget."""
    if text != AUTO:
        try:
            within(0, 4096)(int(text))
        except ValueError:
            raise typer.BadParameter(f"{text} is neither a whole number nor '{AUTO}'") from None
    return text


AUTO = "auto"
BudgetOrAuto = Annotated[
    str,
    typer.Option(
        callback=_check_budget,
        help="Most drafted nodes of a tree; [bold]auto[/bold]: budget and topk that [bold]ddtree "
        "tune[/bold] found best on this machine.",
    ),
]
TopK = Annotated[
    str,
    typer.Option(help="Candidates kept at each depth: a number (1: a chain) or [bold]all[/bold]."),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        callback=within(1, 4096),
        help="Tokens of one drafter pass, the root included: the tree is at most one less deep. "
        "[dim]Default: the DFlash checkpoint's own; 8 for ngram.[/dim]",
    ),
]
Device = Annotated[
    str, typer.Option(help="Where the models run: [bold]cpu[/bold], [bold]cuda[/bold], cuda:1.")
]
Dtype = Annotated[
    str,
    typer.Option(
        callback=one_of("float32", "bfloat16", "float16"),
        help="Of the models' weights. Below float32 the text is greedy under the verifier's own logits, and "
        "often not that of plain decoding.",
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        callback=one_of("auto", "dense", "paged"),
        help="How the target verifies: [bold]dense[/bold] (Transformers' own attention under a dense "
        "mask), [bold]paged[/bold] (the kernels of ddtree.impl on a paged KV pool), "
        "[bold]auto[/bold]: paged on a CUDA device, dense elsewhere.",
    ),
]
Seed = Annotated[int, typer.Option(callback=within(0, 2**63 - 1), help="Seed of what is random.")]
MaxNewTokens = Annotated[int, typer.Option(callback=within(1), help="Most tokens to generate.")]


def _keep_stdout(ctx: typer.Context, value: bool) -> bool:
    """Under ``--json``, until the verb has ended."""
    if value:
        ctx.with_resource(stdout_for_json())
    return value


Json = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_keep_stdout,
        help="Print one JSON object on stdout, nothing else; what else prints goes to stderr, errors too. At "
        "exit code 2 why stands on stderr; stdout is empty where the request was refused, and has the JSON "
        "where it was carried out and nothing could be judged.",
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Put the prompt into the model's chat template, or continue it as it stands. "
        "[dim]Default: the template where the tokenizer has one.[/dim]",
    ),
]
Prefix = Annotated[
    list[int] | None,
    typer.Option(
        callback=within(0, 2**20),
        help="Committed tokens of a made-up request; repeat it for a batch. Needs no model: the "
        "draft is random, from --seed.",
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(callback=is_text, help="Take the call from a real generation from this prompt."),
]
WhichRound = Annotated[
    int,
    typer.Option(
        "--round", callback=within(1), help="With --prompt: which verify call of the generation."
    ),
]
Fault = Annotated[
    str | None,
    typer.Option(
        help="Break the call on purpose: [bold]width=8[/bold] (the founding bug: every width from "
        "a configured 8), qo_indptr=8, mask_indptr=8, max_q_len=8 (one field alone), "
        "mask=inverted, padding=visible, positions=row."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder for PNG and SVG; made if missing.")]


def refuse_given(ctx: typer.Context, names: Iterable[str], why: str) -> None:
    """Leave if options were given that would be ignored; ``names`` are those of the parameters."""
    parameters = [parameter for parameter in ctx.command.params if parameter.name in set(names)]
    given = [
        "/".join([*parameter.opts, *parameter.secondary_opts])
        for parameter in parameters
        if getattr(ctx.get_parameter_source(str(parameter.name)), "name", "") == "COMMANDLINE"
    ]
    if given:
        fail(f"{', '.join(given)} cannot be given {why}", f"leave out {', '.join(given)}")


def given_options(ctx: typer.Context, names: Iterable[str]) -> str:
    """The options of these parameters that were given, as a command has them; each ends in a space."""
    named = {str(parameter.name): parameter.opts[0] for parameter in ctx.command.params}
    return "".join(
        f"{named[name]} {shlex.quote(str(ctx.params[name]))} "
        for name in names
        if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    )


OF_PROMPT = ("which_round", "target", "draft", "chat")
"""Parameters of a generation: without a prompt there is none."""
OF_MADE_UP = ("prefix", "seed")
"""Parameters of a made-up call."""
OF_SOURCE = ("prompt", *OF_PROMPT, *OF_MADE_UP, "budget", "topk", "block_size", "fault")
"""All parameters that say which call is made."""


def refuse_ignored(ctx: typer.Context, prompt: str | None) -> None:
    """Refuse options of the source of calls that is not used."""
    if prompt is None:
        refuse_given(ctx, OF_PROMPT, "without --prompt: a made-up call has no model and no rounds")
    else:
        why = "with --prompt: the call then comes from a greedy generation, none is made up"
        refuse_given(ctx, OF_MADE_UP, why)


def budget_of(text: str) -> int | None:
    """Read a checked ``--budget``; None: auto."""
    return None if text == AUTO else int(text)


def topk_of(text: str, option: str = "--topk") -> int | None:
    """Read ``--topk``, or one of ``--topks``; None keeps all."""
    if text == "all":
        return None
    try:
        topk = int(text)
    except ValueError:
        topk = 0
    if topk < 1:
        raise typer.BadParameter(
            f"{text} is neither 'all' nor a whole number from 1 on", param_hint=option
        )
    return topk

"""Options that several verbs share, and what their words mean."""

from pathlib import Path
from typing import Annotated

import typer

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
        help="The drafter: [bold]ngram[/bold] (prompt lookup, no weights) or the folder of a "
        "DFlash checkpoint."
    ),
]
Budget = Annotated[int, typer.Option(min=0, max=4096, help="Most drafted nodes of a tree.")]
TopK = Annotated[
    str,
    typer.Option(help="Candidates kept at each depth: a number (1: a chain) or [bold]all[/bold]."),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="Tokens of one drafter pass, the root included: the tree is at most one less deep. "
        "[dim]Default: the DFlash checkpoint's own; 8 for ngram.[/dim]",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of everything random.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")
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
        min=0,
        help="Committed tokens of a made-up request; repeat it for a batch. Needs no model: the "
        "draft is random, from --seed.",
    ),
]
Prompt = Annotated[
    str | None, typer.Option(help="Take the call from a real generation from this prompt.")
]
WhichRound = Annotated[
    int, typer.Option("--round", min=1, help="With --prompt: which verify call of the generation.")
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


def topk_of(text: str) -> int | None:
    """Read ``--topk``; None keeps all."""
    if text == "all":
        return None
    try:
        topk = int(text)
    except ValueError:
        topk = 0
    if topk < 1:
        raise typer.BadParameter(
            f"{text} is neither 'all' nor a whole number from 1 on", param_hint="--topk"
        )
    return topk

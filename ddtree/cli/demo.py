"""``ddtree demo``: the founding bug on real text, told and checked."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.columns import Columns
from rich.console import Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from ddtree.cli.options import Json, within
from ddtree.cli.output import (
    BROKEN,
    Say,
    need,
    print_json,
    progress,
    stderr,
    stdout,
    writable_folder,
)

if TYPE_CHECKING:
    from ddtree.cli.models import Pair
    from ddtree.cli.story import Outcome, Part

MIN_SIDE_BY_SIDE = 80
"""Columns of a terminal in which two texts fit beside each other."""
NEW_TOKENS = 16
"""Up to about ten apples: enough to be garbled, and for trees to save half the passes."""
WORKING = {
    "a": "decoding one token a pass, then by draft trees",
    "b": "decoding with the founding bug, four times",
    "c": "the same in debug mode, and without the bug",
    "d": "decoding with the bug and a budget that hides it",
    "e": "drawing a tree",
}


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture; made if missing.")] = Path(
        "ddtree-demo"
    ),
    max_new_tokens: Annotated[
        int, typer.Option(callback=within(8), help="Length of each text.")
    ] = NEW_TOKENS,
    as_json: Json = False,
) -> None:
    """Tell the story on real text: right, garbled, caught, invisible, drawn.

    Draft trees give a model's own text in fewer passes. One width taken from
    configuration garbles it. Debug mode stops that at the first call. With
    budget 7 nobody would notice. Runs SmolLM2-135M on the CPU, offline.

    Each part checks itself; exit code 1 if one does not come out as told.

    \b
    Examples
      ddtree demo
      ddtree demo --out pictures/ --max-new-tokens 32
      ddtree demo --json > demo.json
    """
    need("plots", "matplotlib")
    writable_folder(out)
    from ddtree.cli.models import load_pair

    begin = time.perf_counter()
    pair = load_pair("embedded", "ngram", block_size=None, attention="reference")
    with progress("reading the prompt"):
        from ddtree.cli import story
        from ddtree.decoding import DFlashDrafter

        told = story.Story(pair, DFlashDrafter.load("embedded", pair.plain), max_new_tokens)
    if not as_json:
        stdout().print(Text.assemble(("prompt\n", "bold"), story.PROMPT))
    parts, parts_to_come = [], story.tell(told)
    for working in WORKING.values():
        with progress(working) as say:
            told.say = partial(_say_run, say, working)
            part = next(parts_to_come)
            if part.view is not None:
                from ddtree.cli.show import draw

                part.files.extend(draw(part.view, out, "tree", say))
        parts.append(part)
        if not as_json:
            _print(part, pair)
    seconds = time.perf_counter() - begin
    ok = all(part.ok for part in parts)
    if as_json:
        told_parts = [story.report(part) for part in parts]
        print_json({"ok": ok, "prompt": story.PROMPT, "parts": told_parts, "seconds": seconds})
    else:
        _print_end(parts, seconds)
    if not ok:
        raise typer.Exit(BROKEN)


def _say_run(say: Say, working: str, run: str) -> None:
    """One run of a part: beside the part's name on a terminal, on a line of its own elsewhere."""
    say(f"{working}: {run}" if stderr().is_terminal else f"  {run}")


def _print(part: "Part", pair: "Pair") -> None:
    console = stdout()
    mark = ("as told", "bold green") if part.ok else ("NOT AS TOLD", "bold red")
    console.print()
    console.print(Text.assemble((f"({part.letter}) {part.claim}: ", "bold"), mark))
    if part.letter == "a" and console.width >= MIN_SIDE_BY_SIDE:
        half = console.width // 2
        panels = [Panel(one.text.strip(), title=_head(one), width=half) for one in part.outcomes]
        console.print(Columns(panels, padding=0))
        console.print(pair.verdict(part.outcomes[-1].compared))
    else:
        said = ""
        for one in part.outcomes:
            console.print(_told(one, pair, is_new=str(one.violation) != said))
            said = str(one.violation or said)
    if part.view is not None:
        from ddtree.pictures.text import title, tree_text

        console.print(title(part.view), soft_wrap=True)
        console.print(tree_text(part.view), soft_wrap=True)
    for path in part.files:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _told(one: "Outcome", pair: "Pair", *, is_new: bool) -> Group:
    """One run in a few lines; a violation that was told just before is only named."""
    head = Text.assemble(("  " if one.ok else "! ", "bold red"), (f"{_head(one)}: ", "bold"))
    below = ""
    if one.violation is not None:
        style = "green" if one.ok else "bold red"
        head.append(f"stopped by {one.violation.invariant}", style)
        below = str(one.violation) if is_new else ""
    elif one.compared is not None:
        head.append(pair.verdict(one.compared))
        below = "" if one.compared.equal else one.text.strip()
    else:
        head.append(repr(one.text))
    lines = [Padding(Text(line), (0, 0, 0, 6)) for line in below.splitlines()]
    return Group(head, *lines)


def _head(one: "Outcome") -> str:
    return one.name if one.verify_passes is None else f"{one.name}, {one.verify_passes} passes"


def _print_end(parts: "list[Part]", seconds: float) -> None:
    bad = [part.letter for part in parts if not part.ok]
    said = f"NOT as told: {', '.join(bad)}" if bad else "everything came out as told"
    stdout().print()
    stdout().print(Text(f"{said}, in {seconds:.0f} s", "bold red" if bad else "bold green"))

"""``ddtree demo``: the founding bug on real text, told and checked."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.columns import Columns
from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from ddtree.cli.options import Json
from ddtree.cli.output import BROKEN, need, print_json, progress, stdout, writable_folder

if TYPE_CHECKING:
    from ddtree.cli.story import Outcome, Part

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
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Length of each text.")] = 48,
    as_json: Json = False,
) -> None:
    """Tell the story on real text: right, garbled, caught, invisible, drawn.

    Draft trees give a model's own text in fewer passes. One width taken from configuration garbles
    it. Debug mode stops that at the first call. With budget 7 nobody would notice. Each part checks
    itself; exit code 1 if one does not come out as told. Runs SmolLM2-135M on the CPU, offline.

    \b
    Examples
      ddtree demo
      ddtree demo --out pictures/ --max-new-tokens 32
      ddtree demo --json > demo.json
    """  # noqa: D301
    need("plots", "matplotlib")
    writable_folder(out)
    from ddtree.cli.models import load_pair

    begin = time.perf_counter()
    pair = load_pair("embedded", "ngram", block_size=None, attention="reference")
    with progress("reading the prompt"):
        from ddtree.cli import story

        told = story.Story(pair, max_new_tokens)
    if not as_json:
        stdout().print(Text.assemble(("prompt\n", "bold"), story.PROMPT))
    parts, parts_to_come = [], story.tell(told)
    for working in WORKING.values():
        with progress(working):
            part = next(parts_to_come)
            if part.view is not None:
                from ddtree.cli.show import draw

                part.files.extend(draw(part.view, out, "tree"))
        parts.append(part)
        if not as_json:
            _print(part)
    seconds = time.perf_counter() - begin
    ok = all(part.ok for part in parts)
    if as_json:
        told_parts = [story.report(part) for part in parts]
        print_json({"ok": ok, "prompt": story.PROMPT, "parts": told_parts, "seconds": seconds})
    else:
        _print_end(parts, seconds)
    if not ok:
        raise typer.Exit(BROKEN)


def _print(part: "Part") -> None:
    console = stdout()
    mark = ("as told", "bold green") if part.ok else ("NOT AS TOLD", "bold red")
    console.print()
    console.print(Text.assemble((f"({part.letter}) {part.claim}: ", "bold"), mark))
    if part.letter == "a" and console.width >= 80:
        panels = [Panel(one.text, title=_head(one), width=console.width // 2 - 1) for one in part.outcomes]
        console.print(Columns(panels, padding=0))
        console.print(_verdict(part.outcomes[-1]))
        return
    said = ""
    for one in part.outcomes:
        console.print(_told(one, said))
        said = str(one.violation or "") or said
    if part.view is not None:
        from ddtree.pictures.text import title, tree_text

        console.print(title(part.view), soft_wrap=True)
        console.print(tree_text(part.view), soft_wrap=True)
    for path in part.files:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def _told(one: "Outcome", said: str) -> RenderableType:
    """One run in a few lines; a violation told before is only named."""
    text = Text()
    text.append("  " if one.ok else "! ", "bold red")
    text.append(f"{_head(one)}: ", "bold")
    if one.violation is not None:
        told = str(one.violation)
        text.append(f"stopped by {one.violation.invariant}", "green" if one.ok else "bold red")
        if told != said:
            text.append("\n" + "\n".join(f"      {line}" for line in told.splitlines()), "yellow")
        return text
    text.append(_verdict(one))
    if one.compared is None or not one.compared.equal:
        text.append("\n" + "\n".join(f"      {line}" for line in one.text.strip().splitlines()))
    return text


def _head(one: "Outcome") -> str:
    return one.name if one.verify_passes is None else f"{one.name}, {one.verify_passes} passes"


def _verdict(one: "Outcome") -> Text:
    if one.compared is None:
        return Text()
    style = "green" if one.compared.equal else "yellow" if one.compared.is_tie else "red"
    return Text(str(one.compared), style)


def _print_end(parts: "list[Part]", seconds: float) -> None:
    bad = [part.letter for part in parts if not part.ok]
    said = f"NOT as told: {', '.join(bad)}" if bad else "everything came out as told"
    stdout().print()
    stdout().print(Text(f"{said}, in {seconds:.0f} s", "bold red" if bad else "bold green"))

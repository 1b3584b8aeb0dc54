"""``ddtree isolate``: which factor decides where a backend's attention fails."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from ddtree.cli.backends import BackendName, Seconds, find, list_backends
from ddtree.cli.options import Json, Seed, within
from ddtree.cli.output import (
    BROKEN,
    command,
    counted,
    fail,
    print_json,
    print_table,
    progress,
    require_place,
    stdout,
    write_whole,
)
from ddtree.cli.report import Html, require_page
from ddtree.cli.report import isolation as page_of

if TYPE_CHECKING:
    from ddtree.invariants.conformance.isolate import Isolation


def isolate(
    backend: BackendName = None,
    seconds: Seconds = 40.0,
    calls: Annotated[int, typer.Option(callback=within(1), help="Most calls.")] = 10_000,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="File for every call and its outcome, as JSON.")
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Find which factor decides where a backend's attention, or plan, fails, in a sentence.

    Budget, branching (a chain or a tree), padding (num_nodes < q_len or
    equal), execution (eager, fixed buffers, replay), prefix, batch position,
    page size, and widths and prefixes that differ within the call are
    crossed. Each call tells exactly which entries every row
    saw. The smallest rule that all outcomes bear out is told, with the table
    behind it; where outcomes cannot tell two rules apart, it says so. A cause
    is named only where every failing call bears it out.

    Of a backend without verify_attention the layouts of its plan_verify are
    compared in the same way, called eagerly.

    Not crossed: windows, softcap, sinks, log-sum-exp and values. Those ddtree
    conform holds to the reference.

    Exit code: 0 nothing fails, 1 something does, 2 not possible, every call
    was refused, or nothing failed in fewer than 20 calls: too few to tell.

    \b
    Examples
      ddtree isolate                      the built-in backends
      ddtree isolate founding-bug
      ddtree isolate mine.py:Mine --seconds 300 --out cells.json
      ddtree isolate mine.py:Mine --html isolation.html
    """
    if backend is None:
        list_backends("isolate", as_json=as_json)
        return
    if out is not None:
        _require_json(out)
    if html is not None:
        require_page(html)
    found, runs_on = find(backend, "isolate")
    from ddtree.invariants.conformance.isolate import isolate as run
    from ddtree.spec.errors import InputError

    try:
        with progress(f"crossing the factors on {backend}"):
            isolation = run(found, backend, seconds=seconds, calls=calls, seed=seed)
    except InputError as error:
        conform = command("ddtree", "conform", backend)
        fail(str(error), f"{conform}  (holds what it offers to the reference)")
    data = isolation.data() | {"runs_on": runs_on}
    if out is not None:
        import json

        write_whole(out, json.dumps(data, indent=1).encode())
    if html is not None:
        wrote = write_whole(html, page_of(data, Path.cwd())[1])
    if as_json:
        print_json(data)
    else:
        _print(isolation, runs_on)
        if html is not None:
            stdout().print(wrote, markup=False, soft_wrap=True)
    if isolation.unsteady or any(o.failed for o in isolation.observations):
        raise typer.Exit(BROKEN)
    if isolation.is_short:
        # the report stands on stdout: a script that reads exit code 2 looks for the reason on stderr
        fail(isolation.headline, _more(isolation, backend))


def _require_json(out: Path) -> None:
    """Leave if the cells cannot be written there, or as what no ``ddtree report`` reads."""
    if out.suffix != ".json":
        fail(
            f"{out} is to hold JSON; a page is what --html writes",
            f"name it {command(out.with_suffix('.json'))}",
        )
    require_place(out)


def _more(isolation: "Isolation", backend: str) -> str:
    """What to do where nothing can be told."""
    if not isolation.observations:
        return f"let it take more calls; what it refuses: {command('ddtree', 'conform', backend)}"
    return "give it more: --calls and --seconds, or refuse fewer calls"


def _print(isolation: "Isolation", runs_on: str) -> None:
    console = stdout()
    console.print(Text.assemble((isolation.name, "bold"), f"  ({runs_on})"), soft_wrap=True)
    table = Table(header_style="bold", pad_edge=False)
    table.add_column("factor")
    table.add_column("requests that fail, at each level", overflow="fold")
    for factor in dict.fromkeys(row["factor"] for row in isolation.table):
        line = Text()
        for row in isolation.table:
            if row["factor"] == factor:
                line.append(f"{_level(row['level'])} ")
                share = row["failed"] / row["requests"]
                style = "green" if share == 0 else "bold red" if share == 1 else "yellow"
                line.append(f"{row['failed']}/{row['requests']}", style)
                line.append("   ")
        table.add_row(factor, line)
    print_table(table)
    for reason, count in isolation.refused.most_common(3):
        console.print(Text(f"refused {counted(count, 'call')}: {reason}", "yellow"), soft_wrap=True)
    first = isolation.example
    if first is not None:
        console.print(Text(f"for example: {first.cell}"), soft_wrap=True)
        console.print(Text(f"  {first.what}", "red"), soft_wrap=True)
    judged = "bold yellow" if isolation.is_short else "bold green"
    style = judged if first is None else "bold red"
    console.print(Text(isolation.headline, style), soft_wrap=True)
    if isolation.function == "plan_verify":
        told = "compared: the layouts of plan_verify; there is no verify_attention to look at"
        console.print(Text(told), soft_wrap=True)
    elif first is None:
        other = "not crossed: windows, softcap, sinks, log-sum-exp, values; what holds those:"
        console.print(
            Text(f"{other} {command('ddtree', 'conform', isolation.name)}"), soft_wrap=True
        )


def _level(level: object) -> str:
    return (
        {True: "yes", False: "no"}.get(level, str(level)) if isinstance(level, bool) else str(level)
    )

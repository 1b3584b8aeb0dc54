"""``ddtree catalogue``: the faults that real engines had, each rebuilt and caught."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ddtree.cli.options import Json
from ddtree.cli.output import BROKEN, counted, fail, print_json, print_table, progress_bar, stdout

if TYPE_CHECKING:
    from ddtree.catalogue import Row
    from ddtree.catalogue.run import Outcome


def catalogue(
    row: Annotated[
        str | None, typer.Argument(help="One row's number: its story, numbers and violations.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List the other members of each kind too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the catalogue: faults of real engines and their kin, each caught by name.

    Every fault is a sound call and what spoils it, or a sound piece of code and its mutant. It is
    named by an invariant (as ddtree check names it) or found by a property that fuzzing runs.

    Exit code: 0 every fault is caught, 1 one is not.

    \b
    Examples
      ddtree catalogue
      ddtree catalogue 1        the founding bug
      ddtree catalogue --json
    """
    from ddtree.catalogue import CATALOGUE
    from ddtree.catalogue.run import run

    rows = [each for each in CATALOGUE if row in {None, str(each.number)}]
    if not rows:
        known = ", ".join(str(each.number) for each in CATALOGUE)
        fail(f"the catalogue has no row {row}; it has {known}", "ddtree catalogue")
    outcomes: list[list[Outcome]] = []
    with progress_bar() as show:
        for number, each in enumerate(rows):
            what = "running the catalogue" if row is None else f"running row {row}"
            show(number, len(rows), what)
            outcomes.append([run(member) for member in each.members])
    if as_json:
        print_json({"rows": [_plain(*pair) for pair in zip(rows, outcomes, strict=True)]})
    elif row is not None:
        _print_row(rows[0], outcomes[0])
    else:
        _print_table(rows, outcomes, verbose=verbose)
    if not all(outcome.ok for each in outcomes for outcome in each):
        raise typer.Exit(BROKEN)


def _print_table(rows: "list[Row]", outcomes: "list[list[Outcome]]", *, verbose: bool) -> None:
    table = Table(header_style="bold", pad_edge=False, show_lines=True)
    for name, ratio in (("row", 1), ("fault", 7), ("caught by", 4), ("at", 4), ("hint", 7)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for each, found in zip(rows, outcomes, strict=True):
        fault = f"{each.source}: {each.fault}"
        kin = counted(len(found) - 1, "more of its kind", "more of its kind")
        caught = _caught(found[0])
        if not verbose:
            caught.append(
                f"\n{kin}", "bright_black" if all(o.ok for o in found[1:]) else "bold red"
            )
        table.add_row(str(each.number), fault, caught, _at(found[0]), found[0].hint)
        if verbose:
            for member, outcome in zip(each.members[1:], found[1:], strict=True):
                table.add_row("", member.what, _caught(outcome), _at(outcome), outcome.hint)
    console = stdout()
    print_table(table)
    numbers = {each.number for each in rows}
    free = sorted({*range(1, max(numbers))} - numbers)
    if free:
        listed = ", ".join(map(str, free))
        told = f"a row's number is its name and never changes; no row is called {listed}"
        console.print(Text(told, "bright_black"), soft_wrap=True)
    flat = [outcome for found in outcomes for outcome in found]
    caught_in_all = sum(outcome.ok for outcome in flat)
    faults = counted(len(flat), "fault")
    verdict = f"{counted(len(rows), 'row')}, {faults} with their kin, {caught_in_all} caught"
    style = "bold green" if caught_in_all == len(flat) else "bold red"
    console.print(Text(verdict, style))


def _caught(outcome: "Outcome") -> Text:
    if outcome.ok:
        return Text(outcome.caught_by, "green")
    return Text(f"NOT CAUGHT by {outcome.caught_by}", "bold red")


def _at(outcome: "Outcome") -> str:
    """The public call that debug mode stops, with the invariant it names where that is another."""
    if outcome.met is None:
        return "ddtree check"
    by = "" if outcome.met.by == outcome.caught_by else f" ({outcome.met.by})"
    return f"{outcome.met.at.removeprefix('on entry to ')}{by}"


def _print_row(row: "Row", outcomes: "list[Outcome]") -> None:
    console = stdout()
    console.print(Text(f"{row.number}  {row.source}: {row.fault}", "bold"), soft_wrap=True)
    console.print(Text(row.story), soft_wrap=True)
    console.print(Text(f"kind: {row.kind}", "cyan"), soft_wrap=True)
    for member, outcome in zip(row.members, outcomes, strict=True):
        console.print()
        console.print(Text(member.what, "bold"), soft_wrap=True)
        console.print(Text(f"  right: {outcome.sound}", "green"), soft_wrap=True)
        console.print(
            Text(f"  wrong: expected {outcome.expected}, found {outcome.found}", "red"),
            soft_wrap=True,
        )
        console.print(Text(f"  at:    {_at(outcome)}"), soft_wrap=True)
        verdict = outcome.message if outcome.ok else f"NOT CAUGHT\n{outcome.message}"
        console.print(Text("\n".join(f"  {line}" for line in verdict.splitlines())), soft_wrap=True)


def _plain(row: "Row", outcomes: "list[Outcome]") -> dict[str, Any]:
    faults = [
        {
            "what": member.what,
            "caught": outcome.ok,
            "caught_by": outcome.caught_by,
            "at": None if outcome.met is None else outcome.met.at,
            "named_there": None if outcome.met is None else outcome.met.by,
            "right": outcome.sound,
            "expected": outcome.expected,
            "found": outcome.found,
            "hint": outcome.hint,
            "message": outcome.message,
        }
        for member, outcome in zip(row.members, outcomes, strict=True)
    ]
    about = {name: getattr(row, name) for name in ("number", "source", "fault", "kind", "story")}
    return {**about, "faults": faults}

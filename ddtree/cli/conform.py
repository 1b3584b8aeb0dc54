"""``ddtree conform``: fuzz a third party's functions against the reference."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ddtree.cli.backends import BackendName, Seconds, find, list_backends
from ddtree.cli.options import Json, Seed, refuse_given, within
from ddtree.cli.output import (
    BROKEN,
    command,
    counted,
    fail,
    print_json,
    print_table,
    progress,
    require_file,
    stdout,
    writable_folder,
    write_whole,
)
from ddtree.cli.report import Html, conformance, require_page

if TYPE_CHECKING:
    from ddtree.invariants.conformance import Backend
    from ddtree.invariants.conformance.fuzz import Result

_STYLES = {
    "holds": "green",
    "broken": "bold red",
    "refused": "yellow",
    "not offered": "bright_black",
}


def conform(
    ctx: typer.Context,
    backend: BackendName = None,
    only: Annotated[
        str, typer.Option(help="A function, or a part of a property's name.", metavar="NAME")
    ] = "",
    examples: Annotated[
        int,
        typer.Option(
            callback=within(1), help="Most cases drawn for a property; shrinking tries more."
        ),
    ] = 60,
    seconds: Seconds = 50.0,
    seed: Seed = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for the smallest failing cases; made when there is one.")
    ] = Path("ddtree-conform"),
    case: Annotated[
        Path | None,
        typer.Option(
            help="Run the one case of a file again that a run wrote for a failure.", metavar="FILE"
        ),
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Hold a backend of yours to the reference: fuzzed, each failure shrunk.

    A backend is any object (or module, class, function) that offers some of
    the public functions of ddtree.spec, under their names:

    \b
      class Mine:
          def verify_attention(self, query, key, value, key_pool, value_pool,
                               layout, mask):
              return kernel(query, ..., layout.qo_indptr, mask.allowed)

    It says of itself, where that is not the default: mask_forms, dtypes,
    tolerances, device, capture, any_mask, call_limit.

    Budgets, batches, prefixes, branching, padding, page sizes, dtypes, fixed
    buffers and replays are drawn at random. Attention is also given zero
    queries and keys and powers of two for values: its output is then the
    exact set of entries that each row sees. What fails is shrunk to its
    smallest case and written to a file, which --case runs again: by the same
    function, execution and inputs. With any_mask = True an object is held to
    masks that are no tree's too; a call of over call_limit seconds (60) is
    interrupted and told as endless.

    The state of a property, in the JSON too: holds (no case failed; with
    cases_were_cut time was up before all ran, so it holds so far), broken,
    refused (every case was), not offered.

    Exit code: 0 what is offered holds, 1 something is broken, 2 not possible,
    or every case was refused.

    \b
    Examples
      ddtree conform                      the built-in backends
      ddtree conform founding-bug         what a failure looks like
      ddtree conform my_engine.tree:Mine
      ddtree conform mine.py:Mine --only "visible set" --seconds 300
      ddtree conform mine.py:Mine --html run.html
      ddtree conform mine.py:Mine --case ddtree-conform/FILE.safetensors
    """
    if case is not None:
        refuse_given(ctx, OF_DRAWING, "with --case: its one case stands in the file")
        if backend is None:
            fail(
                "--case needs the backend to run the case on",
                command("ddtree", "conform", "BACKEND", "--case", case),
            )
        again = command("ddtree", "conform", backend)
        require_file(case, f"`{again}` writes one for each failure")
    if backend is None:
        list_backends("conform", as_json=as_json)
        return
    if html is not None:
        require_page(html)
    with _folder_for_cases(out) if case is None else nullcontext() as folder:
        found, runs_on = find(backend, "conform")
        results = (
            _drawn(found, only, examples, seconds, seed, folder)
            if case is None
            else [_stored(found, case)]
        )
    data = {"backend": backend, "runs_on": runs_on, "properties": [_plain(r) for r in results]}
    if html is not None:
        wrote = write_whole(html, conformance(data, Path.cwd())[1])
    if as_json:
        print_json(data)
    else:
        _print(found, runs_on, results, is_stored=case is not None)
        if html is not None:
            stdout().print(wrote, markup=False, soft_wrap=True)
    if any(r.state == "broken" for r in results):
        raise typer.Exit(BROKEN)
    if not any(r.state == "holds" for r in results):
        # the report stands on stdout: a script that reads exit code 2 looks for the reason on stderr
        fail(
            f"{found.name}: {_nothing_judged(results)}",
            "let it take some of these calls; `ddtree conform --help` has what it may say of itself",
        )


OF_DRAWING = ("only", "examples", "seconds", "seed", "out")
"""Parameters of a run that draws its cases."""


def _drawn(
    backend: "Backend", only: str, examples: int, seconds: float, seed: int, folder: Path | None
) -> "list[Result]":
    """What came of each property, its cases drawn."""
    from ddtree.invariants.conformance.fuzz import conform as run

    asked: dict[str, Any] = {
        "only": only,
        "examples": examples,
        "seconds": seconds,
        "seed": seed,
        "folder": folder,
    }
    results = []
    with progress(f"holding {backend.name} to the reference") as say:
        for result in run(backend, **asked):
            say(f"{result.property.id}: {result.state}", passing=True)
            results.append(result)
    if all(r.state == "not offered" for r in results):
        why = "; ".join(f"{r.property.id!r}: {r.what}" for r in results)
        fail(
            f"{backend.name} does not offer what {only!r} asks for ({why})",
            "offer it, or drop --only",
        )
    return results


def _stored(backend: "Backend", file: Path) -> "Result":
    """What came of the one case of a file."""
    from ddtree.invariants.conformance.fuzz import again
    from ddtree.spec.errors import InputError

    try:
        result = again(backend, file)
    except InputError as error:
        line = command("ddtree", "conform", backend.name)
        fail(str(error), f"{line}  (writes one for each failure)")
    if result.state == "not offered":
        what = f"{result.property.id!r} ({result.what})"
        fail(
            f"{backend.name} does not offer what {file} is a case of, {what}",
            "offer it, or give a case of what it offers",
        )
    return result


@contextmanager
def _folder_for_cases(out: Path) -> Iterator[Path]:
    """The folder, that files can be written into; gone afterwards if it was made for nothing."""
    is_new = not out.exists()
    writable_folder(out)
    try:
        yield out
    finally:
        if is_new and not any(out.iterdir()):
            out.rmdir()


def _print(backend: "Backend", runs_on: str, results: "list[Result]", *, is_stored: bool) -> None:
    from ddtree.invariants.conformance.failure import ONLY_AFTER_OTHERS, smallest

    console = stdout()
    console.print(Text.assemble((backend.name, "bold"), f"  ({runs_on})"), soft_wrap=True)
    table = Table(header_style="bold", pad_edge=False)
    for name, ratio in (("property", 5), ("cases", 1), ("result", 10)):
        table.add_column(name, ratio=ratio, overflow="fold", no_wrap=name == "cases")
    for r in results:
        if r.state != "not offered":
            table.add_row(r.property.id, str(r.examples), _result(r))
    print_table(table)
    missing = [r.property.id for r in results if r.state == "not offered"]
    if missing:
        console.print(Text(f"not offered: {'; '.join(missing)}", "bright_black"), soft_wrap=True)
    for r in results:
        if r.state == "broken":
            console.print()
            console.print(Text(f"{r.property.id}: {r.property.statement}", "bold"), soft_wrap=True)
            called = "case" if is_stored else smallest(was_cut=r.was_cut)
            console.print(Text(f"  {called}: {r.case}"), soft_wrap=True)
            console.print(Text(f"  {r.what}", "red"), soft_wrap=True)
            if r.is_alone_right:
                console.print(Text(f"  {ONLY_AFTER_OTHERS}", "yellow"), soft_wrap=True)
            if _is_sound(r.file):
                told = "the call itself is sound, what the backend makes of it is not"
                console.print(
                    f"  {told}; ddtree check finds nothing in {r.file}",
                    markup=False,
                    soft_wrap=True,
                )
            else:
                check = command("ddtree", "check", r.file)
                console.print(Text(f"  {check}", "cyan"), soft_wrap=True)
            again = command("ddtree", "conform", backend.name, "--case", r.file)
            console.print(Text(f"  {again}", "cyan"), soft_wrap=True)
    broken = sum(r.state == "broken" for r in results)
    held = sum(r.state == "holds" for r in results)
    cases = counted(sum(r.examples for r in results), "case")
    so_far = sum(r.state == "holds" and r.was_cut for r in results)
    cut = f" ({so_far} of them so far: time was up, --seconds gives more)" if so_far else ""
    verdict, style = (
        f"{held} hold{cut}, {broken} broken, {cases}",
        "bold red" if broken else "bold yellow" if so_far else "bold green",
    )
    if not held + broken:  # nothing was judged
        verdict, style = _nothing_judged(results), "bold yellow"
    console.print(Text(f"{backend.name}: {verdict}", style), soft_wrap=True)
    crossed = "visible set" if "verify_attention" in backend.functions else "plan_verify"
    if any(r.state == "broken" and r.property.id.startswith(crossed) for r in results):
        isolate = command("ddtree", "isolate", backend.name)
        console.print(Text(f"next: {isolate}", "bold"), soft_wrap=True)


def _nothing_judged(results: "list[Result]") -> str:
    """Why there is no verdict, where nothing holds and nothing is broken."""
    reason = next(reason for r in results for reason in r.refused)
    return f"cannot tell: it refused every case ({reason})"


def _is_sound(file: Path | None) -> bool:
    """Whether ``ddtree check`` finds nothing in the file of a failing case."""
    from ddtree.invariants import load, violations

    return file is not None and not violations(load(file))


def _result(result: "Result") -> Text:
    """``holds``, with what was refused; of a broken one what differs."""
    text = Text(result.state, _STYLES[result.state])
    if result.what and result.state == "broken":
        text.append(f": {result.what}", "red")
    if result.note:
        text.append(f" ({result.note})", "yellow")
    if result.refused:
        reason, count = result.refused.most_common(1)[0]
        more = f" and {len(result.refused) - 1} other reasons" if len(result.refused) > 1 else ""
        text.append(f" (refused {sum(result.refused.values())}, {count} of them: {reason}{more})")
    return text


def _plain(result: "Result") -> dict[str, Any]:
    return {
        "property": result.property.id,
        "function": result.property.function,
        "statement": result.property.statement,
        "state": result.state,
        "cases": result.examples,
        "refused": dict(result.refused),
        "what": result.what,
        "smallest_case": None if result.case is None else str(result.case),
        "shrinking_was_cut": result.was_cut and result.state == "broken",
        "cases_were_cut": result.was_cut and result.state != "broken",
        "fails_only_after_other_calls": result.is_alone_right,
        "note": result.note,
        "file": result.file,
        "seconds": round(result.seconds, 2),
    }

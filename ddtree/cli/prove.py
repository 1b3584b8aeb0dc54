"""``ddtree prove``: prove the index arithmetic for all sizes, and check the rest on all small cases."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ddtree.cli.options import Json
from ddtree.cli.output import (
    BROKEN,
    command,
    counted,
    fail,
    need,
    print_json,
    print_table,
    progress,
    stdout,
    writable_folder,
)

if TYPE_CHECKING:
    from ddtree.invariants.proofs import Outcome
    from ddtree.invariants.proofs.exhaustive import Checked
    from ddtree.invariants.proofs.proof import Refutation


def prove(
    names: Annotated[
        list[str] | None, typer.Argument(help="Proofs to run. [dim]Default: all.[/dim]")
    ] = None,
    cases: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write counterexamples into, as captured calls; made if missing."
        ),
    ] = None,
    exhaustive: Annotated[
        bool,
        typer.Option(
            "--exhaustive",
            help="Also hold the Triton kernels to the reference on every small case (minutes).",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Prove the address formulas for all sizes, with wrong twins that must fail.

    Every formula that the reference and the kernels call is handed the
    integers of a theorem prover (z3). Each proof has wrong twins: a formula
    with a mistake in it, or an assumption left out. They must be refuted, by
    numbers, and where these can be a verify call, by one that check refuses.

    Naming proofs shows their goals, twins and counterexamples.

    Exit code: 0 all proved and all twins refuted, 1 not so, 2 not possible.

    \b
    Examples
      ddtree prove
      ddtree prove mask_width
      ddtree prove mask_width --cases out
      ddtree check out/mask_width.root_forgotten.safetensors
      ddtree prove --exhaustive --json
    """
    need("proofs", "z3")
    if exhaustive:
        need("kernels", "triton")
    if cases is not None:
        writable_folder(cases, "--cases")
    from ddtree.invariants.proofs import PROOFS
    from ddtree.invariants.proofs import prove as run

    known = {proof.name: proof for proof in PROOFS}
    for name in names or ():
        if name not in known:
            fail(f"there is no proof {name!r}", f"known are {', '.join(known)}")
    outcomes = []
    with progress("proving") as say:
        for name in dict.fromkeys(names or known):
            say(name, passing=True)
            with _interrupted_after():
                outcomes.append(run(known[name]))
        checked = list(_exhaustive(say)) if exhaustive else []
    written = _write_cases(cases, outcomes) if cases is not None else []
    ok = all(outcome.ok for outcome in outcomes) and all(part.ok for part in checked)
    if as_json:
        print_json(
            {
                "ok": ok,
                "proofs": [_plain(outcome, cases) for outcome in outcomes],
                "exhaustive": [_plain_part(part) for part in checked],
                "limits": _limits(outcomes),
                "written": written,
            }
        )
    else:
        _print(outcomes, checked, cases, shown=bool(names), ok=ok)
        for file in written:
            stdout().print(Text(command("ddtree", "check", file)), soft_wrap=True)
    if not ok:
        raise typer.Exit(BROKEN)


@contextmanager
def _interrupted_after() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a proof, which takes a second; the next one does not wait.

    Python drops an exception that is raised while an object is destroyed, and z3's objects run code then.
    """
    came = False

    def note(*given: Any) -> None:
        nonlocal came
        if came:
            signal.default_int_handler(*given)
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _exhaustive(say: Any) -> Iterator["Checked"]:
    """Check every part of ``ddtree.impl``, as many at a time as there are cores."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import active_children, get_context

    import torch

    from ddtree.invariants.proofs.exhaustive import PARTS

    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, here in the processes
    # one GPU: one process at a time
    workers = 1 if cuda else min(os.cpu_count() or 1, len(PARTS))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        try:
            with _without_interrupts():
                parts = [pool.submit(_check_part, number) for number in range(len(PARTS))]
            for checked in (part.result() for part in parts):
                say(f"{checked.name}: {counted(checked.cases, 'case')}", passing=True)
                yield checked
        except BaseException:
            for process in active_children():  # a part takes a minute; the pool would wait for it
                process.terminate()
            raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C for a moment: processes that are started then ignore it as long as they live.

    A terminal sends it to all of them, and each would print its own traceback.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_part(number: int) -> "Checked":
    """Check one part, in a process of its own."""
    import torch

    from ddtree import impl
    from ddtree.impl import mask
    from ddtree.invariants.proofs.exhaustive import PARTS, check_part

    torch.set_num_threads(1)
    mask.QUERIES = 512  # Triton's interpreter pays for programs, not for their rows
    return check_part(PARTS[number], impl)


def _write_cases(folder: Path, outcomes: list["Outcome"]) -> list[Path]:
    """Write every counterexample that can be a call; return the files."""
    from ddtree.invariants.capture import dump

    files = []
    for outcome in outcomes:
        for refutation in outcome.refutations:
            if (case := refutation.case) is not None:
                files.append(folder / _file_name(outcome, refutation))
                dump(files[-1], call=case.call)
    return files


def _file_name(outcome: "Outcome", refutation: "Refutation") -> str:
    return f"{outcome.proof.name}.{refutation.twin.name}.safetensors"


def _print(
    outcomes: list["Outcome"],
    checked: list["Checked"],
    cases: Path | None,
    *,
    shown: bool,
    ok: bool,
) -> None:
    console = stdout()
    if shown:
        for outcome in outcomes:
            _print_proof(outcome, cases)
    else:
        print_table(_table(outcomes))
    for outcome in outcomes:
        for problem in outcome.problems:
            console.print(Text(f"{outcome.proof.name}: {problem}", "red"), soft_wrap=True)
    if checked:
        print_table(_table_of_parts(checked))
        for part in checked:
            for line in part.differences[:3]:
                console.print(Text(f"{part.name}: {line}", "red"), soft_wrap=True)
    seconds = sum(o.seconds for o in outcomes) + sum(part.seconds for part in checked)
    twins = [r for outcome in outcomes for r in outcome.refutations]
    refuted = sum(r.counterexample is not None for r in twins) + sum(bool(c.found) for c in checked)
    proved = sum(not outcome.problems for outcome in outcomes)
    counts = f"{proved} of {counted(len(outcomes), 'proof')}"
    if checked:
        equal = sum(not part.differences for part in checked)
        counts += f", {equal} of {counted(len(checked), 'exhaustive comparison')}"
    counts += f"; {refuted} of {counted(len(twins) + len(checked), 'wrong twin')} refuted"
    verdict = "holds" if ok else "DOES NOT HOLD"
    style = "bold green" if ok else "bold red"
    console.print(Text(f"{verdict}: {counts}; {seconds:.1f} s of work", style), soft_wrap=True)


def _table(outcomes: list["Outcome"]) -> Table:
    table = Table("proof", "for all sizes", "formulas", box=None, pad_edge=False)
    table.add_column("seconds", justify="right")
    table.add_column("twins refuted", justify="right")
    for outcome in outcomes:
        refuted = sum(r.counterexample is not None for r in outcome.refutations)
        table.add_row(
            Text(outcome.proof.name, "red" if outcome.problems else "green"),
            Text(outcome.proof.statement),
            Text(" ".join(outcome.formulas), "bright_black"),
            f"{outcome.seconds:.1f}",
            f"{refuted} of {len(outcome.refutations)}",
        )
    return table


def _table_of_parts(checked: list["Checked"]) -> Table:
    from ddtree.invariants.proofs.exhaustive import PARTS

    statements = {part.name: part.statement for part in PARTS}
    table = Table("exhaustive", "of all small cases", box=None, pad_edge=False)
    for column in ("cases", "seconds", "twin"):
        table.add_column(column, justify="right")
    for part in checked:
        table.add_row(
            Text(part.name, "red" if part.differences else "green"),
            Text(statements[part.name]),
            str(part.cases),
            f"{part.seconds:.1f}",
            "found" if part.found else Text("not found", "red"),
        )
    return table


def _print_proof(outcome: "Outcome", cases: Path | None) -> None:
    """One proof with its goals, its twins and their counterexamples."""
    console, proof = stdout(), outcome.proof

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    verdict = "not proved" if outcome.problems else "proved"
    say(f"{proof.name}: {verdict} in {outcome.seconds:.1f} s", "bold")
    say(f"  {proof.statement}")
    say(f"  formulas: {', '.join(outcome.formulas)}", "bright_black")
    for goal in proof.goals:
        say(f"  goal {goal.__name__}: {goal.__doc__}")
    for refutation in outcome.refutations:
        twin = refutation.twin
        say(f"  twin {twin.name}: {twin.why}")
        if refutation.counterexample is None:
            say("    NOT REFUTED", "red")
            continue
        say(f"    refuted in {refutation.counterexample.goal}: {refutation.counterexample}")
        if (case := refutation.case) is not None:
            say(f"    {_command(outcome, refutation, cases)}    # {case.invariant}", "cyan")


def _command(outcome: "Outcome", refutation: "Refutation", cases: Path | None) -> str:
    """The command line that shows a counterexample to the checker, written into ``cases`` or not yet."""
    file = (cases or Path("out")) / _file_name(outcome, refutation)
    check = command("ddtree", "check", file)
    return check if cases else f"ddtree prove {outcome.proof.name} --cases out; {check}"


def _limits(outcomes: list["Outcome"]) -> list[dict[str, Any]]:
    """The smallest sizes at which offsets overflow, where that proof has been run."""
    from ddtree.invariants.proofs import LIMITS
    from ddtree.invariants.proofs.proof import Formulas

    if all(outcome.proof.name != "int32_offsets" for outcome in outcomes):
        return []
    return [
        {
            "offset": limit.offset,
            "count": limit.count,
            "smallest": limit.smallest,
            "largest": limit.largest(Formulas(), limit.smallest),
        }
        for limit in LIMITS
    ]


def _plain(outcome: "Outcome", cases: Path | None) -> dict[str, Any]:
    return {
        "name": outcome.proof.name,
        "statement": outcome.proof.statement,
        "ok": outcome.ok,
        "problems": outcome.problems,
        "goals": [goal.__name__ for goal in outcome.proof.goals],
        "formulas": outcome.formulas,
        "seconds": outcome.seconds,
        "twins": [_plain_twin(outcome, refutation, cases) for refutation in outcome.refutations],
    }


def _plain_twin(outcome: "Outcome", refutation: "Refutation", cases: Path | None) -> dict[str, Any]:
    example, case = refutation.counterexample, refutation.case
    return {
        "name": refutation.twin.name,
        "why": refutation.twin.why,
        "refuted": example is not None,
        "goal": example and example.goal,
        "broken": example and example.broken,
        "numbers": example and example.numbers,
        "where": example and example.where,
        "breaks": case and case.invariant,
        "check": case and _command(outcome, refutation, cases),
    }


def _plain_part(part: "Checked") -> dict[str, Any]:
    return {
        "name": part.name,
        "ok": part.ok,
        "cases": part.cases,
        "differences": part.differences,
        "twin_found": part.found,
        "seconds": part.seconds,
    }

"""``ddtree check``: hold a captured call to the table of invariants."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ddtree.cli.options import Json
from ddtree.cli.output import BROKEN, print_json, stdout

if TYPE_CHECKING:
    from ddtree.invariants import InvariantViolation, Report


def check(
    file: Annotated[Path, typer.Argument(help="A captured call: .safetensors or .npz.")],
    as_json: Json = False,
) -> None:
    """Check one captured verify call of any engine: what holds, what is broken.

    The file's tensors bear the engines' own names: qo_indptr, kv_indptr,
    kv_indices, mask_indptr, custom_mask, positions, max_q_len and what else
    is known. What is missing is not checked, and is listed.

    Exit code: 0 nothing is broken, 1 something is, 2 the file cannot be read.

    \b
    Examples
      ddtree check call.safetensors
      ddtree check call.npz --json
      ddtree dump bad.npz --fault width=8 && ddtree check bad.npz
    """
    from ddtree.invariants import load
    from ddtree.invariants import report as checked

    report = checked(load(file))
    if as_json:
        print_json(
            {
                "file": file,
                "ok": report.ok,
                "held": report.held,
                "broken": [_plain(violation) for violation in report.broken],
                "not_checked": report.not_checked,
            }
        )
    else:
        _print(report, file)
    if not report.ok:
        raise typer.Exit(BROKEN)


def _print(report: "Report", file: Path) -> None:
    console = stdout()
    for violation in report.broken:
        console.print(Text(str(violation), "red"), soft_wrap=True)
        console.print()
    console.print(Text.assemble(("held: ", "green"), ", ".join(report.held) or "none"))
    for name, why in report.not_checked.items():
        console.print(Text(f"not checked: {name} ({why})", "bright_black"), soft_wrap=True)
    names = dict.fromkeys(violation.invariant for violation in report.broken)
    verdict = f"BROKEN: {', '.join(names)}" if names else "nothing is broken"
    counts = f"{len(report.held)} held, {len(names)} broken, {len(report.not_checked)} not checked"
    console.print(
        Text(f"{file}: {verdict} ({counts})", "bold red" if names else "bold green"), soft_wrap=True
    )


def _plain(violation: "InvariantViolation") -> dict[str, Any]:
    """The violation's fields, as its message has them."""
    names = ("invariant", "request", "expected", "found", "hint", "detail", "statement", "formula")
    return {name: getattr(violation, name) for name in names} | {"message": str(violation)}

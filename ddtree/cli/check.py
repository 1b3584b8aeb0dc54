"""``ddtree check``: hold a captured call to the table of invariants."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ddtree.cli.captured import read_call, require_call
from ddtree.cli.options import Json
from ddtree.cli.output import BROKEN, command, counted, print_json, stdout

if TYPE_CHECKING:
    from ddtree.invariants import InvariantViolation, Report
    from ddtree.invariants.conformance.failed import Failed


def check(
    file: Annotated[Path, typer.Argument(help="A captured call: .safetensors or .npz.")],
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List what is not checked, and why.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check one captured verify call of any engine: what holds, what is broken.

    The file's tensors bear the engines' own names, below. One is enough: what
    is missing is not checked, and that is said. Other names are not read.

    Exit code: 0 nothing is broken, 1 something is, 2 the file cannot be read.

    \b
    Fields (shapes: ddtree/invariants/call.py)
      layout  qo_indptr kv_indptr kv_indices mask_indptr max_q_len positions
              out_cache_loc input_ids
      mask    custom_mask, or packed byte_indptr, or bias, or words
      draft   draft_log_probs
      tree    token_ids parents depths scores num_nodes root_token_ids
      call    batch_size q_lens prefix_lens num_rows budget horizon
              is_captured pad_slot
      memory  slot_table slot_table_after kv_pool_size slot_stride
              vocab_size offset_bits
      outcome nodes num_accepted bonus target_ids committed_lens src dst
              commits_before emitted

    \b
    Examples
      ddtree check call.safetensors
      ddtree check call.npz --json
      ddtree dump bad.npz --fault width=8 && ddtree check bad.npz
    """
    require_call(file)
    from ddtree.invariants import report as checked
    from ddtree.invariants.conformance.failed import failed_in
    from ddtree.invariants.sizes import batch_counts, batch_of, room_counts

    captured = read_call(file)
    failed = failed_in(file)
    counts = batch_counts(captured.call) | room_counts(captured.call)
    is_empty = bool(counts) and batch_of(captured.call) == 0
    report = checked(captured.call)
    if as_json:
        print_json(
            {
                "file": file,
                "ok": report.ok,
                "held": report.held,
                "broken": [_plain(violation) for violation in report.broken],
                "not_checked": report.not_checked,
                "not_read": captured.not_read,
                "conformance": failed and {"backend": failed.backend, "property": failed.property},
            }
        )
    else:
        _print(report, captured.not_read, file, failed, verbose=verbose, is_empty=is_empty)
    if not report.ok:
        raise typer.Exit(BROKEN)


def _print(
    report: "Report",
    not_read: dict[str, str],
    file: Path,
    failed: "Failed | None",
    *,
    verbose: bool,
    is_empty: bool,
) -> None:
    from ddtree.invariants.capture import named

    console = stdout()
    for violation in report.broken:
        console.print(Text(str(violation), "red"), soft_wrap=True)
        console.print()
    if not_read:
        names = ", ".join(named(name, why) for name, why in not_read.items())
        console.print(Text(f"not read: {names}", "yellow"), soft_wrap=True)
    console.print(Text.assemble(("held: ", "green"), ", ".join(report.held) or "none"))
    for line in _not_checked(report, verbose):
        console.print(Text(line, "bright_black"), soft_wrap=True)
    broken = dict.fromkeys(violation.invariant for violation in report.broken)
    verdict = f"BROKEN: {', '.join(broken)}" if broken else "nothing is broken"
    counts = f"{len(report.held)} held, {len(broken)} broken, {len(report.not_checked)} not checked"
    counts = f"0 requests; {counts}" if is_empty else counts
    style = "bold red" if broken else "bold green"
    console.print(Text(f"{file}: {verdict} ({counts})", style), soft_wrap=True)
    if failed is not None:
        console.print(Text(_of_conformance(failed, file), "bold"), soft_wrap=True)
    elif broken:
        page = command("ddtree", "report", file)
        console.print(Text(f"next: {page}  (a page to look at)", "bold"), soft_wrap=True)


def _of_conformance(failed: "Failed", file: Path) -> str:
    """That the file was kept for what a backend made of the call, which no check of the call can find."""
    shown = command("ddtree", "report", file)
    again = command("ddtree", "conform", failed.backend, "--case", file)
    return (
        f"the file is of a conformance failure of {failed.property}: `{shown}` shows what the backend gave, "
        f"`{again}` runs it again"
    )


def _not_checked(report: "Report", verbose: bool) -> list[str]:
    """What was not checked: each with its reason, or how many and how to list them."""
    if verbose:
        return [f"not checked: {name} ({why})" for name, why in report.not_checked.items()]
    if not report.not_checked:
        return []
    return [f"not checked: {counted(len(report.not_checked), 'invariant')} (--verbose lists them)"]


def _plain(violation: "InvariantViolation") -> dict[str, Any]:
    """The violation's fields, as its message has them."""
    names = ("invariant", "request", "expected", "found", "hint", "detail", "statement", "formula")
    return {name: getattr(violation, name) for name in names} | {"message": str(violation)}

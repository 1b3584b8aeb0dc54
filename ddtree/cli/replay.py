"""``ddtree replay``: run a dumped call again, on the reference and on the kernels, and compare."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ddtree.cli.options import Json
from ddtree.cli.output import BROKEN, command, fail, print_json, require_file, stdout

if TYPE_CHECKING:
    from ddtree.invariants.recorded import Recorded
    from ddtree.invariants.shadow import Shadow


def replay(
    file: Annotated[Path, typer.Argument(help="A call that debug mode dumped: .safetensors.")],
    as_json: Json = False,
) -> None:
    """Run a dumped call again: on the reference and on the kernels, and compare.

    The file names the function and holds its arguments; of the KV pools, the slots
    that the call uses. Without a GPU the kernels run in Triton's interpreter.

    Where the kernels do not take a call (a head_dim of 16, say), the reference
    alone is run.

    Exit code: 0 both give the same, 1 they differ, 2 the file cannot be read, or
    nothing was compared: the kernels or the reference refuse the call.

    \b
    Examples
      DDTREE_DEBUG=shadow DDTREE_DEBUG_ACTION=dump python server.py
      ddtree replay 20260101T120000-41-1-verify_attention-shadow.safetensors
      ddtree check  20260101T120000-41-1-verify_attention-shadow.safetensors
    """
    require_file(file, "debug mode writes such files: DDTREE_DEBUG_ACTION=dump")
    from ddtree.invariants.capture import kind_of
    from ddtree.invariants.recorded import read
    from ddtree.invariants.shadow import NAMES
    from ddtree.spec.errors import InputError

    try:
        recorded = read(file)
    except InputError as error:
        if file.is_dir():
            fail(str(error), "give one of its files")
        is_call = file.is_file() and bool(kind_of(file))
        fail(str(error), command("ddtree", "check", file) if is_call else "ddtree replay --help")
    if recorded.function not in NAMES:
        fail(
            f"{file} is a call of {recorded.function}, which cannot be run again by itself",
            f"known are {', '.join(NAMES)}",
        )
    report = {"file": file, "function": recorded.function} | _run(recorded)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report["refused"]:
        # the report stands on stdout: a script that reads exit code 2 looks for the reason on stderr
        why = f"nothing was compared: {recorded.function} is refused by {report['refused']}"
        fail(why, "replay a call that both take; impl/README.md has the limits of the kernels")
    if not report["same"]:
        raise typer.Exit(BROKEN)


def _run(recorded: "Recorded") -> dict[str, Any]:
    """Run the call on the reference, and on the kernels where they can run."""
    import torch

    from ddtree.invariants.shadow import Shadow, copied, run
    from ddtree.spec.errors import InputError

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shadow = Shadow(recorded.function, recorded.arguments)
    told: dict[str, Any] = {
        "device": device, "same": False, "refused": "", "reference": None, "violation": None,
    }  # fmt: skip
    if find_spec("triton") is None:
        why = "they need triton, which is not installed: pip install 'ddtree[kernels]'"
        return told | _reference_alone(shadow, why)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from ddtree import impl

    given = copied(recorded.arguments, device)
    if recorded.function == "VerifyBuffers.fill":
        sizes = recorded.arguments["buffers"]
        given["buffers"] = impl.VerifyBuffers(
            sizes.max_batch, sizes.max_q_len, sizes.max_context, sizes.pad_slot, device
        )
    try:
        result = run(impl, recorded.function, given)
    except InputError as error:
        return told | _reference_alone(shadow, str(error))
    violation = shadow.violation(result, given, "when run again")
    if shadow.refused:
        return told | {"refused": f"the reference: {shadow.refused}"}
    if violation is None:
        return told | {"same": True}
    names = ("expected", "found", "detail")
    return told | {"violation": {name: getattr(violation, name) for name in names}}


def _reference_alone(shadow: "Shadow", why: str) -> dict[str, Any]:
    """What the reference gives where the kernels do not run; nothing is compared."""
    known = shadow.reference()
    refused = f"the kernels: {why}"
    if shadow.refused:
        return {"refused": f"{refused}; and by the reference: {shadow.refused}"}
    shapes = {n: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for n, t in known.items()}
    return {"refused": refused, "reference": shapes}


def _print(report: dict[str, Any]) -> None:
    """One line, and the first difference."""
    console = stdout()
    where = "the GPU" if report["device"] == "cuda" else "Triton's interpreter"
    violation = report["violation"]
    if report["refused"]:
        text = f"{report['function']} is refused by {report['refused']}"
        console.print(Text(text, "bold red"), soft_wrap=True)
        if report["reference"]:
            given = ", ".join(f"{name} {shape}" for name, shape in report["reference"].items())
            text = f"nothing was compared; the reference alone takes the call and gives {given}"
            console.print(Text(text), soft_wrap=True)
    elif violation is None:
        text = f"{report['function']}: reference and kernels ({where}) give the same"
        console.print(Text(text, "bold green"), soft_wrap=True)
    else:
        text = (
            f"{report['function']}: reference and kernels ({where}) differ: {violation['detail']}: "
            f"expected {violation['expected']}, found {violation['found']}"
        )
        console.print(Text(text, "bold red"), soft_wrap=True)

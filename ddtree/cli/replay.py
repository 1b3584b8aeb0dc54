"""``ddtree replay``: run a dumped call again, on the reference and on the kernels, and compare."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ddtree.cli.options import Json
from ddtree.cli.output import BROKEN, fail, print_json, stdout

if TYPE_CHECKING:
    from ddtree.invariants.recorded import Recorded


def replay(
    file: Annotated[Path, typer.Argument(help="A call that debug mode dumped: .safetensors.")],
    as_json: Json = False,
) -> None:
    """Run a dumped call again: on the reference and on the kernels, and compare.

    The file names the function and holds its arguments; of the KV pools, the slots
    that the call uses. Without a GPU the kernels run in Triton's interpreter.

    Exit code: 0 both give the same, 1 they differ, 2 the file cannot be read, or
    the call is refused, by the kernels or by the reference, as one of wrong types is.

    \b
    Examples
      DDTREE_DEBUG=shadow DDTREE_DEBUG_ACTION=dump python server.py
      ddtree replay 20260101T120000-41-1-verify_attention-shadow.safetensors
      ddtree check  20260101T120000-41-1-verify_attention-shadow.safetensors
    """
    from ddtree.invariants.capture import kind_of
    from ddtree.invariants.recorded import read
    from ddtree.invariants.shadow import NAMES
    from ddtree.spec.errors import InputError

    try:
        recorded = read(file)
    except InputError as error:
        is_call = file.is_file() and bool(kind_of(file))
        fail(str(error), f"ddtree check {file}" if is_call else "ddtree replay --help")
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
        raise typer.Exit(2)
    if not report["same"]:
        raise typer.Exit(BROKEN)


def _run(recorded: "Recorded") -> dict[str, Any]:
    """Run the call on the reference, and on the kernels where they can run."""
    if find_spec("triton") is None:
        fail("the kernels need triton, which is not installed", "pip install 'ddtree[kernels]'")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from ddtree import impl
    from ddtree.invariants.shadow import Shadow, copied, run
    from ddtree.spec.errors import InputError

    shadow = Shadow(recorded.function, recorded.arguments)
    given = copied(recorded.arguments, device)
    if recorded.function == "VerifyBuffers.fill":
        sizes = recorded.arguments["buffers"]
        given["buffers"] = impl.VerifyBuffers(
            sizes.max_batch, sizes.max_q_len, sizes.max_context, sizes.pad_slot, device
        )
    told: dict[str, Any] = {"device": device, "same": False, "refused": "", "violation": None}
    try:
        result = run(impl, recorded.function, given)
    except InputError as error:
        return told | {"refused": f"the kernels: {error}"}
    violation = shadow.violation(result, given, "when run again")
    if shadow.refused:
        return told | {"refused": f"the reference: {shadow.refused}"}
    if violation is None:
        return told | {"same": True}
    names = ("expected", "found", "detail")
    return told | {"violation": {name: getattr(violation, name) for name in names}}


def _print(report: dict[str, Any]) -> None:
    """One line, and the first difference."""
    console = stdout()
    where = "the GPU" if report["device"] == "cuda" else "Triton's interpreter"
    violation = report["violation"]
    if report["refused"]:
        text = f"{report['function']} is refused by {report['refused']}"
        console.print(Text(text, "bold red"), soft_wrap=True)
    elif violation is None:
        text = f"{report['function']}: reference and kernels ({where}) give the same"
        console.print(Text(text, "bold green"), soft_wrap=True)
    else:
        text = (
            f"{report['function']}: reference and kernels ({where}) differ: {violation['detail']}: "
            f"expected {violation['expected']}, found {violation['found']}"
        )
        console.print(Text(text, "bold red"), soft_wrap=True)

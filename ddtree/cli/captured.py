"""Read the file that ``check`` and ``show`` are given, or say what could be given instead."""

from pathlib import Path
from typing import TYPE_CHECKING

from ddtree.cli.output import command, fail, require_file

if TYPE_CHECKING:
    from ddtree.invariants.capture import Captured


def read_call(file: Path) -> "Captured":
    """The captured call; leaves with one message and a next step that fits."""
    require_call(file)
    from ddtree.invariants.capture import SUFFIXES, function_in, kind_of, read
    from ddtree.spec.errors import InputError

    try:
        return read(file)
    except InputError as error:
        if file.is_file() and kind_of(file) not in {"", file.suffix}:
            fail(str(error), command("mv", file, file.with_suffix(kind_of(file))))
        is_dumped = file.is_file() and bool(function_in(file))
        replay = command("ddtree", "replay", file)
        fail(str(error), replay if is_dumped else _next_step(file, SUFFIXES))


WRITTEN = (
    "write the call's tensors by name: "
    "safetensors.torch.save_file({'qo_indptr': ..., ...}, 'call.safetensors')"
)


def require_call(file: Path) -> None:
    """Leave if there is no such file, before anything heavy is imported to read it."""
    require_file(file, _example(file))


def _example(file: Path) -> str:
    """How a file that is not there would be written."""
    if file.suffix not in {".safetensors", ".npz"}:  # those of SUFFIXES, whose module is heavy
        return WRITTEN
    return f"`{command('ddtree', 'dump', file)}` would write an example there"


def _next_step(file: Path, suffixes: tuple[str, ...]) -> str:
    if file.is_dir():
        calls = sorted(path for path in file.iterdir() if path.suffix in suffixes)
        if calls:
            return f"give one of its files: {calls[0]}"
        return f"give a file; none of this folder's ends in {' or '.join(suffixes)}"
    if file.suffix not in suffixes:
        return WRITTEN
    return (
        "write the call anew; `ddtree check --help` lists the fields, and "
        f"`ddtree dump example{file.suffix}` writes a sound file to compare with"
    )

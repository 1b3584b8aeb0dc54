"""The app: its verbs, its version, and how errors leave it."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree.cli.catalogue import catalogue
from ddtree.cli.check import check
from ddtree.cli.conform import conform
from ddtree.cli.demo import demo
from ddtree.cli.dump import dump
from ddtree.cli.generate import generate
from ddtree.cli.hooks import hooks
from ddtree.cli.isolate import isolate
from ddtree.cli.output import BROKEN, INTERRUPTED, fail, stderr, stdout
from ddtree.cli.prove import prove
from ddtree.cli.replay import replay
from ddtree.cli.report import report
from ddtree.cli.show import show
from ddtree.cli.tune import tune

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What wrong arguments raise; typer has it from click or, since it carries a copy of click, from there."""


class Guarded(TyperGroup):
    """Turns every error into one message on stderr and an exit code."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Read the arguments before the verb."""
        if not args:
            return super().make_context(info_name, args, parent, **extra)  # prints the help
        with guarded():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        with guarded(ctx):
            _obey_debug_variable()
            return super().invoke(ctx)


def _obey_debug_variable() -> None:
    """Leave if DDTREE_DEBUG is not understood: the package left that to this command to say."""
    if os.environ.get("DDTREE_DEBUG"):
        try:
            import_module("ddtree.invariants")
        except ValueError as error:
            fail(str(error), "set DDTREE_DEBUG=1, or unset it")


@contextmanager
def guarded(ctx: Any = None) -> Iterator[None]:
    """Leave with one message where the arguments, the library, the system or the user stops the work."""

    def usage() -> str:
        verb = ctx and ctx.invoked_subcommand
        return f"ddtree {verb} --help" if verb else "ddtree --help"

    try:
        yield
    except UsageError as error:
        fail(error.format_message().rstrip("."), usage())  # type: ignore[attr-defined]
    except KeyboardInterrupt:
        stderr().print("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise typer.Exit(0) from None  # the reader left, where there is no SIGPIPE
    except OSError as error:
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        step = "make room there, or choose another place" if is_full else usage()
        fail(f"{error.filename or 'system'}: {error.strerror or error}", step)
    except ValueError as error:
        # read late: the library is loaded by now, and --help must not load it
        from ddtree.spec.errors import InputError

        if not isinstance(error, InputError):
            raise
        from ddtree.invariants.files import PlaceError

        fail(str(error), error.step if isinstance(error, PlaceError) else usage())
    except AssertionError as error:
        from ddtree.invariants import InvariantViolation

        if not isinstance(error, InvariantViolation):
            raise
        fail(str(error), code=BROKEN)


app = typer.Typer(
    cls=Guarded,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    generate, tune, demo, check, dump, replay, show, report, catalogue, conform, isolate, hooks, prove,
):  # fmt: skip
    app.command()(verb)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        stdout().print(f"ddtree {version('ddtree')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    """Draft-tree speculative decoding (DDTree): see it, and check any engine.

    \b
    Start with
      ddtree demo                         the whole story on real text
      ddtree generate "Once upon a time"  text, tokens a round, equality
      ddtree check call.safetensors       is this verify call sound?
      ddtree report call.safetensors      the same as a page to look at
      ddtree catalogue                    faults of real engines, each caught
      ddtree conform founding-bug         hold a backend to the reference
      ddtree isolate founding-bug         which factor decides its failure
      ddtree hooks                        which engines here would be checked
    """


def run() -> None:
    """Run on ``sys.argv``; characters that the terminal cannot show become question marks."""
    if hasattr(signal, "SIGPIPE"):
        # end as other commands do when the reader leaves (`| head`): 1 would say that a call is broken
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()

"""The app: its verbs, its version, and how errors leave it."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree.cli.check import check
from ddtree.cli.demo import demo
from ddtree.cli.dump import dump
from ddtree.cli.generate import generate
from ddtree.cli.output import BROKEN, fail, stdout
from ddtree.cli.show import show


class Guarded(TyperGroup):
    """Turns the library's errors into one message on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader left, as `| head` does: no error of ours
        except OSError as error:
            fail(f"{error.filename or 'system'}: {error.strerror or error}")
        except ValueError as error:
            # read late: the library is loaded by now, and --help must not load it
            from ddtree.spec.errors import InputError

            if not isinstance(error, InputError):
                raise
            fail(str(error), f"ddtree {ctx.invoked_subcommand} --help")
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
for verb in (generate, demo, check, dump, show):
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
    """


def run() -> None:
    """Run on ``sys.argv``; characters that the terminal cannot show become question marks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()

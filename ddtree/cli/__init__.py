"""The command line: ``ddtree generate``, ``demo``, ``check``, ``dump`` and ``show``.

One file a verb. Heavy packages are imported inside the verbs, so that ``--help`` is quick.
"""


def main() -> None:
    """Run the command line on ``sys.argv``."""
    from ddtree.cli.app import run

    run()

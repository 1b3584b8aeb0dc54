"""The ``ddtree`` command; also ``python -m ddtree``."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line, or say what to install: its libraries are an extra of their own."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(
            f"The ddtree command needs {' and '.join(missing)}: pip install 'ddtree[cli]'.\n"
            "The checker works without it: import ddtree; ddtree.check(...)"
        )
    from ddtree.cli import main as run

    run()


if __name__ == "__main__":
    main()

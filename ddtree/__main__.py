"""The ``ddtree`` command; also ``python -m ddtree``."""

import os
import signal
import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line, or say what to install: its libraries are an extra of their own."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # imports that Ctrl-C stops would print where they were
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        print(
            f"error: the ddtree command needs {' and '.join(missing)}\n"
            "next: pip install 'ddtree[cli]'; the checker works without: import ddtree; ddtree.check(...)",
            file=sys.stderr,
        )
        sys.exit(2)  # 1 would say that a call is broken
    from ddtree.cli.app import run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()

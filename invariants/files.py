"""Files that are whole or absent, and that whoever may read other files may read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddtree.spec.errors import InputError


class PlaceError(InputError):
    """A file cannot be written where it was to be: another place may do."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place beside ``path`` to write to; at the end it takes the name of ``path``.

    Its mode is that of any new file, by the umask, whatever writes it: safetensors gives nobody else leave
    to read. Where an exception leaves the block, what was there before stays.
    """
    work = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        work.touch()
        mode = work.stat().st_mode & 0o777
        yield work
        work.chmod(mode)
        work.replace(path)
    finally:
        with suppress(OSError):
            work.unlink()

"""Files that are whole or absent, and that whoever may read other files may read."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddtree.spec.errors import InputError


class PlaceError(InputError):
    """A file cannot be written where it was to be: another place may do.

    ``step`` says so, and where only room is missing, that too.
    """

    def __init__(self, message: str, error: Exception | None = None) -> None:
        """Take the system's error, where there is one."""
        super().__init__(message)
        self.step = next_place(error)


def next_place(error: Exception | None) -> str:
    """What to do after an error of the system in writing a file."""
    is_full = getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT}
    return f"{'make room there, or ' if is_full else ''}choose another place"


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

"""Names of models: places on this machine, or names of a hub. Light, so that wrong ones are told at once."""

from pathlib import Path


def is_path(name: str) -> bool:
    """Whether a name can only be a place on this machine: a model of a hub has one slash at most."""
    starts_as_one = name.startswith((".", "~")) or Path(name).is_absolute()
    return starts_as_one or name.count("/") > 1 or name.endswith(".gguf")


def is_missing(name: str) -> bool:
    """Whether a name can only be a place on this machine, and nothing is there."""
    return is_path(name) and not Path(name).expanduser().exists()

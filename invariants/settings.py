"""How debug mode looks and what it does then, from a call or from the environment."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal, cast, get_args

from ddtree.spec.errors import InputError, require, require_number

Level = Literal["cheap", "full", "shadow"]
"""``cheap``: types, shapes, indptrs and lengths. ``full``: the whole table. ``shadow``: that, and a sampled
fraction of the fast path's calls is also run on the reference and compared."""
Action = Literal["raise", "log", "count", "dump"]
"""What is done with a violation, counted in any case. ``raise``: the call fails. ``log``: an error of the
logger ``ddtree.debug``. ``count``: nothing else. ``dump``: the call is written to a file."""

LEVELS: tuple[Level, ...] = get_args(Level)
ACTIONS: tuple[Action, ...] = get_args(Action)
VARIABLE = "DDTREE_DEBUG"
_ON, _OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")


@dataclass(frozen=True)
class Settings:
    """What ``ddtree.debug`` takes; see there."""

    level: Level = "full"
    actions: tuple[Action, ...] = ("raise",)
    sample: float = 1.0
    dump_dir: Path = Path()
    max_dumps: int = 16
    poll: float | None = None
    trap: bool = False


def level_of(value: str | None) -> Level | None:
    """The level that the variable DDTREE_DEBUG asks for; None: debug mode is off.

    Raises:
        InputError: a value that is neither on, nor off, nor a level.
    """
    word = (value or "").strip().lower()
    if word in _OFF:
        return None
    if word in _ON:
        return "full"
    require(
        word in LEVELS,
        f"{VARIABLE} is {value!r}; understood are {', '.join((*_ON, *LEVELS, *_OFF[1:]))}",
    )
    return cast(Level, word)


def settings(
    level: str | None = None,
    action: str | Sequence[str] | None = None,
    sample: float | None = None,
    dump_dir: str | Path | None = None,
    max_dumps: int | None = None,
    poll: float | None = None,
    trap: bool | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """What is given; for the rest the environment's ``DDTREE_DEBUG``, ``DDTREE_DEBUG_ACTION`` and so on,
    then the defaults.

    Raises:
        InputError: a level, action, rate, number or folder that there is not; a variable is named.
    """
    default = Settings()

    def told(name: str) -> str | None:
        return environment.get(f"{VARIABLE}_{name}") or None

    if level is None:
        level = level_of(environment.get(VARIABLE)) or default.level
    require(level in LEVELS, f"level is {level!r}; known are {', '.join(LEVELS)}")
    actions = _actions("action", action)
    actions = actions or _actions(f"{VARIABLE}_ACTION", told("ACTION")) or default.actions
    rate = _number("sample", sample, f"{VARIABLE}_SAMPLE", told("SAMPLE"))
    rate = default.sample if rate is None else rate
    require(0 <= rate <= 1, f"sample is {rate}; it is a fraction, from 0 to 1")
    folder = Path(dump_dir or told("DUMP_DIR") or default.dump_dir)
    if "dump" in actions:
        require(folder.is_dir(), f"there is no folder {folder.absolute()} to dump calls to")
    most = _number("max_dumps", max_dumps, f"{VARIABLE}_MAX_DUMPS", told("MAX_DUMPS"))
    require(
        most is None or (most >= 0 and most.is_integer()),
        "max_dumps is {}; a whole number of files, from 0",
        most,
    )
    seconds = _number("poll", poll, f"{VARIABLE}_POLL", told("POLL"))
    require(seconds is None or seconds > 0, f"poll is {seconds}; seconds, above 0")
    require(trap is None or isinstance(trap, bool), f"trap is {trap!r}; expected True or False")
    word = (told("TRAP") or "").lower()
    require(
        word in _ON + _OFF,
        f"{VARIABLE}_TRAP is {word!r}; understood are {', '.join(_ON + _OFF[1:])}",
    )
    return Settings(
        cast(Level, level),
        actions,
        rate,
        folder,
        default.max_dumps if most is None else int(most),
        seconds,
        word in _ON if trap is None else trap,
    )


def _actions(name: str, given: str | Sequence[str] | None) -> tuple[Action, ...]:
    """The actions, from names or from one string with commas."""
    words = given.split(",") if isinstance(given, str) else list(given or ())
    words = [word.strip().lower() for word in words]
    for word in words:
        require(word in ACTIONS, f"{name} is {word!r}; known are {', '.join(ACTIONS)}")
    return cast(tuple[Action, ...], tuple(dict.fromkeys(words)))


def _number(name: str, given: float | None, variable: str, told: str | None) -> float | None:
    """A number from the call, else from the variable."""
    if given is not None:
        require_number(name, given)
        return float(given)
    if told is None:
        return None
    try:
        number = float(told)
    except ValueError:
        number = float("nan")
    if not isfinite(number):
        raise InputError(f"{variable} is {told!r}; expected a number")
    return number

"""What all hooks share: the environment's settings, what is done with a violation, and proof of being there.

A server must not fall by its checker: what a hook cannot read is said once and passed over, what it finds is
logged and dumped, and only ``DDTREE_DEBUG_ACTION=raise`` stops the pass.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ddtree.invariants.actions import act, counts
from ddtree.invariants.call import Call, on_host
from ddtree.invariants.capture import dump as dump_call
from ddtree.invariants.checks import check, check_cheaply
from ddtree.invariants.settings import Settings, settings
from ddtree.invariants.violation import InvariantViolation

logger = logging.getLogger("ddtree.hooks")
# All is said as warnings: engines set up logging after they load plugins, or for their own loggers alone, and
# what is less would be lost.


class NotCheckedError(Exception):
    """A call of a kind that the hook does not know; says which."""


def hook_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The environment's settings; unless it names an action, violations are logged and dumped.

    Raises:
        InputError: as ``settings``.
    """
    asked = environment.get("DDTREE_DEBUG_ACTION")
    return settings(action=None if asked else ("log", "dump"), environment=environment)


class Watch:
    """Holds one engine's calls in this process to the table."""

    def __init__(self, engine: str, chosen: Settings) -> None:
        """Watch ``engine``, named with its version, as the settings say."""
        self.engine, self.settings = engine, chosen
        self._said: set[tuple[int, str]] = set()
        self._seen: dict[str, int] = {}
        self._told = 0
        self._last: str = ""

    def installed(self, targets: Mapping[str, str]) -> None:
        """Log where the hooks are, and where not.

        Args:
            targets: each target's short name; why it is not hooked, or an empty string.
        """
        held = [name for name, why in targets.items() if not why]
        missing = [f"{name} ({why})" for name, why in targets.items() if why]
        if not held:
            logger.error(
                "ddtree hooks: NOT installed on %s (pid %d): %s; nothing is checked",
                self.engine, os.getpid(), "; ".join(missing),
            )  # fmt: skip
            return
        logger.warning(
            "ddtree hooks: installed on %s: %s (level %s, action %s, pid %d)",
            self.engine, ", ".join(held), self.settings.level, ",".join(self.settings.actions), os.getpid(),
        )  # fmt: skip
        if missing:
            logger.error("ddtree hooks: not installed on %s: %s", self.engine, "; ".join(missing))

    def is_due(self, kind: str) -> bool:
        """Whether this call of a kind is looked at: a fraction is, evenly spread, the first with it."""
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        sample = self.settings.sample
        return sample > 0 and (seen == 1 or int(seen * sample) != int((seen - 1) * sample))

    def hold(self, call: Call, kind: str, where: str) -> InvariantViolation | None:
        """Hold a call to the table, do with what breaks what the settings say, and return it.

        Args:
            call: the engine's call.
            kind: names what made it, in counters and in files' names.
            where: the same for a message.

        Raises:
            InvariantViolation: the first broken invariant, if the action is to raise.
        """
        counts.add("calls", kind, self.settings.level)
        self.once(f"{self.engine}: the first call is checked: {where}, {_sizes(call)}", kind)
        held = check_cheaply if self.settings.level == "cheap" else check
        try:
            held(call=call, where=where)
        except InvariantViolation as violation:
            self._tell(violation, kind, lambda path: dump_call(path, call=call))
            return violation
        return None

    def once(self, text: str, key: str = "") -> None:
        """Log a sentence, once in each process."""
        said = (os.getpid(), key or text)
        if said not in self._said:
            self._said.add(said)
            logger.warning("ddtree hooks: %s (pid %d)", text, os.getpid())

    @contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """Let violations that are to be raised through; all else that goes wrong in a hook is said once.

        What the hook makes is made on the CPU: engines work under other default devices, and while a graph is
        captured nothing may come from one.
        """
        try:
            with on_host():
                yield
        except InvariantViolation:
            raise
        except NotCheckedError as error:
            self.once(f"{self.engine}: not checked: {where}: {error}")
        except Exception as error:  # noqa: BLE001  # a fault of the hook's own must not stop the server
            what = f"{type(error).__name__}: {error}"
            self.once(f"{self.engine}: not checked: {where}: {what}", f"{where}: {type(error)}")

    def _tell(
        self, violation: InvariantViolation, kind: str, write: Callable[[Path], object]
    ) -> None:
        """Do what the settings say; a server makes the same mistake at every step, so only so often."""
        self._told += 1
        most = self.settings.max_dumps
        if self._told > most and "raise" not in self.settings.actions:
            counts.add("violations", violation.invariant, kind)
            self.once(
                f"{self.engine}: {most} violations are told, more are only counted (DDTREE_DEBUG_MAX_DUMPS)",
                "counted only",
            )
            return
        act(violation, self.settings, kind, write)


@cache
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Of a hooked function, read once."""
    return inspect.signature(function)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: the device cannot be read then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def wait_for(tensor: torch.Tensor) -> None:
    """Let every stream finish: metadata is made on one, masks and positions on another."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _sizes(call: Call) -> str:
    """What a call is, in a few words."""
    lens: Any = call.q_lens
    if lens is None:
        lens = torch.zeros(0) if call.qo_indptr is None else call.qo_indptr.diff()
    widths = sorted(set(lens.tolist()))
    width = "unknown" if not widths else str(widths[0])
    if len(widths) > 1:
        width += f" to {widths[-1]}"
    return f"batch {lens.numel()}, q_len {width}"

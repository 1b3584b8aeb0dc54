"""What engines and programs import to have their calls checked: entry points, and ``attach`` for a model.

Engines find ``sglang`` and ``vllm`` by the entry points of this package, in every process that they start.
While ``DDTREE_DEBUG`` is unset nothing else is imported, so that an engine pays for a comparison. The hooks
themselves are in ``ddtree.invariants.hooks``; this module is outside because importing that package imports
the checker.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.invariants.hooks.hf import Attachment

_OFF = ("", "0", "off", "false", "no")


def _is_on() -> bool:
    return os.environ.get("DDTREE_DEBUG", "").strip().lower() not in _OFF


def sglang() -> None:
    """Entry point of ``sglang.srt.plugins``: hook this process of SGLang, if ``DDTREE_DEBUG`` says so."""
    if _is_on():
        from ddtree.invariants.hooks.sglang import plugin

        plugin()


def vllm() -> None:
    """Entry point of ``vllm.general_plugins``: hook this process of vLLM, if ``DDTREE_DEBUG`` says so."""
    if _is_on():
        from ddtree.invariants.hooks.vllm import plugin

        plugin()


def attach(model: Any) -> "Attachment":
    """Check every forward of a Transformers model that is given a 4-D mask, until it is detached.

    Level, action and the rest are the environment's to say (``DDTREE_DEBUG``, ``DDTREE_DEBUG_ACTION`` and so
    on), but the hook is on whether or not the variable is set: calling this asks for it. ``generate`` comes
    by here too.

    Args:
        model: a Transformers model, or any module whose ``forward`` takes ``attention_mask``.

    Returns:
        what ``with`` detaches at its end, or ``detach()`` at once.

    Raises:
        InputError: a model whose ``forward`` takes no ``attention_mask``.
    """
    from ddtree.invariants.hooks.hf import Attachment

    return Attachment(model)

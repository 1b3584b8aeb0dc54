"""Giving a caller's model back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def as_it_was(model: Any) -> Iterator[None]:
    """Decode with a model that is the caller's, and leave it in the modes and with the attention it had.

    Targets put the whole model into evaluation mode, and a ``PagedTarget`` takes its attention over. Each
    module has its own mode: of a model in training some may have been frozen.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    attention = getattr(model.config, "_attn_implementation", None)  # no public reader
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        if getattr(model.config, "_attn_implementation", None) != attention:
            model.set_attn_implementation(attention)

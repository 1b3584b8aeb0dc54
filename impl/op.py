"""What ``torch.compile`` sees of a launcher: an operator ``ddtree::name`` of tensors and numbers.

Dynamo cannot trace through Triton launches that choose their settings in Python, and need not: it meets the
operator and goes on. The public functions around the launchers, with their dataclasses and checks, are
traced as they stand.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.library import Library, infer_schema, register_fake

P = ParamSpec("P")
R = TypeVar("R")

_library = Library("ddtree", "FRAGMENT")


def op(
    name: str, *, writes: tuple[str, ...] = (), fake: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a launcher as the operator ``ddtree::name``; its annotations are the schema.

    A call that nothing traces goes straight to the launcher: the way through PyTorch's dispatcher costs
    more than the checks and allocations of most public functions (``bench/debug.py``).

    Args:
        name: of the operator.
        writes: the arguments that it writes into.
        fake: makes the operator's results without content; None: it has none and only writes.
    """

    def register(launch: Callable[P, R]) -> Callable[P, R]:
        schema = infer_schema(launch, mutates_args=writes)
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        _library.define(name + schema, tags=tags)
        _library.impl(name, launch, "CompositeExplicitAutograd")
        register_fake(f"ddtree::{name}", fake or _nothing, lib=_library)
        operator = getattr(torch.ops.ddtree, name).default

        @wraps(launch)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # noqa: SLF001
                traced: R = operator(*args, **kwargs)
                return traced
            return launch(*args, **kwargs)

        return call

    return register


def _nothing(*_: Any, **__: Any) -> None:
    """What an operator without results leaves."""

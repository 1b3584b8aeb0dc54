"""What ``torch.compile`` sees of a launcher: an operator ``ddtree::name`` of tensors and numbers.

Dynamo cannot trace through Triton launches that choose their settings in Python, and need not: it meets the
operator and goes on. The public functions around the launchers, with their dataclasses and checks, are
traced as they stand.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor
from torch.library import Library, infer_schema, register_fake

from ddtree.spec.errors import InputError, require

P = ParamSpec("P")
R = TypeVar("R")

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which is decided when they are defined."""
NO_KERNELS = (
    "{} is on a CPU; the kernels run on CUDA devices: on a CPU set TRITON_INTERPRET=1 before ddtree.impl "
    "is imported"
)

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
            try:
                return launch(*args, **kwargs)
            except Exception:  # devices are looked at only now: a launch that succeeds pays nothing
                if IS_INTERPRETED or not _any_on_cpu(args, kwargs):
                    raise
            raise InputError(NO_KERNELS.format("a tensor of the call"))

        return call

    return register


def require_kernels(device: torch.device, name: str) -> None:
    """Refuse a device on which no kernel can be launched.

    Raises:
        InputError: it is a CPU, and the kernels are compiled; ``name`` says what lies there.
    """
    require(device.type != "cpu" or IS_INTERPRETED, NO_KERNELS, name)


def _any_on_cpu(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether some tensor of a launcher's arguments is on a CPU."""
    values = (*args, *kwargs.values())
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return any(isinstance(one, Tensor) and one.is_cpu for one in flat)


def _nothing(*_: Any, **__: Any) -> None:
    """What an operator without results leaves."""

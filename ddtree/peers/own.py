"""The reference and our own kernels, as backends among the others."""

import os
from typing import Any

import torch

from ddtree import spec
from ddtree.spec.mask import Form

FORMS: tuple[Form, ...] = ("flat", "packed", "dense", "bits")


class Reference:
    """``ddtree.spec``."""

    mask_forms = FORMS
    any_mask = True

    def __getattr__(self, name: str) -> Any:
        """The package's function."""
        return getattr(spec, name)


class Impl:
    """``ddtree.impl``: on the GPU if there is one, else in Triton's interpreter."""

    mask_forms = FORMS
    any_mask = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    call_limit = 300.0  # the interpreter is slow, and the compiler at first
    # the interpreter computes nonsense from bf16 operands of tl.dot; float32 is what it is held to
    dtypes = (
        (torch.float32, torch.float16, torch.bfloat16)
        if torch.cuda.is_available()
        else (torch.float32, torch.float16)
    )

    def __init__(self) -> None:
        """Choose the interpreter before Triton is imported."""
        interpret_without_gpu()
        from ddtree import impl

        self.package = impl

    def __getattr__(self, name: str) -> Any:
        """The package's function."""
        return getattr(self.__dict__["package"], name)


def interpret_without_gpu() -> None:
    """Have Triton run kernels on the CPU where there is no GPU; it reads the variable when it is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

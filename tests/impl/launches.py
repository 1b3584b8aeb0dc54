"""Compile what the launchers launch, with their real arguments, on a machine without a GPU.

``compiled_for(capability)`` makes each launch of a jitted kernel compile for that GPU instead of
running, and collects what it compiled with the resources that the machine code uses.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code in numbers."""

    name: str
    num_warps: int
    registers: int
    stack: int
    """Bytes of local memory a thread: spills, above all."""
    shared: int
    """Bytes of shared memory a program."""
    fused: int
    """Fused multiply-adds on float64 in the PTX."""


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Compile each launch for a GPU of that compute capability (80, 90, 100); nothing runs."""
    found: list[Compiled] = []

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        del kwargs["grid"], kwargs["warmup"]
        found.append(_compile(kernel, args, kwargs, GPUTarget("cuda", capability, 32)))

    with patch.object(JITFunction, "run", run):
        yield found


def _compile(kernel: Any, args: Any, kwargs: dict[str, Any], target: GPUTarget) -> Compiled:
    names = [parameter.name for parameter in kernel.params]
    options = {name: value for name, value in kwargs.items() if name not in names}
    values = dict(zip(names, args, strict=False)) | {n: v for n, v in kwargs.items() if n in names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        match value:
            case torch.Tensor():
                signature[parameter.name] = TYPES[value.dtype]
                aligned = value.data_ptr() % 16 == 0
            case bool():
                signature[parameter.name], aligned = "i1", False
            case int():
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                aligned = value % 16 == 0
            case float():
                signature[parameter.name], aligned = "fp32", False
        if aligned:
            attributes[parameter.num,] = [["tt.divisibility", 16]]
    source_of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_of(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=target, options=options)
    registers, stack = _resources(binary.asm["cubin"])
    metadata = binary.metadata
    fused = binary.asm["ptx"].count("fma.rn.f64")
    return Compiled(kernel.__name__, metadata.num_warps, registers, stack, metadata.shared, fused)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a cubin's one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+) ", report)
    assert numbers, report
    return int(numbers[1]), int(numbers[2])

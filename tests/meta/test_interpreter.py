"""The interpreter as tests run it computes what it computes as it comes, and leaves Triton as it was."""

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests import interpreter as quick

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled"
)


@triton.jit
def doubled(x):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    return tl.where(x > 3, x * 2, x)


@triton.jit  # type: ignore[untyped-decorator]
def mixed_kernel(given, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    at = tl.arange(0, BLOCK)
    x = tl.load(given + at, at < n, 0)
    y = tl.sort(doubled(x), descending=True)
    table = tl.reshape(x, (4, BLOCK // 4))
    tl.store(out + at, y + tl.sum(x) + tl.cumsum(x, 0))
    tl.store(out + BLOCK + tl.arange(0, BLOCK // 4), tl.xor_sum(table, 0))
    tl.store(out + 2 * BLOCK + tl.arange(0, 4), tl.xor_sum(table, 1))
    tl.store(out + 3 * BLOCK, tl.xor_sum(x, 0) + tl.cdiv(n, 3))


def launched() -> torch.Tensor:
    """What the kernel writes."""
    given = torch.randint(-99, 99, (29,), generator=torch.Generator().manual_seed(1))
    out = torch.zeros(4 * 32, dtype=torch.int64)
    mixed_kernel[(1,)](given, out, 29, BLOCK=32)
    return out


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter as it comes, which leaves replaced what device functions of Triton's own call."""
    for name, value in vars(tl.core).items():
        monkeypatch.setattr(tl.core, name, value)
    for of, name in (
        (interpreter, "_patch_lang"),
        (interpreter, "_get_np_dtype"),
        (interpreter.ReduceOps, "generic_reduce"),
    ):
        monkeypatch.setattr(of, name, quick.PLAIN[name])


def test_results_are_those_of_the_interpreter_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that calls functions, sorts, scans and reduces gives the same."""
    found = launched()
    plain(monkeypatch)
    assert torch.equal(found, launched())
    assert found.unique().numel() > 9


def test_the_language_is_put_back() -> None:
    """After a launch, and after one that raised, all of the language is as it was."""

    def names() -> dict[tuple[str, str], Any]:
        objects = {"tl": tl, "core": tl.core, "tensor": tl.tensor, "math": tl.math}
        return {(o, n): getattr(of, n) for o, of in objects.items() for n in dir(of)}

    before = names()
    launched()
    assert names() == before
    with pytest.raises(interpreter.InterpreterError):
        mixed_kernel[(1,)](torch.zeros(3), torch.zeros(3), "three", BLOCK=32)
    assert names() == before
    assert torch.equal(launched(), launched())


@pytest.mark.parametrize("function", [1])
def test_a_test_may_have_an_argument_of_any_name(function: int) -> None:
    """Those of the frame that tests run in are no names."""
    assert function == 1

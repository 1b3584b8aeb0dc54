"""The lint of kernels' addresses: what it refuses, what passes, and that what is allowed is a formula."""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import z3

from ddtree.invariants.proofs.integers import Int, Scope, every, pick, term_of
from ddtree.spec import index
from tools.check_addresses import ALLOWED, ROOT, problems

HEAD = """
import triton
import triton.language as tl
from ddtree.impl.index import block_start, row_offset, num_blocks as blocks
LINES = tl.constexpr(4)
@triton.jit
def other(pointer, at, stride):
    tl.store(pointer + at, 0)
    return at
"""


def found(body: str, arguments: str = "x, row, col, stride, n, SIZE: tl.constexpr") -> list[str]:
    """What the lint says of a kernel with that body."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    source = f"{HEAD}\n@triton.jit\ndef kernel({arguments}):\n{lines}\n"
    said, _ = problems([(Path("impl/some_kernels.py"), source)])
    return [line.split("`")[1] for line in said]


@pytest.mark.parametrize(
    ("body", "expressions"),
    [
        ("tl.load(x + row * stride + col)", ["row * stride"]),
        ("at = row * stride + col\ntl.store(x + at, 1)", ["row * stride"]),
        ("x += row * stride\ntl.load(x + col)", ["row * stride"]),
        ("at, by = row // 8, row % 8\ntl.load(x + at + by)", ["row % 8", "row // 8"]),
        ("tl.load(x + (row << 3))", ["row << 3"]),
        ("tl.load(x + (row & 31))", ["row & 31"]),
        ("tl.load(x + tl.cdiv(row, 32))", ["tl.cdiv(row, 32)"]),
        ("tl.load(x + row_offset(row // 2, stride, col))", ["row // 2"]),
        ("tl.load(x + tl.where(row > 1, row * 2, 0).to(tl.int64))", ["row * 2"]),
        ("for i in range(row * n, stride):\n    tl.load(x + i)", ["row * n"]),
        ("tl.atomic_add(x + row * n, 1)", ["row * n"]),
        ("other(x, row * n, stride)", ["row * n"]),
        ("other(x + row * n, col, stride)", ["row * n"]),
        ("at = other(x, col, row * n)\ntl.load(x + at)", []),
        ("at = tl.load(x + row * n)\ntl.load(x + at * SIZE)", ["at * SIZE", "row * n"]),
        ("copy.async_copy_global_to_shared(n.index(row * 2), x + row * n)", ["row * n"]),
        ("gl.warp_specialize([(other, (x, row * n, stride))])", ["row * n"]),
        ("tl.load(x + unknown(row))", ["unknown(row)"]),
        ("tl.load(x + ~row)", ["~row"]),
        ("x.index(row % n).store(col * 2)", ["row % n"]),
    ],
)
def test_refused(body: str, expressions: list[str]) -> None:
    """Arithmetic that goes into an address by any way is named, and what does not is left alone."""
    assert sorted(found(body)) == sorted(expressions)


@pytest.mark.parametrize(
    "body",
    [
        "tl.load(x + row_offset(row, stride, col))",
        "tl.load(x + block_start(row, SIZE) + tl.arange(0, SIZE), mask=row * 2 < n)",
        "first = blocks(n, SIZE)\ntl.load(x + first - 1)",
        "tl.load(x + row_offset(row, 2 * SIZE, 0)[:, None] + col[None, :])",
        "tl.load(x + SIZE * LINES)",
        "value = row * stride\ntl.store(x + col, value)",
        "x.index(col).store(row * stride)",
        "at = tl.sum(tl.where(row * n > col, col, 0), axis=0)\ntl.load(x + at)",
        "count = tl.cumsum(((row < col) & (col < n)).to(tl.int32), axis=0)\ntl.load(x + count)",
    ],
)
def test_passes(body: str) -> None:
    """Formulas, sums, compile-time sizes, conditions and values that are no address pass."""
    assert found(body) == []


def test_kernels_pass() -> None:
    """The repository's kernels do, and nothing is allowed that none of them needs."""
    run = subprocess.run(
        [sys.executable, "tools/check_addresses.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.stdout, run.returncode) == ("", 0)


def test_a_kernel_that_bypasses_the_formulas() -> None:
    """A real kernel with one formula written out is refused."""
    path = ROOT / "impl" / "commit_kernels.py"
    right = path.read_text(encoding="utf-8")
    wrong = right.replace("row_offset(b, table_stride, 0)", "b * table_stride")
    assert wrong != right
    said, _ = problems([(Path("impl/commit_kernels.py"), wrong)])
    assert [line.split("`")[1] for line in said] == ["b * table_stride"]


class Reader:
    """Reads an expression of a kernel as integers of the prover; what it does not know is a variable."""

    def __init__(self) -> None:
        """Start without variables."""
        self.scope = Scope()
        self.known: dict[str, Int] = {}

    def read(self, node: ast.expr) -> Any:
        """The expression's value."""
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](self.read(left), self.read(right))
            case ast.Subscript(value=value):
                return self.read(value)
            case ast.Call(func=ast.Attribute(value=value, attr="to")):
                return self.read(value)
            case ast.Call(func=ast.Attribute(attr="cast"), args=[value, *_]):
                return self.read(value)
            case ast.Call(func=ast.Attribute(attr="cdiv"), args=[above, below]):
                return (self.read(above) + self.read(below) - 1) // self.read(below)
            case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
                chosen = self._variable(ast.unparse(condition)) > 0
                return pick(chosen, self.read(yes), self.read(no), self.scope)
            case ast.Call(func=ast.Attribute(attr="maximum"), args=[one, other]):
                a, b = self.read(one), self.read(other)
                return pick(term_of(a) >= term_of(b), a, b, self.scope)
            case ast.Call(func=ast.Name(id=name), args=arguments) if hasattr(index, name):
                return getattr(index, name)(*(self.read(argument) for argument in arguments))
            case ast.Call(func=ast.Attribute(attr="max"), args=[value]):
                return self._variable(f"max {ast.unparse(value).removesuffix('.to(tl.int32)')}")
        return self._variable(ast.unparse(node))

    def _variable(self, name: str) -> Int:
        if name not in self.known:
            (self.known[name],) = self.scope.naturals(name.replace(" ", "_"))
        return self.known[name]


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.LShift: lambda a, b: a * 2**b,
    ast.RShift: lambda a, b: a // 2**b,
    ast.BitAnd: lambda a, b: a % (b + 1),
}


def is_formula(expression: str, formula: str) -> bool:
    """Whether the two are equal for all numbers, where no divisor is 0."""
    reader = Reader()
    one, other = (reader.read(ast.parse(text, mode="eval").body) for text in (expression, formula))
    solver = z3.Solver()
    solver.set("timeout", 20_000)
    solver.add(*reader.scope.bounds, every(*(below > 0 for _, below in reader.scope.divisions)))
    solver.add(term_of(one) != term_of(other))
    return bool(solver.check() == z3.unsat)


@pytest.mark.parametrize("expression", ALLOWED)
def test_allowed_expressions_are_formulas(expression: str) -> None:
    """What a kernel spells out is the formula that the list names, for all numbers."""
    call = ast.parse(ALLOWED[expression], mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    assert hasattr(index, call.func.id)
    assert is_formula(expression, ALLOWED[expression])


@pytest.mark.parametrize(
    ("expression", "formula"),
    [
        ("index // GROUP", "col_of(index, GROUP)"),
        ("b * KV_HEADS", "row_offset(b, KV_HEADS, 1)"),
        ("tl.cdiv(n, size)", "row_of(n, size)"),
        ("before & 4095", "col_of(before, 4095)"),
        ("a * b", "row_offset(a, c, 0)"),
    ],
)
def test_wrong_formulas_are_not_allowed(expression: str, formula: str) -> None:
    """An expression that is another formula, or of other numbers, is told apart."""
    assert not is_formula(expression, formula)

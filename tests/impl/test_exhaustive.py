"""The kernels equal the reference on every small case: trees to 7 nodes, budgets to 8, batches to 3."""

import os

import pytest

from ddtree import impl
from ddtree.impl import mask, mask_kernels
from ddtree.invariants.proofs.exhaustive import PARTS, Part, check_part
from ddtree.spec import index


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_equal(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """No case differs."""
    # the interpreter pays for programs, not for their rows
    monkeypatch.setattr(mask, "QUERIES", 512)
    checked = check_part(part, impl)
    assert checked.ok, checked


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="compiled kernels cannot be mutated"
)
def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose bit of a node is one off differs."""
    monkeypatch.setattr(mask, "QUERIES", 512)
    monkeypatch.setattr(mask_kernels, "bit_shift", lambda node: index.bit_shift(node + 1))
    assert check_part(PARTS[0], impl).differences

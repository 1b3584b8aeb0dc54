"""The comparison over all small cases: that it lists them all and finds what is wrong."""

from math import factorial

import pytest

from ddtree import spec
from ddtree.invariants.proofs import exhaustive
from ddtree.invariants.proofs.exhaustive import PARTS, Part, check_part, every_tree


def test_every_tree_is_listed() -> None:
    """There are (n - 1)! trees of n nodes, all different, each parent before its child."""
    trees = every_tree(7)
    assert (
        len(trees) == len(set(trees)) == sum(factorial(nodes - 1) for nodes in range(1, 8)) == 874
    )
    assert all(-1 < parent < node for tree in trees for node, parent in enumerate(tree) if node)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_wrong_twins_are_found(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference equals itself on all cases; its wrong twin does not."""
    monkeypatch.setattr(exhaustive, "DEVICE", "cpu")
    checked = check_part(part, spec)
    assert checked.ok, checked
    assert check_part(part, part.wrong).differences

"""The adapters that run on a CPU, against the reference; and what peers are handed."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from ddtree import spec
from ddtree.invariants.conformance import Backend
from ddtree.invariants.conformance.calls import parents, tree_of
from ddtree.invariants.conformance.fuzz import hold
from ddtree.invariants.conformance.properties import PROPERTIES
from ddtree.peers import PEERS, load
from ddtree.peers.sglang import _folder, linked, sglang_module
from tests.hooks.engines import ENGINES, needs

BY_ID = {prop.id: prop for prop in PROPERTIES}
ON_CPU = ("sdpa", "flex", "transformers-sdpa", "transformers-eager", "impl")


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("prop", ["visible set", "visible set, replay", "values, float32"])
def test_peers_hold(name: str, prop: str) -> None:
    """Each attends to the right entries, in buffers too, with the reference's numbers."""
    result = hold(Backend.of(load(PEERS[name].target)), BY_ID[prop], examples=8, seconds=60)
    assert result.state == "holds", result


def test_linked_lists_walk_the_tree() -> None:
    """Children in order, each once; padding is in no list."""
    child, sibling = linked(tree_of([[-1, 0, 0, 1, 0], [-1, 0]], 5))
    assert child.tolist() == [[1, 3, -1, -1, -1], [1, -1, -1, -1, -1]]
    assert sibling.tolist() == [[-1, 2, 4, -1, -1], [-1, -1, -1, -1, -1]]


@pytest.mark.skipif(find_spec("sglang") is not None, reason="it is installed")
def test_a_missing_peer_is_an_import_error() -> None:
    """So the command can say what to install."""
    with pytest.raises(ImportError, match="sglang is not installed"):
        sglang_module("sglang.kernels.ops.attention.extend_attention")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's wheel: installed, or from ``make engines`` for the time of a test."""
    if find_spec("sglang") is None:
        if needs("sglang-0.5.23"):
            pytest.skip(needs("sglang-0.5.23"))
        monkeypatch.syspath_prepend(str(ENGINES / "sglang-0.5.23"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    sglang_module.cache_clear()
    _folder.cache_clear()


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("prop", "state", "examples"),
    [
        ("visible set", "holds", 25),
        ("visible set, replay", "holds", 25),
        ("tree_mask", "holds", 5),  # it walks up from each node: 64 rows take seconds
        ("accept_greedy", "holds", 25),
        ("window", "broken", 25),
    ],
)
def test_sglang(prop: str, state: str, examples: int) -> None:
    """Its kernels hold, but for a window by row (its issue 39287)."""
    backend = Backend.of(load("ddtree.peers.sglang:Triton"))
    result = hold(backend, BY_ID[prop], examples=examples, seconds=60)
    assert result.state == state, result


@pytest.mark.parametrize("shape", ["chain", "star", "binary", "random"])
def test_trees_of_a_shape_are_trees(shape: str) -> None:
    """They pass the reference's own walk: the deepest node is accepted where the target likes its path."""
    tree = tree_of([parents(shape, 9, seed=3)], 11)
    layout = spec.plan_verify(tree, torch.tensor([2]), torch.arange(20)[None])
    deepest = int(tree.depths[0].argmax())
    choices = torch.full((11,), 99)
    node = deepest
    while node > 0:
        choices[tree.parents[0, node]] = tree.token_ids[0, node]
        node = int(tree.parents[0, node])
    accepted = spec.accept_greedy(tree, choices, layout, spec.Horizon(10))
    assert accepted.nodes[0, int(accepted.num_accepted) - 1] == deepest

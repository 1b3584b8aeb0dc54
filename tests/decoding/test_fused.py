"""Fused layers compute what Transformers' do, on the model's own weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree import impl
from ddtree.decoding.fused import can_fuse
from ddtree.decoding.paged import PagedTarget
from ddtree.spec import DraftTree, InputError
from tests.decoding.tiny import PAGED, prompt, tiny_model
from tests.impl.cases import DEVICE

FUSED = ["llama-64", "qwen2-64", "qwen3-128", "mistral-window"]


@pytest.mark.parametrize("kind", [pytest.param("llama-64", marks=pytest.mark.long), *FUSED[1:]])
def test_logits_features_and_pools_are_those_of_the_model(kind: str) -> None:
    """A prompt, and a branching tree beside an unused place; every layer watched, one twice."""
    model = tiny_model(kind, torch.float32).to(DEVICE)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parents = torch.tensor([[-1, 0, 0, 1]] * 2, dtype=torch.int32, device=DEVICE)
    depths = torch.tensor([[0, 1, 1, 2]] * 2, dtype=torch.int32, device=DEVICE)
    ids = torch.tensor([[5, 6, 7, 8]] * 2, device=DEVICE)
    tree = DraftTree(ids, parents, depths, -depths.double(), parents[:, 0] + 5)
    found: list[list[Tensor]] = []
    for fused in (False, True):  # the second stacks the weights that both use
        target = PagedTarget(
            model,
            max_batch=2,
            max_context=16,
            page_size=4,
            feature_layer_ids=(0, 1, 0),
            fused=fused,
        )
        logits = target.prefill(1, prompt(7))
        features = target.take_features(1, 7)
        layout = impl.plan_verify(tree, target.prefix_lens, target.slot_table)
        verified = target.forward(tree, layout, impl.tree_mask(tree, layout))
        rows = target.row_features
        assert features is not None
        assert rows is not None
        pools = [pool[:-1] for pool in (*target.kv.keys, *target.kv.values)]
        found.append([logits, features, verified[:4], rows[:4], *pools])
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0
        assert torch.allclose(one, other, atol=2e-4, rtol=1e-4)
    for name, weight in model.state_dict().items():  # what the modules show is what it was
        assert torch.equal(weight, before[name]), name
    plain = model(input_ids=prompt(7)[None].to(DEVICE), use_cache=False).logits[0, -1]
    assert torch.allclose(plain, found[1][0], atol=2e-4)


def test_weights_are_held_once() -> None:
    """Stacked parameters are views of one tensor, however often a target is made."""
    model = tiny_model("qwen2-64", torch.float32).to(DEVICE)
    layer: Any = model.model.layers[1]
    for _ in range(2):
        PagedTarget(model, max_context=8, fused=True)
        attention = layer.self_attn
        for parts in (
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
            [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias],
            [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight],
        ):
            addresses = {part.untyped_storage().data_ptr() for part in parts}
            assert len(addresses) == 1
        seen = {attention.q_proj.weight.data_ptr()}
    assert seen == {attention.q_proj.weight.data_ptr()}


def test_what_is_not_plain_is_left_to_transformers() -> None:
    """Other architectures, compiled models, layers with something in between or with weights beside the plain
    ones; the error says which are.
    """
    assert {kind for kind in PAGED if can_fuse(tiny_model(kind, torch.float32))} == set(FUSED)
    model = tiny_model("llama-64", torch.float32)
    model.model.layers[0].adapter = torch.nn.Linear(2, 2)
    assert not can_fuse(model)
    model.config.mlp_bias = True
    assert not can_fuse(type(model)(model.config))
    model = tiny_model("llama-64", torch.float32)
    model.compile(backend="eager")
    assert not can_fuse(model)
    with pytest.raises(InputError, match="Gemma2ForCausalLM is none of the plain models"):
        PagedTarget(tiny_model("gemma2-softcap", torch.float32).to(DEVICE), fused=True)

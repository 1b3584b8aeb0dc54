"""Fixed buffers: what they hold depends on the last call alone, and too small ones are refused."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor

from ddtree.invariants import strategies as st
from ddtree.spec.attention import verify_attention
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import QLen
from ddtree.spec.errors import InputError
from ddtree.spec.layout import plan_verify
from ddtree.spec.mask import convert_mask, tree_mask
from tests.trees import tree_of

FIELDS = ("qo_indptr", "kv_indptr", "kv_indices", "mask_indptr", "positions", "out_cache_loc")


def contents(buffers: VerifyBuffers) -> dict[str, Tensor]:
    """Every tensor of the buffers."""
    found: dict[str, Tensor] = {name: getattr(buffers.layout, name) for name in FIELDS}
    return found | {"mask": buffers.mask.allowed, "token_ids": buffers.token_ids}


def fill(buffers: VerifyBuffers, call: st.VerifyCall) -> None:
    """Fill the buffers with a call and its mask."""
    buffers.fill(call.tree, call.layout, tree_mask(call.tree, call.layout, "flat"))


def sizes_for(*calls: st.VerifyCall) -> tuple[int, int, int]:
    """The largest batch, q_len and prefix of some calls."""
    return (
        max(len(call.prefix_lens) for call in calls),
        max(call.layout.max_q_len for call in calls),
        max(int(call.prefix_lens.max()) for call in calls),
    )


def make(sizes: st.BufferSizes, pad_slot: int = -1) -> VerifyBuffers:
    """Buffers of some sizes."""
    return VerifyBuffers(sizes.max_batch, QLen(sizes.max_q_len), sizes.max_context, pad_slot)


def test_written_out() -> None:
    """One request of two nodes and prefix 1 in buffers for two requests, width 3 and context 2."""
    tree = tree_of(parents=[[-1, 0]], tokens=[[7, 8]])
    layout = plan_verify(tree, torch.tensor([1]), torch.tensor([[4, 5, 6]]))
    buffers = VerifyBuffers(2, QLen(3), 2)
    buffers.fill(tree, layout, tree_mask(tree, layout, "flat"))
    assert {name: tensor.int().tolist() for name, tensor in contents(buffers).items()} == {
        "qo_indptr": [0, 2, 2],
        "kv_indptr": [0, 1, 1],
        "kv_indices": [4, 0, 0, 0],
        "mask_indptr": [0, 6, 6],
        "positions": [1, 2, 0, 0, 0, 0],
        "out_cache_loc": [5, 6, -1, -1, -1, -1],
        "mask": [1, 1, 0, 1, 1, 1] + [0] * 24,  # 2 * 3 * (2 + 3) = 30 entries
        "token_ids": [7, 8, 0, 0, 0, 0],
    }
    assert buffers.layout.max_q_len == 3
    assert buffers.layout.is_captured


@given(st.verify_calls(max_q_len=18), st.verify_calls(max_q_len=18), hs.data())
def test_a_fill_leaves_no_trace_of_the_one_before(
    earlier: st.VerifyCall, call: st.VerifyCall, data: hs.DataObject
) -> None:
    """Refilled buffers equal fresh ones, in the very same memory."""
    sizes = data.draw(st.buffer_sizes(*sizes_for(earlier, call)))
    pad_slot = data.draw(hs.sampled_from([-1, 3]))
    reused, fresh = make(sizes, pad_slot), make(sizes, pad_slot)
    memory = {name: tensor.data_ptr() for name, tensor in contents(reused).items()}
    layout, mask = reused.layout, reused.mask
    fill(reused, earlier)
    for tensor in contents(reused).values():
        tensor.fill_(1)  # and worse than any earlier call
    fill(reused, call)
    fill(fresh, call)
    for name, tensor in contents(reused).items():
        assert torch.equal(tensor, contents(fresh)[name]), name
        assert tensor.data_ptr() == memory[name], name
    assert reused.layout is layout
    assert reused.mask is mask


@given(st.verify_calls(max_q_len=18), hs.data())
def test_the_front_is_the_call_and_the_tail_is_inert(
    call: st.VerifyCall, data: hs.DataObject
) -> None:
    """The call's numbers come first; behind them indptrs stand still and nothing is allowed."""
    buffers = make(data.draw(st.buffer_sizes(*sizes_for(call))))
    fill(buffers, call)
    for name in FIELDS:
        front = getattr(call.layout, name)
        assert torch.equal(getattr(buffers.layout, name)[: len(front)], front), name
        tail = getattr(buffers.layout, name)[len(front) :]
        inert = -1 if name == "out_cache_loc" else int(front[-1]) if "indptr" in name else 0
        assert (tail == inert).all(), name
    allowed = tree_mask(call.tree, call.layout, "flat").allowed
    assert torch.equal(buffers.mask.allowed[: len(allowed)], allowed)
    words = convert_mask(buffers.mask, buffers.layout, "bits").words
    assert torch.equal(words, tree_mask(call.tree, call.layout, "bits").words)
    assert not buffers.mask.allowed[len(allowed) :].any()
    tokens, ends = [], call.layout.qo_indptr.tolist()
    for b, (start, end) in enumerate(pairwise(ends)):
        tokens += call.tree.token_ids[b, : end - start].tolist()
    assert buffers.token_ids.tolist() == tokens + [0] * (len(buffers.token_ids) - len(tokens))


@given(st.verify_calls(max_q_len=9, max_prefix=6), hs.data())
def test_attention_through_buffers_equals_the_eager_one(
    call: st.VerifyCall, data: hs.DataObject
) -> None:
    """A replay for a batch smaller than the captured one gives the same rows, then zeros."""
    buffers = make(data.draw(st.buffer_sizes(*sizes_for(call))))
    fill(buffers, call)
    generator = torch.Generator().manual_seed(0)
    rows, captured = call.layout.positions.numel(), buffers.layout.positions.numel()
    query, key, value = torch.randn(3, captured, 2, 3, generator=generator)
    key_pool, value_pool = torch.randn(2, call.slots.num_slots, 2, 3, generator=generator)
    eager, eager_lse = verify_attention(
        query[:rows],
        key[:rows],
        value[:rows],
        key_pool,
        value_pool,
        call.layout,
        tree_mask(call.tree, call.layout, "bits"),
        window=4,
        return_lse=True,
    )
    replayed, lse = verify_attention(
        query,
        key,
        value,
        key_pool,
        value_pool,
        buffers.layout,
        buffers.mask,
        window=4,
        return_lse=True,
    )
    assert eager_lse is not None
    assert lse is not None
    assert torch.equal(replayed[:rows], eager)
    assert torch.equal(lse[:rows], eager_lse)
    assert (replayed[rows:] == 0).all()
    assert (lse[rows:] == -torch.inf).all()


def test_a_width_that_is_not_the_calls_own_does_not_fit_in() -> None:
    """Rows of width 3 under a max_q_len of 1 are refused by their number, and nothing is written."""
    tree = tree_of(parents=[[-1, 0, 0]], tokens=[[7, 8, 9]])
    layout = plan_verify(tree, torch.tensor([1]), torch.tensor([[4, 5, 6, 7]]))
    buffers = VerifyBuffers(1, QLen(1), 1)
    with pytest.raises(InputError, match="3 entries do not fit a buffer of 1"):
        buffers.fill(tree, replace(layout, max_q_len=QLen(1)), tree_mask(tree, layout, "flat"))
    assert not any(tensor.clamp(min=0).any() for tensor in contents(buffers).values())


@given(st.verify_calls(max_q_len=18), st.verify_calls(max_q_len=18), hs.data())
def test_a_call_that_does_not_fit_is_refused_and_nothing_written(
    held: st.VerifyCall, call: st.VerifyCall, data: hs.DataObject
) -> None:
    """One capacity too small by one raises with both numbers, and the buffers stay as they were."""
    name = data.draw(hs.sampled_from(["max_batch", "max_q_len", "max_context"]))
    needed = st.BufferSizes(*sizes_for(call))
    short = getattr(needed, name) - 1
    held_sizes = st.BufferSizes(*sizes_for(held))
    if short < getattr(held_sizes, name):
        return  # `held` would not fit either
    sizes = st.BufferSizes(*sizes_for(held, call))
    buffers = make(replace(sizes, **{name: short}))
    fill(buffers, held)
    before = {key: tensor.clone() for key, tensor in contents(buffers).items()}
    with pytest.raises(InputError, match=f"is {short + 1}; the buffers were made for {short}"):
        fill(buffers, call)
    for key, tensor in contents(buffers).items():
        assert torch.equal(tensor, before[key]), key

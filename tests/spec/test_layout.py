"""The layout against hand-computed numbers and a plain walk over requests."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given

from ddtree.invariants import strategies as st
from ddtree.spec.contracts import Budget, DraftTree
from ddtree.spec.errors import InputError
from ddtree.spec.layout import _indptr, plan_verify
from ddtree.spec.tree import build_tree
from tests.trees import tree_of


def chain(batch: int, budget: int) -> DraftTree:
    """Chains of horizon 7, as topk 1 of a block size of 8 gives, padded to ``budget + 1`` rows."""
    draft = torch.zeros(batch, 7, 3).log_softmax(-1)
    return build_tree(draft, torch.zeros(batch, dtype=torch.int64), Budget(budget), 1)


def test_written_out() -> None:
    """Two requests of prefix 2 and 0, trees of two and one nodes, padded to three rows."""
    tree = tree_of(parents=[[-1, 0, 0], [-1, 0, -1]], tokens=[[5, 6, 7], [8, 9, 0]])
    slots = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    layout = plan_verify(tree, torch.tensor([2, 0]), slots)
    assert layout.qo_indptr.tolist() == [0, 3, 6]
    assert layout.kv_indptr.tolist() == [0, 2, 2]
    assert layout.kv_indices.tolist() == [10, 11]
    assert layout.mask_indptr.tolist() == [0, 15, 24]
    assert layout.positions.tolist() == [2, 3, 3, 0, 1, 0]
    assert layout.out_cache_loc.tolist() == [12, 13, 14, 20, 21, 22]
    assert layout.max_q_len == 3
    ragged = plan_verify(tree, torch.tensor([2, 0]), slots, tree.num_nodes)
    assert ragged.qo_indptr.tolist() == [0, 3, 5]
    assert ragged.mask_indptr.tolist() == [0, 15, 19]
    assert ragged.out_cache_loc.tolist() == [12, 13, 14, 20, 21]


def test_the_founding_bugs_numbers() -> None:
    """Budget 16 with prefixes 5 and 3 ends the mask at 714, not at the 192 of width 8."""
    slots = torch.arange(60).reshape(2, 30)
    layout = plan_verify(chain(2, 16), torch.tensor([5, 3]), slots)
    assert layout.mask_indptr.tolist() == [0, 374, 714]
    assert layout.qo_indptr.tolist() == [0, 17, 34]
    assert layout.max_q_len == 17


@given(st.verify_calls())
def test_equals_a_plain_walk(call: st.VerifyCall) -> None:
    """Each field is what counting rows and entries one by one gives, with the contract's dtype."""
    layout, tree, table = call.layout, call.tree, call.slots.table.tolist()
    batch, rows = tree.token_ids.shape
    qo, kv, mask = [0], [0], [0]
    indices, positions, slots = [], [], []
    for b in range(batch):
        prefix_len = int(call.prefix_lens[b])
        q_len = rows if call.q_lens is None else int(call.q_lens[b])
        qo.append(qo[-1] + q_len)
        kv.append(kv[-1] + prefix_len)
        mask.append(mask[-1] + sum(1 for _ in range(q_len) for _ in range(prefix_len + q_len)))
        indices += table[b][:prefix_len]
        for row in range(q_len):
            positions.append(prefix_len + int(tree.depths[b, row]))
            slots.append(table[b][prefix_len + row])
    for name, expected, dtype in [
        ("qo_indptr", qo, torch.int32),
        ("kv_indptr", kv, torch.int32),
        ("mask_indptr", mask, torch.int64),
        ("kv_indices", indices, torch.int64),
        ("positions", positions, torch.int64),
        ("out_cache_loc", slots, torch.int64),
    ]:
        tensor = getattr(layout, name)
        assert tensor.tolist() == expected, name
        assert tensor.dtype == dtype, name
    assert layout.max_q_len == max(end - start for start, end in pairwise(qo))
    assert not layout.is_captured
    assert len(set(indices + slots)) == len(indices + slots)


def test_a_slot_given_twice_is_told_with_its_entries() -> None:
    """The repeated slot need not be the smallest; its first four entries are told and no other."""
    tree = tree_of(parents=[[-1, 0]], tokens=[[1, 2]])
    table = torch.tensor([[1, 5, 2, 5, 5, 5, 5, 9]])
    with pytest.raises(InputError, match=r"gives slot 5 to entries \[1, 3, 4, 5\]; it holds one"):
        plan_verify(tree, torch.tensor([6]), table)


def test_an_indptr_that_int32_cannot_hold_is_refused() -> None:
    """Ends up to 2^31 - 1 fit int32 and one more is refused with its name; int64 holds it."""
    last = [2**30, 2**30 - 1]
    assert _indptr("kv_indptr", last, torch.int32, torch.device("cpu")).tolist() == [
        0,
        2**30,
        2**31 - 1,
    ]
    longer = [2**30, 2**30]
    with pytest.raises(InputError, match="kv_indptr would end at 2147483648"):
        _indptr("kv_indptr", longer, torch.int32, torch.device("cpu"))
    held = _indptr("mask_indptr", longer, torch.int64, torch.device("cpu"))
    assert held.tolist() == [0, 2**30, 2**31]

"""A dtype that would be misread is refused by name, with debug mode off too."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ddtree.spec import (
    Acceptance,
    BitMask,
    Budget,
    DenseMask,
    FlatMask,
    Horizon,
    InputError,
    PackedMask,
    PagedKV,
    QLen,
    VerifyBuffers,
    VerifyLayout,
    accept_greedy,
    accept_sampled,
    build_tree,
    commit_kv,
    convert_mask,
    plan_verify,
    tree_mask,
    verify_attention,
)
from ddtree.spec.contracts import TreeMask
from ddtree.spec.dtypes import FLOAT, indexable, require_tensor

DRAFT = torch.full((1, 2, 3), -1.1)
ROOT = torch.tensor([1])
TREE = build_tree(DRAFT, ROOT, Budget(3))
LENS = torch.tensor([5])
TABLE = torch.arange(9).reshape(1, 9)
LAYOUT = plan_verify(TREE, LENS, TABLE)
FLAT = tree_mask(TREE, LAYOUT, "flat")
PACKED = tree_mask(TREE, LAYOUT, "packed")
IDS = torch.zeros(4, dtype=torch.int64)
ACCEPTANCE = accept_greedy(TREE, IDS, LAYOUT, Horizon(2))
KV = PagedKV((), (), TABLE)


def attend(
    layout: VerifyLayout = LAYOUT, mask: TreeMask = FLAT, dtype: torch.dtype = torch.float32
) -> object:
    """A call of verify_attention."""
    rows, pool = torch.zeros(4, 1, 2, dtype=dtype), torch.zeros(9, 1, 2, dtype=dtype)
    return verify_attention(rows, rows, rows, pool, pool, layout, mask)


CASES: dict[str, Callable[[], object]] = {
    "draft_log_probs has dtype torch.int64": lambda: build_tree(-DRAFT.long(), ROOT, Budget(3)),
    "root_token_ids has dtype torch.float32": lambda: build_tree(DRAFT, ROOT.float(), Budget(3)),
    "DraftTree.depths has dtype torch.float32": lambda: plan_verify(
        replace(TREE, depths=TREE.depths.float()), LENS, TABLE
    ),
    "prefix_lens has dtype torch.float32": lambda: plan_verify(TREE, LENS.float(), TABLE),
    "slot_table has dtype torch.uint8": lambda: plan_verify(TREE, LENS, TABLE.byte()),
    "q_lens has dtype torch.bool": lambda: plan_verify(TREE, LENS, TABLE, LENS.bool()),
    "DraftTree.parents has dtype torch.float64": lambda: tree_mask(
        replace(TREE, parents=TREE.parents.double()), LAYOUT
    ),
    "FlatMask.allowed has dtype torch.uint8": lambda: attend(mask=FlatMask(FLAT.allowed.byte())),
    "FlatMask.allowed has dtype torch.float32": lambda: convert_mask(
        FlatMask(FLAT.allowed.float()), LAYOUT, "bits"
    ),
    "PackedMask.packed has dtype torch.int64": lambda: attend(
        mask=PackedMask(PACKED.packed.long(), PACKED.byte_indptr)
    ),
    "DenseMask.bias has dtype torch.bool": lambda: attend(
        mask=DenseMask(torch.zeros(1, 1, 4, 9, dtype=torch.bool))
    ),
    "BitMask.words has dtype torch.uint8": lambda: attend(
        mask=BitMask(torch.ones(4, 1, dtype=torch.uint8))
    ),
    "VerifyLayout.kv_indices has dtype torch.uint8": lambda: attend(
        replace(LAYOUT, kv_indices=LAYOUT.kv_indices.byte())
    ),
    "VerifyLayout.qo_indptr has dtype torch.float32": lambda: attend(
        replace(LAYOUT, qo_indptr=LAYOUT.qo_indptr.float())
    ),
    "query has dtype torch.int32": lambda: attend(dtype=torch.int32),
    "target_ids has dtype torch.float32": lambda: accept_greedy(
        TREE, IDS.float(), LAYOUT, Horizon(2)
    ),
    "target_logits has dtype torch.int64": lambda: accept_sampled(
        TREE, torch.zeros(4, 3).long(), LAYOUT, Horizon(2), torch.zeros(4).double()
    ),
    "uniforms has dtype torch.float32": lambda: accept_sampled(
        TREE, torch.zeros(4, 3), LAYOUT, Horizon(2), torch.zeros(4)
    ),
    "Acceptance.nodes has dtype torch.float32": lambda: commit_kv(
        KV,
        LAYOUT,
        Acceptance(ACCEPTANCE.nodes.float(), ACCEPTANCE.num_accepted, ACCEPTANCE.bonus),
    ),
    "PagedKV.slot_table has dtype torch.uint8": lambda: commit_kv(
        replace(KV, slot_table=TABLE.byte()), LAYOUT, ACCEPTANCE
    ),
    "VerifyLayout.positions has dtype torch.float32": lambda: VerifyBuffers(1, QLen(4), 5).fill(
        TREE, replace(LAYOUT, positions=LAYOUT.positions.float()), FLAT
    ),
}


@pytest.mark.parametrize("message", CASES)
def test_wrong_dtype(message: str) -> None:
    """The message names the tensor, the dtype found and the dtypes wanted."""
    with pytest.raises(InputError, match=f"{message}; expected torch"):
        CASES[message]()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_either_index_dtype_is_read_the_same(dtype: torch.dtype) -> None:
    """Engines hold index fields in 32 or in 64 bits."""
    layout = replace(
        LAYOUT, qo_indptr=LAYOUT.qo_indptr.to(dtype), kv_indices=LAYOUT.kv_indices.to(dtype)
    )
    assert torch.equal(convert_mask(PACKED, layout, "flat").allowed, FLAT.allowed)
    assert attend(layout) is not None


def test_axes_are_a_size_or_a_name_for_any() -> None:
    """As many as the tensor has, however long; the message has its shape and the axes wanted."""
    require_tensor("x", torch.zeros(300, 7), FLOAT, (300, "width"))
    for shape, wanted in [((300, 7), (299, "width")), ((300, 7), ("rows",)), ((7,), ("rows", "n"))]:
        expected = ", ".join(map(str, wanted))
        with pytest.raises(InputError) as caught:
            require_tensor("x", torch.zeros(shape), FLOAT, wanted)
        assert str(caught.value) == f"x has shape {list(shape)}; expected [{expected}]"


def test_fp8_alone_is_indexed_as_bytes() -> None:
    """Of the same memory; another pool stays what it is."""
    pool = torch.tensor([1.0, -2.0])
    assert indexable(pool) is pool
    small = pool.to(torch.float8_e4m3fn)
    assert indexable(small).tolist() == [0x38, 0xC0]
    assert indexable(small).data_ptr() == small.data_ptr()

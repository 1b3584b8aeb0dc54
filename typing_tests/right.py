"""No line of this file may be an error: the calls of wrong.py, made right."""

from typing import assert_type

import torch
from torch import Tensor

from ddtree import BlockSize, Budget, Depth, Horizon, NumNodes, PrefixLen, QLen, Row
from ddtree.decoding.drafter import Drafter
from ddtree.spec import (
    Acceptance,
    BitMask,
    DenseMask,
    DraftTree,
    FlatMask,
    PackedMask,
    VerifyBuffers,
    VerifyLayout,
    accept_greedy,
    build_tree,
    convert_mask,
    index,
    tree_mask,
)
from ddtree.spec.mask import request_lens

block_size, budget = BlockSize(8), Budget(16)
prefix_len, q_len, num_nodes = PrefixLen(5), QLen(17), NumNodes(13)
row, depth, horizon = Row(3), Depth(2), Horizon(7)


def eager_path(layout: VerifyLayout, prefix: PrefixLen) -> None:
    """Widths of the call itself."""
    assert_type(index.mask_len(prefix, q_len), int)
    assert_type(index.kv_len(prefix, index.q_len_of(budget)), int)
    assert_type(index.bit_words(layout.max_q_len), int)
    lens = request_lens(layout, 0)
    assert_type(lens, tuple[PrefixLen, QLen])
    index.mask_len(*lens)


def captured_path(drafter: Drafter) -> None:
    """Buffers for the largest budget."""
    buffers = VerifyBuffers(4, index.q_len_of(budget), 4096)
    assert_type(buffers.layout.max_q_len, QLen)
    assert_type(drafter.block_size, BlockSize)


def conversions(drafter: Drafter) -> None:
    """Each size from the one before it."""
    assert_type(index.q_len_of(budget), QLen)
    assert_type(index.horizon_of(drafter.block_size), Horizon)
    plain: int = q_len + num_nodes  # all are whole numbers where a whole number is asked for
    print(plain)


def rounds(tree: DraftTree, layout: VerifyLayout, log_probs: Tensor) -> None:
    """Sizes given to the steps of a round."""
    roots = torch.tensor([1])
    assert_type(build_tree(log_probs, roots, budget), DraftTree)
    assert_type(accept_greedy(tree, roots, layout, horizon), Acceptance)
    accept_greedy(tree, roots, layout, index.horizon_of(block_size))


def rows_and_depths(rows: Tensor, depths: Tensor) -> None:
    """Addresses by the row, positions by the depth; tensors of both are tensors."""
    assert_type(index.tree_col(prefix_len, row), int)
    assert_type(index.position(prefix_len, depth), int)
    assert_type(index.position(prefix_len, depths), Tensor)
    assert_type(index.mask_offset(0, row, 0, prefix_len, q_len), int)
    assert_type(index.mask_offset(0, rows, rows, prefix_len, q_len), Tensor)
    assert_type(index.bit_word(row), int)
    assert_type(index.bit_shift(rows), Tensor)
    assert_type(index.commit_entry(prefix_len, 1), int)


def forms(tree: DraftTree, layout: VerifyLayout, buffers: VerifyBuffers) -> None:
    """The form asked for is the form returned."""
    assert_type(tree_mask(tree, layout, "flat"), FlatMask)
    assert_type(tree_mask(tree, layout), BitMask)
    packed: PackedMask = tree_mask(tree, layout, "packed")
    dense: DenseMask = convert_mask(packed, layout, "dense")
    buffers.fill(tree, layout, convert_mask(dense, layout, "flat"))

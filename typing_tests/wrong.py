"""Every line with ``# E:`` must be an error, with that message from mypy; see README.md."""

import torch

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

block_size, budget = BlockSize(8), Budget(16)
prefix_len, q_len, num_nodes = PrefixLen(5), QLen(17), NumNodes(13)
row, depth, horizon = Row(3), Depth(2), Horizon(7)


def eager_path(prefix: PrefixLen) -> None:
    """The founding bug: widths that are not the call's."""
    index.mask_len(prefix, block_size)  # E: Argument 2 to "mask_len" has incompatible type "BlockSize"; expected "QLen"
    index.mask_len(prefix, budget)  # E: Argument 2 to "mask_len" has incompatible type "Budget"; expected "QLen"
    index.mask_len(prefix, num_nodes)  # E: Argument 2 to "mask_len" has incompatible type "NumNodes"; expected "QLen"
    index.mask_len(prefix, 8)  # E: Argument 2 to "mask_len" has incompatible type "int"; expected "QLen"
    index.kv_len(prefix, block_size)  # E: Argument 2 to "kv_len" has incompatible type "BlockSize"; expected "QLen"
    index.kv_len(q_len, q_len)  # E: Argument 1 to "kv_len" has incompatible type "QLen"; expected "PrefixLen"
    index.bit_words(budget)  # E: Argument 1 to "bit_words" has incompatible type "Budget"; expected "QLen"
    index.bit_words(block_size)  # E: Argument 1 to "bit_words" has incompatible type "BlockSize"; expected "QLen"


def captured_path(drafter: Drafter) -> None:
    """The founding bug again: buffers for a replayed graph."""
    VerifyBuffers(4, block_size, 4096)  # E: Argument 2 to "VerifyBuffers" has incompatible type "BlockSize"; expected "QLen"
    VerifyBuffers(4, drafter.block_size, 4096)  # E: Argument 2 to "VerifyBuffers" has incompatible type "BlockSize"; expected "QLen"
    VerifyBuffers(4, budget, 4096)  # E: Argument 2 to "VerifyBuffers" has incompatible type "Budget"; expected "QLen"
    VerifyBuffers(4, 17, 4096)  # E: Argument 2 to "VerifyBuffers" has incompatible type "int"; expected "QLen"


def conversions() -> None:
    """Each size comes from the one before it and from no other."""
    index.q_len_of(block_size)  # E: Argument 1 to "q_len_of" has incompatible type "BlockSize"; expected "Budget"
    index.q_len_of(horizon)  # E: Argument 1 to "q_len_of" has incompatible type "Horizon"; expected "Budget"
    index.horizon_of(budget)  # E: Argument 1 to "horizon_of" has incompatible type "Budget"; expected "BlockSize"
    wide: QLen = budget  # E: Incompatible types in assignment (expression has type "Budget", variable has type "QLen")
    deep: Horizon = block_size  # E: Incompatible types in assignment (expression has type "BlockSize", variable has type "Horizon")
    print(wide, deep)


def rounds(tree: DraftTree, layout: VerifyLayout, log_probs: torch.Tensor) -> None:
    """Sizes given to the steps of a round."""
    roots = torch.tensor([1])
    build_tree(log_probs, roots, block_size)  # E: Argument 3 to "build_tree" has incompatible type "BlockSize"; expected "Budget"
    build_tree(log_probs, roots, q_len)  # E: Argument 3 to "build_tree" has incompatible type "QLen"; expected "Budget"
    accept_greedy(tree, roots, layout, block_size)  # E: Argument 4 to "accept_greedy" has incompatible type "BlockSize"; expected "Horizon"
    accept_greedy(tree, roots, layout, budget)  # E: Argument 4 to "accept_greedy" has incompatible type "Budget"; expected "Horizon"


def rows_and_depths() -> None:
    """Addresses go by the row, positions and windows by the depth."""
    index.tree_col(prefix_len, depth)  # E: Argument 2 to "tree_col" has incompatible type "Depth"; expected "Row"
    index.position(prefix_len, row)  # E: No overload variant of "position" matches argument types "PrefixLen", "Row"
    index.mask_offset(0, depth, 0, prefix_len, q_len)  # E: No overload variant of "mask_offset" matches argument types "int", "Depth", "int", "PrefixLen", "QLen"
    index.mask_offset(0, row, 0, q_len, prefix_len)  # E: No overload variant of "mask_offset" matches argument types "int", "Row", "int", "QLen", "PrefixLen"
    index.bit_word(depth)  # E: No overload variant of "bit_word" matches argument type "Depth"
    index.bit_shift(depth)  # E: No overload variant of "bit_shift" matches argument type "Depth"
    index.commit_entry(q_len, 1)  # E: Argument 1 to "commit_entry" has incompatible type "QLen"; expected "PrefixLen"


def forms(tree: DraftTree, layout: VerifyLayout, buffers: VerifyBuffers) -> None:
    """A mask in one form is none in another."""
    flat: FlatMask = tree_mask(tree, layout, "packed")  # E: Incompatible types in assignment (expression has type "PackedMask", variable has type "FlatMask")
    bits: BitMask = tree_mask(tree, layout, "flat")  # E: Incompatible types in assignment (expression has type "FlatMask", variable has type "BitMask")
    dense: DenseMask = convert_mask(bits, layout, "flat")  # E: Incompatible types in assignment (expression has type "FlatMask", variable has type "DenseMask")
    packed: PackedMask = tree_mask(tree, layout)  # E: Incompatible types in assignment (expression has type "BitMask", variable has type "PackedMask")
    tree_mask(tree, layout, "bitmask")  # E: No overload variant of "tree_mask" matches argument types "DraftTree", "VerifyLayout", "str"
    buffers.fill(tree, layout, packed)  # E: Argument 3 to "fill" of "VerifyBuffers" has incompatible type "PackedMask"; expected "FlatMask"
    buffers.fill(layout, tree, flat)  # E: Argument 1 to "fill" of "VerifyBuffers" has incompatible type "VerifyLayout"; expected "DraftTree"  # E: Argument 2 to "fill" of "VerifyBuffers" has incompatible type "DraftTree"; expected "VerifyLayout"
    print(bits.allowed)  # E: "BitMask" has no attribute "allowed"
    print(dense)


def fields(layout: VerifyLayout, accepted: Acceptance) -> None:
    """Fields of the contracts."""
    index.q_len_of(layout.max_q_len)  # E: Argument 1 to "q_len_of" has incompatible type "QLen"; expected "Budget"
    print(accepted.num_nodes)  # E: "Acceptance" has no attribute "num_nodes"

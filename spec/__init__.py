"""The reference: a whole DDTree round in plain PyTorch, slow and meant to be read.

Read the steps in order: ``tree``, ``layout``, ``mask``, ``attention``, ``accept``, ``commit``, then
``round``, which runs them. ``contracts`` holds the data they hand on, ``index`` every address formula.
"""

from ddtree.spec.accept import accept_greedy, accept_sampled
from ddtree.spec.attention import verify_attention
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.commit import commit_kv
from ddtree.spec.contracts import (
    Acceptance,
    BitMask,
    BlockSize,
    Budget,
    Commit,
    DenseMask,
    Depth,
    DraftTree,
    FlatMask,
    Horizon,
    NumNodes,
    PackedMask,
    PagedKV,
    PrefixLen,
    QLen,
    Row,
    TreeMask,
    VerifyLayout,
)
from ddtree.spec.errors import InputError
from ddtree.spec.layout import plan_verify
from ddtree.spec.mask import convert_mask, tree_mask
from ddtree.spec.round import Round, Target, verify_round
from ddtree.spec.sampling import Sampling
from ddtree.spec.tree import build_tree

__all__ = [
    "Acceptance",
    "BitMask",
    "BlockSize",
    "Budget",
    "Commit",
    "DenseMask",
    "Depth",
    "DraftTree",
    "FlatMask",
    "Horizon",
    "InputError",
    "NumNodes",
    "PackedMask",
    "PagedKV",
    "PrefixLen",
    "QLen",
    "Round",
    "Row",
    "Sampling",
    "Target",
    "TreeMask",
    "VerifyBuffers",
    "VerifyLayout",
    "accept_greedy",
    "accept_sampled",
    "build_tree",
    "commit_kv",
    "convert_mask",
    "plan_verify",
    "tree_mask",
    "verify_attention",
    "verify_round",
]

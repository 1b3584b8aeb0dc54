"""The fast path: a round on the device in Triton, same names and results as ``ddtree.spec``."""

from ddtree.impl.accept import accept_greedy, accept_sampled
from ddtree.impl.attention import verify_attention
from ddtree.impl.buffers import VerifyBuffers
from ddtree.impl.check import CapturedCheck
from ddtree.impl.commit import commit_kv
from ddtree.impl.layout import plan_verify
from ddtree.impl.mask import convert_mask, tree_mask
from ddtree.impl.round import RoundGraph, verify_round
from ddtree.impl.tree import build_tree

__all__ = [
    "CapturedCheck",
    "RoundGraph",
    "VerifyBuffers",
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

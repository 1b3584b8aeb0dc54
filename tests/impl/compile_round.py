"""Compile every launch of a round for a GPU that is not there; print what it took as JSON.

A process of its own, since Triton's interpreter, once on, leaves nothing to compile.
Usage: ``python -m tests.impl.compile_round CAPABILITY BUDGET``.
"""

import json
import sys
from dataclasses import asdict

import torch

from ddtree import impl, spec
from ddtree.impl.accept import new_tokens
from ddtree.impl.commit import keep_accepted
from ddtree.impl.layers import add_norm, embed_norm, gate, split_heads, write_context
from ddtree.impl.layout import plan_blocks, row_inputs
from ddtree.impl.products import norm_gate, norm_heads, product_add
from ddtree.impl.record import pack_record
from ddtree.impl.sampling import row_uniforms
from ddtree.spec import Budget, DraftTree, Horizon, PagedKV, QLen
from tests.impl.launches import compiled_for

HORIZON = Horizon(15)
VOCAB = 151936


def trees(batch: int, q_len: int) -> DraftTree:
    """Trees of that size; nothing is run, so what is in them does not matter."""
    rows = torch.zeros(batch, q_len)
    return DraftTree(rows.long(), rows.int(), rows.int(), rows.double(), torch.ones(batch).int())


def launch_all(batch: int, budget: int, max_context: int, dtype: torch.dtype) -> None:
    """Call every launcher once."""
    q_len = budget + 1
    log_probs = torch.empty(batch, HORIZON, VOCAB, dtype=dtype)
    for from_logits in (False, True):
        roots = torch.zeros(batch, dtype=torch.int64)
        impl.build_tree(log_probs, roots, Budget(budget), from_logits=from_logits)
        impl.build_tree(log_probs, roots, Budget(0), from_logits=from_logits)
    tree = trees(batch, q_len)
    table = torch.zeros(batch, max_context, dtype=torch.int64)
    prefix_lens = torch.zeros(batch, dtype=torch.int32)
    impl.plan_verify(tree, prefix_lens, table, tree.num_nodes)
    layout = impl.plan_verify(tree, prefix_lens, table)
    row_inputs(tree, layout, 64)
    masks = [impl.tree_mask(tree, layout, form) for form in ("bits", "flat", "packed", "dense")]
    for mask in masks:
        for form in ("bits", "flat", "packed", "dense"):
            impl.convert_mask(mask, layout, form)
    buffers = impl.VerifyBuffers(batch, QLen(q_len), max_context)
    buffers.fill(tree, layout, impl.tree_mask(tree, layout, "flat"))
    logits = torch.empty(batch * q_len, 1024, dtype=dtype)
    uniforms = row_uniforms(spec.Sampling(seed=3), layout, batch)
    cuts = ((0.0, None, None), (0.7, None, None), (0.7, 20, 0.9), (0.7, None, 0.9))
    for temperature, top_k, top_p in cuts:
        acceptance = impl.accept_sampled(
            tree,
            logits,
            layout,
            HORIZON,
            uniforms,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
    new_tokens(tree, acceptance)
    for of_record in (None, logits):
        pack_record(tree, layout, acceptance, of_record)
    keep_accepted(acceptance.num_accepted, acceptance.bonus, roots)
    keep_accepted(acceptance.num_accepted, prefix_lens, prefix_lens.clone())
    plan_blocks(prefix_lens, prefix_lens, table, roots, torch.zeros(batch, HORIZON + 1).long())
    pools = tuple(torch.empty(64, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    for page_size in (1, 16):
        impl.commit_kv(PagedKV(pools, pools, table, page_size), layout, acceptance)
    launch_layers(batch * q_len, dtype)


def launch_layers(rows: int, dtype: torch.dtype) -> None:
    """What stands between a layer's products, with norms of heads and pools and without."""
    x, weight = torch.empty(rows, 576, dtype=dtype), torch.empty(576, dtype=dtype)
    for residual in (None, x):
        add_norm(x, residual, weight, 1e-6)
    features = torch.empty(rows, 5 * 576, dtype=dtype)
    add_norm(x, features[:, :576], weight, 1e-6, features[:, 576:1152])
    starts = torch.zeros(2, dtype=torch.int32)
    for factor in (1.0, 2.0):
        embed_norm(x, torch.zeros(1, rows).long(), starts, rows, weight, 1e-6, factor)
    for q_heads, head_dim in ((9, 64), (0, 128)):
        stacked = torch.empty(rows, (q_heads + 6) * head_dim, dtype=dtype)
        angles, norm = torch.empty(rows, head_dim, dtype=dtype), torch.empty(head_dim, dtype=dtype)
        pool = torch.empty(64, 3, head_dim, dtype=dtype)
        slots = torch.zeros(rows, dtype=torch.int64)
        split_heads(stacked, (angles, angles), slots, (q_heads, 3))
        split_heads(
            stacked, (angles, angles), slots, (q_heads, 3), (norm, norm), 1e-6, (pool, pool), slots
        )
        few, width = torch.empty(16, 576, dtype=dtype), (q_heads + 6) * head_dim
        weights = torch.empty(width, 576, dtype=dtype), torch.empty(width, dtype=dtype)
        for of_heads in (None, norm):
            norm_heads(
                few, weight, 1e-6, weights[0], None if of_heads is None else weights[1],
                (angles, angles), slots[:16], (q_heads, 3), (of_heads, of_heads), 1e-6,
            )  # fmt: skip
        context = torch.empty(5, rows, 6 * head_dim, dtype=dtype)
        pools = torch.empty(5, 2, 64, 3, head_dim, dtype=dtype)
        for norms in (None, torch.empty(5, head_dim, dtype=dtype)):
            write_context(context, (angles, angles), slots, norms, 1e-6, pools, slots)
    gate(torch.empty(rows, 3072, dtype=dtype))
    for wide in (torch.float32, dtype):  # the largest heads, in the widest dtype
        few, angles = torch.empty(64, 576, dtype=wide), torch.empty(64, 256, dtype=wide)
        norm_heads(
            few, few[0], 1e-6, torch.empty(768, 576, dtype=wide), None, (angles, angles),
            torch.zeros(64, dtype=torch.int64), (1, 1),
        )  # fmt: skip
    for count in (16, 64):
        few, gated = torch.empty(count, 576, dtype=dtype), torch.empty(count, 1536, dtype=dtype)
        norm_gate(few, weight, 1e-6, torch.empty(3072, 576, dtype=dtype))
        for bias in (None, weight):
            product_add(gated, torch.empty(576, 1536, dtype=dtype), bias, few)


def main() -> None:
    """Compile for the capability and the budget named on the command line."""
    capability, budget = map(int, sys.argv[1:])
    with compiled_for(capability) as found:
        launch_all(4, budget, 4096, torch.bfloat16)
    print(json.dumps([asdict(kernel) for kernel in found]))


if __name__ == "__main__":
    main()

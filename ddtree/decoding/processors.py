"""Logits processors in a tree: each node's logits are processed with the node's own path as context.

A processor is Transformers': called with ``input_ids`` [rows, length] and ``scores`` [rows, vocab], it
returns scores. Here the rows are the nodes of one request at one depth, whose contexts (prompt, text
and path) have one length. The target's distribution, which acceptance samples from, is then the
processed one, so decoding by trees stays lossless. A processor must be a function of each row alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.spec.contracts import DraftTree, VerifyLayout
from ddtree.spec.errors import require

Processor = Callable[[Any, Any], Any]
"""Takes and gives tensors; Transformers narrows the first to a ``LongTensor``."""


def process(
    processors: Sequence[Processor],
    token_ids: Int64[Tensor, "rows length"],
    logits: Float[Tensor, "rows vocab"],
) -> Float[Tensor, "rows vocab"]:
    """Apply the processors in turn, in float32 (or wider) as Transformers does.

    Args:
        processors: what to apply.
        token_ids: ``[rows, length]`` each row's context, prompt included.
        logits: ``[rows, vocab]``; not changed.

    Raises:
        InputError: a processor that returns another shape.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).clone()
    for processor in processors:
        scores = processor(token_ids, scores)
        require(
            scores.shape == logits.shape,
            f"the logits processor {type(processor).__name__} returned shape {list(scores.shape)}; "
            f"it was given {list(logits.shape)}",
        )
    return scores


def process_tree(
    processors: Sequence[Processor],
    contexts: Sequence[Sequence[int] | None],
    tree: DraftTree,
    layout: VerifyLayout,
    logits: Float[Tensor, "T vocab"],
) -> Float[Tensor, "T vocab"]:
    """Process the logits of every real node of a batch. Reads the trees back, so it waits for them.

    Args:
        processors: what to apply.
        contexts: the tokens of each request, its root last; None: the request is unused.
        tree: the trees.
        layout: the call's layout.
        logits: ``[T, vocab]`` of the target; not changed.

    Returns:
        The logits with those of the real nodes processed.
    """
    fields = torch.stack([tree.token_ids, tree.parents.long(), tree.depths.long()]).tolist()
    counts, starts = tree.num_nodes.tolist(), layout.qo_indptr.tolist()
    done = logits.to(torch.promote_types(logits.dtype, torch.float32)).clone()
    for b, context in enumerate(contexts):
        if context is None:
            continue
        tokens, parents, depths = (field[b][: counts[b]] for field in fields)
        paths: list[list[int]] = [[]]
        for node in range(1, counts[b]):
            paths.append([*paths[parents[node]], tokens[node]])
        for depth in range(max(depths) + 1):
            nodes = [node for node in range(counts[b]) if depths[node] == depth]
            ids = torch.tensor([[*context, *paths[node]] for node in nodes], device=logits.device)
            rows = torch.tensor(nodes, device=logits.device) + starts[b]
            done[rows] = process(processors, ids, done[rows])
    return done

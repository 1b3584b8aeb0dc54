"""Step 5 on the device: walk down the tree along the target's choices, one program a request."""

import torch
import triton
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ddtree.impl.accept_kernels import new_tokens_kernel, walk_kernel
from ddtree.impl.arguments import require_layout, require_requests, require_rows, require_tree
from ddtree.impl.op import op
from ddtree.impl.sampling import sample_rows
from ddtree.spec.contracts import Acceptance, DraftTree, Horizon, VerifyLayout
from ddtree.spec.dtypes import FLOAT, INDEX, require_kind, require_tensor
from ddtree.spec.errors import require, require_int
from ddtree.spec.public import public


@public
def accept_greedy(
    tree: DraftTree, target_ids: Int64[Tensor, " T"], layout: VerifyLayout, horizon: Horizon
) -> Acceptance:
    """Accept the path along which the target's choice at each node is a child of it.

    Args:
        tree: the trees, ``B`` requests.
        target_ids: ``[T]`` the target's choice at each query row (greedy: its argmax).
        layout: the call's layout; rows of request b start at ``qo_indptr[b]``. A request without
            rows accepts nothing: no node, bonus 0.
        horizon: deepest drafted position, which gives the width of ``nodes``; no path goes deeper.

    Returns:
        The accepted paths ``[B, horizon + 1]`` and the bonus tokens.

    Raises:
        InputError: dtypes or shapes that do not agree, such as fewer choices than the layout has
            rows, or a horizon that is no whole number or negative.
    """
    require_tree(tree)
    require_layout(layout)
    require_tensor("target_ids", target_ids, INDEX, ("rows",))
    require_int("horizon", horizon, 0, "a tree of the root alone")
    batch = tree.token_ids.shape[0]
    require_requests(layout, "tree", batch)
    require_rows("target_ids", target_ids, layout)
    width = horizon + 1
    nodes = tree.parents.new_empty((batch, width))
    num_accepted = tree.parents.new_empty(batch)
    bonus = tree.token_ids.new_empty(batch)
    if batch:
        _walk(
            tree.parents, tree.token_ids, tree.num_nodes, target_ids, layout.qo_indptr,
            nodes, num_accepted, bonus,
        )  # fmt: skip
    return Acceptance(nodes, num_accepted, bonus)


@op("accept_greedy", writes=("nodes", "num_accepted", "bonus"))
def _walk(
    parents: Tensor,
    token_ids: Tensor,
    num_nodes: Tensor,
    target_ids: Tensor,
    qo_indptr: Tensor,
    nodes: Tensor,
    num_accepted: Tensor,
    bonus: Tensor,
) -> None:
    """Walk each tree along the target's choices."""
    (batch, rows), width = parents.shape, nodes.shape[1]
    walk_kernel[(batch,)](
        parents.contiguous(), token_ids.contiguous(), num_nodes.contiguous(),
        target_ids.contiguous(), qo_indptr,
        nodes, num_accepted, bonus, rows, width,
        ROWS=triton.next_power_of_2(rows), WIDTH=triton.next_power_of_2(width),
        num_warps=1 if rows <= 128 else 4,
    )  # fmt: skip


@public
def accept_sampled(
    tree: DraftTree,
    target_logits: Float[Tensor, "T vocab"],
    layout: VerifyLayout,
    horizon: Horizon,
    uniforms: Float64[Tensor, " T"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Acceptance:
    """Accept the path of tokens sampled from the target itself, one sample at each node.

    Args:
        tree: the trees, ``B`` requests.
        target_logits: ``[T, vocab]`` logits at each query row, in float32, float16 or bfloat16.
        layout: the call's layout.
        horizon: deepest drafted position.
        uniforms: ``[T]`` numbers in [0, 1), independent along every path (``row_uniforms``).
        temperature: divides the logits; 0: the argmax, ties to the smaller token id.
        top_k: keep the k likeliest tokens; None: all.
        top_p: keep the fewest likeliest tokens whose probabilities reach top_p; None: all.

    Returns:
        The accepted paths ``[B, horizon + 1]`` and the bonus tokens; equal to the reference's up to
        what ``sample_rows`` says of rounding.

    Raises:
        InputError: as ``accept_greedy``; sampling parameters that define no distribution.
    """
    require_kind("layout", layout, VerifyLayout)
    require_tensor("target_logits", target_logits, FLOAT, ("rows", "vocab"))
    require_tensor("uniforms", uniforms, (torch.float64,), ("rows",))
    require_rows("target_logits", target_logits, layout)
    require(
        uniforms.shape == target_logits.shape[:1],
        "uniforms has shape {}; target_logits has {} rows",
        list(uniforms.shape),
        target_logits.shape[0],
    )
    ids = sample_rows(target_logits, uniforms, temperature, top_k, top_p)
    return accept_greedy(tree, ids, layout, horizon)


def new_tokens(tree: DraftTree, acceptance: Acceptance) -> Int64[Tensor, "B H+1"]:
    """Return each request's new tokens: the accepted ones after the root, then the bonus."""
    tokens = torch.empty_like(acceptance.nodes, dtype=torch.int64)
    if tokens.shape[0]:
        _tokens(tree.token_ids, acceptance.nodes, acceptance.num_accepted, acceptance.bonus, tokens)
    return tokens


@op("new_tokens", writes=("tokens",))
def _tokens(
    token_ids: Tensor, nodes: Tensor, num_accepted: Tensor, bonus: Tensor, tokens: Tensor
) -> None:
    """Gather the tokens of the accepted nodes and the bonus."""
    batch, width = nodes.shape
    new_tokens_kernel[(batch,)](
        token_ids.contiguous(), nodes, num_accepted, bonus, tokens,
        token_ids.shape[1], width, WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip

"""Step 5: walk down the tree along the target's choices.

The target has a choice at every node. From the root, follow the child that holds the choice; where no
child does, the choice is the bonus token (``follow_verified_tree`` in the official code).
"""

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ddtree.spec.contracts import Acceptance, DraftTree, Horizon, VerifyLayout
from ddtree.spec.dtypes import FLOAT, INDEX, require_kind, require_tensor
from ddtree.spec.errors import require, require_int
from ddtree.spec.mask import request_lens, require_requests
from ddtree.spec.public import public
from ddtree.spec.sampling import sample, target_distribution


@public
def accept_greedy(
    tree: DraftTree, target_ids: Int64[Tensor, " T"], layout: VerifyLayout, horizon: Horizon
) -> Acceptance:
    """Accept the path along which the target's choice at each node is a child of it.

    Args:
        tree: the trees, ``B`` requests.
        target_ids: ``[T]`` the target's choice at each query row (greedy: its argmax).
        layout: the call's layout; rows of request b start at ``qo_indptr[b]``.
        horizon: deepest drafted position, which gives the width of ``nodes``.

    Returns:
        The accepted paths ``[B, horizon + 1]`` and the bonus tokens.

    Raises:
        InputError: a wrong dtype, a layout with other requests or more query rows than given, a
            request without its real rows, or a path deeper than ``horizon``.
    """
    require_kind("tree", tree, DraftTree)
    require_kind("layout", layout, VerifyLayout)
    require_tensor("target_ids", target_ids, INDEX, ("rows",))
    require_int("horizon", horizon, 0, "a tree of the root alone")
    batch = tree.token_ids.shape[0]
    require_requests(layout, "tree", batch)
    rows = int(layout.qo_indptr[batch])
    require(
        target_ids.numel() >= rows,
        f"target_ids has shape {list(target_ids.shape)}; the layout has {rows} query rows",
    )
    nodes = torch.full((batch, horizon + 1), -1, dtype=torch.int32, device="cpu")
    num_accepted = torch.zeros(batch, dtype=torch.int32, device="cpu")
    bonus = torch.zeros(batch, dtype=torch.int64, device="cpu")

    for b in range(batch):
        _, q_len = request_lens(layout, b)
        num_nodes, start = int(tree.num_nodes[b]), int(layout.qo_indptr[b])
        require(1 <= num_nodes <= q_len, f"request {b} has {num_nodes} nodes in {q_len} query rows")
        path, choice = _walk(
            tree.parents[b, :num_nodes].tolist(),
            tree.token_ids[b, :num_nodes].tolist(),
            target_ids[start : start + num_nodes].tolist(),
        )
        require(
            len(path) <= horizon + 1,
            f"request {b} accepts a path of depth {len(path) - 1}; horizon is {horizon}",
        )
        nodes[b, : len(path)] = torch.tensor(path, dtype=torch.int32, device="cpu")
        num_accepted[b] = len(path)
        bonus[b] = choice

    device = tree.token_ids.device
    return Acceptance(nodes.to(device), num_accepted.to(device), bonus.to(device))


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

    Lossless: each emitted token is a sample of the target's distribution after the tokens before
    it, whatever was drafted. The draft decides only how many samples one pass yields.

    Args:
        tree: the trees, ``B`` requests.
        target_logits: ``[T, vocab]`` logits at each query row.
        layout: the call's layout.
        horizon: deepest drafted position.
        uniforms: ``[T]`` numbers in [0, 1), independent along every path. Rows of equal depth may
            share one, since only one of them is ever emitted (``sampling.row_uniforms``).
        temperature: divides the logits; 0: the argmax, ties to the smaller token id.
        top_k: keep the k likeliest tokens; None: all.
        top_p: keep the fewest likeliest tokens whose probabilities reach top_p; None: all.

    Returns:
        The accepted paths ``[B, horizon + 1]`` and the bonus tokens.

    Raises:
        InputError: as ``accept_greedy``; uniforms outside [0, 1); sampling parameters or logits
            that define no distribution.
    """
    require_kind("layout", layout, VerifyLayout)
    require_tensor("target_logits", target_logits, FLOAT, ("rows", "vocab"))
    require_tensor("uniforms", uniforms, (torch.float64,), ("rows",))
    rows = int(layout.qo_indptr[-1])
    require(
        target_logits.shape[0] >= rows,
        f"target_logits has shape {list(target_logits.shape)}; the layout has {rows} query rows",
    )
    require(
        uniforms.numel() >= rows,
        f"uniforms has shape {list(uniforms.shape)}; the layout has {rows} query rows",
    )
    probs = target_distribution(target_logits[:rows], temperature, top_k, top_p)
    return accept_greedy(tree, sample(probs, uniforms[:rows]), layout, horizon)


def _walk(parents: list[int], tokens: list[int], choices: list[int]) -> tuple[list[int], int]:
    """Follow the choices from the root; return the path and the choice at its end."""
    child_of = {(parents[node], tokens[node]): node for node in range(len(parents) - 1, 0, -1)}
    path = [0]
    while (child := child_of.get((path[-1], choices[path[-1]]))) is not None:
        path.append(child)
    return path, choices[path[-1]]

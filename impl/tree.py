"""Step 1 on the device: build the draft trees, best first, in three launches.

See ``README.md`` here for the derivation and the cost of each launch.
"""

import torch
import triton
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.impl.op import op
from ddtree.impl.rank import MAX_KEPT, ranked
from ddtree.impl.tree_kernels import best_first_kernel
from ddtree.spec.contracts import Budget, DraftTree
from ddtree.spec.dtypes import FLOAT, INDEX, require_tensor
from ddtree.spec.errors import require, require_bool, require_int
from ddtree.spec.index import q_len_of
from ddtree.spec.public import public

MAX_BUDGET = MAX_KEPT
MAX_HORIZON = 35
"""Longest paths whose codes fit 57 bits at the largest budget (``tree_kernels.extend_code``)."""
LISTED_FROM = 32
"""Least budget at which paths are listed and sorted instead of popped one by one."""
FEW_BINS, MANY_BINS = 64, 128
"""Bins of cost in which paths are counted, for budgets up to 128 and above."""


@public
def build_tree(
    draft_log_probs: Float[Tensor, "B horizon vocab"],
    root_token_ids: Int64[Tensor, " B"],
    budget: Budget,
    topk: int | None = None,
    *,
    from_logits: bool = False,
) -> DraftTree:
    """Build one best-first draft tree for each request: the reference's trees, bit for bit.

    Args:
        draft_log_probs: ``[B, horizon, vocab]`` natural log-probs in float32, float16 or bfloat16;
            what is -inf, NaN or above 0 never becomes a node (the reference refuses the last two,
            which takes a look at the data).
        root_token_ids: ``[B]`` bonus tokens of the round before.
        budget: most non-root nodes; the tree has ``Q = budget + 1`` rows.
        topk: candidates kept at each depth; 1 makes a chain. None: ``min(budget, vocab)``, which
            loses nothing.
        from_logits: ``draft_log_probs`` holds logits: the reference's log-softmax is taken while
            they are read, and no copy of them is made. NaN and +inf never become a node, and no
            other token's log-prob depends on them.

    Returns:
        The trees, padded to Q rows; with too few candidates, fewer nodes.

    Raises:
        InputError: a budget or topk that is no whole number or too small, dtypes or shapes that do
            not agree, a budget or a horizon above ``MAX_BUDGET`` and ``MAX_HORIZON``, or logits over
            a vocabulary above ``softmax.MAX_VOCAB``.
    """
    require_bool("from_logits", from_logits)
    require_int("budget", budget, 0, "a tree of the root alone")
    if topk is not None:
        require_int("topk", topk, 1, "a chain")
    require_tensor("draft_log_probs", draft_log_probs, FLOAT, ("batch", "horizon", "vocab"))
    batch, horizon, vocab = draft_log_probs.shape
    require(vocab >= 1, "draft_log_probs has an empty vocabulary (last dimension 0)")
    require_tensor("root_token_ids", root_token_ids, INDEX, (batch,))
    require(
        budget <= MAX_BUDGET and horizon <= MAX_HORIZON,
        "budget is {} and horizon {}; the kernels are made for at most {} and {}",
        budget,
        horizon,
        MAX_BUDGET,
        MAX_HORIZON,
    )
    kept = min(budget if topk is None else topk, budget, vocab)

    q_len = q_len_of(budget)

    def new(dtype: torch.dtype) -> Tensor:
        return draft_log_probs.new_empty((batch, q_len), dtype=dtype)

    tree = DraftTree(
        new(torch.int64),
        new(torch.int32),
        new(torch.int32),
        new(torch.float64),
        draft_log_probs.new_empty(batch, dtype=torch.int32),
    )
    if batch:
        _build(
            draft_log_probs, root_token_ids, kept, from_logits,
            tree.token_ids, tree.parents, tree.depths, tree.scores, tree.num_nodes,
        )  # fmt: skip
    return tree


@op("build_tree", writes=("token_ids", "parents", "depths", "scores", "num_nodes"))
def _build(
    draft_log_probs: Tensor,
    root_token_ids: Tensor,
    kept: int,
    from_logits: bool,
    token_ids: Tensor,
    parents: Tensor,
    depths: Tensor,
    scores: Tensor,
    num_nodes: Tensor,
) -> None:
    """Fill the trees: rank each depth's candidates ``[B, horizon, kept]``, then find the best paths."""
    log_probs, ids = ranked(draft_log_probs, kept, softmax=from_logits)
    batch, q_len = token_ids.shape
    horizon = ids.shape[1]
    budget = q_len - 1
    paths = triton.next_power_of_2(max(q_len + budget // 2, 2))  # a sort compares two at least
    bins = FEW_BINS if budget <= 128 else MANY_BINS
    width = max(paths, bins)
    is_listed = budget >= LISTED_FROM and horizon > 0
    padded_kept = triton.next_power_of_2(max(kept, 1))
    best_first_kernel[(batch,)](
        root_token_ids.contiguous(), log_probs, ids, token_ids, parents, depths, scores, num_nodes,
        log_probs.new_empty((batch, paths), dtype=torch.float64),
        log_probs.new_empty((batch, 2, paths), dtype=torch.int64),
        log_probs.new_empty((batch, 6, width), dtype=torch.int32),
        budget, horizon, kept,
        LISTED=is_listed,
        SLOTS=triton.next_power_of_2(max(budget, 1)),
        KEPT=padded_kept, KEPT_BITS=padded_kept.bit_length(),
        PATHS=paths, PATH_BITS=paths.bit_length() - 1, WIDTH=width,
        DEPTHS=triton.next_power_of_2(max(horizon, 1)), BINS=bins,
        num_warps=4 if is_listed else 1,
    )  # fmt: skip

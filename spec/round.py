"""A whole round: draft tree, layout, mask, one target pass, acceptance, commit."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ddtree.spec.accept import accept_greedy, accept_sampled
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import (
    Acceptance,
    Budget,
    Commit,
    DraftTree,
    FlatMask,
    Horizon,
    TreeMask,
    VerifyLayout,
)
from ddtree.spec.dtypes import require_kind
from ddtree.spec.errors import require_bool
from ddtree.spec.layout import plan_verify
from ddtree.spec.mask import tree_mask
from ddtree.spec.public import public
from ddtree.spec.sampling import Sampling, first_argmax, row_uniforms
from ddtree.spec.tree import build_tree


@runtime_checkable
class Target(Protocol):
    """The model that verifies: it owns the KV and runs one forward pass over the trees."""

    @property
    def slot_table(self) -> Int64[Tensor, "B max_context"]:
        """Pool slot of each KV entry of each request."""
        ...

    def forward(
        self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask
    ) -> Float[Tensor, "T vocab"]:
        """Run the query rows, write their KV to ``layout.out_cache_loc``, return their logits."""
        ...

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """Keep the accepted nodes' KV (``commit_kv``)."""
        ...


@dataclass(frozen=True)
class Round:
    """Everything that a round made."""

    tree: DraftTree
    layout: VerifyLayout
    mask: TreeMask
    acceptance: Acceptance
    commit: Commit
    token_ids: Int64[Tensor, "B H+1"]
    """New tokens: the accepted ones after the root, then the bonus; -1 after the end."""


def require_options(ragged: object, sampling: object, buffers: object) -> None:
    """Refuse options of a round that are of another kind."""
    require_bool("ragged", ragged)
    if sampling is not None:
        require_kind("sampling", sampling, Sampling)
    if buffers is not None:
        require_kind("buffers", buffers, VerifyBuffers)


@public
def verify_round(
    draft_log_probs: Float[Tensor, "B horizon vocab"],
    root_token_ids: Int64[Tensor, " B"],
    prefix_lens: Int[Tensor, " B"],
    target: Target,
    budget: Budget,
    topk: int | None = None,
    *,
    from_logits: bool = False,
    ragged: bool = False,
    sampling: Sampling | None = None,
    buffers: VerifyBuffers | None = None,
) -> Round:
    """Run one round of draft-tree decoding for a batch.

    Args:
        draft_log_probs: ``[B, horizon, vocab]`` of the drafter.
        root_token_ids: ``[B]`` bonus tokens of the round before.
        prefix_lens: ``[B]`` committed KV entries.
        target: the verifying model.
        budget: most non-root nodes of a tree.
        topk: candidates kept at each depth.
        from_logits: ``draft_log_probs`` holds logits.
        ragged: give each request its ``num_nodes`` rows instead of ``budget + 1`` for all.
        sampling: how the target chooses; None or temperature 0: greedily.
        buffers: fixed buffers to run through, as a captured graph does; the target, the acceptance
            and the commit then read the buffers and nothing else.

    Returns:
        The round's tree, layout, mask, acceptance, commit and new tokens.

    Raises:
        InputError: as the steps raise it.
    """
    require_kind("target", target, Target)
    require_options(ragged, sampling, buffers)
    tree = build_tree(draft_log_probs, root_token_ids, budget, topk, from_logits=from_logits)
    layout = plan_verify(tree, prefix_lens, target.slot_table, tree.num_nodes if ragged else None)
    mask = tree_mask(tree, layout, "flat")
    if buffers is not None:
        buffers.fill(tree, layout, mask)
        layout, mask = buffers.layout, buffers.mask

    logits = target.forward(tree, layout, mask)

    horizon = Horizon(draft_log_probs.shape[1])
    acceptance = _accept(tree, logits, layout, horizon, sampling)
    commit = target.commit(layout, acceptance)
    return Round(tree, layout, mask, acceptance, commit, new_tokens(tree, acceptance))


def _accept(
    tree: DraftTree,
    logits: Tensor,
    layout: VerifyLayout,
    horizon: Horizon,
    sampling: Sampling | None,
) -> Acceptance:
    """Accept greedily or by sampling."""
    logits = logits[: int(layout.qo_indptr[-1])]  # fixed buffers run more rows than the call has
    if sampling is None or sampling.temperature == 0:
        return accept_greedy(tree, first_argmax(logits), layout, horizon)
    uniforms = row_uniforms(sampling, layout, tree.token_ids.shape[0])
    return accept_sampled(
        tree,
        logits,
        layout,
        horizon,
        uniforms.to(logits.device),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )


def new_tokens(tree: DraftTree, acceptance: Acceptance) -> Int64[Tensor, "B H+1"]:
    """Return each request's new tokens: the accepted ones after the root, then the bonus."""
    tokens = torch.full(acceptance.nodes.shape, -1, dtype=torch.int64, device="cpu")
    for b, count in enumerate(acceptance.num_accepted.tolist()):
        tokens[b, : count - 1] = tree.token_ids[b, acceptance.nodes[b, 1:count].long()]
        tokens[b, count - 1] = acceptance.bonus[b]
    return tokens.to(tree.token_ids.device)

"""A whole round on the device, and the same round captured once in a CUDA graph."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast, runtime_checkable
from weakref import finalize

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ddtree.impl.accept import accept_greedy, accept_sampled, new_tokens
from ddtree.impl.check import CapturedCheck, keeping
from ddtree.impl.layout import plan_verify
from ddtree.impl.mask import tree_mask
from ddtree.impl.sampling import first_argmax, row_uniforms
from ddtree.impl.tree import build_tree
from ddtree.invariants.debug import poll
from ddtree.invariants.streams import beside, capturing, relaxed
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import (
    Acceptance,
    Budget,
    Commit,
    DraftTree,
    Horizon,
    TreeMask,
    VerifyLayout,
)
from ddtree.spec.dtypes import require_kind
from ddtree.spec.errors import require
from ddtree.spec.mask import Form
from ddtree.spec.public import public
from ddtree.spec.round import Round, require_options
from ddtree.spec.sampling import Sampling

T = TypeVar("T")


@runtime_checkable
class Target(Protocol):
    """The model that verifies, as in the reference; it may ask for the mask form that it reads.

    A target without ``mask_form`` gets the flat form. One that runs ``verify_attention`` here asks
    for ``bits``, and no mask of the prefix is ever made.
    """

    @property
    def slot_table(self) -> Int64[Tensor, "B max_context"]:
        """Pool slot of each KV entry of each request."""
        ...

    def forward(
        self, tree: DraftTree, layout: VerifyLayout, mask: TreeMask
    ) -> Float[Tensor, "T vocab"]:
        """Run the query rows, write their KV to ``layout.out_cache_loc``, return their logits."""
        ...

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """Keep the accepted nodes' KV (``commit_kv``)."""
        ...


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
    """Run one round of draft-tree decoding for a batch, without waiting for the device once.

    Args:
        draft_log_probs: ``[B, horizon, vocab]`` of the drafter.
        root_token_ids: ``[B]`` bonus tokens of the round before.
        prefix_lens: ``[B]`` committed KV entries; negative: an unused request.
        target: the verifying model.
        budget: most non-root nodes of a tree.
        topk: candidates kept at each depth.
        from_logits: ``draft_log_probs`` holds logits.
        ragged: give each request its ``num_nodes`` rows instead of ``budget + 1`` for all.
        sampling: how the target chooses; None or temperature 0: greedily.
        buffers: fixed buffers to run through; the target, the acceptance and the commit then read
            the buffers, flat mask included, and nothing else.

    Returns:
        The round's tree, layout, mask, acceptance, commit and new tokens.

    Raises:
        InputError: as the steps raise it.
    """
    # by name first: Dynamo cannot ask whether an object follows a protocol
    if not (hasattr(target, "forward") and hasattr(target, "commit")):
        require_kind("target", target, Target)
    require_options(ragged, sampling, buffers)
    tree = build_tree(draft_log_probs, root_token_ids, budget, topk, from_logits=from_logits)
    layout = plan_verify(tree, prefix_lens, target.slot_table, tree.num_nodes if ragged else None)
    mask: TreeMask
    if buffers is not None:
        buffers.fill(tree, layout, tree_mask(tree, layout, "flat"))
        layout, mask = buffers.layout, buffers.mask
    else:
        form: Form = getattr(target, "mask_form", "flat")
        mask = tree_mask(tree, layout, form)

    logits = target.forward(tree, layout, mask)

    horizon = cast("Horizon", draft_log_probs.shape[1])  # Dynamo cannot call a NewType
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
    if sampling is None or sampling.temperature == 0:
        return accept_greedy(tree, first_argmax(logits), layout, horizon)
    return accept_sampled(
        tree,
        logits,
        layout,
        horizon,
        row_uniforms(sampling, layout, tree.token_ids.shape[0]),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )


class Captured(Generic[T]):
    """A call in a CUDA graph, with what debug mode, if it is on now, puts into it."""

    def __init__(self, run: Callable[[], T], device: torch.device) -> None:
        """Run the call once, to warm up, and capture it. It reads and writes memory that never moves."""
        with beside(device):
            run()
        self._device, self._replayed = device, torch.cuda.Event()
        self.checks: list[CapturedCheck] = []
        """Debug mode's."""
        with keeping(self.checks), capturing() as self.graph:
            self.result = run()
        """What every replay overwrites."""
        if self.checks:
            finalize(self, _outlive, self.checks, self._replayed).atexit = False

    def replay(self) -> T:
        """Run it again.

        Raises:
            InvariantViolation: in debug mode, what an earlier replay broke.
        """
        poll()
        self.graph.replay()
        if self.checks:
            self._replayed.record(torch.cuda.current_stream(self._device))
        return self.result


def _outlive(_: list[CapturedCheck], replayed: torch.cuda.Event) -> None:
    """Keep a graph's checks until its last replay is over.

    The allocator knows only of the stream that they were made on. So what a replay still writes into would be
    the next check's at once.
    """
    with relaxed():
        replayed.synchronize()


class RoundGraph:
    """One round in a CUDA graph: captured once for the largest batch, replayed for any smaller one.

    The draft, the roots and the prefix lengths are copied into memory that never moves, and requests
    past the batch get prefix length -1, so they have no rows and nothing of them is committed.
    """

    def __init__(
        self,
        target: Target,
        max_batch: int,
        horizon: Horizon,
        vocab: int,
        budget: Budget,
        topk: int | None = None,
        *,
        from_logits: bool = False,
        ragged: bool = False,
        sampling: Sampling | None = None,
        buffers: VerifyBuffers | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Warm up and capture.

        Args:
            target: the verifying model, whose ``slot_table`` has ``max_batch`` rows and whose
                ``forward`` can be captured.
            max_batch: most requests of a replay.
            horizon: deepest drafted position.
            vocab: size of the vocabulary.
            budget: most non-root nodes of a tree.
            topk: candidates kept at each depth.
            from_logits: the draft comes as logits.
            ragged: give each request its ``num_nodes`` rows.
            sampling: how the target chooses.
            buffers: fixed buffers to run through.
            dtype: of the draft.
        """
        device = target.slot_table.device
        require(
            target.slot_table.shape[0] == max_batch,
            f"the target's slot_table has {target.slot_table.shape[0]} requests; max_batch is {max_batch}",
        )
        self.draft_log_probs = torch.zeros((max_batch, horizon, vocab), dtype=dtype, device=device)
        self.root_token_ids = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.prefix_lens = torch.full((max_batch,), -1, dtype=torch.int32, device=device)

        def run() -> Round:
            return verify_round(
                self.draft_log_probs, self.root_token_ids, self.prefix_lens, target, budget, topk,
                from_logits=from_logits, ragged=ragged, sampling=sampling, buffers=buffers,
            )  # fmt: skip

        self._captured = Captured(run, device)  # all requests unused: nothing is committed
        self.graph, self.checks = self._captured.graph, self._captured.checks
        self.round = self._captured.result
        """What every replay overwrites, with ``max_batch`` requests."""

    def replay(
        self,
        draft_log_probs: Float[Tensor, "B horizon vocab"],
        root_token_ids: Int64[Tensor, " B"],
        prefix_lens: Int[Tensor, " B"],
    ) -> Round:
        """Run one round for ``B <= max_batch`` requests, those of the slot table's first B rows.

        Returns:
            ``self.round``: its first B requests are this call's, and it lasts until the next.

        Raises:
            InputError: a batch larger than the captured one, or a draft or prefix lengths of another
                batch, horizon or vocabulary.
            InvariantViolation: in debug mode, what an earlier replay broke.
        """
        batch, largest = root_token_ids.shape[0], self.root_token_ids.shape[0]
        require(batch <= largest, f"batch is {batch}; the graph was captured for {largest}")
        for name, given, held in (  # copies would repeat what has one request
            ("draft_log_probs", draft_log_probs, self.draft_log_probs),
            ("prefix_lens", prefix_lens, self.prefix_lens),
        ):
            wanted = (batch, *held.shape[1:])
            require(
                given.shape == wanted,
                "{} has shape {}; expected {}",
                name,
                list(given.shape),
                list(wanted),
            )
        self.draft_log_probs[:batch].copy_(draft_log_probs)
        self.root_token_ids[:batch].copy_(root_token_ids)
        self.prefix_lens.fill_(-1)
        self.prefix_lens[:batch].copy_(prefix_lens)
        return self._captured.replay()

"""Rounds whose state stays on the device: on a GPU one CUDA graph, replayed round after round.

Roots, lengths and seeds lie in memory that never moves, and each round leaves there what the next one
needs: the drafter's context, the target's KV, the new root. So a round can be launched before the host has
read the one before. The host reads one round behind: a record that an asynchronous copy brings to pinned
memory. What a request no longer wants (tokens past a stop, a round launched after its last) is dropped
there.

Two things keep a round that nobody reads harmless. A request whose prefix has reached its ``limit``, which
it does exactly when its last token is there, has no rows any more. And what the host does between rounds
(free a place, read a prompt into it) is queued behind the rounds that were launched before.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from ddtree.decoding.batch import BatchTarget
from ddtree.decoding.dflash import DFlashDrafter
from ddtree.decoding.dflash_paged import Drafted, PagedDFlash
from ddtree.decoding.drafter import Drafter
from ddtree.decoding.paged import PagedTarget
from ddtree.decoding.rounds import (
    Held,
    HostDrafters,
    News,
    Read,
    Request,
    Watched,
    request_of,
)
from ddtree.impl import verify_round
from ddtree.impl.commit import keep_accepted
from ddtree.impl.record import pack_record, record_fields
from ddtree.impl.round import Captured
from ddtree.invariants.streams import own_stream
from ddtree.spec.contracts import Acceptance, Budget, Commit, DraftTree, VerifyLayout
from ddtree.spec.errors import of_kind
from ddtree.spec.sampling import Sampling

RECORDS = 2
"""Records in pinned memory: of the round that is read and of the one that runs."""


class DeviceRounds:
    """Rounds on a paged target, one ahead; one at a time where the drafter drafts on the host."""

    def __init__(
        self,
        target: PagedTarget,
        drafter: Drafter,
        *,
        budget: int,
        topk: int | None,
        sampling: Sampling | None,
        ragged: bool,
    ) -> None:
        """Allocate, and capture where the target is on a CUDA device. What the target holds is not touched.

        Raises:
            InputError: as the steps of a round raise it.
        """
        batch, device = target.max_batch, target.device
        self._target = target
        self._budget, self._topk, self._ragged = Budget(budget), topk, ragged
        self.roots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.limits = torch.zeros(batch, dtype=torch.int32, device=device)
        """Prefix length at which a request has all its tokens."""
        self.seeds = torch.zeros(batch, dtype=torch.int64, device=device)
        is_greedy = sampling is None or sampling.temperature == 0
        self._sampling = (
            None if is_greedy or sampling is None else replace(sampling, seed=self.seeds)
        )

        self.resident: PagedDFlash | None = None
        """The drafter where it drafts on the device."""
        self._host: HostDrafters | None = None
        if isinstance(drafter, DFlashDrafter) and _is_resident(drafter):
            self.resident = PagedDFlash(drafter, target)
        else:
            shape = (batch, drafter.block_size - 1, target.vocab_size)
            self._drafts = torch.zeros(shape, device=device)
            if drafter.block_size > 1:
                self._host = HostDrafters(drafter, target)
        self.ahead = int(self._host is None)

        self._side = own_stream(device, "record") if device.type == "cuda" else None
        """For what a round waits for only in its end: the drafter's context, the next roots, the record."""
        self._captured: Captured[_Record] | None = None
        self._records: list[Tensor] = []
        if device.type == "cuda":
            self._captured = Captured(self.step, device)
            packed = self._captured.result.packed
            self._records = [
                torch.empty_like(packed, device="cpu").pin_memory() for _ in range(RECORDS)
            ]
        self._launched = 0
        self._read_until = 0.0

    def begin(self, place: int, held: Held) -> None:
        """Write the request's first root, its limit and its seed to the device."""
        # filled: an assignment copies the number from the host, and waits for the round that was launched
        self.roots[place].fill_(held.tokens[-1])
        self.limits[place].fill_(held.prefix_len + held.room)
        if held.sampling is not None:
            seed = held.sampling.seeds(1)[0]
            self.seeds[place].fill_(seed - 2**64 if seed >= 2**63 else seed)
        if self.resident is not None:
            self.resident.begin(place, held.prefix_len)
        if self._host is not None:
            self._host.begin(place, held)
        self._read_until = time.perf_counter()

    def launch(self, held: Mapping[int, Held]) -> Read:
        """Queue a round behind the one before."""
        begin = time.perf_counter()
        if self._host is not None:
            places = range(self._target.max_batch)
            self._drafts.copy_(
                self._host.draft([(b, held.get(b)) for b in places]), non_blocking=True
            )
        drafted = time.perf_counter()
        if self._captured is None:
            record = self.step()
            return partial(self._read, sorted(held), record, record.packed, None, begin, drafted)
        record = self._captured.replay()
        into = self._records[self._launched % RECORDS]
        self._launched += 1
        into.copy_(record.packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return partial(self._read, sorted(held), record, into, done, begin, drafted)

    @torch.no_grad()
    def step(self) -> "_Record":
        """One round of all places. Nothing in it waits for the device, or looks at what is there."""
        held = self._target.prefix_lens
        # of this step alone: who holds each other is freed late, and a graph may then end another's capture
        verifier = _Verifier(self._target, self)
        resident = self.resident
        if resident is not None:
            drafted = resident.draft(self.roots, self.limits)
        else:
            live = torch.where(held < self.limits, held, -1)
            drafted = Drafted(self._drafts, live, self.roots.clone())
        result = verify_round(
            drafted.logits, drafted.roots, drafted.prefix_lens, verifier, self._budget, self._topk,
            from_logits=resident is not None, ragged=self._ragged, sampling=self._sampling,
        )  # fmt: skip
        if resident is not None:
            with self._beside():
                resident.commit(result.commit)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        assert verifier.record is not None
        return verifier.record

    def verified(self, layout: VerifyLayout) -> None:
        """The target's pass is over: the drafter takes its context of all rows."""
        features = self._target.row_features
        if self.resident is not None and features is not None:
            with self._beside():
                self.resident.take(features, layout.positions, layout.out_cache_loc)

    def accepted(
        self, tree: DraftTree, layout: VerifyLayout, acceptance: Acceptance, logits: Tensor
    ) -> "_Record":
        """The paths are known: the next roots, and the record."""
        with self._beside():
            record = _Record(tree, layout, acceptance, None if self._sampling else logits)
            keep_accepted(acceptance.num_accepted, acceptance.bonus, self.roots)
        return record

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a CUDA device a stream beside the current one, which has to wait for it in the end."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _read(
        self,
        places: Sequence[int],
        record: "_Record",
        packed: Tensor,
        done: Any,
        begin: float,
        drafted: float,
    ) -> dict[int, News]:
        """Wait for a round, and bring its record into the form of the loop."""
        if done is not None:
            done.synchronize()
        fields = record.fields(packed)
        now = time.perf_counter()
        # a round that was launched ahead began when the one before had been read
        draft_seconds = None if self.resident is not None else drafted - begin
        seconds = (draft_seconds, now - max(drafted, self._read_until))
        self._read_until = now
        tokens, counts = fields["token_ids"].tolist(), fields["num_accepted"].flatten().tolist()
        margins: list[list[float]] = [[]] * len(tokens)
        runner_ups: list[list[int]] = [[]] * len(tokens)
        if "margins" in fields:
            margins = fields["margins"].view(torch.float64).tolist()
            runner_ups = fields["runner_up_ids"].tolist()
        tree, acceptance = record.contracts(fields)
        news = {}
        for place in places:
            news[place] = News(
                tokens[place][: counts[place]], margins[place], runner_ups[place],
                *request_of(tree, acceptance, place), *seconds,
            )  # fmt: skip
        return news


class _Verifier(Watched):
    """The target as a round sees it, which tells the rounds what can begin beside the round."""

    def __init__(self, target: PagedTarget, rounds: DeviceRounds) -> None:
        super().__init__(target)
        self._rounds = rounds
        self._tree: DraftTree | None = None
        self.record: _Record | None = None

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: Any) -> Tensor:
        """The target's logits."""
        logits = super().forward(tree, layout, mask)
        self._tree = tree
        self._rounds.verified(layout)
        return logits

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """The target's."""
        assert self._tree is not None
        self.record = self._rounds.accepted(self._tree, layout, acceptance, self.logits)
        return super().commit(layout, acceptance)


class _Record:
    """What the host reads of a round, side by side in one tensor of int64."""

    def __init__(
        self, tree: DraftTree, layout: VerifyLayout, acceptance: Acceptance, logits: Tensor | None
    ) -> None:
        """Put the round together; with ``logits`` the margins along its paths too."""
        width, rows = acceptance.nodes.shape[1], tree.token_ids.shape[1]
        self._widths = record_fields(width, rows, has_margins=logits is not None)
        self.packed: Int64[Tensor, "B fields"] = pack_record(tree, layout, acceptance, logits)

    def fields(self, packed: Int64[Tensor, "B fields"]) -> dict[str, Int64[Tensor, "B width"]]:
        """Copies of the parts, on the CPU."""
        split = packed.cpu().split(list(self._widths.values()), dim=1)
        return {name: part.clone() for name, part in zip(self._widths, split, strict=True)}

    def contracts(self, fields: Mapping[str, Tensor]) -> tuple[DraftTree, Acceptance]:
        """The trees and the acceptances."""
        return (
            DraftTree(
                fields["tree_ids"],
                fields["parents"].int(),
                fields["depths"].int(),
                fields["scores"].view(torch.float64),
                fields["num_nodes"].flatten().int(),
            ),
            Acceptance(
                fields["nodes"].int(),
                fields["num_accepted"].flatten().int(),
                fields["bonus"].flatten(),
            ),
        )


def device_rounds(
    target: BatchTarget,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    budget: int,
    topk: int | None,
    sampling: Sampling | None,
    ragged: bool,
    is_watched: bool,
) -> DeviceRounds | str:
    """Rounds on the device, or what keeps them from being run there.

    ``is_watched``: the host has work in the middle of a round.
    """
    if not isinstance(target, PagedTarget):
        return f"the target is {of_kind(target)}, not a PagedTarget"
    if is_watched:
        return "logits processors and fixed buffers are the host's work in the middle of a round"
    if drafter.target_layer_ids and not _is_resident(drafter):
        return (
            "the drafter reads features and is no DFlash drafter with heads that the kernels serve"
        )
    most = max((r.prompt_ids.numel() + r.max_new_tokens for r in requests), default=0) + budget - 1
    if most > target.max_context:
        return (
            f"the longest request, with a whole tree at its end, takes {most} entries; "
            f"the target's context holds {target.max_context}"
        )
    return DeviceRounds(target, drafter, budget=budget, topk=topk, sampling=sampling, ragged=ragged)


def _is_resident(drafter: Drafter) -> bool:
    """Whether the drafter can draft on the device."""
    return isinstance(drafter, DFlashDrafter) and PagedDFlash.serves(drafter)

"""What the loop asks of a target that holds several requests, and the reference's answer to it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ddtree.spec.contracts import Acceptance, Commit, DraftTree, FlatMask, QLen, VerifyLayout
from ddtree.spec.errors import require
from ddtree.spec.mask import Form
from ddtree.spec.round import Target


class DecodingTarget(Target, Protocol):
    """A target that holds one request from its prompt on, as an ``HFTarget`` does."""

    @property
    def vocab_size(self) -> int:
        """Tokens that there are logits for."""
        ...

    @property
    def max_context(self) -> int:
        """Most KV entries, prompt and tree included."""
        ...

    @property
    def prefix_len(self) -> int:
        """Committed KV entries."""
        ...

    def reset(self, feature_layer_ids: tuple[int, ...] = ()) -> None:
        """Begin a new request."""
        ...

    def prefill(self, token_ids: Int64[Tensor, " n"]) -> Float[Tensor, " vocab"]:
        """Append the prompt; logits after its last token."""
        ...

    def rewind(self, prefix_len: int) -> None:
        """Drop all entries from ``prefix_len`` on."""
        ...

    def features(self) -> Float[Tensor, "new width"] | None:
        """Hidden states for the drafter of the entries committed since the last call."""
        ...


@runtime_checkable
class BatchTarget(Target, Protocol):
    """A target that holds requests in ``max_batch`` places, as a ``PagedTarget`` does.

    One with a ``mask_form`` other than flat is served by the round of ``ddtree.impl``.
    """

    @property
    def mask_form(self) -> Form:
        """The mask that ``forward`` reads."""
        ...

    @property
    def max_batch(self) -> int:
        """Requests held at once."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens that there are logits for."""
        ...

    @property
    def max_context(self) -> int:
        """Most KV entries of a request, prompt and tree included."""
        ...

    @property
    def prefix_lens(self) -> Int[Tensor, " B"]:
        """Committed entries of each request of the line-up; -1: unused."""
        ...

    def watch(self, feature_layer_ids: tuple[int, ...]) -> None:
        """Keep these layers' output hidden states of what is committed from now on."""
        ...

    def can_begin(self, reserve: int) -> bool:
        """Whether there is memory for a request of so many entries."""
        ...

    def begin(
        self, place: int, token_ids: Int64[Tensor, " n"], reserve: int
    ) -> Float[Tensor, " vocab"]:
        """Begin a request of ``reserve`` entries at most: read its prompt; logits after it."""
        ...

    def line_up(self, places: Sequence[int]) -> Sequence[int]:
        """The places whose requests the next round has, in order: those held, perhaps others too."""
        ...

    def take_features(self, place: int, count: int) -> Float[Tensor, "count width"] | None:
        """Hidden states of the ``count`` entries that the prompt or the last round has added."""
        ...

    def rewind(self, place: int, prefix_len: int, /) -> None:
        """Drop a request's entries from ``prefix_len`` on."""
        ...

    def free(self, place: int, /) -> None:
        """End a request."""
        ...


class SeparateTargets:
    """A batch of requests that each have a target of their own, verified one after the other.

    With one target every call is handed through as it is, fixed buffers included.
    """

    def __init__(self, targets: Sequence[DecodingTarget]) -> None:
        """Take one target for each place; several may share a model.

        Raises:
            InputError: no target.
        """
        require(len(targets) >= 1, "a batch needs at least one target")
        self._targets = tuple(targets)
        self._line_up: Sequence[int] = range(len(targets))
        self._feature_layer_ids: tuple[int, ...] = ()
        self.max_batch = len(targets)
        self.vocab_size = targets[0].vocab_size
        self.max_context = min(target.max_context for target in targets)
        self.mask_form: Form = "flat"

    @property
    def slot_table(self) -> Int64[Tensor, "B max_context"]:
        """The slots of the line-up's requests; each target's pool follows that of the one before."""
        if self.max_batch == 1:
            return self._targets[0].slot_table
        return torch.cat(
            [
                self._targets[p].slot_table[:, : self.max_context] + self._first_slot(p)
                for p in self._line_up
            ]
        )

    @property
    def prefix_lens(self) -> Int[Tensor, " B"]:
        """Committed entries of each request of the line-up."""
        lens = [self._targets[place].prefix_len for place in self._line_up]
        return self._targets[0].slot_table.new_tensor(lens)

    def watch(self, feature_layer_ids: tuple[int, ...]) -> None:
        """Remember them; the targets are told as their requests begin."""
        self._feature_layer_ids = feature_layer_ids

    def can_begin(self, reserve: int) -> bool:
        """Always: each target grows by itself."""
        return True

    def begin(
        self,
        place: int,
        token_ids: Int64[Tensor, " n"],
        reserve: int,
    ) -> Float[Tensor, " vocab"]:
        """Reset the target of the place and read the prompt."""
        self._targets[place].reset(self._feature_layer_ids)
        return self._targets[place].prefill(token_ids)

    def line_up(self, places: Sequence[int]) -> Sequence[int]:
        """The held ones alone."""
        self._line_up = tuple(places)
        return self._line_up

    def take_features(self, place: int, count: int) -> Float[Tensor, "count width"] | None:
        """The target's."""
        features = self._targets[place].features()
        assert features is None or features.shape[0] == count
        return features

    def rewind(self, place: int, prefix_len: int) -> None:
        """The target's."""
        self._targets[place].rewind(prefix_len)

    def free(self, place: int) -> None:
        """Nothing: what a target holds stays until the place is taken again."""

    def forward(
        self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask
    ) -> Float[Tensor, "T vocab"]:
        """The logits of all rows, target by target."""
        if self.max_batch == 1:
            return self._targets[0].forward(tree, layout, mask)
        logits = []
        for b, place in enumerate(self._line_up):
            own_tree = DraftTree(
                tree.token_ids[b : b + 1],
                tree.parents[b : b + 1],
                tree.depths[b : b + 1],
                tree.scores[b : b + 1],
                tree.num_nodes[b : b + 1],
            )
            start, end = layout.mask_indptr[b : b + 2].tolist()
            own_mask = FlatMask(mask.allowed[start:end])
            logits.append(self._targets[place].forward(own_tree, self._own(layout, b), own_mask))
        return torch.cat(logits)

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """Commit target by target."""
        if self.max_batch == 1:
            return self._targets[0].commit(layout, acceptance)
        commits = []
        for b, place in enumerate(self._line_up):
            own = Acceptance(
                acceptance.nodes[b : b + 1],
                acceptance.num_accepted[b : b + 1],
                acceptance.bonus[b : b + 1],
            )
            commit = self._targets[place].commit(self._own(layout, b), own)
            src, dst = (
                torch.where(slots >= 0, slots + self._first_slot(place), slots)
                for slots in (commit.src, commit.dst)
            )
            commits.append(replace(commit, src=src, dst=dst))
        return Commit(
            torch.cat([commit.prefix_lens for commit in commits]),
            torch.cat([commit.src for commit in commits]),
            torch.cat([commit.dst for commit in commits]),
        )

    def _own(self, layout: VerifyLayout, b: int) -> VerifyLayout:
        """The layout of request b alone, in its own target's slots."""
        rows, entries, cells = (
            slice(*indptr[b : b + 2].tolist())
            for indptr in (layout.qo_indptr, layout.kv_indptr, layout.mask_indptr)
        )
        first = self._first_slot(self._line_up[b])
        return VerifyLayout(
            qo_indptr=layout.qo_indptr.new_tensor([0, rows.stop - rows.start]),
            kv_indptr=layout.kv_indptr.new_tensor([0, entries.stop - entries.start]),
            kv_indices=layout.kv_indices[entries] - first,
            mask_indptr=layout.mask_indptr.new_tensor([0, cells.stop - cells.start]),
            max_q_len=QLen(rows.stop - rows.start),
            positions=layout.positions[rows],
            out_cache_loc=layout.out_cache_loc[rows] - first,
        )

    def _first_slot(self, place: int) -> int:
        """Slots of the targets before."""
        return sum(target.slot_table.shape[1] for target in self._targets[:place])

"""Where a verify call comes from: made up from a seed, or recorded from a live generation."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddtree.cli.faults import Fault
from ddtree.cli.models import NGRAM_BLOCK_SIZE, encode, load_pair
from ddtree.cli.options import topk_of
from ddtree.cli.output import counted, fail, progress
from ddtree.spec.accept import accept_greedy
from ddtree.spec.contracts import (
    Acceptance,
    BlockSize,
    Budget,
    Commit,
    DraftTree,
    FlatMask,
    Horizon,
    PrefixLen,
    VerifyLayout,
)
from ddtree.spec.index import horizon_of, mask_len, q_len_of
from ddtree.spec.layout import plan_verify
from ddtree.spec.mask import tree_mask
from ddtree.spec.tree import build_tree

if TYPE_CHECKING:
    from ddtree.cli.models import Pair
    from ddtree.decoding.target import HFTarget

MADE_UP_PREFIX = 5
"""Prefix of the made-up call where none is asked for."""
MADE_UP_VOCAB = 1024
"""Enough tokens that a made-up tree of any budget finds its nodes."""
MOST_ENTRIES = 2**28
"""Of a made-up call's mask, a byte each: twice that is needed while it is made, and the file is as large."""


@dataclass(frozen=True)
class VerifyCall:
    """One verify call with its outcome."""

    tree: DraftTree
    layout: VerifyLayout
    mask: FlatMask
    acceptance: Acceptance
    kv_pool_size: int

    @property
    def q_lens(self) -> list[int]:
        """Query rows of each request, as the trees have them."""
        return [self.tree.token_ids.shape[1]] * self.tree.token_ids.shape[0]

    @property
    def prefix_lens(self) -> list[int]:
        """Committed entries of each request."""
        lens: list[int] = self.layout.kv_indptr.diff().tolist()
        return lens

    def broken_by(self, fault: Fault) -> "VerifyCall":
        """The same call with a fault in its metadata.

        Raises:
            InputError: the fault changes nothing in this call.
        """
        layout, mask = fault.apply(self.tree, self.layout, self.mask)
        return VerifyCall(self.tree, layout, mask, self.acceptance, self.kv_pool_size)


def _require_room(prefix_lens: list[int], budget: int) -> None:
    """Leave before a mask is made that is larger than anyone means to."""
    q_len = q_len_of(Budget(budget))
    entries = sum(mask_len(PrefixLen(prefix_len), q_len) for prefix_len in prefix_lens)
    if entries <= MOST_ENTRIES:
        return
    room = MOST_ENTRIES // q_len - len(prefix_lens) * q_len
    fits = f"prefixes of {room:,} together fit --budget {budget}; or " if room >= 0 else ""
    fail(
        f"the call's mask would have {entries:,} entries of a byte ({q_len:,} rows over prefixes of "
        f"{sum(prefix_lens):,} together); the most is {MOST_ENTRIES:,}",
        f"{fits}choose a smaller --budget",
    )


def made_up_call(
    prefix_lens: list[int], budget: int, topk: int | None, block_size: int, seed: int
) -> VerifyCall:
    """A call whose draft is random: the same seed gives the same call. Prefixes lie in one pool.

    The target's choices are drawn from the drafter's own distributions, so some drafts are accepted.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, horizon = len(prefix_lens), horizon_of(BlockSize(block_size))
    q_len = q_len_of(Budget(budget))
    # spread wide enough that best-first goes deep as well as broad
    logits = 4 * torch.randn(batch, horizon, MADE_UP_VOCAB, generator=generator)
    draft_log_probs = logits.log_softmax(-1)
    roots = torch.randint(MADE_UP_VOCAB, (batch,), generator=generator)
    tree = build_tree(draft_log_probs, roots, Budget(budget), topk)

    context = max(prefix_lens) + q_len
    slot_table = torch.randperm(batch * context, generator=generator).view(batch, context)
    layout = plan_verify(tree, torch.tensor(prefix_lens), slot_table)
    mask = tree_mask(tree, layout, "flat")
    choices = _choices(tree, draft_log_probs, generator)
    acceptance = accept_greedy(tree, choices, layout, Horizon(horizon))
    return VerifyCall(tree, layout, mask, acceptance, batch * context)


def _choices(tree: DraftTree, log_probs: Tensor, generator: torch.Generator) -> Tensor:
    """A token for each row, drawn from the draft one depth below it; 0 past the horizon."""
    horizon = log_probs.shape[1]
    choices = torch.zeros_like(tree.token_ids)
    for b, depths in enumerate(tree.depths):
        for row, depth in enumerate(depths.tolist()):
            if depth < horizon:
                probs = log_probs[b, depth].exp()
                choices[b, row] = torch.multinomial(probs, 1, generator=generator)
    return choices.flatten()


class _Recorded(Exception):
    """The wanted call has been seen: the generation need not go on."""


class Recorder:
    """A target that remembers its ``wanted``-th verify call (from 1) and then stops the generation."""

    def __init__(self, target: "HFTarget", wanted: int) -> None:
        self._target = target
        self._left = wanted
        self._seen: tuple[DraftTree, VerifyLayout, FlatMask] | None = None
        self.call: VerifyCall | None = None

    def __getattr__(self, name: str) -> Any:
        """Everything else is the target's own."""
        return getattr(self._target, name)

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Tensor:
        """Verify as the target does."""
        self._left -= 1
        self._seen = (tree, layout, mask)
        return self._target.forward(tree, layout, mask)

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """Commit as the target does, unless this was the wanted call."""
        if self._left == 0 and self._seen is not None:
            self.call = VerifyCall(*self._seen, acceptance, self._target.slot_table.shape[1])
            raise _Recorded
        return self._target.commit(layout, acceptance)


def recorded_call(
    pair: "Pair", prompt_ids: Tensor, wanted: int, budget: int, topk: int | None
) -> VerifyCall:
    """The ``wanted``-th verify call (from 1) of a greedy generation; leaves if there are fewer."""
    from ddtree.decoding.generate import generate

    recorder = Recorder(pair.plain, wanted)
    target: Any = recorder  # what it lacks of a target it has by __getattr__
    room = pair.plain.max_context - prompt_ids.numel() - q_len_of(Budget(budget))
    with suppress(_Recorded):
        generation = generate(
            target,
            pair.drafter,
            prompt_ids,
            budget=Budget(budget),
            topk=topk,
            # a round makes block_size tokens at most, so this always reaches the wanted one
            max_new_tokens=max(1, min(room, wanted * pair.drafter.block_size + 1)),
            stop_ids=pair.stop_ids,
        )
    if recorder.call is None:
        rounds = len(generation.rounds)
        fail(
            f"the text ended after {counted(rounds, 'round')}; --round is {wanted}",
            "ask for an earlier one",
        )
    return recorder.call


@dataclass(frozen=True)
class Wanted:
    """The options of ``dump`` and ``show`` that say which call is meant."""

    prefix: list[int] | None
    prompt: str | None
    which_round: int
    budget: int
    topk: str
    block_size: int | None
    seed: int
    target: str
    draft: str
    chat: bool | None
    fault: str | None

    def call(self) -> tuple[VerifyCall, Callable[[int], str] | None]:
        """The call, and what its tokens read as where there is a tokenizer."""
        topk = topk_of(self.topk)
        fault = Fault.parse(self.fault) if self.fault is not None else None
        if self.prompt is None:
            lens = self.prefix or [MADE_UP_PREFIX]
            _require_room(lens, self.budget)
            block_size = self.block_size or NGRAM_BLOCK_SIZE
            call = made_up_call(lens, self.budget, topk, block_size, self.seed)
            return (call.broken_by(fault) if fault else call), None
        asked = [self.prompt]
        pair = load_pair(
            self.target,
            self.draft,
            self.block_size,
            on_tokenizer=lambda tokenizer: encode(tokenizer, asked, self.chat),
        )
        (ids,) = encode(pair.tokenizer, asked, self.chat)
        with progress(f"generating up to verify call {self.which_round}"):
            call = recorded_call(pair, ids, self.which_round, self.budget, topk)
        return (call.broken_by(fault) if fault else call), pair.token_text

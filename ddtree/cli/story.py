"""The runs of ``ddtree demo``: each part decodes real text and judges its own outcome."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.cli.models import Pair, encode
from ddtree.decoding import (
    Choices,
    Comparison,
    Drafter,
    FoundingBug,
    Generation,
    autoregressive,
    compare,
    generate,
)
from ddtree.invariants import InvariantViolation, debug
from ddtree.pictures import TreeView, view_of
from ddtree.spec import Budget, VerifyBuffers, plan_verify, tree_mask
from ddtree.spec.index import q_len_of

PROMPT = "one apple, two apples, three apples, four apples, five"
"""A list: what repeats can be drafted from the prompt, and the numbers make real branches."""
BUDGET, TOPKS, WIDTH = 16, (1, 4), 8
PATHS = ("eager", "fixed buffers")
BLIND_BUDGET = WIDTH - 1
"""The budget whose q_len happens to be the configured width."""


@dataclass(frozen=True)
class Outcome:
    """One run of a part: what was asked, what came, and whether that was what the story tells."""

    ok: bool
    name: str
    text: str = ""
    verify_passes: int | None = None
    compared: Comparison | None = None
    violation: InvariantViolation | None = None


@dataclass(frozen=True)
class Part:
    """One part of the story."""

    letter: str
    claim: str
    """What it shows; true when ``ok``."""
    outcomes: tuple[Outcome, ...]
    view: TreeView | None = None
    files: list[Path] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything came out as told."""
        return all(outcome.ok for outcome in self.outcomes)


class Story:
    """The parts in order. The prompt's KV is computed once and used by all runs."""

    def __init__(self, pair: Pair, trained: Drafter, max_new_tokens: int) -> None:
        """``trained`` drafts in part a; in the runs of the bug the pair's own, with a block of ``WIDTH``."""
        self.pair, self.trained = pair, trained
        self.max_new_tokens = max_new_tokens
        self.say: Callable[[str], None] = lambda _: None
        """Told each run of a part before it begins."""
        (self.prompt_ids,) = encode(pair.tokenizer, [PROMPT], chat=False)
        pair.plain.reset()
        self.prompt_logits = pair.plain.prefill(self.prompt_ids)

    def expected(self) -> Choices:
        """The right text: the target's own decoding, one token a pass."""
        return autoregressive(
            self.pair.plain,
            self.prompt_ids,
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.pair.stop_ids,
            prompt_logits=self.prompt_logits,
        )

    def equality(self, expected: Choices) -> tuple[Part, Generation]:
        """(a) Draft trees give the same text in fewer passes."""
        found = self._decode(BUDGET, TOPKS[-1], drafter=self.trained)
        compared = compare(found, expected, self.pair.plain.dtype)
        plain_passes = len(expected.token_ids) - 1  # the first token comes with the prompt
        same = compared.equal or compared.is_tie
        outcomes = (
            Outcome(True, "one token a pass", self._text(expected), plain_passes),
            Outcome(
                same and len(found.rounds) < plain_passes,
                "draft trees",
                self._text(found),
                len(found.rounds),
                compared,
            ),
        )
        claim = f"draft trees (budget {BUDGET}, topk {TOPKS[-1]}): the same text in fewer passes"
        return Part("a", claim, outcomes), found

    def garbled(self, expected: Choices) -> Part:
        """(b) The founding bug garbles the text, on both paths, with branches and without."""
        outcomes = []
        for path, topk in product(PATHS, TOPKS):
            self.say(f"{path}, budget {BUDGET}, topk {topk}")
            found = self._decode(BUDGET, topk, bug=True, path=path)
            compared = compare(found, expected, self.pair.plain.dtype)
            outcomes.append(
                Outcome(
                    not compared.equal and not compared.is_tie,
                    f"{path}, budget {BUDGET}, topk {topk}",
                    self._text(found),
                    len(found.rounds),
                    compared,
                )
            )
        return Part("b", f"a width of {WIDTH} from configuration garbles the text", tuple(outcomes))

    def caught(self, expected: Choices) -> Part:
        """(c) Debug mode stops the bug at its first call, and lets the right program pass."""
        outcomes = []
        for path, topk in product(PATHS, TOPKS):
            name, seen = f"{path}, budget {BUDGET}, topk {topk}", list[int]()
            self.say(name)
            try:
                self._decode(BUDGET, topk, bug=True, path=path, checked=True, seen=seen)
            except InvariantViolation as violation:
                # the prompt alone has given a token: the bug let none through
                outcomes.append(Outcome(len(seen) == 1, name, violation=violation))
            else:
                outcomes.append(Outcome(False, name, "not stopped"))
        outcomes += [
            self._same(f"without the bug, {path}", expected, BUDGET, path=path) for path in PATHS
        ]
        claim = "debug mode stops the bug at its first call, and only the bug"
        return Part("c", claim, tuple(outcomes))

    def blind(self, expected: Choices) -> Part:
        """(d) Where budget + 1 is the configured width, the bug cannot be seen."""
        outcomes = tuple(
            self._same(
                f"with the bug, {path}, budget {BLIND_BUDGET}", expected, BLIND_BUDGET,
                bug=True, path=path,
            )
            for path in PATHS
        )  # fmt: skip
        claim = f"with budget {BLIND_BUDGET} the bug is invisible: q_len is {WIDTH} by chance"
        return Part("d", claim, outcomes)

    def picture(self, found: Generation) -> Part:
        """(e) The round of (a) that accepted most, among those whose tree branches."""
        branching = [i for i, one in enumerate(found.rounds) if _branches(one.tree.parents[0])]
        best = max(branching, key=lambda i: found.rounds[i].num_accepted, default=0)
        one = found.rounds[best]
        before = sum(len(earlier.new_token_ids) for earlier in found.rounds[:best])
        prefix_lens = torch.tensor([self.prompt_ids.numel() + before])
        layout = plan_verify(one.tree, prefix_lens, self.pair.plain.slot_table)
        mask = tree_mask(one.tree, layout, "flat")
        view = view_of(layout, mask, one.tree, one.acceptance, 0, self.pair.token_text)
        ok = bool(branching) and one.num_accepted > 1
        outcome = Outcome(
            ok,
            f"round {best + 1}: {one.num_nodes} nodes, {one.num_accepted} accepted",
            self.pair.text(list(one.new_token_ids)),
        )
        return Part("e", "one real draft tree, its mask and its accepted path", (outcome,), view)

    def _same(
        self, name: str, expected: Choices, budget: int, *, path: str, bug: bool = False
    ) -> Outcome:
        """A run in debug mode that must pass and give the right text."""
        self.say(name)
        try:
            found = self._decode(budget, TOPKS[-1], bug=bug, path=path, checked=True)
        except InvariantViolation as violation:
            return Outcome(False, name, violation=violation)
        compared = compare(found, expected, self.pair.plain.dtype)
        same = compared.equal or compared.is_tie
        return Outcome(same, name, self._text(found), len(found.rounds), compared)

    def _decode(
        self,
        budget: int,
        topk: int,
        *,
        drafter: Drafter | None = None,
        bug: bool = False,
        path: str = PATHS[0],
        checked: bool = False,
        seen: list[int] | None = None,
    ) -> Generation:
        target, q_len = self.pair.plain, q_len_of(Budget(budget))
        context = self.prompt_ids.numel() + self.max_new_tokens + q_len
        drafter = drafter or self.pair.drafter
        with debug() if checked else nullcontext():
            return generate(
                FoundingBug(target, WIDTH) if bug else target,
                drafter,
                self.prompt_ids,
                budget=budget,
                topk=topk,
                max_new_tokens=self.max_new_tokens,
                stop_ids=self.pair.stop_ids,
                buffers=None if path == PATHS[0] else VerifyBuffers(1, q_len, context),
                on_tokens=None if seen is None else seen.extend,
                # a drafter that reads the prompt's features needs its pass
                prompt_logits=None if drafter.target_layer_ids else self.prompt_logits,
            )

    def _text(self, choices: Choices) -> str:
        return self.pair.text(list(choices.token_ids))


def tell(story: Story) -> Iterator[Part]:
    """All parts, each as it is done."""
    expected = story.expected()
    part, found = story.equality(expected)
    yield part
    yield story.garbled(expected)
    yield story.caught(expected)
    yield story.blind(expected)
    yield story.picture(found)


def report(part: Part) -> dict[str, Any]:
    """The part for ``--json``."""
    return {
        "part": part.letter,
        "claim": part.claim,
        "ok": part.ok,
        "runs": [
            {
                "name": one.name,
                "ok": one.ok,
                "text": one.text,
                "verify_passes": one.verify_passes,
                "compared": None if one.compared is None else vars(one.compared),
                "invariant": None if one.violation is None else one.violation.invariant,
                "violation": None if one.violation is None else str(one.violation),
            }
            for one in part.outcomes
        ],
        "files": part.files,
    }


def _branches(parents: Tensor) -> bool:
    """Whether two nodes share a parent."""
    found: list[int] = parents[parents >= 0].tolist()
    return len(set(found)) < len(found)

"""A verify pass that an error stops midway leaves the target as it was before."""

from typing import Any

import pytest

from ddtree.decoding import FoundingBug, HFTarget, NGramDrafter, generate
from ddtree.invariants import InvariantViolation, debug
from tests.decoding.tiny import VOCAB, prompt, tiny_model


def test_target_is_usable_after_a_violation() -> None:
    """The checker stops the pass in its first layer; the next run gives the right text."""
    target, drafter = HFTarget(tiny_model("llama"), attention="reference"), NGramDrafter(VOCAB, 8)
    settings: dict[str, Any] = {"budget": 16, "topk": 4, "max_new_tokens": 12}
    right = generate(target, drafter, prompt(9), **settings).token_ids
    target.reset()
    logits = target.prefill(prompt(9))
    with debug(), pytest.raises(InvariantViolation):
        generate(FoundingBug(target), drafter, prompt(9), prompt_logits=logits, **settings)
    again = generate(target, drafter, prompt(9), prompt_logits=logits, **settings)
    assert again.token_ids == right

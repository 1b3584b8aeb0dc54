"""Decoding: stop tokens, lengths, sampling, statistics and comparisons."""

from collections.abc import Sequence

import pytest
import torch

from ddtree.decoding import (
    Choices,
    HFTarget,
    NGramDrafter,
    autoregressive,
    compare,
    generate,
    stop_ids_of,
)
from ddtree.spec import InputError
from ddtree.spec.sampling import Sampling
from tests.decoding.tiny import VOCAB, prompt, tiny_model

NEW = 30


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """One tiny target for all."""
    return HFTarget(tiny_model("llama"))


def _drafter() -> NGramDrafter:
    return NGramDrafter(VOCAB, 8)


def test_stop_token_inside_an_accepted_path_ends_the_text(target: HFTarget) -> None:
    """Whichever token is made the stop token, the text ends with its first occurrence."""
    whole = generate(target, _drafter(), prompt(9), budget=16, max_new_tokens=NEW)
    inside = 0
    for stop in set(whole.token_ids):
        found = generate(
            target, _drafter(), prompt(9), budget=16, max_new_tokens=NEW, stop_ids=(stop,)
        )
        plain = autoregressive(target, prompt(9), max_new_tokens=NEW, stop_ids=(stop,))
        assert found.stopped
        assert found.token_ids == plain.token_ids
        assert found.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        if found.rounds:
            inside += len(found.rounds[-1].new_token_ids) < found.rounds[-1].num_accepted
    assert inside  # at least one stop token stood before the end of an accepted path


def test_exactly_max_new_tokens(target: HFTarget) -> None:
    """Every length is met exactly, in the middle of an accepted path too."""
    whole = autoregressive(target, prompt(9), max_new_tokens=NEW).token_ids
    for count in range(1, NEW + 1):
        found = generate(target, _drafter(), prompt(9), budget=16, max_new_tokens=count)
        assert found.token_ids == whole[:count]
        assert not found.stopped


def test_tokens_are_streamed_as_they_come(target: HFTarget) -> None:
    """The callback hears every token once, round by round."""
    heard: list[Sequence[int]] = []
    found = generate(
        target, _drafter(), prompt(9), budget=16, max_new_tokens=NEW, on_tokens=heard.append
    )
    assert [t for tokens in heard for t in tokens] == list(found.token_ids)
    assert [len(tokens) for tokens in heard] == [1, *(len(r.new_token_ids) for r in found.rounds)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, seed=3),
        Sampling(temperature=0.5, seed=3),
        Sampling(temperature=1.0, top_k=5, seed=4),
        Sampling(temperature=0.8, top_p=0.9, seed=5),
    ],
)
def test_sampled_text_is_that_of_plain_sampling(target: HFTarget, sampling: Sampling) -> None:
    """With one seed every budget samples the tokens of plain decoding."""
    plain = autoregressive(target, prompt(9), max_new_tokens=NEW, sampling=sampling)
    for budget, topk in ((0, None), (7, 1), (16, 4)):
        found = generate(
            target,
            _drafter(),
            prompt(9),
            budget=budget,
            topk=topk,
            max_new_tokens=NEW,
            sampling=sampling,
        )
        assert found.token_ids == plain.token_ids
    other = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed=99)
    again = autoregressive(target, prompt(9), max_new_tokens=NEW, sampling=other)
    assert (again.token_ids == plain.token_ids) == (sampling.temperature == 0)


def test_statistics_add_up(target: HFTarget) -> None:
    """Tokens, rounds, histogram and margins tell the same story."""
    found = generate(target, _drafter(), prompt(9), budget=16, topk=4, max_new_tokens=NEW)
    yielded = sum(n * count for n, count in found.acceptance_histogram.items())
    cut = found.rounds[-1].num_accepted - len(found.rounds[-1].new_token_ids)
    assert 1 + yielded - cut == len(found.token_ids) == NEW
    assert sum(found.acceptance_histogram.values()) == len(found.rounds)
    assert found.tokens_per_round == pytest.approx((NEW - 1) / len(found.rounds))
    assert all(1 <= r.num_accepted <= r.num_nodes <= 17 for r in found.rounds)
    plain = autoregressive(target, prompt(9), max_new_tokens=NEW)
    assert found.margins == pytest.approx(plain.margins, abs=1e-9)
    assert found.runner_up_ids == plain.runner_up_ids


def test_ragged_rows_change_nothing(target: HFTarget) -> None:
    """Verifying num_nodes rows instead of budget + 1 gives the same rounds."""
    texts = [
        generate(
            target, _drafter(), prompt(9), budget=63, topk=1, max_new_tokens=NEW, ragged=ragged
        )
        for ragged in (False, True)
    ]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[0].acceptance_histogram == texts[1].acceptance_histogram


def test_shared_prefill_changes_nothing(target: HFTarget) -> None:
    """Cutting back to an earlier prefill gives what a new prefill gives."""
    fresh = generate(target, _drafter(), prompt(9), budget=7, max_new_tokens=NEW)
    target.reset()
    logits = target.prefill(prompt(9))
    for _ in range(2):
        plain = autoregressive(target, prompt(9), max_new_tokens=NEW, prompt_logits=logits)
        again = generate(
            target, _drafter(), prompt(9), budget=7, max_new_tokens=NEW, prompt_logits=logits
        )
        assert again.token_ids == plain.token_ids == fresh.token_ids


def test_a_shared_prefill_without_features_is_refused_before_anything_begins(
    target: HFTarget,
) -> None:
    """A drafter that reads hidden states needs them from the prompt on; the target stays as it was."""
    target.reset()
    logits = target.prefill(prompt(9))
    drafter = _drafter()
    drafter.target_layer_ids = (0,)
    with pytest.raises(InputError, match="prompt_logits cannot be used with a drafter"):
        generate(target, drafter, prompt(5), budget=7, max_new_tokens=3, prompt_logits=logits)
    assert target.prefix_len == 9


def test_comparison_tells_ties_from_faults() -> None:
    """A difference is a tie only if both runs were torn between the same two tokens."""
    base = Choices((5, 6, 7), (1.0, 0.0004, 1.0), (1, 8, 2))
    assert compare(base, base).equal
    tie = compare(Choices((5, 8, 9), (1.0, 0.0003, 1.0), (1, 6, 2)), base)
    assert (tie.equal, tie.is_tie, tie.index) == (False, True, 1)
    assert "tie below float error at token 1: 6 and 8" in str(tie)
    other_token = compare(Choices((5, 9, 9), (1.0, 0.0003, 1.0), (1, 6, 2)), base)
    wide_margin = compare(Choices((5, 8, 9), (1.0, 0.3, 1.0), (1, 6, 2)), base)
    in_float64 = compare(
        Choices((5, 8, 9), (1.0, 0.0003, 1.0), (1, 6, 2)), base, dtype=torch.float64
    )
    shorter = compare(Choices((5, 6), (1.0, 0.0004), (1, 8)), base)
    for fault in (other_token, wide_margin, in_float64, shorter):
        assert not fault.equal
        assert not fault.is_tie
        assert "DIFFERENT" in str(fault)
    assert shorter.index == 2


def test_end_tokens_of_a_model(target: HFTarget) -> None:
    """End tokens come from the generation configuration, one or several or none."""
    config = target.model.generation_config
    try:
        for value, expected in ((None, ()), (2, (2,)), ([2, 3], (2, 3))):
            config.eos_token_id = value
            assert stop_ids_of(target.model) == expected
    finally:
        config.eos_token_id = None


def test_bad_arguments_are_refused(target: HFTarget) -> None:
    """Lengths and budgets below their least are refused with the numbers."""
    with pytest.raises(InputError, match="budget must be at least 0, got -1"):
        generate(target, _drafter(), prompt(9), budget=-1, max_new_tokens=5)
    with pytest.raises(InputError, match="max_new_tokens must be at least 1, got 0"):
        generate(target, _drafter(), prompt(9), budget=1, max_new_tokens=0)
    with pytest.raises(InputError, match=r"shape \[0\]"):
        autoregressive(target, prompt(0), max_new_tokens=5)
    with pytest.raises(InputError, match="120 prompt tokens and 9 new ones make 129"):
        autoregressive(target, prompt(120), max_new_tokens=9)

"""Batches: many prompts at once, each with the text that it has alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree import debug
from ddtree.decoding import (
    DFlashDrafter,
    FoundingBug,
    HFTarget,
    NGramDrafter,
    Request,
    SeparateTargets,
    Stops,
    autoregressive,
    compare,
    decode,
    generate,
)
from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.decoding.paged import PagedTarget
from ddtree.invariants import InvariantViolation
from ddtree.spec import InputError, QLen, VerifyBuffers
from ddtree.spec.sampling import Sampling
from tests.decoding.tiny import CONTEXT, VOCAB, prompt, tiny_model

LENGTHS = (1, 9, 3, 30, 2, 17, 5, 12, 8, 21, 4)
"""Ragged prompts, more than any batch here has places."""


def targets(model: Any, count: int) -> SeparateTargets:
    """A batch of the reference."""
    return SeparateTargets([HFTarget(model) for _ in range(count)])


def requests(new: Sequence[int] = (9, 1, 14, 6)) -> list[Request]:
    """Requests of several lengths, which so leave at different rounds."""
    return [Request(prompt(n, seed=i), new[i % len(new)]) for i, n in enumerate(LENGTHS)]


def plain(model: Any, request: Request, **options: Any) -> Any:
    """The request decoded one token at a time."""
    return autoregressive(
        HFTarget(model), request.prompt_ids, max_new_tokens=request.max_new_tokens, **options
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("budget", [0, 7, 16, 32])
def test_every_text_of_a_batch_is_that_of_plain_decoding(kind: str, budget: int) -> None:
    """float32, 1 and 8 places, ragged prompts; places are taken again as requests leave."""
    model = tiny_model(kind, torch.float32)
    todo = requests()
    expected = [plain(model, request) for request in todo]
    for places in (1, 8):
        found = decode(targets(model, places), NGramDrafter(VOCAB, 8), todo, budget=budget)
        assert [compare(a, b).equal for a, b in zip(found, expected, strict=True)] == [True] * 11
        assert all(one.finish_reason == "length" for one in found)


def test_invariants_hold_in_every_round_of_a_batch() -> None:
    """Debug mode looks at batches of several requests, ragged and through fixed buffers too."""
    model = tiny_model("llama", torch.float32)
    todo = requests()[:5]
    expected = [plain(model, request).token_ids for request in todo]
    buffers = VerifyBuffers(4, QLen(9), CONTEXT * 4)
    many: tuple[dict[str, Any], ...] = ({}, {"ragged": True}, {"buffers": buffers})
    for options in many:
        with debug():
            found = decode(targets(model, 3), NGramDrafter(VOCAB, 8), todo, budget=8, **options)
        assert [one.token_ids for one in found] == expected


def test_a_request_of_a_batch_with_the_founding_bug_is_caught() -> None:
    """The third of three targets takes its widths from configuration: the numbers are that request's."""
    model = tiny_model("llama", torch.float32)
    sound = [HFTarget(model, attention="reference") for _ in range(3)]
    batch = SeparateTargets([*sound[:2], FoundingBug(sound[2])])
    with (
        debug(),
        pytest.raises(InvariantViolation, match=r"mask_len is broken .*expected 340, found 88"),
    ):
        decode(batch, NGramDrafter(VOCAB, 8), requests((9,))[:3], budget=16)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.9, seed=5),
        Sampling(0.7, top_k=6, seed=6),
        Sampling(1.0, top_p=0.8, seed=tuple(range(40, 51))),
    ],
)
def test_samples_do_not_depend_on_batch_mates(sampling: Sampling) -> None:
    """Each request samples with its own seed: alone, in a batch, in another order, plainly."""
    model = tiny_model("llama")  # float64: a sample near the edge of a token stays where it is
    todo, seeds = requests(), sampling.seeds(11)
    drafter = NGramDrafter(VOCAB, 8)
    found = decode(targets(model, 4), drafter, todo, budget=9, sampling=sampling)
    backwards = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seeds[::-1])
    again = decode(targets(model, 3), drafter, todo[::-1], budget=4, sampling=backwards)
    assert [one.token_ids for one in again[::-1]] == [one.token_ids for one in found]
    for request, seed, one in list(zip(todo, seeds, found, strict=True))[::3]:
        own = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed)
        assert one.token_ids == plain(model, request, sampling=own).token_ids
    assert len({one.token_ids for one in found}) > 8


def test_stop_tokens_in_accepted_paths_of_a_batch() -> None:
    """Some requests stop in the middle of a path, others go on in the same round."""
    model = tiny_model("llama", torch.float32)
    todo = requests((24,))
    whole = [plain(model, request).token_ids for request in todo]
    inside = 0
    for stop in (3, 11, 27):
        found = decode(
            targets(model, 5), NGramDrafter(VOCAB, 8), todo, budget=16, stops=Stops((stop,))
        )
        for tokens, one in zip(whole, found, strict=True):
            end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
            assert one.token_ids == tokens[:end]
            assert one.finish_reason == ("stop_token" if stop in tokens else "length")
            if one.rounds and one.stopped:
                inside += len(one.rounds[-1].new_token_ids) < one.rounds[-1].num_accepted
    assert inside


def test_news_come_in_order_with_the_end_last() -> None:
    """All tokens of each request once, in order; the last of them with the reason; waiting ones later."""
    model = tiny_model("llama", torch.float32)
    todo = requests()
    heard: list[tuple[int, list[int], str | None]] = []
    found = decode(
        targets(model, 3), NGramDrafter(VOCAB, 8), todo, budget=8,
        on_news=lambda i, tokens, reason: heard.append((i, list(tokens), reason)),
    )  # fmt: skip
    for i, one in enumerate(found):
        own = [(tokens, reason) for index, tokens, reason in heard if index == i]
        assert [t for tokens, _ in own for t in tokens] == list(one.token_ids)
        assert [reason for _, reason in own] == [None] * (len(own) - 1) + ["length"]
        assert len(own) == 1 + len(one.rounds)
    firsts = [next(n for n, news in enumerate(heard) if news[0] == i) for i in range(11)]
    ends = [next(n for n, news in enumerate(heard) if news[0] == i and news[2]) for i in range(11)]
    assert firsts == sorted(firsts)  # requests begin in turn
    for n in range(len(heard)):
        assert sum(first <= n < end for first, end in zip(firsts, ends, strict=True)) <= 3
    assert any(first > min(ends) for first in firsts)  # a place was taken again


def test_a_request_is_checked_before_any_begins() -> None:
    """One that does not fit stops the call with its numbers; nothing was decoded."""
    model = tiny_model("llama", torch.float32)
    heard: list[Any] = []
    with pytest.raises(InputError, match="120 prompt tokens and 9 new ones make 129"):
        decode(
            targets(model, 2), NGramDrafter(VOCAB, 8), [*requests(), Request(prompt(120), 9)],
            budget=3, on_news=lambda *news: heard.append(news),
        )  # fmt: skip
    assert heard == []
    assert decode(targets(model, 2), NGramDrafter(VOCAB, 8), [], budget=3) == []
    with pytest.raises(InputError, match="at least one target"):
        SeparateTargets([])


def test_a_batch_at_the_end_of_the_context() -> None:
    """Where one request has room for few nodes, the round drafts few, and no text changes."""
    model = tiny_model("gpt2", torch.float32)  # learned positions: there are none past the context
    todo = [Request(prompt(CONTEXT - 12), 12), Request(prompt(5), 12)]
    found = decode(targets(model, 2), NGramDrafter(VOCAB, 8), todo, budget=32)
    assert [one.token_ids for one in found] == [plain(model, one).token_ids for one in todo]


def dflash(target: HFTarget) -> DFlashDrafter:
    """A drafter with random weights that reads two layers."""
    config = DFlashConfig(
        32, 48, 2, 4, 2, 16, 1e-6, 5000.0, 6, 7, (0, 2), 3  # type: ignore[arg-type]
    )  # fmt: skip
    torch.manual_seed(0)
    model = DFlashModel(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return DFlashDrafter(model, target)


def test_drafters_that_read_features_keep_their_requests_apart() -> None:
    """Each place drafts from its own context: the same trees alone and in a batch."""
    model = tiny_model("llama", torch.float32)
    drafter = dflash(HFTarget(model))
    todo = requests((7,))[:5]
    todo[1] = Request(torch.tensor([7, 3, 7, 7]), 7)  # the mask token in a prompt is a token
    together = decode(targets(model, 3), drafter, todo, budget=6)
    for request, one in zip(todo, together, strict=True):
        alone = generate(HFTarget(model), drafter, request.prompt_ids, budget=6, max_new_tokens=7)
        assert one.token_ids == alone.token_ids == plain(model, request).token_ids
        trees = [[r.tree.token_ids.tolist() for r in found.rounds] for found in (one, alone)]
        assert trees[0] == trees[1]


class Seen(NGramDrafter):
    """Keeps the features that each request's drafter was given, by the text's first tokens."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 4)
        self.target_layer_ids = (1,)
        self.seen: dict[tuple[int, ...], list[Tensor]] = {}

    def draft(self, token_ids: Tensor, features: Tensor | None = None) -> Tensor:
        assert features is not None
        self.seen.setdefault(tuple(token_ids[:2].tolist()), []).append(features)
        return super().draft(token_ids)


def test_the_paged_target_serves_the_same_loop() -> None:
    """Two places for four requests: texts, and the features of every entry, are the dense ones."""
    model = tiny_model("llama-64", torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    todo = [Request(prompt(n, seed=n), new) for n, new in ((5, 4), (2, 7), (9, 3), (3, 1))]
    expected = [plain(model, request) for request in todo]
    dense, paged = Seen(), Seen()
    decode(targets(model, 2), dense, todo, budget=4)
    target = PagedTarget(
        model, max_batch=2, max_context=24, page_size=4, num_pages=7, device=device
    )
    found = decode(target, paged, todo, budget=4)
    assert all(compare(a, b).equal for a, b in zip(found, expected, strict=True))
    assert target.num_free_pages == 7
    assert dense.seen.keys() == paged.seen.keys()
    for key, features in dense.seen.items():
        a, b = torch.cat(features), torch.cat(paged.seen[key]).cpu()
        assert torch.allclose(a, b, atol=1e-4)


def test_requests_wait_for_pages() -> None:
    """With pages for one request at a time the second begins when the first is done."""
    model = tiny_model("llama-64", torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = PagedTarget(
        model, max_batch=2, max_context=16, page_size=4, num_pages=4, device=device
    )
    todo = [Request(prompt(6), 3), Request(prompt(4), 3)]
    heard: list[int] = []
    found = decode(
        target, NGramDrafter(VOCAB, 3), todo, budget=2, on_news=lambda i, *_: heard.append(i)
    )
    assert heard == sorted(heard)
    expected = [plain(tiny_model("llama-64", torch.float32), request) for request in todo]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]

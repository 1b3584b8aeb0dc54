"""Rounds in one CUDA graph: equal to eager ones, and never waited for while requests come and go."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ddtree import debug
from ddtree.decoding import (
    DFlashDrafter,
    Drafter,
    Generation,
    HFTarget,
    NGramDrafter,
    Request,
    Stops,
    autoregressive,
    compare,
    decode,
    fused,
)
from ddtree.decoding.device_rounds import DeviceRounds
from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.decoding.fused import FEW_ROWS
from ddtree.decoding.paged import PagedTarget
from ddtree.decoding.rounds import Held, HostRounds
from ddtree.spec import BlockSize
from ddtree.spec.sampling import Sampling
from tests.decoding.test_paged_gpu import model_of

pytestmark = pytest.mark.gpu

CONTEXT = 512


def drafter_of(model: Any, block_size: int = 8) -> DFlashDrafter:
    """A drafter of two layers with random weights: its trees are of use only where they are wide."""
    config = model.config
    torch.manual_seed(0)
    drafter = DFlashModel(
        DFlashConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=2,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=5000.0,
            block_size=BlockSize(block_size),
            mask_token_id=7,
            target_layer_ids=(1, config.num_hidden_layers - 2),
            num_target_layers=config.num_hidden_layers,
        )
    )
    for weight in drafter.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return DFlashDrafter(drafter, HFTarget(model))


def requests(count: int, new: int) -> list[Request]:
    """Ragged ones, drawn from a seed; the text before repeats, so that prompt lookup finds something."""
    generator = torch.Generator().manual_seed(count)

    def number(most: int) -> int:
        return 1 + int(torch.randint(0, most, (), generator=generator))

    found = []
    for _ in range(count):
        ids = torch.randint(0, 5000, (number(80),), generator=generator)
        found.append(Request(torch.cat([ids, ids]), number(new)))
    return found


def begun(
    model: Any, drafter: Drafter, sampling: Sampling | None, budget: int
) -> tuple[DeviceRounds, PagedTarget, dict[int, Held]]:
    """Rounds of four places, the third unused."""
    target = PagedTarget(model, max_batch=4, max_context=CONTEXT, page_size=4)
    target.watch(drafter.target_layer_ids)
    rounds = DeviceRounds(
        target, drafter, budget=budget, topk=None, sampling=sampling, ragged=False
    )
    helds = {}
    for place, request in zip((0, 1, 3), requests(3, 1), strict=True):
        wanted = Request(request.prompt_ids, 200)
        held = helds[place] = Held(place, wanted, sampling)
        entries = request.prompt_ids.numel() + 200 + budget
        held.tokens.append(int(target.begin(place, request.prompt_ids, entries).argmax()))
        rounds.begin(place, held)
    return rounds, target, helds


@pytest.mark.parametrize(
    ("sampling", "few_rows"),
    [
        (None, FEW_ROWS),
        (None, 0),  # no draft is of few rows
        (Sampling(0.8, seed=3), FEW_ROWS),
        (Sampling(0.9, top_p=0.9, seed=4), FEW_ROWS),
    ],
)
def test_captured_rounds_equal_eager_ones_whatever_lies_about(
    sampling: Sampling | None, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32: every token, tree and length of 12 rounds; what no round may read is NaN before each."""
    monkeypatch.setattr(fused, "FEW_ROWS", few_rows)
    model = model_of("qwen3", torch.float32)
    drafter = drafter_of(model)
    both = [begun(model, drafter, sampling, 33) for _ in range(2)]
    both[1][0]._captured = None  # its steps run eagerly
    rounds, target, _ = both[0]
    captured = rounds._captured
    assert captured is not None
    for turn in range(12):
        captured.result.packed.fill_(-7)
        used = target.slot_table[target.slot_table >= 0]
        is_free = torch.ones(target.pad_slot + 1, dtype=torch.bool, device="cuda")
        is_free[used] = False
        drafting = rounds.resident
        assert drafting is not None
        for pool in (*target.kv.keys, *target.kv.values, *itertools.chain(*drafting._pools)):
            pool[is_free] = torch.nan
        news = [one.launch(helds)() for one, _, helds in both]
        for place in both[0][2]:
            found, expected = (one[place] for one in news)
            assert found.token_ids == expected.token_ids, (turn, place)
            assert found.runner_up_ids == expected.runner_up_ids
            assert torch.equal(found.tree.token_ids, expected.tree.token_ids)
            assert torch.equal(found.acceptance.nodes, expected.acceptance.nodes)
        assert torch.equal(both[0][1].prefix_lens, both[1][1].prefix_lens)
        assert torch.equal(both[0][0].roots, both[1][0].roots)
        assert torch.equal(both[0][1].slot_table, both[1][1].slot_table)


def plain(model: Any, todo: Sequence[Request], **options: Any) -> list[Any]:
    """Each request decoded one token at a time."""
    target = HFTarget(model)
    return [
        autoregressive(target, r.prompt_ids, max_new_tokens=r.max_new_tokens, **options)
        for r in todo
    ]


def held_to(found: Sequence[Generation], expected: Sequence[Any]) -> None:
    """Every text is equal up to a tie."""
    for one, other in zip(found, expected, strict=True):
        verdict = compare(one, other)
        assert verdict.equal or verdict.is_tie, str(verdict)


@pytest.mark.parametrize("kind", ["resident", "host"])
def test_hundreds_of_rounds_while_requests_come_and_go(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts; no launch waits for the device, and none of them is more than one round ahead."""
    model = model_of("qwen3", torch.float32)
    drafter = drafter_of(model) if kind == "resident" else NGramDrafter(model.config.vocab_size, 8)
    todo = requests(60, 40)
    target = PagedTarget(model, max_batch=3, max_context=CONTEXT, page_size=16, num_pages=40)
    launches = strictly(monkeypatch, DeviceRounds)
    found = decode(target, drafter, todo, budget=16)
    held_to(found, plain(model, todo))
    assert len(launches) >= 200
    assert target.num_free_pages == 40


def strictly(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[int]:
    """Let every launch but the first, which compiles, raise where it waits; count them."""
    launches, inner = list[int](), kind.launch

    def launch(self: Any, *args: Any) -> Any:
        launches.append(1)
        torch.cuda.set_sync_debug_mode("error" if len(launches) > 1 else "default")
        try:
            return inner(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(kind, "launch", launch)
    return launches


def test_host_rounds_wait_only_where_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ragged requests in two places, driven step by step."""
    model = model_of("qwen3", torch.float32)
    todo = requests(5, 20)
    drafter = NGramDrafter(model.config.vocab_size, 8)
    target = PagedTarget(model, max_batch=2, max_context=CONTEXT, page_size=16)
    launches = strictly(monkeypatch, HostRounds)
    found = decode(target, drafter, todo, budget=16, on_device=False)
    held_to(found, plain(model, todo))
    assert len(launches) >= max(len(one.rounds) for one in found)


def test_stops_and_samples_in_captured_rounds() -> None:
    """A stop token ends a text inside a path; seeds give the samples of plain decoding."""
    model = model_of("qwen3", torch.float32)
    drafter, todo = drafter_of(model), requests(6, 30)
    whole = plain(model, todo)
    stop = whole[0].token_ids[len(whole[0].token_ids) // 2]
    target = PagedTarget(model, max_batch=4, max_context=CONTEXT)
    found = decode(target, drafter, todo, budget=64, stops=Stops((stop,)))
    held_to(found, plain(model, todo, stop_ids=(stop,)))
    for options in ({}, {"top_k": 40}, {"top_p": 0.9}):
        sampled = decode(
            target, drafter, todo, budget=64, sampling=Sampling(0.7, seed=9, **options)
        )
        agree = 0
        for i, (one, request) in enumerate(zip(sampled, todo, strict=True)):
            own = Sampling(0.7, seed=9 + i, **options)
            other = plain(model, [request], sampling=own)[0]
            agree += one.token_ids == other.token_ids
        assert (
            agree >= len(todo) - 1
        )  # near the edge between two tokens float error changes a sample


def test_a_drafter_that_drafts_nothing() -> None:
    """Block size 1 and budget 0: plain decoding, a round a token."""
    model, todo = model_of("qwen3", torch.float32), requests(3, 12)
    drafter = NGramDrafter(model.config.vocab_size, 1)
    found = decode(PagedTarget(model, max_batch=2, max_context=CONTEXT), drafter, todo, budget=0)
    held_to(found, plain(model, todo))
    assert all(one.tokens_per_round == 1 for one in found if one.rounds)


def test_debug_mode_goes_into_the_graph() -> None:
    """Captured rounds are checked at every replay, and nothing is broken."""
    model = model_of("qwen3", torch.float32)
    drafter, todo = drafter_of(model), requests(4, 12)
    target = PagedTarget(model, max_batch=2, max_context=CONTEXT)
    with debug():
        found = decode(target, drafter, todo, budget=16)
    held_to(found, plain(model, todo))


def test_the_embedded_pair_s_sizes_in_bf16() -> None:
    """The captured rounds give the texts of those that the host drives, up to ties."""
    model = model_of("smollm2", torch.bfloat16)
    drafter, todo = drafter_of(model), requests(6, 40)
    found, driven = (
        decode(
            PagedTarget(model, max_batch=3, max_context=CONTEXT), drafter, todo, budget=32,
            on_device=on_device,
        )
        for on_device in (True, False)
    )  # fmt: skip
    for one, other in zip(found, driven, strict=True):
        verdict = compare(one, other, torch.bfloat16)
        assert verdict.equal or verdict.is_tie, str(verdict)


def test_a_place_is_begun_and_freed_without_a_wait() -> None:
    """Root, limit, seed and lengths are written behind the round that runs."""
    model = model_of("qwen3", torch.float32)
    drafter = NGramDrafter(model.config.vocab_size, 8)
    rounds, target, helds = begun(model, drafter, Sampling(0.8, seed=3), 16)
    held = helds[3]
    torch.cuda.synchronize()
    rounds.roots.fill_(-5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rounds.begin(3, held)
        target.free(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rounds.roots.tolist() == [-5, -5, -5, held.tokens[-1]]
    assert rounds.limits.tolist()[3] == held.prefix_len + held.room
    assert (rounds.seeds.tolist()[3], target.prefix_lens.tolist()[3]) == (3, -1)

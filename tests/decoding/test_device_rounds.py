"""Rounds whose state stays on the device give the texts of plain decoding, and never wait for it.

Without a CUDA device the kernels run in Triton's interpreter, a second a round: hence the tiny sizes, and a
vocabulary that a tree covers, so that paths are accepted. ``test_device_rounds_gpu.py`` captures rounds.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from ddtree import debug
from ddtree.decoding import (
    DFlashDrafter,
    Drafter,
    Generation,
    HFTarget,
    NGramDrafter,
    Request,
    SeparateTargets,
    Stops,
    autoregressive,
    decode,
    fused,
)
from ddtree.decoding import device_rounds as device_rounds_module
from ddtree.decoding.device_rounds import DeviceRounds, device_rounds
from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.decoding.dflash_paged import PagedDFlash
from ddtree.decoding.fused import FEW_ROWS
from ddtree.decoding.paged import PagedTarget
from ddtree.decoding.rounds import Held
from ddtree.spec import BlockSize, InputError
from ddtree.spec.sampling import Sampling
from tests.impl.cases import DEVICE

VOCAB = 9
BLOCK = 3
BUDGET = 10
CONTEXT = 64


def model_of(seed: int = 0) -> Any:
    """A target of one layer where the kernels run, whose text depends on the whole context."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.5 if "embed" in name else 0.3)
    return model.to(DEVICE).eval()


def drafter_of(model: Any, **fields: Any) -> DFlashDrafter:
    """A drafter with random weights that reads the target's states."""
    given: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "block_size": BlockSize(BLOCK),
        "mask_token_id": 7,
        "target_layer_ids": (0,),
        "num_target_layers": 1,
    }
    torch.manual_seed(0)
    drafter = DFlashModel(DFlashConfig(**(given | fields)))
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    return DFlashDrafter(drafter, HFTarget(model))


def prompt(length: int) -> Tensor:
    """Random tokens."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length))


def requests(*sizes: tuple[int, int]) -> list[Request]:
    """Prompts of so many tokens, for so many new ones."""
    return [Request(prompt(length), new) for length, new in sizes]


def target_of(model: Any, places: int, **options: Any) -> PagedTarget:
    """A paged target for such requests."""
    return PagedTarget(model, max_batch=places, max_context=CONTEXT, **options)


def plain(model: Any, todo: Sequence[Request], **options: Any) -> list[Any]:
    """Each request decoded one token at a time."""
    return [
        autoregressive(HFTarget(model), r.prompt_ids, max_new_tokens=r.max_new_tokens, **options)
        for r in todo
    ]


def same(found: Sequence[Generation], expected: Sequence[Any]) -> bool:
    """Whether all texts are equal."""
    return [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize("on_device", [False, True])
def test_budget_0_never_asks_the_drafter(on_device: bool) -> None:
    """Plain decoding, a round a token; on the device a round ahead too."""
    model, todo = model_of(), requests((5, 3), (2, 1))
    drafter = drafter_of(model)
    drafter.draft = None  # type: ignore[method-assign,assignment] # a call would raise
    drafter.model = None  # type: ignore[assignment]
    found = decode(target_of(model, 2), drafter, todo, budget=0, on_device=on_device)
    assert same(found, plain(model, todo))
    assert [len(one.rounds) for one in found] == [2, 0]
    silent = NGramDrafter(VOCAB, 1)
    rounds = device_rounds(
        target_of(model, 1), silent, todo, budget=0, topk=None, sampling=None, ragged=False,
        is_watched=False,
    )  # fmt: skip
    assert isinstance(rounds, DeviceRounds) and rounds.ahead == 1


LARGE = () if torch.cuda.is_available() else (pytest.mark.long,)
"""Marks what the interpreter takes too long for."""


@pytest.mark.parametrize(
    ("places", "budget", "page_size", "ragged"),
    [
        (2, BUDGET, 1, False),
        pytest.param(1, 40, 1, False, marks=LARGE),
        pytest.param(3, BUDGET, 1, True, marks=LARGE),
        pytest.param(2, 33, 4, False, marks=LARGE),
    ],
)
def test_texts_are_those_of_plain_decoding(
    places: int, budget: int, page_size: int, ragged: bool
) -> None:
    """Requests come and go; the rounds, drafts included, are those that the host would have driven."""
    model = model_of()
    drafter, todo = drafter_of(model), requests((5, 4), (2, 1), (9, 2))
    target = target_of(model, places, page_size=page_size)
    heard: dict[int, list[int]] = {i: [] for i in range(len(todo))}
    found = decode(
        target, drafter, todo, budget=budget, ragged=ragged, on_device=True,
        on_news=lambda i, tokens, _: heard[i].extend(tokens),
    )  # fmt: skip
    assert same(found, plain(model, todo))
    assert [tuple(tokens) for tokens in heard.values()] == [one.token_ids for one in found]
    assert max(stats.num_accepted for one in found for stats in one.rounds) > 1
    assert target.num_free_pages * page_size == target.pad_slot
    driven = decode(
        SeparateTargets([HFTarget(model) for _ in range(places)]), drafter, todo, budget=budget
    )
    for one, other in zip(found, driven, strict=True):
        assert [stats.draft_seconds for stats in one.rounds] == [None] * len(one.rounds)
        assert torch.allclose(torch.tensor(one.margins), torch.tensor(other.margins), atol=1e-3)
        assert one.runner_up_ids == other.runner_up_ids
        for a, b in zip(one.rounds, other.rounds, strict=True):
            assert torch.equal(a.tree.token_ids, b.tree.token_ids.cpu())
            assert torch.equal(a.acceptance.nodes, b.acceptance.nodes.cpu())
            assert torch.allclose(a.tree.scores, b.tree.scores.cpu(), atol=1e-3)
            assert a.new_token_ids == b.new_token_ids


def test_a_drafter_on_the_host_and_a_stop_inside_a_path() -> None:
    """Prompt lookup drafts from what was read; what an accepted path holds behind a stop is dropped."""
    model = model_of()
    looped = plain(model, [Request(torch.tensor([8]), 40)])[0].token_ids
    todo = [Request(torch.tensor([8, *looped[:30]]), 10)]
    whole = plain(model, todo)[0].token_ids
    stop = whole[1]  # the first round's first token
    target, drafter = target_of(model, 1), NGramDrafter(VOCAB, 4)
    found = decode(target, drafter, todo, budget=BUDGET, stops=Stops((stop,)), on_device=True)[0]
    assert found.token_ids == whole[: whole.index(stop) + 1]
    assert found.finish_reason == "stop_token"
    assert len(found.rounds[-1].new_token_ids) < found.rounds[-1].num_accepted
    assert all(stats.draft_seconds > 0 for stats in found.rounds)  # type: ignore[operator]


def test_what_a_round_gives_after_a_stop_is_dropped() -> None:
    """The round that was launched ahead too, while the place's next request has begun."""
    model, drafter = model_of(), drafter_of(model_of())
    todo = requests((4, 20), (6, 2))
    whole = [one.token_ids for one in plain(model, todo)]
    stop = next(token for token in whole[0][1:] if token not in whole[1])
    found = decode(
        target_of(model, 1), drafter, todo, budget=BUDGET, stops=Stops((stop,)), on_device=True
    )
    assert found[0].token_ids == whole[0][: whole[0].index(stop) + 1]
    assert found[0].finish_reason == "stop_token"
    assert found[1].token_ids == whole[1]
    assert found[1].finish_reason == "length"


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.9, seed=(2**64 - 1, 3)),
        pytest.param(Sampling(0.9, top_k=5, seed=5), marks=LARGE),
        pytest.param(Sampling(1.0, top_p=0.8, seed=6), marks=LARGE),
    ],
)
def test_samples_repeat_by_seed(sampling: Sampling) -> None:
    """Each request samples with its own seed, whatever place it takes and whoever is beside it."""
    model, todo = model_of(), requests((3, 2), (7, 3))
    expected = []
    for request, seed in zip(todo, sampling.seeds(len(todo)), strict=True):
        own = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed)
        expected += plain(model, [request], sampling=own)
    found = decode(
        target_of(model, 2),
        drafter_of(model),
        todo,
        budget=BUDGET,
        sampling=sampling,
        on_device=True,
    )
    assert same(found, expected)


def test_invariants_hold() -> None:
    """Debug mode finds nothing in the steps of such rounds, with a place unused and with all of them."""
    model, todo = model_of(), requests((3, 3), (4, 6))
    with debug():
        found = decode(target_of(model, 3), drafter_of(model), todo, budget=BUDGET, on_device=True)
    assert same(found, plain(model, todo))


class NoReading(TorchDispatchMode):
    """Stands in for a device that would have to be waited for: what reads a tensor's content raises."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in self.READS, f"a round calls {func}"
        if name in {
            "index",
            "index_put",
            "index_put_",
        }:  # the size of what a mask leaves is not known
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{func} with a mask"
        return func(*args, **(kwargs or {}))


def no_reading() -> NoReading:
    """The guard, typed."""
    return NoReading()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "sampling", [None, pytest.param(Sampling(0.9, top_p=0.9, seed=5), marks=LARGE)]
)
def test_a_step_reads_nothing_from_the_device(sampling: Sampling | None) -> None:
    """No tensor becomes a number anywhere in it, the model and the drafter included."""
    model = model_of()
    rounds, target, _ = begun(model, drafter_of(model), sampling)
    lens = target.prefix_lens.tolist()
    with pytest.raises(AssertionError, match="a round calls"), no_reading():
        int(target.prefix_lens[0])
    with no_reading():
        rounds.step()
    assert all(a > b for a, b in zip(target.prefix_lens.tolist(), lens, strict=True) if b >= 0)


def test_rounds_are_freed_when_the_last_holder_lets_go() -> None:
    """Not when the collector comes: a graph that it frees during another's capture would end that."""
    model = model_of()
    rounds = begun(model, drafter_of(model))[0]
    rounds.step()
    freed = ref(rounds)
    gc.disable()
    try:
        del rounds
        assert freed() is None
    finally:
        gc.enable()


PLACES = {0: 9, 2: 4}
"""Places of three that are held, with their prompts' lengths."""


def begun(
    model: Any,
    drafter: Drafter,
    sampling: Sampling | None = None,
    budget: int = BUDGET,
    *,
    kind: type[DeviceRounds] = DeviceRounds,
    page_size: int = 1,
) -> tuple[DeviceRounds, PagedTarget, dict[int, Held]]:
    """Rounds with requests that have begun; the place between them is unused."""
    target = target_of(model, 3, page_size=page_size)
    target.watch(drafter.target_layer_ids)
    rounds = kind(target, drafter, budget=budget, topk=None, sampling=sampling, ragged=False)
    helds = {}
    for place, length in PLACES.items():
        held = helds[place] = Held(place, Request(prompt(length), 30), sampling)
        logits = target.begin(place, prompt(length), length + 30 + budget - 1)
        held.tokens.append(int(logits.argmax()))
        rounds.begin(place, held)
    return rounds, target, helds


def test_a_request_has_no_rows_past_its_limit() -> None:
    """Rounds that nobody wants leave lengths and roots as they are, and the other request its text.

    What the rounds have left in the drafter's context gives the drafts of the eager drafter.
    """
    model = model_of()
    drafter = drafter_of(model, output_multiplier=0.7, final_logit_softcapping=9.0)
    rounds, target, helds = begun(model, drafter)
    rounds.limits[0] = PLACES[0] + 2  # its third token is its last
    for _ in range(3):
        for place, news in rounds.launch(helds)().items():
            helds[place].tokens += news.token_ids
    assert PLACES[0] + 2 <= int(target.prefix_lens[0]) < PLACES[0] + 2 + BLOCK
    assert len(helds[2].tokens) > 3
    no_limits = torch.full_like(rounds.limits, CONTEXT)
    drafted = rounds.resident.draft(rounds.roots, no_limits)  # type: ignore[union-attr]
    assert torch.equal(drafted.prefix_lens, target.prefix_lens)
    assert torch.equal(drafted.roots, rounds.roots)
    for place, held in helds.items():
        request = Request(prompt(PLACES[place]), len(held.tokens))
        assert list(plain(model, [request])[0].token_ids) == held.tokens
        assert int(target.prefix_lens[place]) == held.prefix_len
        assert int(rounds.roots[place]) == held.tokens[-1]
        expected = eager_drafts(model, drafter, torch.tensor(held.text))
        assert torch.allclose(drafted.logits[place].log_softmax(-1).cpu(), expected, atol=1e-4)
    assert int(target.prefix_lens[1]) == -1


def eager_drafts(model: Any, drafter: DFlashDrafter, text: Tensor) -> Tensor:
    """Log-probs after a text, its context read at once."""
    dense = HFTarget(model)
    dense.reset(drafter.target_layer_ids)
    dense.prefill(text[:-1])
    drafter.reset()
    return drafter.draft(text, dense.features())[0].cpu()


class Late(DeviceRounds):
    """Puts off to a round's end what stands beside it."""

    def step(self) -> Any:
        late: list[Callable[[], Any]] = []
        with pytest.MonkeyPatch.context() as patched:
            for owner, name in (
                (PagedDFlash, "take"), (PagedDFlash, "commit"),
                (device_rounds_module, "keep_accepted"), (device_rounds_module, "pack_record"),
            ):  # fmt: skip
                patched.setattr(owner, name, put_off(getattr(owner, name), late))
            made = super().step()
        _, made.packed, _, _ = (call() for call in late)
        return made


def put_off(function: Callable[..., Any], late: list[Callable[[], Any]]) -> Callable[..., None]:
    """The function, called later."""

    def later(*args: Any) -> None:
        late.append(lambda: function(*args))

    return later


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_runs_beside_a_round_may_run_at_its_end(page_size: int) -> None:
    """Nothing before reads it, or writes what it reads; context and roots are then what they are in order."""
    model = model_of()
    found = []
    for kind in (DeviceRounds, Late):
        # nearly even drafts, so that a tree has every child of the root
        drafter = drafter_of(model, output_multiplier=0.1)
        rounds, target, helds = begun(model, drafter, kind=kind, page_size=page_size)
        told = rounds.launch(helds)()
        pools = rounds.resident._pools  # type: ignore[union-attr]
        kept = [
            pool[target.slot_table[b, : target.prefix_lens[b]]]
            for b in helds for pair in pools for pool in pair
        ]  # fmt: skip
        heard = [(told[b].token_ids, told[b].margins) for b in helds]
        assert max(len(tokens) for tokens, _ in heard) > 1
        found.append((heard, [target.prefix_lens, target.slot_table, rounds.roots, *kept]))
    (heard, state), (late_heard, late_state) = found
    assert heard == late_heard
    for one, other in zip(state, late_state, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("few_rows", [FEW_ROWS, 34])
def test_a_block_of_several_words_sees_itself_and_nothing_more(
    few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """35 rows take two words of ancestor bits; few, or so many that products stand alone."""
    monkeypatch.setattr(fused, "FEW_ROWS", few_rows)
    model = model_of()
    drafter = drafter_of(model, block_size=BlockSize(35))
    target = target_of(model, 1)
    target.watch(drafter.target_layer_ids)
    resident = PagedDFlash(drafter, target)
    text = prompt(12)
    target.begin(0, text[:-1], CONTEXT)
    resident.begin(0, 11)
    no_limits = torch.full_like(target.prefix_lens, CONTEXT)
    drafted = resident.draft(text[-1:].to(DEVICE), no_limits)
    found = drafted.logits[0].log_softmax(-1)
    assert torch.allclose(found.cpu(), eager_drafts(model, drafter, text), atol=1e-4)


def test_what_cannot_be_run_on_the_device_is_said() -> None:
    """With the numbers, before anything is begun."""
    model, todo = model_of(), requests((3, 2))
    target, drafter = target_of(model, 1), drafter_of(model)
    narrow = drafter_of(model, head_dim=16)

    def tried(*args: Any, **options: Any) -> str:
        with pytest.raises(InputError, match="cannot be run on the device: ") as error:
            decode(*args, budget=4, on_device=True, **options)
        return str(error.value)

    dense = SeparateTargets([HFTarget(model)])
    assert "SeparateTargets, not a PagedTarget" in tried(dense, drafter, todo)
    assert "heads that the kernels serve" in tried(target, narrow, todo)
    assert "logits processors" in tried(target, drafter, todo, processors=(lambda _ids, x: x,))
    said = tried(target, drafter, requests((50, 12)))
    assert "takes 65 entries; the target's context holds 64" in said
    assert target.num_free_pages == CONTEXT

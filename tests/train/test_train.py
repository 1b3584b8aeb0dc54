"""Training on tiny models: the parts against independent computations, the run against itself."""

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from ddtree.decoding import DFlashDrafter, HFTarget, autoregressive, generate
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.spec import InputError
from tests.decoding.tiny import VOCAB, tiny_model, write_tiny
from train.__main__ import app, part_of, spoken
from train.acceptance import acceptance, total
from train.batch import Generator, draw
from train.blocks import draft_logits, draft_states, head_loss
from train.card import write_card
from train.data import LOOP, Corpus, Job, cut_loops, write_shards
from train.evaluate import BEFORE_LOOPS, TEMPERATURES, evaluate
from train.fit import CHECKPOINT, LOG, Settings, Trainer
from train.held_out import HeldOut, Prompt
from train.llama import Llama
from train.start import config_for, from_last_layers
from train.weights import write_drafter

STOP = 5
SETTINGS = Settings(
    layers=2, block_size=6, mask_token_id=7, texts=8, anchors=16, rate=3e-3, warmup=10, steps=40
)


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny target, float32."""
    return tiny_model("llama", torch.float32)


@pytest.fixture(scope="module")
def corpus(model: Any) -> Corpus:
    """Its texts, half of them greedy."""
    generator = Generator(Llama(model), rows=8, length=40, stop_ids=(STOP,))
    prompts = [torch.randint(0, VOCAB, (3,), generator=_chance(i)) for i in range(24)]
    texts = generator.generate(prompts, [0.0, 0.8] * 12, seed=0)
    return Corpus(texts.token_ids.int(), texts.prompt_lens, texts.lengths, texts.temperatures)


def _chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _draft_model(model: Any, seed: int = 1) -> DFlashModel:
    """A drafter with random weights, so that no part of it can be left out unseen."""
    config = config_for(model, layers=2, block_size=6, mask_token_id=7)
    drafter = DFlashModel(config)
    torch.manual_seed(seed)
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.ndim == 1 else 0.0, std=0.3)
    return drafter


def _trainer(folder: Path, model: Any, corpus: Corpus, settings: Settings = SETTINGS) -> Trainer:
    config = config_for(model, layers=2, block_size=6, mask_token_id=7)
    start = from_last_layers(config, model, corpus.token_ids[:4].long())
    return Trainer(folder, model, corpus, settings, start)


def _equal(one: DFlashModel, other: DFlashModel) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_sequences_are_read_as_transformers_reads_them(model: Any) -> None:
    """Logits and the hidden states of chosen layers are those of Transformers' forward."""
    llama = Llama(model)
    ids = torch.randint(0, VOCAB, (2, 33), generator=_chance(0))
    states, features = llama.read(ids, (1, 0))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
    assert features is not None
    assert torch.allclose(states @ llama.head.T, expected.logits, atol=1e-4)
    hidden = torch.cat([expected.hidden_states[2], expected.hidden_states[1]], -1)
    assert torch.allclose(features, hidden, atol=1e-5)


def test_batch_generates_what_plain_decoding_generates(model: Any) -> None:
    """Rows at positions of their own, refilled as texts end, give each prompt its greedy text."""
    generator = Generator(Llama(model), rows=3, length=40, stop_ids=(STOP,))
    prompts = [
        torch.randint(0, VOCAB, (n,), generator=_chance(n)) for n in (1, 4, 9, 3, 7, 2, 12, 39)
    ]
    texts = generator.generate(prompts, [0.0] * 8, seed=0)
    ends = set()
    for i, prompt in enumerate(prompts):
        room = 40 - prompt.numel()
        expected = autoregressive(HFTarget(model), prompt, max_new_tokens=room, stop_ids=(STOP,))
        row = texts.token_ids[i, : texts.lengths[i]]
        assert row.tolist() == [*prompt.tolist(), *expected.token_ids]
        ends.add(len(row) == 40)
    assert ends == {True, False}


def test_second_stop_and_limits_end_a_text(model: Any) -> None:
    """A text with two stops goes past the first; new_tokens bounds what follows a prompt."""
    generator = Generator(Llama(model), rows=2, length=60, stop_ids=(STOP,))
    prompts = [torch.randint(0, VOCAB, (4,), generator=_chance(i)) for i in range(30)]
    once = generator.generate(prompts, [0.0] * 30, seed=0)
    twice = generator.generate(prompts, [0.0] * 30, seed=0, stops=[2] * 30)
    longer = twice.lengths > once.lengths
    assert longer.any()
    for row in longer.nonzero()[:, 0]:
        end = once.lengths[row]
        assert once.token_ids[row, end - 1] == STOP
        assert torch.equal(once.token_ids[row, :end], twice.token_ids[row, :end])
    few = generator.generate(prompts, [0.0] * 30, seed=0, new_tokens=3)
    assert (few.lengths - few.prompt_lens).max() == 3
    late = generator.generate(prompts, [0.0] * 30, seed=0, deadline=0.0)
    assert 0 < late.new_tokens < once.new_tokens


def test_drawn_tokens_follow_the_temperature() -> None:
    """Draws have the softmax's frequencies (within five deviations), greedy rows the largest logit."""
    logits = torch.randn(5, generator=_chance(1))
    torch.manual_seed(0)
    count = 40_000
    temperatures = torch.full((count,), 0.7)
    temperatures[0] = 0.0
    drawn = draw(logits.expand(count, 5), temperatures)
    assert drawn[0] == logits.argmax()
    probs = torch.softmax(logits / 0.7, -1)
    shares = drawn.bincount(minlength=5) / count
    assert ((shares - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt()).all()


def test_texts_are_cut_where_they_loop() -> None:
    """A text ends after the first LOOP new tokens in a row that it has had; a prompt may repeat."""
    fresh = torch.arange(100, 200)
    looping = torch.cat([fresh[:30], fresh[:70]])
    texts = torch.stack([fresh, looping, looping, looping])
    prompts, lengths = torch.tensor([3, 0, 30, 0]), torch.tensor([100, 100, 100, 50])
    cut = cut_loops(texts.int(), prompts, lengths)
    assert cut.tolist() == [100, 30 + LOOP, 100, 50]


def test_parts_of_the_work_make_the_same_texts(tmp_path: Path, model: Any) -> None:
    """Two parts together leave the files that one run leaves, byte for byte, each its own alone."""
    jobs = [Job(torch.tensor([1 + i, 2]), 0.8, 1, i == 0) for i in range(10)]

    def write(folder: str, part: tuple[int, int]) -> int:
        return write_shards(
            tmp_path / folder,
            jobs,
            Generator(Llama(model), rows=2, length=8, stop_ids=(STOP,)),
            _Spelled(),
            HeldOut([]),
            seed=3, shard_texts=4, tokens=10**6, settings={}, part=part,
        )  # fmt: skip

    def files(folder: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    whole = write("whole", (0, 1))
    first = write("parts", (0, 2))
    assert sorted(files("parts")) == ["texts-0000.safetensors", "texts-0002.safetensors"]
    assert first + write("parts", (1, 2)) == whole
    assert files("parts") == files("whole")


class _Spelled:
    """A tokenizer that writes numbers."""

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


@pytest.mark.parametrize("wrong", ["", "1", "2/2", "0/0", "-1/2", "1/2/3", "a/b"])
def test_a_part_that_is_none_is_refused(wrong: str) -> None:
    """K/N wants two numbers, the first below the second."""
    assert part_of("1/2") == (1, 2)
    with pytest.raises(typer.BadParameter, match="is no K/N with 0 <= K < N"):
        part_of(wrong)


def test_blocks_equal_the_drafter(model: Any) -> None:
    """Many blocks of many texts at once give what DFlashDrafter gives one block at a time."""
    drafter, llama, target = _draft_model(model), Llama(model), HFTarget(model)
    ids = torch.randint(0, VOCAB, (2, 25), generator=_chance(3))
    anchors = torch.tensor([[3, 7, 15], [1, 24, 10]])
    _, features = llama.read(ids, drafter.config.target_layer_ids)
    assert features is not None
    states = draft_states(drafter, llama.embedding, ids, features, anchors)
    found = torch.log_softmax(draft_logits(drafter, llama.head, states), -1)
    loaded = DFlashDrafter(copy.deepcopy(drafter), target)
    for b, row in enumerate(anchors.tolist()):
        for a, place in enumerate(row):
            target.reset(loaded.target_layer_ids)
            target.prefill(ids[b, :place])
            loaded.reset()
            expected = loaded.draft(ids[b, : place + 1], target.features())
            assert torch.allclose(found[b, a], expected[0], atol=1e-4)


def test_loss_and_gradient_equal_autograd() -> None:
    """The loss is the cross-entropy with the label's distribution, its gradient autograd's."""
    states = torch.randn(9, 32, generator=_chance(0), requires_grad=True)
    head, target = torch.randn(31, 32, generator=_chance(1)), torch.randn(9, 32)
    temperature, weight = torch.tensor([0.0, 0.8, 1.0] * 3), torch.rand(9)
    token = torch.randint(0, 31, (9,), generator=_chance(2))
    found, _, firsts = head_loss(states, head, target, temperature, token, weight)
    found.backward()
    gradient, states.grad = states.grad, None
    logits = states @ head.T
    labels = []
    for i in range(9):
        if temperature[i] == 0:
            labels.append(torch.nn.functional.one_hot(token[i], 31).float())
        else:
            labels.append(torch.softmax(target[i] @ head.T / temperature[i], -1))
    expected = torch.nn.functional.cross_entropy(logits, torch.stack(labels), reduction="none")
    (expected * weight).sum().backward()
    assert torch.allclose(found, (expected * weight).sum())
    assert gradient is not None and states.grad is not None
    assert torch.allclose(gradient, states.grad, atol=1e-6)
    assert torch.equal(firsts, logits.argmax(-1) == token)


def test_training_learns_the_texts(tmp_path: Path, model: Any, corpus: Corpus) -> None:
    """On a few texts the loss falls, and trees accept more."""
    run = _trainer(tmp_path, model, corpus, SETTINGS.__class__(**{**vars(SETTINGS), "steps": 150}))
    before = total(acceptance(run.model, run.llama, corpus, budgets=(16,)))
    while not run.is_done:
        run.train_step()
    after = total(acceptance(run.model, run.llama, corpus, budgets=(16,)))
    entries = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert entries[-1]["loss"] < 0.7 * entries[0]["loss"]
    assert after["tree", 16].length > before["tree", 16].length + 0.3
    assert after["tree", 16].length > after["chain", 16].length
    assert entries[-1]["rate"] < 1e-3 * SETTINGS.rate


def test_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, model: Any, corpus: Corpus
) -> None:
    """Killed after a checkpoint and begun again, a run ends with the same bits and the same log."""
    whole = _trainer(tmp_path / "whole", model, corpus)
    while not whole.is_done:
        whole.train_step()
    killed = _trainer(tmp_path / "killed", model, corpus)
    for _ in range(17):
        killed.train_step()
    killed.save()
    for _ in range(6):  # lost with the kill
        killed.train_step()
    resumed = _trainer(tmp_path / "killed", model, corpus)
    assert resumed.step == 17
    while not resumed.is_done:
        resumed.train_step()
    assert _equal(whole.model, resumed.model)
    logs = [(tmp_path / name / LOG).read_text().splitlines() for name in ("whole", "killed")]
    without_time = [[{**json.loads(line), "seconds": 0} for line in log] for log in logs]
    assert without_time[0] == without_time[1]


def test_other_settings_and_damage_are_refused(tmp_path: Path, model: Any, corpus: Corpus) -> None:
    """A folder's run goes on with its own settings only; a run needs a limit."""
    _trainer(tmp_path, model, corpus).save()
    other = Settings(**{**vars(SETTINGS), "rate": 1e-4})
    with pytest.raises(InputError, match="is of another run: its settings are"):
        _trainer(tmp_path, model, corpus, other)
    (tmp_path / CHECKPOINT).unlink()
    with pytest.raises(InputError, match="a run needs a limit"):
        _trainer(tmp_path, model, corpus, Settings(**{**vars(SETTINGS), "steps": None}))


def test_training_begins_with_a_drafter(tmp_path: Path, model: Any) -> None:
    """`fit --start` goes on with a drafter's weights, under its own layers and block size, and says so."""
    generator = Generator(Llama(model), rows=4, length=40, stop_ids=())
    jobs = [Job(torch.tensor([1 + i, 2]), 0.8, 1, i < 2) for i in range(8)]
    settings = {"length": 40}
    write_shards(
        tmp_path / "a/texts", jobs, generator, _Spelled(), HeldOut([]),
        seed=3, shard_texts=8, tokens=10**6, settings=settings,
    )  # fmt: skip
    shutil.copytree(tmp_path / "a/texts", tmp_path / "b/texts")
    common = [
        "fit",
        "--target",
        str(write_tiny(tmp_path / "target")),
        "--device",
        "cpu",
        "--texts",
        "4",
    ]
    first = ["--out", str(tmp_path / "a"), "--layers", "2", "--block-size", "6", "--steps", "2"]
    made = CliRunner().invoke(app, [*common, *first], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    drafter = tmp_path / "a/drafter"
    assert json.loads((drafter / "training.json").read_text())["start"] == []

    start = ["--start", str(drafter), "--rate", "0"]  # nothing is learned
    second = ["--out", str(tmp_path / "b"), "--steps", "1", *start]
    made = CliRunner().invoke(app, [*common, *second], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    one, other = (
        (folder / "model.safetensors").read_bytes() for folder in (drafter, tmp_path / "b/drafter")
    )
    assert one == other
    noted = json.loads((tmp_path / "b/drafter/training.json").read_text())
    assert noted["start"] == [hashlib.sha256(one).hexdigest()]
    assert noted["config"]["block_size"] == 6 and noted["config"]["num_hidden_layers"] == 2

    with pytest.raises(InputError, match="is where the weights go; begin with a copy"):
        CliRunner().invoke(app, [*common, *first, *start], catch_exceptions=False)


@pytest.mark.parametrize("most_bytes", [2**24, 10_000])
def test_written_weights_give_the_same_drafts(tmp_path: Path, model: Any, most_bytes: int) -> None:
    """A written drafter, in one file or split, loads and drafts as the model it was written from."""
    drafter = _draft_model(model)
    write_drafter(tmp_path, drafter, most_bytes=2_000)  # what it leaves is cleared away
    files = write_drafter(tmp_path, drafter, most_bytes=most_bytes)
    assert sorted(tmp_path.glob("*.safetensors")) == sorted(files)
    assert (
        (len(files) > 1)
        == (most_bytes < 2**24)
        == (tmp_path / "model.safetensors.index.json").exists()
    )
    assert all(path.stat().st_size < most_bytes + 3000 for path in files)  # and its header
    target = HFTarget(model)
    loaded = DFlashDrafter.load(tmp_path, target)
    assert loaded.model.config == drafter.config
    ids = torch.randint(0, VOCAB, (12,), generator=_chance(4))
    target.reset(loaded.target_layer_ids)
    target.prefill(ids[:-1])
    features = target.features()
    rounded = copy.deepcopy(drafter).to(torch.bfloat16).float()
    expected = DFlashDrafter(rounded, target).draft(ids, features)
    assert torch.equal(loaded.draft(ids, features), expected)


def test_split_weights_with_a_file_missing_are_refused(tmp_path: Path, model: Any) -> None:
    """A missing part and a broken index are named."""
    files = write_drafter(tmp_path, _draft_model(model), most_bytes=10_000)
    files[1].unlink()
    with pytest.raises(InputError, match=f"names {files[1].name}; the folder lacks it"):
        DFlashDrafter.load(tmp_path, HFTarget(model))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="cannot read the index of the drafter's weights"):
        DFlashDrafter.load(tmp_path, HFTarget(model))


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_acceptance_on_texts_is_that_of_decoding(model: Any, budget: int) -> None:
    """The rounds read off a greedy text are those of decoding it by draft trees."""
    drafter, llama, target = _draft_model(model, seed=3), Llama(model), HFTarget(model)
    loaded = DFlashDrafter(copy.deepcopy(drafter), target)
    prompts = [torch.randint(0, VOCAB, (n,), generator=_chance(n)) for n in (3, 5, 8)]
    texts = Generator(llama, rows=3, length=90, stop_ids=()).generate(prompts, [0.0] * 3, seed=0)
    corpus = Corpus(texts.token_ids, texts.prompt_lens, texts.lengths, texts.temperatures)
    found = acceptance(drafter, llama, corpus, budgets=(budget, 16))
    for prompt, by_kind in zip(prompts, found, strict=True):
        for kind, topk in (("chain", 1), ("tree", None)):
            made = generate(
                target, loaded, prompt, budget=budget, topk=topk, max_new_tokens=90 - prompt.numel()
            )
            counts, place = [0] * 7, 0
            for one in made.rounds:
                if place < 90 - prompt.numel() - 5:  # a whole horizon follows
                    counts[one.num_accepted] += 1
                place += one.num_accepted
            rounds = by_kind[kind, budget]
            assert [*rounds.counts, *[0] * (7 - len(rounds.counts))] == counts
            assert rounds.rounds > 5


def test_the_card_tells_the_evaluation_that_was_made(tmp_path: Path, model: Any) -> None:
    """Prompts by source, length of answers, a target of another name; and the texts before their loops."""
    drafter, llama = _draft_model(model, seed=3), Llama(model)
    ids = torch.randint(0, VOCAB, (3, 100), generator=_chance(0))
    ids[0, 40:] = ids[0, 20:40].repeat(3)  # a loop of 20, seen after LOOP more
    lens = torch.full((3,), 4), torch.full((3,), 100)
    texts = Corpus(ids.int(), *lens, torch.zeros(3))
    prompts = [Prompt("a", "prose"), Prompt("b", "prose"), Prompt("c", "code")]
    result = evaluate(drafter, llama, dict.fromkeys(TEMPERATURES, texts), prompts)
    whole, before = (
        next(c["rounds"] for c in result["cells"] if c["source"] == source)
        for source in ("all", BEFORE_LOOPS)
    )
    assert 0 < before < whole
    run = {
        "settings": vars(SETTINGS),
        "config": {
            "block_size": 6, "num_hidden_layers": 2, "mask_token_id": 7, "target_layer_ids": [1],
        },
        "data": {
            "texts trained on": 1, "tokens trained on": 1234, "sampled among them": 1234,
            "texts near an evaluation prompt, left out": 0, "settings": {"length": 40},
        },
        "start": [], "parameters": 10, "steps": 3, "epochs": 0.1, "seconds": 1.0, "device": "CPU",
    }  # fmt: skip
    told = {"target": "my-model", "most_new_tokens": 96, "dtype": "float32"}
    card = write_card(tmp_path, run, result | told).read_text()
    assert "on 3 prompts\n(2 prose, 1 code);\nanswers of up to 96 tokens" in card
    assert "# A DFlash drafter for my-model" in card and "SmolLM2" not in card
    assert "1 texts with 1,234 tokens" in card and "*before loops*" in card


def test_start_resembles_the_target(model: Any) -> None:
    """The drafter begins with the target's last layers; its context is the last of the layers read."""
    config = config_for(model, layers=2, block_size=6, mask_token_id=7)
    drafter = from_last_layers(config, model, torch.randint(0, VOCAB, (2, 9), generator=_chance(0)))
    weights, target = drafter.state_dict(), model.model.layers[1].state_dict()
    for name, weight in target.items():
        assert torch.equal(weights[f"layers.0.{name}"], weight)
    features = torch.randn(5, 64, generator=_chance(1))
    assert torch.equal(drafter.fc(features), features[:, 32:])
    assert all((weights[f"layers.{i}.self_attn.q_norm.weight"] != 1).all() for i in range(2))


def test_half_written_logs_are_cut_back(tmp_path: Path, model: Any, corpus: Corpus) -> None:
    """A log that a kill left past its checkpoint, or in mid-line, is cut back to the checkpoint."""
    run = _trainer(tmp_path, model, corpus)
    run.train_step()
    run.save()
    copied = tmp_path / "copied"
    copied.mkdir()
    shutil.copy(tmp_path / CHECKPOINT, copied)
    (copied / LOG).write_text('{"step": 1}\n{"step": 2}\n{"ste')
    again = _trainer(copied, model, corpus)
    assert again.step == 1
    assert (copied / LOG).read_text() == '{"step": 1}\n'
    state: dict[str, Tensor] = again.optimizer.state[again.model.fc.weight]
    assert torch.equal(state["exp_avg"], run.optimizer.state[run.model.fc.weight]["exp_avg"])


def test_acceptance_in_a_line() -> None:
    """Also where there was no text to watch."""
    assert (
        spoken({"greedy": {"tree 32": 3.5, "chain 16": 2.0}})
        == "greedy: tree 32 3.50, chain 16 2.00"
    )
    assert spoken({}) == "no texts to watch"

"""Training on a GPU against the CPU: generation in a captured graph, trees by kernels, a compiled step."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.decoding.tiny import tiny_model
from train.acceptance import acceptance, total
from train.batch import Generator, Texts
from train.data import Corpus
from train.fit import LOG, Settings, Trainer
from train.llama import Llama
from train.start import config_for, from_last_layers

# a compiler's advice, such as to use TF32, is no fault of the code
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]


def _texts(model: Any, temperature: float, seed: int) -> Texts:
    prompts = [torch.arange(1 + i % 7) + i % 20 for i in range(40)]
    generator = Generator(Llama(model), rows=8, length=50, stop_ids=(5,))
    return generator.generate(prompts, [temperature] * 40, seed=seed)


def test_graph_generates_what_the_cpu_generates() -> None:
    """Greedy texts of the captured step are the CPU's; a seed repeats sampled texts, another does not."""
    model = tiny_model("llama", torch.float64)
    expected = _texts(model, 0.0, 0)
    device = model.to("cuda")
    found = _texts(device, 0.0, 1)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.lengths, expected.lengths)
    sampled = [_texts(device, 0.8, seed).token_ids for seed in (3, 3, 4)]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])


def test_acceptance_and_steps_are_the_cpus(tmp_path: Path) -> None:
    """Rounds read off by the kernels are the reference's; compiled steps come near the CPU's losses."""
    model = tiny_model("llama", torch.float32)
    texts = _texts(model, 0.8, 0)
    corpus = Corpus(texts.token_ids, texts.prompt_lens, texts.lengths, texts.temperatures)
    config = config_for(model, layers=2, block_size=6, mask_token_id=7)
    start = from_last_layers(config, model, corpus.token_ids[:4])
    settings = Settings(layers=2, block_size=6, mask_token_id=7, texts=8, anchors=16, steps=30)
    kinds = (("cpu", "none"), ("cuda", "none"), ("cuda", "loss"), ("cuda", "all"))
    lengths, losses, moves = list[float](), list[float](), list[torch.Tensor]()
    for device, compiled in kinds:
        folder = tmp_path / f"{device}-{compiled}"
        model, here = model.to(device), corpus.to(torch.device(device))
        mine = copy.deepcopy(start).to(device)
        rounds = total(acceptance(mine, Llama(model), here, budgets=(1, 16)))
        lengths.append(rounds["tree", 16].length)
        run = Trainer(folder, model, here, settings, mine, compile=compiled)
        run.train_step()
        moves.append((run.model.fc.weight.detach().cpu() - start.fc.weight).sign())
        losses.append(json.loads((folder / LOG).read_text())["loss"])
        while not run.is_done:
            run.train_step()
        run.save()
        again = Trainer(folder, model, here, settings, copy.deepcopy(start).to(device))
        assert again.step == settings.steps
        assert torch.equal(again.model.fc.weight, run.model.fc.weight)
    assert lengths[0] > 1.1
    for length, loss, move in zip(lengths[1:], losses[1:], moves[1:], strict=True):
        assert length == pytest.approx(lengths[0], abs=0.05)  # ties of float32 may fall either way
        assert loss == pytest.approx(losses[0], rel=0.02)  # bf16 products
        # AdamW's first step has the sign of the gradient
        assert (move == moves[0]).float().mean() > 0.95

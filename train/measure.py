"""How fast this machine generates and trains at the real sizes, on random weights (no model file)."""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from train.batch import Generator
from train.data import Corpus
from train.fit import Settings, Trainer
from train.llama import Llama
from train.start import config_for, from_last_layers

SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""SmolLM2-135M's."""
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip


def measure(
    device: str,
    *,
    small: bool,
    rows: int,
    length: int,
    say: Callable[[str], None],
    on_figure: Callable[[dict[str, Any]], None],
) -> None:
    """Tokens a second of generation, and seconds of a training step by what is compiled.

    Args:
        device: where.
        small: on a tiny model, to see that it runs.
        rows: of the generator.
        length: of the texts.
        say: told each figure as it comes.
        on_figure: given all figures so far, each time that there is one more.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = SIZES | (SMALL if small else {})
    with torch.device(device):
        target: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    target = target.to(torch.bfloat16 if device.startswith("cuda") else torch.float32).eval()
    vocab = sizes["vocab_size"]
    found: dict[str, Any] = {"rows": rows, "length": length, "steps_s": {}}

    llama = Llama(target)
    generator = Generator(llama, rows=rows, length=length, stop_ids=())
    prompts = [torch.randint(vocab, (length // 2,)) for _ in range(rows)]
    for _ in range(2):  # the first run loads what is lazy
        begin = time.monotonic()
        texts = generator.generate(prompts, [0.8] * rows, seed=0, new_tokens=length // 4)
        steps = length * 3 // 4
    found["generated_a_second"] = round(rows * steps / (time.monotonic() - begin))
    say(f"generation: {found['generated_a_second']:,} tokens a second, prompts' included")
    on_figure(found)
    del generator

    corpus = Corpus(texts.token_ids.int(), texts.prompt_lens, texts.lengths, texts.temperatures)
    for compiled in ("none", "loss", "all"):
        if compiled != "none" and not device.startswith("cuda"):
            continue
        found["steps_s"][compiled] = _train(target, corpus, compiled, say)
        on_figure(found)


def _train(
    target: Any, corpus: Corpus, compiled: str, say: Callable[[str], None]
) -> dict[str, float] | str:
    settings = Settings(steps=10_000)
    config = config_for(
        target, layers=min(settings.layers, target.config.num_hidden_layers),
        block_size=settings.block_size, mask_token_id=settings.mask_token_id,
    )  # fmt: skip
    corpus = corpus.to(target.device)
    with TemporaryDirectory() as folder:
        model = from_last_layers(config, target, corpus.token_ids[:8].long())
        run = Trainer(Path(folder), target, corpus, settings, model, compile=compiled)
        times = []
        count = 12 if target.device.type == "cuda" else 2
        try:
            for _ in range(count):
                begin = time.monotonic()
                run.train_step()
                if target.device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.monotonic() - begin)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the finding
            say(f"compile {compiled}: failed, {type(error).__name__}: {str(error)[:300]}")
            return f"failed: {type(error).__name__}"
    found = {
        "first": round(times[0], 3),
        "median": round(sorted(times[1:])[len(times) // 2 - 1], 4),
    }
    if target.device.type == "cuda":
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        torch.cuda.reset_peak_memory_stats()
    say(f"compile {compiled}: {found}")
    return found

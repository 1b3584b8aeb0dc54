"""Evaluation: acceptance length on prompts that never enter training, by tree, budget and temperature."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from safetensors import safe_open

mpl.use("Agg")
import matplotlib.pyplot as plt

from ddtree.decoding.acceptance import Rounds
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.invariants.files import written_whole
from ddtree.spec.errors import InputError
from train.acceptance import BUDGETS, Kind, drafted, total
from train.batch import Generator
from train.data import Corpus, cut_loops
from train.files import write_json, write_tensors
from train.held_out import Prompt
from train.llama import Llama
from train.prompts import encode

TEMPERATURES = (0.0, 0.8)
RESULT, PICTURE = "evaluation.json", "evaluation.png"
BEFORE_LOOPS = "all, before loops"
"""The texts up to where training would have cut them: loops are easily drafted."""


def evaluation_texts(
    path: Path,
    prompts: list[Prompt],
    tokenizer: Any,
    llama: Llama,
    stop_ids: tuple[int, ...],
    *,
    temperature: float,
    new_tokens: int,
    rows: int,
    seed: int,
    on_look: Callable[[int, int], None] = lambda _done, _tokens: None,
) -> Corpus:
    """What the target answers to every prompt; made once and kept in ``path``.

    Raises:
        InputError: the file is of other settings.
    """
    settings = {
        "prompts": [prompt.text for prompt in prompts],
        "temperature": temperature,
        "new_tokens": new_tokens,
        "rows": rows,
        "seed": seed,
        "dtype": str(llama.dtype),
    }
    if not path.exists():
        encoded = [encode(tokenizer, prompt) for prompt in prompts]
        length = max(ids.numel() for ids in encoded) + new_tokens
        generator = Generator(llama, rows=rows, length=length, stop_ids=stop_ids)
        texts = generator.generate(
            encoded,
            [temperature] * len(prompts),
            seed=seed,
            new_tokens=new_tokens,
            on_look=on_look,
        )
        tensors = {name: getattr(texts, name) for name in Corpus.__dataclass_fields__}
        write_tensors(path, tensors, {"settings": json.dumps(settings)})
    with safe_open(path, "pt") as file:
        if json.loads(file.metadata()["settings"]) != settings:
            raise InputError(f"{path} holds texts of other settings; name another folder")
        corpus = Corpus(*(file.get_tensor(name) for name in Corpus.__dataclass_fields__))
    return corpus.to(llama.device)


def evaluate(
    drafter: DFlashModel,
    llama: Llama,
    corpora: dict[float, Corpus],
    prompts: list[Prompt],
    *,
    on_text: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Acceptance of each kind of tree on texts of each temperature: in all, before loops, by source.

    Args:
        drafter: in the target's dtype, on its device.
        llama: the target.
        corpora: by temperature, a text for each prompt.
        prompts: whose texts these are.
        on_text: told of each text.
    """
    cells = []
    for temperature, corpus in corpora.items():
        ends = cut_loops(*(t.cpu() for t in (corpus.token_ids, corpus.prompt_lens, corpus.lengths)))
        found, before = [], []
        for text, end in zip(drafted(drafter, llama, corpus), ends.tolist(), strict=True):
            found.append(text.rounds())
            before.append(text.rounds(end=end))
            on_text()
        cells += [
            _cell(BEFORE_LOOPS, len(before), temperature, kind, rounds)
            for kind, rounds in total(before).items()
        ]
        sources = ["all", *dict.fromkeys(prompt.source for prompt in prompts)]
        for source in sources:
            chosen = [
                f
                for f, prompt in zip(found, prompts, strict=True)
                if source in {"all", prompt.source}
            ]
            cells += [
                _cell(source, len(chosen), temperature, kind, rounds)
                for kind, rounds in total(chosen).items()
            ]
    return {
        "what": "acceptance length: tokens that a round of draft-tree decoding yields, bonus included",
        "prompts": len(prompts),
        "new_tokens": {str(t): int((c.lengths - c.prompt_lens).sum()) for t, c in corpora.items()},
        "block_size": int(drafter.config.block_size),
        "cells": cells,
    }


def _cell(
    source: str, prompts: int, temperature: float, kind: Kind, rounds: Rounds
) -> dict[str, Any]:
    return {
        "source": source,
        "prompts": prompts,
        "temperature": temperature,
        "kind": kind[0],
        "budget": kind[1],
        "rounds": rounds.rounds,
        "acceptance_length": round(rounds.length, 4) if rounds.rounds else None,
        "counts": rounds.counts,
    }


def length_of(
    result: dict[str, Any], kind: str, budget: int, temperature: float, source: str = "all"
) -> float | None:
    """One acceptance length of a result; None where there were no rounds."""
    wanted = {"kind": kind, "budget": budget, "temperature": temperature, "source": source}
    for cell in result["cells"]:
        if wanted.items() <= cell.items():
            length: float | None = cell["acceptance_length"]
            return length
    raise InputError(f"the evaluation has no cell {wanted}")


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write the numbers and their picture."""
    write_json(folder / RESULT, result)
    draw(result, folder / PICTURE)


def draw(result: dict[str, Any], path: Path) -> None:
    """Left the acceptance length by budget, right the share of rounds that accept at least so many."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for temperature, color in zip(TEMPERATURES, ("tab:blue", "tab:orange"), strict=True):
        for kind, style in (("tree", "o-"), ("chain", "s--")):
            lengths = [length_of(result, kind, budget, temperature) for budget in BUDGETS]
            label = f"{kind}, temperature {temperature:g}"
            values = [float("nan") if y is None else y for y in lengths]
            left.plot(BUDGETS, values, style, color=color, label=label, markersize=4)
        for budget, style in ((32, "o-"), (256, "^:")):
            wanted = {"source": "all", "kind": "tree", "budget": budget, "temperature": temperature}
            counts = next(c["counts"] for c in result["cells"] if wanted.items() <= c.items())
            reached = [sum(counts[n + 1 :]) / max(sum(counts), 1) for n in range(1, len(counts))]
            right.plot(
                range(1, len(counts)),
                reached,
                style,
                color=color,
                label=f"budget {budget}, temperature {temperature:g}",
                markersize=4,
            )
    left.set_xscale("log", base=2)
    left.set_xticks(BUDGETS, [str(b) for b in BUDGETS])
    left.set(xlabel="budget", ylabel="tokens a round", title="Acceptance length")
    right.set(xlabel="drafted tokens", ylabel="share of rounds", title="Rounds that accept so many")
    right.set_ylim(0, 1)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    with written_whole(path) as work:
        figure.savefig(work, dpi=130, format="png")
    plt.close(figure)


def table(result: dict[str, Any], temperature: float) -> list[str]:
    """Acceptance lengths as a Markdown table, a row for each source."""
    sources = list(dict.fromkeys(cell["source"] for cell in result["cells"]))
    columns = [("chain", 16), *(("tree", budget) for budget in BUDGETS)]
    head = "| prompts | " + " | ".join(f"{kind} {budget}" for kind, budget in columns) + " |"
    lines = [head, "|---|" + "---|" * len(columns)]
    for source in sources:
        values = [length_of(result, kind, budget, temperature, source) for kind, budget in columns]
        cells = ["" if v is None else f"{v:.2f}" for v in values]
        lines.append(f"| {source} | " + " | ".join(cells) + " |")
    return lines


def torch_dtype(name: str) -> torch.dtype:
    """float32 or bfloat16, by name."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise InputError(f"dtype {name!r}; there are {', '.join(dtypes)}")
    return dtypes[name]

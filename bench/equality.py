"""Equality: draft-tree text against plain decoding, prompt by prompt, budget by budget.

Every prompt of tests/data (50, none of which enters the training of a drafter) is decoded one token a pass,
then by trees of every budget and topk, alone and in batches whose places are taken again, and compared
token for token; where the two differ, the margins say whether the logits tied. Exit code 1 if anything
differs by more than a tie below float error.

    python bench/equality.py                                    the embedded model on the CPU
    python bench/equality.py --draft FOLDER                     with a DFlash checkpoint
    python bench/equality.py --device cuda --model-folder DIR   a Transformers folder on a GPU
    python bench/equality.py --shard 0/4 --out part-0.json      every fourth prompt, for a process of its own
    python bench/equality.py --join part-*.json --out all.json  the shards' results as one

The result is written after every cell, so a run that was cut short goes on where it stopped.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from ddtree.decoding import (
    TIE_TOLERANCE,
    BatchTarget,
    Choices,
    Drafter,
    Generation,
    HFTarget,
    NGramDrafter,
    Request,
    SeparateTargets,
    Stops,
    autoregressive,
    compare,
    decode,
    load_target,
    stop_ids_of,
)
from ddtree.decoding.completion import batch_target, drafter_of
from ddtree.decoding.tuning_results import processor
from ddtree.invariants.files import written_whole

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ("tests/data/prompts.json", "tests/data/more_prompts.json")
BUDGETS = (0, 7, 16, 32, 128)
BATCHES = (1, 8)
ALL = "all"
Cell = tuple[int, str, int]
"""Budget, topk, batch size."""


def main() -> None:
    """Run the cells that are not in the result file yet."""
    args = arguments()
    if args.join:
        join(args.join, args.out)
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model, tokenizer = load_target(args.model_folder, device=args.device)
    run = Run(model, args)
    shard, shards = (int(part) for part in args.shard.split("/"))
    prompts = prompts_of_tests()[: args.prompts][shard::shards]
    out = args.out or ROOT / f"bench/results/equality-{args.device}.json"
    result = resume(out, settings_of(args), run.plain)
    cells = [
        (n, topk, batch) for batch in args.batches for n in args.budgets for topk in args.topks
    ]
    start = time.monotonic()
    columns = (*Progress.get_default_columns()[:1], BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("cells", total=len(prompts) * len(cells))
        save = save_to(out, result, progress, task)
        size = 2 * max(args.batches)  # so that every place of a batch is taken twice
        for group in (prompts[i : i + size] for i in range(0, len(prompts), size)):
            entries = [result["prompts"].setdefault(p["id"], {"cells": {}}) for p in group]
            done = sum(key_of(*cell) in entry["cells"] for entry in entries for cell in cells)
            progress.advance(task, done)
            run.group([encode(tokenizer, prompt) for prompt in group], entries, cells, save)
            if args.seconds and time.monotonic() - start > args.seconds:
                break
    print(json.dumps(result["summary"], indent=1))
    if result["summary"]["different"]:
        raise SystemExit(1)


class Run:
    """The target decoded plainly, and by trees in batches of each size."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.tokens: int = args.tokens
        self.stops = Stops(stop_ids_of(model))
        self.plain = HFTarget(model)
        self.targets: dict[int, BatchTarget] = {}
        for batch in args.batches:
            if args.attention == "reference":
                each = [HFTarget(model, attention="reference") for _ in range(batch)]
                self.targets[batch] = SeparateTargets(each)
            else:
                size = 512 + args.tokens + max(args.budgets)
                self.targets[batch], _ = batch_target(model, batch, args.attention, size)
        self.drafter: Drafter = (
            NGramDrafter(self.plain.vocab_size, args.block_size)
            if args.draft == "ngram"
            else drafter_of(args.draft, self.plain)
        )

    def group(
        self, prompts: list[torch.Tensor], entries: list[Any], cells: list[Cell], save: Any
    ) -> None:
        """The plain text of each prompt once, then the cells that are left, batch by batch."""
        for prompt_ids, entry in zip(prompts, entries, strict=True):
            if "plain" not in entry:
                begin = time.perf_counter()
                plain = autoregressive(
                    self.plain, prompt_ids, max_new_tokens=self.tokens, stop_ids=self.stops
                )
                entry["plain"] = {
                    "token_ids": plain.token_ids,
                    "margins": plain.margins,
                    "runner_up_ids": plain.runner_up_ids,
                    "seconds": round(time.perf_counter() - begin, 3),
                }
        for budget, topk, batch in cells:
            key = key_of(budget, topk, batch)
            left = [i for i, entry in enumerate(entries) if key not in entry["cells"]]
            for some in [left] if batch > 1 else [[i] for i in left]:
                if not some:
                    continue
                begin = time.perf_counter()
                found = decode(
                    self.targets[batch],
                    self.drafter,
                    [Request(prompts[i], self.tokens) for i in some],
                    budget=budget,
                    topk=None if topk == ALL else int(topk),
                    stops=self.stops,
                )
                seconds = (time.perf_counter() - begin) / len(some)
                for i, one in zip(some, found, strict=True):
                    cell = cell_of(one, entries[i]["plain"], self.plain.dtype, seconds)
                    entries[i]["cells"][key] = cell
                save(len(some))


def cell_of(
    found: Generation, recorded: dict[str, Any], dtype: torch.dtype, seconds: float
) -> dict[str, Any]:
    """What one cell showed; ``seconds`` are a prompt's share of its batch."""
    plain = Choices(*(tuple(recorded[k]) for k in ("token_ids", "margins", "runner_up_ids")))
    verdict = compare(found, plain, dtype)
    same = len(found.token_ids) if verdict.index is None else verdict.index
    apart = [abs(a - b) for a, b in zip(found.margins[:same], plain.margins[:same], strict=True)]
    cell: dict[str, Any] = {
        "verdict": "equal" if verdict.equal else "tie" if verdict.is_tie else "different",
        "tokens": len(found.token_ids),
        "rounds": len(found.rounds),
        "most_accepted": max((r.num_accepted for r in found.rounds), default=0),
        "most_nodes": max((r.num_nodes for r in found.rounds), default=0),
        "margins_apart_at_most": max(apart, default=0.0),
        "seconds": round(seconds, 3),
    }
    if not verdict.equal:
        cell["first_difference"] = {
            "index": verdict.index,
            "plain": {"token_id": verdict.expected_id, "margin": verdict.expected_margin},
            "tree": {"token_id": verdict.found_id, "margin": verdict.found_margin},
        }
    return cell


def summary_of(result: dict[str, Any]) -> dict[str, Any]:
    """Counts over all cells, and every cell that is not equal."""
    cells = {
        f"{prompt} {key}": cell
        for prompt, entry in result["prompts"].items()
        for key, cell in entry["cells"].items()
    }
    plain = [entry["plain"] for entry in result["prompts"].values() if "plain" in entry]
    verdicts = [cell["verdict"] for cell in cells.values()]
    return {
        "prompts": len(plain),
        "cells": len(cells),
        **{verdict: verdicts.count(verdict) for verdict in ("equal", "tie", "different")},
        "tokens_compared": sum(cell["tokens"] for cell in cells.values()),
        "rounds": sum(cell["rounds"] for cell in cells.values()),
        "smallest_margin": min((m for p in plain for m in p["margins"]), default=None),
        "margins_apart_at_most": max(
            (cell["margins_apart_at_most"] for cell in cells.values()), default=0.0
        ),
        "not_equal": {
            name: cell["first_difference"]
            for name, cell in cells.items()
            if "first_difference" in cell
        },
    }


def prompts_of_tests() -> list[dict[str, Any]]:
    """All 50 prompts."""
    return [prompt for path in PROMPTS for prompt in json.loads((ROOT / path).read_text("utf-8"))]


def encode(tokenizer: Any, prompt: dict[str, Any]) -> torch.Tensor:
    """A prompt's tokens ``[n]``, in the chat template where it asks for it."""
    text = prompt["text"]
    if prompt.get("chat"):
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return torch.tensor(tokenizer(text).input_ids)


def key_of(budget: int, topk: str, batch: int) -> str:
    """Name of a cell."""
    return f"budget {budget}, topk {topk}" + (f", batch {batch}" if batch > 1 else "")


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What makes two runs comparable."""
    ngram = f"n-gram, block size {args.block_size}"
    return {
        "dtype": "float32, TF32 off",
        "max_new_tokens": args.tokens,
        "drafter": ngram if args.draft == "ngram" else f"DFlash, {Path(args.draft).name}",
        "attention": args.attention,
        "budgets": args.budgets,
        "topks": args.topks,
        "batches": args.batches,
    }


def machine_of(device: str) -> dict[str, Any]:
    """The machine's kind and the versions."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def resume(out: Path, settings: dict[str, Any], target: HFTarget) -> dict[str, Any]:
    """The result so far; a result of other settings is refused, not overwritten."""
    settings = json.loads(json.dumps(settings))
    if out.exists():
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if result["settings"] != settings:
            raise SystemExit(
                f"{out} holds a run of other settings: {result['settings']}; name another --out"
            )
        return result
    return {
        "what": "draft-tree decoding against plain decoding, token for token",
        "machine": machine_of(target.device.type),
        "settings": settings,
        "tie_tolerance": TIE_TOLERANCE[target.dtype],
        "summary": {},
        "prompts": {},
    }


def join(parts: list[Path], out: Path | None) -> None:
    """Write the shards' results as one; they must be of the same settings and machine."""
    results = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    whole = results[0]
    for part, result in zip(parts, results, strict=True):
        for key in ("settings", "machine"):
            if result[key] != whole[key]:
                raise SystemExit(f"{part} holds another {key}: {result[key]}, not {whole[key]}")
        whole["prompts"].update(result["prompts"])
    whole["summary"] = summary_of(whole)
    if out is None:
        raise SystemExit("--join needs --out, the file to write")
    out.write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    print(json.dumps(whole["summary"], indent=1))


def save_to(out: Path, result: dict[str, Any], progress: Progress, task: Any) -> Any:
    """A function that writes the result whole and moves the bar."""

    def save(cells: int) -> None:
        result["summary"] = summary_of(result)
        out.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(out) as work:
            work.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
        progress.advance(task, cells)

    return save


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument(
        "--model-folder", default="embedded", help="a Transformers folder or .gguf file"
    )
    parser.add_argument("--draft", default="ngram", help="ngram, or a DFlash checkpoint")
    parser.add_argument(
        "--attention", default="auto", choices=("auto", "dense", "reference", "paged"),
        help="auto: the kernels on a paged pool on a GPU, Transformers' own on a CPU",
    )  # fmt: skip
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--topks", nargs="+", default=[ALL], help="numbers, or all")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--block-size", type=int, default=16, help="of the n-gram drafter")
    parser.add_argument("--prompts", type=int, default=None, help="the first so many prompts only")
    parser.add_argument("--shard", default="0/1", metavar="K/N", help="every Nth prompt from K on")
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="PART", help="results to put together"
    )
    parser.add_argument(
        "--seconds", type=float, default=None, help="begin no group of prompts after so long"
    )
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Equality: draft-tree text against plain decoding, prompt by prompt, budget by budget.

Every prompt of tests/data/prompts.json is decoded one token a pass, then by trees of every budget and
topk, and compared token for token; where the two differ, the margins say whether the logits tied.

    python bench/equality.py                                    the embedded model on the CPU
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
    Choices,
    Generation,
    HFTarget,
    NGramDrafter,
    autoregressive,
    compare,
    generate,
    load_target,
    stop_ids_of,
)

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "tests/data/prompts.json"
BUDGETS = (0, 1, 7, 16, 17, 63, 256)
TOPKS = (1, 4, None)


def main() -> None:
    """Run the cells that are not in the result file yet."""
    args = arguments()
    if args.join:
        join(args.join, args.out)
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model, tokenizer = load_target(args.model_folder, device=args.device)
    target = HFTarget(model, attention=args.attention)
    shard, shards = (int(part) for part in args.shard.split("/"))
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))[: args.prompts][shard::shards]
    out = args.out or ROOT / f"bench/results/equality-{args.device}.json"
    result = resume(out, settings_of(args), target)
    cells = [(budget, topk) for budget in BUDGETS for topk in TOPKS]
    start = time.monotonic()
    columns = (*Progress.get_default_columns()[:1], BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("cells", total=len(prompts) * len(cells))
        for prompt in prompts:
            entry = result["prompts"].setdefault(prompt["id"], {"cells": {}})
            todo = [c for c in cells if key_of(*c) not in entry["cells"]]
            progress.advance(task, len(cells) - len(todo))
            if todo:
                run_prompt(
                    target,
                    encode(tokenizer, prompt),
                    entry,
                    todo,
                    args,
                    save_to(out, result, progress, task),
                )
            if args.seconds and time.monotonic() - start > args.seconds:
                break
    print(json.dumps(result["summary"], indent=1))


def run_prompt(
    target: HFTarget,
    prompt_ids: torch.Tensor,
    entry: dict[str, Any],
    todo: list[Any],
    args: Any,
    save: Any,
) -> None:
    """One prompt: a prefill, the plain text once, then the cells that are left."""
    target.reset()
    logits = target.prefill(prompt_ids)
    common = {
        "max_new_tokens": args.tokens,
        "stop_ids": stop_ids_of(target.model),
        "prompt_logits": logits,
    }
    if "plain" not in entry:
        begin = time.perf_counter()
        plain = autoregressive(target, prompt_ids, **common)
        entry["plain"] = {
            "token_ids": plain.token_ids,
            "margins": plain.margins,
            "runner_up_ids": plain.runner_up_ids,
            "seconds": round(time.perf_counter() - begin, 3),
        }
    plain = Choices(*(tuple(entry["plain"][k]) for k in ("token_ids", "margins", "runner_up_ids")))
    drafter = NGramDrafter(target.vocab_size, args.block_size)
    for budget, topk in todo:
        begin = time.perf_counter()
        found = generate(target, drafter, prompt_ids, budget=budget, topk=topk, **common)
        seconds = time.perf_counter() - begin
        entry["cells"][key_of(budget, topk)] = cell_of(found, plain, target, seconds)
        save()


def cell_of(found: Generation, plain: Choices, target: HFTarget, seconds: float) -> dict[str, Any]:
    """What one cell showed."""
    verdict = compare(found, plain, target.dtype)
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


def encode(tokenizer: Any, prompt: dict[str, Any]) -> torch.Tensor:
    """A prompt's tokens ``[n]``, in the chat template where it asks for it."""
    text = prompt["text"]
    if prompt.get("chat"):
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return torch.tensor(tokenizer(text).input_ids)


def key_of(budget: int, topk: int | None) -> str:
    """Name of a cell."""
    return f"budget {budget}, topk {topk or 'all'}"


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What makes two runs comparable."""
    return {
        "dtype": "float32, TF32 off",
        "max_new_tokens": args.tokens,
        "drafter": f"n-gram, block size {args.block_size}",
        "attention": args.attention,
        "budgets": BUDGETS,
        "topks": [k or "all" for k in TOPKS],
    }


def machine_of(device: str) -> dict[str, Any]:
    """The machine's kind and the versions."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
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

    def save() -> None:
        result["summary"] = summary_of(result)
        out.parent.mkdir(parents=True, exist_ok=True)
        work = out.with_suffix(".tmp")
        work.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
        work.replace(out)
        progress.advance(task)

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
    parser.add_argument("--attention", default="dense", choices=("dense", "reference"))
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=None, help="the first so many prompts only")
    parser.add_argument("--shard", default="0/1", metavar="K/N", help="every Nth prompt from K on")
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="PART", help="results to put together"
    )
    parser.add_argument("--seconds", type=float, default=None, help="begin no prompt after so long")
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Below float32 draft-tree text need not be plain decoding's; that it is the verifier's own is checked here.

A logit depends on how many rows its pass has, by up to 0.75 in bf16 on the embedded target: more than many
margins. So what holds exactly is this: **every emitted token is the argmax (ties to the smaller id) of the
logits at its parent in the verify pass that emitted it**, and the first that of the prompt's pass. A second
pass checks it without the drafter and without our acceptance: all calls that the decoding made of its target
are recorded and made again on a fresh target, same trees, same layouts, same masks, same commits, so the same
shapes on the same prefixes; each emitted token must be the argmax of the new logits. Where kernels are
deterministic, the logits are the same to the bit, which is counted too.

Beside it, not exact: each text is read in one causal pass of the model, no tree; how many of its tokens are
the argmax there too, and how far the others' logits fall short, which must be less than counts as a tie.

    python bench/second_pass.py                                   the embedded model in bf16 on the CPU
    python bench/second_pass.py --device cuda --draft FOLDER      with a DFlash checkpoint on a GPU

The result is written after every cell of budget and batch size; a run that was cut short goes on there.
Exit code 1 if a token fails.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.equality import encode, machine_of, prompts_of_tests  # noqa: E402
from ddtree.decoding import (  # noqa: E402
    TIE_TOLERANCE,
    BatchTarget,
    HFTarget,
    Request,
    Stops,
    decode,
    load_target,
    stop_ids_of,
)
from ddtree.decoding.completion import batch_target, drafter_of  # noqa: E402
from ddtree.invariants.files import written_whole  # noqa: E402
from ddtree.spec.contracts import Acceptance, DraftTree  # noqa: E402
from ddtree.spec.sampling import first_argmax  # noqa: E402

BUDGETS = (7, 32, 128)
BATCHES = (1, 8)


class Recorder:
    """A target that notes every call made of it, with the likeliest token of each row and its logit."""

    def __init__(self, target: BatchTarget) -> None:
        self.target = target
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.found: list[Any] = []
        """What each call gave; of logits the argmax and the largest of each row."""

    def __getattr__(self, name: str) -> Any:
        """What is not noted."""
        return getattr(self.target, name)

    def begin(self, place: int, token_ids: Tensor, reserve: int) -> Tensor:
        """A prompt."""
        logits: Tensor = self._noted("begin", place, token_ids, reserve)
        return logits

    def line_up(self, places: Sequence[int]) -> Sequence[int]:
        """The order of a round."""
        order: Sequence[int] = self._noted("line_up", tuple(places))
        return order

    def forward(self, *call: Any) -> Tensor:
        """A verify pass."""
        logits: Tensor = self._noted("forward", *call)
        return logits

    def commit(self, *call: Any) -> Any:
        """Its commit."""
        return self._noted("commit", *call)

    def rewind(self, place: int, prefix_len: int) -> None:
        """Never asked for here."""
        self._noted("rewind", place, prefix_len)

    def free(self, place: int) -> None:
        """The end of a request."""
        self._noted("free", place)

    def again(self, calls: Sequence[tuple[str, tuple[Any, ...]]], told: Any) -> None:
        """Make another's calls."""
        for name, call in calls:
            self._noted(name, *call)
            told()

    def _noted(self, name: str, *call: Any) -> Any:
        made = getattr(self.target, name)(*call)
        self.calls.append((name, call))
        if name in {"begin", "forward"}:
            rows = made[None] if name == "begin" else made[: int(call[1].qo_indptr[-1])]
            self.found.append((first_argmax(rows).cpu(), rows.float().amax(1).cpu()))
        else:
            self.found.append(made)
        return made


def emitted(recorder: Recorder) -> list[tuple[int, list[int], list[int], list[float]]]:
    """What the calls emitted: (request, tokens, argmax where each was chosen, its logit), call by call."""
    held: dict[int, int] = {}
    order: Sequence[int] = ()
    begun, out = 0, []
    rows: Any = None
    for (name, call), found in zip(recorder.calls, recorder.found, strict=True):
        if name == "begin":
            held[call[0]] = begun
            out.append((begun, [int(found[0][0])], found[0].tolist(), found[1].tolist()))
            begun += 1
        elif name == "line_up":
            order = found
        elif name == "free":
            del held[call[0]]
        elif name == "forward":
            rows = (call[0], call[1], found)
        elif name == "commit":
            tree, layout, (best, logit) = rows
            out += [
                (held[place], *_of_request(tree, layout, call[1], b, best, logit))
                for b, place in enumerate(order)
                if place in held
            ]
    return out


def _of_request(
    tree: DraftTree, layout: Any, acceptance: Acceptance, b: int, best: Tensor, logit: Tensor
) -> tuple[list[int], list[int], list[float]]:
    """The tokens that request b emitted, and what its rows of the pass say."""
    path = acceptance.nodes[b, : int(acceptance.num_accepted[b])].long().cpu()
    tokens = [*tree.token_ids[b].cpu()[path[1:]].tolist(), int(acceptance.bonus[b])]
    rows = int(layout.qo_indptr[b]) + path
    return tokens, best[rows].tolist(), logit[rows].tolist()


def run_cell(
    model: Any,
    drafter_name: str,
    prompts: list[Tensor],
    budget: int,
    batch: int,
    args: Any,
    told: Any,
) -> dict[str, Any]:
    """Decode, make the calls again, and read the texts in one pass each."""
    size = max(p.numel() for p in prompts) + args.tokens + budget
    first, one = batch_target(model, batch, args.attention, size)
    recorder = Recorder(first)
    texts = decode(
        recorder,
        drafter_of(drafter_name, one),
        [Request(prompt, args.tokens) for prompt in prompts],
        budget=budget,
        stops=Stops(stop_ids_of(model)),
        on_news=lambda *_: told(),
    )
    fresh, _ = batch_target(model, batch, args.attention, size)
    second = Recorder(fresh)
    second.again(recorder.calls, told)

    tokens = wrong = same_bits = 0
    rebuilt: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    # the second run's rows, judged against what the first one emitted
    for (i, chosen, _, before), (_, _, again, after) in zip(
        emitted(recorder), emitted(second), strict=True
    ):
        rebuilt[i] += chosen
        tokens += len(chosen)
        wrong += sum(a != b for a, b in zip(chosen, again, strict=True))
        same_bits += sum(a == b for a, b in zip(before, after, strict=True))
    texts_differ = sum(
        list(text.token_ids) != rebuilt[i][: len(text.token_ids)] for i, text in enumerate(texts)
    )
    return {
        "rounds": sum(name == "commit" for name, _ in recorder.calls),
        "tokens": tokens,
        "not the argmax in the second pass": wrong,
        "largest logit the same to the bit": same_bits,
        "texts other than what the passes emitted": texts_differ,
        "mean acceptance length": round(
            sum(len(c) for _, c, _, _ in emitted(recorder)[len(prompts) :])
            / max(len(emitted(recorder)) - len(prompts), 1), 3,
        ),
        **one_pass(model, prompts, [text.token_ids for text in texts]),
    }  # fmt: skip


@torch.inference_mode()
def one_pass(model: Any, prompts: list[Tensor], texts: list[tuple[int, ...]]) -> dict[str, Any]:
    """Each text in one causal pass: which of its tokens are the argmax there too."""
    agree, shortfall = 0, 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        chosen = torch.tensor(text, device=model.device)
        ids = torch.cat([prompt.to(model.device), chosen[:-1]])
        rows = model(input_ids=ids[None], use_cache=False).logits[0, prompt.numel() - 1 :].float()
        lost = rows.amax(1) - rows.gather(1, chosen[:, None])[:, 0]
        agree += int((first_argmax(rows) == chosen).sum())
        shortfall = max(shortfall, float(lost.max()))
    return {
        "in one causal pass": {
            "tokens": sum(map(len, texts)),
            "the argmax there too": agree,
            "largest shortfall": round(shortfall, 5),
        }
    }


def verdict(cell: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the cell shows what it must."""
    return bool(
        cell["tokens"] > 0
        and cell["not the argmax in the second pass"] == 0
        and cell["texts other than what the passes emitted"] == 0
        and cell["in one causal pass"]["largest shortfall"] < TIE_TOLERANCE[dtype]
    )


def main() -> None:
    """Run the cells that are not in the result file yet."""
    args = arguments()
    dtype: torch.dtype = getattr(torch, args.dtype)
    out = args.out or ROOT / f"bench/results/second-pass-{args.device}.json"
    settings = {
        "dtype": args.dtype, "max_new_tokens": args.tokens, "prompts": args.prompts,
        "drafter": Path(args.draft).name, "attention": args.attention,
    }  # fmt: skip
    model, tokenizer = load_target(args.model_folder, dtype=dtype, device=args.device)
    result: dict[str, Any] = {
        "what": "every emitted token is the argmax of the verify pass that emitted it, by a second pass",
        "machine": machine_of(args.device),
        "settings": settings,
        "tie_tolerance": TIE_TOLERANCE[dtype],
        "cells": {},
    }
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
        if result["settings"] != settings:
            raise SystemExit(f"{out} holds a run of other settings: {result['settings']}")
    prompts = [encode(tokenizer, p) for p in prompts_of_tests()[: args.prompts]]
    if args.draft != "ngram":
        drafter_of(args.draft, HFTarget(model))  # a wrong name is told before the work
    start = time.monotonic()
    with Progress() as progress:
        for batch in args.batches:
            for budget in args.budgets:
                name = f"budget {budget}, batch {batch}"
                if name in result["cells"] or (
                    args.limit and time.monotonic() - start > args.limit
                ):
                    continue
                task = progress.add_task(name, total=None)
                begin = time.monotonic()
                cell = run_cell(
                    model,
                    args.draft,
                    prompts,
                    budget,
                    batch,
                    args,
                    lambda t=task: progress.advance(t),
                )
                cell["seconds"] = round(time.monotonic() - begin, 1)
                cell["holds"] = verdict(cell, dtype)
                result["cells"][name] = cell
                out.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(out) as work:
                    work.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                progress.update(task, total=1, completed=1)
    print(json.dumps(result["cells"], indent=1))
    if not all(cell["holds"] for cell in result["cells"].values()):
        raise SystemExit(1)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--model-folder", default="embedded", help="a Transformers folder")
    parser.add_argument("--draft", default="ngram", help="ngram, or a DFlash checkpoint")
    parser.add_argument("--attention", default="auto", choices=("auto", "dense", "paged"))
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--prompts", type=int, default=50, help="the first so many prompts only")
    parser.add_argument(
        "--limit", type=float, default=None, help="begin no cell after so many seconds"
    )
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()

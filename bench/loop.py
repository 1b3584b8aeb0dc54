"""The whole loop on a GPU: our rounds, the official loop and plain decoding, same weights, one run.

    python bench/loop.py --official FOLDER                       the embedded target and its drafter
    python bench/loop.py --target tiny --device cpu --dtype float32 --tokens 12  a rehearsal

Three methods decode the same prompts, so many new tokens each (stop tokens end nothing):

plain     one token a step, the same target, pool and attention in one CUDA graph (``bench/plain.py``)
ours      ``ddtree.decoding.decode``, each round one CUDA graph, at every budget
official  ``ddtree_generate`` of the paper's published code, as it is, one request at a time (--official as in
          ``bench/official.py``; with Transformers below 5.18). It takes seconds a text, so it decodes a few
          prompts only (--official-prompts, over all kinds); its rows say which, and give our speed and
          plain decoding's on those alone. "Times official" are of these.

Seconds are wall time on the host after the prompts have been read; the official code's are its own (it
leaves out its first draft). Ours and plain decoding run twice, and the faster run counts. With batch 8 the
prompts are begun together, and requests that are done leave places unused.

The gate: every token that we emit is the choice of a second pass of the model over the finished text, or
within a tie of it; so a text is the model's own. How many texts equal plain ones is told too: in float32
all, up to ties; in bf16 rounding decides many a token.

A drafter with random weights (``--draft random``) accepts next to nothing: its times are real, its speed
is not.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import RESULTS, machine, result_name
from bench.plain import Plain
from ddtree.decoding import (
    TIE_TOLERANCE,
    DFlashDrafter,
    Drafter,
    Generation,
    NGramDrafter,
    Request,
    decode,
)
from ddtree.decoding.dflash_config import DFlashConfig, spread_layers
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.decoding.paged import PagedTarget
from ddtree.invariants.streams import uncollected

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "tests/data/prompts.json"
BUDGETS = (8, 16, 32, 63, 64, 127, 128, 255, 256)
"""With and without the row that no longer fills a tile."""
OFFICIAL_BUDGETS = (16, 64)
OFFICIAL_PROMPTS = 3
BATCHES = (1, 8)
TRAINED = ROOT / "drafters/smollm2-135m-instruct"
"""The embedded target's drafter."""
MASK_TOKEN = 7
"""Of a drafter with random weights."""


@dataclass
class Setting:
    """What all methods are given."""

    model: Any
    drafter: Drafter
    drafter_folder: Path | None
    """Where the official code finds the same weights."""
    prompts: list[Tensor]
    new_tokens: int
    deadline: float

    @property
    def size(self) -> int:
        """Entries of the longest text."""
        return max(ids.numel() for ids in self.prompts) + self.new_tokens

    @property
    def is_late(self) -> bool:
        """Whether the time that was given is over."""
        return time.monotonic() > self.deadline


def fastest(run: Callable[[], dict[str, Any]], times: int) -> dict[str, Any]:
    """The fastest of several runs of a cell, each without Python's collector.

    The collector goes through all that Transformers has loaded, a quarter of a second: 200 rounds.
    """
    rows = []
    for _ in range(times):
        gc.collect()
        with uncollected():
            rows.append(run())
    best = min(rows, key=lambda row: row["seconds"])
    return best | {"seconds_of_runs": [row["seconds"] for row in rows]}


def run_plain(setting: Setting, batch: int) -> dict[str, Any]:
    """Plain decoding, wave after wave."""
    target = PagedTarget(setting.model, max_batch=batch, max_context=setting.size)
    plain = Plain(target)
    plain.decode(setting.prompts[:batch], 2)
    runs = [
        plain.decode(setting.prompts[first : first + batch], setting.new_tokens)
        for first in range(0, len(setting.prompts), batch)
    ]
    seconds = sum(run.seconds for run in runs)
    return {
        "method": "plain",
        "batch": batch,
        "budget": None,
        **speed(sum(len(text) - 1 for run in runs for text in run.token_ids), seconds),
        "rounds": sum(run.steps for run in runs),
        "ms_per_round": 1e3 * seconds / sum(run.steps for run in runs),
        "acceptance_length": 1.0,
        "seconds_of_waves": [run.seconds for run in runs],
        "token_ids": [text for run in runs for text in run.token_ids],
    }


def run_ours(setting: Setting, batch: int, budget: int) -> dict[str, Any]:
    """Our loop: so many prompts at once, wave after wave."""
    size = setting.size + budget
    target = PagedTarget(setting.model, max_batch=batch, max_context=size)
    decode(target, setting.drafter, [Request(setting.prompts[0], 2)], budget=budget)  # compiles
    found: list[Generation] = []
    seconds, rounds = list[float](), 0
    for first in range(0, len(setting.prompts), batch):
        todo = [Request(ids, setting.new_tokens) for ids in setting.prompts[first : first + batch]]
        wave = decode(target, setting.drafter, todo, budget=budget)
        # all begin before the first round: whoever takes longest has had every round
        longest = max(wave, key=lambda one: len(one.rounds))
        seconds.append(sum((r.draft_seconds or 0.0) + r.verify_seconds for r in longest.rounds))
        rounds += len(longest.rounds)
        found += wave
    lengths = [stats.num_accepted for one in found for stats in one.rounds]
    return {
        "method": "ours",
        "batch": batch,
        "budget": budget,
        **speed(sum(len(one.token_ids) - 1 for one in found), sum(seconds)),
        "rounds": rounds,
        "ms_per_round": 1e3 * sum(seconds) / rounds,
        "acceptance_length": statistics.mean(lengths),
        "seconds_of_waves": seconds,
        "token_ids": [list(one.token_ids) for one in found],
    }


def run_official(
    setting: Setting, module: Any, drafter: Any, budget: int, which: Sequence[int]
) -> dict[str, Any]:
    """The official loop on the prompts named, one request at a time, with its own clock."""
    texts, seconds, count, lengths = [], 0.0, 0, list[int]()
    for turn in (which[0], *which):  # the first one warms up
        ids = setting.prompts[turn]
        found = module.ddtree_generate(
            model=drafter, target=setting.model, input_ids=ids[None].to(setting.model.device),
            mask_token_id=drafter.mask_token_id, max_new_tokens=setting.new_tokens,
            block_size=drafter.block_size, stop_token_ids=None, temperature=0.0, tree_budget=budget,
        )  # fmt: skip
        texts.append(found.output_ids[0, ids.numel() :].tolist())
        if len(texts) > 1:
            seconds += found.time_per_output_token * found.num_output_tokens
            count += found.num_output_tokens
            lengths += found.acceptance_lengths
    return {
        "method": "official",
        "batch": 1,
        "budget": budget,
        **speed(count, seconds),
        "rounds": len(lengths),
        "ms_per_round": 1e3 * seconds / len(lengths),
        "acceptance_length": statistics.mean(lengths),
        "which_prompts": list(which),
        "token_ids": texts[1:],
    }


def speed(tokens: int, seconds: float) -> dict[str, float]:
    """Tokens, seconds, and one over the other."""
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def beside(rows: list[dict[str, Any]], which: Sequence[int]) -> dict[str, Any]:
    """Plain decoding and ours, at each budget, on some prompts: a row of batch 1 has a wave for each."""
    found: dict[str, Any] = {"ours": {}}
    for row in rows:
        if row["batch"] != 1 or row["method"] == "official":
            continue
        tokens = sum(len(row["token_ids"][i]) - 1 for i in which)
        rate = tokens / sum(row["seconds_of_waves"][i] for i in which)
        if row["method"] == "plain":
            found["plain"] = rate
        else:
            found["ours"][str(row["budget"])] = rate
    return found


@torch.no_grad()
def check(setting: Setting, row: dict[str, Any], expected: list[list[int]]) -> dict[str, Any]:
    """The gate: texts against plain ones, and every token against a second pass of the model.

    The second pass reads a finished text at once, with the model's own attention.
    """
    tolerance = TIE_TOLERANCE[setting.model.dtype]
    which = row.get("which_prompts", range(len(setting.prompts)))
    prompts, expected = [setting.prompts[i] for i in which], [expected[i] for i in which]
    equal, first, worst, choices, emitted = 0, list[int](), 0.0, 0, 0
    setting.model.set_attn_implementation("sdpa")
    for ids, text, other in zip(prompts, row["token_ids"], expected, strict=True):
        equal += text == other
        if text != other:
            pairs = zip(text, other, strict=False)
            first.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(text)))
        whole = torch.cat([ids, torch.tensor(text)]).to(setting.model.device)
        logits = setting.model(input_ids=whole[None, :-1], use_cache=False).logits[0]
        logits = logits[ids.numel() - 1 :].float()
        chosen = logits.gather(1, whole[ids.numel() :, None])[:, 0]
        gaps = logits.max(-1).values - chosen
        worst = max(worst, float(gaps.max()))
        choices += int((gaps == 0).sum())
        emitted += len(text)
    setting.model.set_attn_implementation("ddtree")
    return {
        "texts": len(expected),
        "texts_equal_to_plain": equal,
        "first_differing_tokens": first,
        "tokens": emitted,
        "tokens_chosen_by_a_second_pass": choices,
        "largest_gap_to_the_second_pass": worst,
        "tie_tolerance": tolerance,
        "held": worst <= tolerance
        and (setting.model.dtype != torch.float32 or not first or worst > 0),
    }


def load(options: argparse.Namespace) -> Setting:
    """The target, the drafter and the prompts."""
    dtype = getattr(torch, options.dtype)
    if options.target in SHAPES:
        model = random_model(options.target, dtype, options.device)
        prompts = random_prompts(model.config.vocab_size, options.prompts)
    else:
        from ddtree.decoding import load_target

        model, tokenizer = load_target(options.target, dtype=dtype, device=options.device)
        prompts = encoded(tokenizer, options.prompts)
    folder = None
    if options.draft == "ngram":
        drafter: Drafter = NGramDrafter(model.config.vocab_size, 8)
    else:
        folder = options.folder if options.draft == "random" else Path(options.draft)
        target = PagedTarget(model, max_context=64)  # what a drafter asks of one
        if options.draft == "random":
            write_random(model, folder)
        drafter = DFlashDrafter.load(folder, target)
    return Setting(
        model, drafter, folder, prompts, options.tokens, time.monotonic() + options.limit
    )


def encoded(tokenizer: Any, count: int) -> list[Tensor]:
    """So many of the held-out prompts, spread over their kinds."""
    from ddtree.decoding.completion import encode

    every = json.loads(PROMPTS.read_text(encoding="utf-8"))
    found = []
    for i in spread(count, len(every)):
        prompt = every[i]
        chat = [{"role": "user", "content": prompt["text"]}]
        found.append(encode(tokenizer, chat if prompt.get("chat") else prompt["text"]))
    return found


def spread(count: int, total: int) -> list[int]:
    """So many of ``range(total)``, evenly."""
    return [(i * total) // count for i in range(count)]


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 13, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    },
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Llamas with random weights: one to rehearse with, and one of the embedded target's sizes."""


def random_model(shape: str, dtype: torch.dtype, device: str) -> Any:
    """One of ``SHAPES``; its text depends on the context."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            std = 0.3 if "embed" in name else 1.2 / weight.shape[1] ** 0.5
            torch.nn.init.normal_(weight, std=std)
    return model.eval()


def random_prompts(vocab: int, count: int) -> list[Tensor]:
    """Random tokens, ragged."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab, (3 + 5 * i,), generator=generator) for i in range(count)]


def write_random(model: Any, folder: Path) -> None:
    """A drafter with random weights in the published layout: four layers, block 8, the target's sizes."""
    from train.weights import write_drafter

    config = model.config
    layers = min(4, config.num_hidden_layers)
    given = DFlashConfig(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=layers, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps, rope_theta=10000.0,
        block_size=8, mask_token_id=MASK_TOKEN,  # type: ignore[arg-type]
        target_layer_ids=spread_layers(config.num_hidden_layers, layers)
        if config.num_hidden_layers > layers else tuple(range(layers)),
        num_target_layers=config.num_hidden_layers,
    )  # fmt: skip
    torch.manual_seed(0)
    write_drafter(folder, DFlashModel(given))


def official_drafter(setting: Setting) -> Any:
    """The official code's own draft model with the folder's weights."""
    official = import_module("model")  # of the checkout, which `load_official` has put on the path
    found = official.DFlashDraftModel.from_pretrained(
        setting.drafter_folder, dtype=setting.model.dtype, attn_implementation="sdpa"
    )
    return found.to(setting.model.device).eval()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The best budget of each batch, times plain decoding, and the best budgets times the official loop.

    The official loop is held to what it decoded: to the best budgets of both on those prompts.
    """
    found: dict[str, Any] = {}
    for batch in sorted({row["batch"] for row in rows}):
        mine = [row for row in rows if row["batch"] == batch]
        ours = [row for row in mine if row["method"] == "ours"]
        if not ours:
            continue
        best = max(ours, key=lambda row: row["tokens_per_second"])
        entry = {"budget": best["budget"], "tokens_per_second": best["tokens_per_second"]}
        plain = [row["tokens_per_second"] for row in mine if row["method"] == "plain"]
        if plain:
            entry["times_plain"] = best["tokens_per_second"] / max(plain)
        official = [row for row in mine if row["method"] == "official"]
        if official:
            rate = max(official[0]["beside"]["ours"].values())
            entry["times_official"] = rate / max(row["tokens_per_second"] for row in official)
            entry["official_prompts"] = len(official[0]["which_prompts"])
        found[str(batch)] = entry
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line a row."""
    lines = ["batch  method    budget  tokens/s  ms/round  accepted  equal  second pass"]
    for row in rows:
        gate = row.get("gate")
        lines.append(
            f"{row['batch']:>5}  {row['method']:<8}  {row['budget'] or '':>6}  "
            f"{row['tokens_per_second']:>8.1f}  {row['ms_per_round']:>8.3f}  "
            f"{row['acceptance_length']:>8.2f}  "
            + (
                f"{gate['texts_equal_to_plain']}/{gate['texts']}    "
                f"{gate['tokens_chosen_by_a_second_pass']}/{gate['tokens']}, gap "
                f"{gate['largest_gap_to_the_second_pass']:.2g}{'' if gate['held'] else '  NOT HELD'}"
                if gate
                else ""
            )
        )
        if row["method"] == "official":
            rates = row["beside"]["ours"]
            budget = max(rates, key=rates.get)
            lines.append(
                f"{'':>15}  on its {len(row['which_prompts'])} prompts: plain {row['beside']['plain']:.1f}, "
                f"ours {rates.get(str(row['budget']), math.nan):.1f} at this budget, "
                f"{rates[budget]:.1f} at {budget}"
            )
    return "\n".join(lines)


def measure(
    setting: Setting, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str]]:
    """All rows, and what was left out."""
    rows, left_out = list[dict[str, Any]](), list[str]()
    for batch in options.batches:
        plain = fastest(partial(run_plain, setting, batch), options.runs)
        rows.append(plain)
        print(table(rows[-1:]).splitlines()[1], flush=True)
        for budget in options.budgets:
            if setting.is_late:
                left_out.append(f"ours, batch {batch}, budget {budget}: out of time")
                continue
            row = fastest(partial(run_ours, setting, batch, budget), options.runs)
            row["gate"] = check(setting, row, plain["token_ids"])
            rows.append(row)
            print(table(rows[-1:]).splitlines()[1], flush=True)
    # the official code last: it takes the longest, and wants the model's own attention
    if options.official is None:
        left_out.append("official: no --official")
    elif setting.drafter_folder is None:
        left_out.append("official: it has no prompt lookup")
    elif not any(row["batch"] == 1 and row["method"] == "ours" for row in rows):
        left_out.append("official: no row of ours at batch 1 to hold it to")
    else:
        from bench.official import load_official

        module = load_official(options.official)
        setting.model.set_attn_implementation("sdpa")
        drafter = official_drafter(setting)
        alone = next(row for row in rows if row["method"] == "plain" and row["batch"] == 1)
        which = spread(min(options.official_prompts, len(setting.prompts)), len(setting.prompts))
        for budget in options.official_budgets:
            if setting.is_late:
                left_out.append(f"official, budget {budget}: out of time")
                continue
            row = fastest(partial(run_official, setting, module, drafter, budget, which), 1)
            row["beside"] = beside(rows, which)
            row["gate"] = check(setting, row, alone["token_ids"])  # told, not insisted on
            rows.append(row)
            print("\n".join(table(rows[-1:]).splitlines()[1:]), flush=True)
        setting.model.set_attn_implementation("ddtree")
    return rows, left_out


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers: dict[str, Any] = {"type": lambda text: tuple(int(part) for part in text.split(","))}
    parser.add_argument(
        "--target",
        default="embedded",
        help="embedded, a Transformers folder, or random weights: tiny, smollm2",
    )
    parser.add_argument(
        "--draft",
        default=str(TRAINED) if TRAINED.is_dir() else "random",
        help="a DFlash folder, random, or ngram; else the embedded target's own, where it is there",
    )
    parser.add_argument("--official", type=Path, default=os.environ.get("DDTREE_OFFICIAL"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--prompts", type=int, default=24, help="how many; a multiple of each batch"
    )
    parser.add_argument("--tokens", type=int, default=128, help="new ones of each prompt")
    parser.add_argument("--budgets", default=BUDGETS, **numbers)
    parser.add_argument(
        "--runs",
        type=int,
        default=2,
        help="of each cell, the fastest counts; the official code's: 1",
    )
    parser.add_argument("--official-budgets", default=OFFICIAL_BUDGETS, **numbers)
    parser.add_argument("--official-prompts", type=int, default=OFFICIAL_PROMPTS)
    parser.add_argument("--batches", default=BATCHES, **numbers)
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds after which no row begins"
    )
    parser.add_argument("--out", type=Path, default=None, help="file of the result")
    options = parser.parse_args()
    if options.target in SHAPES and options.draft == str(TRAINED):
        options.draft = "random"
    for batch in options.batches:
        if options.prompts % batch:
            parser.error(f"{options.prompts} prompts are no whole number of batches of {batch}")
    return options


def main() -> None:
    """Measure, check, print a table, write JSON; fail where the gate does not hold."""
    options = arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        setting = load(options)
        rows, left_out = measure(setting, options)
    result = {
        "subject": "loop",
        "machine": machine("transformers"),
        "target": options.target,
        "drafter": options.draft,
        "dtype": options.dtype,
        "prompts": len(setting.prompts),
        "prompt_tokens": [ids.numel() for ids in setting.prompts],
        "new_tokens": options.tokens,
        "rows": [{k: v for k, v in row.items() if k != "token_ids"} for row in rows],
        "summary": summary(rows),
        "left_out": left_out,
    }
    out = options.out or RESULTS / result_name("loop")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    print(json.dumps(result["summary"], indent=1))
    for what in left_out:
        print(f"left out: {what}")
    print(out)
    if any(not row["gate"]["held"] for row in rows if row["method"] == "ours"):
        raise SystemExit("a text is not the verifier's own")


if __name__ == "__main__":
    main()

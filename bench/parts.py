"""Where the time of a round goes, and what each acceptance length would give.

    python bench/parts.py                                        Qwen3-8B's shape, random weights, bf16
    python bench/parts.py --size embedded                        the embedded target and its drafter
    python bench/parts.py --size tiny --device cpu --budgets 4   a rehearsal

The target has Qwen3-8B's sizes (36 layers, hidden 4096, 32 heads on 8 KV heads of 128, FFN 12288, vocabulary
151936), the drafter those of the published Qwen3-8B-DFlash-b16 (5 layers, block 16). Both are filled on the
device. A prompt of random tokens is read, and one round and one plain step (``bench/plain.py``) are timed:

draft   the drafter's pass of a block, with its logits
build   ``build_tree`` from the logits, ``plan_verify``, ``tree_mask``
verify  the target's pass over ``budget + 1`` rows
context the drafter's keys and values of all rows; in a whole round beside accept and commit
accept  the target's choice at every row, the walk, the new tokens
commit  the accepted entries kept

Each part is a CUDA graph of its own, and so is the whole round, which is not their sum: a graph hides gaps
between kernels that a part of its own shows, and runs some beside others. Every replay does the work of the
same round: the lengths that a commit has moved are put back. Medians of replays; the graphs are taken by
turns in two orders.

A round that accepts n nodes, root included, gives n tokens, so its speed-up is n times the plain step over
the whole round. Random weights accept nothing, and neither does a prompt of random tokens; that is why n is
left open.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import RESULTS, Captured, interleaved_us, machine, result_name
from bench.plain import Plain
from ddtree import impl
from ddtree.decoding import DFlashDrafter
from ddtree.decoding.device_rounds import DeviceRounds
from ddtree.decoding.dflash_config import DFlashConfig
from ddtree.decoding.dflash_model import DFlashModel
from ddtree.decoding.dflash_paged import PagedDFlash
from ddtree.decoding.paged import PagedTarget
from ddtree.decoding.rounds import Held, Request
from ddtree.impl.accept import new_tokens
from ddtree.impl.sampling import first_argmax
from ddtree.spec import Budget, Horizon

BUDGETS = {"8b": (16, 64, 256), "embedded": (8, 16, 32, 63, 64, 127, 128, 255, 256)}
PREFIXES = {"8b": (2048, 16384), "embedded": (128, 2048)}
TRAINED = Path(__file__).resolve().parent.parent / "drafters/smollm2-135m-instruct"
"""The embedded target's drafter."""
PARTS = ("draft", "build", "verify", "context", "accept", "commit")
SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        "target": {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        },
        "drafter": {"num_hidden_layers": 5, "block_size": 16, "target_layer_ids": (1, 9, 17, 25, 33)},
    },
    "tiny": {
        "target": {
            "vocab_size": 13, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
            "max_position_embeddings": 512, "rope_theta": 10000.0,
        },
        "drafter": {"num_hidden_layers": 1, "block_size": 3, "target_layer_ids": (0,)},
    },
}  # fmt: skip


def embedded(folder: Path, dtype: torch.dtype, device: str) -> tuple[Any, DFlashModel]:
    """The embedded target, and the draft model of a folder."""
    from ddtree.decoding import load_target

    model, _ = load_target("embedded", dtype=dtype, device=device)
    return model, DFlashDrafter.load(folder, PagedTarget(model, max_context=64)).model


def models(size: str, dtype: torch.dtype, device: str) -> tuple[Any, DFlashModel]:
    """Target and draft model with random weights, made on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    given = dict(SIZES[size]["target"])
    theta = given.pop("rope_theta")
    config = Qwen3Config(
        **given, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            target = Qwen3ForCausalLM(config)
        with torch.device(device):
            drafter = DFlashModel(
                DFlashConfig(
                    hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
                    num_attention_heads=config.num_attention_heads,
                    num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
                    rms_norm_eps=1e-6, rope_theta=theta, mask_token_id=config.vocab_size - 1,
                    num_target_layers=config.num_hidden_layers, **SIZES[size]["drafter"],
                )
            )  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    target = target.to_empty(device=device)
    # buffers of the rotary embedding are computed, not drawn
    with torch.device(device):
        target.model.rotary_emb = type(target.model.rotary_emb)(config)
    generator = torch.Generator(device).manual_seed(0)
    for model in (target, drafter):
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(std=weight.shape[1] ** -0.5, generator=generator)
            else:
                weight.data.fill_(1.0)
    return target.eval(), drafter


class Round:
    """One round of one request, part by part, on tensors that stay."""

    def __init__(self, target: PagedTarget, resident: PagedDFlash, root: int, budget: int) -> None:
        """Run every part once."""
        self.target, self.resident, self.budget = target, resident, Budget(budget)
        self.horizon = Horizon(resident.horizon)
        self.roots = torch.full((1,), root, device=target.device)
        self.lens = target.prefix_lens.clone()
        self.limits = torch.full_like(self.lens, target.max_context)
        for part in PARTS:
            getattr(self, part)()

    @torch.no_grad()
    def draft(self) -> None:
        """The drafter's pass."""
        self.drafts = self.resident.draft(self.roots, self.limits).logits

    def build(self) -> None:
        """Tree, layout and mask."""
        self.tree = impl.build_tree(self.drafts, self.roots, self.budget, from_logits=True)
        self.layout = impl.plan_verify(self.tree, self.lens, self.target.slot_table)
        self.mask = impl.tree_mask(self.tree, self.layout)

    def verify(self) -> None:
        """The target's pass."""
        self.logits = self.target.forward(self.tree, self.layout, self.mask)

    def context(self) -> None:
        """The drafter's context of all rows."""
        features = self.target.row_features
        assert features is not None
        self.resident.take(features, self.layout.positions, self.layout.out_cache_loc)

    def accept(self) -> None:
        """Choices, path, tokens."""
        chosen = first_argmax(self.logits)
        self.acceptance = impl.accept_greedy(self.tree, chosen, self.layout, self.horizon)
        self.tokens = new_tokens(self.tree, self.acceptance)

    def commit(self) -> None:
        """KV and context kept; then the length is put back, for the next replay."""
        self.resident.commit(self.target.commit(self.layout, self.acceptance))
        self.target.prefix_lens.copy_(self.lens)


def measure(
    target: PagedTarget, drafter: DFlashDrafter, prefix: int, budgets: tuple[int, ...]
) -> Any:
    """All budgets behind one prefix."""
    ids = torch.randint(
        0, target.vocab_size, (prefix,), generator=torch.Generator().manual_seed(prefix)
    )
    target.watch(drafter.target_layer_ids)
    begin = time.perf_counter()
    root = int(target.begin(0, ids, target.max_context).argmax())
    seconds = time.perf_counter() - begin
    held = Held(0, Request(ids, max(budgets) + 1), None, tokens=[root])
    rounds = [
        DeviceRounds(target, drafter, budget=budget, topk=None, sampling=None, ragged=False)
        for budget in budgets
    ]
    for one in rounds:  # before any other pass: it takes the prompt's features
        one.begin(0, held)
    lens = target.prefix_lens.clone()

    def again(step: Callable[[], Any], roots: Tensor) -> Callable[[], None]:
        """A step that leaves root and length as they were."""

        def run() -> None:
            step()
            roots.fill_(root)
            target.prefix_lens.copy_(lens)

        return run

    plain = Plain(target)
    plain.roots.fill_(root)
    rows = []
    for budget, one in zip(budgets, rounds, strict=True):
        assert one.resident is not None
        parts = Round(target, one.resident, root, budget)
        runs: dict[str, Callable[[], Any]] = {part: getattr(parts, part) for part in PARTS}
        runs["round"] = again(one.step, one.roots)
        runs["plain"] = again(plain.step, plain.roots)
        us = times(runs)
        rows.append({"prefix": prefix, "budget": budget, "prefill_seconds": seconds, "us": us})
        print(line(rows[-1]), flush=True)
    target.free(0)
    return rows


def times(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each; on a CPU of one eager call."""
    if torch.cuda.is_available():
        return interleaved_us({name: Captured([run]) for name, run in runs.items()}, 0.05, 5, 30)
    found = {}
    for name, run in runs.items():
        begin = time.perf_counter()
        run()
        found[name] = 1e6 * (time.perf_counter() - begin)
    return found


def line(row: dict[str, Any]) -> str:
    """A row of the table: milliseconds by part, and the acceptance length that pays."""
    us = row["us"]
    parts = "  ".join(f"{us[part] / 1e3:>7.3f}" for part in PARTS)
    even = us["round"] / us["plain"]
    return (
        f"{row['prefix']:>6}  {row['budget']:>6}  {parts}  {us['round'] / 1e3:>7.3f}  "
        f"{us['plain'] / 1e3:>7.3f}  {even:>6.2f}  "
        + "  ".join(f"{n / even:>5.2f}" for n in LENGTHS)
    )


LENGTHS = (2, 3, 4, 5, 6, 8)
"""Acceptance lengths of the table."""
HEAD = (
    f"{'prefix':>6}  {'budget':>6}  {'  '.join(f'{part:>7}' for part in PARTS)}  {'round':>7}  "
    f"{'plain':>7}  {'even at':>6}  {'  '.join(f'x at {n}' for n in LENGTHS)}"
)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers: dict[str, Any] = {"type": lambda text: tuple(int(part) for part in text.split(","))}
    parser.add_argument("--size", default="8b", choices=(*SIZES, "embedded"))
    parser.add_argument("--draft", type=Path, default=TRAINED, help="of the embedded target")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budgets", default=None, help=f"default: {BUDGETS}", **numbers)
    parser.add_argument("--prefixes", default=None, help=f"default: {PREFIXES}", **numbers)
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds after which no prefix begins"
    )
    parser.add_argument("--out", type=Path, default=None, help="file of the result")
    options = parser.parse_args()
    budgets = options.budgets or BUDGETS.get(options.size, BUDGETS["8b"])
    prefixes = options.prefixes or PREFIXES.get(options.size, PREFIXES["8b"])
    deadline = time.monotonic() + options.limit
    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32
    if options.size == "embedded":
        model, drafter_model = embedded(options.draft, dtype, options.device)
    else:
        model, drafter_model = models(options.size, dtype, options.device)
    print(f"models made, {deadline - time.monotonic():.0f} s left", flush=True)
    print(HEAD)
    rows, left_out = [], []
    for prefix in prefixes:
        if time.monotonic() > deadline:
            left_out.append(f"prefix {prefix}: out of time")
            continue
        size = prefix + 2 * max(budgets) + 2
        target = PagedTarget(model, max_context=size)
        drafter = DFlashDrafter(drafter_model, target)
        rows += measure(target, drafter, prefix, budgets)
    result = {
        "subject": "parts",
        "machine": machine("transformers"),
        "size": options.size,
        "dtype": str(dtype),
        "rows": rows,
        "speedup": {
            f"prefix {row['prefix']}, budget {row['budget']}": {
                str(n): n * row["us"]["plain"] / row["us"]["round"] for n in range(1, 17)
            }
            for row in rows
        },
        "left_out": left_out,
    }
    out = options.out or RESULTS / result_name("parts")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(HEAD)
    for row in rows:
        print(line(row))
    for what in left_out:
        print(f"left out: {what}")
    print(out)


if __name__ == "__main__":
    main()

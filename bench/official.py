"""The round without the model: the official host-side steps beside ours, on the same draft.

    python bench/official.py --official FOLDER     FOLDER: a checkout of liranringel/ddtree from GitHub,
                                                   at c96427a185677bf4133ed865dd1626a5041aef9b

The official functions are imported from that checkout as they are (``DDTREE_OFFICIAL`` names it too) and
called as its ``ddtree_generate`` calls them, batch 1: build (copy to the host, heap, visibility), compile
(ids, positions, mask), walk, commit (the KV of all layers moved). Ours is one CUDA graph of build, plan,
bits, accept and commit. Neither chooses the target's tokens: both are given them. A time is the median of
wall times on the host, from before the first call until the device is done.

Before a time is taken, both have been run on the same draft and must have the same nodes, accept the same
tokens and keep the same keys and values. The drafts have no equal logits among the likeliest: the
official code leaves their order open.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import RESULTS, machine, result_name
from ddtree import impl, spec
from ddtree.invariants.streams import capturing

LAYERS, KV_HEADS, HEAD_DIM = 28, 8, 128
VOCAB, HORIZON, PREFIX = 151936, 15, 2048
BUDGETS = (16, 64, 256, 1024)
STAGES = ("copy", "heap", "visibility", "compile", "walk", "commit")
REVISION = "c96427a185677bf4133ed865dd1626a5041aef9b"


def load_official(folder: Path) -> ModuleType:
    """The official ``ddtree.py``, under a name of its own.

    Its package also holds a loader of evaluation data sets, which nothing here calls: where ``datasets`` is
    not installed, an empty module stands in its place.
    """
    if not (folder / "ddtree.py").is_file():
        raise SystemExit(
            f"{folder} holds no ddtree.py: give a checkout of liranringel/ddtree (GitHub, {REVISION}) "
            "by --official or DDTREE_OFFICIAL"
        )
    found = tuple(int(part) for part in version("transformers").split(".")[:2])
    if found >= (5, 18):
        raise SystemExit(
            f"Transformers {version('transformers')} has no `crop` to a length, which the official code "
            "calls: install transformers==5.17.0"
        )
    if find_spec("datasets") is None:
        stub = ModuleType("datasets")
        for name in ("load_dataset", "Features", "Sequence", "Value"):
            setattr(stub, name, None)
        sys.modules["datasets"] = stub
    sys.path.append(str(folder))  # its own `model` and `dflash`; `ddtree` stays ours
    file = spec_from_file_location("official_ddtree", folder / "ddtree.py")
    assert file is not None
    assert file.loader is not None
    module = module_from_spec(file)
    file.loader.exec_module(module)
    return module


@dataclass
class Draft:
    """One draft and what the target chooses at each of our nodes."""

    logits: Tensor
    """``[1, horizon, vocab]`` float32."""
    root: Tensor
    tree: spec.DraftTree
    choices: Tensor
    """``[budget + 1]``."""


def make_draft(budget: int, vocab: int, device: str, seed: int) -> Draft:
    """Sharp at first, flatter with depth; the target follows the tree at four nodes in five."""
    generator = torch.Generator(device=device).manual_seed(seed)
    spread = torch.linspace(6.0, 3.0, HORIZON, device=device)[:, None]
    while True:
        logits = torch.randn(HORIZON, vocab, device=device, generator=generator) * spread
        likeliest = logits.topk(min(budget + 1, vocab), -1).values
        if bool((likeliest.diff(dim=-1) < 0).all()):
            break
    root = torch.randint(0, vocab, (1,), device=device, generator=generator)
    tree = impl.build_tree(logits[None], root, spec.Budget(budget), from_logits=True)
    parents, tokens = tree.parents[0].tolist(), tree.token_ids[0].tolist()
    choices = torch.randint(0, vocab, (budget + 1,), device=device, generator=generator)
    follows = torch.rand(budget + 1, device=device, generator=generator) < 0.8
    for node in range(budget, 0, -1):  # the likeliest child has the last word
        if follows[parents[node]]:
            choices[parents[node]] = tokens[node]
    return Draft(logits[None], root, tree, choices)


def paths(tokens: list[int], parents: list[int]) -> dict[tuple[int, ...], int]:
    """Node by its tokens from the root, the root's own left out."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        found.append((*found[parents[node]], tokens[node]))
    return {path: node for node, path in enumerate(found)}


class Official:
    """The official code's buffers, and one round of its steps on them."""

    def __init__(self, module: ModuleType, budget: int, keys: Tensor, values: Tensor) -> None:
        """``keys`` and ``values``: ``[layers, 1, kv_heads, prefix + budget + 1, head_dim]``."""
        self.module, self.budget, self.keys, self.values = module, budget, keys, values
        device, rows = keys.device, budget + 1
        self.cache = module.DynamicCache()
        for layer in range(keys.shape[0]):
            self.cache.update(keys[layer], values[layer], layer)
        self.output_ids = torch.zeros(1, PREFIX + 2 * rows, dtype=torch.long, device=device)
        self.buffers = {
            "verify_input_ids_buffer": torch.empty(1, rows, dtype=torch.long, device=device),
            "verify_position_ids_buffer": torch.empty(1, rows, dtype=torch.long, device=device),
            "attention_mask_buffer": torch.zeros(
                1, 1, rows, PREFIX + rows, dtype=keys.dtype, device=device
            ),
            "tree_visibility_buffer": torch.empty(rows, rows, dtype=torch.bool, device=device),
        }

    def restore(self) -> None:
        """Give the cache its tree rows back, which a commit crops."""
        for layer, held in enumerate(self.cache.layers):
            held.keys, held.values = self.keys[layer].clone(), self.values[layer].clone()
        torch.cuda.synchronize()

    @torch.inference_mode()  # as there
    def round(self, draft: Draft, posterior: Callable[[Any], Tensor]) -> dict[str, Any]:
        """Every step but the model's; seconds of each, and what came out."""
        module, device = self.module, self.keys.device
        torch.cuda.synchronize()
        start = time.perf_counter()
        tokens, depths, parents, child_maps, visibility, parts = module.build_ddtree_tree(
            draft.logits[0], self.budget
        )
        torch.cuda.synchronize()
        built = time.perf_counter()
        ids, *_ = module.compile_ddtree_tree(
            root_token_id=draft.root[0], start=PREFIX, node_token_ids=tokens, node_depths=depths,
            visibility_cpu=visibility, past_length=PREFIX, dtype=self.keys.dtype, device=device,
            previous_tree_start=PREFIX, previous_tree_length=self.budget + 1, **self.buffers,
        )  # fmt: skip
        torch.cuda.synchronize()
        compiled = time.perf_counter()
        choices = posterior((tokens, parents))  # the model's part: not timed
        torch.cuda.synchronize()
        chosen = time.perf_counter()
        accepted, bonus = module.follow_verified_tree(child_maps, choices)
        walked = time.perf_counter()
        index = torch.tensor(accepted, dtype=torch.long, device=device)
        self.output_ids[:, PREFIX : PREFIX + len(accepted)] = ids.index_select(1, index)
        self.output_ids[:, PREFIX + len(accepted)] = bonus
        module.compact_dynamic_cache(self.cache, PREFIX, accepted)
        torch.cuda.synchronize()
        end = time.perf_counter()
        return {
            "copy": parts["tree_build_copy"],
            "heap": parts["tree_build_heap"],
            "visibility": parts["tree_build_visibility"],
            "compile": compiled - built,
            "walk": walked - chosen,
            "commit": end - walked,
            "whole": end - start - (chosen - compiled),
            "nodes": paths([0, *tokens.tolist()], parents),
            "accepted": accepted,
            "bonus": bonus,
        }


class Ours:
    """Our round of one draft, captured."""

    def __init__(self, draft: Draft, keys: Tensor, values: Tensor, page_size: int) -> None:
        """``keys`` and ``values`` as for ``Official``; they are copied into pools."""
        layers, _, heads, context, dim = keys.shape
        pages = -(-context // page_size)
        device = keys.device
        order = torch.randperm(pages, device=device)
        offsets = torch.arange(page_size, device=device)
        slots = (order[:, None] * page_size + offsets).flatten()[:context]

        def pools(tensor: Tensor) -> tuple[Tensor, ...]:
            held = tensor.new_zeros(layers, pages * page_size, heads, dim)
            held[:, slots] = tensor[:, 0].transpose(1, 2)
            return tuple(held)

        self.draft = draft
        self.kv = spec.PagedKV(pools(keys), pools(values), slots[None].contiguous(), page_size)
        self.prefix_lens = torch.tensor([PREFIX], dtype=torch.int32, device=device)

    def round(self) -> tuple[spec.DraftTree, spec.Acceptance, spec.Commit]:
        """Every step but the model's."""
        draft, budget = self.draft, spec.Budget(self.draft.choices.numel() - 1)
        tree = impl.build_tree(draft.logits, draft.root, budget, from_logits=True)
        layout = impl.plan_verify(tree, self.prefix_lens, self.kv.slot_table)
        impl.tree_mask(tree, layout)
        acceptance = impl.accept_greedy(tree, draft.choices, layout, spec.Horizon(HORIZON))
        return tree, acceptance, impl.commit_kv(self.kv, layout, acceptance)


def posterior_of(draft: Draft) -> Callable[[Any], Tensor]:
    """The target's choices in the order of the official nodes, which may differ where scores are near."""
    ours = paths(draft.tree.token_ids[0].tolist(), draft.tree.parents[0].tolist())

    def posterior(official: Any) -> Tensor:
        tokens, parents = official
        theirs = paths([0, *tokens.tolist()], parents)
        if theirs.keys() != ours.keys():
            raise SystemExit(f"{len(theirs.keys() - ours.keys())} nodes of the trees differ")
        order = torch.tensor([ours[path] for path in theirs], device=draft.choices.device)
        return draft.choices[order][None]

    return posterior


def check(official: Official, draft: Draft, page_size: int) -> int:
    """Run both on one draft; refuse any difference; return how many tokens were accepted."""
    official.restore()
    theirs = official.round(draft, posterior_of(draft))
    tokens, parents = draft.tree.token_ids[0].tolist(), draft.tree.parents[0].tolist()
    row_of = [theirs["nodes"][path] for path in paths(tokens, parents)]  # of our nodes, in order
    entries = torch.tensor([*range(PREFIX), *(PREFIX + row for row in row_of)])
    keys, values = (kv[:, :, :, entries.to(kv.device)] for kv in (official.keys, official.values))
    ours = Ours(draft, keys, values, page_size)
    _, acceptance, _ = ours.round()
    count = int(acceptance.num_accepted[0])
    accepted = [row_of[node] for node in acceptance.nodes[0, :count].tolist()]
    if (accepted, int(acceptance.bonus[0])) != (theirs["accepted"], theirs["bonus"]):
        raise SystemExit(f"accepted {accepted} and {theirs['accepted']}, or another bonus")
    for layer, held in enumerate(official.cache.layers):
        for found, kept in ((ours.kv.keys, held.keys), (ours.kv.values, held.values)):
            slots = ours.kv.slot_table[0, : PREFIX + count]
            if not torch.equal(found[layer][slots], kept[0].transpose(0, 1)):
                raise SystemExit(f"the keys or values that layer {layer} keeps differ")
    return count


def wall_us(calls: list[Callable[[], None]], repeats: int) -> tuple[float, float]:
    """Median microseconds until a call returns, and until the device is done."""
    returned, done = [], []
    for call in calls * repeats:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        returned.append(1e6 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        done.append(1e6 * (time.perf_counter() - start))
    return statistics.median(returned), statistics.median(done)


def measure(module: ModuleType, budget: int, repeats: int) -> dict[str, Any]:
    """Check and time one budget."""
    shape = (LAYERS, 1, KV_HEADS, PREFIX + budget + 1, HEAD_DIM)
    generator = torch.Generator(device="cuda").manual_seed(budget)
    keys, values = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(2)
    )
    drafts = [make_draft(budget, VOCAB, "cuda", seed) for seed in range(3)]
    official = Official(module, budget, keys, values)
    accepted = [check(official, draft, page_size) for draft in drafts for page_size in (1, 16)]
    rounds = []
    for i in range(repeats):
        official.restore()
        draft = drafts[i % len(drafts)]
        rounds.append(official.round(draft, posterior_of(draft)))
    result: dict[str, Any] = {
        "budget": budget,
        "accepted": statistics.mean(accepted),
        "official_us": {
            name: 1e6 * statistics.median(found[name] for found in rounds)
            for name in (*STAGES, "whole")
        },
        "ours_us": {},
    }
    for page_size in (1, 16):
        graphs = []
        for draft in drafts:
            ours = Ours(draft, keys, values, page_size)
            ours.round()  # compiles
            with capturing() as graph:
                ours.round()
            graphs.append((graph, ours))  # a graph owns none of what its calls read
        host, wall = wall_us([graph.replay for graph, _ in graphs], 2 * repeats)
        result["ours_us"][f"page {page_size}"] = {"host": host, "whole": wall}
    return result


def main() -> None:
    """Check, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--official", type=Path, default=os.environ.get("DDTREE_OFFICIAL"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: the official code waits for one in every step")
    if options.official is None:
        raise SystemExit("give --official FOLDER or set DDTREE_OFFICIAL (--help says to what)")
    module = load_official(options.official)
    result: dict[str, Any] = {
        "subject": "official",
        "machine": machine("transformers", "numpy"),
        "official": REVISION,
        "shape": f"vocabulary {VOCAB}, horizon {HORIZON}, prefix {PREFIX}, {LAYERS} layers of "
        f"{KV_HEADS} KV heads of {HEAD_DIM}, batch 1",
        "method": " ".join((__doc__ or "").split("\n\n")[2].split()),
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    print("budget |", *(f"{name:>10}" for name in STAGES), "|    whole | ours page 1 (host) | 16")
    for budget in BUDGETS:
        row = measure(module, budget, options.repeats)
        result["rows"].append(row)
        (options.out / result_name("official")).write_text(json.dumps(result, indent=1) + "\n")
        theirs, ours = row["official_us"], row["ours_us"]
        print(
            f"{budget:6} |", *(f"{theirs[name]:10.0f}" for name in STAGES),
            f"| {theirs['whole']:8.0f} | {ours['page 1']['whole']:8.1f} "
            f"({ours['page 1']['host']:.1f}) | {ours['page 16']['whole']:.1f}",
            flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()

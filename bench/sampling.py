"""Sampling is lossless on the real pair: frequencies of 20,000 draws against the target's own distribution.

For a context, the real target verifies the real drafter's tree once: a row of logits for each node. From
them follow the nodes' distributions after temperature, top-k and top-p, by
``spec.sampling.target_distribution``, which tests hold to an independent definition. Then a round's choice is
drawn 20,000 times, draw i with the uniform numbers of seed i at the rows' positions, as decoding takes them,
and accepted along the tree. Tested, each by chi-square:

- the first emitted token against the distribution at the root, whether it was drafted or not;
- the second, in the draws whose first is the likeliest child, against the distribution at that child;
- the third, given the likeliest child and grandchild, where the tree has one.

So what is tested is the whole of sampling at the real vocabulary: random numbers by seed and position,
inversion, and the walk along the tree. The logits are the same in all draws: that they are the target's is
what ``equality.py`` shows. The proof that emitted tokens have exactly the target's distribution, by
enumeration on a tiny vocabulary, is in tests/spec/test_accept.py. On a CPU a row's distribution is computed
once and shared by the draws, and 16 draws go through ``spec.accept_sampled`` whole, with equal results; on a
GPU all draws go through ``impl.accept_sampled`` whole.

Bins hold at least 5 expected draws; rarer tokens are pooled. As a wrong twin, each first token is tested
against a temperature a quarter higher too: that must be refused (p < 1e-6). Gate: no p below 0.01 over the
number of tests.

    python bench/sampling.py [--device cuda --draft FOLDER]

The result is written after every case; a run that was cut short goes on there.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.equality import encode, machine_of, prompts_of_tests  # noqa: E402
from ddtree import spec  # noqa: E402
from ddtree.decoding import HFTarget, load_target  # noqa: E402
from ddtree.decoding.completion import drafter_of  # noqa: E402
from ddtree.invariants.files import written_whole  # noqa: E402
from ddtree.spec.contracts import Budget, DraftTree, Horizon  # noqa: E402
from ddtree.spec.round import new_tokens  # noqa: E402
from ddtree.spec.sampling import (  # noqa: E402
    Sampling,
    first_argmax,
    row_uniforms,
    sample,
    target_distribution,
)

CONTEXTS = ("list-alphabet", "list-months", "list-table", "german")
"""Where the target takes what the n-gram drafter drafts often enough to look at second and third tokens."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.9},
)
LEAST = 5.0
"""Expected draws of a bin."""
LEVEL = 0.01
"""Of all tests together."""
TWIN = 1.25
"""The wrong twin's temperature over the right one."""
WHOLE = 16
"""Draws that go through ``spec.accept_sampled`` whole, on a CPU."""


class Case:
    """One verify call of the real pair, and draws from it."""

    def __init__(self, target: HFTarget, drafter: Any, prompt_ids: Tensor, budget: int) -> None:
        target.reset(drafter.target_layer_ids)
        root = first_argmax(target.prefill(prompt_ids)[None])
        drafter.reset()
        drafts = drafter.draft(torch.cat([prompt_ids, root.cpu()]), target.features())
        self.horizon = Horizon(drafts.shape[1])
        self.tree = spec.build_tree(drafts.to(target.device), root, Budget(budget))
        prefix = torch.tensor([target.prefix_len], device=target.device)
        layout = spec.plan_verify(self.tree, prefix, target.slot_table)
        mask = spec.tree_mask(self.tree, layout, "flat")
        self.logits = target.forward(self.tree, layout, mask)[: int(self.tree.num_nodes[0])]
        self.prefix_len = target.prefix_len

    def probs(self, settings: dict[str, Any]) -> Tensor:
        """Each node's distribution ``[nodes, vocab]``."""
        return target_distribution(self.logits, **settings)

    def batch(self, count: int) -> tuple[DraftTree, Any]:
        """So many requests with this tree, and their layout; only real rows."""
        nodes = int(self.tree.num_nodes[0])

        def repeated(part: Tensor) -> Tensor:
            return part[:, :nodes].expand(count, -1).contiguous()

        tree = DraftTree(
            repeated(self.tree.token_ids), repeated(self.tree.parents), repeated(self.tree.depths),
            repeated(self.tree.scores), self.tree.num_nodes.expand(count).contiguous(),
        )  # fmt: skip
        device = tree.token_ids.device
        prefix = torch.full((count,), self.prefix_len, device=device)
        slots = torch.arange(self.prefix_len + nodes, device=device).expand(count, -1)
        return tree, spec.plan_verify(tree, prefix, slots)

    def draw(
        self, seeds: Sequence[int], settings: dict[str, Any], probs: Tensor
    ) -> list[list[int]]:
        """The emitted tokens of a draw for each seed."""
        tree, layout = self.batch(len(seeds))
        sampling = Sampling(**settings, seed=list(seeds))
        if self.logits.is_cuda:
            from ddtree import impl
            from ddtree.impl.sampling import row_uniforms as impl_uniforms

            uniforms = impl_uniforms(sampling, layout, len(seeds))
            logits = self.logits.repeat(len(seeds), 1)
            acceptance = impl.accept_sampled(
                tree, logits, layout, self.horizon, uniforms, **settings
            )
        else:
            uniforms = row_uniforms(sampling, layout, len(seeds))
            chosen = sample(probs.repeat(len(seeds), 1), uniforms)
            acceptance = spec.accept_greedy(tree, chosen, layout, self.horizon)
            if seeds[0] < WHOLE:
                few = self.whole(min(WHOLE, len(seeds)), uniforms, settings)
                same = torch.equal(few, new_tokens(tree, acceptance)[: len(few)])
                assert same, "spec.accept_sampled and its parts differ"
        return [[t for t in row if t >= 0] for row in new_tokens(tree, acceptance).tolist()]

    def whole(self, count: int, uniforms: Tensor, settings: dict[str, Any]) -> Tensor:
        """The first draws' tokens, by ``spec.accept_sampled``."""
        tree, layout = self.batch(count)
        logits = self.logits.repeat(count, 1)
        acceptance = spec.accept_sampled(tree, logits, layout, self.horizon, uniforms, **settings)
        return new_tokens(tree, acceptance)


def chi_square(tokens: Sequence[int], probs: Tensor) -> dict[str, Any]:
    """Tokens that were drawn, against their distribution ``[vocab]``."""
    n, counts = len(tokens), Counter(tokens)
    expected = n * probs.cpu()
    own = (expected >= LEAST).nonzero().flatten().tolist()
    bins = [(float(expected[t]), counts[t]) for t in own]
    rest = (n - sum(e for e, _ in bins), n - sum(c for _, c in bins))
    impossible = sum(c for t, c in counts.items() if probs[t] <= 0)
    if rest[0] >= LEAST:
        bins.append(rest)
    elif bins:  # too rare for a bin of its own
        e, c = bins.pop()
        bins.append((e + rest[0], c + rest[1]))
    x = sum((c - e) ** 2 / e for e, c in bins)
    freedom = len(bins) - 1
    half = torch.tensor([freedom / 2, x / 2], dtype=torch.float64)
    p = float(torch.special.gammaincc(half[0], half[1])) if freedom > 0 else None
    return {
        "draws": n,
        "bins": len(bins),
        "chi_square": round(x, 3),
        "p": p,
        "tokens of probability 0": impossible,
    }


def likeliest_child(tree: DraftTree, node: int, probs: Tensor) -> int | None:
    """The child of the node that the target takes most often."""
    nodes = range(1, int(tree.num_nodes[0]))
    children = [i for i in nodes if int(tree.parents[0, i]) == node]
    if not children:
        return None
    return max(children, key=lambda i: float(probs[node, int(tree.token_ids[0, i])]))


def run_case(case: Case, settings: dict[str, Any], args: Any, told: Any) -> dict[str, Any]:
    """Draw, and test token by token."""
    probs = case.probs(settings)
    emitted: list[list[int]] = []
    for first in range(0, args.draws, args.chunk):
        emitted += case.draw(range(first, min(first + args.chunk, args.draws)), settings, probs)
        told(len(emitted))
    wrong = {**settings, "temperature": TWIN * settings["temperature"]}
    first_tokens = [tokens[0] for tokens in emitted]
    found = {
        "nodes": int(case.tree.num_nodes[0]),
        "mean tokens a round": round(sum(map(len, emitted)) / len(emitted), 4),
        "first": chi_square(first_tokens, probs[0]),
        "first, against the wrong twin": chi_square(first_tokens, case.probs(wrong)[0]),
    }
    node, path = 0, list[int]()
    for name in ("second", "third"):
        child = likeliest_child(case.tree, node, probs)
        if child is None:
            break
        node = child
        path.append(int(case.tree.token_ids[0, node]))
        some = [tokens for tokens in emitted if tokens[: len(path)] == path]
        if len(some) < 100:
            break
        following = [
            tokens[len(path)] for tokens in some
        ]  # an accepted node is never the last token
        found[name] = chi_square(following, probs[node])
    return found


def summary_of(cases: dict[str, Any]) -> dict[str, Any]:
    """All p of the right distributions, the smallest of them, and the twins'."""
    right = {
        f"{name}, {which}": tests[which]["p"]
        for name, tests in cases.items()
        for which in ("first", "second", "third")
        if which in tests and tests[which]["p"] is not None
    }
    twins = [tests["first, against the wrong twin"] for tests in cases.values()]
    impossible = sum(
        tests[which]["tokens of probability 0"]
        for tests in cases.values()
        for which in ("first", "second", "third")
        if which in tests
    )
    least = min(right, key=lambda name: right[name])
    bound = LEVEL / len(right)
    worst_twin = max(1.0 if it["p"] is None else it["p"] for it in twins)
    return {
        "tests": len(right),
        "smallest p": right[least],
        "of": least,
        "bound": bound,
        "p below 0.05": sum(p < 0.05 for p in right.values()),
        "tokens of probability 0": impossible,
        "largest p of a wrong twin": worst_twin,
        "holds": right[least] >= bound and impossible == 0 and worst_twin < 1e-6,
    }


def main() -> None:
    """Run the cases that are not in the result file yet."""
    args = arguments()
    out = args.out or ROOT / f"bench/results/sampling-{args.device}.json"
    settings = {
        "draws": args.draws, "budget": args.budget, "drafter": Path(args.draft).name,
        "path": "impl.accept_sampled" if args.device.startswith("cuda") else "spec",
    }  # fmt: skip
    result: dict[str, Any] = {
        "what": "frequencies of sampled tokens against the target's distribution, chi-square",
        "machine": machine_of(args.device),
        "settings": settings,
        "summary": {},
        "cases": {},
    }
    if out.exists():
        result = json.loads(out.read_text(encoding="utf-8"))
        if result["settings"] != settings:
            raise SystemExit(f"{out} holds a run of other settings: {result['settings']}")
    model, tokenizer = load_target(args.model_folder, device=args.device)
    target = HFTarget(model)
    drafter = drafter_of(args.draft, target)
    prompts = {prompt["id"]: prompt for prompt in prompts_of_tests()}
    start = time.monotonic()
    with Progress() as progress:
        for context in CONTEXTS[: args.contexts]:
            case = Case(target, drafter, encode(tokenizer, prompts[context]), args.budget)
            for each in SETTINGS:
                name = ", ".join([context, *(f"{key} {value}" for key, value in each.items())])
                if name in result["cases"] or (
                    args.limit and time.monotonic() - start > args.limit
                ):
                    continue
                task = progress.add_task(name, total=args.draws)
                found = run_case(
                    case, each, args, lambda n, task=task: progress.update(task, completed=n)
                )
                result["cases"][name] = found
                result["summary"] = summary_of(result["cases"])
                out.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(out) as work:
                    work.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["summary"], indent=1))
    if not result["summary"]["holds"]:
        raise SystemExit(1)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--model-folder", default="embedded", help="a Transformers folder")
    parser.add_argument("--draft", default="ngram", help="ngram, or a DFlash checkpoint")
    parser.add_argument("--budget", type=int, default=4, help="of the tree")
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument(
        "--chunk",
        type=int,
        default=None,
        help="draws at once: 1000 on a GPU, 4 on a CPU (its caches)",
    )
    parser.add_argument(
        "--contexts", type=int, default=len(CONTEXTS), help="the first so many only"
    )
    parser.add_argument(
        "--limit", type=float, default=None, help="begin no case after so many seconds"
    )
    parser.add_argument("--out", type=Path, default=None, help="result file")
    args = parser.parse_args()
    args.chunk = args.chunk or (1000 if args.device.startswith("cuda") else 4)
    return args


if __name__ == "__main__":
    main()

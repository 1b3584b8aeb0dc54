"""Bounded model checking: a fast path held to the reference on every small case there is.

The prover sees formulas, not loops or tensor code. Here every tree of up to 7 nodes, every budget up to 8
and every batch of up to 3 requests is run through both, and all that they return must be equal. The
package to check is handed in: ``ddtree.impl``, or a wrong twin that has to be found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import combinations, product
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ddtree import spec
from ddtree.spec import Acceptance, Budget, DraftTree, Horizon, PagedKV, VerifyLayout
from ddtree.spec.mask import Form, read_mask

MOST_NODES, MOST_BUDGET, MOST_BATCH = 7, 8, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Parents = tuple[int, ...]
Package = Any
"""A module, or what has the functions of one, under the names of ``ddtree.spec``."""


def every_tree(most_nodes: int = MOST_NODES) -> list[Parents]:
    """Parents of every tree whose nodes come after their parents: ``(n - 1)!`` of n nodes."""
    return [
        (-1, *above)
        for nodes in range(1, most_nodes + 1)
        for above in product(*(range(row) for row in range(1, nodes)))
    ]


def drafted(parents: Sequence[Parents], rows: int) -> DraftTree:
    """The trees in ``rows`` rows each; the token of a node is its row + 1."""
    shape = len(parents), rows
    tree = DraftTree(
        token_ids=torch.zeros(shape, dtype=torch.int64),
        parents=torch.full(shape, -1, dtype=torch.int32),
        depths=torch.zeros(shape, dtype=torch.int32),
        scores=torch.full(shape, -torch.inf, dtype=torch.float64),
        num_nodes=torch.tensor([len(above) for above in parents], dtype=torch.int32),
    )
    for b, above in enumerate(parents):
        nodes = len(above)
        depths = [0] * nodes
        for node in range(1, nodes):
            depths[node] = depths[above[node]] + 1
        tree.token_ids[b, :nodes] = torch.arange(1, nodes + 1)
        tree.parents[b, :nodes] = torch.tensor(above)
        tree.depths[b, :nodes] = torch.tensor(depths)
        tree.scores[b, :nodes] = -torch.arange(nodes, dtype=torch.float64)
    return tree


def slots(batch: int, context: int) -> Tensor:
    """A slot table in which no entry lies where its number says."""
    return torch.arange(batch * context).flip(0).reshape(batch, context)


Step = tuple[int, list[str]]
"""How many cases were looked at, and where the two differ."""


def trees_step(fast: Package) -> Iterator[Step]:
    """The ancestor bits of every tree at every budget that holds it."""
    for budget in range(MOST_BUDGET + 1):
        rows = budget + 1
        trees = [tree for tree in every_tree() if len(tree) <= rows]
        tree = drafted(trees, rows)
        prefix_lens = torch.arange(len(trees)) % 3
        layout = spec.plan_verify(tree, prefix_lens, slots(len(trees), rows + 3))
        right = spec.tree_mask(tree, layout)
        found = fast.tree_mask(on(DEVICE, tree), on(DEVICE, layout))
        yield len(trees), unequal(f"budget {budget}: ", right, found)


def walks_step(fast: Package) -> Iterator[Step]:
    """In every tree, the walk that ends at each of its nodes."""
    walks = [(tree, end) for tree in every_tree() for end in range(len(tree))]
    for some in batched(walks, 1024):
        trees = [tree for tree, _ in some]
        tree = drafted(trees, MOST_BUDGET + 1)
        table = slots(len(trees), MOST_BUDGET + 4)
        layout = spec.plan_verify(tree, torch.zeros(len(trees), dtype=torch.int64), table)
        choices = torch.zeros_like(tree.token_ids)  # token 0 is no node's: the walk ends there
        for b, (above, end) in enumerate(some):
            node = end
            while node:
                choices[b, above[node]] = node + 1
                node = above[node]
        chosen, horizon = choices.flatten(), Horizon(MOST_NODES)
        right = spec.accept_greedy(tree, chosen, layout, horizon)
        found = fast.accept_greedy(*on(DEVICE, (tree, chosen, layout)), horizon)
        yield len(some), unequal("", right, found)


def commits_step(fast: Package) -> Iterator[Step]:
    """Every path that ascends, in every width, moved as slots and as KV."""
    for q_len in range(1, MOST_BUDGET + 2):
        paths = [
            (0, *rest) for length in range(q_len) for rest in combinations(range(1, q_len), length)
        ]
        tree = drafted([tuple(range(-1, q_len - 1))] * len(paths), q_len)
        batch, context = len(paths), q_len + 3
        prefix_lens = torch.arange(batch) % 3
        table = slots(batch, context)
        layout = spec.plan_verify(tree, prefix_lens, table)
        nodes = torch.full((batch, q_len), -1, dtype=torch.int32)
        for b, path in enumerate(paths):
            nodes[b, : len(path)] = torch.tensor(path)
        accepted = Acceptance(
            nodes, (nodes >= 0).sum(1).int(), torch.zeros(batch, dtype=torch.int64)
        )
        for page_size in (1, 4):
            pool = torch.arange(batch * context * 2, dtype=torch.float32).reshape(-1, 1, 2)
            kv = PagedKV((pool,), (-pool,), table.clone(), page_size)
            fast_kv = on(DEVICE, kv)
            right = spec.commit_kv(kv, layout, accepted)
            found = fast.commit_kv(fast_kv, *on(DEVICE, (layout, accepted)))
            where = f"q_len {q_len}, page_size {page_size}: "
            yield batch, unequal(where, right, found) + unequal(where, kv, fast_kv)


def batches_step(fast: Package) -> Iterator[Step]:
    """Every batch of up to 3 requests of every width: layout and mask, each request's tree another."""
    trees: dict[int, list[Parents]] = {
        nodes: [tree for tree in every_tree() if len(tree) == nodes]
        for nodes in range(1, MOST_NODES + 1)
    }
    number = 0
    widths = range(1, MOST_BUDGET + 2)
    for batch in range(1, MOST_BATCH + 1):
        for q_lens in product(widths, repeat=batch):
            number += 1
            chosen = []
            for b, q_len in enumerate(q_lens):
                of_size = trees[max(1, min(q_len - (number + b) % 2, MOST_NODES))]
                chosen.append(of_size[(number * 37 + b * 11) % len(of_size)])
            prefix_lens = torch.tensor([(number + 2 * b) % 4 for b in range(batch)])
            forms: tuple[Form, ...] = ("bits",)
            if batch == 1 or max(q_lens) < 4:
                forms = ("bits", "packed", "flat", "dense")
            yield 1, _batch(fast, chosen, q_lens, prefix_lens, forms)


def _batch(
    fast: Package,
    trees: Sequence[Parents],
    q_lens: Sequence[int],
    prefix_lens: Tensor,
    forms: Sequence[Form],
) -> list[str]:
    rows = max(q_lens)
    tree, widths = drafted(trees, rows), torch.tensor(q_lens)
    table = slots(len(trees), rows + 4)
    layout = spec.plan_verify(tree, prefix_lens, table, widths)
    on_device = on(DEVICE, (tree, prefix_lens, table, widths))
    fast_layout = fast.plan_verify(*on_device)
    where = f"q_lens {list(q_lens)}, prefix_lens {prefix_lens.tolist()}: "
    lines = unequal(where, layout, used(fast_layout))
    for form in forms:
        right = spec.tree_mask(tree, layout, form)
        found = on("cpu", fast.tree_mask(on_device[0], on(DEVICE, layout), form))
        for b in range(len(trees)):
            pair = read_mask(right, layout, b), read_mask(found, layout, b)
            if not torch.equal(*pair):
                lines.append(f"{where}{form} of request {b}: {pair[1].int()} for {pair[0].int()}")
    return lines


def used(layout: VerifyLayout) -> VerifyLayout:
    """A layout of full-size tensors without what is behind the call."""
    layout = on("cpu", layout)
    rows, entries = int(layout.qo_indptr[-1]), int(layout.kv_indptr[-1])
    return replace(
        layout,
        kv_indices=layout.kv_indices[:entries],
        positions=layout.positions[:rows],
        out_cache_loc=layout.out_cache_loc[:rows],
    )


def drafts_step(fast: Package) -> Iterator[Step]:
    """Every draft over a few log-probs, ties and impossible tokens among them."""
    for horizon, vocab, values, budgets in (
        (1, 3, (-0.5, -1.0, -torch.inf), (0, 1, 2, 3, 4)),
        (2, 2, (-0.5, -1.0, -torch.inf), (1, 3, 6)),
        (3, 2, (-0.5, -1.0), (MOST_BUDGET,)),
        (2, 3, (-0.5, -1.0), (MOST_BUDGET,)),
    ):
        drafts = torch.tensor(list(product(values, repeat=horizon * vocab)))
        drafts = drafts.reshape(-1, horizon, vocab)
        roots = torch.arange(len(drafts)) % vocab
        for budget in budgets:
            right = spec.build_tree(drafts, roots, Budget(budget))
            found = fast.build_tree(*on(DEVICE, (drafts, roots)), Budget(budget))
            where = f"horizon {horizon}, vocabulary {vocab}, budget {budget}: "
            yield len(drafts), unequal(where, right, found)


def on(device: str, value: Any) -> Any:
    """A copy of the value with all its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, tuple):
        return tuple(on(device, item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: on(device, getattr(value, f.name)) for f in fields(value)})
    return value


def unequal(where: str, right: Any, found: Any) -> list[str]:
    """Where two contract objects' tensors differ, one line each with the first place."""
    lines = []
    for item in fields(right):
        one, other = getattr(right, item.name), getattr(found, item.name)
        pools = isinstance(one, tuple)
        pairs = zip(one, other, strict=True) if pools else [(one, other)]
        for expected, given in pairs:
            if isinstance(expected, Tensor):
                lines += _unequal(f"{where}{item.name}", expected, given.cpu())
    return lines


def _unequal(name: str, right: Tensor, found: Tensor) -> list[str]:
    if (right.shape, right.dtype) != (found.shape, found.dtype):
        return [f"{name}: {list(found.shape)} {found.dtype} for {list(right.shape)} {right.dtype}"]
    if torch.equal(right, found):
        return []
    at = (right != found).nonzero()[0].tolist()
    return [f"{name}{at}: {found[tuple(at)].item()} for {right[tuple(at)].item()}"]


def batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """The items, ``size`` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


class Wrong:
    """The reference with one function spoiled: what a wrong fast path would return."""

    def __init__(self, **spoiled: Callable[..., Any]) -> None:
        """Replace functions by name."""
        self._spoiled = spoiled

    def __getattr__(self, name: str) -> Any:
        """A spoiled function, or the reference's."""
        return self._spoiled.get(name) or getattr(spec, name)


def _six_deep(tree: DraftTree, layout: VerifyLayout, form: Any = "bits") -> Any:
    """A node six levels deep is taken for padding: only a chain of seven nodes has one."""
    parents = tree.parents.masked_fill(tree.depths > 5, -1)
    return spec.tree_mask(replace(tree, parents=parents), layout, form)


def _sixth_child(tree: DraftTree, choices: Tensor, layout: VerifyLayout, horizon: Horizon) -> Any:
    """A root's sixth child is not looked at."""
    sixth = ((tree.parents == 0).cumsum(1) > 5) & (tree.parents == 0)
    parents = tree.parents.masked_fill(sixth, -1)
    return spec.accept_greedy(replace(tree, parents=parents), choices, layout, horizon)


def _moves_in_reverse(kv: PagedKV, layout: VerifyLayout, accepted: Acceptance) -> Any:
    """KV is moved one row after the other from the path's end."""
    if kv.page_size == 1:
        return spec.commit_kv(kv, layout, accepted)
    commit = spec.commit_kv(on("cpu", kv), layout, accepted)  # the right moves, made on a copy
    for pool in (*kv.keys, *kv.values):
        for src, dst in zip(commit.src, commit.dst, strict=True):
            for i in reversed(range(int((src >= 0).sum()))):
                pool[dst[i]] = pool[src[i]]
    return commit


def _third_start(
    tree: DraftTree, prefix_lens: Tensor, table: Tensor, q_lens: Tensor | None = None
) -> Any:
    """The mask of a third request starts as if the second had the first one's length."""
    layout = spec.plan_verify(tree, prefix_lens, table, q_lens)
    if layout.mask_indptr.numel() < 4:
        return layout
    indptr = layout.mask_indptr.clone()
    indptr[2] = 2 * indptr[1]
    return replace(layout, mask_indptr=indptr)


def _ties_by_row(drafts: Tensor, roots: Tensor, budget: Budget) -> Any:
    """Lets the larger token go first where two tie."""
    tree = spec.build_tree(drafts.flip(2), roots, budget)
    tokens = drafts.shape[2] - 1 - tree.token_ids
    real = torch.isfinite(tree.scores) & (tree.depths > 0)
    return replace(tree, token_ids=torch.where(real, tokens, tree.token_ids))


@dataclass(frozen=True)
class Part:
    """One exhaustive comparison."""

    name: str
    statement: str
    functions: tuple[str, ...]
    steps: Callable[[Package], Iterator[Step]]
    twin: str
    """What the wrong twin does, in one sentence."""
    wrong: Wrong


PARTS = (
    Part(
        "every_tree",
        "Every tree of up to 7 nodes at every budget up to 8: the ancestor bits are the reference's.",
        ("tree_mask",),
        trees_step,
        "A node six levels deep is taken for padding: only a chain of seven nodes has one.",
        Wrong(tree_mask=_six_deep),
    ),
    Part(
        "every_walk",
        "Every walk in every tree of up to 7 nodes: path, count and bonus are the reference's.",
        ("accept_greedy",),
        walks_step,
        "A root's sixth child is not looked at.",
        Wrong(accept_greedy=_sixth_child),
    ),
    Part(
        "every_commit",
        "Every ascending path in every width up to 9: slots, moved KV and lengths are the reference's.",
        ("commit_kv",),
        commits_step,
        "KV is moved from the path's end to its root.",
        Wrong(commit_kv=_moves_in_reverse),
    ),
    Part(
        "every_batch",
        "Every batch of up to 3 requests of every width up to 9: layout and masks are the reference's.",
        ("plan_verify", "tree_mask"),
        batches_step,
        "The third request's mask starts as if the second were as long as the first.",
        Wrong(plan_verify=_third_start),
    ),
    Part(
        "every_draft",
        "Every draft over a few log-probs, ties and -inf among them: the trees are the reference's.",
        ("build_tree",),
        drafts_step,
        "Of tied tokens the larger goes first.",
        Wrong(build_tree=_ties_by_row),
    ),
)


@dataclass(frozen=True)
class Checked:
    """What became of one part."""

    name: str
    cases: int
    differences: tuple[str, ...]
    found: str
    """Where the wrong twin was found; empty where it was not."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether there was no difference, and the wrong twin was found."""
        return not self.differences and bool(self.found)


def check_part(part: Part, fast: Package) -> Checked:
    """Run one part to its first difference, and its wrong twin."""
    start, cases, differences = perf_counter(), 0, []
    for looked_at, lines in part.steps(fast):
        cases += looked_at
        differences += lines
        if lines:
            break
    found = next((lines[0] for _, lines in part.steps(part.wrong) if lines), "")
    return Checked(part.name, cases, tuple(differences), found, perf_counter() - start)

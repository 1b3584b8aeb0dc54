"""Fresh random rounds for holding ``impl`` to ``spec``, and what to compare of each function.

``FUNCTIONS`` is the one list: a function joins by an entry that runs it, of either package, and
names what must be equal. Both run on the same inputs; the reference always on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddtree import impl, spec
from ddtree.spec import Acceptance, Budget, DraftTree, Horizon, PagedKV, VerifyLayout
from ddtree.spec.mask import Form, read_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("normal", "grid", "flat", "sparse", "zeros", "huge", "half", "bfloat16")
FORMS: tuple[Form, ...] = ("bits", "flat", "packed", "dense")
T = TypeVar("T")
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Inputs of every step of one round; later steps take the reference's results of earlier ones."""

    draft_log_probs: Tensor
    draft_logits: Tensor
    root_token_ids: Tensor
    budget: Budget
    topk: int | None
    prefix_lens: Tensor
    slot_table: Tensor
    page_size: int
    q_lens: Tensor | None
    tree: DraftTree
    layout: VerifyLayout
    target_ids: Tensor
    target_logits: Tensor
    uniforms: Tensor
    options: dict[str, Any]
    acceptance: Acceptance
    attention: tuple[Tensor, ...]
    """Query, key, value, key pool and value pool of one layer, and the pools' scales."""

    @property
    def horizon(self) -> Horizon:
        """Deepest drafted position."""
        return Horizon(self.draft_log_probs.shape[1])


def draft(kind: str, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Log-probs of one kind: ordinary, with ties, with -inf, near 0, out of float32 when summed."""
    normal = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    match kind:
        case "normal":
            return normal.log_softmax(-1)
        case "grid":
            return (normal * 2).round().log_softmax(-1)
        case "flat":
            return torch.zeros(shape).log_softmax(-1)
        case "sparse":
            return normal.log_softmax(-1).masked_fill(uniform < 0.7, -torch.inf)
        case "zeros":
            tiny = -uniform * 1e-18 - (normal < 0).float()
            return torch.where(uniform < 0.2, -torch.zeros(shape), tiny)
        case "huge":
            return -3.4e38 * uniform
        case "half":
            return normal.log_softmax(-1).half()
        case "bfloat16":
            return (normal * 3).log_softmax(-1).bfloat16()
    raise ValueError(kind)


def logits(kind: str, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Logits of one kind: ordinary, with ties, with -inf, close by or far apart, of three dtypes."""
    normal = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    match kind:
        case "normal":
            return normal * 4 + 9
        case "grid":
            return (normal * 2).round()
        case "flat":
            return torch.full(shape, -7.25)
        case "sparse":
            rows = torch.rand((*shape[:2], 1), generator=generator)
            return normal.masked_fill(uniform < rows * 1.2, -torch.inf)  # some rows entirely
        case "zeros":
            return torch.where(uniform < 0.2, -0.0, normal * 1e-8)  # log-probs that tie
        case "huge":
            return 3.4e38 * normal.clamp(-1, 1)
        case "half":
            return (normal * 300).half()
        case "bfloat16":
            return (normal * 5).bfloat16()
    raise ValueError(kind)


def case(seed: int, kind: str, batch: int, horizon: int, vocab: int, budget: int) -> Case:
    """Draw a round of that size; its draft agrees with the target often."""
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    log_probs = draft(kind, (batch, horizon, vocab), g)
    draft_logits = logits(kind, (batch, horizon, vocab), g)
    roots = torch.randint(0, vocab, (batch,), generator=g)
    topk = (None, None, 1, number(1, vocab))[number(0, 3)]
    tree = spec.build_tree(log_probs, roots, Budget(budget), topk)
    q_len = budget + 1
    prefix_lens = torch.randint(0, 24, (batch,), generator=g, dtype=torch.int32)
    page_size = (1, 4, 16)[number(0, 2)]
    pages = -(-(24 + q_len + number(0, 9)) // page_size)
    order = torch.randperm(batch * pages, generator=g)
    table = (order[:, None] * page_size + torch.arange(page_size)).reshape(batch, -1)
    spare = torch.randint(0, q_len, (batch,), generator=g)
    ragged = torch.minimum(tree.num_nodes + spare, torch.tensor(q_len)).int()
    q_lens = (None, tree.num_nodes, ragged)[number(0, 2)]
    layout = spec.plan_verify(tree, prefix_lens, table, q_lens)

    rows = int(layout.qo_indptr[-1])
    target_logits = torch.randn(rows, vocab, generator=g) * 2
    if number(0, 1):
        target_logits = target_logits.round()
    target_ids = torch.randint(0, vocab, (rows,), generator=g)
    for b, start in enumerate(layout.qo_indptr[:-1].tolist()):
        for node in torch.randperm(int(tree.num_nodes[b]), generator=g).tolist():
            if node and torch.rand((), generator=g) < 0.8:
                target_ids[start + int(tree.parents[b, node])] = tree.token_ids[b, node]
    target_logits[torch.arange(rows), target_ids] += 3
    options = {
        "temperature": (1.0, 0.0, 0.7, 1.9)[number(0, 3)],
        "top_k": (None, number(1, vocab))[number(0, 1)],
        "top_p": (None, 1.0, 0.9, 0.3)[number(0, 3)],
    }
    return Case(
        log_probs, draft_logits, roots, Budget(budget), topk, prefix_lens, table, page_size, q_lens,
        tree, layout,
        target_ids, target_logits, torch.rand(rows, dtype=torch.float64, generator=g), options,
        spec.accept_greedy(tree, target_ids, layout, Horizon(horizon)),
        attention_inputs(rows, int(table.max()) + 1, number(0, 1) == 1, g),
    )  # fmt: skip


def attention_inputs(
    rows: int, slots: int, fp8: bool, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Two KV heads, four query heads of 64 numbers; pools in float32 or fp8."""

    def random(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, 64, generator=generator)

    pools = random(2 * slots, 2).mul(50).to(torch.float8_e4m3fn if fp8 else torch.float32)
    scales = torch.rand(2, 2, generator=generator) / 50
    return random(rows, 4), random(rows, 2), random(rows, 2), *pools.split(slots), *scales


def moved(value: T, device: str) -> T:
    """Return a value with all its tensors on a device, as copies."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(moved(v, device) for v in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value


def named(prefix: str, value: Any) -> Named:
    """Return a contract object's tensors by name."""
    tensors = {f.name: getattr(value, f.name) for f in fields(value)}
    return {f"{prefix}.{name}": t for name, t in tensors.items() if isinstance(t, Tensor)}


def run_build_tree(package: ModuleType, c: Case) -> Named:
    """The trees."""
    return named("tree", package.build_tree(c.draft_log_probs, c.root_token_ids, c.budget, c.topk))


def run_build_tree_from_logits(package: ModuleType, c: Case) -> Named:
    """The trees of logits."""
    tree = package.build_tree(c.draft_logits, c.root_token_ids, c.budget, c.topk, from_logits=True)
    return named("tree", tree)


def run_plan_verify(package: ModuleType, c: Case) -> Named:
    """The layout's used part; what is left over must be inert."""
    layout = package.plan_verify(c.tree, c.prefix_lens, c.slot_table, c.q_lens)
    found = named("layout", layout)
    rows, entries = int(layout.qo_indptr[-1]), int(layout.kv_indptr[-1])
    for name, inert in (("positions", 0), ("out_cache_loc", -1)):
        tail = found[f"layout.{name}"][rows:]
        found[f"layout.{name} tail is inert"] = (tail == inert).all()
        found[f"layout.{name}"] = found[f"layout.{name}"][:rows]
    found["layout.kv_indices"] = layout.kv_indices[:entries]
    return found


def mask_matrices(mask: Any, layout: VerifyLayout, name: str) -> Named:
    """Each request's matrix as the reference reads it from that form."""
    mask, layout = moved(mask, "cpu"), moved(layout, "cpu")
    batch = layout.qo_indptr.numel() - 1
    return {f"{name} of request {b}": read_mask(mask, layout, b) for b in range(batch)}


def run_tree_mask(package: ModuleType, c: Case) -> Named:
    """Every form: what it says, and the very memory up to its end."""
    found: Named = {}
    for form in FORMS:
        mask = package.tree_mask(c.tree, c.layout, form)
        found |= mask_matrices(mask, c.layout, form)
        match form:
            case "bits":
                found["bits"] = mask.words
            case "flat":
                end = int(c.layout.mask_indptr[-1])
                found |= {"flat": mask.allowed[:end], "flat tail": mask.allowed[end:].any()}
            case "packed":
                end = int(mask.byte_indptr[-1])
                found |= {"packed": mask.packed[:end], "packed tail": mask.packed[end:].any()}
                found["byte_indptr"] = mask.byte_indptr
    return found


def run_convert_mask(package: ModuleType, c: Case) -> Named:
    """Every form from every other."""
    found: Named = {}
    for form in FORMS:
        mask = moved(
            spec.tree_mask(moved(c.tree, "cpu"), moved(c.layout, "cpu"), form),
            str(c.tree.parents.device),
        )
        for to in FORMS:
            converted = package.convert_mask(mask, c.layout, to)
            found |= mask_matrices(converted, c.layout, f"{to} from {form}")
    return found


def run_verify_attention(package: ModuleType, c: Case) -> Named:
    """Output and log-sum-exp with a mask of every form."""
    *tensors, key_scale, value_scale = c.attention
    found: Named = {}
    for form in FORMS:
        mask = spec.tree_mask(moved(c.tree, "cpu"), moved(c.layout, "cpu"), form)
        output, lse = package.verify_attention(
            *tensors, c.layout, moved(mask, str(c.tree.parents.device)),
            key_scale=key_scale, value_scale=value_scale, return_lse=True,
        )  # fmt: skip
        found |= {f"output by {form}": output, f"log-sum-exp by {form}": lse}
    return found


def run_accept_greedy(package: ModuleType, c: Case) -> Named:
    """The accepted paths."""
    return named("acceptance", package.accept_greedy(c.tree, c.target_ids, c.layout, c.horizon))


def run_accept_sampled(package: ModuleType, c: Case) -> Named:
    """The accepted paths of samples."""
    acceptance = package.accept_sampled(
        c.tree, c.target_logits, c.layout, c.horizon, c.uniforms, **c.options
    )
    return named("acceptance", acceptance)


def run_commit_kv(package: ModuleType, c: Case) -> Named:
    """What the commit says, and what it left in the table and the pools, of fp8 where pages are largest."""
    slots = int(c.slot_table.max()) + 1
    content = torch.arange(6 * slots * 2 * 4, dtype=torch.float32).reshape(6, slots, 2, 4)
    content = content.to(c.slot_table.device)
    pools = tuple(content.view(torch.float8_e4m3fn if c.page_size == 16 else torch.float32))
    kv = PagedKV(pools[:3], pools[3:], c.slot_table.clone(), c.page_size)
    commit = package.commit_kv(kv, c.layout, c.acceptance)
    return named("commit", commit) | {"slot_table": kv.slot_table, "pools": content}


FUNCTIONS: dict[str, Callable[[ModuleType, Case], Named]] = {
    "build_tree": run_build_tree,
    "build_tree from logits": run_build_tree_from_logits,
    "plan_verify": run_plan_verify,
    "tree_mask": run_tree_mask,
    "convert_mask": run_convert_mask,
    "verify_attention": run_verify_attention,
    "accept_greedy": run_accept_greedy,
    "accept_sampled": run_accept_sampled,
    "commit_kv": run_commit_kv,
}
CLOSE = {"verify_attention": 2e-6}
"""Largest difference, over 1 or the number expected, of functions that sum floats in their own order."""


def differences(name: str, c: Case) -> list[str]:
    """Say where impl's results of one function differ from the reference's."""
    run = FUNCTIONS[name]
    expected, found = run(spec, c), moved(c, DEVICE)
    results = run(impl, found)
    lines = [f"{key} is missing" for key in expected.keys() - results.keys()]
    for key, value in expected.items():
        if key in results:
            lines += _difference(key, results[key].cpu(), value, CLOSE.get(name, 0.0))
    return lines


def _difference(key: str, found: Tensor, expected: Tensor, close: float) -> list[str]:
    """Say where two tensors differ, with coordinates."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return [
            f"{key}: {list(found.shape)} {found.dtype} for {list(expected.shape)} {expected.dtype}"
        ]
    differ = found != expected
    if close:
        differ &= ~((found - expected).abs() <= close * expected.abs().clamp(min=1))
    where = differ.nonzero()[:3].tolist()
    return [f"{key}{at}: {found[tuple(at)]} for {expected[tuple(at)]}" for at in where]

"""Hypothesis strategies for everything that one verify round consists of.

They are made to be used from another project's tests, to hold an engine to the contracts:

    from hypothesis import given
    from ddtree.invariants import check, strategies as st
    from my_engine import plan, run_round

    @given(st.verify_calls(max_batch=3))
    def test_the_metadata(call: st.VerifyCall) -> None:
        layout = plan(call.tree, call.prefix_lens, call.slots.table)
        check(call.tree, layout, prefix_lens=call.prefix_lens, slot_table=call.slots.table)

    @given(st.round_cases())
    def test_the_text(case: st.RoundCase) -> None:
        target = case.target()
        emitted = run_round(case, target)  # a list of new tokens for each request
        for prompt, root, tokens in zip(case.prompts, case.root_token_ids.tolist(), emitted):
            assert tokens == target.greedy((*prompt, root), len(tokens))

Sizes are small by default and cluster where engines break: budgets around 8, 16, 32 and 64, prefix
0, requests that differ in prefix, ties, shuffled pages. Each value is drawn as a few integers and
byte strings, so a failing example shrinks to one request, short trees, zeros and pages in order.
Needs the ``fuzz`` extra.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

from ddtree.invariants.exact_target import ExactTarget
from ddtree.spec.contracts import (
    Acceptance,
    Budget,
    DraftTree,
    Horizon,
    TreeMask,
    VerifyLayout,
)
from ddtree.spec.layout import plan_verify
from ddtree.spec.mask import Form, tree_mask
from ddtree.spec.sampling import Sampling
from ddtree.spec.tree import build_tree

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ddtree.invariants.strategies needs hypothesis: pip install 'ddtree[fuzz]'"
    ) from error

AWKWARD_BUDGETS = (0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65)
"""Block size 8 with its coincidence at 7, and one below, at and above each word and tile."""
PAGE_SIZES = (1, 4, 16)
FORMS: tuple[Form, ...] = ("flat", "packed", "dense", "bits")
KINDS = ("grid", "flat", "spiky", "bf16", "sparse")
"""What ``draft_log_probs`` can look like."""


@dataclass(frozen=True)
class SlotTable:
    """Where the KV entries of a batch lie in a paged pool."""

    table: Int64[Tensor, "B max_context"]
    """Slot of entry i of request b; no two entries share one."""
    page_size: int
    num_slots: int
    """Slots of the pool; some belong to nobody."""


@dataclass(frozen=True)
class VerifyCall:
    """One verify pass: the trees, where they lie, and the layout that says so."""

    tree: DraftTree
    prefix_lens: Int32[Tensor, " B"]
    slots: SlotTable
    q_lens: Int32[Tensor, " B"] | None
    """None: every request has ``Q`` rows."""
    layout: VerifyLayout


@dataclass(frozen=True)
class BufferSizes:
    """Capacities of fixed buffers that a call fits into."""

    max_batch: int
    max_q_len: int
    max_context: int


@dataclass(frozen=True)
class RoundCase:
    """Input of one whole round against an exact target."""

    draft_log_probs: Float32[Tensor, "B horizon vocab"]
    root_token_ids: Int64[Tensor, " B"]
    prompts: tuple[tuple[int, ...], ...]
    """Committed tokens of each request; the root is not among them."""
    budget: Budget
    topk: int | None
    slots: SlotTable

    @property
    def prefix_lens(self) -> Int32[Tensor, " B"]:
        """KV entries committed before the round."""
        return torch.tensor([len(prompt) for prompt in self.prompts], dtype=torch.int32)

    def target(self) -> ExactTarget:
        """A fresh target that has read the prompts."""
        vocab = self.draft_log_probs.shape[2]
        return ExactTarget(
            self.prompts, self.slots.table, self.slots.num_slots, vocab, self.slots.page_size
        )


def budgets(max_value: int = 65) -> st.SearchStrategy[Budget]:
    """Budgets from 0 to ``max_value``, the awkward ones most of the time."""
    awkward = st.sampled_from([b for b in AWKWARD_BUDGETS if b <= max_value])
    return st.one_of(awkward, awkward, st.integers(0, max_value)).map(Budget)


def prefix_lens(
    min_batch: int = 1, max_batch: int = 3, max_value: int = 20
) -> st.SearchStrategy[Int32[Tensor, " B"]]:
    """Prefix lengths of a batch; 0 and differing ones are common."""
    length = st.one_of(st.just(0), st.integers(0, max_value))
    lengths = st.lists(length, min_size=min_batch, max_size=max_batch)
    return lengths.map(lambda n: torch.tensor(n, dtype=torch.int32))


@st.composite
def draft_log_probs(
    draw: st.DrawFn,
    batch: int,
    horizon: int,
    vocab: int,
    kinds: Sequence[str] = KINDS,
) -> Float32[Tensor, "B horizon vocab"]:
    """Per-position log-probs of a drafter.

    Kinds: ``grid`` (few levels, many ties), ``flat`` (all equal), ``spiky`` (nearly one-hot),
    ``bf16`` (fine levels rounded to bfloat16, so near ones tie), ``sparse`` (some candidates -inf,
    at times all of a depth, so that fewer than budget remain).
    """
    kind = draw(st.sampled_from(kinds))
    size = batch * horizon * vocab
    if kind == "flat":
        levels = torch.zeros(size)
    else:
        levels = torch.tensor(list(draw(st.binary(min_size=size, max_size=size)))).float()
    levels = levels.reshape(batch, horizon, vocab)
    match kind:
        case "flat":
            return torch.log_softmax(levels, -1)
        case "grid":
            return torch.log_softmax(levels.remainder(6) / 2, -1)
        case "spiky":
            return torch.log_softmax(levels.remainder(4) * 9, -1)
        case "bf16":
            return torch.log_softmax(levels / 64, -1).bfloat16().float()
        case "sparse":
            levels = levels.remainder(5)
            log_probs = torch.log_softmax(levels.masked_fill(levels == 0, -torch.inf), -1)
            return log_probs.masked_fill(levels == 0, -torch.inf)
    raise ValueError(f"draft_log_probs has no kind {kind!r}; it has {', '.join(KINDS)}")


@st.composite
def trees(
    draw: st.DrawFn,
    batch: int | None = None,
    max_budget: int = 65,
    max_horizon: int = 4,
    max_vocab: int = 8,
) -> DraftTree:
    """Best-first trees, as ``spec.build_tree`` builds them from ``draft_log_probs``."""
    batch = draw(st.integers(1, 3)) if batch is None else batch
    horizon, vocab = draw(st.integers(0, max_horizon)), draw(st.integers(1, max_vocab))
    log_probs = draw(draft_log_probs(batch, horizon, vocab))
    roots = draw(st.lists(st.integers(0, vocab - 1), min_size=batch, max_size=batch))
    budget = draw(budgets(max_budget))
    topk = draw(st.none() | st.integers(1, vocab))
    return build_tree(log_probs, torch.tensor(roots, dtype=torch.int64), budget, topk)


@st.composite
def arbitrary_trees(
    draw: st.DrawFn,
    batch: int | None = None,
    max_q_len: int = 34,
    max_horizon: int = 6,
    vocab: int = 8,
) -> DraftTree:
    """Any trees whose parents precede their children and whose siblings differ, best-first or not.

    Token 0 is common. Scores fall with the row, which every tree of this order allows.
    """
    batch = draw(st.integers(1, 3)) if batch is None else batch
    q_len = draw(st.integers(1, max_q_len))
    tokens = torch.zeros(batch, q_len, dtype=torch.int64)
    parents = torch.full((batch, q_len), -1, dtype=torch.int32)
    depths = torch.zeros(batch, q_len, dtype=torch.int32)
    scores = torch.full((batch, q_len), -torch.inf, dtype=torch.float64)
    num_nodes = torch.ones(batch, dtype=torch.int32)
    for b in range(batch):
        wanted = draw(st.integers(1, q_len))
        picks = draw(st.binary(min_size=2 * wanted, max_size=2 * wanted))
        tokens[b, 0] = picks[1] % vocab
        scores[b, 0] = 0.0
        children: list[set[int]] = [set()]  # tokens of each node's children
        for row in range(1, wanted):
            open_rows = [
                r for r in range(row) if depths[b, r] < max_horizon and len(children[r]) < vocab
            ]
            if not open_rows:
                break
            parent = open_rows[picks[2 * row] % len(open_rows)]
            free = [token for token in range(vocab) if token not in children[parent]]
            token = free[picks[2 * row + 1] % len(free)]
            tokens[b, row], parents[b, row] = token, parent
            depths[b, row], scores[b, row] = depths[b, parent] + 1, -float(row)
            children[parent].add(token)
            children.append(set())
        num_nodes[b] = len(children)
    return DraftTree(tokens, parents, depths, scores, num_nodes)


@st.composite
def slot_tables(
    draw: st.DrawFn,
    batch: int,
    max_context: int,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> SlotTable:
    """Slot tables of a paged pool: whole pages for each request, shuffled, some pages spare."""
    page_size = draw(st.sampled_from(page_sizes))
    pages = -(-max_context // page_size)  # of one request
    total = batch * pages + draw(st.integers(0, 3))
    keys = draw(st.binary(min_size=total, max_size=total))
    order = sorted(range(total), key=lambda page: keys[page])  # equal keys: pages in order
    first = torch.tensor(order, dtype=torch.int64)[: batch * pages] * page_size
    slots = first[:, None] + torch.arange(page_size)
    table = slots.reshape(batch, pages * page_size)[:, :max_context].contiguous()
    return SlotTable(table, page_size, total * page_size)


@st.composite
def q_lens(draw: st.DrawFn, tree: DraftTree) -> Int32[Tensor, " B"] | None:
    """None (fixed: all ``Q``), or ragged widths between ``num_nodes`` and ``Q``."""
    if draw(st.booleans()):
        return None
    largest = tree.token_ids.shape[1]
    widths = [draw(st.integers(n, largest)) for n in tree.num_nodes.tolist()]
    return torch.tensor(widths, dtype=torch.int32)


@st.composite
def verify_calls(
    draw: st.DrawFn,
    max_batch: int = 3,
    max_q_len: int = 34,
    max_prefix: int = 20,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> VerifyCall:
    """Verify passes: best-first or arbitrary trees, ragged or fixed, prefixes 0 and differing."""
    lens = draw(prefix_lens(max_batch=max_batch, max_value=max_prefix))
    batch = len(lens)
    tree = draw(
        st.one_of(
            arbitrary_trees(batch, max_q_len=max_q_len), trees(batch, max_budget=max_q_len - 1)
        )
    )
    spare = draw(st.integers(0, 5))
    max_context = int(lens.max()) + tree.token_ids.shape[1] + spare
    slots = draw(slot_tables(batch, max_context, page_sizes))
    widths = draw(q_lens(tree))
    return VerifyCall(tree, lens, slots, widths, plan_verify(tree, lens, slots.table, widths))


def masks(call: VerifyCall, forms: Sequence[Form] = FORMS) -> st.SearchStrategy[TreeMask]:
    """The call's ancestor mask in any of the forms."""
    return st.sampled_from(forms).map(lambda form: tree_mask(call.tree, call.layout, form))


@st.composite
def acceptances(draw: st.DrawFn, tree: DraftTree, horizon: Horizon | None = None) -> Acceptance:
    """What some target might accept of ``tree``: any path from the root, any bonus that ends it."""
    deepest = int(tree.depths.max())
    width = (deepest if horizon is None else horizon) + 1
    batch = tree.token_ids.shape[0]
    nodes = torch.full((batch, width), -1, dtype=torch.int32)
    counts = torch.zeros(batch, dtype=torch.int32)
    bonus = torch.zeros(batch, dtype=torch.int64)
    for b in range(batch):
        real = int(tree.num_nodes[b])
        last = draw(st.integers(0, real - 1))
        path = [last]
        while path[0] != 0:
            path.insert(0, int(tree.parents[b, path[0]]))
        nodes[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
        counts[b] = len(path)
        is_child = tree.parents[b, :real] == last
        taken = set(tree.token_ids[b, :real][is_child].tolist())
        largest = int(tree.token_ids[b].max()) + 1
        bonus[b] = draw(st.sampled_from([t for t in range(largest + 1) if t not in taken]))
    return Acceptance(nodes, counts, bonus)


def buffer_sizes(
    batch: int, max_q_len: int, max_context: int, spare: int = 3
) -> st.SearchStrategy[BufferSizes]:
    """Capacities of fixed buffers, each at least what the call needs and at most ``spare`` more."""
    return st.builds(
        BufferSizes,
        st.integers(batch, batch + spare),
        st.integers(max_q_len, max_q_len + spare),
        st.integers(max_context, max_context + spare),
    )


@st.composite
def samplings(draw: st.DrawFn, vocab: int) -> Sampling:
    """Temperature (0 included), top-k and top-p, each off or on, and a seed."""
    return Sampling(
        temperature=draw(st.sampled_from([1.0, 0.0, 0.5, 2.0])),
        top_k=draw(st.none() | st.integers(1, vocab)),
        top_p=draw(st.none() | st.sampled_from([1.0, 0.9, 0.5, 0.1])),
        seed=draw(st.integers(0, 2**63)),  # room to add the request's number
    )


@st.composite
def round_cases(
    draw: st.DrawFn,
    max_batch: int = 3,
    max_budget: int = 17,
    max_horizon: int = 4,
    max_vocab: int = 6,
    max_prefix: int = 9,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> RoundCase:
    """Whole rounds; the draft often likes what the target will choose, so that paths are accepted."""
    budget = draw(budgets(max_budget))
    horizon, vocab = draw(st.integers(0, max_horizon)), draw(st.integers(1, max_vocab))
    token = st.integers(0, vocab - 1)
    prompt = st.lists(token, max_size=max_prefix).map(tuple)
    prompts = draw(st.lists(prompt, min_size=1, max_size=max_batch).map(tuple))
    batch = len(prompts)
    roots = draw(st.lists(token, min_size=batch, max_size=batch))
    spare = draw(st.integers(0, 3 * (horizon + 1)))  # room for later rounds
    max_context = max(len(p) for p in prompts) + budget + 1 + spare
    slots = draw(slot_tables(batch, max_context, page_sizes))
    log_probs = draw(draft_log_probs(batch, horizon, vocab))
    case = RoundCase(
        log_probs,
        torch.tensor(roots, dtype=torch.int64),
        prompts,
        budget,
        draw(st.none() | st.integers(1, vocab)),
        slots,
    )
    target = case.target()
    for b in range(batch):
        liked = target.greedy((*prompts[b], roots[b]), draw(st.integers(0, horizon)))
        for depth, chosen in enumerate(liked):
            log_probs[b, depth, chosen] = -0.125
    return case

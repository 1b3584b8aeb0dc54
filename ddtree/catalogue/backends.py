"""Attention backends with one fault each, to be found by conformance and named by isolation.

Each is the reference's attention behind something that a real engine did wrong: a width from another
source, a path that was mended while its twin was not, a mask taken for another. ``decides`` says in the
words of the isolator which calls it fails on: what ``ddtree isolate`` must find.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree.catalogue.calls import ends
from ddtree.spec import plan_verify, verify_attention
from ddtree.spec.contracts import FlatMask, PrefixLen, QLen, VerifyLayout
from ddtree.spec.index import kv_len, mask_len
from ddtree.spec.mask import read_mask

WIDTH = 8
"""The configured width of all: a block size of 8, right for budget 7 alone."""
FIELDS = ("qo_indptr", "mask_indptr", "max_q_len")


class Pass(NamedTuple):
    """What a fault may spoil: the layout and the mask of one call, and the size of its pages."""

    layout: VerifyLayout
    mask: FlatMask
    page_size: int


Spoil = Callable[[Pass], Pass]


class Faulty:
    """The reference's attention on a spoilt pass, eager and captured alike unless told otherwise."""

    def __init__(self, spoil: Spoil, *, eager: bool = True, captured: bool = True) -> None:
        """Wrap a fault; ``eager`` and ``captured`` say which paths have it."""
        self.spoil, self.eager, self.captured = spoil, eager, captured

    def verify_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        layout: VerifyLayout,
        mask: FlatMask,
        *,
        page_size: int = 1,
    ) -> Tensor:
        """Attend, wrongly."""
        wrong = Pass(layout, mask, page_size)
        if self.captured if layout.is_captured else self.eager:
            wrong = self.spoil(wrong)
        rows = query.shape[0]
        beyond = max(int(wrong.layout.qo_indptr.max()) - rows, 0)
        query, key, value = (
            torch.cat([t, t.new_zeros(beyond, *t.shape[1:])]) for t in (query, key, value)
        )
        output, _ = verify_attention(
            query, key, value, key_pool, value_pool, wrong.layout, behind(wrong.layout, wrong.mask)
        )
        return cut_rows(output, layout, wrong.layout.max_q_len)[:rows]


class FoundingBug(Faulty):
    """Every width from configuration: in the engine's metadata code and in what its attention is given."""

    def __init__(
        self,
        fields: Collection[str] = FIELDS,
        *,
        width: int = WIDTH,
        eager: bool = True,
        captured: bool = True,
    ) -> None:
        """Make those fields from the configured width."""
        super().__init__(
            lambda p: p._replace(layout=configured(p.layout, fields, width)),
            eager=eager,
            captured=captured,
        )
        self.fields, self.width = fields, width

    def plan_verify(self, tree: Any, prefix_lens: Tensor, slot_table: Tensor) -> VerifyLayout:
        """The engine's metadata code."""
        return configured(plan_verify(tree, prefix_lens, slot_table), self.fields, self.width)


class Stale(Faulty):
    """A replay that reads the prefix lengths of the call that was captured."""

    def __init__(self) -> None:
        """Spoil nothing by itself."""
        super().__init__(lambda p: p)

    def capture(self, *arguments: Any, **options: Any) -> Callable[[], Tensor]:
        """Bake the offsets in."""
        query, key, value, key_pool, value_pool, layout, mask = arguments
        baked = layout.kv_indptr.clone()
        return lambda: self.verify_attention(
            query,
            key,
            value,
            key_pool,
            value_pool,
            replace(layout, kv_indptr=baked),
            mask,
            **options,
        )


def configured(
    layout: VerifyLayout, fields: Collection[str] = FIELDS, width: int = WIDTH
) -> VerifyLayout:
    """The founding bug: these fields from the configured width, by the engine's own formulas."""
    used = [int(n > 0) for n in layout.qo_indptr.diff().tolist()]
    prefixes = layout.kv_indptr.diff().tolist()
    segments = [
        n * mask_len(PrefixLen(p), QLen(width)) for n, p in zip(used, prefixes, strict=True)
    ]
    wrong: dict[str, Any] = {
        "qo_indptr": ends([width * n for n in used], layout.qo_indptr),
        "mask_indptr": ends(segments, layout.mask_indptr),
        "max_q_len": QLen(width),
    }
    return replace(layout, **{name: wrong[name] for name in fields})


def behind(layout: VerifyLayout, mask: FlatMask) -> FlatMask:
    """The mask with what lies behind it in memory: a kernel reads on where the reference would refuse."""
    rows, prefixes = layout.qo_indptr.diff(), layout.kv_indptr.diff()
    ends_at = layout.mask_indptr[:-1] + rows * (prefixes + rows)
    missing = max(int(ends_at.max()) - mask.allowed.numel(), 0)
    return FlatMask(torch.cat([mask.allowed, mask.allowed.new_ones(missing)]))


def cut_rows(output: Tensor, layout: VerifyLayout, max_q_len: int) -> Tensor:
    """What a launch for ``max_q_len`` rows a request leaves of an output: later rows are never computed."""
    output = output.clone()
    for start, end in zip(layout.qo_indptr.tolist(), layout.qo_indptr[1:].tolist(), strict=False):
        output[min(start + max_q_len, end) : end] = 0
    return output


def of_masks(change: Callable[[Tensor, int], Tensor]) -> Spoil:
    """Change each request's ``[q_len, kv]`` matrix, given its prefix length."""

    def spoil(given: Pass) -> Pass:
        layout, allowed = given.layout, given.mask.allowed.clone()
        for b, prefix_len in enumerate(layout.kv_indptr.diff().tolist()):
            start, end = layout.mask_indptr[b : b + 2].tolist()
            matrix = change(read_mask(given.mask, layout, b).clone(), prefix_len)
            allowed[start:end] = matrix.flatten()
        return given._replace(mask=FlatMask(allowed))

    return spoil


def causal(seen: Tensor, prefix_len: int) -> Tensor:
    """Each row sees the rows before it, ancestors or not; padding stays apart."""
    real = _nodes(seen, prefix_len)
    own = seen[:, prefix_len:]
    own[:real, :real] |= torch.ones_like(own[:real, :real]).tril()
    return seen


def padding_seen(seen: Tensor, prefix_len: int) -> Tensor:
    """Every row sees the padding."""
    real = _nodes(seen, prefix_len)
    seen[:, prefix_len + real :] = True
    return seen


def one_word(seen: Tensor, prefix_len: int) -> Tensor:
    """Tree columns are kept in one word of 32 bits."""
    seen[:, kv_len(PrefixLen(prefix_len), QLen(32)) :] = False
    return seen


def one_tile(seen: Tensor, prefix_len: int) -> Tensor:
    """The loop over the prefix ends after its first tile of 16."""
    seen[:, 16:prefix_len] = False
    return seen


def _nodes(seen: Tensor, prefix_len: int) -> int:
    """Real nodes of a request: a padding row does not see the root."""
    return max(int(seen[:, prefix_len].sum()), 1) if seen.shape[0] else 0


def _without_tree_columns(given: Pass) -> Pass:
    """Segments cumulated as rows times prefix; each begins with what the one before ends with."""
    layout = given.layout
    rows, prefixes = layout.qo_indptr.diff().tolist(), layout.kv_indptr.diff().tolist()
    segments = [q * p for q, p in zip(rows, prefixes, strict=True)]
    return given._replace(layout=replace(layout, mask_indptr=ends(segments, layout.mask_indptr)))


def _narrow_buffer(given: Pass) -> Pass:
    """Rows past the configured width find no room in the mask's buffer."""

    def change(seen: Tensor, _prefix_len: int) -> Tensor:
        seen[WIDTH:] = False
        return seen

    return of_masks(change)(given)


def _first_slots(given: Pass) -> Pass:
    """The prefix is read from the first slot of each page."""
    slots = given.layout.kv_indices
    first = slots - slots % given.page_size
    return given._replace(layout=replace(given.layout, kv_indices=first))


def _branches_in_pages(given: Pass) -> Pass:
    """Branches of a paged tree fall together (SGLang 26972)."""
    return of_masks(causal)(given) if given.page_size > 1 else given


def _last_left_out(given: Pass) -> Pass:
    """The last request of a batch has no program."""
    layout = given.layout
    used = int((layout.qo_indptr.diff() > 0).sum())
    rows = layout.qo_indptr.clone()
    rows[used:] = rows[used - 1]
    return given._replace(layout=replace(layout, qo_indptr=rows))


class Flaky(Faulty):
    """Now and then a row is blind, whatever the call."""

    def __init__(self) -> None:
        """Begin at the first call."""
        self.calls = 0
        super().__init__(self._sometimes)

    def _sometimes(self, given: Pass) -> Pass:
        self.calls += 1
        return of_masks(lambda seen, _: ~seen)(given) if self.calls * 7919 % 31 < 11 else given


@dataclass(frozen=True)
class FaultyBackend:
    """A backend with one fault."""

    name: str
    what: str
    make: Callable[[], Faulty]
    decides: str
    """The rule that isolation must find; empty: it must say that it cannot tell."""


CAPTURED = "execution is not eager"
BACKENDS: tuple[FaultyBackend, ...] = (
    FaultyBackend("founding-bug", "all three fields from width 8", FoundingBug, "q_len != 8"),
    FaultyBackend(
        "founding-bug-qo_indptr", "the rows alone from width 8",
        lambda: FoundingBug(["qo_indptr"]), "q_len != 8",
    ),
    FaultyBackend(
        "founding-bug-mask_indptr", "the mask segments alone from width 8",
        lambda: FoundingBug(["mask_indptr"]), "q_len of a request before it != 8",
    ),
    FaultyBackend(
        "founding-bug-max_q_len", "the launch alone from width 8",
        lambda: FoundingBug(["max_q_len"]), "num_nodes > 8",
    ),
    FaultyBackend(
        "founding-bug-eager", "the captured path mended, the eager one forgotten",
        lambda: FoundingBug(captured=False), "q_len != 8 and execution is eager",
    ),
    FaultyBackend(
        "founding-bug-replay", "the eager path mended, the captured one forgotten",
        lambda: FoundingBug(eager=False), f"q_len != 8 and {CAPTURED}",
    ),
    FaultyBackend(
        "narrow-buffer", "a graph's mask buffer of the configured width",
        lambda: Faulty(_narrow_buffer, eager=False), f"num_nodes > 8 and {CAPTURED}",
    ),
    FaultyBackend(
        "inverted", "True taken for hidden",
        lambda: Faulty(of_masks(lambda seen, _: ~seen)), "always",
    ),
    FaultyBackend(
        "causal-by-row", "the tree taken for a chain",
        lambda: Faulty(of_masks(causal)), "the tree branches",
    ),
    FaultyBackend(
        "padding-visible", "padding seen by real rows",
        lambda: Faulty(of_masks(padding_seen)), "num_nodes < q_len",
    ),
    FaultyBackend(
        "mask-ignored", "causal, and padding seen: branching or padding shows it",
        lambda: Faulty(of_masks(lambda seen, p: padding_seen(causal(seen, p), p))),
        "the tree branches or num_nodes < q_len",
    ),
    FaultyBackend(
        "one-word", "columns kept in 32 bits",
        lambda: Faulty(of_masks(one_word)), "num_nodes > 32",
    ),
    FaultyBackend(
        "one-tile", "one tile of the prefix is read",
        lambda: Faulty(of_masks(one_tile)), "prefix_len > 16",
    ),
    FaultyBackend(
        "mask-offsets", "mask segments cumulated without the tree's columns",
        lambda: Faulty(_without_tree_columns), "the request is not the first",
    ),
    FaultyBackend(
        "last-request", "the last request of a batch is left out",
        lambda: Faulty(_last_left_out), "the request is the last",
    ),
    FaultyBackend(
        "pages", "the first slot of a page for all of its entries",
        lambda: Faulty(_first_slots), "prefix_len > 1 and page_size > 1",
    ),
    FaultyBackend(
        "branches-in-pages", "branches of a paged tree fall together",
        lambda: Faulty(_branches_in_pages), "the tree branches and page_size > 1",
    ),
    FaultyBackend(
        "stale-prefix", "a replay reads the captured prefix lengths", Stale, "execution is replay"
    ),
    FaultyBackend("flaky", "now and then, whatever the call", Flaky, ""),
)  # fmt: skip
"""By how far the fault lies from the founding bug."""

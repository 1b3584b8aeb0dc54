"""The founding bug and its kin, kept alive: each garbles the attention, and the checker names each.

The bug: the verify pass takes its width from configuration (block size 8) where the call has budget + 1
query rows. With budget 7 the two agree, so nothing shows, which is how it went unseen.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hs
from torch import Tensor

from ddtree.decoding.founding_bug import FIELDS, configured_width
from ddtree.invariants import Call, InvariantViolation, check, violations
from ddtree.invariants import strategies as st
from ddtree.invariants.claimed import index
from ddtree.invariants.exact_target import ExactTarget
from ddtree.spec.attention import verify_attention
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import Budget, DraftTree, FlatMask, PrefixLen, QLen, VerifyLayout
from ddtree.spec.errors import InputError
from ddtree.spec.layout import plan_verify
from ddtree.spec.mask import tree_mask
from ddtree.spec.round import verify_round
from ddtree.spec.tree import build_tree
from tests.trees import tree_of

CONFIGURED = 8
"""The block size, which the engine took for the width."""
HORIZON = 7
BUDGETS = (1, 7, 8, 16, 63)
TOPKS = (1, 2, 4)
PREFIXES = ((5,), (5, 3), (0, 20, 3))
NAMES = {"qo_indptr": "qo_indptr", "mask_indptr": "mask_len", "max_q_len": "max_q_len"}
"""The invariant that each field's wrong width breaks."""
SUBSETS = [fields for size in (1, 2, 3) for fields in combinations(FIELDS, size)]


@dataclass(frozen=True)
class Pass:
    """One verify pass as an engine holds it: eagerly, or in fixed buffers."""

    tree: DraftTree
    layout: VerifyLayout
    mask: FlatMask
    prefix_lens: Tensor

    @property
    def real(self) -> Tensor:
        """Which query rows are real nodes."""
        rows, found = self.tree.parents.shape[1], []
        for count in self.tree.num_nodes.tolist():
            found += [row < count for row in range(rows)]
        return torch.tensor(found)


def make_pass(
    budget: int, topk: int, prefixes: tuple[int, ...], path: str, horizon: int = HORIZON
) -> Pass:
    """A right pass, eager or through fixed buffers that a larger call used before."""
    batch = len(prefixes)
    generator = torch.Generator().manual_seed(budget)
    draft = torch.randn(batch, horizon, 6, generator=generator).log_softmax(-1)
    tree = build_tree(draft, torch.arange(batch), Budget(budget), topk)
    lens = torch.tensor(prefixes, dtype=torch.int32)
    width = max(prefixes) + budget + 1
    layout = plan_verify(tree, lens, torch.arange(batch * width).reshape(batch, width))
    mask = tree_mask(tree, layout, "flat")
    if path == "eager":
        return Pass(tree, layout, mask, lens)
    buffers = VerifyBuffers(batch + 1, QLen(max(budget + 1, CONFIGURED)), max(prefixes) + 2)
    buffers.mask.allowed.fill_(True)
    buffers.fill(tree, layout, mask)
    return Pass(tree, buffers.layout, buffers.mask, lens)


def configured(right: Pass, fields: tuple[str, ...], width: int = CONFIGURED) -> Pass:
    """The same pass with some fields made from the configured width."""
    return replace(right, layout=configured_width(right.layout, width, fields))


def attend(held: Pass) -> Tensor | None:
    """Attention's output at the real rows; None where it would read outside its memory."""
    generator = torch.Generator().manual_seed(0)
    rows = max(held.layout.positions.numel(), held.real.numel())
    query, key, value = torch.randn(3, rows, 1, 4, generator=generator)
    slots = max(held.layout.kv_indices.tolist()) + 1
    key_pool, value_pool = torch.randn(2, slots, 1, 4, generator=generator)
    try:
        output, _ = verify_attention(
            query, key, value, key_pool, value_pool, held.layout, held.mask
        )
    except InputError:
        return None
    return output[: held.real.numel()][held.real]


def is_garbled(wrong: Pass, right: Pass) -> bool:
    """Whether some real row's output differs beyond any rounding, or memory is overrun."""
    expected, found = attend(right), attend(wrong)
    assert expected is not None
    return found is None or not torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


def broken(held: Pass, q_lens: Tensor | None = None) -> set[str]:
    """The invariants that the checker finds broken, told the call's own widths or not."""
    known = {"prefix_lens": held.prefix_lens, "q_lens": q_lens}
    call = Call.of(held.tree, held.layout, held.mask, **known)
    return {violation.invariant for violation in violations(call)}


@pytest.mark.parametrize("path", ["eager", "buffers"])
@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("topk", TOPKS)
def test_a_right_pass_is_clean(
    budget: int, topk: int, prefixes: tuple[int, ...], path: str
) -> None:
    """The checker finds nothing where nothing is wrong."""
    assert broken(make_pass(budget, topk, prefixes, path)) == set()


@pytest.mark.parametrize("path", ["eager", "buffers"])
@pytest.mark.parametrize("fields", SUBSETS, ids="+".join)
@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("topk", TOPKS)
def test_a_configured_width(
    budget: int, topk: int, prefixes: tuple[int, ...], fields: tuple[str, ...], path: str
) -> None:
    """It garbles and is named by the field it is in, unless it happens to be the call's own width.

    Two things garble nothing here, and are named all the same: ``max_q_len``, which sizes a kernel's
    grid and which the reference has no use for, and ``mask_indptr`` of a single request, whose
    segment starts at 0 whatever the width. Larger captured buffers may have a larger ``max_q_len``.
    """
    right = make_pass(budget, topk, prefixes, path)
    wrong = configured(right, fields)
    if budget + 1 == CONFIGURED:
        assert not is_garbled(wrong, right)
        assert broken(wrong) == set()
        return
    reaches_output = "qo_indptr" in fields or ("mask_indptr" in fields and len(prefixes) > 1)
    assert is_garbled(wrong, right) == reaches_output
    may_be_larger = path == "buffers" and budget + 1 < CONFIGURED
    expected = {NAMES[field] for field in fields if not (field == "max_q_len" and may_be_larger)}
    found = broken(wrong)
    assert expected <= found <= expected | {"mask_indptr"}
    if not expected:
        return
    with pytest.raises(InvariantViolation) as caught:
        check(wrong.tree, wrong.layout, wrong.mask, prefix_lens=wrong.prefix_lens)
    first = caught.value
    assert first.invariant in found
    if "mask_indptr" in fields:
        q_len, width = QLen(budget + 1), QLen(CONFIGURED)
        lens = [index.mask_len(PrefixLen(prefixes[0]), rows) for rows in (q_len, width)]
        assert (first.invariant, first.request) == ("mask_len", 0)
        assert [first.expected, first.found] == lens
        hint = (
            f"every segment fits width {CONFIGURED}; this call's q_len is {q_len}: "
            "the width came from configuration"
        )
        assert first.hint.startswith(hint)
        if (
            path == "eager" and len(expected) > 1
        ):  # another field holds it too: nothing else explains it
            assert first.hint in {hint, f"{hint}, or the budget was taken for budget + 1"}


@pytest.mark.parametrize("topk", [1, 4])
def test_the_hunters_numbers(topk: int) -> None:
    """Prefix 5, q_len 17, width 8: mask length 374, found 104, and the width is named."""
    wrong = configured(make_pass(16, topk, (5,), "eager"), FIELDS)
    with pytest.raises(InvariantViolation, match="width 8") as caught:
        check(wrong.tree, wrong.layout, wrong.mask)
    assert caught.value.invariant == "mask_len"
    assert (caught.value.request, caught.value.expected, caught.value.found) == (0, 374, 104)
    assert "17" in caught.value.hint


@pytest.mark.parametrize("path", ["eager", "buffers"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("topk", TOPKS)
def test_an_inverted_convention(budget: int, topk: int, path: str) -> None:
    """A mask where True hides garbles and is named by visibility, at budget 7 too."""
    right = make_pass(budget, topk, (5, 3), path)
    live = int(right.layout.mask_indptr[-1])
    allowed = right.mask.allowed.clone()
    allowed[:live] = ~allowed[:live]
    wrong = replace(right, mask=FlatMask(allowed))
    assert is_garbled(wrong, right)
    assert "visibility" in broken(wrong)


@pytest.mark.parametrize("path", ["eager", "buffers"])
@pytest.mark.parametrize("budget", [8, 16, 63])
@pytest.mark.parametrize(("topk", "horizon"), [(1, 7), (2, 2)])
def test_padding_that_real_rows_see(budget: int, topk: int, horizon: int, path: str) -> None:
    """One padding column shown to the real rows of one request garbles it and is named."""
    right = make_pass(budget, topk, (5, 3), path, horizon)
    count, width = int(right.tree.num_nodes[1]), budget + 1
    assert count < width
    allowed = right.mask.allowed.clone()
    segment = allowed[index.mask_len(5, width) :][: index.mask_len(3, width)]
    segment.reshape(width, 3 + width)[:count, 3 + count] = True
    wrong = replace(right, mask=FlatMask(allowed))
    assert is_garbled(wrong, right)
    assert broken(wrong) == {"padding_invisible"}


@pytest.mark.parametrize("budget", [8, 16, 63])
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_buffers_sized_by_the_configured_width(budget: int, prefixes: tuple[int, ...]) -> None:
    """They refuse the call with both numbers; an engine that does not refuse is named."""
    right = make_pass(budget, 2, prefixes, "eager")
    small = VerifyBuffers(len(prefixes), QLen(CONFIGURED), max(prefixes))
    with pytest.raises(InputError, match=f"max_q_len is {budget + 1}.* made for 8"):
        small.fill(right.tree, right.layout, right.mask)
    held = replace(
        right,
        layout=replace(
            small.layout,
            qo_indptr=right.layout.qo_indptr,
            kv_indptr=right.layout.kv_indptr,
            mask_indptr=right.layout.mask_indptr,
        ),
        mask=small.mask,
    )
    assert {"buffer_capacity", "max_q_len"} <= broken(held)


class Misconfigured(ExactTarget):
    """A target whose backend makes some fields from the configured width."""

    fields: tuple[str, ...] = ("qo_indptr", "mask_indptr", "max_q_len")

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Tensor:
        """Run the right tokens under the wrong metadata."""
        lens = layout.kv_indptr.diff()[: len(tree.num_nodes)]
        held = configured(Pass(tree, layout, mask, lens), self.fields)
        return super().forward(tree, held.layout, mask)


def write(
    target: ExactTarget, prompt: list[int], budget: int, topk: int, buffers: VerifyBuffers | None
) -> list[int]:
    """Twenty-four tokens, drafted by the right target's own continuation among others."""
    text, committed = [3], torch.tensor([len(prompt)], dtype=torch.int32)
    while len(text) < 24:
        draft = torch.full((1, HORIZON, target.vocab), -3.0)
        for depth, token in enumerate(target.greedy([*prompt, *text], HORIZON)):
            draft[0, depth, token] = -0.25
        done = verify_round(
            draft, torch.tensor(text[-1:]), committed, target, Budget(budget), topk, buffers=buffers
        )
        committed = done.commit.prefix_lens
        text += done.token_ids[0, : int(done.acceptance.num_accepted)].tolist()
    return text[:24]


@pytest.mark.parametrize("path", ["eager", "buffers"])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("budget", [7, 16])
def test_the_text(budget: int, topk: int, path: str) -> None:
    """Round after round the text is garbled at budget 16 and perfect at budget 7, on both paths."""
    prompt, room = [1, 0, 2, 5, 4], 64

    def make(kind: Callable[..., ExactTarget]) -> ExactTarget:
        return kind([prompt], torch.arange(room)[None], room, 11)

    def buffers() -> VerifyBuffers | None:
        return VerifyBuffers(2, QLen(budget + 1), room) if path == "buffers" else None

    right = make(ExactTarget)
    expected = [3, *right.greedy([*prompt, 3], 23)]
    assert write(right, prompt, budget, topk, buffers()) == expected
    wrong = write(make(Misconfigured), prompt, budget, topk, buffers())
    assert (wrong == expected) == (budget + 1 == CONFIGURED)


def ragged_roots() -> st.VerifyCall:
    """Three roots without prefixes in 1, 1 and 2 rows: width 1 agrees with all but the row count."""
    tree = tree_of(parents=[[-1, -1]] * 3, tokens=[[0, 0]] * 3)
    lens, q_lens = torch.zeros(3, dtype=torch.int32), torch.tensor([1, 1, 2], dtype=torch.int32)
    slots = st.SlotTable(torch.arange(6).reshape(3, 2), 1, 6)
    return st.VerifyCall(tree, lens, slots, q_lens, plan_verify(tree, lens, slots.table, q_lens))


@given(st.verify_calls(max_q_len=18), hs.integers(1, 20), hs.sampled_from(SUBSETS))
@example(ragged_roots(), 1, ("qo_indptr", "mask_indptr"))
def test_any_width_that_is_not_the_calls_own(
    call: st.VerifyCall, width: int, fields: tuple[str, ...]
) -> None:
    """For every tree, prefix and raggedness it is caught, and named by each field that is wrong.

    To name each field of a ragged batch the checker has to be told the widths, since nothing else
    in the call holds them all.
    """
    mask = tree_mask(call.tree, call.layout, "flat")
    right = Pass(call.tree, call.layout, mask, call.prefix_lens)
    assert broken(right) == set()
    q_lens = call.layout.qo_indptr.diff().tolist()
    wrong = configured(right, fields, width)
    changed = {
        NAMES[field]
        for field in fields
        if (
            width != call.layout.max_q_len
            if field == "max_q_len"
            else q_lens != [width] * len(q_lens)
        )
    }
    assert bool(broken(wrong)) == bool(changed)
    assert changed <= broken(wrong, call.layout.qo_indptr.diff())

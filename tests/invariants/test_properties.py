"""Properties of the checker: no false alarm on any clean call, no crash on any broken one, no wrong hint."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ddtree.decoding.founding_bug import configured_width
from ddtree.invariants import Call, report, strategies, violations
from ddtree.invariants.call import FIELDS
from ddtree.invariants.sizes import sizes_of, uniform_width, width_of_segment
from ddtree.spec import Budget, PrefixLen, QLen, VerifyBuffers, build_tree, plan_verify, tree_mask
from ddtree.spec.index import mask_len
from tests.invariants.calls import captured, indptr, tables, verify, whole_round

PREFIXES = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@given(
    PREFIXES,
    st.integers(0, 40),
    st.sampled_from([1, 2, 4, None]),
    st.integers(0, 7),
    st.sampled_from([1, 2, 4]),
)
def test_rounds_raise_no_alarm(
    prefixes: list[int], budget: int, topk: int | None, horizon: int, page_size: int
) -> None:
    """Whatever the sizes, a round of the reference breaks nothing."""
    assert [
        str(v) for v in violations(whole_round(prefixes, budget, topk, horizon, page_size))
    ] == []


@given(PREFIXES, st.integers(0, 40), st.sampled_from([1, 3, None]), st.integers(0, 3), st.data())
def test_ragged_calls_raise_no_alarm(
    prefixes: list[int], budget: int, topk: int | None, room: int, data: st.DataObject
) -> None:
    """Requests of different widths, eager or in buffers with any room to spare, break nothing."""
    batch = len(prefixes)
    log_probs = torch.randn(
        batch, 4, 7, generator=torch.Generator().manual_seed(budget)
    ).log_softmax(-1)
    tree = build_tree(log_probs, torch.arange(batch), Budget(budget), topk)
    q_lens = torch.tensor([data.draw(st.integers(n, budget + 1)) for n in tree.num_nodes.tolist()])
    layout = plan_verify(
        tree, torch.tensor(prefixes), tables(batch, max(prefixes) + budget + 1), q_lens
    )
    mask = tree_mask(tree, layout, "flat")
    buffers = VerifyBuffers(batch + room, QLen(budget + 1 + room), max(prefixes) + room)
    buffers.fill(tree, layout, mask)
    for call in (
        Call.of(tree, layout, mask),
        Call.of(tree, buffers),
        Call.of(layout, mask),
        Call.of(buffers),
    ):
        assert [str(v) for v in violations(call)] == []


@given(st.sets(st.sampled_from(sorted(FIELDS))), st.booleans())
def test_any_part_of_a_clean_call_is_clean(kept: set[str], buffered: bool) -> None:
    """Fewer fields mean fewer checks, never an alarm; each invariant is held, broken or not checked."""
    call = Call.of(*captured()) if buffered else whole_round()
    if buffered:
        kept |= {"is_captured"}
    part = Call(**{name: value for name, value in call.known().items() if name in kept})
    made = report(part)
    assert [str(v) for v in made.broken] == []
    assert len(made.held) + len(made.not_checked) == len(report(call).held) + len(
        report(call).not_checked
    )


@st.composite
def corruptions(draw: st.DrawFn) -> Call:
    """A call with a few fields cut, shifted, filled or dropped."""
    call = Call.of(*captured()) if draw(st.booleans()) else whole_round()
    known = call.known()
    for name in draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=4)):
        value: Any = known[name]
        how = draw(st.sampled_from(["drop", "cut", "grow", "fill", "one", "roll", "number"]))
        if how == "drop":
            value = None
        elif isinstance(value, bool):
            value = not value
        elif isinstance(value, int):
            value = draw(st.integers(-3, 60))
        elif isinstance(value, torch.Tensor) and value.numel():
            value = value.clone()
            number = draw(st.sampled_from([-(2**31), -7, -1, 0, 1, 3, 18, 40, 255, 2**31 - 1]))
            if value.dtype is torch.bool:
                number = number % 2
            elif value.dtype is torch.uint8:
                number = number % 256
            if how == "cut":
                value = value[: draw(st.integers(0, value.shape[0]))]
            elif how == "grow":
                value = torch.cat([value, value])
            elif how == "fill":
                value = torch.full_like(value, number)
            elif how == "one":
                value.view(-1)[draw(st.integers(0, value.numel() - 1))] = number
            elif how == "roll":
                value = value.roll(1, dims=0)
        known[name] = value
    return Call(**known)


@given(corruptions())
@example(replace(Call.of(*captured()), num_nodes=torch.tensor([13, 13, 13, 13])))
@example(replace(whole_round(), q_lens=torch.tensor([-7, -7])))
@example(replace(whole_round(), qo_indptr=None, q_lens=None, num_rows=None, target_ids=None))
@example(replace(Call.of(*captured()), parents=torch.zeros(2, 17, dtype=torch.int32)))
def test_no_corruption_crashes_the_checker(call: Call) -> None:
    """The checker answers for any numbers whatever, and its messages can be read."""
    made = report(call)
    assert str(made)
    assert all(v.invariant in str(v) for v in made.broken)


@given(st.integers(0, 200), st.integers(1, 200))
def test_a_segment_fits_one_width(prefix_len: int, width: int) -> None:
    """The width of a segment is found exactly where there is one."""
    length = mask_len(PrefixLen(prefix_len), QLen(width))
    assert width_of_segment(length, prefix_len) == width
    assert (
        width_of_segment(length + 1, prefix_len) is None
        or mask_len(PrefixLen(prefix_len), QLen(width + 1)) == length + 1
    )


@given(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(1, 200))
def test_a_mask_fits_one_uniform_width(prefixes: list[int], width: int) -> None:
    """The width of a whole mask is found exactly where there is one."""
    total = sum(mask_len(PrefixLen(p), QLen(width)) for p in prefixes)
    assert uniform_width(total, prefixes) == width
    below = sum(mask_len(PrefixLen(p), QLen(width - 1)) for p in prefixes)
    assert total - 1 == below or uniform_width(total - 1, prefixes) is None


@given(PREFIXES, st.integers(0, 70), st.integers(1, 70), st.sampled_from([1, 4]))
@example([5], 16, 8, 1)
@example([5, 3], 16, 8, 4)
def test_a_configured_width_is_always_named(
    prefixes: list[int], budget: int, width: int, topk: int
) -> None:
    """Whatever the width and the call, the mask's length is named with both numbers and the width."""
    assume(width != budget + 1)
    tree, layout, mask = verify(prefixes, budget, topk)
    wrong = configured_width(layout, width, ("qo_indptr", "mask_indptr", "max_q_len"))
    first = violations(Call.of(tree, wrong, mask))[0]
    assert (first.invariant, first.request) == ("mask_len", 0)
    assert first.expected == mask_len(PrefixLen(prefixes[0]), QLen(budget + 1))
    assert first.found == mask_len(PrefixLen(prefixes[0]), QLen(width))
    assert first.hint.startswith(
        f"every segment fits width {width}; this call's q_len is {budget + 1}: "
    )


@given(st.lists(st.integers(0, 400), min_size=2, max_size=2))
def test_the_width_is_named_only_where_every_segment_fits_it(segments: list[int]) -> None:
    """Lengths that no single width explains get no hint of one."""
    call = Call(qo_indptr=indptr([17, 17]), kv_indptr=indptr([5, 3]), mask_indptr=indptr(segments))
    explained = {width_of_segment(s, p) for s, p in zip(segments, [5, 3], strict=True)}
    one_width = len(explained) == 1 and None not in explained and explained != {17}
    hints = [v.hint for v in violations(call) if v.invariant == "mask_len"]
    assert any("every segment fits width" in hint for hint in hints) == one_width


def test_two_explanations_are_both_given() -> None:
    """Where lost columns explain the segments as well as a width does, the hint leaves both open."""
    call = Call(qo_indptr=indptr([16]), kv_indptr=indptr([24]), mask_indptr=indptr([8 * 32]))
    hint = violations(call)[0].hint
    assert "every segment fits width 8" in hint
    assert "; or: every segment is q_len * q_len: the prefix's columns were left out" in hint
    assert "; or: " not in violations(replace(call, max_q_len=8))[0].hint


@pytest.mark.parametrize("budget", [1, 7, 16, 63])
def test_the_call_itself_is_the_source_of_widths(budget: int) -> None:
    """The sizes of a clean call are its own qo_indptr's and kv_indptr's."""
    sizes = sizes_of(Call.of(*verify([5, 3], budget, 4)))
    assert (sizes.q_lens, sizes.prefix_lens) == ([budget + 1] * 2, [5, 3])


def test_budget_1024_is_checked_in_full() -> None:
    """A large call is checked whole: a single foreign bit in its last request is found."""
    tree, layout, mask = verify([64] * 4, 1024, None, horizon=15)
    allowed = mask.allowed.clone()
    last = int(tree.num_nodes[3]) - 1
    sibling = int(layout.mask_indptr[3]) + last * (64 + 1025) + 64 + last - 1
    allowed[sibling] = ~allowed[sibling]
    found = violations(replace(Call.of(tree, layout, mask), custom_mask=allowed))
    assert [(v.invariant, v.request) for v in found] == [("visibility", 3)]
    assert f"row {last} " in found[0].detail


@pytest.mark.parametrize(("batch", "prefix"), [(64, 1000), (16, 8000)])
def test_a_call_of_serving_size_is_checked_in_time(batch: int, prefix: int) -> None:
    """A check of a large batch takes well under a second of one core."""
    call = Call.of(*verify([prefix] * batch, 64))
    start = time.thread_time()
    assert violations(call) == []
    assert time.thread_time() - start < 0.7


@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_trees_of_any_draft_raise_no_alarm(data: st.DataObject, dtype: torch.dtype) -> None:
    """A tree is held to the draft that it was built of, ties, -inf and coarse dtypes included."""
    batch, horizon, vocab = (data.draw(st.integers(*ends)) for ends in ((1, 3), (0, 4), (1, 9)))
    draft = data.draw(strategies.draft_log_probs(batch, horizon, vocab)).to(dtype)
    topk = data.draw(st.none() | st.integers(1, vocab))
    roots = torch.arange(batch)
    tree = build_tree(draft, roots, Budget(data.draw(st.integers(0, 30))), topk)
    call = Call.of(tree, draft_log_probs=draft, root_token_ids=roots)
    assert [str(v) for v in violations(call)] == []
    narrow = replace(
        call, scores=tree.scores.float()
    )  # rounding may make ties, which tie_order names
    assert {v.invariant for v in violations(narrow)} <= {"tie_order"}

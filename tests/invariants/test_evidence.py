"""Which field is believed where two disagree, and what is demanded where the call tells little."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree.decoding.founding_bug import configured_width
from ddtree.invariants import Call, InvariantViolation, debug, report, violations
from ddtree.invariants.exact_target import ExactTarget
from ddtree.invariants.sizes import sizes_of
from ddtree.spec import (
    Acceptance,
    Budget,
    DraftTree,
    FlatMask,
    PagedKV,
    PrefixLen,
    QLen,
    VerifyBuffers,
    VerifyLayout,
    build_tree,
    commit_kv,
    convert_mask,
    plan_verify,
    tree_mask,
    verify_attention,
)
from ddtree.spec.index import mask_len
from ddtree.spec.mask import Form
from tests.invariants.calls import indptr, put, tables, verify

FIELDS = ("qo_indptr", "mask_indptr", "max_q_len")


def ragged(q_lens: list[int], prefixes: list[int]) -> tuple[DraftTree, VerifyLayout, FlatMask]:
    """Chains of just ``q_lens`` rows."""
    batch, most = len(q_lens), max(q_lens)
    rows = torch.arange(most).repeat(batch, 1)
    real = rows < torch.tensor(q_lens)[:, None]
    tree = DraftTree(
        torch.where(real, rows + 1, 0),
        torch.where(real, rows - 1, -1).int(),
        torch.where(real, rows, 0).int(),
        torch.where(real, -rows.double(), -torch.inf),
        torch.tensor(q_lens, dtype=torch.int32),
    )
    layout = plan_verify(
        tree, torch.tensor(prefixes), tables(batch, max(prefixes) + most), tree.num_nodes
    )
    return tree, layout, tree_mask(tree, layout, "flat")


@pytest.mark.parametrize(
    ("q_lens", "prefixes", "request_", "numbers"),
    [([8, 9], [5, 3], 1, (108, 88)), ([8, 10, 8], [10, 0, 17], 1, (100, 64))],
)
@pytest.mark.parametrize("buffered", [False, True])
def test_ragged_widths(
    q_lens: list[int],
    prefixes: list[int],
    request_: int,
    numbers: tuple[int, int],
    buffered: bool,
) -> None:
    """The trees' node counts are the widths of a ragged call whose rows they sum to."""
    tree, layout, mask = ragged(q_lens, prefixes)
    assert violations(Call.of(tree, layout, mask)) == []
    if buffered:
        buffers = VerifyBuffers(len(q_lens), QLen(max(q_lens)), max(prefixes))
        buffers.fill(tree, layout, mask)
        layout, mask = buffers.layout, buffers.mask
    wrong = configured_width(layout, 8, ("qo_indptr", "mask_indptr"))
    found = violations(Call.of(tree, wrong, mask))
    first = found[0]
    assert (first.invariant, first.request, (first.expected, first.found)) == (
        "mask_len",
        request_,
        numbers,
    )
    assert first.hint.startswith(
        f"every segment fits width 8; this call's q_lens are {sorted(set(q_lens))}: the width came from"
    )
    innocent = {"flat_len", "max_q_len", "visibility", "prefix_visible", "positions"}
    assert not innocent & {violation.invariant for violation in found}


def test_ragged_widths_with_padding() -> None:
    """Widths that neither the rows nor the nodes give are those with which the positions begin."""
    tree, _, _ = ragged([3, 10, 7], [10, 0, 17])
    table = tables(3, 27)
    layout = plan_verify(tree, torch.tensor([10, 0, 17]), table, torch.tensor([8, 10, 8]))
    mask = tree_mask(tree, layout, "flat")
    assert violations(Call.of(tree, layout, mask)) == []
    first = violations(Call.of(tree, configured_width(layout, 8, FIELDS), mask))[0]
    assert (first.invariant, first.request, first.expected, first.found) == ("mask_len", 1, 100, 64)
    assert "every segment fits width 8; this call's q_lens are [8, 10]" in first.hint


def test_a_ragged_call_without_its_widths() -> None:
    """Six rows of two requests need not be three each: the positions tell, or nothing is checked."""
    call = Call(
        positions=torch.tensor([4, 5, 6, 7, 8, 9]), kv_indptr=torch.tensor([0, 4, 10]), max_q_len=4
    )
    assert sizes_of(call).q_lens == [2, 4]
    assert violations(call) == []
    either = replace(call, positions=torch.tensor([4, 5, 6, 7, 7, 7]), kv_indptr=indptr([4, 7]))
    assert sizes_of(either).q_lens is None
    assert violations(either) == []
    counted = replace(call, positions=None, num_rows=6)
    assert report(counted).not_checked["max_q_len"] == "no q_len"


@pytest.mark.parametrize(
    ("known", "value"), [("max_q_len", 3), ("budget", 2), ("q_lens", torch.tensor([3, 3]))]
)
def test_rows_are_shared_alike_where_nothing_else_is_left(known: str, value: Any) -> None:
    """Six rows of two requests are three each where none may have more."""
    call = Call(num_rows=6, kv_indptr=indptr([4, 6]), **{known: value})
    assert sizes_of(call).q_lens == [3, 3]


def test_a_mean_is_no_width() -> None:
    """A wrong width of a ragged call is never explained by rows that no request has."""
    for q_lens, prefixes in (([13, 17], [5, 3]), ([2, 4], [4, 6]), ([20, 14], [9, 9])):
        _, layout, mask = ragged(q_lens, prefixes)
        wrong = configured_width(layout, 8, FIELDS)
        for call in (Call.of(wrong), Call.of(wrong, mask)):
            first = violations(call)[0]
            assert first.expected == mask_len(PrefixLen(prefixes[0]), QLen(q_lens[0]))
            assert f"this call's q_lens are {sorted(q_lens)}: the width came from" in first.hint
        counted = replace(Call.of(wrong), positions=None)
        assert "if they are shared alike" in violations(counted)[0].hint


@pytest.mark.parametrize("buffered", [False, True])
def test_a_mask_alone_against_one_width(buffered: bool) -> None:
    """Where all else was written with one width, a ragged mask is told not to fit it."""
    tree, layout, mask = ragged([13, 17], [5, 3])
    if buffered:
        buffers = VerifyBuffers(2, QLen(17), 5)
        buffers.fill(tree, layout, mask)
        mask = buffers.mask
    wrong = configured_width(layout, 8, FIELDS)
    call = Call.of(
        mask,
        is_captured=buffered,
        **{name: getattr(wrong, name) for name in (*FIELDS, "kv_indptr")},
    )
    named = next(v for v in violations(call) if v.invariant == "mask_is_tree")
    assert named.hint == (
        "the mask was not made for width 8 and these prefix lengths: with them the call's entries end at "
        "192, the mask's at 574"
    )


ROWS_OF_8 = (
    "every segment is 8 * (prefix_len + q_len): the rows are of width 8, the columns of this call's "
    "q_len"
)
COLUMNS_OF_8 = (
    "every segment is q_len * (prefix_len + 8): the rows are of this call's q_len, the columns of "
    "width 8"
)

PREFIX_105 = "the segments fit prefix lengths [105]; this call's are [100]"


@pytest.mark.parametrize(
    ("q_lens", "prefixes", "segments", "hint"),
    [
        ([17, 17], [5, 3], [8 * 22, 8 * 20], ROWS_OF_8),
        ([17, 9], [5, 3], [8 * 22, 8 * 12], ROWS_OF_8),
        ([17, 17], [5, 3], [17 * 13, 17 * 11], COLUMNS_OF_8),
        ([17], [5], [17 * 13], COLUMNS_OF_8),
        ([3], [100], [3 * 108], f"{COLUMNS_OF_8}; or: {PREFIX_105}"),
    ],
)
def test_half_configured_widths(
    q_lens: list[int], prefixes: list[int], segments: list[int], hint: str
) -> None:
    """A configured width in the rows or the columns alone is named by that form."""
    call = Call(qo_indptr=indptr(q_lens), kv_indptr=indptr(prefixes), mask_indptr=indptr(segments))
    assert violations(call)[0].hint == hint


@pytest.mark.parametrize(
    ("q_len", "prefix", "other"),
    [(17, 5, "every segment fits width 11;"), (4, 100, "columns of width 108")],
)
def test_one_request_that_fits_two_causes(q_len: int, prefix: int, other: str) -> None:
    """Causes that fit one request equally are all told; a max_q_len of one of the widths decides."""
    call = Call(
        qo_indptr=indptr([q_len]),
        kv_indptr=indptr([prefix]),
        mask_indptr=indptr([8 * (prefix + q_len)]),
    )
    hint = violations(call)[0].hint
    assert ROWS_OF_8 in hint and other in hint and "; or: " in hint
    assert violations(replace(call, max_q_len=8))[0].hint == ROWS_OF_8


@pytest.mark.parametrize("lens", [[6, 4], [7, 3], [5, 9], [4, 3]])
def test_a_wrong_kv_indptr_is_named(lens: list[int]) -> None:
    """Mask and roots' positions that agree refute kv_indptr, as on entry to the attention."""
    _, layout, mask = verify([5, 3], 16, 3, horizon=2)
    assert violations(Call.of(layout, mask)) == []
    wrong = replace(layout, kv_indptr=indptr(lens, torch.int32))
    first = violations(Call.of(wrong, mask))[0]
    b = 0 if lens[0] != 5 else 1
    assert (first.invariant, first.request, first.expected, first.found) == (
        "kv_indptr",
        b,
        [5, 3][b],
        lens[b],
    )


def test_a_window_is_no_wrong_kv_indptr() -> None:
    """KV cut to a window makes the full mask the odd one out, and the window is told."""
    _, layout, mask = verify([20, 3], 7, 4)
    slots = torch.cat([layout.kv_indices[12:20], layout.kv_indices[20:]])
    wrong = replace(layout, kv_indptr=indptr([8, 3], torch.int32), kv_indices=slots)
    first = violations(Call.of(wrong, mask))[0]
    assert (first.invariant, first.expected, first.found) == ("mask_len", 8 * 16, 8 * 28)
    assert "[8, 3] is what a window of 8 leaves of [20, 3]" in first.hint


@pytest.mark.parametrize("budget", [1, 16])
def test_the_rows_written_decide_in_buffers(budget: int) -> None:
    """A layout alone in fixed buffers: the rows that were written say which indptr is wrong."""
    tree, layout, mask = verify([5], budget, 4)
    buffers = VerifyBuffers(1, QLen(17), 10)
    buffers.fill(tree, layout, mask)
    assert violations(Call.of(buffers.layout)) == []
    rows = replace(buffers.layout, qo_indptr=torch.tensor([0, 8], dtype=torch.int32))
    first = violations(Call.of(rows))[0]
    assert (first.invariant, first.expected, first.found) == ("qo_indptr", budget + 1, 8)
    assert first.hint.startswith(f"every segment fits width 8; this call's q_len is {budget + 1}")
    segments = replace(buffers.layout, mask_indptr=torch.tensor([0, 104]))
    first = violations(Call.of(segments))[0]
    assert (first.invariant, first.found) == ("mask_len", 104)
    assert first.hint.startswith(f"every segment fits width 8; this call's q_len is {budget + 1}")


def test_a_node_count_is_no_width_of_filled_buffers() -> None:
    """A node too many in num_nodes is not taken for a wider call where layout and mask agree."""
    tree, layout, mask = ragged([8, 8], [5, 20])
    buffers = VerifyBuffers(2, QLen(9), 20)
    buffers.fill(tree, layout, mask)
    padded = {
        name: torch.nn.functional.pad(value, (0, 1), value=filler)
        for name, value, filler in (
            ("token_ids", tree.token_ids, 0),
            ("parents", tree.parents, -1),
            ("depths", tree.depths, 0),
        )
    }
    call = Call.of(buffers, num_nodes=torch.tensor([9, 8]), **padded)
    named = {violation.invariant for violation in violations(call)}
    assert "parent_order" in named and "mask_len" not in named


def test_two_indptrs_alone_in_buffers_get_no_hint() -> None:
    """Where nothing but the two indptrs tells a width, no cause is given for their difference."""
    call = Call(
        is_captured=True,
        qo_indptr=indptr([8]),
        kv_indptr=indptr([5]),
        mask_indptr=indptr([2 * 7]),
    )
    assert [(v.invariant, v.hint) for v in violations(call)] == [("mask_len", "")]


def engine_call(prefixes: list[int], budget: int, **changed: Any) -> Call:
    """An eager call as an engine's attention holds it: no field of an entry a row, some fields changed."""
    _, layout, mask = verify(prefixes, budget, 3)
    names = ("qo_indptr", "kv_indptr", "mask_indptr", "max_q_len")
    known = {name: getattr(layout, name) for name in names}
    return Call(**(known | {"custom_mask": mask.allowed} | changed))


@pytest.mark.parametrize(
    ("prefixes", "budget", "widths", "request_"),
    [
        ([5, 3], 16, [8, 8], 0),
        ([5, 3], 16, [17, 14], 1),
        ([30, 0, 11], 6, [16, 16, 16], 0),
        ([30, 0, 11], 6, [7, 8, 7], 1),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_that_makes_sense_refutes_qo_indptr(
    prefixes: list[int], budget: int, widths: list[int], request_: int, packed: bool
) -> None:
    """Segments and mask agree on one width: qo_indptr, which alone has another, is named."""
    right = engine_call(prefixes, budget)
    if packed:
        _, layout, mask = verify(prefixes, budget, 3)
        held = convert_mask(mask, layout, "packed")
        right = replace(right, mask_indptr=None, custom_mask=None)
        right = replace(right, packed=held.packed, byte_indptr=held.byte_indptr)
    assert violations(right) == []
    q_len = budget + 1
    first = violations(replace(right, qo_indptr=indptr(widths)))[0]
    assert (first.invariant, first.request) == ("qo_indptr", request_)
    assert (first.expected, first.found) == (q_len, widths[request_])
    uniform = (
        f"every segment fits width {widths[0]}; this call's q_len is {q_len}: the width came from"
    )
    assert first.hint.startswith(uniform) if len(set(widths)) == 1 else first.hint == ""


@pytest.mark.parametrize(
    ("prefixes", "budget", "width"), [([5, 3], 16, 8), ([30, 0, 11], 6, 16), ([9], 11, 8)]
)
def test_two_fields_against_two_are_both_told(prefixes: list[int], budget: int, width: int) -> None:
    """Where max_q_len sides with qo_indptr against mask and segments, no width is called the wrong one."""
    batch, q_len = len(prefixes), budget + 1
    call = engine_call(prefixes, budget, qo_indptr=indptr([width] * batch), max_q_len=width)
    assert violations(call)[0].hint == (
        f"every segment and the mask itself fit width {q_len}, qo_indptr says {[width] * batch}: the one or "
        "the other is not of this call"
    )
    spoilt = put(engine_call(prefixes, budget), "custom_mask", prefixes[0], False)
    first = violations(replace(spoilt, qo_indptr=indptr([width] * batch)))[0]
    assert f"the mask itself fit width {q_len}, qo_indptr says" in first.hint


@pytest.mark.parametrize(
    ("prefixes", "budget", "more", "text"),
    [
        ([13, 2, 30], 11, 12, "kv_indptr counts the tree's own entries"),
        ([13, 2, 30], 11, 1, "kv_indptr counts the root"),
        ([8, 25], 5, 6, "kv_indptr counts the tree's own entries"),
        ([8, 25], 5, 1, "kv_indptr counts the root"),
    ],
)
def test_a_mask_that_makes_sense_refutes_kv_indptr(
    prefixes: list[int], budget: int, more: int, text: str
) -> None:
    """Segments and mask agree on the prefixes: kv_indptr, which alone has others, is named."""
    assert violations(engine_call(prefixes, budget)) == []
    wrong = indptr([prefix + more for prefix in prefixes])
    first = violations(engine_call(prefixes, budget, kv_indptr=wrong))[0]
    assert (first.invariant, first.request) == ("kv_indptr", 0)
    assert (first.expected, first.found) == (prefixes[0], prefixes[0] + more)
    assert text in first.hint and "; or:" not in first.hint


@pytest.mark.parametrize(("prefixes", "budget"), [([13, 2, 30], 11), ([8, 25], 5)])
def test_slots_that_kv_indptr_counts_leave_it_open(prefixes: list[int], budget: int) -> None:
    """Slots side with kv_indptr, the mask with its segments: both are told."""
    counted = [prefix + budget + 1 for prefix in prefixes]
    call = engine_call(
        prefixes, budget, kv_indptr=indptr(counted), kv_indices=torch.arange(sum(counted))
    )
    hint = violations(call)[0].hint
    assert "the tree's own columns were left out; or: " in hint
    assert f"the mask itself fit prefix lengths {prefixes}, kv_indptr says {counted}" in hint


def padded_rows(
    nodes: int, q_lens: list[int], prefixes: list[int]
) -> tuple[DraftTree, VerifyLayout, FlatMask, torch.Tensor]:
    """Trees of so many nodes in more rows, another number in each request."""
    batch, most = len(q_lens), max(q_lens)
    tree, _, _ = verify(prefixes, nodes - 1, 3)
    fill = {"token_ids": 0, "parents": -1, "depths": 0, "scores": -torch.inf}
    wider = {
        name: torch.nn.functional.pad(getattr(tree, name), (0, most - nodes), value=value)
        for name, value in fill.items()
    }
    tree = replace(tree, **wider)
    table = tables(batch, max(prefixes) + most)
    layout = plan_verify(tree, torch.tensor(prefixes), table, torch.tensor(q_lens))
    return tree, layout, tree_mask(tree, layout, "flat"), table


@pytest.mark.parametrize(
    ("nodes", "q_lens", "prefixes", "widths"),
    [
        (9, [11, 13, 12], [9, 30, 4], (9, 10, 12)),
        (9, [13, 11, 12], [9, 30, 4], (9, 10, 12)),
        (6, [6, 8], [24, 35], (5, 7, 8)),
    ],
)
@pytest.mark.parametrize("buffered", [False, True])
def test_rows_written_tell_ragged_widths(
    nodes: int, q_lens: list[int], prefixes: list[int], widths: tuple[int, ...], buffered: bool
) -> None:
    """One width everywhere in a ragged call is named, even where it comes to as many rows."""
    tree, layout, mask, table = padded_rows(nodes, q_lens, prefixes)
    if buffered:
        buffers = VerifyBuffers(len(q_lens) + 2, QLen(20), 40)
        buffers.fill(tree, layout, mask)
        layout, mask = buffers.layout, buffers.mask
    for known in ((tree, mask), (tree,), (mask,), ()):
        assert violations(Call.of(*known, layout, slot_table=table)) == []
        for width in widths:
            wrong = configured_width(layout, width, FIELDS)
            first = violations(Call.of(*known, wrong, slot_table=table))[0]
            b = next(b for b, q_len in enumerate(q_lens) if q_len != width)
            expected = q_lens[b] * (prefixes[b] + q_lens[b])
            assert (first.invariant, first.request, first.expected) == ("mask_len", b, expected)
            assert first.hint.startswith(
                f"every segment fits width {width}; this call's q_lens are {sorted(set(q_lens))}: the width"
            )


@pytest.mark.parametrize(
    ("prefixes", "budget", "most", "width"), [([11, 28, 6], 5, 9, 16), ([10, 40, 9, 2], 1, 4, 32)]
)
def test_rows_that_do_not_fit_the_buffers(
    prefixes: list[int], budget: int, most: int, width: int
) -> None:
    """A layout alone: the rows written refute a width; without them width and buffers are both told."""
    tree, layout, mask = verify(prefixes, budget, 4)
    buffers = VerifyBuffers(len(prefixes) + 1, QLen(most), 40)
    buffers.fill(tree, layout, mask)
    assert violations(Call.of(buffers.layout)) == []
    wrong = Call.of(configured_width(buffers.layout, width, FIELDS))
    first = violations(wrong)[0]
    q_len = budget + 1
    assert (first.invariant, first.expected, first.found) == (
        "mask_len",
        q_len * (prefixes[0] + q_len),
        width * (prefixes[0] + width),
    )
    assert first.hint.startswith(f"every segment fits width {width}; this call's q_len is {q_len}:")
    assert "buffer_capacity" not in {violation.invariant for violation in violations(wrong)}
    told = violations(replace(wrong, out_cache_loc=None))
    capacity = next(violation for violation in told if violation.invariant == "buffer_capacity")
    assert capacity.hint == (
        f"the buffer has {most} rows for each of {len(prefixes) + 1} requests; this call's q_len is "
        f"{width}: it was sized by another width than the largest budget + 1; or: qo_indptr is of another "
        "width than this call's"
    )


def _rows(prefix: float, tree: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def rows(square: torch.Tensor) -> torch.Tensor:
        square[13:, :5], square[13:, 5:] = prefix, tree
        return square

    return rows


PADDING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sees nothing": _rows(0, 0),
    "sees the prefix": _rows(1, 0),
    "sees everything": _rows(1, 1),
    "sees the tree alone": _rows(0, 1),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("words", [False, True])
def test_an_engines_padding_rows_raise_no_alarm(padding: str, words: bool) -> None:
    """Without the tree nothing is demanded of rows at the root's position but the first."""
    _, layout, mask = verify([5], 16, 3, horizon=2)  # 13 nodes in 17 rows
    square = PADDING[padding](mask.allowed.reshape(17, 22).float()).bool()
    call = Call.of(layout, custom_mask=square.flatten())
    if words:
        bits = (square[:, 5:].long() << torch.arange(17)).sum(1, keepdim=True)
        call = replace(call, custom_mask=None, words=bits.int())
    assert [str(v) for v in violations(call)] == []
    assert [str(v) for v in violations(replace(call, positions=None))] == []
    far = layout.positions.clone()
    far[13:] = 0
    assert [str(v) for v in violations(replace(call, positions=far))] == []


def test_ties_of_cousins_in_order() -> None:
    """Rows of one score in the order of their rank paths are right, as the reference makes them."""
    log_probs = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]]).log()
    for budget in range(7):
        tree = build_tree(log_probs, torch.tensor([0]), Budget(budget))
        assert [str(v) for v in violations(Call.of(tree))] == []


def test_a_second_commit_is_named() -> None:
    """With pages, debug mode stops a second commit of one pass; another pool or pass is no second."""
    tree, layout, _ = verify([2], 3, 1)
    acceptance = Acceptance(
        torch.tensor([[0, 1, -1]], dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([4]),
    )

    def kv() -> PagedKV:
        pool = torch.arange(6.0).reshape(6, 1, 1)
        return PagedKV((pool,), (pool.clone(),), tables(1, 6), page_size=2)

    first = kv()
    with debug():
        commit_kv(first, layout, acceptance)
        commit_kv(kv(), layout, acceptance)
        commit_kv(first, layout, replace(acceptance))
        before = first.keys[0].clone()
        commit_kv(first, layout, acceptance)
        with pytest.raises(
            InvariantViolation, match="commit_once is broken, on entry to commit_kv"
        ):
            commit_kv(first, layout, acceptance)
        assert torch.equal(first.keys[0], before)
    assert int(tree.num_nodes[0]) == 4


def test_reused_tensors_are_no_second_commit() -> None:
    """The same objects with the next round's numbers in them are the next round."""
    table = tables(1, 8)
    tree, layout, _ = verify([2], 3, 1)
    layout = plan_verify(tree, torch.tensor([2]), table)
    layout = replace(layout, kv_indices=torch.nn.functional.pad(layout.kv_indices, (0, 1)))
    acceptance = Acceptance(
        torch.tensor([[0, -1, -1]], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([4]),
    )
    kv = PagedKV((), (), table, page_size=2)
    with debug():
        commit_kv(kv, layout, acceptance)
        later = plan_verify(tree, torch.tensor([3]), table)
        for name, value in later.__dict__.items():
            if isinstance(value, torch.Tensor):
                getattr(layout, name).copy_(value)
        commit_kv(kv, layout, acceptance)


def test_a_layout_wider_than_the_tree_is_named() -> None:
    """The exact target leaves a wrong width to the attention call, whose check names it."""
    prompt = (1, 2, 3, 4, 5)
    target = ExactTarget([prompt], tables(1, 20), 20, 6)
    tree = ragged([2], [5])[0]
    layout = plan_verify(tree, torch.tensor([5]), target.slot_table)
    buffers = VerifyBuffers(1, QLen(8), 5)
    buffers.fill(tree, layout, tree_mask(tree, layout, "flat"))
    wrong = replace(buffers.layout, qo_indptr=torch.tensor([0, 8], dtype=torch.int32))
    with debug(), pytest.raises(InvariantViolation, match="on entry to verify_attention") as caught:
        target.forward(tree, wrong, buffers.mask)
    violation = caught.value
    assert (violation.invariant, violation.expected, violation.found) == ("qo_indptr", 2, 8)


def test_attention_alone_in_debug_mode() -> None:
    """The attention call knows no tree, and stops an inverted mask and positions by row all the same."""
    _, layout, mask = verify([0], 7, 4)
    made: dict[str, Any] = {name: torch.randn(8, 1, 4) for name in ("query", "key", "value")}
    pools: dict[str, Any] = {name: torch.randn(8, 1, 4) for name in ("key_pool", "value_pool")}
    with debug():
        verify_attention(**made, **pools, layout=layout, mask=mask)
        with pytest.raises(InvariantViolation, match="mask_is_tree"):
            verify_attention(**made, **pools, layout=layout, mask=FlatMask(~mask.allowed))
        by_row = replace(layout, positions=torch.arange(8))
        with pytest.raises(InvariantViolation, match="mask_positions"):
            verify_attention(**made, **pools, layout=by_row, mask=mask)


@pytest.mark.parametrize(
    ("names", "invariant", "other"),
    [
        ((), "mask_positions", None),
        (("depths",), "mask_positions", None),
        (("depths", "num_nodes"), "mask_positions", None),
        (("scores",), "mask_positions", None),
        (("parents",), "visibility", "visibility"),
        (("parents", "num_nodes"), "visibility", "visibility"),
        (("parents", "depths"), "visibility", "visibility"),
        (("parents", "depths", "scores", "token_ids"), "visibility", "visibility"),
    ],
)
@pytest.mark.parametrize("horizon", [2, 7])
def test_whatever_is_known_of_a_tree_holds_the_mask(
    names: tuple[str, ...], invariant: str, other: str | None, horizon: int
) -> None:
    """A causal mask, and a row below its aunt; padding rows may see anything."""
    tree, layout, mask = verify([9, 30], 12, 3, horizon=horizon)
    known = {name: getattr(tree, name) for name in names}

    def first(mask: Tensor) -> str | None:
        found = violations(Call.of(layout, custom_mask=mask, **known))
        return found[0].invariant if found else None

    squares = [
        mask.allowed[start:end].view(13, -1) for start, end in pairwise(layout.mask_indptr.tolist())
    ]
    assert first(mask.allowed) is None
    causal = [torch.ones_like(s).tril(s.shape[1] - 13) for s in squares]
    assert first(torch.cat([s.flatten() for s in causal])) == invariant
    padded = [s.clone() for s in squares]
    for square, nodes in zip(padded, tree.num_nodes.tolist(), strict=True):
        square[nodes:] = False
    if names:
        assert first(torch.cat([s.flatten() for s in padded])) is None
    moved = squares[0].clone()
    depths, parents = tree.depths[0].tolist(), tree.parents[0].tolist()
    row = next(r for r in range(12, 0, -1) if depths[r] == 2)
    aunt = next(r for r in range(1, row) if depths[r] == 1 and r != parents[row])
    assert row not in parents
    moved[row, 9 + parents[row]], moved[row, 9 + aunt] = False, True
    assert first(torch.cat([moved.flatten(), squares[1].flatten()])) == other


def test_a_mask_without_a_prefix_length_is_not_checked() -> None:
    """A flat mask cannot be read without the prefix lengths: that is said, not passed over."""
    ones = torch.ones(374, dtype=torch.bool)
    unread = report(Call(qo_indptr=torch.tensor([0, 17]), custom_mask=ones))
    assert "mask_is_tree" in unread.not_checked
    broken = violations(
        Call(qo_indptr=torch.tensor([0, 17]), kv_indptr=torch.tensor([0, 5]), custom_mask=ones)
    )
    assert [violation.invariant for violation in broken] == ["mask_is_tree"]


@pytest.mark.parametrize(
    ("form", "cause"),
    [
        ("flat", "flat_len"),
        ("packed", "packed_len"),
        ("bits", "mask_shape"),
        ("dense", "mask_shape"),
    ],
)
def test_rows_that_a_mask_has_not_are_not_checked(form: Form, cause: str) -> None:
    """What a mask that ends before the last request's rows cannot tell is not said to hold."""
    tree, layout, _ = ragged([3, 4], [2, 5])
    call = Call.of(layout, tree_mask(tree, layout, form), num_nodes=tree.num_nodes)
    by_rows = {"mask_is_tree", "mask_positions", "prefix_visible", "padding_invisible"}
    by_rows = by_rows - {"prefix_visible"} | {"spare_bits"} if form == "bits" else by_rows
    assert by_rows <= set(report(call).held)
    cut = {
        "flat": lambda: {"custom_mask": call.custom_mask[:-1]},  # type: ignore[index]
        "packed": lambda: {"packed": call.packed[:-1]},  # type: ignore[index]
        "bits": lambda: {"words": call.words[:-1]},  # type: ignore[index]
        "dense": lambda: {"bias": call.bias[..., [0, 1, 2, 3, 5, 6, 7, 8]]},  # type: ignore[index]
    }[form]()
    told = report(replace(call, **cut))  # type: ignore[arg-type]
    assert cause in {violation.invariant for violation in told.broken}
    assert {told.not_checked.get(name) for name in by_rows} == {
        f"{cause} is broken: no rows of request 1 to read"
    }


def test_a_mask_that_is_too_long_is_read_all_the_same() -> None:
    """The rows of every request are there: what they show holds or does not."""
    tree, layout, mask = ragged([3, 4], [5, 2])
    longer = torch.cat([mask.allowed, mask.allowed[:1]])
    told = report(Call.of(layout, FlatMask(longer), num_nodes=tree.num_nodes))
    assert "flat_len" in {violation.invariant for violation in told.broken}
    assert {"mask_is_tree", "prefix_visible"} <= set(told.held)


def test_an_empty_indptr_is_told_in_words() -> None:
    """Not as room for -1 requests; and no number is told as Python would print it."""
    (wrong,) = violations(Call(qo_indptr=torch.zeros(0, dtype=torch.int32), **indptr_of_one()))
    assert (wrong.invariant, wrong.expected, wrong.found) == ("batch", "at least 1 entry", 0)
    assert wrong.detail == "qo_indptr is empty: an indptr has at least one entry"
    (wrong,) = violations(Call(num_nodes=torch.tensor([3, 3]), **indptr_of_one()))
    assert wrong.detail == "kv_indptr has room for 1 requests; by field: num_nodes 2, kv_indptr 1"


def indptr_of_one() -> dict[str, Any]:
    """One request's prefix."""
    return {"kv_indptr": torch.tensor([0, 5])}


TREE_FIELDS = ("num_nodes", "parents", "depths", "scores", "token_ids")


@pytest.mark.parametrize("kept", ["parents", "depths", "scores", "positions", ""])
@pytest.mark.parametrize("buffered", [False, True])
def test_padding_is_told_by_whatever_there_is(kept: str, buffered: bool) -> None:
    """Rows that one field shows to be padding may be unwritten and fed anything; a node's may not.

    Where no field tells, only the root's row must be written.
    """
    tree, layout, mask = verify([5, 3], 16, 3, horizon=2)
    table = tables(2, 22)
    slots, fed = layout.out_cache_loc.clone(), tree.token_ids.flatten()
    for start in (0, 17):
        slots[start + 13 : start + 17], fed[start + 13 : start + 17] = -1, 7
    whole = Call.of(tree, layout, mask, slot_table=table, out_cache_loc=slots, input_ids=fed)
    if buffered:
        buffers = VerifyBuffers(3, QLen(20), 9)
        buffers.fill(tree, replace(layout, out_cache_loc=slots), mask)
        buffers.token_ids[:34] = fed
        whole = Call.of(tree, buffers, slot_table=table)
    told = (kept, "token_ids") if kept in {"parents", "depths", "scores"} else ()
    gone = {name: None for name in TREE_FIELDS if name not in told}
    call = replace(whole, **gone, **({} if kept == "positions" else {"positions": None}))
    call = replace(call, q_lens=torch.tensor([17, 17]))
    assert [str(violation) for violation in violations(call)] == []
    row = 12 if kept else 0
    spoilt = put(call, "out_cache_loc", row, -1)
    named = violations(spoilt)[0]
    assert (named.invariant, named.request, named.found) == ("out_cache_loc", 0, -1)
    assert report(spoilt).broken[0].detail == f"out_cache_loc, entry {row} of the request"

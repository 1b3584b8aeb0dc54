"""The four mask forms: hand-computed bits, a plain walk up the parents, exact conversion."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor

from ddtree.invariants import strategies as st
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import (
    BitMask,
    DenseMask,
    DraftTree,
    FlatMask,
    PackedMask,
    QLen,
    TreeMask,
    VerifyLayout,
)
from ddtree.spec.errors import InputError
from ddtree.spec.layout import plan_verify
from ddtree.spec.mask import ancestors_or_self, convert_mask, read_mask, request_lens, tree_mask
from tests import oracles
from tests.trees import tree_of


def numbers(mask: TreeMask) -> list[Tensor]:
    """The mask's tensors, with bits compared as unsigned words."""
    match mask:
        case FlatMask(allowed):
            return [allowed]
        case PackedMask(packed, byte_indptr):
            return [packed, byte_indptr]
        case DenseMask(bias):
            return [bias]
        case BitMask(words):
            return [words]


def assert_equal(left: TreeMask, right: TreeMask) -> None:
    """Same form, same numbers, same dtypes."""
    assert type(left) is type(right)
    for a, b in zip(numbers(left), numbers(right), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def q_lens(layout: VerifyLayout) -> list[int]:
    """Widths of the call's requests."""
    ends = layout.qo_indptr.tolist()
    return [end - start for start, end in pairwise(ends)]


@pytest.fixture
def small() -> tuple[DraftTree, VerifyLayout]:
    """Root with children 1 and 2, 3 below 1, one padding row; and a lone root; prefixes 2 and 1."""
    tree = tree_of(parents=[[-1, 0, 0, 1, -1], [-1] * 5], tokens=[[5, 6, 7, 8, 0], [9, 0, 0, 0, 0]])
    slots = torch.arange(20).reshape(2, 10)
    return tree, plan_verify(tree, torch.tensor([2, 1]), slots, torch.tensor([5, 1]))


def test_flat_written_out(small: tuple[DraftTree, VerifyLayout]) -> None:
    """Every bit of the flat form, prefix columns first."""
    rows = [
        "11 10000",  # root
        "11 11000",  # node 1: root, itself
        "11 10100",  # node 2: root, itself, not its sibling
        "11 11010",  # node 3: root, node 1, itself
        "11 00001",  # padding: the prefix and itself
        "1 1",  # the lone root of request 1
    ]
    expected = [bit == "1" for row in rows for bit in row.replace(" ", "")]
    assert tree_mask(*small, "flat").allowed.tolist() == expected


def test_packed_written_out(small: tuple[DraftTree, VerifyLayout]) -> None:
    """The flat bits LSB first; request 1 starts on a fresh byte.

    1110000 1111000 1110100 1111010 1100001 in groups of eight: 11100001 11100011 10100111 10101100
    001, each read from the right; then 11.
    """
    mask = tree_mask(*small, "packed")
    assert mask.packed.tolist() == [0b10000111, 0b11000111, 0b11100101, 0b00110101, 0b100, 0b11]
    assert mask.byte_indptr.tolist() == [0, 5, 6]


def test_bits_written_out(small: tuple[DraftTree, VerifyLayout]) -> None:
    """Bit j of a row's word says whether it sees node j."""
    mask = tree_mask(*small, "bits")
    assert mask.words.tolist() == [[0b1], [0b11], [0b101], [0b1011], [0b10000], [0b1]]


def test_dense_written_out(small: tuple[DraftTree, VerifyLayout]) -> None:
    """0 where allowed, the lowest float elsewhere; rows past a request's q_len see themselves."""
    allowed = tree_mask(*small, "dense").bias[:, 0] == 0
    lowest = torch.finfo(torch.float32).min
    assert set(tree_mask(*small, "dense").bias.flatten().tolist()) == {lowest, 0.0}
    assert allowed.int().tolist() == [
        [
            [1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 0],
            [1, 1, 1, 0, 1, 0, 0],
            [1, 1, 1, 1, 0, 1, 0],
            [1, 1, 0, 0, 0, 0, 1],
        ],
        [
            [1, 0, 1, 0, 0, 0, 0],
            [0, 0, 0, 1, 0, 0, 0],
            [0, 0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 0, 0, 1],
        ],
    ]


def test_the_32nd_node_is_the_sign_bit() -> None:
    """In a chain of 33 the 32nd row's word has all bits set, -1 as int32, and row 33 a second word."""
    tree = tree_of(parents=[list(range(-1, 32))], tokens=[[0] * 33])
    layout = plan_verify(tree, torch.tensor([0]), torch.arange(33)[None])
    words = tree_mask(tree, layout, "bits").words
    assert words.dtype == torch.int32
    assert words[30:].tolist() == [[2**31 - 1, 0], [-1, 0], [-1, 1]]


@given(st.verify_calls())
def test_flat_equals_a_walk_up_the_parents(call: st.VerifyCall) -> None:
    """Every entry is what walking up the parents says; real rows see no padding."""
    parents, widths = call.tree.parents.tolist(), q_lens(call.layout)
    expected = oracles.flat_mask(parents, call.prefix_lens.tolist(), widths)
    assert tree_mask(call.tree, call.layout, "flat").allowed.tolist() == expected
    flat = iter(expected)
    for b, width in enumerate(widths):
        real, prefix_len = int(call.tree.num_nodes[b]), int(call.prefix_lens[b])
        for row in range(width):
            seen = [next(flat) for _ in range(prefix_len + width)]
            assert row >= real or not any(seen[prefix_len + real :])


@given(st.verify_calls())
def test_each_form_converts_to_each(call: st.VerifyCall) -> None:
    """From any form to any other and back, nothing changes, ragged or fixed, prefix 0 included."""
    masks: dict[str, TreeMask] = {
        form: tree_mask(call.tree, call.layout, form) for form in st.FORMS
    }
    for source, wanted in product(st.FORMS, st.FORMS):
        there = convert_mask(masks[source], call.layout, wanted)
        assert_equal(there, masks[wanted])
        assert_equal(convert_mask(there, call.layout, source), masks[source])


@given(st.verify_calls(max_q_len=9), hs.data())
def test_masks_that_are_no_trees_convert_exactly(call: st.VerifyCall, data: hs.DataObject) -> None:
    """Flat, packed and dense say any visibility at all; bits says it or refuses a hidden prefix."""
    size = int(call.layout.mask_indptr[-1])
    bits = data.draw(hs.binary(min_size=-(-size // 8), max_size=-(-size // 8)))
    allowed = torch.tensor([bits[i // 8] >> i % 8 & 1 == 1 for i in range(size)])
    flat = FlatMask(allowed)
    for form in ("packed", "dense"):
        there = convert_mask(flat, call.layout, form)
        assert_equal(convert_mask(there, call.layout, "flat"), flat)
    hidden = False
    for b, width in enumerate(q_lens(call.layout)):
        start, prefix_len = int(call.layout.mask_indptr[b]), int(call.prefix_lens[b])
        rows = allowed[start : int(call.layout.mask_indptr[b + 1])].reshape(width, -1)
        hidden = hidden or not bool(rows[:, :prefix_len].all())
    if hidden:
        with pytest.raises(InputError, match="does not see prefix entry"):
            convert_mask(flat, call.layout, "bits")
    else:
        bits_form = convert_mask(flat, call.layout, "bits")
        assert_equal(convert_mask(bits_form, call.layout, "flat"), flat)


@given(st.verify_calls(max_q_len=9))
def test_a_mask_of_another_width_is_refused(call: st.VerifyCall) -> None:
    """A flat mask one entry short, and one too long, is refused with both lengths."""
    allowed = tree_mask(call.tree, call.layout, "flat").allowed
    for wrong in (allowed[1:], torch.cat([allowed, allowed[:1]])):
        with pytest.raises(InputError, match=f"{len(wrong)} flat mask entries.* {len(allowed)}"):
            convert_mask(FlatMask(wrong), call.layout, "packed")


def test_a_configured_width_in_mask_indptr_is_refused(
    small: tuple[DraftTree, VerifyLayout],
) -> None:
    """A mask_indptr of another width than qo_indptr's is named, with its end and the right one."""
    tree, layout = small
    mask = tree_mask(tree, layout, "flat")
    wrong = replace(layout, mask_indptr=torch.tensor([0, 24, 33]))
    with pytest.raises(InputError, match=r"mask_indptr ends at 33.* is 37"):
        convert_mask(mask, wrong, "bits")


def three_requests() -> VerifyLayout:
    """Chains of four nodes behind prefixes of 40, 0 and 2."""
    tree = tree_of(parents=[[-1, 0, 1, 2]] * 3, tokens=[[0, 1, 2, 3]] * 3)
    return plan_verify(tree, torch.tensor([40, 0, 2]), torch.arange(132).reshape(3, 44))


def test_words_are_as_many_as_the_tree_needs() -> None:
    """One word a row for four nodes, whatever the prefix."""
    tree = tree_of(parents=[[-1, 0, 1, 2]] * 3, tokens=[[0, 1, 2, 3]] * 3)
    words = tree_mask(tree, three_requests(), "bits").words
    assert words.tolist() == [[0b1], [0b11], [0b111], [0b1111]] * 3


@pytest.mark.parametrize(
    ("mask", "b", "fragment"),
    [
        (DenseMask(torch.zeros(3, 1, 2, 44)), 1, "dense mask has 2 rows and 42 prefix columns"),
        (
            DenseMask(torch.zeros(1, 1, 4, 44)),
            1,
            "dense mask has 1 requests; the layout's call has",
        ),
        (
            DenseMask(torch.zeros(1, 1, 4, 44)),
            2,
            "dense mask has 1 requests; the layout's call has",
        ),
        (BitMask(torch.zeros(3, 1).int()), 0, "request 0 needs rows 0 to 4 of 1 words"),
        (BitMask(torch.zeros(6, 1).int()), 1, "request 1 needs rows 4 to 8 of 1 words"),
    ],
)
def test_a_mask_too_small_is_not_read(mask: TreeMask, b: int, fragment: str) -> None:
    """The request's rows are refused with both sizes."""
    with pytest.raises(InputError) as caught:
        read_mask(mask, three_requests(), b)
    assert fragment in str(caught.value)


def test_a_parent_below_minus_1_is_refused() -> None:
    """-1 is no parent; there is no other number for it."""
    with pytest.raises(InputError, match="node 1 has parent -2"):
        ancestors_or_self([-1, -2])


def test_an_indptr_far_too_short_is_refused() -> None:
    """The entry asked for is told, just behind the end and further on."""
    short = replace(three_requests(), qo_indptr=torch.tensor([0, 4], dtype=torch.int32))
    for b in (1, 2):
        with pytest.raises(InputError, match=f"qo_indptr has 2 entries; .* need entry {b + 1}"):
            request_lens(short, b)


def test_a_layout_of_fewer_requests_is_refused() -> None:
    """Both numbers of requests are told."""
    tree = tree_of(parents=[[-1, 0]] * 3, tokens=[[0, 1]] * 3)
    short = replace(three_requests(), qo_indptr=torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(InputError, match="the layout has 1 requests, the tree 3"):
        tree_mask(tree, short, "flat")


@pytest.mark.parametrize("room", [0, 2])
def test_masks_in_fixed_buffers_are_converted(room: int) -> None:
    """A buffer of just the call's size is read, and one with room to spare; a smaller one is refused."""
    tree = tree_of(parents=[[-1, 0, 0]], tokens=[[0, 1, 2]])
    layout = plan_verify(tree, torch.tensor([2]), torch.arange(5)[None])
    buffers = VerifyBuffers(1, QLen(3), 2 + room)
    buffers.fill(tree, layout, tree_mask(tree, layout, "flat"))
    assert buffers.mask.allowed.numel() == 15 + 3 * room
    found = convert_mask(buffers.mask, buffers.layout, "bits")
    assert found.words.tolist() == [[0b1], [0b11], [0b101]]
    with pytest.raises(InputError, match="14 flat mask entries; the layout's call has 15"):
        convert_mask(FlatMask(buffers.mask.allowed[:14]), buffers.layout, "bits")

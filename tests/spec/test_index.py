"""The address formulas: hand-computed numbers, and that they mean what a plain walk counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.invariants.claimed import index  # plain ints: what is tested is arithmetic

small = st.integers(0, 40)


def test_the_founding_bugs_numbers() -> None:
    """Prefix 5 and q_len 17 need 374 mask entries; width 8 gives 104."""
    assert index.mask_len(5, 17) == 374
    assert index.mask_len(5, 8) == 104
    assert index.mask_len(5, 17) + index.mask_len(3, 17) == 714
    assert index.mask_len(5, 8) + index.mask_len(3, 8) == 192


@pytest.mark.parametrize(
    ("formula", "arguments", "expected"),
    [
        (index.horizon_of, (8,), 7),
        (index.q_len_of, (16,), 17),
        (index.q_len_of, (17,), 18),
        (index.kv_len, (5, 17), 22),
        (index.mask_offset, (100, 2, 3, 5, 17), 147),
        (index.tree_col, (5, 3), 8),
        (index.packed_len, (0,), 0),
        (index.packed_len, (1,), 1),
        (index.packed_len, (8,), 1),
        (index.packed_len, (9,), 2),
        (index.packed_byte, (4, 17), 6),
        (index.packed_shift, (17,), 1),
        (index.bit_words, (0,), 0),
        (index.bit_words, (32,), 1),
        (index.bit_words, (33,), 2),
        (index.bit_word, (31,), 0),
        (index.bit_word, (32,), 1),
        (index.bit_shift, (33,), 1),
        (index.position, (5, 3), 8),
        (index.window_start, (9, 4), 6),
        (index.row_offset, (15408, 151936, 0), 2341029888),
        (index.row_offset, (3, 5, 7), 22),
        (index.chunk_len, (96, 3, 16), 32),
        (index.chunk_len, (97, 3, 16), 48),
        (index.chunk_start, (2, 48), 96),
        (index.row_of, (47, 22), 2),
        (index.col_of, (47, 22), 3),
        (index.num_blocks, (65, 64), 2),
        (index.num_blocks, (64, 64), 1),
        (index.num_blocks, (0, 64), 0),
        (index.block_start, (3, 64), 192),
        (index.round_up, (64, 64), 64),
        (index.round_up, (66, 64), 128),
        (index.dropped_step, (3, 6, 2), 7),
        (index.unused_row, (17, 2, 9, 15, 6, 2), 24),
        (index.unused_row, (17, 3, 7, 2, 6, 3), 39),
        (index.commit_entry, (5, 3), 8),
        (index.fits_int32, (5,), True),
        (index.fits_int32, (2**31 - 1,), True),
        (index.fits_int32, (2**31,), False),
    ],
)
def test_written_out(formula: object, arguments: tuple[int, ...], expected: int) -> None:
    """Each formula gives the number that was worked out by hand."""
    assert callable(formula)
    assert formula(*arguments) == expected
    assert type(formula(*arguments)) is type(expected), "an address is no float"


@given(st.lists(st.tuples(small, small), min_size=1, max_size=4))
def test_mask_offsets_count_the_entries_in_order(requests: list[tuple[int, int]]) -> None:
    """Walking requests, rows and columns in order meets the addresses 0, 1, 2 and so on."""
    start, seen = 0, 0
    for prefix_len, q_len in requests:
        for row in range(min(q_len, 5)):
            for col in range(prefix_len + q_len):
                assert index.mask_offset(start, row, col, prefix_len, q_len) == seen
                seen += 1
        start += index.mask_len(prefix_len, q_len)
        seen = start


@given(st.integers(0, 200), st.integers(0, 9))
def test_packed_bits_fill_bytes_in_order(bits: int, start: int) -> None:
    """Every bit has a place of its own, LSB first, and the bytes hold no more than one spare byte."""
    places = [(index.packed_byte(start, b), index.packed_shift(b)) for b in range(bits)]
    assert [8 * (byte - start) + shift for byte, shift in places] == list(range(bits))
    assert 8 * index.packed_len(bits) - bits in range(8)


@given(st.integers(1, 200))
def test_bit_words_hold_every_node(q_len: int) -> None:
    """Node n is bit n % 32 of word n // 32, and the last node's word is the last word."""
    assert index.bit_word(q_len - 1) == index.bit_words(q_len) - 1
    assert [32 * index.bit_word(n) + index.bit_shift(n) for n in range(q_len)] == list(range(q_len))


@given(st.integers(0, 300), st.integers(1, 9), st.sampled_from([1, 16, 64]))
def test_chunks_cover_every_entry_once(entries: int, splits: int, block: int) -> None:
    """The chunks of a split prefix follow each other and end past the last entry."""
    length = index.chunk_len(entries, splits, block)
    owners = [
        [c for c in range(splits) if 0 <= e - index.chunk_start(c, length) < length]
        for e in range(entries)
    ]
    assert length % block == 0
    assert all(len(owner) == 1 for owner in owners)


@given(small, small, small)
def test_tensors_and_ints_agree(row: int, col: int, prefix_len: int) -> None:
    """The very same formula runs on tensors."""
    q_len = row + 1
    by_tensor = index.mask_offset(7, torch.tensor(row), torch.tensor(col), prefix_len, q_len)
    assert by_tensor.item() == index.mask_offset(7, row, col, prefix_len, q_len)

"""Proofs of the mask's addresses: segments, cells, bytes, words, and the widths that lengths tell."""

from typing import Any

from ddtree.invariants.proofs import cases
from ddtree.invariants.proofs.integers import Int, Scope, Truth, every, implies, pick, within
from ddtree.invariants.proofs.proof import Claim, Formulas, Proof, Twin


def segments_tile(f: Formulas, s: Scope) -> Claim:
    """Induction over the requests: one more segment takes the entries that follow, and no others."""
    start, q_len, entry, owners = s.naturals("start q_len entry owners_before")
    prefix_len = s.integer("prefix_len")
    end = start + f.mask_len(prefix_len, q_len)
    owned = owners + pick(within(start, entry, end), 1, 0, s)
    return Claim(
        given={
            "prefix_len is not negative": prefix_len >= 0,
            "the segments before own each entry before start once": _own_once(owners, entry, start),
        },
        shows={
            "end >= start": end >= start,
            "the segments up to this one own each entry before end once": _own_once(
                owned, entry, end
            ),
        },
        where={"end": end, "owners": owned},
    )


def _own_once(owners: Int, entry: Int, end: Int) -> Truth:
    return every(implies(entry < end, owners == 1), implies(entry >= end, owners == 0))


def rows_fill_segment(f: Formulas, s: Scope) -> Claim:
    """A request's last cell is its segment's last entry: the next request's first cell follows it."""
    start, prefix_len, q_len = s.naturals("start prefix_len q_len")
    last = f.mask_offset(start, q_len - 1, f.kv_len(prefix_len, q_len) - 1, prefix_len, q_len)
    end = start + f.mask_len(prefix_len, q_len)
    return Claim(
        given={"the request has rows": q_len >= 1},
        shows={"last cell + 1 == end of segment": last + 1 == end},
        where={"last cell": last, "end of segment": end},
    )


MASK_SEGMENTS = Proof(
    "mask_segments",
    "The flat mask's segments are disjoint, follow one another and leave no entry out.",
    (segments_tile, rows_fill_segment),
    (
        Twin(
            "configured_width",
            "Segments are reserved for a configured width of 8 whatever the call's q_len is.",
            {"mask_len": lambda prefix_len, q_len: 8 * (prefix_len + 8)},
            case=lambda n: cases.segments(n, lambda p, q: 8 * (p + 8)),
        ),
        Twin(
            "no_tree_columns",
            "Segments have no room for the columns of the tree itself.",
            {"mask_len": lambda prefix_len, q_len: q_len * prefix_len},
            case=lambda n: cases.segments(n, lambda p, q: q * p),
        ),
        Twin(
            "falling_indptr",
            "A prefix length is the difference of an indptr that falls.",
            without="prefix_len is not negative",
            case=cases.falling_prefix,
        ),
    ),
)


def _cell(f: Formulas, s: Scope, name: str, prefix_len: Int, q_len: Int) -> tuple[Int, Int, Truth]:
    """A row and a column of a request, and that they are."""
    row, col = s.naturals(f"row{name} col{name}")
    return row, col, every(row < q_len, col < f.kv_len(prefix_len, q_len))


def cells_stay_inside(f: Formulas, s: Scope) -> Claim:
    """Every cell lies in its own request's segment."""
    start, prefix_len, q_len = s.naturals("start prefix_len q_len")
    row, col, is_cell = _cell(f, s, "", prefix_len, q_len)
    at = f.mask_offset(start, row, col, prefix_len, q_len)
    end = start + f.mask_len(prefix_len, q_len)
    return Claim(
        given={"(row, col) is a cell": is_cell},
        shows={"start <= address < end of segment": within(start, at, end)},
        where={"address": at, "end of segment": end},
    )


def cells_are_row_major(f: Formulas, s: Scope) -> Claim:
    """The first cell is the first entry, each next column the next entry, each next row follows the last."""
    start, prefix_len, q_len, row, col = s.naturals("start prefix_len q_len row col")
    width = f.kv_len(prefix_len, q_len)

    def at(row: Int | int, col: Int | int) -> Any:
        return f.mask_offset(start, row, col, prefix_len, q_len)

    return Claim(
        given={},
        shows={
            "(0, 0) is at start": at(0, 0) == start,
            "(row, col + 1) follows (row, col)": at(row, col + 1) == at(row, col) + 1,
            "(row + 1, 0) follows the row's last": at(row + 1, 0) == at(row, width - 1) + 1,
        },
        where={"address": at(row, col)},
    )


def cells_differ(f: Formulas, s: Scope) -> Claim:
    """No two cells of a request share an address."""
    start, prefix_len, q_len = s.naturals("start prefix_len q_len")
    row, col, is_cell = _cell(f, s, "", prefix_len, q_len)
    row2, col2, is_cell2 = _cell(f, s, "2", prefix_len, q_len)
    at = f.mask_offset(start, row, col, prefix_len, q_len)
    at2 = f.mask_offset(start, row2, col2, prefix_len, q_len)
    return Claim(
        given={"both are cells": every(is_cell, is_cell2)},
        shows={"equal addresses, equal cells": implies(at == at2, every(row == row2, col == col2))},
        where={"address": at, "address2": at2},
    )


def requests_differ(f: Formulas, s: Scope) -> Claim:
    """No cell of a later request has the address of an earlier one's."""
    start, prefix_len, q_len = s.naturals("start prefix_len q_len")
    start2, prefix_len2, q_len2 = s.naturals("start2 prefix_len2 q_len2")
    row, col, is_cell = _cell(f, s, "", prefix_len, q_len)
    row2, col2, is_cell2 = _cell(f, s, "2", prefix_len2, q_len2)
    at = f.mask_offset(start, row, col, prefix_len, q_len)
    at2 = f.mask_offset(start2, row2, col2, prefix_len2, q_len2)
    return Claim(
        given={
            "both are cells": every(is_cell, is_cell2),
            "the later segment starts at the earlier one's end or after it": start2
            >= start + f.mask_len(prefix_len, q_len),
        },
        shows={"address < address2": at < at2},
        where={"address": at, "address2": at2},
    )


def entries_are_cells(f: Formulas, s: Scope) -> Claim:
    """Every entry of a segment is some cell: the one that ``row_of`` and ``col_of`` tell."""
    start, prefix_len, q_len, entry = s.naturals("start prefix_len q_len entry")
    width = f.kv_len(prefix_len, q_len)
    row, col = f.row_of(entry, width), f.col_of(entry, width)
    return Claim(
        given={
            "the entry is in the segment": entry < f.mask_len(prefix_len, q_len),
            "a row has a column": width >= 1,
        },
        shows={
            "row < q_len and col < kv_len": every(row < q_len, col < width),
            "the cell's address is the entry's": f.mask_offset(start, row, col, prefix_len, q_len)
            == start + entry,
        },
        where={"row": row, "col": col},
    )


MASK_CELLS = Proof(
    "mask_cells",
    "Every (row, column) has one entry inside its own request's segment, and every entry one (row, column).",
    (
        cells_stay_inside,
        cells_are_row_major,
        cells_differ,
        requests_differ,
        entries_are_cells,
    ),
    (
        Twin(
            "stride_of_prefix",
            "Rows are as far apart as the prefix is long: the tree's own columns are forgotten.",
            {"mask_offset": lambda start, row, col, p, q: start + row * p + col},
            case=lambda n: cases.cells(n, lambda row, col, p, q: row * p + col),
        ),
        Twin(
            "transposed",
            "The mask is written column-major.",
            {"mask_offset": lambda start, row, col, p, q: start + col * q + row},
            case=lambda n: cases.cells(n, lambda row, col, p, q: col * q + row),
        ),
        Twin(
            "configured_width",
            "Rows are laid out for a configured width of 8.",
            {"mask_offset": lambda start, row, col, p, q: start + row * (p + 8) + col},
            case=lambda n: cases.cells(n, lambda row, col, p, q: row * (p + 8) + col),
        ),
        Twin(
            "segment_of_configured_width",
            "The next request starts where a request of the configured width 8 would end.",
            {"mask_len": lambda p, q: 8 * (p + 8)},
            case=lambda n: cases.segments(n, lambda p, q: 8 * (p + 8)),
        ),
    ),
)


def one_width_fits(f: Formulas, s: Scope) -> Claim:
    """A segment's length tells its width."""
    n, q = s.naturals("n q")
    prefix_len = s.integer("prefix_len")
    lengths = f.mask_len(prefix_len, n), f.mask_len(prefix_len, q)
    return Claim(
        given={"prefix_len is not negative": prefix_len >= 0},
        shows={
            "n * (p + n) == q * (p + q) only if n == q": implies(lengths[0] == lengths[1], n == q)
        },
        where={"n * (p + n)": lengths[0], "q * (p + q)": lengths[1]},
    )


def configured_width_fits_one_budget(f: Formulas, s: Scope) -> Claim:
    """The founding bug: a width from the block size is right at one budget and wrong at every other."""
    block_size, budget, prefix_len = s.naturals("block_size budget prefix_len")
    reserved = f.mask_len(prefix_len, block_size)
    needed = f.mask_len(prefix_len, f.q_len_of(budget))
    return Claim(
        given={"a block holds the root": block_size >= 1},
        shows={
            "it fits only at budget == horizon": (reserved == needed)
            == (budget == f.horizon_of(block_size))
        },
        where={"reserved": reserved, "needed": needed},
    )


def longer_rows_take_more(f: Formulas, s: Scope) -> Claim:
    """A wider call never needs fewer entries: capacities by the largest sizes hold every call."""
    prefix_len, q_len, max_prefix, max_q = s.naturals("prefix_len q_len max_prefix max_q_len")
    needed, room = f.mask_len(prefix_len, q_len), f.mask_len(max_prefix, max_q)
    return Claim(
        given={"no size exceeds the capacity's": every(prefix_len <= max_prefix, q_len <= max_q)},
        shows={"needed <= room": needed <= room},
        where={"needed": needed, "room": room},
    )


MASK_WIDTH = Proof(
    "mask_width",
    "n * (p + n) == q * (p + q) only if n == q: a configured width is wrong at every budget but one.",
    (one_width_fits, configured_width_fits_one_budget, longer_rows_take_more),
    (
        Twin(
            "no_tree_columns",
            "A segment's length leaves out the tree's own columns: with no prefix every width fits.",
            {"mask_len": lambda p, q: q * p},
        ),
        Twin(
            "falling_indptr",
            "A prefix length is the difference of an indptr that falls: two widths fit one segment.",
            without="prefix_len is not negative",
            case=cases.falling_prefix,
        ),
        Twin(
            "root_forgotten",
            "q_len is taken to be the budget, without the root's row.",
            {"q_len_of": lambda budget: budget},
            case=cases.root_forgotten,
        ),
        Twin(
            "capacity_of_another_size",
            "Buffers are made for another call than the largest.",
            without="no size exceeds the capacity's",
            case=cases.small_buffers,
        ),
    ),
)


def _dense(
    f: Formulas, s: Scope, name: str, sizes: tuple[Int, ...]
) -> tuple[Int, Int, Int, Int, Truth]:
    """Request, row and column of the dense form, the address, and that they are."""
    batch, rows, cols = sizes
    b, row, col, prefix_len, q_len = s.naturals(
        " ".join(f"{n}{name}" for n in ("b", "row", "col", "prefix_len", "q_len"))
    )
    tree_start = cols - rows
    entry = pick(col < prefix_len, col, f.tree_col(tree_start, col - prefix_len), s)
    at = f.row_offset(f.row_offset(b, rows, row), cols, entry)
    is_cell = every(
        b < batch, row < q_len, q_len <= rows, prefix_len <= tree_start,
        col < f.kv_len(prefix_len, q_len),
    )  # fmt: skip
    return b, row, col, at, is_cell


def dense_cells_stay_inside(f: Formulas, s: Scope) -> Claim:
    """Every cell of the dense form lies in its own request's matrix."""
    sizes = s.naturals("batch rows cols")
    _, rows, cols = sizes
    b, _, _, at, is_cell = _dense(f, s, "", sizes)
    start = f.row_offset(f.row_offset(b, rows, 0), cols, 0)
    end = f.row_offset(f.row_offset(b + 1, rows, 0), cols, 0)
    return Claim(
        given={"(b, row, col) is a cell": is_cell},
        shows={"address in request b's matrix": within(start, at, end)},
        where={"address": at, "start": start, "end": end},
    )


def dense_cells_differ(f: Formulas, s: Scope) -> Claim:
    """No two cells of one request of the dense form share an address."""
    rows, cols, prefix_len, q_len = s.naturals("rows cols prefix_len q_len")
    row, col, is_cell = _cell(f, s, "", prefix_len, q_len)
    row2, col2, is_cell2 = _cell(f, s, "2", prefix_len, q_len)

    def at(row: Int, col: Int) -> Any:
        entry = pick(col < prefix_len, col, f.tree_col(cols - rows, col - prefix_len), s)
        return f.row_offset(row, cols, entry)

    return Claim(
        given={
            "both are cells": every(is_cell, is_cell2, q_len <= rows, prefix_len + rows <= cols),
        },
        shows={
            "equal addresses, equal cells": implies(
                at(row, col) == at(row2, col2), every(row == row2, col == col2)
            )
        },
        where={"address": at(row, col), "address2": at(row2, col2)},
    )


DENSE_CELLS = Proof(
    "dense_cells",
    "The dense form's cells are apart and inside, the tree's columns after the longest prefix.",
    (dense_cells_stay_inside, dense_cells_differ),
    (
        Twin(
            "tree_column_early",
            "The tree's columns begin one column early, on the prefix's last.",
            {"tree_col": lambda prefix_len, node: prefix_len + node - 1},
            case=cases.dense_column_early,
        ),
        Twin(
            "stride_of_rows",
            "A row is as far from the next as the matrix has rows, not columns.",
            {"row_offset": lambda row, stride, col: row * (stride - 1) + col},
        ),
    ),
)


def bits_fit_bytes(f: Formulas, s: Scope) -> Claim:
    """A bit lies in its request's bytes; padding is less than a byte."""
    start, num_bits, bit = s.naturals("start num_bits bit")
    size = f.packed_len(num_bits)
    byte, shift = f.packed_byte(start, bit), f.packed_shift(bit)
    return Claim(
        given={"the bit is the request's": bit < num_bits},
        shows={
            "start <= byte < start + packed_len": within(start, byte, start + size),
            "0 <= shift < 8": within(0, shift, 8),
            "0 <= spare bits < 8": within(0, size * 8 - num_bits, 8),
        },
        where={"byte": byte, "shift": shift, "packed_len": size},
    )


def bits_differ(f: Formulas, s: Scope) -> Claim:
    """No two bits of a request share a place, and places ascend LSB first."""
    start, bit, bit2 = s.naturals("start bit bit2")
    place = f.packed_byte(start, bit), f.packed_shift(bit)
    place2 = f.packed_byte(start, bit2), f.packed_shift(bit2)
    return Claim(
        given={},
        shows={
            "equal places, equal bits": implies(
                every(place[0] == place2[0], place[1] == place2[1]), bit == bit2
            ),
            "the first bit is the first byte's lowest": every(
                f.packed_byte(start, 0) == start, f.packed_shift(0) == 0
            ),
            "8 * (byte - start) + shift == bit": 8 * (place[0] - start) + place[1] == bit,
        },
        where={"byte": place[0], "shift": place[1], "byte2": place2[0], "shift2": place2[1]},
    )


def requests_share_no_byte(f: Formulas, s: Scope) -> Claim:
    """The next request starts on a fresh byte, so two programs never write one byte."""
    start, num_bits, bit, bit2 = s.naturals("start num_bits bit bit2")
    start2 = start + f.packed_len(num_bits)
    byte, byte2 = f.packed_byte(start, bit), f.packed_byte(start2, bit2)
    return Claim(
        given={"the first bit is the first request's": bit < num_bits},
        shows={"byte < byte2": byte < byte2},
        where={"byte": byte, "byte2": byte2},
    )


def packed_capacity_holds(f: Formulas, s: Scope) -> Claim:
    """Induction over the requests: bytes for all bits at once and one more a request are enough."""
    bits, requests, num_bits, used = s.naturals("bits requests num_bits used")
    return Claim(
        given={"they are enough so far": used <= f.packed_len(bits) + requests},
        shows={
            "they are enough with one request more": used + f.packed_len(num_bits)
            <= f.packed_len(bits + num_bits) + requests + 1
        },
        where={"now used": used + f.packed_len(num_bits)},
    )


PACKED_BITS = Proof(
    "packed_bits",
    "Each mask bit has a place of its own, LSB first, in bytes that its request shares with no other.",
    (bits_fit_bytes, bits_differ, requests_share_no_byte, packed_capacity_holds),
    (
        Twin(
            "no_byte_padding",
            "The last bits of a request that fill no byte are not counted.",
            {"packed_len": lambda num_bits: num_bits // 8},
            case=lambda n: cases.packed(n, lambda bits: bits // 8),
        ),
        Twin(
            "whole_spare_byte",
            "A byte is added even where the bits fill the last one.",
            {"packed_len": lambda num_bits: num_bits // 8 + 1},
            case=lambda n: cases.packed(n, lambda bits: bits // 8 + 1),
        ),
        Twin(
            "most_significant_first",
            "Bits go from the byte's highest down (numpy.packbits' own order).",
            {"packed_shift": lambda bit: 7 - bit % 8},
            case=cases.packed_msb_first,
        ),
        Twin(
            "shift_past_the_byte",
            "The shift is taken as in 32-bit words.",
            {"packed_shift": lambda bit: bit % 32},
        ),
    ),
)


def nodes_fit_words(f: Formulas, s: Scope) -> Claim:
    """A node's bit lies in its row's words, also where the words are those of a wider call."""
    q_len, max_q_len, node = s.naturals("q_len max_q_len node")
    word, shift = f.bit_word(node), f.bit_shift(node)
    words = f.bit_words(max_q_len)
    return Claim(
        given={"the node is a row": node < q_len, "no row is wider": q_len <= max_q_len},
        shows={
            "0 <= word < bit_words": within(0, word, words),
            "0 <= shift < 32": within(0, shift, 32),
            "0 <= spare bits < 32": within(0, words * 32 - max_q_len, 32),
        },
        where={"word": word, "shift": shift, "bit_words": words},
    )


def nodes_differ(f: Formulas, s: Scope) -> Claim:
    """No two nodes share a bit, and bits ascend LSB first."""
    node, node2 = s.naturals("node node2")
    place = f.bit_word(node), f.bit_shift(node)
    place2 = f.bit_word(node2), f.bit_shift(node2)
    return Claim(
        given={},
        shows={
            "equal places, equal nodes": implies(
                every(place[0] == place2[0], place[1] == place2[1]), node == node2
            ),
            "32 * word + shift == node": 32 * place[0] + place[1] == node,
        },
        where={"word": place[0], "shift": place[1], "word2": place2[0], "shift2": place2[1]},
    )


def tree_block_words(f: Formulas, s: Scope) -> Claim:
    """A tree block of whole words: column c of block t is bit c of the words that start the block."""
    block, words_of_block, tree_block, column = s.naturals("block words_of_block tree_block column")
    node = f.block_start(tree_block, block) + column
    word = f.bit_word(f.block_start(tree_block, block)) + f.bit_word(column)
    return Claim(
        given={
            "a block is whole words": every(block == 32 * words_of_block, words_of_block >= 1),
            "the column is the block's": column < block,
        },
        shows={
            "word(block) + word(column) == word(node)": word == f.bit_word(node),
            "shift(column) == shift(node)": f.bit_shift(column) == f.bit_shift(node),
        },
        where={"node": node, "word read": word, "word of node": f.bit_word(node)},
    )


BIT_WORDS = Proof(
    "bit_words",
    "Each node has a bit of its own in its row's words, also seen from a block of columns.",
    (nodes_fit_words, nodes_differ, tree_block_words),
    (
        Twin(
            "too_few_words",
            "The last nodes that fill no word are not counted.",
            {"bit_words": lambda q_len: q_len // 32},
            case=lambda n: cases.words(n, lambda q_len: q_len // 32),
        ),
        Twin(
            "words_of_64_bits",
            "The shift is taken as in 64-bit words.",
            {"bit_shift": lambda node: node % 64},
        ),
        Twin(
            "words_of_configured_width",
            "The words have room for a configured q_len, not for this call's.",
            without="no row is wider",
            case=lambda n: cases.words(n, lambda q_len: (n["max_q_len"] + 31) // 32),
        ),
        Twin(
            "block_of_part_words",
            "Blocks of columns need not be whole words.",
            without="a block is whole words",
        ),
    ),
)


def cells_of_table_stay_inside(f: Formulas, s: Scope) -> Claim:
    """Every cell of a row-major table lies in its own row and in the table."""
    rows, row_stride, row, col = s.naturals("rows row_stride row col")
    at = f.row_offset(row, row_stride, col)
    start, end = f.row_offset(row, row_stride, 0), f.row_offset(row + 1, row_stride, 0)
    return Claim(
        given={"the row is the table's": row < rows, "the column is the row's": col < row_stride},
        shows={
            "address in its own row": within(start, at, end),
            "the row's end is within the table": end <= f.row_offset(rows, row_stride, 0),
            "the last address is the largest": at
            <= f.row_offset(rows - 1, row_stride, row_stride - 1),
        },
        where={"address": at, "row end": end},
    )


def cells_of_table_differ(f: Formulas, s: Scope) -> Claim:
    """No two cells of a row-major table share an address, and the address tells its cell."""
    row_stride, row, col, row2, col2 = s.naturals("row_stride row col row2 col2")
    at, at2 = f.row_offset(row, row_stride, col), f.row_offset(row2, row_stride, col2)
    return Claim(
        given={"the columns are the rows'": every(col < row_stride, col2 < row_stride)},
        shows={
            "equal addresses, equal cells": implies(at == at2, every(row == row2, col == col2)),
            "row_of and col_of tell the cell": every(
                f.row_of(at, row_stride) == row, f.col_of(at, row_stride) == col
            ),
        },
        where={"address": at, "address2": at2},
    )


TABLE_CELLS = Proof(
    "table_cells",
    "A row-major table's cells are apart and inside, and an address tells its row and column.",
    (cells_of_table_stay_inside, cells_of_table_differ),
    (
        Twin(
            "stride_too_small",
            "Rows are one entry closer than they are long.",
            {"row_offset": lambda row, stride, col: row * (stride - 1) + col},
        ),
        Twin(
            "column_outside",
            "A column past the row's end is read: it is the next row's.",
            without="the columns are the rows'",
        ),
        Twin(
            "row_outside",
            "A row past the table's last is read.",
            without="the row is the table's",
        ),
        Twin(
            "column_of_another_stride",
            "The column is taken apart with another stride.",
            {"col_of": lambda offset, stride: offset % (stride + 1)},
        ),
    ),
)

OF_MASK = (MASK_SEGMENTS, MASK_CELLS, MASK_WIDTH, DENSE_CELLS, PACKED_BITS, BIT_WORDS, TABLE_CELLS)

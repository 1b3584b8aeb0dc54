"""The picture in a terminal, letter by letter."""

from dataclasses import replace

import pytest

from ddtree.decoding.founding_bug import configured_width
from ddtree.pictures import view_of
from ddtree.pictures.text import ASCII, SIGNS, mask_text, title, tree_text
from tests.pictures.calls import known_call

CALL = known_call()
VIEW = view_of(CALL.layout, CALL.mask, CALL.tree, CALL.acceptance)


def test_tree() -> None:
    """Branches, scores, the accepted path and the padding."""
    assert tree_text(VIEW).plain.splitlines() == [
        "0* 10  0.00",
        "├─ 1* 11  -1.00",
        "│  └─ 3* 13  -3.00",
        "└─ 2 12  -2.00",
        "row 4 is padding",
    ]


def test_mask() -> None:
    """One line a row; padding has cells of its own."""
    assert mask_text(VIEW, 60).plain.splitlines()[:5] == [
        "0* ██│█····",
        "1* ██│██···",
        "2  ██│█·█··",
        "3* ██│██·█·",
        "4p ░░│····░",
    ]


def test_title_has_the_numbers() -> None:
    """Prefix, width, nodes and padding."""
    assert title(VIEW) == "request 0: prefix_len 2, q_len 5, num_nodes 4, padding 1"


@pytest.mark.parametrize("width", [12, 20, 30])
def test_no_line_of_cells_is_wider_than_the_terminal(width: int) -> None:
    """Columns that do not fit are cut, and the legend says so."""
    wide = replace(VIEW, q_len=40, allowed=None)
    assert "nothing to draw" in mask_text(wide, width).plain
    lines = mask_text(VIEW, width).plain.splitlines()
    assert max(len(line) for line in lines[:5]) <= width


def test_cut_columns_are_told() -> None:
    """At 11 characters one of the five columns does not fit."""
    said = mask_text(VIEW, 11).plain
    assert "tree columns 3..4 cut" in said


def test_a_long_prefix_is_condensed_without_losing_a_hole() -> None:
    """100 entries in 8 cells: one hidden entry marks its cell, the others stay full."""
    allowed = VIEW.allowed
    assert allowed is not None
    import numpy as np

    long = np.concatenate([np.ones((5, 98), dtype=np.bool_), allowed], axis=1)
    long[1, 50] = False
    view = replace(VIEW, prefix_len=100, allowed=long)
    lines = mask_text(view, 60).plain.splitlines()
    assert lines[0].startswith("0* ████████│")
    assert lines[1].startswith("1* ████x███│")
    assert "100 prefix entries in 8 cells" in lines[-1]


def test_a_broken_call_is_marked_without_colour() -> None:
    """Wrong cells and rows without a query have signs, not only colours."""
    view = view_of(configured_width(CALL.layout, 3), CALL.mask, CALL.tree, CALL.acceptance)
    assert "3* 13  -3.00  no query row" in tree_text(view).plain
    said = mask_text(view, 60).plain
    assert "x" in said
    assert "! seen, but no ancestor   x hidden, but must be seen" in said


def test_every_sign_has_its_own_ascii_letter() -> None:
    """A terminal without Unicode still tells allowed from hidden."""
    signs = {sign for sign, _ in SIGNS.values()} | {"│", "░"}
    letters = {sign.translate(ASCII) for sign in signs}
    assert len(letters) == len(signs)
    assert all(letter.isascii() for letter in letters)


def test_what_is_not_known_is_not_told() -> None:
    """Neither tokens nor counts are made up, and no score is minus nothing."""
    bare = replace(VIEW, token_ids=(), labels=(), scores=(-0.001,) * 4)
    assert tree_text(bare).plain.splitlines()[0] == "0*  0.00"
    unknown = replace(bare, parents=(), scores=(), num_nodes=None)
    assert title(unknown) == "request 0: prefix_len 2, q_len 5"
    assert "padding" not in mask_text(unknown, 60).plain

"""What a picture shows, from hand-made calls whose every cell is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ddtree.decoding.founding_bug import configured_width
from ddtree.pictures.view import Cell, TreeView, shown, view_of
from ddtree.spec.contracts import FlatMask
from tests.pictures.calls import Known, known_call


def view(call: Known, request: int = 0) -> TreeView:
    """The picture of one request."""
    return view_of(call.layout, call.mask, call.tree, call.acceptance, request)


def cells_of(view: TreeView) -> NDArray[np.int8]:
    """The cells, which are there."""
    cells = view.cells()
    assert cells is not None
    return cells


def test_cells_are_ancestors_or_self() -> None:
    """Each real row sees its prefix, its ancestors and itself; padding sees what it sees."""
    cells = cells_of(view(known_call()))
    assert cells.tolist() == [
        [1, 1, 2, 0, 0, 0, 0],
        [1, 1, 2, 2, 0, 0, 0],
        [1, 1, 2, 0, 2, 0, 0],
        [1, 1, 2, 2, 0, 2, 0],
        [1, 1, 0, 0, 0, 0, 2],
    ]


def test_a_wrong_bit_is_marked_both_ways() -> None:
    """A hidden ancestor and a visible stranger have codes of their own; padding is not judged."""
    call = known_call()
    allowed = call.mask.allowed.view(5, 7).clone()
    allowed[1, 2], allowed[1, 4], allowed[4, 2] = False, True, True
    cells = cells_of(view(replace(call, mask=FlatMask(allowed.flatten()))))
    assert cells[1, 2] == Cell.WRONGLY_HIDDEN
    assert cells[1, 4] == Cell.WRONGLY_SEEN
    assert cells[4, 2] == Cell.TREE


def test_a_configured_width_is_read_as_a_kernel_would() -> None:
    """With width 3 row 1 starts at entry 5 of the mask, not at entry 7."""
    call = known_call()
    broken = view(replace(call, layout=configured_width(call.layout, 3)))
    assert broken.q_len == 3
    assert broken.allowed is not None
    assert np.array_equal(broken.allowed.flatten(), call.mask.allowed[:15].numpy())
    assert (cells_of(broken) >= Cell.WRONGLY_SEEN).any()


def test_a_layout_past_the_mask_has_no_cells() -> None:
    """Where the kernel would read out of bounds, nothing is drawn."""
    call = known_call()
    broken = view(replace(call, layout=configured_width(call.layout, 9)))
    assert broken.allowed is None
    assert broken.cells() is None


def test_a_parent_that_is_no_earlier_row_makes_a_root() -> None:
    """A broken tree is drawn, not followed in circles."""
    call = known_call()
    parents = torch.tensor([[-1, 3, 0, 1, -1]], dtype=torch.int32)
    broken = view(replace(call, tree=replace(call.tree, parents=parents)))
    assert broken.roots() == (0, 1)
    assert broken.depths == (0, 0, 1, 1)


def test_an_unknown_request_is_refused() -> None:
    """The message has both numbers."""
    with pytest.raises(IndexError, match="request 1 of a call with 1 requests"):
        view(known_call(), request=1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (" the", "␣the"),
        ("\n\t", "⏎⇥"),
        ("\x00", "\ufffd"),
        ("a" * 12, "a" * 12),
        ("a" * 13, "a" * 11 + "…"),
    ],
)
def test_token_text_stays_on_its_line(text: str, line: str) -> None:
    """White space is visible, the unprintable replaced, the long cut."""
    assert shown(text) == line

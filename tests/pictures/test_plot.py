"""PNG and SVG: whole files, with the text that belongs in them."""

import warnings
from dataclasses import replace
from xml.dom import minidom

import pytest

from ddtree.decoding.founding_bug import configured_width
from ddtree.pictures import view_of
from tests.pictures.calls import known_call

pytest.importorskip("matplotlib", reason="the plots extra")
from ddtree.cli.source import made_up_call
from ddtree.pictures.plot import render

CALL = known_call()
VIEW = view_of(CALL.layout, CALL.mask, CALL.tree, CALL.acceptance)


def texts(svg: bytes) -> list[str]:
    """Every text of an SVG file."""
    found = minidom.parseString(svg).getElementsByTagName("text")  # noqa: S318 (our own file)
    return ["".join(node.nodeValue or "" for node in one.childNodes) for one in found]


def test_png_is_a_png() -> None:
    """Signature and end marker: nothing is cut off."""
    data = render(VIEW, "png")
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")


def test_svg_holds_tokens_rows_and_numbers() -> None:
    """Tokens, the padding, the legend and the title can be read and searched."""
    found = texts(render(VIEW, "svg"))
    assert {"10", "11", "12", "13", "padding 4", "accepted", "padding"} <= set(found)
    assert any("prefix_len 2   q_len 5   num_nodes 4   padding 1   accepted 3" in t for t in found)


def test_svg_of_a_broken_call_says_what_is_wrong() -> None:
    """The note and the legend of the wrong cells."""
    view = view_of(configured_width(CALL.layout, 3), CALL.mask, CALL.tree, CALL.acceptance)
    found = texts(render(view, "svg", "mask_len is broken"))
    assert "mask_len is broken" in found
    assert "WRONG: hidden, but must be seen" in found
    assert "WRONG: node without a query row" in found


def test_the_same_call_gives_the_same_bytes() -> None:
    """No date, no random id: a picture in a repository changes only with its call."""
    assert render(VIEW, "svg") == render(VIEW, "svg")


@pytest.mark.parametrize("label", ["$x$", "$", "<&>", "日本", "\ufffd", ""])
def test_any_token_text_can_be_drawn(label: str) -> None:
    """Neither mathematics nor markup nor a missing glyph is an error or a warning."""
    view = replace(VIEW, labels=(label, *VIEW.labels[1:]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        render(view, "png")
        assert label in texts(render(view, "svg")) or not label


@pytest.mark.parametrize(("prefix", "budget", "topk"), [(0, 0, None), (3, 1, 1), (900, 256, None)])
def test_awkward_sizes(prefix: int, budget: int, topk: int | None) -> None:
    """The root alone, no prefix, a chain, and hundreds of nodes."""
    call = made_up_call([prefix], budget, topk, 8, seed=0)
    view = view_of(call.layout, call.mask, call.tree, call.acceptance)
    assert render(view, "svg").rstrip().endswith(b"</svg>")


def test_no_tree_and_no_mask() -> None:
    """What a captured call lacks is said in the picture."""
    bare = replace(VIEW, parents=(), token_ids=(), labels=(), scores=(), accepted=(), allowed=None)
    found = texts(render(bare, "svg"))
    assert "no tree in this call" in found
    assert any("the layout reads past" in text for text in found)

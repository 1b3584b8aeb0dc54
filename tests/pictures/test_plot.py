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
from ddtree.pictures.plot import MOST_PIXELS, limited_size, render

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
    bare = replace(
        VIEW,
        num_nodes=None,
        parents=(),
        token_ids=(),
        labels=(),
        scores=(),
        accepted=(),
        allowed=None,
    )
    found = texts(render(bare, "svg"))
    assert "no tree in this call" in found
    assert any("the layout reads past" in text for text in found)
    assert not any("num_nodes" in text for text in found)


def pixels(png: bytes) -> tuple[int, int]:
    """Width and height."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


@pytest.mark.parametrize("budget", [0, 2])
def test_a_small_tree_has_a_small_picture_with_a_whole_title(budget: int) -> None:
    """The title fits into the width, and no empty space is drawn below a few rows."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    call = made_up_call([5], budget, None, 8, seed=0)
    view = view_of(call.layout, call.mask, call.tree, call.acceptance)
    width, height = pixels(render(view, "png"))
    (title,) = [text for text in texts(render(view, "svg")) if "prefix_len" in text]
    drawn = TextPath((0, 0), title, size=13, prop=FontProperties(weight="bold")).get_extents()
    assert drawn.width / 72 * 150 + 0.2 * 150 < width
    assert height < 450


def test_a_condensed_prefix_is_told() -> None:
    """8 columns stand for 2000 entries, and the picture says so."""
    call = made_up_call([2000], 3, None, 8, seed=0)
    found = texts(render(view_of(call.layout, call.mask, call.tree), "svg"))
    assert "2000 prefix entries in 8 columns" in found
    assert not any("prefix entries in" in text for text in texts(render(VIEW, "svg")))


def test_a_huge_picture_is_limited() -> None:
    """512 nodes: no side is longer than the limit, and whoever asks is told."""
    call = made_up_call([5], 512, None, 8, seed=0)
    png = render(view_of(call.layout, call.mask, call.tree, call.acceptance), "png")
    with_limit = limited_size(png)
    assert max(pixels(png)) <= MOST_PIXELS
    assert with_limit == (pixels(png) if max(pixels(png)) >= MOST_PIXELS - 1 else None)
    assert limited_size(render(VIEW, "png")) is None


def test_no_score_is_minus_nothing() -> None:
    """-0.04 is drawn as 0.0."""
    found = texts(render(replace(VIEW, scores=(0.0, -0.04, -0.04, -0.04)), "svg"))
    assert "0.0" in found
    assert "-0.0" not in found

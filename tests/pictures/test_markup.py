"""HTML as text: what is no markup is escaped, and the parser of the tests notices what is wrong."""

import pytest

from ddtree.pictures.pages.markup import Markup, join, ranges, tag, text
from ddtree.pictures.pages.page import page
from tests.pictures.parsed import parsed


def test_text_and_attributes_are_escaped() -> None:
    """Whatever stands in them."""
    bad = """<a href="x" onclick='y'>&amp;</a>"""
    made = tag("p", bad, title=bad, data_row=3, hidden=True, class_=None)
    assert made.count("<") == 2
    found = parsed(made.encode()).one("p")
    assert found.text == bad
    assert found.attributes == {"title": bad, "data-row": "3", "hidden": ""}


def test_markup_stays_as_it_is() -> None:
    """Elements within elements, and lone surrogates and controls that HTML cannot hold."""
    assert join([tag("b", "<"), None, Markup("&amp;")], "|") == "<b>&lt;</b>|&amp;"
    assert text("a\x00b\ud800\n") == "a�b?\n"
    assert tag("rect", x=1.25, y=2.0) == '<rect x="1.2" y="2"/>'


def test_ranges() -> None:
    """Runs of numbers, told shortly."""
    assert ranges([9, 0, 1, 2, 7, 10]) == "0 to 2, 7, 9 to 10"


@pytest.mark.parametrize(
    "wrong",
    [
        b"<p><b></p></b>",
        b"<p>",
        b'<img src="#x">',
        b'<a href="https://example.org">x</a>',
        b'<p onclick="x()">x</p>',
        b"<style>@import 'x';</style>",
        b'<p id="a"></p><p id="a"></p>',
    ],
)
def test_the_parser_refuses_what_is_wrong(wrong: bytes) -> None:
    """Elements that do not nest, anything that is loaded, handlers, ids that stand twice."""
    with pytest.raises(AssertionError):
        parsed(wrong)


def test_a_page_allows_its_own_script_alone() -> None:
    """The policy names the script by its hash, and nothing else may run or load."""

    def policy(made: bytes) -> str:
        (found,) = [m for m in parsed(made).all("meta") if "http-equiv" in m.attributes]
        return found.attributes["content"]

    assert "default-src 'none'" in policy(page("t", "k"))
    assert "script-src 'none'" in policy(page("t", "k"))
    assert "script-src 'sha256-" in policy(page("t", "k", script="trace.js"))

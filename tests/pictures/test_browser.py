"""The pages in a real browser: narrow and wide, light and dark, with and without their script.

Where no Chromium is installed these tests are skipped; continuous integration installs one (`.ci/run`).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddtree.invariants import Call
from ddtree.pictures.pages.call import Source, call_page
from ddtree.pictures.pages.conformance import conformance_page, record_page
from ddtree.pictures.pages.isolation import isolation_page
from ddtree.pictures.pages.trace import Traced, trace_page
from tests.pictures.browser import Page, browser
from tests.pictures.test_call_page import made_up
from tests.pictures.test_trace_page import PROMPT, TEXTS, stats

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 300


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    """One browser for all."""
    with browser() as page:
        yield page


@pytest.fixture(scope="module")
def pages(runs: Path) -> dict[str, Path]:
    """Each kind of page, and what is hard to fit: big masks, long names, hostile tokens, many rounds."""
    big = made_up([300], 128, fault="mask=inverted")
    hostile = Source(Path(f"{'long' * 60}<script>hacked = 1</script>.npz"), {"x" * 300: "?"})
    alike = stats([-1, 0, 1, 0, 3], [0, 1, 2], [1, 2, 9], padding=12)
    many = Traced(
        "<script>hacked = 1</script>", [0] + [1, 2, 9] * ROUNDS, [alike] * ROUNDS, "its length"
    )
    sources = {
        "broken": call_page(made_up([5, 30, 12], fault="width=8"), hostile),
        "big": call_page(big, Source(Path("big.npz"), {})),
        "bare": call_page(Call(qo_indptr=torch.tensor([0, 3])), Source(Path("bare.npz"), {})),
        "conform": conformance_page(json.loads((runs / "conform.json").read_text()), runs),
        "isolate": isolation_page(json.loads((runs / "isolate.json").read_text())),
        "peers": record_page(json.loads((ROOT / "bench/results/conformance-cpu.json").read_text())),
        "trace": trace_page([PROMPT, many], TEXTS, {"target": "tiny" * 50}),
    }
    for name, (_, data) in sources.items():
        (runs / f"{name}.html").write_bytes(data)
    return {name: runs / f"{name}.html" for name in sources}


NAMES = ("broken", "big", "bare", "conform", "isolate", "peers", "trace")
CUT = (
    "[...document.querySelectorAll('.command')].filter(e => e.scrollWidth > e.clientWidth)"
    ".map(e => e.textContent)"
)
"""Commands that end beyond the edge: what tells one file from another is at their end."""
VISIBLE = "[...document.querySelectorAll('.round')].filter(e => e.offsetHeight).map(e => e.id)"


@pytest.mark.parametrize("name", NAMES)
def test_fits_narrow_and_wide_light_and_dark(tab: Page, pages: dict[str, Path], name: str) -> None:
    """No page is wider than a phone, everything folded out too; nothing is complained of, nothing loaded."""
    tab.errors.clear()
    grounds = set()
    for width, dark in ((390, False), (390, True), (1280, False), (1280, True)):
        tab.open(pages[name], width, dark=dark)
        tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert tab.run("document.documentElement.clientWidth") == width
        assert tab.overflow() == 0, f"{tab.overflow()} pixels wider than {width}"
        assert tab.run(CUT) == []
        grounds.add(tab.run("getComputedStyle(document.body).backgroundColor"))
        assert tab.run("typeof hacked") == "undefined"
        assert set(tab.requested) == {pages[name].as_uri()}
    assert len(grounds) == 2
    assert tab.errors == []


def test_the_guard_notices_what_is_too_wide_or_wrong(tab: Page, tmp_path: Path) -> None:
    """A page that is too wide, one whose script fails, and one that loads something are noticed."""
    wrong = tmp_path / "wrong.html"
    wrong.write_text(
        "<meta name=viewport content='width=device-width'><p style='width: 700px'>wide</p>"
        "<script>console.error('x'); nothing.at.all</script><img src='no.png'>"
    )
    tab.errors.clear()
    tab.open(wrong, 390)
    assert tab.overflow() > 300
    assert len(tab.errors) >= 2
    assert [url for url in tab.requested if url.endswith("no.png")]
    tab.errors.clear()


def test_signs_are_seen_without_colour(tab: Page, pages: dict[str, Path]) -> None:
    """A cross and a ring stand on the wrong bits, as thick lines in another colour than their ground."""
    for dark in (False, True):
        tab.open(pages["broken"], 1280, dark=dark)
        for kind in ("leaked", "hidden"):
            group = f".mask .{kind}[data-bits]"
            sign, ground = (
                f"getComputedStyle(document.querySelector('{group} .{c}'))"
                for c in ("sign", "ground")
            )
            assert (
                tab.run(f"document.querySelector('{group} .sign').getBoundingClientRect().width")
                > 8
            )
            assert float(tab.run(f"{sign}.strokeWidth").removesuffix("px")) > 1.5
            assert tab.run(f"{sign}.stroke !== {ground}.fill")


def test_rounds_are_walked_by_keys_and_buttons(tab: Page, pages: dict[str, Path]) -> None:
    """One round at a time, of the prompt that is chosen; the address leads back to it."""
    tab.errors.clear()
    tab.open(pages["trace"], 390)

    def place() -> str:
        return str(tab.run("document.getElementById('place').textContent"))

    assert tab.run(VISIBLE) == ["p0r0"]
    tab.press("ArrowRight")
    tab.click("#next")
    assert (tab.run(VISIBLE), place()) == (["p0r2"], "round 3 of 4")
    tab.press("ArrowLeft")
    assert tab.run(VISIBLE) == ["p0r1"]
    tab.press("n")
    tab.press("End")
    assert (tab.run(VISIBLE), place()) == ([f"p1r{ROUNDS - 1}"], f"round {ROUNDS} of {ROUNDS}")
    assert tab.run("document.getElementById('next').disabled") is True
    tab.press("ArrowRight")
    assert tab.run("location.hash") == f"#p1r{ROUNDS - 1}"
    tab.press("Home")
    tab.run("(() => { const s = document.getElementById('slider'); s.value = 7;"
            " s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert tab.run(VISIBLE) == ["p1r7"]
    kinds = "[...document.querySelectorAll('.prompt.now .story a')].map(a => a.className)"
    assert tab.run(kinds) == ["past"] * 7 + ["now"] + ["later"] * (ROUNDS - 8)
    tab.click(".prompt.now .story a[data-round='5']")
    assert tab.run(VISIBLE) == ["p1r5"]
    assert tab.overflow() == 0
    assert tab.errors == []


def test_a_round_has_an_address(tab: Page, pages: dict[str, Path]) -> None:
    """A page opened at a round shows it."""
    tab.open(pages["trace"], 1280)
    tab.run(
        "new Promise(done => { addEventListener('hashchange', done); location.hash = '#p1r41'; })"
    )
    assert tab.run(VISIBLE) == ["p1r41"]


def test_without_script_all_rounds_are_there(tab: Page, pages: dict[str, Path]) -> None:
    """The page reads from top to bottom; the buttons are not shown."""
    tab.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(pages["trace"], 390)
        assert len(tab.run(VISIBLE)) == len(PROMPT.rounds) + ROUNDS
        assert tab.run("document.querySelector('nav').offsetHeight") == 0
        assert tab.overflow() == 0
    finally:
        tab.send("Emulation.setScriptExecutionDisabled", value=False)

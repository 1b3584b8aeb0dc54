"""A conformance run and an isolation as pages: states, cases and counts are the run's own."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ddtree.invariants.conformance.cells import Cell, q_lens
from ddtree.invariants.conformance.decide import decide
from ddtree.invariants.conformance.isolate import Isolation, Tried
from ddtree.pictures.pages.conformance import conformance_page, record_page
from ddtree.pictures.pages.isolation import isolation_page
from tests.pictures.parsed import parsed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def conform(runs: Path) -> Any:
    """The conformance run."""
    return json.loads((runs / "conform.json").read_text())


@pytest.fixture
def isolated(runs: Path) -> Any:
    """The isolation."""
    return json.loads((runs / "isolate.json").read_text())


def test_properties_have_their_states(conform: Any, runs: Path) -> None:
    """Each offered property stands with its state and cases; the others are named as not offered."""
    title, data = conformance_page(conform, runs)
    page = parsed(data)
    assert title == page.one("h1").text == "founding-bug: 2 of 2 properties broken"
    rows = page.section("Properties").one("table").table()[1:]
    offered = [p for p in conform["properties"] if p["state"] != "not offered"]
    assert [row[:4] for row in rows] == [
        [f"✕ {p['state']}", p["property"], p["statement"], str(p["cases"])] for p in offered
    ]
    assert "Not offered by the backend: plan_verify, ragged." in page.text
    assert "ddtree isolate founding-bug" in page.text


def test_the_smallest_failing_case_is_drawn(conform: Any, runs: Path) -> None:
    """The broken call that the backend made, or the sound one that it was given, each with its commands."""
    page = parsed(conformance_page(conform, runs)[1])
    planned = page.section("✕ plan_verify: every offset is the call's own")
    assert "smallest case" in planned.text
    assert "mask_len" in planned.text
    assert [r.attributes["data-end"] for r in planned.all("rect", class_="right")] == [
        "1",
        "0",
        "1",
    ]
    seen = page.section("✕ visible set, fixed buffers: the same in buffers larger than the call")
    (what,) = [p["what"] for p in conform["properties"] if "buffers" in p["property"]]
    told = f"The call below is sound; what the backend made of it was wrong: {what}."
    assert 0 < seen.text.index(told) < seen.text.index("Of the call itself nothing that could")
    assert len(seen.all("svg", class_="mask")) > 1
    (file,) = [p["file"] for p in conform["properties"] if "buffers" in p["property"]]
    assert f"ddtree replay {file}" in seen.text
    assert f"ddtree conform founding-bug --case {file}" in seen.text


def test_a_case_whose_file_is_gone_is_told_without_a_drawing(conform: Any, tmp_path: Path) -> None:
    """The page says so."""
    for prop in conform["properties"]:
        prop["file"] = prop["file"] and "gone.safetensors"
    page = parsed(conformance_page(conform, tmp_path)[1])
    assert page.text.count("Its file, gone.safetensors, is not here") == 2


def test_what_a_backend_says_is_escaped(conform: Any, runs: Path) -> None:
    """An exception's text or a reason to refuse is text."""
    bad = "<img src=x onerror=alert(1)>"
    broken = [p for p in conform["properties"] if p["state"] == "broken"]
    broken[0]["what"], broken[0]["refused"] = bad, {bad: 3}
    page = parsed(conformance_page(conform, runs)[1])
    assert f"refused 3: {bad}" in page.text


def test_a_run_that_holds_is_green(conform: Any, runs: Path) -> None:
    """No property is broken."""
    for prop in conform["properties"]:
        prop["state"] = "holds" if prop["state"] == "broken" else prop["state"]
    title, data = conformance_page(conform, runs)
    assert title == "founding-bug: all that was held to the reference holds"
    assert not parsed(data).all(class_="bad-card")


@pytest.mark.parametrize("record", sorted((ROOT / "bench/results").glob("conformance-*.json")))
def test_the_record_of_the_peers(record: Path) -> None:
    """Peers across, properties down; each broken one has its smallest case."""
    data = json.loads(record.read_text())
    page = parsed(record_page(data)[1])
    ran = {name: p for name, p in data["peers"].items() if "properties" in p}
    head, *rows = page.one("table").table()
    assert head[1:] == list(ran)
    told = {}
    for row in rows:
        for cell, peer in zip(row[1:], ran, strict=True):
            told["".join(row[0].split()), peer] = cell.strip()[:1] or "·"
    for name, peer in ran.items():
        for p in peer["properties"]:
            shown = told["".join(f"{p['property']}{p['statement']}".split()), name]
            assert shown == {"holds": "✓", "broken": "✕"}.get(p["state"], "·")
    broken = [p for peer in ran.values() for p in peer["properties"] if p["state"] == "broken"]
    assert all(p["smallest_case"] in page.text for p in broken)


def counts(cells: list[Any]) -> dict[tuple[bool, str], tuple[int, int]]:
    """Failed and tried requests by whether q_len is 8, and by the execution."""
    found: dict[tuple[bool, str], tuple[int, int]] = {}
    for cell in cells:
        known = Cell(**{f.name: cell[f.name] for f in fields(Cell)})
        for q_len, fails in zip(q_lens(known), cell["failed"] or [], strict=False):
            key = (q_len == 8, known.execution)
            failed, tried = found.get(key, (0, 0))
            found[key] = (failed + fails, tried + 1)
    return found


def test_the_isolation_says_it_in_a_sentence_and_crosses_the_factors(isolated: Any) -> None:
    """The sentence, the smallest set, and in each cell how many requests fail, counted from the calls."""
    title, data = isolation_page(isolated)
    page = parsed(data)
    assert title == "founding-bug fails iff q_len != 8, eager and replay alike"
    card = page.one("section", class_="verdict")
    assert isolated["sentence"] in card.text
    assert isolated["factors"] == ["q_len"]
    assert "smallest set of factors" in card.text
    assert card.one("code").text == "q_len != 8"
    table = page.section("The crossing").one("table")
    levels = [cell.text for cell in table.all("thead")[0].all("th")][1:]
    eight = levels.index("8")
    right = counts(isolated["cells"])
    rows = {row[0]: row[1:] for row in table.table() if len(row) == len(levels) + 1}
    for path in ("eager", "buffers", "replay"):
        cells = rows[path]
        assert cells[eight][2:] == "{}/{}".format(*right[True, path])
        others = [cell[2:].split("/") for i, cell in enumerate(cells) if i != eight and cell]
        assert tuple(sum(int(o[k]) for o in others) for k in (0, 1)) == right[False, path]
    for cell in table.all("td"):
        if "data-count" in cell.attributes:
            failed, count = (int(cell.attributes[f"data-{name}"]) for name in ("failed", "count"))
            kind = "pass" if not failed else "fail" if failed == count else "mixed"
            assert cell.attributes["class"] == kind


def test_each_factor_by_itself_is_the_table(isolated: Any) -> None:
    """The same levels and numbers as the command prints."""
    page = parsed(isolation_page(isolated)[1])
    table = page.all("table")[-1].table()
    shown = [row[1] for row in table if len(row) == 2]
    assert [cell[2:] for cell in shown] == [
        f"{row['failed']:,}/{row['requests']:,}" for row in isolated["table"]
    ]


def made(fails: Any, widths: Sequence[int] = (4, 8, 9, 17)) -> Any:
    """An isolation whose outcomes follow a rule, all crossed."""
    tried = tuple(
        Tried(cell, (fails(cell),) * batch, "wrong" if fails(cell) else "")
        for q_len in widths
        for path, earlier in (("eager", "none"), ("replay", "larger"))
        for branching in (False, True)
        for batch in (1, 3)
        for cell in [Cell(q_len, 5, branching, False, path, earlier, batch)]  # type: ignore[arg-type]
    )
    found = Isolation("mine", tried, decide(Isolation("mine", tried, decide([])).observations))
    return json.loads(json.dumps(found.data()))


def test_two_factors_are_crossed_together() -> None:
    """Their levels stand across as pairs; each cell is all or nothing."""
    # eager calls wider than any that a replay's buffers held: the widest q_len alone does not explain it
    widths = (4, 8, 9, 17, 33)
    data = made(lambda cell: cell.q_len > 8 and cell.execution == "replay", widths)
    assert data["factors"] == ["q_len", "execution"]
    page = parsed(isolation_page(data)[1])
    table = page.section("The crossing").one("table")
    heads = [cell.text for cell in table.all("thead")[0].all("th")]
    pairs = [f"{width}, {path}" for width in ("4 to 8", "9 to 33") for path in ("eager", "replay")]
    assert heads == ["q_len, execution →", *pairs]
    rows = [[cell.attributes["class"] for cell in row.all("td")] for row in table.all("tr")]
    told = [set(column) - {"none"} for column in zip(*filter(None, rows), strict=True)]
    assert told == [{"pass"}, {"pass"}, {"pass"}, {"fail"}]  # "none": no replay is an eager call


def test_values_of_a_number_stand_together_where_they_decide_alike() -> None:
    """Beside the other factor: 8 is apart, though with an eager call all widths pass."""
    page = parsed(
        isolation_page(made(lambda cell: cell.q_len != 8 and cell.execution == "replay"))[1]
    )
    table = page.section("The crossing").one("table")
    heads = [cell.text for cell in table.all("thead")[0].all("th")][1:]
    assert heads == [f"{q}, {path}" for q in ("4", "8", "9 to 17") for path in ("eager", "replay")]


def test_an_isolation_where_nothing_fails() -> None:
    """It says so, and has no crossing."""
    page = parsed(isolation_page(made(lambda cell: False))[1])
    assert page.all(class_="good-card")
    assert "nothing fails: 32 calls" in page.text
    assert not page.all("section", class_="bad-card")
    assert "The crossing" not in page.text


@pytest.mark.parametrize(
    ("widths", "unsteady", "sign", "card"),
    [
        ((4, 8, 9), 0, "✓ mine: nothing fails: 24 calls", "verdict good-card"),
        ((4,), 0, "? mine: nothing failed in 8 calls: too few to tell", "verdict"),
        ((), 0, "? mine: cannot tell: it refused every call", "verdict"),
        ((4, 8, 9), 2, "✕ mine: cannot tell: the same call gives now this", "verdict bad-card"),
    ],
)
def test_a_check_mark_stands_for_enough_calls_that_come_out_alike(
    widths: tuple[int, ...], unsteady: int, sign: str, card: str
) -> None:
    """As the exit codes have it: 0 alone is a success; 2 is that nothing can be told."""
    found = made(lambda cell: False, widths)
    cells = tuple(
        Cell(**{f.name: cell[f.name] for f in fields(Cell)}) for cell in found["cells"][:unsteady]
    )
    tried = tuple(Tried(cell, (False,) * cell.batch, "") for cell in cells)
    if unsteady:
        found |= Isolation("mine", tried, decide([]), cells).data() | {"cells": found["cells"]}
    page = parsed(isolation_page(json.loads(json.dumps(found)))[1])
    (section,) = (one for one in page.all("section") if sign in one.text)
    assert section.attributes["class"] == card
    assert page.text.count("✓ mine") == (sign[0] == "✓")


def test_an_isolation_that_cannot_tell(isolated: Any) -> None:
    """Without a rule the sentence and each factor by itself are left."""
    data = deepcopy(isolated) | {
        "rules": [],
        "factors": [],
        "sentence": "cannot tell: no rule fits",
    }
    page = parsed(isolation_page(data)[1])
    assert page.one("h1").text == "founding-bug: cannot tell: no rule fits"
    assert "not found" in page.one("section", class_="verdict").text
    assert "Each factor by itself" in page.text

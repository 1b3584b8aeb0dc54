"""A captured call as a page: the numbers, the marked bits and the rulers are the call's own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree.catalogue import CATALOGUE, CallFault
from ddtree.cli.faults import Fault
from ddtree.cli.source import made_up_call
from ddtree.invariants import Call, report
from ddtree.invariants.conformance.failed import Failed
from ddtree.pictures.pages.call import Source, call_page
from ddtree.pictures.pages.mask import MOST_ROWS
from tests.invariants.test_table import MUTANTS
from tests.pictures.parsed import Element, parsed

SOURCE = Source(Path("call.safetensors"), {})
Bits = set[tuple[int, int]]


def page_of(call: Call, source: Source = SOURCE) -> Element:
    """The page's elements."""
    return parsed(call_page(call, source)[1])


def made_up(
    prefixes: list[int], budget: int = 16, topk: int | None = None, fault: str | None = None
) -> Call:
    """What ``ddtree dump`` writes."""
    call = made_up_call(prefixes, budget, topk, 8, seed=0)
    if fault:
        call = call.broken_by(Fault.parse(fault))
    return Call.of(call.tree, call.layout, call.mask, call.acceptance, budget=budget)


def visible(parents: list[int], row: int) -> set[int]:
    """The row and its ancestors, followed one by one."""
    seen = set()
    while row >= 0:
        seen.add(row)
        row = parents[row]
    return seen


def wrong_bits(call: Call, b: int) -> tuple[Bits, Bits]:
    """Bits that leak and bits that are hidden, read entry by entry where a kernel reads them."""
    assert call.custom_mask is not None
    assert call.parents is not None
    assert call.num_nodes is not None
    qo, kv, starts = (
        t.tolist() for t in (call.qo_indptr, call.kv_indptr, call.mask_indptr) if t is not None
    )
    mask = call.custom_mask.tolist()
    parents = call.parents[b].tolist()
    q_len, prefix = qo[b + 1] - qo[b], kv[b + 1] - kv[b]
    rows = max(q_len, call.parents.shape[1])
    leaked, hidden = set(), set()
    for row in range(int(call.num_nodes[b])):
        must = set(range(prefix)) | {prefix + node for node in visible(parents, row)}
        sees = set()
        for column in range(prefix + q_len if row < q_len else 0):
            place = starts[b] + row * (prefix + q_len) + column
            if place < len(mask) and mask[place]:
                sees.add(column)
        leaked |= {(row, column) for column in sees - must}
        hidden |= {(row, column) for column in must - sees}
    assert rows + prefix >= max((column for _, column in leaked | hidden), default=0)
    return leaked, hidden


def marked(page: Element, kind: str) -> Bits:
    """Bits that the page marks; in each group as many squares and signs are drawn as it names."""
    found: Bits = set()
    for group in page.all("g", class_=kind):
        if "data-bits" in group.attributes:
            bits = [
                tuple(map(int, bit.split(","))) for bit in group.attributes["data-bits"].split()
            ]
            grounds, signs = (path.attributes["d"] for path in group.all("path"))
            assert grounds.count("M") == len(bits)
            assert signs.count("M") == len(bits) * (
                2 if kind == "leaked" else 1
            )  # two bars, a ring
            found |= {(row, column) for row, column in bits}
    return found


@pytest.mark.parametrize(
    "fault", ["width=8", "width=5", "qo_indptr=8", "mask=inverted", "padding=visible", None]
)
@pytest.mark.parametrize("topk", [1, 3])
def test_marked_bits_are_the_wrong_ones(fault: str | None, topk: int) -> None:
    """Every wrong bit is marked, as leaking or as hidden, and no right one."""
    if fault == "padding=visible":
        topk = 1  # a chain: the only one with padding
    call = made_up([5], 16, topk, fault)
    page = page_of(call)
    leaked, hidden = wrong_bits(call, 0)
    assert (marked(page, "leaked"), marked(page, "hidden")) == (leaked, hidden)
    assert bool(leaked | hidden) == (fault is not None)
    if leaked or hidden:
        assert f"{len(leaked)} bit" in page.text
        legend = page.one("ul", class_="legend").text
        assert ("leaks: seen" in legend, "hidden: must" in legend) == (bool(leaked), bool(hidden))


def test_the_second_request_is_read_at_its_own_offset() -> None:
    """A wrong segment of the mask makes the next request read foreign bits; the first is right."""
    call = made_up([5, 7], fault="mask_indptr=8")
    assert wrong_bits(call, 0) == (set(), set())
    leaked, hidden = wrong_bits(call, 1)
    page = page_of(call)
    assert leaked
    assert (marked(page, "leaked"), marked(page, "hidden")) == (leaked, hidden)
    assert "from entry 104 of custom_mask on" in page.text


@pytest.mark.parametrize("spot", [(2, 3), (2, 70), (90, 2), (100, 101), (40, 7), (128, 128)])
def test_a_condensed_mask_says_so_and_loses_no_wrong_bit(spot: tuple[int, int]) -> None:
    """One wrong bit of 129 rows is marked in its square, and bit by bit beside it."""
    row, node = spot
    whole = made_up([300], 128)
    assert whole.custom_mask is not None
    place = row * (300 + 129) + 300 + node
    bits = whole.custom_mask.clone()
    bits[place] = not bits[place]
    call = replace(whole, custom_mask=bits)
    leaked, hidden = wrong_bits(call, 0)
    assert leaked | hidden == {(row, 300 + node)}
    page = page_of(call)
    assert "Condensed: the 300 prefix entries are drawn as 8 columns" in page.text
    assert "Condensed: each square stands for 2 x 2 bits of the 129 rows" in page.text
    assert MOST_ROWS < 129
    found = sorted(marked(page, "leaked") | marked(page, "hidden"))
    assert found == sorted({(row // 2 * 2, 300 + node // 2 * 2), (row, 300 + node)})
    assert (f"row {row}" in page.text) and (f"tree {node}" in page.text)
    assert not page.all("td", data_name="row")  # on a phone it would read "row: row 1"


def test_the_violation_is_told_with_its_numbers() -> None:
    """Title, sentence, both numbers, formula, cause, and what else is broken."""
    call = made_up([5], fault="width=8")
    first = report(call).broken[0]
    page = page_of(call)
    assert page.one("h1").text == "mask_len is broken in request 0"
    card = page.one("section", class_="verdict")
    assert card.one(class_="expected").one("b").attributes["data-value"] == "374"
    assert card.one(class_="found").one("b").attributes["data-value"] == "104"
    for said in (first.statement, first.formula, first.detail, first.hint, *first.also):
        assert said in card.text


def test_every_invariant_has_its_state() -> None:
    """Held, broken and not checked are the checker's own, each with its reason."""
    call = made_up([5, 3], fault="mask_indptr=8")
    told = report(call)
    shown: dict[str, set[str]] = {}
    for row in page_of(call).section("Invariants").all("tr"):
        cells = row.all("td")
        if cells:
            shown.setdefault(cells[0].text[2:], set()).add(cells[1].text)
            if cells[0].text.endswith("not checked"):
                assert told.not_checked[cells[1].text] in cells[2].text
    assert shown == {
        "broken": {v.invariant for v in told.broken},
        "held": set(told.held),
        "not checked": set(told.not_checked),
    }


def segments(page: Element, ruler: str, kind: str) -> list[tuple[int, int]]:
    """The segments that a ruler draws."""
    figure = page.one("figure", data_ruler=ruler)
    drawn = figure.all("rect", class_=kind)
    return [(int(r.attributes["data-start"]), int(r.attributes["data-end"])) for r in drawn]


def test_rulers_have_the_right_and_the_wrong_places() -> None:
    """Where each segment should be and where it is, by hand: prefixes 5 and 3, 17 rows, width 8."""
    page = page_of(made_up([5, 3], fault="width=8"))
    assert segments(page, "qo_indptr", "right") == [(0, 17), (17, 34)]
    assert segments(page, "qo_indptr", "found") == [(0, 8), (8, 16)]
    assert segments(page, "kv_indptr", "right") == [(0, 5), (5, 8)]
    assert segments(page, "kv_indptr", "found") == [(0, 5), (5, 8)]
    assert segments(page, "mask_indptr", "right") == [(0, 17 * 22), (374, 374 + 17 * 20)]
    assert segments(page, "mask_indptr", "found") == [(0, 8 * 13), (104, 104 + 8 * 11)]
    mask = page.one("figure", data_ruler="mask_indptr")
    assert len(mask.all("rect", class_="wrong")) == 2
    assert len(mask.all("line", class_="wrong")) == 2  # the start is right
    assert ["✕ 1", "374 to 714 (340 entries)", "104 to 192 (88 entries)"] in mask.table()
    assert "custom_mask: 714 entries" in mask.text
    assert not page.one("figure", data_ruler="kv_indptr").all(class_="wrong")


def test_an_indptr_that_ends_past_its_entries_is_wrong() -> None:
    """Every segment is where it should be, and there is less than they ask for."""
    whole = made_up([5, 3])
    assert whole.kv_indices is not None
    page = page_of(replace(whole, kv_indices=whole.kv_indices[:7]))
    figure = page.one("figure", data_ruler="kv_indptr")
    assert "✕ kv_indptr: the segments end at 8, past the 7 entries of kv_indices" in figure.text
    assert figure.one("rect", class_="held").attributes["width"] == "87.50%"
    assert not page.one("figure", data_ruler="mask_indptr").all(class_="wrong")


def test_lengths_on_a_ruler_are_shares_of_the_longest() -> None:
    """A segment of 104 of 374 entries takes as much of the width."""
    figure = page_of(made_up([5], fault="width=8")).one("figure", data_ruler="mask_indptr")
    (right,), (found,) = figure.all("rect", class_="right"), figure.all("rect", class_="found")
    assert right.attributes["width"] == "100.00%"
    assert float(found.attributes["width"][:-1]) == pytest.approx(100 * 104 / 374, abs=0.01)


def test_the_tree_shows_path_padding_and_lost_nodes() -> None:
    """The accepted path, the padding rows, and nodes past the claimed width, each by a class of its own."""
    sound = page_of(made_up([5], 16, topk=1))
    assert sound.one(class_="padding").text == "padding: rows 8 to 16"
    call = made_up([5], 16, fault="width=8")
    assert call.nodes is not None
    assert call.parents is not None
    page = page_of(call)

    def rows(class_: str) -> list[int]:
        return [int(e.attributes["data-row"]) for e in page.all("g", class_=class_)]

    accepted = [row for row in call.nodes[0].tolist() if row >= 0]
    assert len(accepted) > 1
    assert sorted(rows("accepted")) == sorted(accepted)
    assert len(page.all("path", class_="accepted")) == len(accepted) - 1
    assert rows("lost") == list(range(8, 17))
    parents = call.parents.clone()
    parents[0, 4] = 9
    orphaned = page_of(replace(made_up([5]), parents=parents))
    assert [g.attributes["data-row"] for g in orphaned.all("g", class_="orphan")] == ["4"]
    assert "nodes whose parent is no earlier row" in orphaned.text
    assert len(page.all("path", class_="edge")) == 16


@pytest.mark.parametrize(
    "fields",
    [
        ("qo_indptr",),
        ("mask_indptr", "custom_mask"),
        ("qo_indptr", "kv_indptr", "mask_indptr", "custom_mask"),
        ("parents", "num_nodes"),
        ("token_ids",),
        ("num_accepted",),
    ],
)
def test_what_a_file_lacks_is_left_out(fields: tuple[str, ...]) -> None:
    """A call of few fields has a page too, which judges no bit that it cannot."""
    whole = made_up([5, 3])
    call = Call(**{name: getattr(whole, name) for name in fields})
    page = page_of(call)
    assert {row[0] for row in page.all("table")[-1].table()[1:]} == set(fields)
    assert not page.all("g", class_="leaked")
    if fields == ("qo_indptr", "kv_indptr", "mask_indptr", "custom_mask"):
        assert "no bit is judged" in page.text


def test_other_forms_of_the_mask_are_read() -> None:
    """One ancestor bit that is missing from the words is hidden on the page."""
    words = torch.tensor([[0b1], [0b11], [0b100]], dtype=torch.int32)
    call = Call(
        qo_indptr=torch.tensor([0, 3]), kv_indptr=torch.tensor([0, 2]), words=words,
        parents=torch.tensor([[-1, 0, 1]]), num_nodes=torch.tensor([3]),
    )  # fmt: skip
    page = page_of(call)
    assert marked(page, "hidden") == {(2, 2), (2, 3)}
    assert marked(page, "leaked") == set()


def test_without_a_tree_the_mask_tells_where_it_is_read_wrongly() -> None:
    """A call of attention holds no tree: bits are judged by the mask where the right widths put it."""
    fields = ("qo_indptr", "kv_indptr", "mask_indptr", "custom_mask", "positions")
    whole, sound = made_up([5, 7], fault="mask_indptr=8"), made_up([5, 7])
    call = Call(**{name: getattr(whole, name) for name in fields})
    page = page_of(call)
    assert "bits are judged by the mask itself, read where it should be" in page.text
    assert (marked(page, "leaked"), marked(page, "hidden")) == wrong_bits(whole, 1)
    quiet = page_of(Call(**{name: getattr(sound, name) for name in fields}))
    assert "That is where it should be; without a tree no bit is judged." in quiet.text
    assert not quiet.all("g", class_="leaked")
    assert sound.custom_mask is not None
    unsound = replace(call, custom_mask=~sound.custom_mask)
    assert "Without a tree that can be followed no bit is judged" in page_of(unsound).text


def test_a_width_that_claims_the_moon_is_not_drawn() -> None:
    """Nothing is allocated for it; the page says that the mask is not drawn."""
    call = replace(made_up([5]), qo_indptr=torch.tensor([0, 2**31 - 1]))
    page = page_of(call)
    assert "The mask is not drawn" in page.text


def test_names_from_outside_are_escaped() -> None:
    """A file's name and the names of its tensors may hold anything."""
    bad = "<script>alert(1)</script>"
    page = page_of(made_up([5]), Source(Path(f"{bad}.npz"), {bad: f"did you mean {bad}?"}))
    assert page.all("script") == []
    assert bad in page.text
    assert f"ddtree check '{bad}.npz'" in page.text


def test_a_file_with_arguments_can_be_replayed() -> None:
    """The command stands on the page, and only there where it can run."""
    with_function = page_of(made_up([5]), replace(SOURCE, function="verify_attention"))
    assert "ddtree replay call.safetensors" in with_function.text
    assert "ddtree replay" not in page_of(made_up([5])).text


FAULTS = [m for row in CATALOGUE for m in row.members if isinstance(m, CallFault)]


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 9))]
)
def test_every_broken_call_has_a_page(start: int) -> None:
    """Mutants of every invariant and faults of real engines: the title names the first violation."""
    calls = [m.call() for m in MUTANTS[start::9]] + [f.spoil(f.sound()) for f in FAULTS[start::9]]
    for call in calls:
        first = report(call).broken[0]
        assert page_of(call).one("h1").text.startswith(f"{first.invariant} is broken")


def test_what_rows_of_a_backend_saw_is_marked_in_each_request() -> None:
    """Each row has its own columns, cut from all entries; those of another request are told in words."""
    call = made_up([3, 5])
    assert call.qo_indptr is not None
    assert call.kv_indptr is not None
    assert call.parents is not None
    qo, kv = call.qo_indptr.tolist(), call.kv_indptr.tolist()
    first = [kv[b] + qo[b] for b in range(3)]
    sets = torch.zeros(qo[2], first[2], dtype=torch.int8)
    for b, prefix in enumerate((3, 5)):
        for row in range(qo[b + 1] - qo[b]):
            sets[qo[b] + row, first[b] : first[b] + prefix] = 1
            for node in visible(call.parents[b].tolist(), row):
                sets[qo[b] + row, first[b] + prefix + node] = 1
    sets[qo[1] + 2, first[1] + 5 + 7] = 1  # row 2 of request 1 saw row 7
    sets[qo[1] + 4, first[1] + 1] = 0  # its row 4 did not see prefix entry 1
    sets[qo[1] + 4, first[0] + 2] = 1  # but one of request 0
    failed = Failed(
        "mine", "visible set", "must hold", "it is wrong", "smallest case", "x", "", sets
    )
    page = page_of(call, replace(SOURCE, failed=failed))
    assert page.one("h1").text == "mine: visible set is broken"
    assert (marked(page, "leaked"), marked(page, "hidden")) == ({(2, 12)}, {(4, 1)})
    assert page.text.count("row 4 also saw entries of other requests") == 1

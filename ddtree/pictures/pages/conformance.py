"""A run of ``ddtree conform`` as a page: what holds, and the smallest failing case of what does not."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ddtree.invariants import report as checked
from ddtree.invariants.capture import read
from ddtree.invariants.conformance.failed import failed_in
from ddtree.invariants.conformance.failure import ONLY_AFTER_OTHERS, smallest
from ddtree.invariants.conformance.fuzz import ids
from ddtree.pictures.pages.call import call_pictures
from ddtree.pictures.pages.markup import Markup, counted, join, table, tag
from ddtree.pictures.pages.page import command, facts, folded, page, section, state
from ddtree.spec.errors import InputError

MARKS = {"holds": "✓", "broken": "✕", "refused": "·", "not offered": ""}


def conformance_page(data: dict[str, Any], folder: Path) -> tuple[str, bytes]:
    """The title and the page of what ``ddtree conform --json`` prints.

    Args:
        data: the run.
        folder: where the paths of failing cases begin, if they do not begin here.
    """
    properties: list[dict[str, Any]] = data["properties"]
    by_state = {name: [p for p in properties if p["state"] == name] for name in MARKS}
    offered = len(properties) - len(by_state["not offered"])
    broken, held = by_state["broken"], by_state["holds"]
    is_cut = any(p.get("cases_were_cut") for p in held)
    title = (
        f"{data['backend']}: {len(broken)} of {counted(offered, 'property', 'properties')} broken"
        if broken
        else f"{data['backend']}: all that was held to the reference holds"
        + (" so far: time was up" if is_cut else "")
        if held
        else f"{data['backend']}: nothing was held to the reference"
    )
    numbers = {
        "runs on": data.get("runs_on", "not known"),
        "cases": f"{sum(p['cases'] for p in properties):,}",
        **{name: str(len(own)) for name, own in by_state.items()},
    }
    rows = [
        (
            tag("td", state(p["state"])),
            tag("td", tag("b", p["property"]), class_="name"),
            p["statement"],
            f"{p['cases']:,}",
            _told(p),
        )
        for p in properties
        if p["state"] != "not offered"
    ]
    missing = "; ".join(p["property"] for p in by_state["not offered"])
    attends = any(p["function"] == "verify_attention" for p in broken)
    return title, page(
        title,
        "conformance",
        tag(
            "section",
            facts(numbers),
            class_=f"across verdict {'bad-card' if broken else '' if is_cut else 'good-card'}".strip(),
        ),
        section(
            "Properties",
            table(
                ("state", "property", "what must hold", "cases", "what came of it"), rows, "stacked"
            ),
            tag("p", f"Not offered by the backend: {missing}.", class_="note") if missing else None,
        ),
        *(_smallest(p, data["backend"], folder, is_open=i == 0) for i, p in enumerate(broken)),
        section("Which factor decides", command("ddtree", "isolate", data["backend"]))
        if attends
        else None,
    )


def _told(found: dict[str, Any]) -> str:
    """What differs, or what was refused and why."""
    told = [found["what"]] if found["state"] == "broken" else []
    told += [found["note"]] if found.get("note") else []
    told += [f"refused {count}: {reason}" for reason, count in found["refused"].items()]
    return "; ".join(told)


def _smallest(found: dict[str, Any], backend: str, folder: Path, *, is_open: bool) -> Markup:
    """The smallest failing case of one property, drawn where its file is at hand."""
    numbers = {_called(found): found["smallest_case"], "what differs": found["what"]}
    if found.get("fails_only_after_other_calls"):
        numbers["by itself"] = ONLY_AFTER_OTHERS
    drawn: list[object] = []
    if found.get("file"):
        drawn = _drawn(found, backend, folder, is_open=is_open)
    return section(f"✕ {found['property']}: {found['statement']}", facts(numbers), *drawn)


def _called(found: dict[str, Any]) -> str:
    """What its case is called; a record of an earlier version does not say whether it was cut."""
    return smallest(was_cut=found.get("shrinking_was_cut", False))


def _drawn(found: dict[str, Any], backend: str, folder: Path, *, is_open: bool) -> list[object]:
    written = Path(found["file"])
    places = [written, folder / written, folder / written.name]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return [tag("p", f"Its file, {written}, is not here, so it is not drawn.", class_="note")]
    again = (("conform", backend, "--case", written), ("check", written), ("replay", written))
    commands = [command("ddtree", *words) for words in again]
    try:
        call = read(file).call
    except InputError as error:
        return [tag("p", f"{error}", class_="note"), *commands]
    report = checked(call)
    drawn = call_pictures(call, report, failed_in(file))
    if not report.ok:
        told = tag("p", "The call that the backend made:", class_="note")
        return [folded("the call, drawn", told, drawn, open_=is_open), *commands]
    wrong = tag("strong", f"what the backend made of it was wrong: {found['what']}", class_="bad")
    told = tag("p", join(["The call below is sound; ", wrong, "."]))
    return [folded("the sound call that the backend was given, drawn", told, drawn), *commands]


def record_page(data: dict[str, Any]) -> tuple[str, bytes]:
    """The title and the page of a record of many peers, as ``bench/conformance.py`` writes them."""
    peers: dict[str, dict[str, Any]] = data["peers"]
    ran = {name: peer for name, peer in peers.items() if "properties" in peer}
    broken = [
        (name, p)
        for name, peer in ran.items()
        for p in peer["properties"]
        if p["state"] == "broken"
    ]
    title = f"{counted(len(ran), 'peer')} on {data['device']}: " + (
        counted(len(broken), "broken property", "broken properties")
        if broken
        else "nothing that ran is broken"
    )
    rows = [
        (
            tag("th", tag("b", name), tag("br"), tag("span", statement, class_="dim")),
            *(_mark(found) for found in cells),
        )
        for name, statement, cells in by_property(ran.values())
    ]
    crossing = tag("div", table(("property", *ran), rows, "crossing"), class_="wide", tabindex=0)
    cases = [
        tag(
            "li",
            join(
                [
                    tag("b", f"{name}, {p['property']}: "),
                    f"{p['what']}. {_called(p).capitalize()}: {p['smallest_case']}.",
                ]
            ),
        )
        for name, p in broken
    ]
    not_run = [
        tag("li", f"{name}: {peer['not_run'].removeprefix('error: ')}")
        for name, peer in peers.items()
        if name not in ran
    ]
    return title, page(
        title,
        "conformance of peers",
        section("Properties", crossing, note="A number says how many cases ran."),
        section("The smallest failing case of each that is broken", tag("ul", *cases))
        if cases
        else None,
        section("Did not run here", tag("ul", *not_run)) if not_run else None,
    )


def by_property(
    peers: Collection[dict[str, Any]],
) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Each property that any peer of a record was held to: its id, its statement, and what each peer did.

    A peer that ran before the property was there does not offer it.
    """
    order = ids()
    known = {p["property"]: p["statement"] for peer in peers for p in peer["properties"]}
    for name in sorted(known, key=lambda n: order.index(n) if n in order else len(order)):
        found = [{p["property"]: p for p in peer["properties"]}.get(name) for peer in peers]
        yield name, known[name], [one or {"state": "not offered", "cases": 0} for one in found]


def _mark(found: dict[str, Any]) -> Markup:
    kind = {"holds": "pass", "broken": "fail"}.get(found["state"], "none")
    return tag(
        "td", f"{MARKS[found['state']]} {found['cases'] or ''}", class_=kind, title=found["state"]
    )

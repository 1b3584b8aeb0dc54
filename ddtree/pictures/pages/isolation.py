"""A run of ``ddtree isolate`` as a page: the sentence, the deciding factors, and the crossing behind them."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from ddtree.invariants.conformance.cells import Cell
from ddtree.invariants.conformance.decide import FACTORS, NUMBERS, Decision, Observation
from ddtree.invariants.conformance.isolate import Isolation, Tried, headline
from ddtree.pictures.pages.markup import Markup, counted, join, tag
from ddtree.pictures.pages.page import command, facts, folded, page, section

MOST_COLUMNS = 48
"""Columns of the crossing."""
BINS = 4
"""Groups of a number's values, where it is no deciding factor."""
NAMES = {"q_len": "q_len (budget + 1)", "earlier": "replay follows", "position": "batch position"}


def isolation_page(data: dict[str, Any]) -> tuple[str, bytes]:
    """The title and the page of what ``ddtree isolate --json`` prints."""
    found = _isolation(data)
    seen = found.observations
    fails = any(o.failed for o in seen) or bool(data.get("unsteady"))
    told = str(data["sentence"])
    title = headline(data["backend"], told if len(told) < 90 else told.split(";", maxsplit=1)[0])
    decisive: list[str] = data.get("factors", [])
    example = found.example
    return title, page(
        title,
        "isolation",
        _verdict(data, decisive, found, fails=fails),
        _crossing(seen, decisive) if decisive and fails else None,
        _factors(data["table"]) if seen else None,
        section(
            "The smallest failing call",
            facts({"call": str(example.cell), "what is wrong": example.what}),
        )
        if example is not None
        else None,
        section("Do it again", command("ddtree", "isolate", data["backend"])),
    )


def _isolation(data: dict[str, Any]) -> Isolation:
    """The run, from its plain values."""
    names = [f.name for f in fields(Cell)]
    tried = tuple(
        Tried(
            Cell(**{name: cell[name] for name in names}),
            None if cell["failed"] is None else tuple(cell["failed"]),
            cell["what"],
        )
        for cell in data["cells"]
    )
    return Isolation(data["backend"], tried, Decision(()))


def _verdict(data: dict[str, Any], decisive: list[str], found: Isolation, *, fails: bool) -> Markup:
    rules = [tag("code", rule, class_="rule-text") for rule in data["rules"]]
    numbers: dict[str, object] = {}
    if fails:
        numbers["smallest set of factors"] = (
            ", ".join(decisive)
            if decisive
            else "none is needed"
            if data["rules"] == ["always"]
            else "not found"
        )
        if rules:
            numbers["fails where"] = join(rules, " or perhaps ")
    failed = sum(o.failed for o in found.observations)
    calls = sum(t.failed is not None for t in found.tried)
    numbers["tried"] = (
        f"{counted(calls, 'call')}, {counted(len(found.observations), 'request')}; {failed:,} requests fail"
    )
    numbers["called"] = data.get("function", "verify_attention")
    numbers["runs on"] = data.get("runs_on", "not known")
    refused = [
        tag("li", f"refused {counted(n, 'call')}: {why}") for why, n in data["refused"].items()
    ]
    sign, card = (
        ("✕", " bad-card") if fails else ("?", "") if found.is_short else ("✓", " good-card")
    )
    return tag(
        "section",
        tag(
            "p",
            tag("strong", f"{sign} {headline(data['backend'], data['sentence'])}"),
            class_="statement",
        ),
        facts(numbers),
        tag("ul", *refused[:5], class_="note") if refused else None,
        class_=f"verdict{card}",
    )


# the tables

Level = tuple[str, Callable[[Any], bool]]
"""The name of one or several values of a factor, and whether a value is among them."""


def _crossing(seen: Sequence[Observation], decisive: list[str]) -> Markup:
    """Each other factor's levels down, the levels of the deciding factors across."""
    combined = product(*(_levels(seen, factor, decisive) for factor in decisive))
    across = [list(zip(decisive, levels, strict=True)) for levels in combined]
    across = [chosen for chosen in across if _those(seen, chosen)][:MOST_COLUMNS]
    others = [
        f for f in FACTORS if f not in decisive and not (f == "num_nodes" and "q_len" in decisive)
    ]
    body = []
    for factor in others:
        own = _grouped(seen, factor)
        body.append(
            tag("tr", tag("th", NAMES.get(factor, factor), colspan=1 + len(across)), class_="group")
        )
        for level in own:
            row = _those(seen, [(factor, level)])
            cells = [_cell(_those(row, chosen)) for chosen in across]
            body.append(tag("tr", tag("th", level[0], scope="row"), *cells))
    heads = [tag("th", _joined(chosen), scope="col") for chosen in across]
    crossed = tag(
        "table",
        tag("thead", tag("tr", tag("th", f"{', '.join(decisive)} →"), *heads)),
        tag("tbody", *body),
        class_="crossing",
    )
    note = (
        f"Across: {' and '.join(decisive)}. Down: every other factor. Each cell: how many requests fail, of "
        "how many. A factor whose cells agree in every column does not matter."
    )
    label = "requests that fail, by the deciding factors and each other factor"
    return section(
        "The crossing",
        tag("div", crossed, class_="wide", tabindex=0, role="group", aria_label=label),
        _legend(),
        note=note,
    )


def _joined(chosen: list[tuple[str, Level]]) -> str:
    """``9 to 66, replay``."""
    return ", ".join(level[0] for _, level in chosen)


def _those(seen: Sequence[Observation], chosen: list[tuple[str, Level]]) -> list[Observation]:
    return [o for o in seen if all(level[1](o.factors[factor]) for factor, level in chosen)]


def _cell(own: Sequence[Observation]) -> Markup:
    return _outcome(sum(o.failed for o in own), len(own))


def _outcome(failed: int, count: int) -> Markup:
    """A cell with its sign: passes, fails, or both."""
    if not count:
        return tag("td", "", class_="none")
    kind, sign = (
        ("pass", "✓") if not failed else ("fail", "✕") if failed == count else ("mixed", "◐")
    )
    return tag(
        "td", f"{sign} {failed:,}/{count:,}", class_=kind, data_failed=failed, data_count=count
    )


def _factors(rows: list[dict[str, Any]]) -> Markup:
    """Each factor with its levels, values beside each other that fail alike as one."""
    body: list[Markup] = []
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1]["factor"] != row["factor"]:
            name = NAMES.get(row["factor"], row["factor"])
            body.append(tag("tr", tag("th", name, colspan=2), class_="group"))
        outcome = _outcome(row["failed"], row["requests"])
        body.append(tag("tr", tag("th", _said(row["level"]), scope="row"), outcome))
    listed = tag("table", tag("tbody", *body), class_="crossing")
    return tag("section", folded("Each factor by itself", listed, open_=False), class_="tight")


def _legend() -> Markup:
    signs = (("✕", "all fail"), ("✓", "none fails"), ("◐", "some fail"))
    return tag("ul", *(tag("li", f"{sign} {said}") for sign, said in signs), class_="legend")


def _levels(seen: Sequence[Observation], factor: str, decisive: list[str]) -> list[Level]:
    """All values of a deciding factor; of a number those beside each other that decide alike are one."""
    values = sorted({o.factors[factor] for o in seen})
    if factor not in NUMBERS:
        return [_level(value) for value in values]
    others = [other for other in decisive if other != factor]
    runs: list[tuple[list[int], dict[tuple[Any, ...], set[bool]]]] = []
    for value in values:
        told: dict[tuple[Any, ...], set[bool]] = {}
        for o in seen:
            if o.factors[factor] == value:
                told.setdefault(tuple(o.factors[other] for other in others), set()).add(o.failed)
        last = runs[-1] if runs else ([], {})
        if runs and all(last[1][key] == told[key] for key in last[1].keys() & told.keys()):
            last[0].append(value)
            last[1].update(told)
        else:
            runs.append(([value], told))
    return [_level(_span(run[0], run[-1])) for run, _ in runs]


def _span(first: int, last: int) -> str | int:
    return first if first == last else f"{first} to {last}"


def _level(level: Any) -> Level:
    if isinstance(level, str) and " to " in level:
        first, last = (int(end) for end in level.split(" to "))
        return level, lambda value: first <= value <= last
    return _said(level), lambda value: value == level


def _grouped(seen: Sequence[Observation], factor: str) -> list[Level]:
    """All values of a factor; of a number a few groups of about as many requests."""
    values = sorted({o.factors[factor] for o in seen})
    if factor not in NUMBERS or len(values) <= BINS:
        return [_level(value) for value in values]
    ordered = sorted(o.factors[factor] for o in seen)
    starts = sorted({ordered[len(ordered) * i // BINS] for i in range(BINS)})
    ends = [*(start - 1 for start in starts[1:]), values[-1]]
    pairs = zip([values[0], *starts[1:]], ends, strict=True)
    return [_level(_span(a, b)) for a, b in pairs]


def _said(level: Any) -> str:
    return {True: "yes", False: "no"}[level] if isinstance(level, bool) else str(level)

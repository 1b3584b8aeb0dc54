"""A captured call as a page: what is broken, then where to see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddtree.invariants import TABLE, InvariantViolation, Report
from ddtree.invariants import report as checked
from ddtree.invariants.call import Call
from ddtree.invariants.capture import named
from ddtree.invariants.conformance.failed import Failed
from ddtree.invariants.sizes import Sizes, sizes_of, tree_rows
from ddtree.pictures.pages import tree as of_tree
from ddtree.pictures.pages.markup import Markup, counted, join, table, tag, text
from ddtree.pictures.pages.mask import mask_picture
from ddtree.pictures.pages.page import command, facts, folded, page, section, state
from ddtree.pictures.pages.ruler import ruler_picture, rulers
from ddtree.pictures.pages.seen import Seen, as_seen, seen
from ddtree.pictures.view import TreeView

MOST_REQUESTS = 12
"""Requests that are drawn; those with something broken first."""
MOST_SAID = 12
"""Violations that are told in full."""


@dataclass(frozen=True)
class Source:
    """Where a call was read from."""

    file: Path
    not_read: dict[str, str]
    function: str | None = None
    """The public function that was called, where its arguments are in the file: it can be run again."""
    failed: Failed | None = None
    """The failure, where the file is a case of ``ddtree conform``."""


def call_page(call: Call, source: Source) -> tuple[str, bytes]:
    """The title and the page of one captured call, or of a case that a backend failed."""
    report, failed = checked(call), source.failed
    title = title_of(report) if failed is None else f"{failed.backend}: {failed.property} is broken"
    return title, page(
        title,
        f"{'captured call' if failed is None else 'failing case'} · {source.file.name}",
        None if failed is None else _failure(failed, report),
        call_pictures(call, report, failed),
        _invariants(report),
        _again(source),
        _fields(call, source),
    )


def title_of(report: Report) -> str:
    """What is broken, in a few words."""
    if not report.broken:
        return "Nothing is broken"
    first = report.broken[0]
    place = "" if first.request is None else f" in request {first.request}"
    return f"{first.invariant} is broken{place}"


def call_pictures(call: Call, report: Report, failed: Failed | None = None) -> Markup:
    """What is broken, and where to see it: also for a call within another page.

    Of a case that a backend failed the mask is drawn as the backend saw it, where that is known.
    """
    call = call.on_cpu()
    sizes = sizes_of(call)
    return join(
        [
            verdict(report, is_good=failed is None),
            tag("section", facts(_facts(call, sizes))),
            _rulers(call, sizes),
            *_requests(call, sizes, report, failed),
        ]
    )


# the failure of a backend


def _failure(failed: Failed, report: Report) -> Markup:
    """What the run told of it: the property, what the backend did otherwise, and the case."""
    sound = "the call itself is sound, what the backend makes of it is not" if report.ok else ""
    return tag(
        "section",
        tag("p", tag("strong", f"✕ {failed.what}"), class_="statement"),
        facts(
            {
                "backend": failed.backend,
                "property": failed.property,
                "must hold": failed.statement,
                failed.called: failed.case,
                **({"the checker": sound} if sound else {}),
                **({"alone": failed.note} if failed.note else {}),
            }
        ),
        class_="verdict bad-card",
    )


# the violation


def verdict(report: Report, *, is_good: bool = True) -> Markup:
    """The first violation in words and numbers, then the others; green where nothing at all is wrong."""
    broken = {violation.invariant for violation in report.broken}
    counts = f"{len(report.held)} held, {len(broken)} broken, {len(report.not_checked)} not checked"
    if not report.broken:
        missing = (
            " What is not checked needs fields that the call does not hold."
            if report.not_checked
            else ""
        )
        found = "Nothing" if is_good else "Of the call itself nothing"
        said = tag(
            "p",
            tag("strong", f"✓ {found} that could be checked is broken"),
            f": {counts}.{missing}",
        )
        return tag("section", said, class_="verdict good-card" if is_good else "verdict")
    first, *others = report.broken
    rest = [tag("li", _one_line(other)) for other in others[:MOST_SAID]]
    if len(others) > MOST_SAID:
        rest.append(tag("li", f"and {counted(len(others) - MOST_SAID, 'more')}"))
    return tag(
        "section",
        tag("p", tag("strong", f"✕ {first.statement}"), class_="statement"),
        tag(
            "div",
            tag("div", tag("span", "expected"), _number(first.expected), class_="expected"),
            tag("div", tag("span", "found"), _number(first.found), class_="found"),
            class_="pair",
        ),
        tag("p", tag("b", "Likely cause: "), first.hint, class_="hint") if first.hint else None,
        facts(
            {
                "where": "the call as a whole"
                if first.request is None
                else f"request {first.request}",
                "formula": tag("code", first.formula),
                **({"with numbers": tag("code", first.detail)} if first.detail else {}),
                "also broken": ", ".join(first.also) or "nothing else",
            }
        ),
        folded(f"{counted(len(others), 'more violation')} ({counts})", tag("ul", *rest))
        if rest
        else None,
        class_="verdict bad-card",
    )


def _number(value: object) -> Markup:
    said = f"{value:,}" if isinstance(value, int) else str(value)
    return tag("b", said, class_="long" if len(said) > 14 else None, data_value=str(value))


def _one_line(violation: InvariantViolation) -> Markup:
    place = "" if violation.request is None else f" in request {violation.request}"
    numbers = f": expected {violation.expected}, found {violation.found}"
    detail = f" ({violation.detail})" if violation.detail else ""
    return join([tag("code", violation.invariant), f"{place}{numbers}{detail}"])


# the pictures


def _facts(call: Call, sizes: Sizes) -> dict[str, object]:
    nodes = call.num_nodes.tolist() if call.num_nodes is not None else None
    numbers: dict[str, object] = {"requests": str(sizes.batch)}
    for name, lens in (
        ("q_len", sizes.q_lens),
        ("prefix_len", sizes.prefix_lens),
        ("num_nodes", nodes),
    ):
        numbers[name] = "not known" if lens is None else _alike(lens)
    if call.max_q_len is not None:
        numbers["max_q_len"] = str(call.max_q_len)
    if call.is_captured:
        numbers["buffers"] = "fixed, as under a captured graph"
    return numbers


def _alike(lens: Sequence[int]) -> str:
    if len(set(lens)) == 1:
        return f"{lens[0]:,}" + (" each" if len(lens) > 1 else "")
    shown = ", ".join(f"{value:,}" for value in lens[:8])
    return shown + (f", ... ({len(lens)})" if len(lens) > 8 else "")


def _rulers(call: Call, sizes: Sizes) -> Markup | None:
    drawn = [ruler_picture(ruler) for ruler in rulers(call, sizes) if len(ruler.found) > 1]
    if not drawn:
        return None
    note = (
        "Upper bar: where the segment of each request should be, by the call's own rows, prefixes and tree. "
        "Lower bar: where the indptr puts it."
    )
    return section("Where each request's segment is", *drawn, note=note)


def _requests(
    call: Call, sizes: Sizes, report: Report, failed: Failed | None = None
) -> list[Markup]:
    """The pictures of each request: the first violation's and the first with wrong bits open, on top."""
    in_use = [b for b in range(sizes.batch) if b not in sizes.idle]
    views = {b: seen(call, sizes, b) for b in in_use}
    if failed is not None and failed.seen is not None:
        views = as_seen(views, failed.seen, failed.backend)
    first = next((v.request for v in report.broken if v.request is not None), None)
    broken = {v.request for v in report.broken}

    wrong = [b for b, view in views.items() if view and bool((view.leaked | view.hidden).any())]
    drawn = sorted(in_use, key=lambda b: (b != first, b not in wrong, b not in broken, b))
    shown = {*drawn[:1], *[b for b in drawn if b in wrong][:1]}
    drawn = drawn[:MOST_REQUESTS]
    sections = []
    for b in drawn:
        pictures = _request(call, sizes, b, views[b])
        if not pictures:
            continue
        title = f"Request {b}" + (f" of {sizes.batch}" if sizes.batch > 1 else "")
        if b in shown:
            sections.append(section(title, *pictures))
        else:
            sections.append(tag("section", folded(title, *pictures), class_="tight"))
    left = len(in_use) - len(drawn)
    if left > 0:
        sections.append(tag("p", f"{counted(left, 'more request')} not drawn.", class_="note"))
    return sections


def _request(call: Call, sizes: Sizes, b: int, mask: Seen | None) -> list[Markup]:
    tree = tree_view(call, sizes, b)
    computed = mask.computed if mask else None
    parts = []
    if tree is not None:
        parts += [
            tag("h3", "Draft tree"),
            of_tree.legend(tree, computed),
            of_tree.tree_picture(tree, computed),
        ]
    if mask is not None:
        parts += [
            tag("h3", "Mask: what each row sees"),
            mask_picture(mask, tree.labels if tree else (), tree.accepted if tree else ()),
        ]
    elif (
        sizes.q_lens is not None
        and {"custom_mask", "packed", "bias", "words"} & call.known().keys()
    ):
        told = "The mask is not drawn: it cannot be read with these widths, or has too many bits."
        parts.append(tag("p", told, class_="note"))
    return [part for part in parts if part is not None]


def tree_view(call: Call, sizes: Sizes, b: int) -> TreeView | None:
    """The tree of one request, without its mask; None where the call holds none."""
    if call.parents is None or call.num_nodes is None or b >= call.parents.shape[0]:
        return None
    nodes = tree_rows(call, b)
    count = min(max(int(call.num_nodes[b]), 0), call.parents.shape[1]) if nodes is None else nodes
    if not count:
        return None

    def of(field: Tensor | None) -> list[float]:
        return [] if field is None else field[b, :count].tolist()

    path: list[int] = []
    if call.nodes is not None and call.num_accepted is not None:
        path = [
            row for row in call.nodes[b, : int(call.num_accepted[b])].tolist() if 0 <= row < count
        ]
    return TreeView(
        request=b,
        prefix_len=sizes.prefix_lens[b] if sizes.prefix_lens else 0,
        q_len=sizes.q_lens[b] if sizes.q_lens else count,
        num_nodes=count,
        token_ids=tuple(int(token) for token in of(call.token_ids)),
        parents=tuple(int(parent) for parent in of(call.parents)),
        scores=tuple(of(call.scores)),
        accepted=tuple(path),
        labels=tuple(str(int(token)) for token in of(call.token_ids)),
        allowed=None,
    )


# the table, and what to do next


def _invariants(report: Report) -> Markup:
    """Every invariant with its state: the broken ones first; what could not be checked with what it lacks."""
    found: dict[str, list[InvariantViolation]] = {}
    for violation in report.broken:
        found.setdefault(violation.invariant, []).append(violation)
    rows: dict[str, list[tuple[object, ...]]] = {"broken": [], "held": [], "not checked": []}
    for invariant in TABLE:
        name = tag("td", tag("code", invariant.id), class_="name")
        said: object = invariant.statement
        state_of = "held"
        if invariant.id in found:
            state_of, (first, *others) = "broken", found[invariant.id]
            more = f" (and {counted(len(others), 'more place')})" if others else ""
            numbers = f"expected {first.expected}, found {first.found}{more}"
            said = join([said, tag("br"), tag("span", numbers, class_="bad")])
        elif invariant.id in report.not_checked:
            state_of = "not checked"
            said = join(
                [said, tag("br"), tag("span", report.not_checked[invariant.id], class_="dim")]
            )
        rows[state_of].append((tag("td", state(state_of)), name, said))
    head = ("state", "invariant", "says")
    tables = [
        folded(f"{len(own)} {name}", table(head, own, "stacked invariants"), open_=name == "broken")
        for name, own in rows.items()
        if own
    ]
    return section("Invariants", *tables)


def _again(source: Source) -> Markup:
    lines = [command("ddtree", "check", source.file)]
    if source.failed is not None:
        backend = source.failed.backend
        lines.insert(0, command("ddtree", "conform", backend, "--case", source.file))
    if source.function:
        note = f"The file also holds the arguments of {source.function}. Run it on reference and kernels:"
        lines += [tag("p", note, class_="note"), command("ddtree", "replay", source.file)]
    return section("Check it again", *lines)


def _fields(call: Call, source: Source) -> Markup:
    """What the file holds."""
    rows: list[tuple[Markup, str, str]] = []
    for name, value in call.known().items():
        if isinstance(value, Tensor):
            kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            rows.append((tag("td", tag("code", name), class_="name"), kind, _values(value)))
        else:
            rows.append((tag("td", tag("code", name), class_="name"), "number", str(value)))
    not_read = None
    if source.not_read:
        names = ", ".join(named(name, why) for name, why in source.not_read.items())
        not_read = tag("p", f"Not read: {names}", class_="note")
    return tag(
        "section",
        folded(
            f"What the file holds: {counted(len(rows), 'field')}",
            table(("field", "kind", "values"), rows, "stacked"),
        ),
        not_read,
        class_="tight",
    )


def _values(value: Tensor) -> Markup:
    """The first numbers of a tensor."""
    flat = value.flatten()[:12]
    numbers = [f"{x:g}" for x in (flat.float() if flat.dtype is torch.bfloat16 else flat).tolist()]
    dots = ", ..." if value.numel() > 12 else ""
    return text(", ".join(numbers) + dots)

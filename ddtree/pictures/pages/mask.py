"""The mask of one request as a heat map: query rows down, the prefix and then the tree's own rows across.

A bit that is right is a plain square; one that leaks bears a cross, one that is hidden a ring.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

from ddtree.pictures.pages.markup import Markup, counted, join, ranges, svg, table, tag
from ddtree.pictures.pages.seen import Seen
from ddtree.pictures.view import Cell

MOST_PREFIX, CONDENSED = 16, 8
"""A longer prefix is drawn as so many columns, each for a range of entries."""
MOST_ROWS = 80
"""More rows are drawn as blocks of rows, and the first wrong bit's surroundings beside them."""
MOST_TOLD = 8
"""Wrong rows that are told in words."""
WINDOW = 40
"""Rows and columns of the part of a condensed picture that is shown bit by bit."""
GAP = 6
"""Pixels between the prefix and the tree."""
Codes = NDArray[np.int8]
Blocks = list[tuple[int, int]]
"""Rows or columns that are drawn as one: first, end."""


def mask_picture(view: Seen, labels: Sequence[str] = (), accepted: Sequence[int] = ()) -> Markup:
    """The heat map with what is wrong in words; where it is too large, condensed, which it says."""
    wrong = view.leaked | view.hidden
    whole = range(view.rows)
    step = ceil(view.rows / MOST_ROWS) or 1
    parts: list[object] = [tag("p", _counts(view), class_="note")]
    parts += [tag("p", line, class_="note") for line in _condensed(view, step)]
    blocks = _blocks(whole, step)
    parts.append(_map(view, blocks, blocks, labels, accepted))
    if step > 1 and wrong.any():
        row, column = (int(place) for place in np.argwhere(wrong)[0])
        rows, columns = _around(row, view.rows), _around(max(column - view.prefix, 0), view.rows)
        parts += [
            tag("h4", f"Bit by bit: rows {ranges(rows)}, tree columns {ranges(columns)}"),
            _map(view, _blocks(rows, 1), _blocks(columns, 1), labels, accepted),
        ]
    parts += [_legend(view), _words(view)]
    return join(parts)


def _counts(view: Seen) -> str:
    leaked, hidden = int(view.leaked.sum()), int(view.hidden.sum())
    text = f"The mask is {view.reading}."
    if view.outside:
        text += (
            f" {counted(view.outside, 'entry', 'entries')} of them lie past the end of the mask."
        )
    if not view.judged:
        return f"{text} Without a tree that can be followed no bit is judged."
    if view.num_nodes is None and not leaked and not hidden:
        return f"{text} That is where it should be; without a tree no bit is judged."
    if view.num_nodes is None:
        text += (
            " The call holds no tree: bits are judged by the mask itself, read where it should be."
        )
    if not leaked and not hidden:
        return f"{text} Every real row sees just what it must."
    return (
        f"{text} {counted(leaked, 'bit')} {'leaks' if leaked == 1 else 'leak'} and {hidden:,} "
        f"{'is' if hidden == 1 else 'are'} hidden, of {view.judged * view.found.shape[1]:,}."
    )


def _condensed(view: Seen, step: int) -> Iterator[str]:
    """What the picture does not show bit by bit."""
    if view.prefix > MOST_PREFIX:
        yield (
            f"Condensed: the {view.prefix:,} prefix entries are drawn as {CONDENSED} columns; one with a "
            "wrong bit is marked."
        )
    if step > 1:
        yield (
            f"Condensed: each square stands for {step} x {step} bits of the {view.rows} rows; one with a "
            "wrong bit is marked."
        )


def _around(place: int, end: int) -> range:
    first = max(min(place - 8, end - WINDOW), 0)
    return range(first, min(first + WINDOW, end))


def _blocks(rows: range, step: int) -> Blocks:
    return [(a, min(a + step, rows.stop)) for a in range(rows.start, rows.stop, step)]


def _map(
    view: Seen, blocks: Blocks, across: Blocks, labels: Sequence[str], accepted: Sequence[int]
) -> Markup:
    shown = view.prefix if view.prefix <= MOST_PREFIX else CONDENSED
    bounds = [view.prefix * i // shown for i in range(shown + 1)] if shown else []
    columns = [*pairwise(bounds), *((view.prefix + a, view.prefix + b) for a, b in across)]
    codes = _gravest(view.codes(), blocks, columns)
    single = all(b - a == 1 for a, b in blocks)
    size = 16 if len(blocks) <= 40 else 11 if len(blocks) <= 64 else 9
    named = [_name(view, a, labels) for a, _ in blocks] if single and size >= 11 else []
    wide = max((len(name) for name in named), default=0)
    left, top = 34 + round(6.7 * wide) + 6 * bool(wide), 34
    xs = [left + size * i + (GAP if i >= shown else 0) for i in range(len(columns) + 1)]
    height = top + size * len(blocks) + 4
    # what is drawn over the cells: rows of padding, and rows that the call computes not at all
    parts = [
        *_frames(shown, xs, top, size, len(blocks)),
        *_squares(codes, xs, top, size),
        *_veils(view, blocks, xs, top, size),
        *_marks(codes, blocks, columns, xs, top, size),
        *_row_names(view, blocks, named, accepted, left, top, size),
        *_column_names(across, shown, accepted, xs, top, size),
    ]
    leaked, hidden = int(view.leaked.sum()), int(view.hidden.sum())
    label = f"mask of request {view.request}: {leaked} bits leak, {hidden} are hidden"
    width = max(xs[-1] + 4, xs[shown] + 150)
    return svg(width, height, *parts, label=label, class_="mask")


def _gravest(codes: Codes, rows: Blocks, columns: Blocks) -> Codes:
    """One code for each block: a wrong one if there is any, else seen if any bit is."""
    drawn = np.zeros((len(rows), len(columns)), dtype=np.int8)
    for i, (top, bottom) in enumerate(rows):
        for j, (left, right) in enumerate(columns):
            drawn[i, j] = codes[top:bottom, left:right].max()
    return drawn


def _frames(shown: int, xs: list[int], top: int, size: int, rows: int) -> Iterator[Markup]:
    """The ground of the prefix and of the tree, with lines between the cells."""
    for first, end in ((0, shown), (shown, len(xs) - 1)):
        if end > first:
            width = size * (end - first)
            tall = size * rows
            yield tag("rect", x=xs[first], y=top, width=width, height=tall, class_="frame")
            down = [f"M{x} {top}v{tall}" for x in range(xs[first], xs[first] + width + 1, size)]
            across = [f"M{xs[first]} {y}h{width}" for y in range(top, top + tall + 1, size)]
            yield tag("path", d="".join(down + across), class_="grid")


def _squares(codes: Codes, xs: list[int], top: int, size: int) -> Iterator[Markup]:
    """Right bits that are set: one path a kind, a square a bit."""
    for code, class_ in ((Cell.PREFIX, "seen-prefix"), (Cell.TREE, "seen-tree")):
        drawn = [
            f"M{xs[j] + 0.5:g} {top + size * i + 0.5:g}h{size - 1}v{size - 1}h{1 - size}z"
            for i, j in np.argwhere(codes == code).tolist()
        ]
        if drawn:
            yield tag("path", d="".join(drawn), class_=class_)


def _veils(view: Seen, blocks: Blocks, xs: list[int], top: int, size: int) -> Iterator[Markup]:
    """Hatching over rows of padding."""
    rows = [i for i, (a, _) in enumerate(blocks) if a in view.padding]
    if rows:
        width = xs[len(xs) - 2] + size - xs[0]
        y = top + size * rows[0]
        yield tag("rect", x=xs[0], y=y, width=width, height=size * len(rows), class_="veil")


def _marks(
    codes: Codes, rows: Blocks, columns: Blocks, xs: list[int], top: int, size: int
) -> Iterator[Markup]:
    """Wrong bits: a group a kind, which names each by its row and its column in the mask's rows."""
    for code, kind in ((Cell.WRONGLY_SEEN, "leaked"), (Cell.WRONGLY_HIDDEN, "hidden")):
        places = np.argwhere(codes == code).tolist()
        if places:
            corners = [(xs[j], top + size * i) for i, j in places]
            bits = " ".join(f"{rows[i][0]},{columns[j][0]}" for i, j in places)
            yield tag("g", *_signs(kind, corners, size), class_=kind, data_bits=bits)


def _signs(kind: str, corners: Sequence[tuple[int, int]], size: int) -> list[Markup]:
    """Squares with a cross (what leaks) or with a ring (what is hidden), two paths for all of them."""
    if kind == "leaked":
        ground = f"h{size}v{size}h{-size}z"
        grounds = "".join(f"M{x} {y}{ground}" for x, y in corners)
        near, far, arm = 0.26 * size, 0.74 * size, 0.48 * size
        signs = "".join(
            f"M{x + near:g} {y + near:g}l{arm:g} {arm:g}M{x + far:g} {y + near:g}l{-arm:g} {arm:g}"
            for x, y in corners
        )
        thick = 0.17 * size
    else:
        side = 0.84 * size
        ground = f"h{side:g}v{side:g}h{-side:g}z"
        grounds = "".join(f"M{x + 0.08 * size:g} {y + 0.08 * size:g}{ground}" for x, y in corners)
        radius = 0.17 * size
        ring = f"a{radius:g} {radius:g} 0 1 0 {2 * radius:g} 0a{radius:g} {radius:g} 0 1 0 {-2 * radius:g} 0"
        signs = "".join(f"M{x + 0.33 * size:g} {y + 0.5 * size:g}{ring}" for x, y in corners)
        thick = 0.14 * size
    return [
        tag("path", d=grounds, class_="ground", stroke_width=thick),
        tag("path", d=signs, class_="sign", stroke_width=thick),
    ]


def _name(view: Seen, row: int, labels: Sequence[str]) -> str:
    if row in view.padding:
        return "padding"
    return labels[row] if row < len(labels) else ""


def _row_names(
    view: Seen,
    blocks: Blocks,
    named: list[str],
    accepted: Sequence[int],
    left: int,
    top: int,
    size: int,
) -> Iterator[Markup]:
    every = 1 if size >= 11 else 2
    for i, (row, _) in enumerate(blocks):
        if i % every:
            continue
        y = top + size * i + size / 2 + 4
        sign = "✓" if row in accepted else "✕" if row >= view.computed else ""
        class_ = (
            "accepted"
            if sign == "✓"
            else "lost"
            if sign
            else "dim"
            if row in view.padding
            else None
        )
        yield tag("text", f"{sign}{row}", x=left - 5, y=y, class_=class_, text_anchor="end")
        if named and named[i]:
            yield tag("text", named[i], x=2, y=y, class_=f"token {class_ or ''}".strip())


def _column_names(
    blocks: Blocks,
    shown: int,
    accepted: Sequence[int],
    xs: list[int],
    top: int,
    size: int,
) -> Iterator[Markup]:
    if shown:
        yield tag("text", "prefix", x=xs[0], y=12)
    yield tag("text", "tree rows as columns", x=xs[shown], y=12)
    every = ceil(20 / size)
    for i, (row, _) in enumerate(blocks):
        if i % every == 0:
            class_ = "accepted" if row in accepted else None
            x = xs[shown + i] + size / 2
            yield tag("text", str(row), x=x, y=top - 5, class_=class_, text_anchor="middle")


def _legend(view: Seen) -> Markup:
    """The signs that the picture uses."""
    signs = [
        ("seen-prefix", "prefix entry, may attend"),
        ("seen-tree", "tree row, may attend"),
        ("none", "may not attend"),
    ]
    if view.leaked.any():
        signs.append(("leaked", "leaks: seen, and must not be"))
    if view.hidden.any():
        signs.append(("hidden", "hidden: must be seen, and is not"))
    items = [tag("li", _key(kind), said) for kind, said in signs]
    if view.padding:
        items.append(tag("li", _key("veil"), "padding, not judged"))
    if view.computed < view.rows:
        items.append(tag("li", tag("b", "✕", class_="bad"), "row that this call does not compute"))
    return tag("ul", *items, class_="legend")


def _key(kind: str) -> Markup:
    if kind in {"leaked", "hidden"}:
        drawn = tag("g", *_signs(kind, [(0, 0)], 14), class_=kind)
    else:
        drawn = tag("rect", x=0.5, y=0.5, width=13, height=13, class_=f"{kind} frame")
    return tag("svg", drawn, width=14, height=14, class_="mask", aria_hidden="true")


def _words(view: Seen) -> Markup | None:
    """The first wrong rows in words."""
    wrong = np.flatnonzero((view.leaked | view.hidden).any(axis=1)).tolist()
    if not wrong:
        return None
    rows = [
        (
            tag("td", f"row {row}"),
            _columns(view, view.leaked[row]),
            _columns(view, view.hidden[row]),
        )
        for row in wrong[:MOST_TOLD]
    ]
    told = table(("row", "sees, and must not", "must see, and does not"), rows, "stacked")
    left = len(wrong) - MOST_TOLD
    rest = (
        tag("p", f"{counted(left, 'more row')} with wrong bits.", class_="note")
        if left > 0
        else None
    )
    return join([told, rest])


def _columns(view: Seen, bits: NDArray[np.bool_]) -> str:
    columns = np.flatnonzero(bits)
    prefix = columns[columns < view.prefix].tolist()
    tree = (columns[columns >= view.prefix] - view.prefix).tolist()
    told = []
    if prefix:
        told.append(f"prefix {ranges(prefix)}")
    if tree:
        told.append(f"tree {ranges(tree)}")
    return "; ".join(told) or "nothing"

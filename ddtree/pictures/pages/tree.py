"""A draft tree as SVG: depth goes right, the best child on top, the accepted path marked."""

from collections.abc import Sequence
from itertools import pairwise
from unicodedata import east_asian_width

from ddtree.pictures.pages.markup import Markup, counted, svg, tag
from ddtree.pictures.view import TreeView

GAP = 28
"""Pixels between a node and its children."""
MOST_LABELLED = 130
"""Past this many leaves nodes are drawn as dots without text."""


def tree_picture(
    view: TreeView, computed: int | None = None, rows: Sequence[int] | None = None
) -> Markup:
    """The tree of one request.

    Args:
        view: the request; its mask is not read.
        computed: rows that the call computes, where they may be fewer than the tree's nodes.
        rows: what to call the nodes, if they are a part of a larger tree.
    """
    if not view.parents:
        return tag("p", "This call holds no tree (fields parents and num_nodes).", class_="note")
    heights, depths = view.heights(), view.depths
    leaves = int(max(heights)) + 1
    is_labelled = leaves <= MOST_LABELLED
    has_scores = any(view.score(row, 1) for row in range(1, len(view.parents)))
    tall = (34 if has_scores else 24) if is_labelled else 6
    pitch = tall + (10 if is_labelled else 2)
    named = range(len(view.parents)) if rows is None else rows
    box = 6
    if is_labelled:
        widest = max(_width(view.label(row)) for row in range(len(view.parents)))
        box = round(max(27 + 7.3 * widest + 8, 84 if has_scores else 60))
    column = box + GAP
    lefts = [6 + column * depth for depth in depths]
    tops = [8 + pitch * height for height in heights]
    width = 12 + column * max(depths) + box
    height = 12 + pitch * leaves

    path = list(view.accepted)
    edges: list[Markup] = []
    for row in range(len(view.parents)):
        parent = view.parent(row)
        if parent is not None and (parent, row) not in set(pairwise(path)):
            edges.append(_edge(lefts, tops, parent, row, box, tall, ""))
    edges += [_edge(lefts, tops, a, b, box, tall, "accepted") for a, b in pairwise(path)]
    lost = range(len(view.parents) if computed is None else max(computed, 0), len(view.parents))
    nodes = []
    for row in range(len(view.parents)):
        drawn = (
            _boxed(view, row, named[row], box, tall, is_lost=row in lost)
            if is_labelled
            else [tag("circle", cx=3, cy=3, r=4 if row in view.accepted else 2.6)]
        )
        place = f"translate({lefts[row]:g} {tops[row]:g})"
        class_ = _classes(view, row, is_lost=row in lost)
        nodes.append(tag("g", *drawn, transform=place, class_=class_, data_row=named[row]))
    parts = [*edges, *nodes]
    if view.padding:
        parts.append(_padding(view.padding, height))
        height += 34
        width = max(width, 172)
    label = f"draft tree of request {view.request}: {counted(len(view.parents), 'node')}"
    if path:
        label += f", accepted path {', '.join(map(str, path))}"
    return svg(width, height, *parts, label=label, class_="tree")


def legend(view: TreeView, computed: int | None = None) -> Markup | None:
    """How to read the tree, by what it holds."""
    if not view.parents:
        return None
    said = ["Each box is a node: its row" + (", its token" if view.labels else "")]
    if any(view.score(row, 1) for row in range(1, len(view.parents))):
        said[0] += ", below it its score (the sum of log-probs along the path)"
    if view.accepted:
        said.append("✓ and the thick line mark the accepted path")
    if view.padding:
        said.append("the hatched box stands for padding rows")
    if len(view.roots()) > 1:
        said.append("✕ and a broken outline mark nodes whose parent is no earlier row")
    if computed is not None and computed < len(view.parents):
        said.append("✕ and a broken outline mark nodes that this call computes no row for")
    return tag("p", f"{'; '.join(said)}.", class_="note")


def _edge(
    lefts: list[int], tops: list[float], parent: int, row: int, box: int, tall: int, class_: str
) -> Markup:
    """A bend half-way down the gap between two columns."""
    start, end = lefts[parent] + box, lefts[row]
    from_y, to_y = tops[parent] + tall / 2, tops[row] + tall / 2
    middle = start + 10 if box > 10 else (start + end) / 2
    drawn = f"M{start:g} {from_y:g} H{middle:g} V{to_y:g} H{end:g}"
    return tag("path", d=drawn, class_=f"edge {class_}".strip())


def _classes(view: TreeView, row: int, *, is_lost: bool) -> str:
    is_orphan = row > 0 and view.parent(row) is None
    kinds = {"accepted": row in view.accepted, "lost": is_lost, "orphan": is_orphan}
    return " ".join(["node", *(name for name, it_is in kinds.items() if it_is)])


def _boxed(
    view: TreeView, row: int, name: int, box: int, tall: int, *, is_lost: bool
) -> list[Markup]:
    """A node as a box with its row, its token and its score."""
    is_orphan = row > 0 and view.parent(row) is None
    sign = "✓" * (row in view.accepted) + "✕" * (is_lost or is_orphan)
    score = view.score(row, 2) if row else ""
    parts = [
        tag("rect", width=box, height=tall, rx=5),
        tag("text", str(name), x=6, y=16, class_="row"),
        tag("text", view.label(row), x=27, y=16, class_="token"),
    ]
    if sign:
        parts.append(tag("text", sign, x=box - 5, y=tall - 6 if tall > 24 else 16, class_="sign"))
    if score:
        parts.append(tag("text", score, x=27, y=29, class_="score"))
    return parts


def _width(label: str) -> int:
    """Columns of a monospaced text: wide characters take two."""
    return sum(2 if east_asian_width(char) in "WF" else 1 for char in label)


def _padding(padding: range, top: float) -> Markup:
    first, last = padding[0], padding[-1]
    rows = f"row {first}" if first == last else f"rows {first} to {last}"
    return tag(
        "g",
        tag("rect", width=160, height=24, rx=5),
        tag("text", f"padding: {rows}", x=8, y=16),
        transform=f"translate(6 {top + 4:g})",
        class_="padding",
        data_first=first,
        data_last=last,
    )

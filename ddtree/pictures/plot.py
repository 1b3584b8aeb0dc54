"""The picture as PNG and SVG: left the tree by depth, right the mask with the same row numbers."""

import warnings
from io import BytesIO
from itertools import pairwise
from math import ceil
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from numpy.typing import NDArray

from ddtree.pictures.view import Cell, TreeView

# Okabe and Ito's colours, told apart by every kind of colour vision
INK, GREY, PALE, PATH = "#222222", "#8c8c8c", "#f2f2f2", "#E69F00"
COLOURS = {
    Cell.HIDDEN: "#ffffff",
    Cell.PREFIX: "#a6d3ee",
    Cell.TREE: "#0072B2",
    Cell.WRONGLY_SEEN: "#D55E00",
    Cell.WRONGLY_HIDDEN: "#CC79A7",
}
MEANING = {
    Cell.PREFIX: "prefix, may attend",
    Cell.TREE: "ancestor or self, may attend",
    Cell.WRONGLY_SEEN: "WRONG: seen, but no ancestor",
    Cell.WRONGLY_HIDDEN: "WRONG: hidden, but must be seen",
}
UNJUDGED = {Cell.TREE: "tree row, may attend"}
"""Meaning where no tree is known."""
# text stays text in an SVG: it can be searched and copied
STYLE = mpl.RcParams({"svg.fonttype": "none", "svg.hashsalt": "ddtree", "hatch.linewidth": 0.4})
COLUMN, BOX = 1.4, 1.16
"""Inches from depth to depth, and of a node's box."""
MOST_LABELLED = 130
"""Past this many leaves the tree is drawn as dots without text."""
MOST_PREFIX = 8
"""A longer prefix is drawn as this many columns, each for a range of entries."""
TITLE, SUBTITLE = 0.115, 0.075
"""Inches of one character of the two lines at the top, which no picture may be narrower than."""
LEGEND = 2.1
"""Inches of the longest entry of the legend."""
DPI, MOST_PIXELS = 150, 8000
"""Resolution of a PNG, and the longest side that it is lowered for."""


def render(view: TreeView, form: Literal["png", "svg"], note: str = "") -> bytes:
    """The whole picture as a file's bytes; ``note`` stands under the title (a broken invariant)."""
    heights = view.heights()
    leaves = max(heights, default=0) + 1 + bool(view.padding)
    is_labelled = leaves <= MOST_LABELLED
    pitch = 0.30 if is_labelled else 0.07  # inches a leaf
    cell = min(max(max(leaves * pitch, 5.0) / max(view.q_len, 1), 0.05), 0.28)  # of the mask
    columns = min(view.prefix_len, MOST_PREFIX) + 1 + view.q_len
    tree_width = COLUMN * (max(view.depths, default=1) + 1)
    mask_height = view.q_len * cell
    body = max(leaves * pitch, mask_height, 0.4)
    lines = [_numbers(view), note or _reading(view), *_remarks(view)]
    marks = _legend_marks(view)
    # the legend goes below in as many columns as fit, the widest of the texts always does
    width = max(
        tree_width + columns * cell + 2.0,
        TITLE * len(lines[0]) + 0.4,
        *(SUBTITLE * len(line) + 0.4 for line in lines[1:]),
    )
    per_line = max(int((width - 0.1) // LEGEND), 1)
    top = 0.5 + 0.22 * (len(lines) - 1) + 0.45  # the lines, then the names of the columns
    bottom = 0.2 + 0.24 * ceil(len(marks) / per_line)
    height = top + body + bottom

    fixed = mpl.rc_context(STYLE)
    with fixed, warnings.catch_warnings():
        figure = Figure(figsize=(width, height), dpi=_dpi(width, height), facecolor="white")
        _title(figure, lines, height, is_wrong=bool(note))
        _tree(
            figure.add_axes((0.2 / width, bottom / height, tree_width / width, body / height)),
            view,
            heights,
            labelled=is_labelled,
            size=(tree_width, body),
        )
        lift = bottom + body - mask_height  # both panels hang from the top
        size = (columns * cell / width, mask_height / height)
        _mask(figure.add_axes(((tree_width + 1.5) / width, lift / height, *size)), view, cell)
        figure.legend(
            handles=marks, loc="lower left", bbox_to_anchor=(0.004, 0.004), ncols=per_line,
            frameon=False, fontsize=8.5, handlelength=1.4, columnspacing=1.4,
        )  # fmt: skip
        data = BytesIO()
        # a script that the font lacks shows as boxes in a PNG; an SVG keeps its text
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(data, format=form, metadata={"Date": None} if form == "svg" else None)
    return data.getvalue()


def limited_size(png: bytes) -> tuple[int, int] | None:
    """Width and height of a PNG whose size was limited; None for any other."""
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # its header
    return (width, height) if max(width, height) >= MOST_PIXELS - 1 else None


def _dpi(width: float, height: float) -> float:
    return min(DPI, MOST_PIXELS / max(width, height))


def _numbers(view: TreeView) -> str:
    numbers = list(view.widths)
    if view.num_nodes is not None:
        numbers.append(f"num_nodes {view.num_nodes}")
    if view.padding:
        numbers.append(f"padding {len(view.padding)}")
    if view.accepted:
        numbers.append(f"accepted {len(view.accepted)}")
    return "   ".join(numbers)


def _reading(view: TreeView) -> str:
    """How to read a node, by what is known of it."""
    if not view.parents:
        return ""
    parts = ["row number"] + ["token"] * bool(view.labels)
    if any(view.score(row, 1) for row in range(len(view.parents))):
        parts.append("score (sum of log-probs along the path)")
    return f"node: {', '.join(parts)}"


def _remarks(view: TreeView) -> list[str]:
    """What the picture leaves out."""
    if view.prefix_len <= MOST_PREFIX:
        return []
    return [f"{view.prefix_len} prefix entries in {MOST_PREFIX} columns"]


def _title(figure: Figure, lines: list[str], height: float, *, is_wrong: bool) -> None:
    """The numbers, then the note or how to read a node, then what is left out."""
    left = 0.2 / figure.get_figwidth()
    figure.text(left, 1 - 0.32 / height, lines[0], fontsize=13, color=INK, weight="bold")
    for i, line in enumerate(lines[1:]):
        colour = COLOURS[Cell.WRONGLY_SEEN] if is_wrong and i == 0 else GREY
        y = 1 - (0.55 + 0.22 * i) / height
        figure.text(left, y, line, fontsize=9.5, color=colour, parse_math=False)


# the tree

Place = tuple[float, float]
"""Inches from the left and from the top: the left end and the middle height of a node."""


def _tree(
    axes: Axes, view: TreeView, heights: list[float], labelled: bool, size: tuple[float, float]
) -> None:
    """Depth goes right, best child on top; box sizes are in inches, as the axes are."""
    axes.set_axis_off()
    axes.set_xlim(0, size[0])
    axes.set_ylim(size[1], 0)
    if not view.parents:
        axes.text(0.1, 0.3, "no tree in this call", color=GREY, fontsize=10)
        return
    lines = max(heights) + 1 + bool(view.padding)
    pitch = size[1] / lines if not labelled else min(size[1] / lines, 0.42)
    on_path = set(view.accepted)
    lefts = [0.1 + COLUMN * depth for depth in view.depths]
    places = list(zip(lefts, [(height + 0.5) * pitch for height in heights], strict=True))
    for row, (x, y) in enumerate(places):
        parent = view.parent(row)
        if parent is not None:
            is_path = row in on_path and parent in on_path
            _edge(axes, places[parent], (x, y), labelled, is_path)
    for row, (x, y) in enumerate(places):
        if labelled:
            _box(axes, view, row, x, y, row in on_path)
        else:
            axes.plot(x, y, ".", color=PATH if row in on_path else COLOURS[Cell.TREE], ms=5)
    if view.padding:
        first, last = view.padding[0], view.padding[-1]
        rows = f"{first}" if first == last else f"{first} to {last}"
        y = (max(heights) + 1.5) * pitch
        box = FancyBboxPatch(
            (0.1, y - 0.11), BOX, 0.22, boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=PALE, edgecolor=GREY, linewidth=0.8, linestyle=(0, (3, 2)),
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(0.16, y, f"padding {rows}", va="center", fontsize=7.5, color=GREY)


def _edge(axes: Axes, parent: Place, child: Place, labelled: bool, is_path: bool) -> None:
    start, end = (parent[0] + BOX, child[0]) if labelled else (parent[0], child[0])
    middle = start + 0.12
    axes.plot(
        [start, middle, middle, end],
        [parent[1], parent[1], child[1], child[1]],
        color=PATH if is_path else GREY,
        linewidth=2.4 if is_path else 0.9,
        zorder=2 if is_path else 1,
        solid_joinstyle="round",
    )


def _box(axes: Axes, view: TreeView, row: int, x: float, y: float, is_path: bool) -> None:
    is_lost = row >= view.q_len or (row > 0 and view.parent(row) is None)
    edge = COLOURS[Cell.WRONGLY_SEEN] if is_lost else PATH if is_path else COLOURS[Cell.TREE]
    box = FancyBboxPatch(
        (x, y - 0.115), BOX, 0.23, boxstyle="round,pad=0,rounding_size=0.06",
        facecolor="#fdf1d8" if is_path else "white", edgecolor=edge,
        linewidth=1.8 if is_path else 0.9, linestyle=(0, (2, 1.5)) if is_lost else "-", zorder=3,
    )  # fmt: skip
    axes.add_patch(box)
    weight = "bold" if is_path else "normal"
    style = {"va": "center", "zorder": 4, "parse_math": False}
    axes.text(x + 0.06, y, str(row), fontsize=7, color=GREY, **style)  # type: ignore[arg-type]
    axes.text(x + 0.28, y, view.label(row), fontsize=7.5, color=INK, weight=weight, **style)  # type: ignore[arg-type]
    if row and (score := view.score(row, 1)):
        axes.text(x + BOX - 0.04, y, score, fontsize=5.5, color=GREY, ha="right", **style)  # type: ignore[arg-type]


# the mask


def _mask(axes: Axes, view: TreeView, cell: float) -> None:
    """Rows are query rows, columns the prefix (condensed) and then the tree's own rows."""
    cells = view.cells()
    shown = min(view.prefix_len, MOST_PREFIX)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0, pad=2)
    if cells is None or view.q_len == 0:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0, 0.5, "the layout reads past\nthe end of the mask", color=INK, fontsize=10)
        return
    axes.imshow(_image(view, cells, shown), interpolation="none", aspect="auto")
    if cell >= 0.09:
        _grid(axes, view, shown)
    if view.padding:
        _hatch_padding(axes, view, shown)
    _row_names(axes, view, cell)
    _column_names(axes, view, shown, cell)


def _image(view: TreeView, cells: NDArray[np.int8], shown: int) -> NDArray[np.float64]:
    """[q_len, shown + 1 + q_len, 3]; a condensed column mixes the colours of its entries."""
    palette = np.array([to_rgb(COLOURS[code]) for code in Cell])
    image = palette[cells]  # [q_len, prefix_len + q_len, 3]
    prefix, tree = image[:, : view.prefix_len], image[:, view.prefix_len :]
    bounds = [view.prefix_len * i // shown for i in range(shown + 1)] if shown else []
    ranges = [prefix[:, a:b].mean(1) for a, b in pairwise(bounds)]
    gap = np.ones((view.q_len, 3))
    return np.concatenate([np.stack([*ranges, gap], 1), tree], 1)


def _grid(axes: Axes, view: TreeView, shown: int) -> None:
    for first, last in ((0, shown), (shown + 1, shown + 1 + view.q_len)):
        ends = (first - 0.5, last - 0.5)
        if first == last:
            continue
        axes.hlines(np.arange(view.q_len + 1) - 0.5, *ends, color="#d9d9d9", linewidth=0.5)
        axes.vlines(
            np.arange(first, last + 1) - 0.5, -0.5, view.q_len - 0.5, color="#d9d9d9", linewidth=0.5
        )


def _hatch_padding(axes: Axes, view: TreeView, shown: int) -> None:
    padding = len(view.padding)
    where = (-0.5, view.padding[0] - 0.5)
    style = {"facecolor": (1, 1, 1, 0.55), "edgecolor": GREY, "hatch": "////", "linewidth": 0}
    if shown:
        axes.add_patch(Rectangle(where, shown, padding, **style))  # type: ignore[arg-type]
    axes.add_patch(Rectangle((shown + 0.5, where[1]), view.q_len, padding, **style))  # type: ignore[arg-type]


def _row_names(axes: Axes, view: TreeView, cell: float) -> None:
    step = max(1, round(0.11 / cell))
    rows = range(0, view.q_len, step)
    names = [
        f"{view.labels[row]}  {row}" if row < len(view.labels) and step == 1
        else f"padding  {row}" if row in view.padding and step == 1
        else str(row)
        for row in rows
    ]  # fmt: skip
    axes.set_yticks(rows, names, fontsize=min(7.5, 62 * cell), color=INK, parse_math=False)
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        if row in view.accepted:
            label.set_color("#a86f00")
            label.set_fontweight("bold")
        elif row in view.padding:
            label.set_color(GREY)


def _column_names(axes: Axes, view: TreeView, shown: int, cell: float) -> None:
    axes.xaxis.tick_top()
    step = max(1, ceil(0.19 / cell))
    rows = range(0, view.q_len, step)
    axes.set_xticks([shown + 1 + row for row in rows], [str(row) for row in rows], fontsize=7)
    for row, label in zip(rows, axes.get_xticklabels(), strict=True):
        label.set_color("#a86f00" if row in view.accepted else INK)
    if shown:
        text = f"prefix 0..{view.prefix_len - 1}" if shown * cell > 0.8 else "prefix"
        axes.annotate(
            text, (shown / 2 - 0.5, -0.5), (0, 14), textcoords="offset points",
            ha="center", fontsize=8, color=INK,
        )  # fmt: skip
    axes.annotate(
        "tree rows as columns", (shown + 0.5 + view.q_len / 2, -0.5), (0, 14),
        textcoords="offset points", ha="center", fontsize=8, color=INK,
    )  # fmt: skip


def _legend_marks(view: TreeView) -> list[Patch]:
    cells = view.cells()
    found = set() if cells is None else {int(code) for code in np.unique(cells)}
    marks = [
        Patch(
            facecolor=COLOURS[code], label=meaning if view.parents else UNJUDGED.get(code, meaning)
        )
        for code, meaning in MEANING.items()
        if code in found
    ]
    if view.padding:
        marks.append(Patch(facecolor="white", edgecolor=GREY, hatch="////", label="padding"))
    if view.accepted:
        marks.append(Patch(facecolor="#fdf1d8", edgecolor=PATH, linewidth=1.8, label="accepted"))
    if view.lost:
        edge, label = COLOURS[Cell.WRONGLY_SEEN], "WRONG: node without a query row"
        marks.append(Patch(facecolor="white", edgecolor=edge, linestyle="--", label=label))
    return marks

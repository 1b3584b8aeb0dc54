"""The picture in a terminal: a tree with branches, then the mask as compact cells.

Meaning never rests on colour alone: accepted nodes are marked, wrong cells have signs of their own.
"""

from itertools import pairwise
from math import isfinite

from rich.text import Text

from ddtree.pictures.view import Cell, TreeView

SIGNS = {
    Cell.HIDDEN: ("·", "bright_black"),
    Cell.PREFIX: ("█", "cyan"),
    Cell.TREE: ("█", "blue"),
    Cell.WRONGLY_SEEN: ("!", "bold red"),
    Cell.WRONGLY_HIDDEN: ("x", "bold red"),
}
ASCII = str.maketrans("█·│░├└─␣⏎⇥…", "#.|+|`-_/>~")
"""For terminals without Unicode: one character for each, so that styles keep their places."""
PREFIX_CELLS = 8
"""A longer prefix is drawn as this many cells, each for a range of entries."""


def title(view: TreeView) -> str:
    """The numbers of the request in one line."""
    padding = max(view.q_len - view.num_nodes, 0)
    return (
        f"request {view.request}: prefix_len {view.prefix_len}, q_len {view.q_len}, "
        f"num_nodes {view.num_nodes}, padding {padding}"
    )


def tree_text(view: TreeView) -> Text:
    """The tree, one node a line: row, token, score; ``*`` marks the accepted path."""
    if not view.parents:
        return Text("no tree in this call (fields token_ids, parents, num_nodes)")
    children, text = view.children(), Text()
    # a stack of (row, lead of its line, lead of its children's lines), first child on top
    stack = [(row, "", "") for row in reversed(view.roots())]
    while stack:
        row, lead, below = stack.pop()
        _node(text, view, row, lead)
        for child in reversed(children[row]):
            is_last = child == children[row][-1]
            branch, stem = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
            stack.append((child, below + branch, below + stem))
    if view.q_len > view.num_nodes:
        text.append(f"rows {view.num_nodes}..{view.q_len - 1} are padding\n", "bright_black")
    text.rstrip()
    return text


def mask_text(view: TreeView, width: int) -> Text:
    """The mask, one query row a line, ``width`` characters wide; columns past it are cut."""
    cells = view.cells()
    if cells is None:
        return Text("the layout reads past the end of the mask: nothing to draw")
    lead = len(str(max(view.q_len - 1, 0)))
    shown_prefix = min(view.prefix_len, PREFIX_CELLS)
    room = max(width - lead - shown_prefix - 5, 1)
    shown_columns = min(view.q_len, room)
    text = Text()
    for row in range(view.q_len):
        is_accepted, is_padding = row in view.accepted, row >= view.num_nodes
        mark = "*" if is_accepted else "p" if is_padding else " "
        text.append(f"{row:>{lead}}{mark} ", "bold green" if is_accepted else "")
        for cell in _condensed(cells[row, : view.prefix_len].tolist(), shown_prefix):
            _cell(text, cell, is_padding)
        text.append("│")
        for cell in cells[row, view.prefix_len :][:shown_columns].tolist():
            _cell(text, cell, is_padding)
        text.append("\n")
    text.append(_legend(view, shown_prefix, shown_columns, {int(cell) for cell in cells.flat}))
    return text


def _node(text: Text, view: TreeView, row: int, lead: str) -> None:
    text.append(lead, "bright_black")
    is_accepted = row in view.accepted
    label = view.labels[row] or "''"
    text.append(f"{row}{'*' if is_accepted else ''} {label}", "bold green" if is_accepted else "")
    if view.scores and isfinite(view.scores[row]):
        text.append(f"  {view.scores[row]:.2f}", "bright_black")
    if row >= view.q_len:
        text.append("  no query row", "bold red")
    if row and view.parent(row) is None:
        text.append(f"  parent {view.parents[row]} is no earlier row", "bold red")
    text.append("\n")


def _condensed(prefix: list[int], shown: int) -> list[int]:
    """``shown`` cells for the whole prefix: the gravest code of each range of entries."""
    bounds = [len(prefix) * i // shown for i in range(shown + 1)] if shown else []
    return [_gravest(prefix[a:b]) for a, b in pairwise(bounds)]


def _gravest(codes: list[int]) -> int:
    wrong = max(codes)
    return wrong if wrong >= Cell.WRONGLY_SEEN else min(codes)


def _cell(text: Text, code: int, is_padding: bool) -> None:
    sign, style = SIGNS[Cell(code)]
    if is_padding:
        sign, style = "░" if sign == "█" else sign, "bright_black"
    text.append(sign, style)


def _legend(view: TreeView, shown_prefix: int, shown_columns: int, found: set[int]) -> str:
    lines = ["█ may attend   · may not   * accepted"]
    if view.q_len > view.num_nodes:
        lines[0] += "   p padding (░)"
    if found & {Cell.WRONGLY_SEEN, Cell.WRONGLY_HIDDEN}:
        lines.append("! seen, but no ancestor   x hidden, but must be seen")
    if shown_prefix < view.prefix_len:
        lines.append(f"left of │: {view.prefix_len} prefix entries in {shown_prefix} cells")
    if shown_columns < view.q_len:
        lines.append(f"tree columns {shown_columns}..{view.q_len - 1} cut: widen, or use --out")
    return "\n".join(lines)

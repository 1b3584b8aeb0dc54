"""The picture in a terminal: a tree with branches, then the mask as compact cells.

Meaning never rests on colour alone: accepted nodes are marked, wrong cells have signs of their own.
"""

from itertools import pairwise

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
    numbers = f"request {view.request}: {', '.join(view.widths)}"
    if view.num_nodes is None:
        return numbers
    return f"{numbers}, num_nodes {view.num_nodes}, padding {len(view.padding)}"


def tree_text(view: TreeView) -> Text:
    """The tree, one node a line: row, token, score; ``*`` marks the accepted path."""
    if not view.parents:
        return Text("no tree in this call (fields parents, num_nodes)")
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
    if view.padding:
        rows = f"rows {view.padding[0]}..{view.padding[-1]} are padding"
        text.append(
            f"row {view.padding[0]} is padding\n" if len(view.padding) == 1 else f"{rows}\n",
            "bright_black",
        )
    text.rstrip()
    return text


def mask_text(view: TreeView, width: int, *, is_drawn: bool = False) -> Text:
    """The mask, one query row a line, ``width`` characters wide; columns past it are cut.

    ``is_drawn``: files hold the whole of it, and a cut says so.
    """
    cells = view.cells()
    if cells is None:
        return Text("the layout reads past the end of the mask: nothing to draw")
    lead = len(str(max(view.q_len - 1, 0)))
    shown_prefix = min(view.prefix_len, PREFIX_CELLS)
    room = max(width - lead - shown_prefix - 5, 1)
    shown_columns = min(view.q_len, room)
    text = Text()
    for row in range(view.q_len):
        is_accepted, is_padding = row in view.accepted, row in view.padding
        mark = "*" if is_accepted else "p" if is_padding else " "
        text.append(f"{row:>{lead}}{mark} ", "bold green" if is_accepted else "")
        for cell in _condensed(cells[row, : view.prefix_len].tolist(), shown_prefix):
            _cell(text, cell, is_padding)
        text.append("│")
        for cell in cells[row, view.prefix_len :][:shown_columns].tolist():
            _cell(text, cell, is_padding)
        text.append("\n")
    found = {int(cell) for cell in cells.flat}
    text.append(_legend(view, shown_prefix, shown_columns, found, is_drawn))
    return text


def _node(text: Text, view: TreeView, row: int, lead: str) -> None:
    text.append(lead, "bright_black")
    is_accepted = row in view.accepted
    named = f"{row}{'*' if is_accepted else ''} {view.label(row)}".rstrip()
    text.append(named, "bold green" if is_accepted else "")
    if score := view.score(row, 2):
        text.append(f"  {score}", "bright_black")
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


def _legend(
    view: TreeView, shown_prefix: int, shown_columns: int, found: set[int], is_drawn: bool
) -> str:
    lines = ["█ may attend   · may not   * accepted"]
    if view.padding:
        lines[0] += "   p padding (░)"
    if found & {Cell.WRONGLY_SEEN, Cell.WRONGLY_HIDDEN}:
        lines.append("! seen, but no ancestor   x hidden, but must be seen")
    if shown_prefix < view.prefix_len:
        lines.append(f"left of │: {view.prefix_len} prefix entries in {shown_prefix} cells")
    if shown_columns < view.q_len:
        whole = "the files have all" if is_drawn else "widen, or use --out"
        lines.append(f"tree columns {shown_columns}..{view.q_len - 1} cut: {whole}")
    return "\n".join(lines)

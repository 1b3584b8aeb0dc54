"""HTML and SVG as text. What is no ``Markup`` is escaped where it is put in, so tokens may hold anything."""

from collections.abc import Iterable
from html import escape

_EMPTY = {"br", "circle", "input", "line", "meta", "path", "rect"}
"""Tags without content."""

Value = str | int | float | bool | None


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Markup:
    """A value as text; characters that HTML cannot hold are shown as a replacement character."""
    if isinstance(value, Markup):
        return value
    raw = str(value)
    if not raw.isprintable():
        shown = (c if c in "\n\t" or c.isprintable() or c > "\x9f" else "�" for c in raw)
        raw = "".join(shown).encode("utf-8", "replace").decode()
    return Markup(escape(raw))


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Parts one after the other."""
    return Markup(between.join(text(part) for part in parts if part is not None))


def tag(name: str, /, *content: object, **attributes: Value) -> Markup:
    """One element: ``tag("td", "a < b", class_="number", data_row=3)``.

    Attributes that are None or False are left out, and True has no value; a trailing underscore is dropped,
    others become hyphens. Content that is None is left out.
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{text(_short(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY and not content:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(content)}</{name}>")


def _short(value: Value) -> str:
    """Coordinates in tenths."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def svg(width: float, height: float, *content: object, label: str, class_: str = "") -> Markup:
    """A picture of so many pixels, in a box of its own that scrolls where the screen is narrower."""
    drawn = tag(
        "svg",
        *content,
        class_=class_ or None,
        width=width,
        height=height,
        viewBox=f"0 0 {_short(float(width))} {_short(float(height))}",
        role="img",
        aria_label=label,
    )
    return tag("div", drawn, class_="scroll", tabindex=0, role="group", aria_label=label)


def table(head: Iterable[object], rows: Iterable[Iterable[object]], class_: str = "") -> Markup:
    """A table; a cell that is a whole ``<td>`` stays as it is, any other is put into one."""
    names = [str(name) for name in head]
    body = [
        tag("tr", *(_cell(cell, names[i] if i < len(names) else "") for i, cell in enumerate(row)))
        for row in rows
    ]
    return tag(
        "table",
        tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names))),
        tag("tbody", *body),
        class_=class_ or None,
    )


def _cell(content: object, name: str) -> Markup:
    if isinstance(content, Markup) and content.startswith(("<td", "<th")):
        return content
    return tag("td", content, data_name=name or None)


def counted(count: int, one: str, many: str = "") -> str:
    """``1 row``, ``2 rows``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """``0 to 4, 7, 9 to 11``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)

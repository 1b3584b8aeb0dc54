"""A page as its elements, read by Python's own parser, which is no part of what made it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "input"}
"""Elements of HTML that have no end tag."""


@dataclass
class Element:
    """One element."""

    tag: str
    attributes: dict[str, str]
    parent: "Element | None" = None
    children: list["Element | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text within."""
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def walk(self) -> Iterator["Element"]:
        """Itself and all elements within."""
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def all(self, tag: str = "", **attributes: str) -> list["Element"]:
        """Elements within of this tag, with these attributes; ``class_`` is one of the classes."""
        class_ = attributes.pop("class_", "")
        wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [
            e
            for e in self.walk()
            if (not tag or e.tag == tag)
            and (not class_ or class_ in e.attributes.get("class", "").split())
            and all(e.attributes.get(name) == value for name, value in wanted.items())
        ]

    def one(self, tag: str = "", **attributes: str) -> "Element":
        """The only such element."""
        found = self.all(tag, **attributes)
        assert len(found) == 1, f"{len(found)} elements {tag} {attributes}"
        return found[0]

    def section(self, title: str) -> "Element":
        """The section with this heading."""
        found = [s for s in self.all("section") if [h.text for h in s.all("h2")][:1] == [title]]
        assert len(found) == 1, f"{len(found)} sections {title!r}"
        return found[0]

    def table(self) -> list[list[str]]:
        """The texts of the cells, row by row."""
        return [[c.text for c in row.all() if c.tag in {"td", "th"}] for row in self.all("tr")]


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = self.root

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        made = Element(tag, {name: value or "" for name, value in attrs}, self._open)
        self._open.children.append(made)
        if tag not in VOID:
            self._open = made

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self._open.tag, f"</{tag}> ends <{self._open.tag}>"
        assert self._open.parent is not None
        self._open = self._open.parent

    def handle_data(self, data: str) -> None:
        self._open.children.append(data)


def parsed(page: bytes) -> Element:
    """The page; every element is closed where it should be, and nothing is loaded from elsewhere."""
    parser = _Parser()
    parser.feed(page.decode())
    parser.close()
    root = parser.root
    assert parser._open is root, f"<{parser._open.tag}> is not closed"
    for element in root.walk():
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            value = element.attributes.get(name, "#")
            assert value.startswith("#"), f"<{element.tag} {name}={value!r}> leads elsewhere"
        assert element.tag not in {"link", "iframe", "object", "embed", "img", "base"}
        assert not any(name.startswith("on") for name in element.attributes), element.attributes
    for style in root.all("style"):
        assert "@import" not in style.text
        assert "://" not in style.text
        assert "url(" not in style.text.replace("url(#", "")
    ids = [e.attributes["id"] for e in root.walk() if "id" in e.attributes]
    assert len(ids) == len(set(ids)), "an id stands twice"
    return root

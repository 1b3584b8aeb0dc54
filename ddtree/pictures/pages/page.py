"""The frame of every page: one file with its style and script inside, light and dark, wide and narrow."""

import shlex
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from ddtree.pictures.pages.markup import Markup, join, tag


def page(title: str, kind: str, *body: object, script: str = "") -> bytes:
    """A whole page as UTF-8.

    Args:
        title: what was found, for the heading.
        kind: what the page is: "captured call".
        body: its sections.
        script: name of a script beside this file; the page can be read without it.
    """
    from ddtree import __version__

    code = _asset(script) if script else ""
    policy = "; ".join(
        [
            "default-src 'none'",  # nothing is loaded, whatever a token's text says
            "style-src 'unsafe-inline'",
            f"script-src {_hash_of(code)}" if code else "script-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · ddtree"),
        tag("style", Markup(_asset("page.css"))),
    )
    whole = tag(
        "html",
        head,
        tag(
            "body",
            HATCHING,
            tag("header", tag("p", f"ddtree · {kind}", class_="kind"), tag("h1", title)),
            tag("main", *body),
            tag("footer", f"ddtree {__version__}. One file: nothing on this page is loaded."),
            tag("script", Markup(code)) if code else None,
        ),
        lang="en",
    )
    return join([Markup("<!doctype html>\n"), whole, Markup("\n")]).encode()


def section(title: str, *content: object, note: object = None, id_: str | None = None) -> Markup:
    """A section with its heading, and a sentence on how to read it."""
    told = tag("p", note, class_="note") if note else None
    return tag("section", tag("h2", title), told, *content, id=id_)


def folded(summary: object, *content: object, open_: bool = False) -> Markup:
    """Content that opens on a click, without a script."""
    return tag("details", tag("summary", summary), *content, open=open_)


def facts(pairs: dict[str, object]) -> Markup:
    """Names and values side by side."""
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs.items()]
    return tag("dl", *items, class_="facts")


def command(*words: object) -> Markup:
    """A command to copy, its words quoted where a shell needs it."""
    line = shlex.join(map(str, words))
    return tag("pre", tag("code", line), class_="command", tabindex=0)


STATES = {
    "held": ("✓", "good"), "holds": ("✓", "good"), "broken": ("✕", "bad"), "refused": ("·", "dim"),
    "not checked": ("·", "dim"), "not offered": ("·", "dim"), "did not run": ("·", "dim"),
}  # fmt: skip
"""A sign for each state, so that none is told by colour alone."""


def state(name: str) -> Markup:
    """A state with its sign."""
    sign, class_ = STATES[name]
    return tag("span", f"{sign} {name}", class_=f"state {class_}")


def _asset(name: str) -> str:
    return files("ddtree.pictures.pages").joinpath(name).read_text(encoding="utf-8")


def _hash_of(code: str) -> str:
    return f"'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'"


HATCHING = tag(
    "svg",
    tag(
        "pattern",
        tag("path", d="M-1 5 L5 -1 M3 9 L9 3", class_="hatching"),
        id="hatched",
        width=8,
        height=8,
        patternUnits="userSpaceOnUse",
    ),
    width=0,
    height=0,
    class_="defs",
    aria_hidden="true",
)
"""What pictures fill padding with."""

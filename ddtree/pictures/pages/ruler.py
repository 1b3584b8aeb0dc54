"""The indptrs as rulers: above where each request's segment should be, below where it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.sizes import Sizes
from ddtree.pictures.pages.markup import Markup, counted, join, table, tag
from ddtree.pictures.pages.page import folded

MOST_LISTED = 64
"""Requests that the table of a ruler lists."""
NEAR = 0.12
"""Share of the width that a number needs."""
UPPER, LOWER, BAR, HEIGHT = 18, 64, 24, 106
"""Tops of the two bars and their height, in pixels, and that of the whole."""


@dataclass(frozen=True)
class Ruler:
    """One indptr of a call."""

    name: str
    formula: str
    right: list[int] | None
    """``[B+1]`` where segments should begin and end; None where the call does not say."""
    found: list[int]
    """As the call has them."""
    held: tuple[str, int] | None = None
    """What the segments lie in, and how many entries it holds."""

    @property
    def wrong(self) -> list[int]:
        """Requests whose segment is not where it should be."""
        if self.right is None:
            return []
        pairs = zip(_segments(self.right), self._padded(), strict=True)
        return [b for b, (right, found) in enumerate(pairs) if right != found]

    @property
    def past(self) -> bool:
        """Whether the segments end past what holds them."""
        return self.held is not None and self.found[-1] > self.held[1]

    def _padded(self) -> list[tuple[int, int] | None]:
        """The segments that are there, None for the others."""
        count = len(self.right or self.found) - 1
        own: list[tuple[int, int] | None] = list(_segments(self.found))
        return (own + [None] * count)[:count]


def rulers(call: Call, sizes: Sizes) -> Iterator[Ruler]:
    """The rulers of the indptrs that a call holds."""
    q_lens, prefix_lens, mask_lens = sizes.q_lens, sizes.prefix_lens, sizes.mask_lens

    def of(indptr: Tensor) -> list[int]:
        values: list[int] = indptr.long().tolist()
        return values[: sizes.batch + 1]  # fixed buffers repeat the last one

    if call.qo_indptr is not None:
        rows = None if call.num_rows is None else ("the query tensor", call.num_rows)
        right = None if q_lens is None else sizes.row_starts
        yield Ruler(
            "qo_indptr", "q_len query rows of each request", right, of(call.qo_indptr), rows
        )
    if call.kv_indptr is not None:
        right = None if prefix_lens is None else list(accumulate(prefix_lens, initial=0))
        held = None if call.kv_indices is None else ("kv_indices", call.kv_indices.numel())
        name = "prefix_len entries of each request"
        yield Ruler("kv_indptr", name, right, of(call.kv_indptr), held)
    if call.mask_indptr is not None:
        right = None if mask_lens is None else sizes.mask_starts
        held = None if call.custom_mask is None else ("custom_mask", call.custom_mask.numel())
        name = "q_len * (prefix_len + q_len) mask entries of each request"
        yield Ruler("mask_indptr", name, right, of(call.mask_indptr), held)


def ruler_picture(ruler: Ruler) -> Markup:
    """One ruler with its numbers; as wide as there is room."""
    wrong = set(ruler.wrong)
    most = max(1, *(ruler.right or [0]), *ruler.found, ruler.held[1] if ruler.held else 0)
    verdict = _verdict(ruler, wrong)
    is_wrong = bool(wrong) or ruler.past
    mark = "✕ " if is_wrong else "✓ " if ruler.right else "· "
    sign = tag("span", mark, class_="bad" if is_wrong else "good")
    parts: list[Markup] = []
    if ruler.right is not None:
        parts += _bar(_segments(ruler.right), most, UPPER, set(), "right")
        parts += _numbers(ruler.right, most, UPPER - 6)
        for should, found in zip(ruler.right, ruler.found, strict=False):
            class_ = "lead" if should == found else "lead wrong"
            ends = {"x1": _at(should, most), "x2": _at(found, most)}
            parts.append(tag("line", y1=UPPER + BAR, y2=LOWER, class_=class_, **ends))
    parts += _bar(_segments(ruler.found), most, LOWER, wrong, "found")
    parts += _numbers(ruler.found, most, LOWER + BAR + 14)
    if ruler.held is not None:
        width = _at(ruler.held[1], most)
        class_ = "held wrong" if ruler.past else "held"
        parts.append(tag("rect", x=0, y=LOWER + BAR + 2, width=width, height=3, class_=class_))
    label = f"{ruler.name}: {verdict}"
    drawn = tag(
        "svg", *parts, class_="ruler", width="100%", height=HEIGHT, role="img", aria_label=label
    )
    sides = tag(
        "div",
        tag("span", "should", style=f"top:{UPPER + 4}px") if ruler.right is not None else None,
        tag("span", "is", style=f"top:{LOWER + 4}px"),
        class_="sides",
        aria_hidden="true",
    )
    held = (
        f" The line below the lower bar is {ruler.held[0]}: {ruler.held[1]:,} entries."
        if ruler.held
        else ""
    )
    return tag(
        "figure",
        tag(
            "figcaption",
            sign,
            tag("code", ruler.name),
            f": {verdict}. Should hold: {ruler.formula}.{held}",
        ),
        tag("div", sides, drawn, class_="rule"),
        folded("the numbers", _listed(ruler, wrong), open_=bool(wrong) and len(ruler.found) <= 9),
        data_ruler=ruler.name,
    )


def _verdict(ruler: Ruler, wrong: set[int]) -> str:
    if ruler.right is None:
        return "the call does not say where its segments should be"
    if ruler.held is not None and ruler.past:
        end, (holder, size) = ruler.found[-1], ruler.held
        return f"the segments end at {end:,}, past the {size:,} entries of {holder}"
    if not wrong:
        return "every segment is where it should be"
    if len(ruler.right) == 2:
        return "the segment is not where it should be"
    return f"{len(wrong)} of {len(ruler.right) - 1} segments not where they should be"


def _segments(indptr: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(indptr))


def _at(value: float, most: int) -> str:
    """A place on the ruler; what lies before its start or past its end is at the edge."""
    return f"{100 * min(max(value / most, 0), 1):.2f}%"


def _bar(
    segments: Sequence[tuple[int, int]], most: int, top: int, wrong: set[int], kind: str
) -> Iterator[Markup]:
    for b, (start, end) in enumerate(segments):
        share = (min(end, most) - max(start, 0)) / most
        is_wrong = b in wrong
        class_ = f"segment {kind} {'odd' if b % 2 else 'even'}{' wrong' if is_wrong else ''}"
        yield tag(
            "rect",
            x=_at(start, most),
            y=top,
            width=f"{max(100 * share, 0):.2f}%",
            height=BAR,
            class_=class_,
            data_request=b,
            data_start=start,
            data_end=end,
        )
        if share > 0.07:
            name = f"{'✕ ' if is_wrong else ''}{'request ' if share > 0.3 else ''}{b}"
            middle = _at((start + end) / 2, most)
            yield tag("text", name, x=middle, y=top + 16, text_anchor="middle", class_="request")


def _numbers(indptr: Sequence[int], most: int, y: int) -> Iterator[Markup]:
    """Numbers at the boundaries, as many as have room; the last always."""
    last = min(max(indptr[-1] / most, 0), 1)
    end = -1.0
    for value in indptr[:-1]:
        place = min(max(value / most, 0), 1)
        if place < end + NEAR or place > last - NEAR:
            continue
        end = place
        anchor = "start" if place < 0.05 else "middle"
        yield tag("text", f"{value:,}", x=_at(value, most), y=y, text_anchor=anchor)
    anchor = "end" if last > 0.95 else "middle" if last > 0.05 else "start"
    yield tag("text", f"{indptr[-1]:,}", x=_at(indptr[-1], most), y=y, text_anchor=anchor)


def _listed(ruler: Ruler, wrong: set[int]) -> Markup:
    rights = _segments(ruler.right) if ruler.right else []
    found = ruler._padded()  # noqa: SLF001 # of this module
    listed = [b for b in range(len(found)) if b in wrong or len(found) <= MOST_LISTED][:MOST_LISTED]
    rows = [
        (
            tag("td", f"{'✕ ' if b in wrong else ''}{b}", class_="bad" if b in wrong else None),
            _told(rights[b]) if rights else "not known",
            _told(found[b]),
        )
        for b in listed
    ]
    left = len(found) - len(listed)
    rest = tag("p", f"{counted(left, 'request')} not listed.", class_="note") if left else None
    return join([table(("request", "should be", "is"), rows, "numbers"), rest])


def _told(segment: tuple[int, int] | None) -> str:
    if segment is None:
        return "not there"
    return (
        f"{segment[0]:,} to {segment[1]:,} ({counted(segment[1] - segment[0], 'entry', 'entries')})"
    )

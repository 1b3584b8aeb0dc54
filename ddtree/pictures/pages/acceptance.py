"""Acceptance by depth: how often each depth was drafted along the accepted path, and how often accepted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddtree.pictures.pages.markup import Markup, table, tag
from ddtree.pictures.view import TreeView


@dataclass(frozen=True)
class Depth:
    """One depth over all rounds."""

    depth: int
    rounds: int
    """All rounds."""
    reached: int
    """Rounds whose accepted path came to the depth before."""
    drafted: int
    """Of those, rounds whose tree had a child there to be accepted."""
    accepted: int
    """Of those, rounds that accepted one."""


def by_depth(rounds: Iterable[TreeView]) -> list[Depth]:
    """Count all depths that any of the trees has, from 1 on: the root is the round's own."""
    views = list(rounds)
    deepest = max((max(view.depths, default=0) for view in views), default=0)
    found = []
    for depth in range(1, deepest + 1):
        ends = [view for view in views if len(view.accepted) >= depth]
        drafted = [view for view in ends if view.children()[view.accepted[depth - 1]]]
        accepted = [view for view in ends if len(view.accepted) > depth]
        found.append(Depth(depth, len(views), len(ends), len(drafted), len(accepted)))
    return found


def acceptance_picture(depths: Sequence[Depth]) -> Markup:
    """A bar for each depth: how many rounds accepted it, of how many that drafted it."""
    rows = [
        (
            str(one.depth),
            tag("td", _bar(one), class_="bar"),
            f"{one.accepted:,} of {one.rounds:,} ({_percent(one.accepted, one.rounds)})",
            f"{one.accepted:,} of {one.drafted:,} ({_percent(one.accepted, one.drafted)})"
            if one.drafted
            else "never drafted",
        )
        for one in depths
    ]
    head = ("depth", "", "accepted, of all rounds", "accepted, of rounds that drafted it")
    return table(head, rows, "depths")


def _bar(one: Depth) -> Markup:
    """The share of all rounds that drafted the depth, and within it the share that accepted."""
    shares = [100 * count / max(one.rounds, 1) for count in (one.drafted, one.accepted)]
    return tag(
        "svg",
        tag("rect", y=1, width=f"{shares[0]:.2f}%", height=14, rx=2, class_="drafted"),
        tag("rect", y=1, width=f"{shares[1]:.2f}%", height=14, rx=2, class_="taken"),
        width="100%",
        height=16,
        role="img",
        aria_label=f"depth {one.depth}: {one.accepted} accepted of {one.drafted} drafted",
        data_depth=one.depth,
        data_drafted=one.drafted,
        data_accepted=one.accepted,
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f}%"

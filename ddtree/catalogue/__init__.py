"""The faults that real engines had, each rebuilt in its smallest numbers, with what must name it."""

from collections.abc import Iterator

from ddtree.catalogue.attention import ATTENTION_ROWS
from ddtree.catalogue.entry import (
    CallFault,
    Measured,
    Member,
    Names,
    Pair,
    Property,
    PropertyFault,
    Right,
    Row,
    in_buffers,
    named,
    shapes,
)
from ddtree.catalogue.masks import MASKS
from ddtree.catalogue.positions import POSITIONS
from ddtree.catalogue.sampling import SAMPLING
from ddtree.catalogue.slots import SLOTS
from ddtree.catalogue.text import TEXTS
from ddtree.catalogue.trees import TREES
from ddtree.catalogue.widths import WIDTHS

_ROWS = (*WIDTHS, *POSITIONS, *ATTENTION_ROWS, *MASKS, *SLOTS, *TREES, *SAMPLING, *TEXTS)
CATALOGUE: tuple[Row, ...] = tuple(sorted(_ROWS, key=lambda row: row.number))
"""By number."""


def pairs() -> Iterator[tuple[str, Pair]]:
    """Every sound call and its broken twin, eager and in fixed buffers, by the member's name."""
    for row in CATALOGUE:
        for i, member in enumerate(row.members):
            if isinstance(member, CallFault):
                for pair in member.pairs():
                    yield f"{row.number}{chr(ord('a') + i)} {pair.path}: {member.what}", pair


__all__ = [
    "CATALOGUE",
    "CallFault",
    "Measured",
    "Member",
    "Names",
    "Pair",
    "Property",
    "PropertyFault",
    "Right",
    "Row",
    "in_buffers",
    "named",
    "pairs",
    "shapes",
]

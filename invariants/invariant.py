"""One row of the table of invariants."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.sizes import Sizes
from ddtree.invariants.violation import Violation

Checker = Callable[[Call, Sizes], Iterator[Violation]]


@dataclass(frozen=True)
class Invariant:
    """A relation that holds in every right call."""

    id: str
    subject: str
    """The part of a call that it speaks of: call, tree, layout, mask, buffers, acceptance, commit."""
    statement: str
    """The relation in one sentence."""
    formula: str
    needs: tuple[str, ...]
    """Fields without which it is not checked; ``a|b``: either. ``q_len`` and ``prefix_len``: any field
    that tells them; ``captured``: fixed buffers."""
    check: Checker
    given: tuple[str, ...] = ()
    """Invariants without which it means nothing: it is not checked where one of them is broken."""
    unread: Callable[[Call, Sizes, str], str] | None = None
    """Given the invariant of lengths or shapes that is broken: why it was not checked for some request."""
    proofs: tuple[str, ...] = ()
    """Proofs (``ddtree prove``) that the reference's own formulas satisfy it for all sizes."""

    def missing(self, call: Call, sizes: Sizes) -> list[str]:
        """What the call lacks to check this."""
        return [
            need for need in self.needs if not any(_has(call, sizes, n) for n in need.split("|"))
        ]


def _has(call: Call, sizes: Sizes, name: str) -> bool:
    if name == "q_len":
        return sizes.q_lens is not None
    if name == "prefix_len":
        return sizes.prefix_lens is not None
    if name == "captured":
        return bool(call.is_captured)
    return getattr(call, name) is not None


def first_bad(bad: Tensor) -> Iterator[tuple[int, int]]:
    """(request, first bad column) of each row of ``bad [B, n]`` that has one."""
    for request in bad.any(dim=1).nonzero().flatten().tolist():
        yield request, int(bad[request].nonzero()[0])

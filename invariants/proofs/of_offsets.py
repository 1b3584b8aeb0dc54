"""Proofs of 32-bit offsets: what the guard lets through fits, and the exact sizes from which it refuses."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddtree.invariants.proofs import cases
from ddtree.invariants.proofs.integers import Scope, every
from ddtree.invariants.proofs.proof import Claim, Formulas, Goal, Proof, Twin

LARGEST = 2**31 - 1
"""The largest number in 32 bits with a sign, written out: the guard is held to it."""


def guard_is_exact(f: Formulas, s: Scope) -> Claim:
    """The guard lets through what 32 bits hold and nothing more."""
    (largest,) = s.naturals("largest")
    return Claim(
        given={},
        shows={"fits_int32(n) == (n <= 2147483647)": f.fits_int32(largest) == (largest <= LARGEST)},
    )


def guard_on_the_last_is_enough(f: Formulas, s: Scope) -> Claim:
    """If a table's last address fits, all its addresses do."""
    rows, row_stride, row, col = s.naturals("rows row_stride row col")
    last = f.row_offset(rows - 1, row_stride, row_stride - 1)
    at = f.row_offset(row, row_stride, col)
    return Claim(
        given={
            "the guard passed the last address": f.fits_int32(last),
            "the cell is the table's": every(row < rows, col < row_stride),
        },
        shows={"the address fits": at <= LARGEST},
        where={"address": at, "last address": last},
    )


def guard_on_the_mask_is_enough(f: Formulas, s: Scope) -> Claim:
    """If the last entry of a request's segment fits, all its addresses do."""
    start, prefix_len, q_len, row, col = s.naturals("start prefix_len q_len row col")
    end = start + f.mask_len(prefix_len, q_len)
    at = f.mask_offset(start, row, col, prefix_len, q_len)
    return Claim(
        given={
            "the guard passed the last address": f.fits_int32(end - 1),
            "(row, col) is a cell": every(row < q_len, col < f.kv_len(prefix_len, q_len)),
        },
        shows={"the address fits": at <= LARGEST},
        where={"address": at, "end of segment": end},
    )


def rows_overflow_from_here(f: Formulas, s: Scope) -> Claim:
    """For every stride: the guard refuses from ``2^31 // stride + 1`` rows on and not before."""
    rows, row_stride = s.naturals("rows row_stride")
    smallest = f.row_of(LARGEST + 1, row_stride) + 1
    last = f.row_offset(rows - 1, row_stride, row_stride - 1)
    return Claim(
        given={"a row holds an entry": row_stride >= 1, "there is a row": rows >= 1},
        shows={
            "refused == (rows >= 2^31 // stride + 1)": (~f.fits_int32(last)) == (rows >= smallest)
        },
        where={"last address": last, "smallest that is refused": smallest},
    )


@dataclass(frozen=True)
class Limit:
    """One 32-bit offset, and the smallest size at which it overflows."""

    offset: str
    count: str
    """What is counted."""
    largest: Callable[[Formulas, Any], Any]
    """The largest offset of a call of that count."""

    @property
    def smallest(self) -> int:
        """The smallest count that is refused."""
        f = Formulas()
        return bisect_left(
            range(LARGEST + 2), True, key=lambda n: not f.fits_int32(self.largest(f, n))
        )

    def goal(self) -> Goal:
        """What it says, for every count."""

        def overflows_from_here(f: Formulas, s: Scope) -> Claim:
            (count,) = s.naturals("count")
            largest = self.largest(f, count)
            return Claim(
                given={},
                shows={
                    f"{self.offset}: refused == ({self.count} >= {self.smallest})": (
                        ~f.fits_int32(largest)
                    )
                    == (count >= self.smallest)
                },
                where={"largest": largest},
            )

        overflows_from_here.__doc__ = (
            f"{self.offset}: refused from {self.smallest} {self.count} on and not before."
        )
        return overflows_from_here


def _table(what: str, count: str, row_stride: int) -> Limit:
    return Limit(
        f"{what}, stride {row_stride}",
        count,
        lambda f, n: f.row_offset(n - 1, row_stride, row_stride - 1),
    )


def _mask_of_one(prefix_len: int) -> Limit:
    return Limit(
        f"flat mask of one request, prefix {prefix_len}",
        "q_len",
        lambda f, q_len: f.mask_len(prefix_len, q_len) - 1,
    )


def _mask_of_many(prefix_len: int, budget: int) -> Limit:
    return Limit(
        f"flat mask, prefix {prefix_len}, budget {budget}",
        "requests",
        lambda f, n: n * f.mask_len(prefix_len, f.q_len_of(budget)) - 1,
    )


LIMITS = (
    _mask_of_one(0),
    _mask_of_one(4096),
    _mask_of_one(131072),
    _mask_of_many(4096, 16),
    _mask_of_many(4096, 64),
    _mask_of_many(131072, 512),
    _table("row * vocabulary", "rows", 151936),
    _table("row * query heads * head dim", "rows", 32 * 128),
    _table("slot * KV heads * head dim", "slots", 8 * 128),
    _table("slot * KV heads * head dim", "slots", 128),
    Limit("end of an int32 indptr", "entries", lambda f, n: n),
)
"""Offsets that engines hold in 32 bits, at sizes of today's models."""


INT32_OFFSETS = Proof(
    "int32_offsets",
    "What fits_int32 lets through fits in 32 bits, and it refuses from the smallest size that does not.",
    (
        guard_is_exact,
        guard_on_the_last_is_enough,
        guard_on_the_mask_is_enough,
        rows_overflow_from_here,
        *(limit.goal() for limit in LIMITS),
    ),
    (
        Twin(
            "one_too_many",
            "The guard lets 2^31 through.",
            {"fits_int32": lambda largest: largest <= 2**31},
            case=lambda n: cases.wide_table(n["largest"] + 1, 1),
        ),
        Twin(
            "without_a_sign",
            "The guard takes 32 bits without a sign.",
            {"fits_int32": lambda largest: largest < 2**32},
            case=lambda n: cases.wide_table(n["largest"] + 1, 1),
        ),
        Twin(
            "one_too_few",
            "The guard refuses the largest offset that fits.",
            {"fits_int32": lambda largest: largest < 2**31 - 1},
        ),
        Twin(
            "no_guard",
            "Offsets are computed in 32 bits whatever the sizes.",
            without="the guard passed the last address",
            case=lambda n: cases.wide_table(n["rows"], n["row_stride"]),
        ),
    ),
)

OF_OFFSETS = (INT32_OFFSETS,)

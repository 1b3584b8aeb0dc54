"""The checker: named invariants of a draft-tree verify pass, on captured calls and in debug mode."""

from ddtree.invariants.call import Call
from ddtree.invariants.capture import dump, load
from ddtree.invariants.checks import Report, check, report, violations
from ddtree.invariants.debug import debug, is_on
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.table import TABLE
from ddtree.invariants.violation import InvariantViolation, Violation

__all__ = [
    "TABLE",
    "Call",
    "Invariant",
    "InvariantViolation",
    "Report",
    "Violation",
    "check",
    "debug",
    "dump",
    "is_on",
    "load",
    "report",
    "violations",
]

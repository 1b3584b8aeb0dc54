"""The catalogue's sound calls, by the name that the tests of the invariants know them by."""

from ddtree.catalogue.calls import (
    VOCAB,
    captured,
    field,
    indptr,
    last_children,
    put,
    tables,
    trees,
    verify,
    whole_round,
)

__all__ = [
    "VOCAB",
    "captured",
    "field",
    "indptr",
    "last_children",
    "put",
    "tables",
    "trees",
    "verify",
    "whole_round",
]

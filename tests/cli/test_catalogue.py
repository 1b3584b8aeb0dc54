"""``ddtree catalogue``: every row caught, one row in full, and a fault that is not caught."""

import json
from dataclasses import replace

import pytest

import ddtree.catalogue as book
from ddtree.catalogue import CATALOGUE, CallFault, Names, Row
from ddtree.catalogue.positions import ROW_42
from tests.cli.conftest import Run


def test_every_fault_is_caught(run: Run) -> None:
    """All rows are listed with what caught them, and the exit code is 0."""
    result = run("catalogue", "--verbose")
    assert result.exit_code == 0, result.stdout
    count = sum(len(row.members) for row in CATALOGUE)
    *_, gaps, verdict = result.stdout.splitlines()
    assert gaps.endswith("no row is called 6, 8, 11, 13, 16, 20, 23, 26, 29, 31, 33, 36")
    assert verdict == f"34 rows, {count} faults with their kin, {count} caught"


def test_one_row_is_told_in_full(run: Run) -> None:
    """The founding bug: right and wrong numbers, and the violation with its hint."""
    told = run("catalogue", "1").stdout
    assert "mask_indptr[1] == 374" in told
    assert "mask_len is broken in request 0: expected 374, found 104" in told
    assert "hint: every segment fits width 8; this call's q_len is 17" in told
    assert "at:    VerifyBuffers.fill" in told


def test_json_holds_the_same(run: Run) -> None:
    """One object with every fault of the row."""
    (row,) = json.loads(run("catalogue", "21", "--json").stdout)["rows"]
    assert row["number"] == 21
    assert [fault["caught"] for fault in row["faults"]] == [True] * len(row["faults"])
    assert row["faults"][0]["found"] == [350, 630, 20]


def test_an_unknown_row_is_refused(run: Run) -> None:
    """The message lists the rows there are."""
    result = run("catalogue", "6")
    assert result.exit_code == 2
    assert "no row 6; it has 1, 2, 3" in result.stderr


def not_caught() -> Row:
    """A row whose numbers are not what the checker says."""
    first = ROW_42.members[0]
    assert isinstance(first, CallFault)
    wrong = replace(first, names=Names("positions", 0, 6, 8))
    return replace(ROW_42, members=(wrong,))


def test_a_fault_that_is_not_caught_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says so and the exit code is 1."""
    monkeypatch.setattr(book, "CATALOGUE", (not_caught(),))
    result = run("catalogue")
    assert result.exit_code == 1
    assert "0 caught" in result.stdout
    assert "NOT CAUGHT" in run("catalogue", "42").stdout

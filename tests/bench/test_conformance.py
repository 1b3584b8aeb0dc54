"""The page of what peers hold is that of its records, and tells a case that shrinking did not end with."""

import json
from typing import Any

import pytest

from bench.conformance import PAGE, RESULTS, page
from ddtree.pictures.pages.conformance import record_page
from tests.pictures.parsed import parsed


@pytest.fixture
def records() -> list[Any]:
    """As ``bench/conformance.py`` wrote them."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("conformance-*.json"))]


def test_the_page_is_that_of_the_records(records: list[Any]) -> None:
    """Made of them, never by hand."""
    assert page(records) == PAGE.read_text()


def test_a_case_that_is_not_the_smallest_is_not_called_so(records: list[Any]) -> None:
    """Where time was up before shrinking ended, on both pages."""

    def told(records: list[Any]) -> list[tuple[int, int]]:
        pages = page(records), "".join(parsed(record_page(record)[1]).text for record in records)
        return [
            (p.count("Smallest case: "), p.count("Smallest found (time was up): ")) for p in pages
        ]

    peers = [peer for record in records for peer in record["peers"].values()]
    broken = [p for peer in peers for p in peer.get("properties", ()) if p["state"] == "broken"]
    assert broken
    for was_cut, counts in ((False, (len(broken), 0)), (True, (0, len(broken)))):
        for prop in broken:
            prop["shrinking_was_cut"] = was_cut
        assert told(records) == [counts] * 2

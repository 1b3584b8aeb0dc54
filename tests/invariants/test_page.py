"""The page of the checker shows the table that is checked."""

from pathlib import Path

from ddtree.invariants.table import TABLE, as_markdown

PAGE = Path(__file__).parents[2] / "invariants" / "README.md"
START = "<!-- table: made by ddtree.invariants.table.as_markdown() -->\n"
END = "\n<!-- end of table -->"


def test_the_table_is_current() -> None:
    """The table on the page is the one that is checked; where it is not, this shows what belongs there."""
    shown = PAGE.read_text().split(START)[1].split(END)[0]
    assert shown == as_markdown()


def test_statements_are_one_sentence() -> None:
    """A statement is one sentence and has a formula."""
    for row in TABLE:
        assert row.statement.endswith(".") and ". " not in row.statement, row.id
        assert row.formula and row.needs, row.id

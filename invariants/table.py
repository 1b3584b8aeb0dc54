"""The table of invariants. Errors, reports and the page of this folder are made from it."""

from ddtree.invariants.acceptance import ACCEPTANCE
from ddtree.invariants.buffers import BUFFERS
from ddtree.invariants.commit import COMMIT
from ddtree.invariants.draft import DRAFT, DRAFTED_TREE
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.layout import LAYOUT
from ddtree.invariants.mask import MASK
from ddtree.invariants.tree import TREE
from ddtree.invariants.whole import WHOLE

TABLE: tuple[Invariant, ...] = (
    *WHOLE,
    *DRAFT,
    *TREE,
    *DRAFTED_TREE,
    *LAYOUT,
    *MASK,
    *BUFFERS,
    *ACCEPTANCE,
    *COMMIT,
)
"""In the order in which they are checked: a cause stands before what follows from it."""


def as_markdown() -> str:
    """The table as it stands in README.md."""
    lines = ["| invariant | of | says | formula | needs | proofs |", "|---|---|---|---|---|---|"]
    for row in TABLE:
        formula = row.formula.replace("|", "\\|")
        needs = ", ".join(f"`{need}`" for need in row.needs).replace("|", "` or `")
        proofs = ", ".join(f"`{name}`" for name in row.proofs)
        lines.append(
            f"| `{row.id}` | {row.subject} | {row.statement} | `{formula}` | {needs} | {proofs} |"
        )
    return "\n".join(lines)

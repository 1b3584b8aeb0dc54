"""Proofs of the index arithmetic for all sizes, over the very functions of ``ddtree.spec.index``.

Needs ``z3`` (the extra ``proofs``); nothing else of the checker imports this folder.
"""

from ddtree.invariants.proofs.of_mask import OF_MASK
from ddtree.invariants.proofs.of_offsets import LIMITS, OF_OFFSETS
from ddtree.invariants.proofs.of_rows import OF_ROWS
from ddtree.invariants.proofs.of_splits import OF_SPLITS
from ddtree.invariants.proofs.proof import Case, Counterexample, Outcome, Proof, Twin, prove

PROOFS: tuple[Proof, ...] = (*OF_MASK, *OF_SPLITS, *OF_ROWS, *OF_OFFSETS)
"""In the order of a round: the mask, the split prefix, rows and commits; then the sizes of offsets."""

__all__ = ["LIMITS", "PROOFS", "Case", "Counterexample", "Outcome", "Proof", "Twin", "prove"]

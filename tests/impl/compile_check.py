"""Compile every launch of the captured check for a GPU that is not there; print what it took as JSON.

A process of its own, since Triton's interpreter, once on, leaves nothing to compile.
Usage: ``python -m tests.impl.compile_check CAPABILITY BUDGET``.
"""

import json
import sys
from dataclasses import asdict, replace
from unittest.mock import patch

import torch

from ddtree.impl.check import CapturedCheck
from ddtree.invariants import Call
from tests.impl.launches import compiled_for
from tests.invariants.calls import captured, whole_round


def main() -> None:
    """Compile for the capability and the budget named on the command line."""
    capability, budget = map(int, sys.argv[1:])
    whole = whole_round(budget=budget)
    alone = replace(Call.of(captured(budget=budget)[1]), input_ids=None)  # no tree, no node counts
    drafted = replace(whole, draft_log_probs=torch.zeros(2, 2, 11))
    calls = (
        whole,
        alone,
        drafted,
        replace(whole, slot_table_after=None, num_nodes=None, target_ids=None),
    )
    with compiled_for(capability) as found, patch("ddtree.impl.op.IS_INTERPRETED", new=True):
        for call in calls:
            CapturedCheck(call, trap=True).launch()
    print(json.dumps([asdict(kernel) for kernel in found]))


if __name__ == "__main__":
    main()

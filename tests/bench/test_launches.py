"""How many operations of a device a round takes; a new one on the way has to be meant."""

import pytest

from bench.launches import count, rounds, table
from tests.impl.cases import DEVICE


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are counted in the interpreter")
def test_a_round_takes_no_more_launches_than_it_is_known_for() -> None:
    """Three layers and a drafter of one; the drafter's context and the record are not on the way."""
    layers, drafter_layers = 3, 1
    of = rounds(layers=layers, drafter_layers=drafter_layers, block=3, budget=2, batch=1)
    found = count(of)
    parts = {part: [0, 0] for part, _, _ in found}
    for (part, is_beside, _), times in found.items():
        parts[part][is_beside] += times
    assert parts == {
        "draft": [4 + 6 * drafter_layers, 0],  # plan, embedding, final norm, head
        "build": [3, 0],
        "plan": [1, 0],
        "mask": [1, 0],
        "verify": [2 + 10 * layers, 0],  # final norm, head; the first norm looks up
        "accept": [4, 0],
        "commit": [2, 0],
        "context": [0, 4],
        "record": [0, 3],
    }
    total = sum(times for times, _ in parts.values())
    assert f"all       {total:>10}  {7:>6}" in table(found)

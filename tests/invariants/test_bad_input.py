"""What the checker is given that is no call: an InputError that says what it is and what to give."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree.invariants import Call, check, dump, report, violations
from ddtree.spec import InputError
from tests.invariants.calls import verify

TREE, LAYOUT, MASK = verify([5], 3)
CALL = Call.of(TREE, LAYOUT, MASK)

CASES: dict[str, Callable[[], object]] = {
    "call is None; expected a Call": lambda: violations(None),  # type: ignore[arg-type]
    "call is a DraftTree; expected a Call": lambda: report(TREE),  # type: ignore[arg-type]
    "call is a VerifyLayout; expected a Call": lambda: check(call=LAYOUT),  # type: ignore[arg-type]
    "a Call is a captured call, no part of one": lambda: check(CALL),  # type: ignore[arg-type]
    "a Tensor is no part of a captured call": lambda: check(mask=MASK.allowed),  # type: ignore[arg-type]
    "budget is 'a'; expected an integer": lambda: check(budget="a"),
    "batch_size is -1; the least is 0": lambda: check(batch_size=-1, num_rows=3),
    "slot_stride is -1; the least is 1": lambda: check(slot_stride=-1, num_rows=3),
    "kv_pool_size is -5; the least is 0": lambda: check(kv_pool_size=-5, num_rows=3),
    "offset_bits is 7; expected 32 or 64": lambda: check(offset_bits=7, num_rows=3),
    "there is nothing to check": check,
}


@pytest.mark.parametrize("message", CASES)
def test_the_error_says_what_was_given(message: str) -> None:
    """The message says what came and what to give in its place."""
    with pytest.raises(InputError, match=message):
        CASES[message]()


def test_a_call_is_dumped_by_name(tmp_path: Path) -> None:
    """A call where a part belongs is refused, says how to give it, and nothing is written."""
    with pytest.raises(InputError, match=r"give it by name, call=\.\.\."):
        dump(tmp_path / "call.npz", CALL)
    assert list(tmp_path.iterdir()) == []

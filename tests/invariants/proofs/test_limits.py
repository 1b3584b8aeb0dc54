"""The guards of the code refuse from exactly the sizes that the proof names."""

from typing import Any

import pytest
import torch

from ddtree.invariants import Call, report
from ddtree.invariants.proofs import LIMITS
from ddtree.invariants.proofs.of_offsets import Limit
from ddtree.invariants.proofs.proof import Formulas
from ddtree.spec import InputError
from ddtree.spec.layout import _indptr


def test_smallest_sizes() -> None:
    """The sizes are those worked out by hand: 46341^2 and 14135 * 151936 are the first above 2^31."""
    smallest = {limit.offset: limit.smallest for limit in LIMITS}
    assert smallest["flat mask of one request, prefix 0"] == 46341
    assert 46340**2 <= 2**31 < 46341**2
    assert smallest["row * vocabulary, stride 151936"] == 14135
    assert 14134 * 151936 <= 2**31 < 14135 * 151936
    assert smallest["end of an int32 indptr"] == 2**31


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.offset)
def test_each_is_exact(limit: Limit) -> None:
    """One fewer ends at 2^31 - 1 or before it, the smallest itself beyond."""
    largest = [limit.largest(Formulas(), limit.smallest - less) for less in (1, 0)]
    assert largest[0] <= 2**31 - 1 < largest[1]


def test_indptr_refuses_from_there() -> None:
    """The layout's guard lets an indptr end at 2^31 - 1 and refuses one that ends at 2^31."""
    indptr = _indptr("kv_indptr", [2**31 - 2, 1], torch.int32, torch.device("cpu"))
    assert int(indptr[-1]) == 2**31 - 1
    with pytest.raises(InputError, match="would end at 2147483648"):
        _indptr("kv_indptr", [2**31 - 2, 2], torch.int32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("offset", "field"),
    [
        ("row * vocabulary, stride 151936", "vocab_size"),
        ("row * query heads * head dim, stride 4096", "slot_stride"),
        ("slot * KV heads * head dim, stride 1024", "slot_stride"),
    ],
)
def test_checker_refuses_from_there(offset: str, field: str) -> None:
    """The invariant of 32-bit offsets breaks at the smallest size and holds below it."""
    limit = next(limit for limit in LIMITS if limit.offset == offset)
    stride = int(offset.rsplit(" ", 1)[1])
    counted = "kv_pool_size" if limit.count == "slots" else "num_rows"
    for count, broken in ((limit.smallest - 1, False), (limit.smallest, True)):
        sizes: dict[str, Any] = {field: stride, counted: count, "offset_bits": 32}
        call = Call(qo_indptr=torch.tensor([0, 1]), **sizes)
        found = {violation.invariant for violation in report(call).broken} - {"rows", "qo_indptr"}
        assert found == ({"index_width"} if broken else set())

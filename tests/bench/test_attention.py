"""The correctness gate of the attention benchmark, on the CPU."""

import pytest
import torch

from bench.attention import CHECK_OPTIONS, CheckShape, check_one


@pytest.mark.parametrize("fp8", [False, True])
def test_the_check_compares_every_option(*, fp8: bool) -> None:
    """One shape goes through all options, log-sum-exp and repetition included, and agrees."""
    shape = CheckShape([5, 2], [20, 3], q_heads=2, kv_heads=1, head_dim=64, page_size=16)
    rows = check_one(torch.float32, shape, fp8=fp8, device="cpu")
    assert [row["option"] for row in rows] == [str(option) for option in CHECK_OPTIONS]
    assert [row for row in rows if not row["ok"]] == []

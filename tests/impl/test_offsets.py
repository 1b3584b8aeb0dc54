"""The attention launcher takes 64-bit offsets from the first pool that needs them."""

import pytest
import torch

from ddtree.impl.attention import _last_offset
from ddtree.spec.index import fits_int32


@pytest.mark.parametrize(("heads", "head_dim"), [(8, 128), (1, 128), (3, 96)])
def test_pool_size(heads: int, head_dim: int) -> None:
    """A pool of 2^31 // stride slots is addressed in 32 bits, one of a slot more is not."""
    most = 2**31 // (heads * head_dim)
    for slots, fits in ((most, True), (most + 1, False)):
        pool = torch.empty(slots, heads, head_dim, device="meta", dtype=torch.float16)
        assert fits_int32(_last_offset(pool)) is fits

"""The reference's exponential, logarithm and exact sums (``ddtree.spec.exact``), callable in kernels.

A kernel that calls them is launched with ``enable_fp_fusion=False``: a fused multiply-add would round
once where the reference rounds twice.
"""

import triton
import triton.language as tl

from ddtree.impl.index import on_device
from ddtree.spec import exact

exponential = on_device(exact.exponential)
log_1p = on_device(exact.log_1p)
split_steps = on_device(exact.split_steps)
weight_steps = on_device(exact.weight_steps)


@triton.jit
def bits_of(number):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """A float64's bits as an int64."""
    return number.to(tl.int64, bitcast=True)


@triton.jit
def float_of(bits):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The float64 of those bits."""
    return bits.to(tl.float64, bitcast=True)

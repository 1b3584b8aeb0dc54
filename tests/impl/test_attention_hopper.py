"""The kernel for Hopper GPUs against the reference in float64; it runs on such a GPU only."""

from typing import Any

import pytest
import torch

from ddtree import impl, spec
from ddtree.impl.attention import attend
from ddtree.impl.attention_configs import choose_config
from tests.impl.test_attention import TOLERANCE, Call, error, map_tensors

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9"),
]
CONFIG = {fp8: choose_config(torch.bfloat16, 128, 9, fp8=fp8) for fp8 in (False, True)}
"""As chosen, for pools of fp8 and for others."""


@pytest.mark.parametrize(
    ("q_lens", "prefixes"),
    [
        ([1], [0]),
        ([2], [1]),
        ([16], [64]),
        ([17], [63]),
        ([31, 32, 33], [65, 0, 1]),
        ([65], [200]),
        ([1, 130, 7], [1500, 65, 4099]),
        ([257, 3], [129, 2048]),
        ([513], [700]),
        ([17] * 70, [37 * i % 301 for i in range(70)]),
    ],
)
@pytest.mark.parametrize("num_programs", [1, 3, 16, 132, 264])
@pytest.mark.parametrize("fp8", [False, True])
def test_sizes(q_lens: list[int], prefixes: list[int], num_programs: int, *, fp8: bool) -> None:
    """Every size beside a block's, a share's or a tile's agrees, however many programs share it."""
    call = Call(q_lens, prefixes, 4, torch.bfloat16, kv_heads=2, head_dim=128, padding=1, fp8=fp8)
    call.check(CONFIG[fp8], num_programs)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 5},
        {"window": 70},
        {"window": 900, "softcap": 2.0, "sinks": 1},
        {"window": 40, "softcap": 2.0, "sinks": 1, "scale": -0.3},
    ],
)
@pytest.mark.parametrize("fp8", [False, True])
def test_options(head_dim: int, options: dict[str, Any], *, fp8: bool) -> None:
    """Window by depth, softcap, sinks and scale, split and unsplit, in fp16."""
    call = Call(
        [65, 17, 5], [1000, 130, 64], 3, torch.float16, kv_heads=2, head_dim=head_dim, fp8=fp8
    )
    if "sinks" in options:
        options = {**options, "sinks": torch.linspace(-3, 8, 6, device="cuda")}
    for num_programs in (2, 132):
        call.check(CONFIG[fp8], num_programs, **options)


@pytest.mark.parametrize("is_deep", [False, True])
@pytest.mark.parametrize("num_programs", [1, 2, 3, 16, 132, 264])
@pytest.mark.parametrize("pool", ["plain", "scaled", "fp8"])
def test_windows(pool: str, num_programs: int, *, is_deep: bool) -> None:
    """Windows that cut the prefix beside a block's end, or all of it, agree, whatever units the pool has."""
    q_lens, prefixes = [65, 5, 17, 3, 90, 7, 1], [0, 63, 64, 65, 128, 1000, 134]
    call = Call(
        q_lens, prefixes, 3, torch.float16, kv_heads=2, head_dim=128, fp8=pool == "fp8", is_deep=is_deep
    )  # fmt: skip
    scales = {"key_scale": 0.3, "value_scale": torch.tensor([0.02, 7.0], device="cuda")}
    for window in (1, 2, 3, 64, 70):
        call.check(
            CONFIG[pool == "fp8"],
            num_programs,
            window=window,
            **(scales if pool == "scaled" else {}),
        )


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("num_programs", [1, 132])
@pytest.mark.parametrize(
    "scales",
    [{}, {"key_scale": 0.3}, {"value_scale": torch.tensor([0.02, 7.0])}, {"key_scale": 0.0}],
)
def test_scales_of_pools(scales: dict[str, Any], num_programs: int, *, fp8: bool) -> None:
    """A factor for all heads or for each, of keys or values alone, of any pool; without one too."""
    call = Call([65, 17], [1000, 64], 4, torch.bfloat16, kv_heads=2, head_dim=128, fp8=fp8)
    given = {
        name: scale.cuda() if isinstance(scale, torch.Tensor) else scale
        for name, scale in scales.items()
    }
    call.check(CONFIG[fp8], num_programs, **({"key_scale": None, "value_scale": None} | given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_fp8_number(dtype: torch.dtype) -> None:
    """Each of the 254 finite numbers of e4m3 arrives exactly: one entry seen, its value the output."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()]
    for start in (0, 126):
        call = Call([1], [1], 1, dtype, head_dim=128, fp8=True)
        query, key, value, key_pool, value_pool = call.tensors
        value.zero_()
        key.zero_()
        query.zero_()
        key_pool.zero_()
        value_pool[call.layout.kv_indices, 0] = numbers[start : start + 128].cuda()
        output, _ = attend(
            *call.tensors, call.layout, call.mask.words, scale=1.0, softcap=None, sinks=None, window=None,
            return_lse=False, config=CONFIG[True], num_programs=1,
        )  # fmt: skip
        assert torch.equal(output[0, 0] * 2, numbers[start : start + 128].to(dtype).cuda())


@pytest.mark.parametrize("fp8", [False, True])
def test_any_bits(*, fp8: bool) -> None:
    """The kernel reads the bits it is given: rows that see later nodes, or nothing, included."""
    call = Call([130], [0], 1, torch.bfloat16, head_dim=128, fp8=fp8)
    words = torch.zeros(130, 5, dtype=torch.int32, device="cuda")
    words[0, 4] = 0b10  # row 0 sees node 129
    words[5, 0] = -1  # row 5 sees nodes 0 to 31
    call.mask = spec.BitMask(words)
    call.check(CONFIG[fp8], 1)
    call.check(CONFIG[fp8], 132)


@pytest.mark.parametrize("fp8", [False, True])
def test_same_bits_in_every_run(*, fp8: bool) -> None:
    """Fifty runs of one call give the same bits."""
    call = Call([257, 65], [5000, 700], 4, torch.bfloat16, kv_heads=2, head_dim=128, fp8=fp8)
    first, _ = impl.verify_attention(*call.tensors, call.layout, call.mask)
    for _ in range(50):
        again, _ = impl.verify_attention(*call.tensors, call.layout, call.mask)
        assert torch.equal(first, again)


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_that_are_not_aligned(*, fp8: bool) -> None:
    """Tensors whose rows 16-byte copies cannot read go to the general kernel, and agree."""
    call = Call([17], [200], 4, torch.bfloat16, kv_heads=2, head_dim=128, fp8=fp8)

    def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(*tensor.shape[:2], 129, device="cuda").to(tensor.dtype)
        wide[..., :128] = tensor
        return wide[..., :128]

    expected, _ = spec.verify_attention(
        *call.tensors, call.layout, call.mask, compute_dtype=torch.float64
    )
    tensors = map_tensors(with_gaps, call.tensors)
    found, _ = impl.verify_attention(*tensors, call.layout, call.mask)
    assert error(found, expected) <= TOLERANCE[torch.bfloat16]

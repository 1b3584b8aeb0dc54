"""``impl.verify_attention`` against the reference in float64, over awkward sizes, on this machine's kernels.

On the CPU the kernels run in Triton's interpreter, in a process of their own with ``TRITON_INTERPRET=1``
(see ``conftest.py``). bf16 is tested on a GPU only: the interpreter multiplies it wrongly. Pools of fp8 are
read there by moving bits, as on an A100, and by Triton's own conversion on newer GPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree import impl, spec
from ddtree.impl.attention import (
    _capability,
    _converts_fp8,
    _is_aligned,
    _num_sms,
    attend,
    block_attention,
)
from ddtree.impl.attention_configs import (
    AttentionConfig,
    HopperConfig,
    choose_config,
    merge_splits,
)
from ddtree.invariants.streams import capturing
from ddtree.spec.mask import Form
from tests.impl.cases import FORMS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative error norms. Sums are float32: 2^-24 a step. The softmax's weights and the result are rounded
# to the dtype: half a unit of the last place is 2^-11 in fp16 and 2^-8 in bf16, and less on average.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
POOL_SCALE = 0.02
"""Of fp8 pools: their numbers reach from the smallest, 2^-9, to half the largest, 448."""
SMALL = AttentionConfig(16, 32, num_stages=2)
LARGE = AttentionConfig(32, 64)


Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""query, key, value, key_pool, value_pool"""


class Call:
    """Random tensors of one call; pool slots that no entry uses hold NaN."""

    def __init__(
        self,
        q_lens: list[int],
        prefixes: list[int],
        group: int,
        dtype: torch.dtype = torch.float32,
        kv_heads: int = 1,
        head_dim: int = 64,
        page_size: int = 1,
        padding: int = 0,
        fp8: bool = False,
        is_deep: bool = False,
    ) -> None:
        """Trees with random parents, in deep ones among the two nodes before; the last ``padding`` rows of
        each request are padding."""
        draw = torch.Generator().manual_seed(sum(q_lens) + 7 * group)
        batch, rows = len(q_lens), max(q_lens)
        num_nodes = torch.tensor([max(1, q - padding) for q in q_lens], dtype=torch.int32)
        parents = torch.full((batch, rows), -1, dtype=torch.int32)
        depths = torch.zeros(batch, rows, dtype=torch.int32)
        for b in range(batch):
            for node in range(1, int(num_nodes[b])):
                least = max(node - 2, 0) if is_deep else 0
                parents[b, node] = parent = int(torch.randint(least, node, (1,), generator=draw))
                depths[b, node] = depths[b, parent] + 1
        tokens = torch.zeros(batch, rows, dtype=torch.int64)
        tree = spec.DraftTree(tokens, parents, depths, torch.zeros(batch, rows).double(), num_nodes)
        context = -(-(max(prefixes) + rows) // page_size) * page_size
        pages = torch.randperm(batch * context // page_size + 1, generator=draw)[:-1]
        table = (pages[:, None] * page_size + torch.arange(page_size)).reshape(batch, context)
        layout = spec.plan_verify(tree, torch.tensor(prefixes), table, torch.tensor(q_lens))
        mask = spec.tree_mask(tree, layout, "bits")

        def random(count: int, heads: int) -> Tensor:
            return torch.randn(count, heads, head_dim, generator=draw).to(DEVICE, dtype)

        def pool() -> Tensor:
            tensor = torch.full(
                ((batch * context // page_size + 1) * page_size, kv_heads, head_dim), torch.nan
            ).to(DEVICE, dtype)
            used = layout.kv_indices
            tensor[used.to(DEVICE)] = random(used.numel(), kv_heads)
            return (tensor / POOL_SCALE).to(torch.float8_e4m3fn) if fp8 else tensor

        total = sum(q_lens)
        on_device: dict[str, Any] = {
            name: value.to(DEVICE)
            for name, value in vars(layout).items()
            if isinstance(value, Tensor)
        }
        self.layout = replace(layout, **on_device)
        self.mask = spec.BitMask(mask.words.to(DEVICE))
        self.tensors: Tensors = (
            random(total, kv_heads * group),
            random(total, kv_heads),
            random(total, kv_heads),
            pool(),
            pool(),
        )

    def check(self, config: AttentionConfig, num_programs: int, **options: Any) -> None:
        """Both results agree with the reference's; what is left unwritten would be NaN."""
        query = self.tensors[0]
        if self.tensors[3].dtype is torch.float8_e4m3fn:
            options = {"key_scale": POOL_SCALE, "value_scale": POOL_SCALE, **options}
        expected, expected_lse = spec.verify_attention(
            *self.tensors,
            self.layout,
            self.mask,
            return_lse=True,
            compute_dtype=torch.float64,
            **options,
        )
        defaults = {
            "softcap": None,
            "sinks": None,
            "window": None,
            "scale": query.shape[2] ** -0.5,
            **options,
        }
        with poisoned_memory():
            found, found_lse = attend(
                *self.tensors,
                self.layout,
                self.mask.words,
                return_lse=True,
                config=config,
                num_programs=num_programs,
                **defaults,
            )
        assert found_lse is not None and expected_lse is not None
        assert found.dtype == query.dtype
        assert error(found, expected) <= TOLERANCE[query.dtype]
        assert error(found_lse, expected_lse) <= TOLERANCE[torch.float32]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error norm; places where both are -inf agree."""
    same = found.double() == expected.double()
    difference = torch.where(same, 0.0, found.double() - expected.double())
    return float(difference.norm() / expected.double().nan_to_num(neginf=0.0).norm())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let ``torch.empty`` give NaN, so that an element never written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_len", "prefix", "group", "config", "num_programs"),
    [
        (1, 0, 1, SMALL, 1),
        (1, 65, 8, SMALL, 5),
        (2, 1, 3, SMALL, 2),
        (7, 63, 2, SMALL, 5),
        (17, 64, 4, LARGE, 2),
        (17, 200, 4, LARGE, 16),
        (33, 65, 3, LARGE, 5),
        (65, 200, 1, LARGE, 16),
        (130, 63, 2, LARGE, 16),
    ],
)
def test_sizes(
    dtype: torch.dtype,
    q_len: int,
    prefix: int,
    group: int,
    config: AttentionConfig,
    num_programs: int,
) -> None:
    """Every size beside a block's or a tile's agrees, however many programs share it."""
    Call([q_len], [prefix], group, dtype).check(config, num_programs)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 16])
def test_ragged(num_programs: int) -> None:
    """Requests of different widths and prefixes, and padding rows, agree in one launch."""
    Call([7, 33, 1], [65, 0, 130], 2, kv_heads=2, padding=2).check(SMALL, num_programs)


@pytest.mark.parametrize("config", [SMALL, LARGE])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 5},
        {"window": 70},
        {"softcap": 3.0},
        {"sinks": 0},
        {"scale": -0.3},
        {"scale": 0.0},
        {"window": 9, "softcap": 2.0, "sinks": 1},
    ],
)
def test_options(config: AttentionConfig, options: dict[str, Any]) -> None:
    """Window by depth, softcap, sinks and scale, alone and together, split and unsplit."""
    call = Call([17, 5], [130, 64], 4)
    if "sinks" in options:
        options = {**options, "sinks": torch.linspace(-3, 8, 4, device=DEVICE)}
    call.check(config, 5, **options)


@pytest.mark.parametrize(("head_dim", "page_size"), [(96, 16), (128, 64), (256, 1)])
def test_head_dims_and_pages(head_dim: int, page_size: int) -> None:
    """All head dims and page sizes agree."""
    Call([9], [70], 2, head_dim=head_dim, page_size=page_size).check(SMALL, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_len", "prefix", "group", "config", "num_programs"),
    [
        (1, 0, 1, SMALL, 1),
        (7, 63, 2, SMALL, 5),
        (17, 64, 4, LARGE, 2),
        (33, 165, 3, LARGE, 5),
    ],
)
def test_fp8_sizes(
    dtype: torch.dtype,
    q_len: int,
    prefix: int,
    group: int,
    config: AttentionConfig,
    num_programs: int,
) -> None:
    """Pools of fp8 agree at sizes beside a block's or a tile's, whatever span ends in the prefix."""
    Call([q_len], [prefix], group, dtype, fp8=True).check(config, num_programs)


@pytest.mark.parametrize("num_programs", [1, 5])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 1}, {"window": 70}, {"window": 9, "softcap": 2.0}, {"scale": -0.3}],
)
@pytest.mark.parametrize("fp8", [False, True])
def test_pool_scales(fp8: bool, options: dict[str, Any], num_programs: int) -> None:
    """Scales of the pool, one for all or for each KV head, hold for the prefix and not for the tree."""
    call = Call([17, 5], [130, 64], 2, kv_heads=2, fp8=fp8)
    unit = POOL_SCALE if fp8 else 1.0
    for key_scale, value_scale in (
        (torch.tensor([0.9, 1.2]) * unit, torch.tensor(0.7) * unit),
        (0.0, torch.tensor([1.3, 0.0]) * unit),
        (unit, None),
    ):
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        on_device = {n: s.to(DEVICE) if isinstance(s, Tensor) else s for n, s in scales.items()}
        call.check(SMALL, num_programs, **on_device, **options)


@pytest.mark.parametrize(("head_dim", "page_size"), [(96, 16), (128, 64), (256, 1)])
def test_fp8_head_dims_and_pages(head_dim: int, page_size: int) -> None:
    """All head dims and page sizes agree with pools of fp8, ragged and padded."""
    call = Call([9, 3], [70, 5], 2, head_dim=head_dim, page_size=page_size, padding=2, fp8=True)
    call.check(SMALL, 3)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fp8_number(
    dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 254 numbers of e4m3 are read exactly, subnormal ones too, by either conversion; NaN stays NaN."""
    if native and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no conversion of fp8")
    monkeypatch.setattr("ddtree.impl.attention._converts_fp8", lambda _: native)
    if not native:  # a GPU without the conversion takes the general kernel
        monkeypatch.setattr("ddtree.impl.attention._capability", lambda _: 0)
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    call = Call([1], [4], 1, dtype)
    query, key, value, _, _ = call.tensors
    pool = torch.zeros(8, 1, 64, device=DEVICE).to(torch.float8_e4m3fn)
    values = pool.clone()
    values.view(torch.uint8)[call.layout.kv_indices] = numbers.view(torch.uint8).reshape(4, 1, 64)
    call.mask = spec.BitMask(torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))
    seen, _ = impl.verify_attention(query * 0, key, value, pool, values, call.layout, call.mask)
    expected = numbers.reshape(4, 64).double().mean(0)  # weights of 1/4 are exact
    is_number = ~expected.isnan()
    assert torch.equal(seen[0, 0].double()[is_number], expected.to(dtype).double()[is_number])
    if not native or DEVICE == "cuda":  # the interpreter's conversion reads NaN as 480
        assert torch.equal(seen[0, 0].isnan(), ~is_number)


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_the_mask(form: Form) -> None:
    """Every form gives the very output of the bits."""
    call = Call([7, 33, 1], [65, 0, 130], 2, kv_heads=2, padding=2)
    mask = impl.convert_mask(call.mask, call.layout, form)
    expected, _ = impl.verify_attention(*call.tensors, call.layout, call.mask)
    found, _ = impl.verify_attention(*call.tensors, call.layout, mask)
    assert torch.equal(found, expected)


def test_a_mask_that_ends_early_hides_what_it_lacks() -> None:
    """Memory past the end of a mask is not read: a flat mask cut to its first rows shows those alone."""
    call = Call([3], [4], 1)
    flat = impl.convert_mask(call.mask, call.layout, "flat").allowed
    short = impl.convert_mask(spec.FlatMask(flat[: 2 * 7].clone()), call.layout, "bits")
    assert torch.equal(short.words[:2], call.mask.words[:2])
    assert not short.words[2:].any()


def test_tail_of_fixed_buffers_is_zero() -> None:
    """Rows past the call's last are 0, with log-sum-exp -inf, and unused requests do nothing."""
    call = Call([5, 3], [20, 40], 2)
    tail = 6
    query, key, value = (
        torch.cat([tensor, tensor.new_full((tail, *tensor.shape[1:]), torch.nan)])
        for tensor in call.tensors[:3]
    )
    call.tensors = query, key, value, *call.tensors[3:]
    layout = call.layout
    call.layout = replace(
        layout,
        qo_indptr=torch.cat([layout.qo_indptr, layout.qo_indptr[-1:].expand(3)]),
        kv_indptr=torch.cat([layout.kv_indptr, layout.kv_indptr[-1:].expand(3)]),
        mask_indptr=torch.cat([layout.mask_indptr, layout.mask_indptr[-1:].expand(3)]),
        positions=torch.cat([layout.positions, layout.positions.new_zeros(tail)]),
        out_cache_loc=torch.cat([layout.out_cache_loc, layout.out_cache_loc.new_full((tail,), -1)]),
        is_captured=True,
    )
    call.mask = spec.BitMask(torch.cat([call.mask.words, call.mask.words.new_full((tail, 1), -1)]))
    call.check(SMALL, 4)
    output, _ = impl.verify_attention(*call.tensors, call.layout, call.mask)
    assert not output[-tail:].any()


def test_any_bits() -> None:
    """The kernel reads the bits it is given: rows that see later nodes, or nothing, included."""
    call = Call([40], [0], 1)
    words = torch.zeros(40, 2, dtype=torch.int32, device=DEVICE)
    words[0, 1] = 0b1000_0000  # row 0 sees node 39
    words[5, 0] = -1  # row 5 sees nodes 0 to 31
    call.mask = spec.BitMask(words)
    call.check(SMALL, 1)
    call.check(SMALL, 3)


def test_rows_of_a_block_see_one_another() -> None:
    """``block_attention`` agrees under bits that are no tree's: every row sees all of its request."""
    call = Call([5, 3], [20, 40], 2, kv_heads=2)
    words = torch.tensor([[0b11111]] * 5 + [[0b111]] * 3, dtype=torch.int32, device=DEVICE)
    expected, _ = spec.verify_attention(
        *call.tensors, call.layout, spec.BitMask(words), compute_dtype=torch.float64
    )
    found = block_attention(*call.tensors, call.layout, words)
    assert error(found, expected) <= TOLERANCE[torch.float32]


def test_the_stride_of_a_single_word_is_no_matter() -> None:
    """One word a row may lie in a column of others: nothing is read beside it."""
    call = Call([7], [4], 1)
    words = call.mask.words.repeat(1, 2).t().contiguous().t()[:, :1]
    assert words.stride() == (1, 7)
    expected, _ = impl.verify_attention(*call.tensors, call.layout, call.mask)
    found, _ = impl.verify_attention(*call.tensors, call.layout, spec.BitMask(words))
    assert torch.equal(found, expected)


@pytest.mark.long
@settings(max_examples=40)
@given(
    widths=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 300)), min_size=1, max_size=6),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    config=st.sampled_from([SMALL, LARGE]),
    num_programs=st.integers(1, 40),
    window=st.none() | st.integers(1, 350),
)
def test_any_sizes(
    widths: list[tuple[int, int]],
    group: int,
    kv_heads: int,
    config: AttentionConfig,
    num_programs: int,
    window: int | None,
) -> None:
    """Whatever the widths, prefixes, heads and programs are, the result agrees."""
    q_lens, prefixes = (list(sizes) for sizes in zip(*widths, strict=True))
    Call(q_lens, prefixes, group, kv_heads=kv_heads).check(config, num_programs, window=window)


def test_which_configuration_is_chosen() -> None:
    """The Hopper kernel where it was measured; elsewhere what fits registers and shared memory."""
    half, wide, tall = torch.bfloat16, AttentionConfig(64, 64), AttentionConfig(64, 64, 3, 1, 8)
    exact, narrow = AttentionConfig(16, 32, num_stages=2), AttentionConfig(64, 32, 3, 1, 8)
    for dtype, head_dim, capability, expected in [
        (half, 64, 9, HopperConfig()), (torch.float16, 128, 9, HopperConfig()),
        (half, 96, 9, wide), (half, 256, 9, tall), (torch.float32, 128, 9, exact),
        (half, 128, 8, wide), (half, 128, 10, wide), (half, 128, 0, wide),
        (half, 256, 8, narrow), (half, 256, 10, narrow), (torch.float32, 256, 0, exact),
    ]:  # fmt: skip
        assert choose_config(dtype, head_dim, capability) == expected, (dtype, head_dim, capability)
    assert choose_config(half, 128) == wide == AttentionConfig(64, 64, 3, 2, 4)
    assert HopperConfig() == HopperConfig(128, 64, 5, 1, 4, 3, 208, 88)
    assert [merge_splits(2, 3, n) for n in (95, 96, 97)] == [8, 16, 16]


def test_what_is_asked_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiprocessors, Triton's conversion of fp8 from 8.9 on, and the major number; a CPU has none of it."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    multiprocessors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: multiprocessors)
    for capability, converts in [((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, had=capability: had)
        asked = [ask.__wrapped__ for ask in (_num_sms, _converts_fp8, _capability)]
        assert [ask(gpu) for ask in asked] == [132, converts, capability[0]]
        assert [ask(cpu) for ask in asked] == [1, False, 0]


@pytest.mark.parametrize(
    ("offset", "row", "head", "expected"),
    [
        (0, 256, 64, True), (0, 80, 16, True), (4, 256, 64, True),
        (1, 256, 64, False), (0, 264, 64, False), (0, 256, 72, False),
    ],
)  # fmt: skip
def test_which_rows_are_aligned(offset: int, row: int, head: int, expected: bool) -> None:
    """From addresses of 16 bytes on, in steps of 16 numbers."""
    rows = torch.zeros(2048).as_strided((2, 2, 64), (row, head, 1), offset)
    assert _is_aligned(rows) is expected


@pytest.mark.parametrize("fp8", [False, True])
def test_what_a_call_is_launched_with(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of the device, of fp8 and of aligned rows, with programs for all multiprocessors."""
    launched: list[tuple[AttentionConfig, int]] = []

    def launch(query: Tensor, *_: Tensor, **options: Any) -> tuple[Tensor, None]:
        launched.append((options["config"], options["num_programs"]))
        return query, None

    monkeypatch.setattr("ddtree.impl.attention.attend", launch)
    monkeypatch.setattr("ddtree.impl.attention._capability", lambda _: 9)
    monkeypatch.setattr("ddtree.impl.attention._num_sms", lambda _: 7)
    call = Call([3], [4], 1, torch.float16, head_dim=128, fp8=fp8)
    names = ("query", "key", "value", "key_pool", "value_pool")
    given: dict[str, Any] = dict(zip(names, call.tensors, strict=True))
    given |= {"layout": call.layout, "mask": call.mask}
    impl.verify_attention(**given)
    assert launched == [(choose_config(torch.float16, 128, 9, fp8=fp8), 7)]
    for name in names[1:]:  # the query may lie anywhere
        rows = given[name]
        longer = rows.new_empty(rows.shape[0] + 1, *rows.shape[1:]).flatten()
        impl.verify_attention(**given | {name: longer[1:][: rows.numel()].view(rows.shape)})
        assert launched[-1] == (choose_config(torch.float16, 128), 14), name


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_configurations(
    dtype: torch.dtype, fp8: bool, head_dim: int, page_size: int
) -> None:
    """Every configuration that the public function chooses agrees on the GPU, ragged and padded."""
    call = Call(
        [65, 1, 33], [1000, 64, 0], 4, dtype, 2, head_dim, page_size, padding=3, fp8=fp8
    )  # fmt: skip
    config = choose_config(dtype, head_dim, torch.cuda.get_device_capability()[0], fp8=fp8)
    sinks = torch.linspace(-3, 8, 8, device=DEVICE)
    for options in ({}, {"window": 40}, {"window": 40, "softcap": 20.0, "sinks": sinks}):
        call.check(config, 264, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_captured_without_waiting(form: Form) -> None:
    """With scales on the device and a mask of any form a call never waits, and a replay repeats it."""
    call = Call([33, 17], [300, 64], 2, torch.bfloat16, kv_heads=2, fp8=True)
    mask = impl.convert_mask(call.mask, call.layout, form)
    scales: dict[str, Any] = {
        "key_scale": torch.tensor([0.02, 0.03], device=DEVICE),
        "value_scale": torch.tensor(0.02, device=DEVICE),
    }
    expected, _ = spec.verify_attention(*call.tensors, call.layout, call.mask, **scales)
    impl.verify_attention(*call.tensors, call.layout, mask, **scales)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        impl.verify_attention(*call.tensors, call.layout, mask, **scales)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with capturing() as graph:
        output, _ = impl.verify_attention(*call.tensors, call.layout, mask, **scales)
    output.zero_()
    graph.replay()
    assert error(output, expected) <= TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_in_fixed_buffers(dtype: torch.dtype) -> None:
    """A captured launch is right for a later call of other widths and prefixes in the same buffers."""
    first, later = Call([33, 17], [300, 64], 2, dtype), Call([5, 33], [90, 200], 2, dtype)
    rows, entries = 50, 364
    slots = max(call.tensors[3].shape[0] for call in (first, later))
    query, key, value = (pad_rows(tensor, rows) for tensor in first.tensors[:3])
    key_pool, value_pool = (pad_rows(pool, slots) for pool in first.tensors[3:])
    tensors: Tensors = query, key, value, key_pool, value_pool
    layout = replace(
        first.layout,
        kv_indices=pad_rows(first.layout.kv_indices, entries),
        positions=pad_rows(first.layout.positions, rows),
        is_captured=True,
    )
    mask = spec.BitMask(pad_rows(first.mask.words, rows))
    impl.verify_attention(*tensors, layout, mask)  # compiles
    with capturing() as graph:
        output, _ = impl.verify_attention(*tensors, layout, mask)
    for call in (first, later):
        for buffer, tensor in zip(tensors, call.tensors, strict=True):
            buffer[: tensor.shape[0]] = tensor
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "positions"):
            new = getattr(call.layout, name)
            getattr(layout, name)[: new.shape[0]] = new
        mask.words[: call.mask.words.shape[0]] = call.mask.words
        graph.replay()
        expected, _ = spec.verify_attention(
            *call.tensors, call.layout, call.mask, compute_dtype=torch.float64
        )
        used = expected.shape[0]
        assert error(output[:used], expected) <= TOLERANCE[dtype]
        assert not output[used:].any()


def map_tensors(function: Callable[[Tensor], Tensor], tensors: Tensors) -> Tensors:
    """Apply a function to each of the five."""
    query, key, value, key_pool, value_pool = map(function, tensors)
    return query, key, value, key_pool, value_pool


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """A copy with zero rows behind."""
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def test_same_bits_twice() -> None:
    """Two runs of one call give the same bits."""
    call = Call([33], [200], 2, torch.float16)
    first, second = (
        impl.verify_attention(*call.tensors, call.layout, call.mask)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_wrong_width_garbles() -> None:
    """The kernel reads the call's widths: a layout with another prefix really gives another result."""
    call = Call([17], [64], 1)
    right, _ = impl.verify_attention(*call.tensors, call.layout, call.mask)
    call.layout = replace(
        call.layout, kv_indptr=call.layout.kv_indptr - call.layout.kv_indptr.sign() * 9
    )
    wrong, _ = impl.verify_attention(*call.tensors, call.layout, call.mask)
    assert error(wrong, right) > 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(9, dtype=torch.bool)}, "mask is a Tensor.*expected FlatMask"),
        (
            {"mask": spec.BitMask(torch.zeros(3, 0, dtype=torch.int32, device=DEVICE))},
            "0 words a row; max_q_len 3 needs 1",
        ),
        ({"window": 0}, "window is 0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"key_scale": -0.5}, "key_scale is -0.5; the least is 0"),
        ({"value_scale": float("inf")}, "value_scale is inf; expected a finite number"),
        ({"key_scale": torch.ones(2)}, r"key_scale has shape \[2\]; expected \[1\]"),
        ({"value_scale": torch.ones(1).double()}, "value_scale has dtype torch.float64"),
        ({"softcap": "3"}, "softcap is '3'; expected a finite number"),
        ({"scale": float("nan")}, "scale is nan; expected a finite number"),
        ({"compute_dtype": torch.float64}, "float64"),
        ({"sinks": torch.zeros(2)}, r"sinks has shape \[2\]; expected \[1\]"),
        (
            {"mask": spec.BitMask(torch.zeros(3, 1, dtype=torch.int64))},
            "int64; expected torch.int32",
        ),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    """What the kernel cannot do is refused with the numbers."""
    call = Call([3], [4], 1)
    options = {"mask": call.mask, **change}
    mask = options.pop("mask")
    with pytest.raises(spec.InputError, match=message):
        impl.verify_attention(*call.tensors, call.layout, mask, **options)


def test_refuses_what_it_cannot_read() -> None:
    """Head dims, dtypes and strides outside what the kernels read are refused with the numbers."""
    call = Call([3], [4], 1)
    query, key, value, key_pool, value_pool = call.tensors

    def attempt(q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
        impl.verify_attention(q, k, v, k_pool, v_pool, call.layout, call.mask)

    if DEVICE == "cpu":  # in the interpreter
        half = map_tensors(lambda tensor: tensor.bfloat16(), call.tensors)
        with pytest.raises(spec.InputError, match="interpreter multiplies bfloat16 wrongly"):
            attempt(*half)
    with pytest.raises(spec.InputError, match="head_dim is 32"):
        attempt(*map_tensors(lambda tensor: tensor[..., :32], call.tensors))
    with pytest.raises(spec.InputError, match=r"key is torch\.float16, query torch\.float32"):
        attempt(query, key.half(), value.half(), key_pool, value_pool)
    with pytest.raises(spec.InputError, match=r"query is torch\.float64"):
        attempt(*map_tensors(Tensor.double, call.tensors))
    rounded = [tensor.to(torch.float8_e4m3fn) for tensor in (key, key_pool)]
    with pytest.raises(spec.InputError, match=r"key has dtype torch\.float8_e4m3fn"):
        attempt(query, rounded[0], rounded[0], key_pool, value_pool)
    with pytest.raises(spec.InputError, match=r"value_pool torch\.float32; they must be equal"):
        attempt(query, key, value, rounded[1], value_pool)
    with pytest.raises(spec.InputError, match="a pool may also be float8_e4m3fn"):
        attempt(query, key, value, key_pool.half(), value_pool.half())
    strided = key_pool.new_zeros(*key_pool.shape[:2], 128)[..., ::2]
    with pytest.raises(spec.InputError, match="key_pool has stride 2"):
        attempt(query, key, value, strided, strided)
    with pytest.raises(spec.InputError, match="they must be equal"):
        attempt(query, key, torch.cat([value, value], 1)[:, :1], key_pool, value_pool)

"""Tree attention against plain causal attention of each node's own path, in float64 loops."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hs
from torch import Tensor

from ddtree.invariants import strategies as st
from ddtree.spec.attention import PoolScale, verify_attention
from ddtree.spec.contracts import VerifyLayout
from ddtree.spec.errors import InputError
from ddtree.spec.layout import plan_verify
from ddtree.spec.mask import Form, tree_mask
from tests import oracles
from tests.trees import tree_of

NAN = math.nan


class Tensors(NamedTuple):
    """Inputs of one attention call; pool slots that no prefix owns are NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_pool: Tensor
    value_pool: Tensor

    def cast(self, dtype: torch.dtype) -> "Tensors":
        """The same numbers in another dtype."""
        return Tensors(*(tensor.to(dtype) for tensor in self))


def tensors(
    layout: VerifyLayout, num_slots: int, q_heads: int, kv_heads: int, head_dim: int, seed: int = 0
) -> Tensors:
    """Random inputs for a layout."""
    generator = torch.Generator().manual_seed(seed)

    def randn(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, head_dim, generator=generator)

    rows, slots = layout.positions.numel(), layout.kv_indices
    key_pool = torch.full((num_slots, kv_heads, head_dim), NAN)
    value_pool = torch.full_like(key_pool, NAN)
    key_pool[slots], value_pool[slots] = randn(slots.numel(), kv_heads), randn(len(slots), kv_heads)
    return Tensors(
        randn(rows, q_heads), randn(rows, kv_heads), randn(rows, kv_heads), key_pool, value_pool
    )


def by_path(
    call: st.VerifyCall,
    inputs: Tensors,
    scale: float,
    softcap: float | None = None,
    sinks: list[float] | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of every row, each computed alone over its own path."""
    table, group = call.slots.table.tolist(), inputs.query.shape[1] // inputs.key.shape[1]
    outputs, lses, start = [], [], 0
    for b, prefix_len in enumerate(call.prefix_lens.tolist()):
        rows = call.tree.parents.shape[1] if call.q_lens is None else int(call.q_lens[b])
        slots = table[b][:prefix_len]
        for row in range(rows):
            path = [start + node for node in oracles.ancestors(call.tree.parents[b].tolist(), row)]
            for head in range(inputs.query.shape[1]):
                kv = head // group
                output, lse = oracles.path_attention(
                    inputs.query[start + row, head].tolist(),
                    [*inputs.key_pool[slots, kv].tolist(), *inputs.key[path, kv].tolist()],
                    [*inputs.value_pool[slots, kv].tolist(), *inputs.value[path, kv].tolist()],
                    scale,
                    softcap,
                    None if sinks is None else sinks[head],
                    window,
                )
                outputs.append(output)
                lses.append(lse)
        start += rows
    return torch.tensor(outputs, dtype=torch.float64).reshape(inputs.query.shape), torch.tensor(
        lses, dtype=torch.float64
    ).reshape(inputs.query.shape[:2])


def branching(prefix_lens: tuple[int, int], slots: st.SlotTable) -> st.VerifyCall:
    """Two requests: a root with children 1 and 2 and 3 below 2; and a chain of two and padding."""
    tree = tree_of(parents=[[-1, 0, 0, 2], [-1, 0, -1, -1]], tokens=[[1, 2, 3, 4], [5, 6, 0, 0]])
    lens = torch.tensor(prefix_lens, dtype=torch.int32)
    return st.VerifyCall(tree, lens, slots, None, plan_verify(tree, lens, slots.table))


BRANCHING = branching((3, 0), st.SlotTable(torch.arange(13, -1, -1).reshape(2, 7), 1, 15))
HEADS = hs.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (6, 2)])
"""(query heads, KV heads): one head, MQA, MHA, GQA of groups 2 and 3."""


@given(
    st.verify_calls(max_q_len=9, max_prefix=7),
    HEADS,
    hs.sampled_from([None, 0.3]),
    hs.sampled_from([None, 1.5]),
    hs.booleans(),
    hs.none() | hs.integers(1, 9),
    hs.sampled_from(st.FORMS),
)
@example(BRANCHING, (1, 1), None, None, False, 1, "flat")
@example(BRANCHING, (4, 2), 0.3, 1.5, True, 2, "bits")
@example(BRANCHING, (6, 2), None, None, True, None, "dense")
def test_equals_each_paths_causal_attention(
    call: st.VerifyCall,
    heads: tuple[int, int],
    scale: float | None,
    softcap: float | None,
    has_sinks: bool,
    window: int | None,
    form: Form,
) -> None:
    """Node by node the output and log-sum-exp are those of plain attention over the node's path.

    GQA, MQA, MHA, softcap, sinks, a window by depth, every mask form, shuffled pages, and NaN in
    every pool slot that holds no prefix entry.
    """
    inputs = tensors(call.layout, call.slots.num_slots, *heads, head_dim=3)
    sinks = torch.linspace(-1, 1, heads[0]) if has_sinks else None
    output, lse = verify_attention(
        *inputs,
        call.layout,
        tree_mask(call.tree, call.layout, form),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        window=window,
        return_lse=True,
        compute_dtype=torch.float64,
    )
    expected = by_path(
        call,
        inputs,
        3**-0.5 if scale is None else scale,
        softcap,
        None if sinks is None else sinks.tolist(),
        window,
    )
    assert lse is not None
    assert output.dtype == torch.float64
    torch.testing.assert_close(output, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype, tolerance: float) -> None:
    """Each served head dim and dtype is right within its rounding, and keeps the query's dtype."""
    call = BRANCHING
    inputs = tensors(call.layout, 15, 4, 2, head_dim).cast(dtype)
    output, lse = verify_attention(*inputs, call.layout, tree_mask(call.tree, call.layout))
    expected, _ = by_path(call, inputs.cast(torch.float64), head_dim**-0.5)
    assert lse is None
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@given(st.verify_calls(max_batch=2, max_q_len=17, max_prefix=6), hs.sampled_from(st.FORMS))
@example(BRANCHING, "bits")
def test_zero_scores_read_off_the_exact_set_of_visible_entries(
    call: st.VerifyCall, form: Form
) -> None:
    """With q and k zero and power-of-two values, output times the count is the set of columns seen."""
    table, start = call.slots.table, 0
    value_pool = torch.full((call.slots.num_slots, 1, 1), NAN, dtype=torch.float64)
    key_pool = torch.full_like(value_pool, NAN)
    rows = call.layout.positions.numel()
    value = torch.zeros(rows, 1, 1, dtype=torch.float64)
    expected, counts = [], []
    for b, prefix_len in enumerate(call.prefix_lens.tolist()):
        width = call.tree.parents.shape[1] if call.q_lens is None else int(call.q_lens[b])
        value_pool[table[b, :prefix_len], 0, 0] = 2.0 ** torch.arange(prefix_len).double()
        key_pool[table[b, :prefix_len]] = 0
        value[start : start + width, 0, 0] = 2.0 ** (prefix_len + torch.arange(width)).double()
        for row in range(width):
            path = oracles.ancestors(call.tree.parents[b].tolist(), row)
            seen = [*range(prefix_len), *(prefix_len + node for node in path)]
            expected.append(sum(1 << col for col in seen))
            counts.append(len(seen))
        start += width
    zeros = torch.zeros(rows, 1, 1, dtype=torch.float64)
    output, _ = verify_attention(
        zeros,
        zeros,
        value,
        key_pool,
        value_pool,
        call.layout,
        tree_mask(call.tree, call.layout, form),
        compute_dtype=torch.float64,
    )
    sums = (output.flatten() * torch.tensor(counts)).round().long()
    assert sums.tolist() == expected


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 8, 9])
def test_a_window_goes_by_depth(window: int) -> None:
    """With scores of zero the log-sum-exp counts keys: each row keeps its last ``window`` positions.

    A window by row takes a key from the second of two siblings, or leaves its child one too many.
    """
    call = branching((5, 5), st.SlotTable(torch.arange(18).reshape(2, 9), 1, 18))
    zeros, pool = torch.zeros(8, 1, 1), torch.zeros(18, 1, 1)
    mask = tree_mask(call.tree, call.layout)
    _, lse = verify_attention(
        zeros, zeros, zeros, pool, pool, call.layout, mask, window=window, return_lse=True
    )
    assert lse is not None
    depths = [0, 1, 1, 2, 0, 1]  # then two rows of padding, which see the prefix and themselves
    expected = [min(window, 5 + depth + 1) for depth in depths]
    assert lse.exp().flatten()[:6].tolist() == pytest.approx(expected)


@given(st.verify_calls(max_q_len=9, max_prefix=7))
def test_the_content_of_padding_rows_reaches_no_real_row(call: st.VerifyCall) -> None:
    """Large numbers in the padding's queries, keys and values leave every real row as it was."""
    inputs = tensors(call.layout, call.slots.num_slots, 2, 1, head_dim=2)
    loud = Tensors(*(tensor.clone() for tensor in inputs))
    starts = call.layout.qo_indptr.tolist()
    real = torch.zeros(starts[-1], dtype=torch.bool)
    for b, count in enumerate(call.tree.num_nodes.tolist()):
        real[starts[b] : starts[b] + count] = True
    for tensor in (loud.query, loud.key, loud.value):
        tensor[~real] = 1e30
    mask = tree_mask(call.tree, call.layout)
    quiet_output, _ = verify_attention(*inputs, call.layout, mask)
    loud_output, _ = verify_attention(*loud, call.layout, mask)
    assert torch.equal(quiet_output[real], loud_output[real])


def test_a_nan_that_is_seen_is_not_hidden() -> None:
    """A NaN key of the prefix turns the rows that read it into NaN, rather than into zeros."""
    call = branching((3, 2), st.SlotTable(torch.arange(14).reshape(2, 7), 1, 14))
    inputs = tensors(call.layout, 14, 1, 1, head_dim=2)
    inputs.key_pool[call.slots.table[0, 1]] = NAN
    output, _ = verify_attention(*inputs, call.layout, tree_mask(call.tree, call.layout))
    assert output[:4].isnan().all()
    assert not output[4:].isnan().any()


@given(
    st.verify_calls(max_q_len=9, max_prefix=7),
    HEADS,
    hs.sampled_from([torch.float8_e4m3fn, torch.float16, torch.float32]),
    hs.sampled_from(["none", "number", "one", "heads"]),
)
@example(BRANCHING, (4, 2), torch.float8_e4m3fn, "heads")
def test_a_pool_entry_is_the_number_stored_times_its_scale(
    call: st.VerifyCall, heads: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    """A scaled pool gives what plain attention gives on the multiplied entries and the tree's own rows."""
    inputs = tensors(call.layout, call.slots.num_slots, *heads, head_dim=3)
    key_pool, value_pool = (pool.mul(9).to(dtype) for pool in inputs[3:])
    per_head = torch.linspace(0.05, 2.0, heads[1])
    scales: dict[str, tuple[PoolScale, PoolScale]] = {
        "none": (None, None),
        "number": (0.25, 3),
        "one": (torch.tensor(0.125), torch.tensor(0.0)),
        "heads": (per_head, per_head.flip(0)),
    }
    key_scale, value_scale = scales[kind]
    output, lse = verify_attention(
        *inputs[:3],
        key_pool,
        value_pool,
        call.layout,
        tree_mask(call.tree, call.layout),
        key_scale=key_scale,
        value_scale=value_scale,
        return_lse=True,
        compute_dtype=torch.float64,
    )

    def entries(pool: Tensor, scale: PoolScale) -> Tensor:
        factor = 1.0 if scale is None else scale
        by_head = factor[:, None] if isinstance(factor, Tensor) and factor.ndim else factor
        return pool.double() * by_head

    plain = inputs._replace(
        key_pool=entries(key_pool, key_scale), value_pool=entries(value_pool, value_scale)
    )
    expected, expected_lse = by_path(call, plain, 3**-0.5)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (-1.0, "key_scale is -1.0; the least is 0"),
        (NAN, "key_scale is nan; expected a finite number"),
        (torch.tensor([1.0, -2.0]), r"key_scale holds \[-2.0\]; expected finite numbers from 0 on"),
        (torch.tensor(NAN), r"key_scale holds \[nan\]"),
        (torch.ones(3), r"key_scale has shape \[3\]; expected \[2\]"),
        (torch.ones(2, 1), r"key_scale has shape \[2, 1\]; expected \[2\]"),
        (torch.ones(2).double(), "key_scale has dtype torch.float64; expected torch.float32"),
    ],
)
def test_wrong_scales_are_refused(scale: PoolScale, message: str) -> None:
    """A scale that is no factor, or of another number of heads, is refused with its numbers."""
    inputs = tensors(BRANCHING.layout, 15, 4, 2, head_dim=3)
    mask = tree_mask(BRANCHING.tree, BRANCHING.layout)
    with pytest.raises(InputError, match=message):
        verify_attention(*inputs, BRANCHING.layout, mask, key_scale=scale)


def test_only_a_pool_may_hold_fp8() -> None:
    """The tree's own keys are what the model has just computed: in fp8 they are refused."""
    inputs = tensors(BRANCHING.layout, 15, 4, 2, head_dim=3)
    rounded = inputs._replace(key=inputs.key.to(torch.float8_e4m3fn))
    with pytest.raises(InputError, match=r"key has dtype torch.float8_e4m3fn; expected"):
        verify_attention(*rounded, BRANCHING.layout, tree_mask(BRANCHING.tree, BRANCHING.layout))

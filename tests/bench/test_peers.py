"""The benchmark's peers that need no GPU, against the reference, and what others are handed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench.cells import FP8, GROUPS, Cell, choose_cells, everything_seen, make_call
from bench.common import error
from bench.peers import (
    Call,
    Run,
    flex,
    reference,
    sdpa_dense,
    sdpa_unmasked,
)
from ddtree import spec
from ddtree.invariants.conformance import Refused
from ddtree.peers.pages import flashinfer_pages, store

TOLERANCE = 2e-6  # float32 sums in another order

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def a_call(q_len: int = 13, prefix: int = 33, **options: Any) -> Call:
    """Two requests of equal lengths on the CPU."""
    return make_call(
        [q_len] * 2, [prefix] * 2, 6, 2, 64, torch.float32, device="cpu", **options
    )  # fmt: skip


@pytest.mark.parametrize("peer", [sdpa_dense, flex])
@pytest.mark.parametrize(("q_len", "prefix"), [(1, 7), (13, 33), (67, 1), (130, 40)])
def test_pytorch_peers_equal_the_reference(
    peer: Callable[[Call], Run], q_len: int, prefix: int
) -> None:
    """SDPA with our dense mask and FlexAttention with our bits attend as the reference does."""
    call = a_call(q_len, prefix)
    expected, _ = reference(call)
    assert error(peer(call)().reshape(expected.shape), expected) <= TOLERANCE


def test_a_peer_with_another_mask_is_wrong() -> None:
    """The gate's error tells a tree's mask from one that shows all nodes."""
    call = a_call()
    expected, _ = reference(call)
    found = sdpa_dense(replace(call, mask=everything_seen(call)))()
    assert error(found.reshape(expected.shape), expected) > 0.05


@pytest.mark.parametrize("q_len", [1, 31, 32, 33, 67])
def test_the_ceiling_computes_attention_without_a_mask(q_len: int) -> None:
    """SDPA on packed rows equals the reference with a mask that shows all nodes."""
    call = a_call(q_len)
    expected, _ = reference(replace(call, mask=everything_seen(call)))
    found = sdpa_unmasked(call, SDPBackend.MATH)()
    assert error(found.reshape(expected.shape), expected) <= TOLERANCE


def test_peers_refuse_what_they_do_not_take() -> None:
    """Contiguous peers refuse unequal lengths, pages and fp8 pools, with the reason."""
    ragged = make_call([3, 5], [7, 7], 2, 2, 64, torch.float32, device="cpu")
    for call, reason in (
        (ragged, "equal lengths"),
        (a_call(page_size=16), "no pages"),
        (a_call(fp8=True), "one dtype"),
    ):
        for peer in (sdpa_dense, flex):
            with pytest.raises(Refused, match=reason):
                peer(call)
    with pytest.raises(Refused, match="128"):
        flex(a_call(128), general=True)


def test_flashinfer_pages_hold_prefix_and_tree() -> None:
    """Page tables count the tree's entries and end where it ends."""
    layout = spec.VerifyLayout(
        qo_indptr=torch.tensor([0, 3, 4], dtype=torch.int32),
        kv_indptr=torch.tensor([0, 6, 9], dtype=torch.int32),
        kv_indices=torch.tensor([20, 21, 22, 23, 8, 9, 4, 5, 6]),
        mask_indptr=torch.tensor([0, 27, 31]),
        max_q_len=spec.QLen(3),
        positions=torch.tensor([6, 7, 7, 3]),
        out_cache_loc=torch.tensor([10, 11, 0, 7]),
    )
    indptr, indices, last = flashinfer_pages(layout, 4)
    assert indptr.tolist() == [0, 3, 4]
    assert indices.tolist() == [5, 2, 0, 1]
    assert last.tolist() == [1, 4]
    indptr, indices, last = flashinfer_pages(layout, 1)
    assert indptr.tolist() == [0, 9, 13]
    assert indices.tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 0, 4, 5, 6, 7]
    assert last.tolist() == [1, 1]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_call_reserves_the_trees_slots(page_size: int) -> None:
    """No two entries share a slot, and entries fill pages in order."""
    call = make_call([3, 33], [50, 7], 2, 2, 64, torch.float32, page_size, device="cpu")
    layout = call.layout
    slots = torch.cat([layout.kv_indices, layout.out_cache_loc])
    assert slots.unique().numel() == slots.numel()
    entries = torch.cat([layout.kv_indices[:50], layout.out_cache_loc[:3]])
    assert torch.equal(entries % page_size, torch.arange(53) % page_size)
    assert not call.key_pool[layout.kv_indices].isnan().any()
    assert call.key_pool[layout.out_cache_loc].isnan().all()


def test_fp8_rows_survive_a_pool() -> None:
    """The tree's rows of an fp8 call are what a pool holds exactly, so every peer reads the same."""
    call = a_call(fp8=True)
    assert call.key_pool.dtype is FP8
    assert call.key_scale is not None
    store(call.key_pool, call.layout.out_cache_loc, call.key / call.key_scale)
    stored = call.key_pool.float()[call.layout.out_cache_loc] * call.key_scale
    assert torch.equal(stored, call.key)


def test_the_floor_is_bytes_or_operations() -> None:
    """Few rows are bound by the memory, many by the matrix units; fp8 halves a pool's bytes."""
    one = Cell(1, 1, 1024, 8, 8, 128)
    entry = 2 * 8 * 128 * 2
    assert one.floor_us == pytest.approx((1025 * entry + 2 * 2 * 8 * 128) / 4.3e6)
    fp8 = replace(one, fp8=True)
    assert one.floor_us - fp8.floor_us == pytest.approx(1024 * entry / 2 / 4.3e6)
    many = Cell(1, 1024, 1024, 8, 8, 128)
    assert many.floor_us == pytest.approx(4 * 2048 * 8 * 1024 * 128 / 770e6)


def test_cells_are_chosen_by_group_or_numbers() -> None:
    """A name is a group or the first numbers of a cell, never a part of a number."""
    assert [group for group, _ in choose_cells(["fp8"])] == ["fp8"] * len(GROUPS["fp8"])
    assert {str(cell) for _, cell in choose_cells(["1,17,2048"])} == {"1, 17, 2048, 32/8"}
    assert {cell.batch for _, cell in choose_cells(["1"])} == {1}
    assert len(choose_cells([])) == sum(map(len, GROUPS.values()))
    with pytest.raises(SystemExit, match="groups are main"):
        choose_cells(["1,1"])

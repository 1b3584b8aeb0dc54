"""Every comparison that the device makes, each reached by a small call that breaks nothing before it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddtree.impl import CapturedCheck
from ddtree.impl import check_kernels as kernels
from ddtree.impl.check_sites import SITES, Site
from ddtree.invariants import Call, violations
from tests.impl.replayed import differences, on_device, run, same_numbers, told

INF = float("inf")
INT32 = torch.int32


def call(**fields: Any) -> Call:
    """A call of these fields: lists become tensors, of float64 where they hold a float."""
    made: dict[str, Any] = {}
    for name, value in fields.items():
        is_list = isinstance(value, list)
        tensor = torch.tensor(value) if is_list else value
        made[name] = tensor.double() if is_list and tensor.is_floating_point() else tensor
    return Call(**made)


def at(*words: int, dtype: torch.dtype = INT32) -> torch.Tensor:
    """Numbers of a width."""
    return torch.tensor(words, dtype=dtype)


TREE: dict[str, Any] = {
    "token_ids": [[1, 4, 0]], "parents": [[-1, 0, -1]], "depths": [[0, 1, 0]],
    "scores": [[0.0, -1.0, -INF]], "num_nodes": [2],
}  # fmt: skip
"""A root, its child and a row of padding."""
DRAFT: dict[str, Any] = TREE | {
    "draft_log_probs": [[[-2.0, -3.0, -4.0, -5.0, -1.0]]],
    "root_token_ids": [1],
}
"""Where it comes from."""
LAYOUT: dict[str, Any] = {
    "qo_indptr": [0, 3], "kv_indptr": [0, 2], "kv_indices": [7, 5], "out_cache_loc": [1, 9, 8],
    "positions": [2, 3, 2],
}  # fmt: skip
"""Its rows, behind a prefix of two entries."""
FIXED: dict[str, Any] = {"is_captured": True, "num_nodes": [2], "qo_indptr": [0, 3, 3]}
"""Buffers for two requests that hold one of three rows."""
PATH: dict[str, Any] = {
    "token_ids": [[1, 4, 6]], "parents": [[-1, 0, 0]], "num_nodes": [3], "qo_indptr": [0, 3],
    "nodes": [[0, 1]], "num_accepted": [2], "target_ids": [4, 9, 9], "bonus": [9],
    "emitted": [[4, 9]], "out_cache_loc": [1, 9, 8],
}  # fmt: skip
"""A root's first child accepted."""
MOVED: dict[str, Any] = PATH | {"kv_indptr": [0, 2], "nodes": [[0, 2]], "target_ids": [6, 9, 9]}
MOVED |= {"emitted": [[6, 9]], "src": [[1, 8]], "dst": [[1, 9]], "committed_lens": [4]}
"""Its second child accepted, its KV moved."""
SEEN = [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1]
"""The flat mask of three rows behind the two entries."""


def flat(*changes: tuple[int, int], tail: int = 0) -> torch.Tensor:
    """The flat mask, with entries changed, in a buffer that is longer."""
    mask = torch.tensor(SEEN + [0] * tail, dtype=torch.uint8)
    for entry, value in changes:
        mask[entry] = value
    return mask


TWO_TREES: dict[str, Any] = {
    "parents": [[-1, 0], [-1, 0]], "num_nodes": [2, 2], "qo_indptr": [0, 2, 4],
    "kv_indptr": [0, 0, 0],
}  # fmt: skip
"""Two requests of a root and its child, without a prefix."""


def dense(*hidden: list[list[int]]) -> torch.Tensor:
    """The additive mask of each request: -1 is hidden."""
    lowest = torch.finfo(torch.float32).min
    return torch.where(torch.tensor(hidden)[:, None] < 0, lowest, 0.0)


CALLS: dict[tuple[str, str], Callable[[], Call]] = {
    ("batch", ""): lambda: call(num_nodes=[1], bonus=[1, 2]),
    ("tree_shape", ""): lambda: call(parents=[[-1, 0]], depths=[[0]]),
    ("rows", ""): lambda: call(positions=[0, 0, 0], num_rows=2),
    ("dtypes", ""): lambda: call(qo_indptr=at(0, 3, dtype=torch.int16)),
    ("index_width", "qo_indptr"): lambda: call(qo_indptr=at(0, 3), q_lens=[2**31]),
    ("index_width", "kv_indptr"): lambda: call(kv_indptr=at(0, 3), prefix_lens=[2**31]),
    ("index_width", "mask_indptr"): lambda: call(
        mask_indptr=at(0, 3), q_lens=[2**16], prefix_lens=[0]
    ),
    ("index_width", "custom_mask"): lambda: call(
        mask_indptr=[0, 2**32], q_lens=[2**16], prefix_lens=[0], offset_bits=32
    ),
    ("index_width", "vocab"): lambda: call(
        qo_indptr=[0, 2**16], vocab_size=2**16, offset_bits=32
    ),
    ("index_width", "row"): lambda: call(
        qo_indptr=[0, 2**16], slot_stride=2**16, offset_bits=32
    ),
    ("index_width", "slot"): lambda: call(
        qo_indptr=[0, 3], slot_stride=2**16, kv_pool_size=2**16, offset_bits=32
    ),
    ("log_probs", ""): lambda: call(draft_log_probs=[[[-1.0, 0.5]]]),
    ("num_nodes", ""): lambda: call(num_nodes=[0]),
    ("budget", ""): lambda: call(num_nodes=[4], budget=2),
    ("root", "parents"): lambda: call(parents=[[0]]),
    ("root", "depths"): lambda: call(depths=[[1]]),
    ("root", "scores"): lambda: call(scores=[[-1.0]]),
    ("root", "token_ids"): lambda: call(token_ids=[[3]], root_token_ids=[4]),
    ("parent_order", ""): lambda: call(parents=[[-1, 1]], num_nodes=[2]),
    ("depth", ""): lambda: call(parents=[[-1, 0]], depths=[[0, 2]], num_nodes=[2]),
    ("depth", "horizon"): lambda: call(
        parents=[[-1, 0, 1]], depths=[[0, 1, 2]], num_nodes=[3], horizon=1
    ),
    ("siblings_distinct", ""): lambda: call(
        parents=[[-1, 0, 0]], token_ids=[[1, 4, 4]], num_nodes=[3]
    ),
    ("best_first", ""): lambda: call(scores=[[0.0, float("nan")]], num_nodes=[2]),
    ("best_first", "order"): lambda: call(scores=[[0.0, -2.0, -1.0]], num_nodes=[3]),
    ("tie_order", ""): lambda: call(
        parents=[[-1, 0, 0]], token_ids=[[1, 5, 4]], scores=[[0.0, -1.0, -1.0]], num_nodes=[3]
    ),
    ("padding", "parents"): lambda: call(parents=[[-1, 0]], num_nodes=[1]),
    ("padding", "token_ids"): lambda: call(token_ids=[[1, 2]], num_nodes=[1]),
    ("padding", "depths"): lambda: call(depths=[[0, 1]], num_nodes=[1]),
    ("padding", "scores"): lambda: call(scores=[[0.0, -9.5]], num_nodes=[1]),
    ("token_range", ""): lambda: call(token_ids=[[5]], num_nodes=[1], vocab_size=5),
    ("best_candidates", ""): lambda: call(**DRAFT | {"token_ids": [[1, 0, 0]]}),
    ("path_score", ""): lambda: call(**DRAFT | {"scores": [[0.0, -1.5, -INF]]}),
    ("mask_len", ""): lambda: call(qo_indptr=[0, 3], kv_indptr=[0, 2], mask_indptr=[0, 14]),
    ("mask_indptr", "start"): lambda: call(mask_indptr=[1, 15]),
    ("mask_indptr", "step"): lambda: call(mask_indptr=[0, 15, 14]),
    ("mask_indptr", "end"): lambda: call(mask_indptr=[0, 15], custom_mask=flat(tail=1)),
    ("qo_indptr", "start"): lambda: call(qo_indptr=[1, 3]),
    ("qo_indptr", "step"): lambda: call(qo_indptr=[0, 3, 2]),
    ("qo_indptr", "width"): lambda: call(qo_indptr=[0, 3, 4], q_lens=[2, 2]),
    ("qo_indptr", "end"): lambda: call(qo_indptr=[0, 3], q_lens=[3], num_rows=4),
    ("qo_indptr", "rows"): lambda: call(qo_indptr=[0, 3, 3]),
    ("max_q_len", ""): lambda: call(qo_indptr=[0, 3], max_q_len=2, is_captured=True),
    ("kv_indptr", "start"): lambda: call(kv_indptr=[1, 2]),
    ("kv_indptr", "step"): lambda: call(kv_indptr=[0, 2, 1]),
    ("kv_indptr", "len"): lambda: call(kv_indptr=[0, 2], prefix_lens=[3]),
    ("kv_indptr", "end"): lambda: call(kv_indptr=[0, 2], kv_indices=[7]),
    ("kv_indices", ""): lambda: call(kv_indptr=[0, 2], kv_indices=[7, 9], kv_pool_size=9),
    ("kv_unique", ""): lambda: call(kv_indptr=[0, 2], kv_indices=[7, 7]),
    ("out_cache_loc", ""): lambda: call(
        qo_indptr=[0, 2], out_cache_loc=[9, 3], kv_pool_size=9, num_nodes=[2]
    ),
    ("write_unique", ""): lambda: call(qo_indptr=[0, 2], out_cache_loc=[3, 3], num_nodes=[2]),
    ("write_disjoint", ""): lambda: call(**LAYOUT | {"out_cache_loc": [5, 9, 8]}),
    ("slot_table", ""): lambda: call(**LAYOUT, slot_table=[[7, 4, 1, 9, 8]]),
    ("positions", ""): lambda: call(**LAYOUT | {"positions": [3, 3, 3]}),
    ("input_ids", ""): lambda: call(**TREE, qo_indptr=[0, 3], input_ids=[1, 5, 0]),
    ("flat_len", ""): lambda: call(qo_indptr=[0, 3], kv_indptr=[0, 2], custom_mask=flat(tail=1)),
    ("packed_len", ""): lambda: call(
        qo_indptr=[0, 3], kv_indptr=[0, 2], packed=at(231, 1, 0, dtype=torch.uint8), byte_indptr=[0, 3]
    ),
    ("packed_len", "end"): lambda: call(
        qo_indptr=[0, 3], kv_indptr=[0, 2], packed=at(231, 1, 0, dtype=torch.uint8), byte_indptr=[0, 2]
    ),
    ("mask_shape", "words"): lambda: call(qo_indptr=[0, 33], words=torch.ones(33, 1, dtype=INT32)),
    ("mask_shape", "rows"): lambda: call(
        qo_indptr=[0, 3], words=torch.ones(2, 1, dtype=INT32), is_captured=True
    ),
    ("mask_shape", "bias"): lambda: call(qo_indptr=[0, 3], bias=torch.zeros(1, 1, 2, 4)),
    ("mask_values", "custom_mask"): lambda: call(custom_mask=flat((1, 3)), mask_indptr=[0, 15]),
    ("mask_values", "bias"): lambda: call(bias=torch.full((1, 1, 1, 1), 1.5)),
    ("visibility", ""): lambda: call(
        **TREE, qo_indptr=[0, 3], words=torch.tensor([[1], [2], [4]], dtype=INT32)
    ),
    ("mask_is_tree", ""): lambda: call(
        qo_indptr=[0, 3], kv_indptr=[0, 0], positions=[0, 1, 2],
        words=torch.tensor([[1], [3], [6]], dtype=INT32),
    ),
    ("mask_positions", ""): lambda: call(
        qo_indptr=[0, 3], kv_indptr=[0, 0], positions=[0, 1, 1],
        words=torch.tensor([[1], [3], [7]], dtype=INT32),
    ),
    ("prefix_visible", ""): lambda: call(
        qo_indptr=[0, 3], kv_indptr=[0, 2], custom_mask=flat((1, 0)), max_q_len=3
    ),
    ("padding_invisible", ""): lambda: call(
        **TREE, qo_indptr=[0, 3], words=torch.tensor([[1], [7], [4]], dtype=INT32)
    ),
    ("spare_bits", ""): lambda: call(
        num_nodes=[2], qo_indptr=[0, 2], words=torch.tensor([[1], [7]], dtype=INT32)
    ),
    ("buffer_capacity", "positions"): lambda: call(**FIXED, positions=[2, 3]),
    ("buffer_capacity", "out_cache_loc"): lambda: call(**FIXED, out_cache_loc=[1, 2]),
    ("buffer_capacity", "input_ids"): lambda: call(**FIXED, input_ids=[1, 2]),
    ("buffer_capacity", "num_rows"): lambda: call(**FIXED, num_rows=2),
    ("buffer_capacity", "target_ids"): lambda: call(**FIXED, target_ids=[1, 2]),
    ("buffer_capacity", "kv_indices"): lambda: call(
        **FIXED, kv_indices=[7], prefix_lens=[2]
    ),
    ("stale_tail", "qo_indptr"): lambda: call(**FIXED | {"qo_indptr": [0, 3, 4]}),
    ("stale_tail", "kv_indptr"): lambda: call(**FIXED, kv_indptr=[0, 2, 3]),
    ("stale_tail", "mask_indptr"): lambda: call(**FIXED, mask_indptr=[0, 15, 16]),
    ("stale_tail", "positions"): lambda: call(**FIXED, positions=[2, 3, 2, 9]),
    ("stale_tail", "out_cache_loc"): lambda: call(**FIXED, out_cache_loc=[1, 9, 8, 5], pad_slot=4),
    ("stale_tail", "input_ids"): lambda: call(**FIXED, input_ids=[1, 4, 0, 9]),
    ("stale_tail", "custom_mask"): lambda: call(
        **FIXED, kv_indptr=[0, 2, 2], custom_mask=flat((16, 1), tail=3)
    ),
    ("stale_tail", "pad_slot"): lambda: call(**FIXED, out_cache_loc=[1, 9, 8, 1], pad_slot=1),
    ("num_accepted", ""): lambda: call(num_accepted=[3], horizon=1),
    ("accepted_end", ""): lambda: call(nodes=[[0, 5]], num_accepted=[1]),
    ("accepted_path", "root"): lambda: call(nodes=[[1]], num_accepted=[1], parents=[[-1, 0]]),
    ("choice", ""): lambda: call(**PATH | {"target_ids": [6, 9, 9]}),
    ("bonus", ""): lambda: call(**PATH | {"bonus": [8]}),
    ("walk_end", ""): lambda: call(
        **PATH | {"nodes": [[0, -1]], "num_accepted": [1], "bonus": [4], "emitted": [[4, -1]]}
    ),
    ("emitted", ""): lambda: call(**PATH | {"emitted": [[1, 4]]}),
    ("commit_once", ""): lambda: call(**MOVED, commits_before=2),
    ("commit_len", ""): lambda: call(**MOVED | {"committed_lens": [5]}),
    ("commit_src", ""): lambda: call(**MOVED | {"src": [[1, 9]]}),
    ("commit_dst", ""): lambda: call(**MOVED | {"dst": [[1, 7]]}),
    ("commit_order", ""): lambda: call(src=[[1, 9]], dst=[[9, 4]]),
    ("slot_permutation", "shape"): lambda: call(slot_table=[[7, 5]], slot_table_after=[[7]]),
    ("slot_permutation", ""): lambda: call(slot_table=[[7, 5]], slot_table_after=[[7, 6]]),
    ("prefix_kept", ""): lambda: call(
        slot_table=[[7, 5]], slot_table_after=[[5, 7]], kv_indptr=[0, 2]
    ),
}  # fmt: skip
"""What breaks first, and a call that breaks it."""


OTHERS: dict[str, Callable[[], Call]] = {
    "a slot lost in a row of the table that no request has": lambda: call(
        num_nodes=[1], slot_table=[[7], [5], [4]], slot_table_after=[[7], [5], [3]]
    ),
    "slots exchanged there": lambda: call(
        num_nodes=[1], kv_indptr=[0, 1], slot_table=[[7, 1], [5, 2]], slot_table_after=[[7, 1], [2, 5]]
    ),
    "a launch for other widths than those that the mask's segments alone tell": lambda: call(
        kv_indptr=[0, 2], mask_indptr=[0, 15], max_q_len=2
    ),
    "a table of as many requests as fixed buffers hold now": lambda: call(
        qo_indptr=[0, 3, 3], kv_indptr=[0, 2, 2], kv_indices=[7, 5], slot_table=[[7, 5, 4]],
        is_captured=True,
    ),
    "a table of fewer": lambda: call(
        qo_indptr=[0, 1, 2], kv_indptr=[0, 1, 2], kv_indices=[7, 5], slot_table=[[7, 5, 4]],
        is_captured=True,
    ),
    "a table of fewer after the commit": lambda: call(
        qo_indptr=[0, 1, 2], slot_table_after=[[7, 5, 4]], is_captured=True
    ),
    "an indptr of as many as there are now": lambda: call(
        qo_indptr=[0, 3, 3], kv_indptr=[0, 2], is_captured=True
    ),
    "an indptr of fewer": lambda: call(qo_indptr=[0, 3, 6], mask_indptr=[0, 9], is_captured=True),
    "byte segments of fewer": lambda: call(
        qo_indptr=[0, 3, 6], kv_indptr=[0, 0, 0], byte_indptr=[0, 2], is_captured=True
    ),
    "prefixes of fewer": lambda: call(qo_indptr=[0, 3, 6], kv_indptr=[0, 2], is_captured=True),
    "rows of fewer": lambda: call(
        qo_indptr=[0, 3], kv_indptr=[0, 2, 4], mask_indptr=[0, 15, 30], is_captured=True
    ),
    "a dense mask whose second request is spoiled": lambda: call(
        **TWO_TREES, bias=dense([[0, -1], [0, 0]], [[0, -1], [-1, 0]])
    ),
    "a dense mask of fewer": lambda: call(
        qo_indptr=[0, 1, 2], kv_indptr=[0, 0, 0], bias=torch.zeros(1, 1, 1, 1), is_captured=True
    ),
}  # fmt: skip
"""Fields of more requests or fewer than their call, and widths that only the host weighs."""
UNTOLD: dict[str, Callable[[], Call]] = {
    "a pool of many slots, of how many numbers each is not told": lambda: call(
        qo_indptr=[0, 3], kv_pool_size=2**31 + 2, offset_bits=32
    ),
    "many rows, of how many logits each is not told": lambda: call(
        qo_indptr=[0, 2**31 + 2], offset_bits=32
    ),
    "forty requests in fixed buffers, without a prefix's indptr": lambda: call(
        qo_indptr=list(range(41)), is_captured=True
    ),
    "rows behind the widths that an eager call names": lambda: call(
        q_lens=[2], positions=[0, 1, 9]
    ),
}  # fmt: skip
"""Calls that lack what a comparison needs."""


@pytest.mark.parametrize("name", OTHERS)
def test_the_device_judges_or_leaves_it_to_the_host(name: str) -> None:
    """The device says of them what the checker says."""
    assert differences(name, OTHERS[name]) == []


@pytest.mark.parametrize("name", UNTOLD)
def test_what_is_not_told_breaks_nothing(name: str) -> None:
    """Device and checker are silent."""
    assert differences(name, UNTOLD[name]) == [] == violations(UNTOLD[name]())


def is_number(value: object, site: Site) -> bool:
    """Whether the device can tell it: a number, or the name of one that is not finite."""
    return isinstance(value, int | float) or (site.is_float and value in {"nan", "inf", "-inf"})


def test_every_site_has_a_call() -> None:
    """No comparison is left out."""
    assert list(CALLS) == [(site.invariant, site.part) for site in SITES]


@pytest.mark.parametrize("number", range(len(SITES)), ids=[f"{i}_{part}" for i, part in CALLS])
def test_the_device_breaks_at_the_site(number: int) -> None:
    """The site, its request and just those of its two numbers that are numbers are the checker's."""
    site = SITES[number]
    made = CALLS[site.invariant, site.part]()
    check, want = CapturedCheck(on_device(made)), violations(made)[0]
    run(check)
    found = check.found
    assert found is not None and int(check._seen[kernels.SITE.value]) == number
    assert same_numbers(found, want)
    assert (found.expected is not None, found.found is not None) == (
        is_number(want.expected, site),
        is_number(want.found, site),
    )
    assert told(check.poll()) == told(want)

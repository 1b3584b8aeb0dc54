"""Counterexamples as captured calls: what an engine with the wrong formula would hand its kernel.

Each takes the prover's numbers. Where these are too small to show in a call (no row, no node that is
not the root) the least that shows is taken.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.claimed import index
from ddtree.invariants.proofs.proof import Case, Numbers


def _case(invariant: str, right: dict[str, Any], **wrong: Any) -> Case:
    """A sound call and the same with some fields wrong."""
    return Case(invariant, Call(**right | wrong), Call(**right))


def _ints(*values: int) -> Tensor:
    return torch.tensor(values)


def _chain(prefix_len: int, q_len: int, parents: Sequence[int] | None = None) -> dict[str, Any]:
    """One request with ``q_len`` nodes, each the child of the one before unless parents are given."""
    above = list(range(-1, q_len - 1)) if parents is None else list(parents)
    depths = [0] * q_len
    for node in range(1, q_len):
        depths[node] = depths[above[node]] + 1
    return {
        "qo_indptr": _ints(0, q_len),
        "kv_indptr": _ints(0, prefix_len),
        "mask_indptr": _ints(0, index.mask_len(prefix_len, q_len)),
        "num_nodes": _ints(q_len),
        "parents": _ints(*above)[None],
        "depths": _ints(*depths)[None],
        "positions": _ints(*(index.position(prefix_len, depth) for depth in depths)),
    }


def _matrix(prefix_len: int, q_len: int) -> Tensor:
    """Mask of a chain: a row sees the prefix and all rows up to itself."""
    return torch.ones(q_len, index.kv_len(prefix_len, q_len)).tril(prefix_len).bool()


def segments(n: Numbers, wrong_len: Callable[[int, int], int]) -> Case:
    """Mask segments of a wrong length."""
    prefix_len, q_len = n["prefix_len"], max(n["q_len"], 1)
    return _case(
        "mask_len",
        {
            "qo_indptr": _ints(0, q_len),
            "kv_indptr": _ints(0, prefix_len),
            "mask_indptr": _ints(0, index.mask_len(prefix_len, q_len)),
        },
        mask_indptr=_ints(0, wrong_len(prefix_len, q_len)),
    )


def falling_prefix(n: Numbers) -> Case:
    """The second of two requests has a prefix length below 0."""
    behind = max(-n["prefix_len"], 1)
    right = {"qo_indptr": _ints(0, 1, 2), "kv_indptr": _ints(0, behind, 2 * behind)}
    return _case("kv_indptr", right, kv_indptr=_ints(0, behind, 0))


def root_forgotten(n: Numbers) -> Case:
    """A request has as many rows as drafted nodes, one too few."""
    nodes = index.q_len_of(max(n["budget"], 1))
    right = {"qo_indptr": _ints(0, nodes), "num_nodes": _ints(nodes)}
    return _case("qo_indptr", right, qo_indptr=_ints(0, nodes - 1))


def small_buffers(n: Numbers) -> Case:
    """A captured mask with room for smaller sizes than the call's."""
    prefix_len, q_len = n["prefix_len"], max(n["q_len"], 1)
    mask = _matrix(prefix_len, q_len).flatten()
    right = {
        "is_captured": True,
        "qo_indptr": _ints(0, q_len),
        "kv_indptr": _ints(0, prefix_len),
        "mask_indptr": _ints(0, index.mask_len(prefix_len, q_len)),
        "custom_mask": mask,
    }
    room = index.mask_len(n["max_prefix"], n["max_q_len"])
    return _case("buffer_capacity", right, custom_mask=mask[:room])


def cells(n: Numbers, wrong_offset: Callable[[int, int, int, int], int]) -> Case:
    """A flat mask written at wrong addresses; what falls outside is lost."""
    prefix_len, q_len = n["prefix_len"], max(n["q_len"], 2)
    matrix = _matrix(prefix_len, q_len)
    written = torch.zeros(matrix.numel(), dtype=torch.bool)
    for row in range(q_len):
        for col in range(matrix.shape[1]):
            at = wrong_offset(row, col, prefix_len, q_len)
            if at < written.numel():
                written[at] = matrix[row, col]
    right = _chain(prefix_len, q_len) | {"custom_mask": matrix.flatten()}
    return _case("visibility", right, custom_mask=written)


def dense_column_early(_: Numbers) -> Case:
    """A dense mask whose tree columns begin on the prefix's last."""
    lowest = torch.finfo(torch.float32).min
    right = torch.zeros(1, 1, 2, 3).masked_fill_(~_matrix(1, 2), lowest)
    wrong = torch.zeros(1, 1, 2, 3).fill_(lowest)
    wrong[0, 0, :, 0:2] = right[0, 0, :, 1:3]
    return _case("visibility", _chain(1, 2) | {"bias": right}, bias=wrong)


def packed(n: Numbers, wrong_len: Callable[[int], int]) -> Case:
    """Byte segments of a wrong length."""
    num_bits = max(n["num_bits"], 1)
    size, wrong = index.packed_len(num_bits), wrong_len(num_bits)
    right = {
        "qo_indptr": _ints(0, 1),
        "kv_indptr": _ints(0, num_bits - 1),
        "packed": torch.full((size,), 255, dtype=torch.uint8),
        "byte_indptr": _ints(0, size),
    }
    return _case(
        "packed_len",
        right,
        packed=torch.full((wrong,), 255, dtype=torch.uint8),
        byte_indptr=_ints(0, wrong),
    )


def packed_msb_first(_: Numbers) -> Case:
    """Bytes filled from the highest bit down."""
    bits = _matrix(1, 2).flatten().tolist()
    low_first = sum(bit << shift for shift, bit in enumerate(bits))
    high_first = sum(bit << (7 - shift) for shift, bit in enumerate(bits))
    right = _chain(1, 2) | {
        "packed": torch.tensor([low_first], dtype=torch.uint8),
        "byte_indptr": _ints(0, 1),
    }
    return _case("visibility", right, packed=torch.tensor([high_first], dtype=torch.uint8))


def words(n: Numbers, wrong_words: Callable[[int], int]) -> Case:
    """Rows of too few words."""
    q_len = max(n["q_len"], 1)
    right = {
        "qo_indptr": _ints(0, q_len),
        "words": torch.zeros(q_len, index.bit_words(q_len), dtype=torch.int32),
    }
    for row in range(q_len):  # siblings: each sees the root and itself
        for node in (0, row):
            right["words"][row, index.bit_word(node)] |= 1 << index.bit_shift(node)
    return _case("mask_shape", right, words=right["words"][:, : wrong_words(q_len)])


def move_over_source(n: Numbers) -> Case:
    """A commit whose earlier move overwrites what a later one reads."""
    prefix_len, steps = n["prefix_len"], max(n["step"], n["later_step"]) + 1
    nodes = list(range(steps))
    nodes[n["step"]], nodes[n["later_step"]] = n["node"], n["later_node"]
    target = [index.commit_entry(prefix_len, step) for step in range(steps)]
    right = {"src": _ints(*target)[None], "dst": _ints(*target)[None]}
    return _case(
        "commit_order", right, src=_ints(*(index.kv_len(prefix_len, node) for node in nodes))[None]
    )


def commit_one_late(n: Numbers) -> Case:
    """A commit that leaves the root where it was and moves the others behind it, one entry late."""
    prefix_len = n["prefix_len"]
    table = torch.arange(prefix_len + 4)[None]
    entries = _ints(prefix_len, prefix_len + 1)[None]
    right = {
        "kv_indptr": _ints(0, prefix_len),
        "num_accepted": _ints(2),
        "slot_table": table,
        "slot_table_after": table,
        "src": entries,
        "dst": entries,
    }
    return _case("commit_dst", right, dst=entries + 1)


def slot_lost(n: Numbers) -> Case:
    """A slot table in which a dropped row's slot has been overwritten, or went outside the tree."""
    q_len, count, row, place = n["q_len"], n["num_accepted"], n["row"], n["place"]
    before = n["accepted_before"]
    others = [r for r in range(q_len) if r != row]
    accepted = sorted(
        [r for r in others if r < row][:before] + [r for r in others if r > row][: count - before]
    )
    dropped = [r for r in range(q_len) if r not in accepted]
    table = torch.arange(q_len + 1)[None]
    right, wrong = table.clone(), table.clone()
    right[0, :q_len] = _ints(*accepted, *dropped)
    wrong[0, :q_len] = right[0, :q_len]
    wrong[0, place] = row
    return _case(
        "slot_permutation", {"slot_table": table, "slot_table_after": right}, slot_table_after=wrong
    )


def spare_row_on_real(_: Numbers) -> Case:
    """Fixed buffers in which the spare row of an unused first request overwrote the second one's root."""
    right = {
        "is_captured": True,
        "qo_indptr": _ints(0, 0, 1),
        "kv_indptr": _ints(0, 0, 3),
        "out_cache_loc": _ints(3, -1),
        "positions": _ints(3, 0),
        "kv_pool_size": 8,
    }
    return _case("out_cache_loc", right, out_cache_loc=_ints(-1, -1), positions=_ints(0, 0))


def unused_request_with_row(n: Numbers) -> Case:
    """Fixed buffers for two requests whose unused one has a row."""
    prefix_len = n["prefix_len"]
    right = {
        "is_captured": True,
        "batch_size": 1,
        "qo_indptr": _ints(0, 1, 1),
        "kv_indptr": _ints(0, prefix_len, prefix_len),
        "positions": _ints(prefix_len, 0),
    }
    return _case("stale_tail", right, qo_indptr=_ints(0, 1, 2))


def placed_by_row(n: Numbers) -> Case:
    """A root with two children, the second of them placed by its row."""
    prefix_len = n["prefix_len"]
    right = _chain(prefix_len, 3, (-1, 0, 0))
    return _case("positions", right, positions=index.position(prefix_len, torch.arange(3)))


def placed_one_late(n: Numbers) -> Case:
    """Positions that count from 1 behind the prefix."""
    right = _chain(n["prefix_len"], 2)
    return _case("positions", right, positions=right["positions"] + 1)


def wide_table(rows: int, row_stride: int) -> Case:
    """A KV pool whose last offset is beyond 32 bits, in an engine that computes offsets in 32."""
    right = {
        "qo_indptr": _ints(0, 1),
        "offset_bits": 64,
        "kv_pool_size": rows,
        "slot_stride": row_stride,
    }
    return _case("index_width", right, offset_bits=32)

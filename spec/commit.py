"""Step 6: keep the KV of the accepted nodes and drop the rest.

After the pass, entry ``prefix_len + r`` of a request holds tree row r. The accepted rows become entries
``prefix_len``, ``prefix_len + 1``, ... . A parent's row comes before its child's, so the i-th accepted
row is at least i and moving in ascending order never reads an entry that was overwritten.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ddtree.spec.contracts import Acceptance, Commit, PagedKV, VerifyLayout
from ddtree.spec.dtypes import indexable, require_kind
from ddtree.spec.errors import require, require_int
from ddtree.spec.index import commit_entry, kv_len
from ddtree.spec.mask import request_lens, require_requests
from ddtree.spec.public import public


@public
def commit_kv(kv: PagedKV, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
    """Commit the accepted nodes, in place.

    With page size 1 no KV moves: ``kv.slot_table`` is permuted, accepted slots first, the others
    behind them in their order, so no slot is lost. With larger pages the table stays and the KV of
    every layer moves: commit a pass once, since a second time moves what was moved. The table that
    stays cannot tell; debug mode can, and names it.

    Args:
        kv: pools of all layers and the slot table; changed in place.
        layout: the call's layout.
        acceptance: the accepted paths.

    Returns:
        The new prefix lengths and, for each accepted node, the slot it was written to and the slot
        that holds it now.

    Raises:
        InputError: a wrong dtype, a layout of other requests than the acceptance, a path that does not
            start at the root, is not ascending or leaves the request's rows, a page size below 1, a slot
            outside the pools, or a tree that was laid out with another slot table. Nothing is changed
            then.
    """
    require_kind("kv", kv, PagedKV)
    require_kind("layout", layout, VerifyLayout)
    require_kind("acceptance", acceptance, Acceptance)
    batch, width = acceptance.nodes.shape
    require_int("page_size", kv.page_size, 1)
    for name, pools in (("keys", kv.keys), ("values", kv.values)):
        require_kind(f"PagedKV.{name}", pools, tuple)
        for layer, pool in enumerate(pools):
            require_kind(f"PagedKV.{name}[{layer}]", pool, Tensor)
    require(
        len(kv.keys) == len(kv.values), f"{len(kv.keys)} key pools, {len(kv.values)} value pools"
    )
    require(
        kv.slot_table.shape[0] >= batch,
        f"slot_table has {kv.slot_table.shape[0]} requests, the acceptance {batch}",
    )
    require(
        acceptance.num_accepted.numel() == batch,
        f"Acceptance.num_accepted has {acceptance.num_accepted.numel()} requests, nodes {batch}",
    )
    require_requests(layout, "acceptance", batch)
    paths = [_path(kv, layout, acceptance, b) for b in range(batch)]

    prefix_lens = torch.zeros(batch, dtype=torch.int32, device="cpu")
    src = torch.full((batch, width), -1, dtype=torch.int64, device="cpu")
    dst = torch.full((batch, width), -1, dtype=torch.int64, device="cpu")
    for b, path in enumerate(paths):
        prefix_len, q_len = request_lens(layout, b)
        entries = kv.slot_table[b, prefix_len : kv_len(prefix_len, q_len)]  # a view
        written = entries[path]
        if kv.page_size == 1:
            dropped = [row for row in range(q_len) if row not in set(path)]
            entries.copy_(entries[path + dropped])
        else:
            for pool in map(indexable, (*kv.keys, *kv.values)):
                pool[entries[: len(path)]] = pool[written]
        src[b, : len(path)] = written
        dst[b, : len(path)] = entries[: len(path)]
        prefix_lens[b] = commit_entry(prefix_len, len(path))
    device = acceptance.nodes.device
    return Commit(prefix_lens.to(device), src.to(device), dst.to(device))


def _path(kv: PagedKV, layout: VerifyLayout, acceptance: Acceptance, b: int) -> list[int]:
    """Return request b's accepted rows, refusing what cannot be committed."""
    count = int(acceptance.num_accepted[b])
    prefix_len, q_len = request_lens(layout, b)
    require(
        1 <= count <= acceptance.nodes.shape[1],
        f"num_accepted[{b}] is {count}; it counts the root, and nodes has room for "
        f"{acceptance.nodes.shape[1]}",
    )
    path = [int(node) for node in acceptance.nodes[b, :count]]
    ascending = all(above < below for above, below in pairwise(path))
    require(
        path[0] == 0 and ascending and path[-1] < q_len,
        f"nodes[{b}] is {path}; a path starts at the root, ascends and stays below q_len {q_len}",
    )
    require(
        kv_len(prefix_len, q_len) <= kv.slot_table.shape[1],
        f"request {b} has {kv_len(prefix_len, q_len)} entries; slot_table has room for "
        f"{kv.slot_table.shape[1]}",
    )
    start = int(layout.qo_indptr[b])
    planned = layout.out_cache_loc[start : start + q_len]
    reserved = kv.slot_table[b, prefix_len : kv_len(prefix_len, q_len)]
    require(
        torch.equal(planned, reserved),
        f"out_cache_loc of request {b} is {_brief(planned)}; slot_table reserves "
        f"{_brief(reserved)}: the tree was laid out with another table, or was committed already",
    )
    num_slots = min((pool.shape[0] for pool in (*kv.keys, *kv.values)), default=None)
    require(
        num_slots is None or int(reserved.max()) < num_slots,
        f"slot_table[{b}] holds slot {int(reserved.max())}; a pool has {num_slots} slots",
    )
    return path


def _brief(slots: Tensor) -> str:
    """Return the first few slots as text."""
    head = ", ".join(str(int(slot)) for slot in slots[:8])
    return f"[{head}{', ...' if slots.numel() > 8 else ''}]"

"""Step 2: lay the verify pass out: who owns which query rows, KV entries and mask bits.

Every width is the call's own: ``qo_indptr`` is made from the trees at hand and all other offsets from
``qo_indptr``. No configured width exists here (field names: SGLang's Triton backend).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from ddtree.spec.contracts import DraftTree, NumNodes, PrefixLen, QLen, VerifyLayout
from ddtree.spec.dtypes import INDEX, LENGTH, require_kind, require_tensor
from ddtree.spec.errors import require
from ddtree.spec.index import fits_int32, kv_len, mask_len, position
from ddtree.spec.public import public


@public
def plan_verify(
    tree: DraftTree,
    prefix_lens: Int[Tensor, " B"],
    slot_table: Int64[Tensor, "B max_context"],
    q_lens: Int[Tensor, " B"] | None = None,
) -> VerifyLayout:
    """Lay out one verify pass.

    Args:
        tree: the trees, padded to Q rows.
        prefix_lens: ``[B]`` committed KV entries of each request, the root not among them.
        slot_table: ``[B, max_context]`` pool slot of each KV entry; entries ``prefix_len`` to
            ``prefix_len + q_len`` are reserved for the tree, row r of the tree at entry
            ``prefix_len + r``.
        q_lens: ``[B]`` query rows of each request, ``num_nodes <= q_len <= Q``. None: Q for all, as
            in a fixed-size batch; ``tree.num_nodes``: a ragged batch without padding.

    Returns:
        The layout: ``T = sum(q_lens)`` query rows.

    Raises:
        InputError: dtypes or shapes that do not agree, a q_len that cuts off nodes, a context that
            is too short, a negative length or slot, a slot that a request has twice, or sizes whose
            indptr overflows int32.
    """
    require_kind("tree", tree, DraftTree)
    batch, rows = tree.token_ids.shape
    require(batch >= 1, "the tree has 0 requests; a verify pass has at least 1")
    require_tensor("prefix_lens", prefix_lens, LENGTH, (batch,))
    require_tensor("slot_table", slot_table, INDEX, (batch, "max_context"))
    if q_lens is not None:
        require_tensor("q_lens", q_lens, LENGTH, (batch,))
    prefixes = [PrefixLen(int(n)) for n in prefix_lens]
    widths = [QLen(rows)] * batch if q_lens is None else [QLen(int(n)) for n in q_lens]
    for b, (prefix_len, q_len) in enumerate(zip(prefixes, widths, strict=True)):
        _require_request(b, prefix_len, q_len, NumNodes(int(tree.num_nodes[b])), rows, slot_table)

    device = slot_table.device
    requests = list(zip(prefixes, widths, strict=True))
    return VerifyLayout(
        qo_indptr=_indptr("qo_indptr", widths, torch.int32, device),
        kv_indptr=_indptr("kv_indptr", prefixes, torch.int32, device),
        kv_indices=torch.cat([slot_table[b, :p] for b, (p, _) in enumerate(requests)]),
        mask_indptr=_indptr(
            "mask_indptr", [mask_len(p, q) for p, q in requests], torch.int64, device
        ),
        max_q_len=max(widths),
        positions=torch.cat(
            [position(p, tree.depths[b, :q].long()) for b, (p, q) in enumerate(requests)]
        ),
        out_cache_loc=torch.cat(
            [slot_table[b, p : kv_len(p, q)] for b, (p, q) in enumerate(requests)]
        ),
    )


def _require_request(
    b: int,
    prefix_len: PrefixLen,
    q_len: QLen,
    num_nodes: NumNodes,
    rows: int,
    slot_table: Tensor,
) -> None:
    """Refuse lengths of one request that cannot be laid out."""
    require(prefix_len >= 0, f"prefix_lens[{b}] is {prefix_len}; the least is 0")
    require(
        num_nodes <= q_len <= rows,
        f"q_lens[{b}] is {q_len}; it must be from num_nodes = {num_nodes} to the tree's {rows} rows",
    )
    context = slot_table.shape[1]
    require(
        kv_len(prefix_len, q_len) <= context,
        f"request {b} needs prefix_len + q_len = {prefix_len} + {q_len} = "
        f"{kv_len(prefix_len, q_len)} entries; slot_table has {context}",
    )
    used = slot_table[b, : kv_len(prefix_len, q_len)]
    require(
        bool((used >= 0).all()),
        f"slot_table[{b}] holds slot {int(used.min()) if used.numel() else 0} among the first "
        f"{used.numel()} entries; slots are at least 0",
    )
    slots, counts = used.unique(return_counts=True)
    for slot in slots[counts > 1].tolist()[:1]:
        entries = (used == slot).nonzero().flatten().tolist()
        require(False, f"slot_table[{b}] gives slot {slot} to entries {entries[:4]}; it holds one")


def _indptr(name: str, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Offsets ``[B+1]`` of consecutive segments."""
    total = sum(lengths)
    require(
        dtype is torch.int64 or fits_int32(total),
        f"{name} would end at {total}, over int32's 2147483647: split the batch",
    )
    return torch.tensor([0, *lengths], dtype=torch.int64, device=device).cumsum(0).to(dtype)

"""A target whose choice after a token depends on that token alone, on any device, capturable.

Its KV is a number of (layer, token, position), so a commit that kept the wrong rows shows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ddtree.spec import Acceptance, Commit, DraftTree, PagedKV, TreeMask, VerifyLayout

LAYERS = 3
HEADS = 2
HEAD_DIM = 4


class BigramTarget:
    """A ``spec.Target`` over ``table[vocab, vocab]``: row t holds the logits after token t."""

    def __init__(
        self,
        table: Tensor,
        slot_table: Tensor,
        num_slots: int,
        page_size: int,
        commit: Callable[[PagedKV, VerifyLayout, Acceptance], Commit],
    ) -> None:
        """Make the pools; their last slot, ``num_slots``, takes the rows that are not written."""
        self.table = table
        self.commit_kv = commit

        def pool() -> Tensor:
            return torch.full((num_slots + 1, HEADS, HEAD_DIM), torch.nan, device=table.device)

        self.kv = PagedKV(
            tuple(pool() for _ in range(LAYERS)),
            tuple(pool() for _ in range(LAYERS)),
            slot_table,
            page_size,
        )

    @property
    def slot_table(self) -> Tensor:
        """Pool slot of each KV entry of each request."""
        return self.kv.slot_table

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: TreeMask) -> Tensor:
        """Write each row's KV and return its logits."""
        tokens = row_tokens(tree, layout)
        slots = torch.where(
            layout.out_cache_loc < 0, self.kv.keys[0].shape[0] - 1, layout.out_cache_loc
        )
        for layer, (keys, values) in enumerate(zip(self.kv.keys, self.kv.values, strict=True)):
            code = (1000 * (layer + 1) + 31 * tokens + layout.positions).float()
            keys[slots] = code[:, None, None].expand(-1, HEADS, HEAD_DIM)
            values[slots] = -code[:, None, None].expand(-1, HEADS, HEAD_DIM)
        return self.table[tokens]

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """Keep the accepted nodes' KV."""
        return self.commit_kv(self.kv, layout, acceptance)


def row_tokens(tree: DraftTree, layout: VerifyLayout) -> Tensor:
    """Return the input token of each query row."""
    batch, rows = tree.token_ids.shape
    query = torch.arange(
        layout.positions.numel(), device=layout.positions.device, dtype=torch.int32
    )
    b = torch.searchsorted(layout.qo_indptr[1:], query, right=True).clamp(max=batch - 1)
    row = (query - layout.qo_indptr[b]).clamp(0, rows - 1)
    return tree.token_ids[b, row.long()]

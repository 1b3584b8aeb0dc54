"""The DFlash drafter for all places of a ``PagedTarget`` at once, without waiting for the device.

Its context lies in pools of its own in the very slots of the target's entries: whoever commits an entry has
given it a slot, and what the target's slot table says of a prefix holds here too.
"""

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ddtree.decoding.dflash import DFlashDrafter
from ddtree.decoding.fused import FusedLayers, Norm
from ddtree.decoding.paged import PagedTarget
from ddtree.impl.attention import HEAD_DIMS, block_attention
from ddtree.impl.layers import add_norm
from ddtree.impl.layout import plan_blocks
from ddtree.spec.contracts import Commit, DraftTree, QLen
from ddtree.spec.errors import require
from ddtree.spec.index import bit_words


class PagedDFlash:
    """Drafts a block for every place in one pass; every place has its block, used or not."""

    def __init__(self, drafter: DFlashDrafter, target: PagedTarget) -> None:
        """Make the pools.

        Raises:
            InputError: heads of a size that the kernels do not serve (``serves``).
        """
        config = drafter.model.config
        require(
            self.serves(drafter),
            f"the drafter has a head_dim of {config.head_dim}; the kernels serve {HEAD_DIMS}",
        )
        self.drafter, self.target = drafter, target
        self.horizon = drafter.block_size - 1
        batch, size, device = target.max_batch, QLen(drafter.block_size), target.device
        shape = (target.pad_slot + 1, config.num_key_value_heads, config.head_dim)

        def pools() -> tuple[Tensor, ...]:
            weight = drafter.model.fc.weight
            layers = range(config.num_hidden_layers)
            return tuple(torch.zeros(shape, dtype=weight.dtype, device=device) for _ in layers)

        self._pools = list(zip(pools(), pools(), strict=True))
        model = drafter.model
        self._layers = FusedLayers(list(model.layers), model.norm, config.head_dim)
        self._context_norm = Norm.of(model.hidden_norm)
        entries = torch.arange(target.max_context + size, device=device)
        cos, sin = model.rope(entries, model.fc.weight.dtype)
        self._rope = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        depths = torch.arange(size, dtype=torch.int32, device=device).expand(batch, size)
        depths = depths.contiguous()
        tokens = torch.full((batch, size), config.mask_token_id, device=device)
        scores = torch.zeros((batch, size), dtype=torch.float64, device=device)
        counts = torch.full((batch,), size, dtype=torch.int32, device=device)
        self._block = DraftTree(tokens, depths - 1, depths, scores, counts)
        """As a chain, which lays out its rows; the mask token everywhere but at the root."""
        words = [_word(size, word) for word in range(bit_words(size))]
        self._words = torch.tensor([words] * (batch * size), dtype=torch.int32, device=device)
        """Every row of a block sees the whole block."""
        self._steps = torch.arange(size, device=device)

    @staticmethod
    def serves(drafter: DFlashDrafter) -> bool:
        """Whether the kernels do."""
        return drafter.model.config.head_dim in HEAD_DIMS

    @torch.no_grad()
    def begin(self, place: int, count: int) -> None:
        """Take the context of the prompt of ``count`` tokens that the target has just read."""
        features = self.target.take_features(place, count)
        assert features is not None
        entries = torch.arange(count, device=features.device)
        self._append(features, entries, self.target.slot_table[place, :count])

    @torch.no_grad()
    def draft(
        self, roots: Int64[Tensor, " B"], prefix_lens: Int[Tensor, " B"]
    ) -> Float[Tensor, "B horizon vocab"]:
        """Logits of what may follow each root; those of unused places (prefix length -1) mean nothing."""
        self._block.token_ids[:, 0].copy_(roots)
        layout = plan_blocks(self._block.depths, prefix_lens, self.target.slot_table)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return block_attention(query, key, value, *self._pools[layer], layout, self._words)

        x = self.drafter.embed(self._block.token_ids.flatten())
        hidden, _ = self._layers(x, self._rope, layout.positions, attend)
        return self.drafter.logits(hidden.unflatten(0, self._block.token_ids.shape)[:, 1:])

    @torch.no_grad()
    def commit(
        self,
        features: Float[Tensor, "B W width"],
        prefix_lens: Int[Tensor, " B"],
        commit: Commit,
    ) -> None:
        """Take the context of what a round has committed behind ``prefix_lens``."""
        entries = prefix_lens.clamp(min=0)[:, None] + self._steps  # -1: an unused place
        slots = torch.where(commit.dst < 0, self.target.pad_slot, commit.dst)
        self._append(features.flatten(0, 1), entries.flatten(), slots.flatten())

    def _append(
        self,
        features: Float[Tensor, "n width"],
        entries: Int64[Tensor, " n"],
        slots: Int64[Tensor, " n"],
    ) -> None:
        model, norm = self.drafter.model, self._context_norm
        x, _ = add_norm(model.fc(features.to(norm.weight)), None, norm.weight, norm.eps)
        self._layers.write_context(x, self._rope, entries, self._pools, slots)


def _word(size: int, word: int) -> int:
    """The 32 bits of columns that exist, as a signed number."""
    bits = (1 << min(max(size - 32 * word, 0), 32)) - 1
    return bits - (1 << 32) if bits >= 1 << 31 else bits

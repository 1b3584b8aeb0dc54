"""The DFlash drafter for all places of a ``PagedTarget`` at once, without waiting for the device.

Its context lies in pools of its own in the very slots of the target's entries: whoever commits an entry has
given it a slot, and what the target's slot table says of a prefix holds here too.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from ddtree.decoding.dflash import DFlashDrafter
from ddtree.decoding.fused import FusedLayers, Norm, Tokens
from ddtree.decoding.paged import PagedTarget
from ddtree.impl.attention import HEAD_DIMS, block_attention
from ddtree.impl.commit import move_rows
from ddtree.impl.layers import add_norm
from ddtree.impl.layout import plan_blocks
from ddtree.spec.contracts import Commit, QLen
from ddtree.spec.errors import require
from ddtree.spec.index import bit_words


@dataclass(frozen=True)
class Drafted:
    """A draft, and what the round that it begins is of; nothing else writes into it."""

    logits: Float[Tensor, "B horizon vocab"]
    """Those of places without a prefix length mean nothing."""
    prefix_lens: Int32[Tensor, " B"]
    """The target's; -1 for places that have reached their limit, too."""
    roots: Int64[Tensor, " B"]


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
        model = drafter.model
        self._whole = torch.zeros(
            (
                config.num_hidden_layers,
                2,
                target.pad_slot + 1,
                config.num_key_value_heads,
                config.head_dim,
            ),
            dtype=model.fc.weight.dtype,
            device=device,
        )
        self._pools = [(key, value) for key, value in self._whole]
        self._layers = FusedLayers(
            list(model.layers), model.norm, config.head_dim, has_context=True
        )
        self._context_norm = Norm.of(model.hidden_norm)
        entries = torch.arange(target.max_context + size, device=device)
        cos, sin = model.rope(entries, model.fc.weight.dtype)
        self._rope = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        self._block = torch.full((batch, size), config.mask_token_id, device=device)
        """The mask token everywhere but at the root."""
        words = [_word(size, word) for word in range(bit_words(size))]
        self._words = torch.tensor([words] * (batch * size), dtype=torch.int32, device=device)
        """Every row of a block sees the whole block."""

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
        self.take(features, entries, self.target.slot_table[place, :count])

    @torch.no_grad()
    def draft(self, roots: Int64[Tensor, " B"], limits: Int32[Tensor, " B"]) -> Drafted:
        """Begin a round: draft what may follow each root of a place below its limit."""
        target = self.target
        layout, live, begun = plan_blocks(
            target.prefix_lens, limits, target.slot_table, roots, self._block
        )

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return block_attention(query, key, value, *self._pools[layer], layout, self._words)

        drafter = self.drafter
        factor = drafter.model.config.input_embedding_scale
        tokens = Tokens(drafter.embedding, self._block, layout.qo_indptr, factor)
        hidden = self._layers.draft(tokens, self._rope, layout.positions, attend)
        # the root's row is left out afterwards: without it rows of several blocks would have to be copied
        logits = drafter.logits(hidden).unflatten(0, self._block.shape)[:, 1:]
        return Drafted(logits, live, begun)

    @torch.no_grad()
    def commit(self, commit: Commit) -> None:
        """Follow the target's commit, where that moves KV from slot to slot."""
        if self.target.kv.page_size > 1:
            move_rows([pool for pair in self._pools for pool in pair], commit)

    @torch.no_grad()
    def take(
        self,
        features: Float[Tensor, "n width"],
        entries: Int64[Tensor, " n"],
        slots: Int64[Tensor, " n"],
    ) -> None:
        """Take the context of entries, in slots of their own; those with a negative slot are left out.

        A verify pass may hand in all rows of its trees, whoever will be accepted: like their KV they lie in
        the rows' slots until the commit, and a row's position is that of the entry it would become.
        """
        model, norm = self.drafter.model, self._context_norm
        x, _ = add_norm(model.fc(features.to(norm.weight)), None, norm.weight, norm.eps)
        self._layers.write_context(x, self._rope, entries, self._whole, slots)


def _word(size: int, word: int) -> int:
    """The 32 bits of columns that exist, as a signed number."""
    bits = (1 << min(max(size - 32 * word, 0), 32)) - 1
    return bits - (1 << 32) if bits >= 1 << 31 else bits

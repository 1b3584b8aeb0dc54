"""A Transformers causal LM as the target of draft-tree decoding, one request at a time."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.decoding import reference_attention
from ddtree.decoding.capabilities import (
    Caller,
    context_size,
    lowest,
    require_layers,
    require_tokens,
    require_tree_target,
)
from ddtree.spec.commit import commit_kv
from ddtree.spec.contracts import Acceptance, Commit, DraftTree, FlatMask, PagedKV, VerifyLayout
from ddtree.spec.errors import require
from ddtree.spec.mask import convert_mask

MOVES_KV = 2  # any page size above 1: the commit moves KV and leaves the slot table alone


class HFTarget:
    """Verifies trees with a Transformers model; its KV cache is the pool, entry i in slot i."""

    def __init__(
        self,
        model: Any,
        *,
        max_context: int | None = None,
        attention: Literal["dense", "reference"] = "dense",
        device: str | torch.device | None = None,
        prefill_chunk: int = 512,
    ) -> None:
        """Take a causal LM.

        Args:
            model: any Transformers causal LM with full attention in every layer; it is in evaluation mode
                from then on.
            max_context: most KV entries, prompt and tree included; None: what the model's
                configuration allows.
            attention: ``"dense"`` hands the model a 4-D additive mask; ``"reference"`` runs
                ``spec.verify_attention`` in every layer of the verify pass.
            device: moves the model; None: where it is.
            prefill_chunk: most prompt tokens of one forward.

        Raises:
            InputError: the model cannot verify trees (the layer type is named), or no context
                length is known.
        """
        require(
            attention in {"dense", "reference"},
            f"attention is {attention!r}; it must be 'dense' or 'reference'",
        )
        require_tree_target(model)
        if attention == "reference":
            reference_attention.register(model)
        size = context_size(model, max_context)
        require(prefill_chunk >= 1, f"prefill_chunk must be at least 1, got {prefill_chunk}")
        self.model = model.eval() if device is None else model.to(device).eval()
        self.attention: Literal["dense", "reference"] = attention
        self.max_context = size
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self.prefill_chunk = prefill_chunk
        self.slot_table = torch.arange(size, device=self.device)[None]
        self._call = Caller(model)
        self.reset()

    @property
    def device(self) -> torch.device:
        """Where the model's input goes."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    def reset(self, feature_layer_ids: tuple[int, ...] = ()) -> None:
        """Begin a new request; remember the output hidden states of these layers (0: the first).

        Raises:
            InputError: a layer that the model does not have.
        """
        from transformers import DynamicCache

        require_layers(feature_layer_ids, self.num_layers)
        self.cache = DynamicCache()
        self.prefix_len = 0
        self._feature_layer_ids = feature_layer_ids
        self._features: list[Tensor] = []  # [committed entries, width], not yet taken
        self._row_features: Tensor | None = None  # [T, width] of the last forward

    @torch.inference_mode()
    def prefill(self, token_ids: Int64[Tensor, " n"]) -> Float[Tensor, " vocab"]:
        """Append tokens to the prefix in chunks; return the logits after the last of them.

        Raises:
            InputError: no tokens, a token outside the vocabulary, or more than the context holds.
        """
        require_tokens(token_ids, self.vocab_size, self.prefix_len, self.max_context)
        for chunk in token_ids.to(self.device).split(self.prefill_chunk):
            positions = torch.arange(self.prefix_len, self.prefix_len + chunk.numel())
            logits, hidden = self._call(
                chunk,
                self.cache,
                keep=1,
                position_ids=positions.to(self.device)[None],
                output_hidden_states=bool(self._feature_layer_ids),
            )
            self._remember(hidden, slice(None))
            self.prefix_len += chunk.numel()
        return logits[-1]

    @torch.inference_mode()
    def step(self, token_id: int) -> Float[Tensor, " vocab"]:
        """One token of plain decoding: the model's own mask, positions and attention."""
        require(
            self.prefix_len < self.max_context,
            f"the context is full: {self.prefix_len} of {self.max_context} entries",
        )
        token = torch.tensor([token_id], device=self.device)
        logits, _ = self._call(token, self.cache, keep=1)
        self.prefix_len += 1
        return logits[-1]

    def rewind(self, prefix_len: int) -> None:
        """Drop all entries from ``prefix_len`` on; features not yet taken are dropped too."""
        require(
            0 <= prefix_len <= self.prefix_len,
            f"cannot rewind to {prefix_len} entries: there are {self.prefix_len}",
        )
        self._crop(prefix_len)
        self._features = []

    @torch.inference_mode()
    def forward(
        self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask
    ) -> Float[Tensor, "T vocab"]:
        """Verify a tree in one forward; its rows' KV stays behind the prefix until ``commit``.

        Every row of the layout runs, padding and the tail of fixed buffers included, but only real
        nodes get logits; other rows hold zeros.

        Raises:
            InputError: a batch other than 1, or a layout made for another prefix.
        """
        require(tree.token_ids.shape[0] == 1, f"batch is {tree.token_ids.shape[0]}, must be 1")
        prefix_len = int(layout.kv_indptr[1])
        require(
            prefix_len == self.prefix_len,
            f"the layout has a prefix of {prefix_len} entries, the cache holds {self.prefix_len}",
        )
        self._crop(self.prefix_len)  # what an earlier forward left without a commit
        num_rows, num_nodes = layout.positions.numel(), int(tree.num_nodes[0])
        tokens = tree.token_ids.new_zeros(num_rows)
        width = min(num_rows, tree.token_ids.shape[1])
        tokens[:width] = tree.token_ids[0, :width]
        inputs: dict[str, Any] = {
            "position_ids": layout.positions.to(self.device)[None],
            "output_hidden_states": bool(self._feature_layer_ids),
        }
        real = torch.arange(num_nodes, device=self.device)
        tokens = tokens.to(self.device)
        if self.attention == "dense":
            inputs["attention_mask"] = self._bias(layout, mask)
            kept, hidden = self._call(tokens, self.cache, keep=real, **inputs)
        else:
            with reference_attention.running(self.model, layout, mask):
                kept, hidden = self._call(tokens, self.cache, keep=real, **inputs)
        self._row_features = self._select(hidden)
        logits = kept.new_zeros(num_rows, kept.shape[1])
        logits[:num_nodes] = kept
        return logits

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """Gather the accepted rows behind the prefix in every layer, drop the rest."""
        layers: Any = self.cache.layers
        kv = PagedKV(
            keys=tuple(layer.keys[0].transpose(0, 1) for layer in layers),
            values=tuple(layer.values[0].transpose(0, 1) for layer in layers),
            slot_table=self.slot_table,
            page_size=MOVES_KV,
        )
        with torch.inference_mode():
            commit = commit_kv(kv, layout, acceptance)
        self._crop(int(commit.prefix_lens[0]))
        if self._row_features is not None:
            count = int(acceptance.num_accepted[0])
            self._features.append(self._row_features[acceptance.nodes[0, :count].long()])
        return commit

    def features(self) -> Float[Tensor, "new width"] | None:
        """Hidden states of the entries committed since the last call; None if none were asked for."""
        if not self._feature_layer_ids:
            return None
        taken, self._features = self._features, []
        return torch.cat(taken) if taken else None

    def _bias(self, layout: VerifyLayout, mask: FlatMask) -> Float[Tensor, "1 1 T K"]:
        """The call's mask as Transformers wants it; tail rows of fixed buffers see themselves."""
        allowed = convert_mask(mask, layout, "dense").bias[0, 0] == 0  # [q_len, prefix + q_len]
        num_rows, q_len = layout.positions.numel(), allowed.shape[0]
        whole = torch.zeros(num_rows, self.prefix_len + num_rows, dtype=torch.bool)
        whole[:, self.prefix_len :].fill_diagonal_(fill_value=True)
        whole[:q_len, : allowed.shape[1]] = allowed
        bias = torch.zeros(whole.shape, dtype=self.dtype)
        return bias.masked_fill_(~whole, lowest(self.dtype)).to(self.device)[None, None]

    def _crop(self, prefix_len: int) -> None:
        # layer by layer: a pass that an error stopped midway has grown the first layers only
        layers: Any = self.cache.layers
        for layer in layers:
            surplus = layer.get_seq_length() - prefix_len
            if surplus > 0:
                layer.crop(-surplus)
        self.prefix_len = prefix_len

    def _select(self, hidden: tuple[Tensor, ...] | None) -> Float[Tensor, "rows width"] | None:
        """Output of each feature layer, side by side; entry 0 of ``hidden`` is the embedding."""
        if not self._feature_layer_ids or hidden is None:
            return None
        return torch.cat([hidden[i + 1][0] for i in self._feature_layer_ids], dim=-1)

    def _remember(self, hidden: tuple[Tensor, ...] | None, rows: slice) -> None:
        features = self._select(hidden)
        if features is not None:
            self._features.append(features[rows])

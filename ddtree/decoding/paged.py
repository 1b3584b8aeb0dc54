"""A Transformers model as the target of a batch of requests, on a paged KV pool."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from ddtree.decoding.capabilities import (
    context_size,
    require_layers,
    require_tokens,
    require_tree_target,
)
from ddtree.decoding.fused import MODEL_TYPES, FusedModel, can_fuse
from ddtree.decoding.paged_attention import Asked, VerifyPass
from ddtree.decoding.paged_layers import layers_of
from ddtree.impl import commit_kv, convert_mask, plan_verify, tree_mask
from ddtree.impl.arguments import require_requests, require_tree
from ddtree.impl.commit import keep_accepted
from ddtree.impl.layout import row_inputs
from ddtree.impl.op import require_kernels
from ddtree.impl.tree import MAX_HORIZON
from ddtree.spec.contracts import (
    Acceptance,
    BitMask,
    Commit,
    DraftTree,
    PagedKV,
    TreeMask,
    VerifyLayout,
)
from ddtree.spec.dtypes import FP8
from ddtree.spec.errors import require, require_int
from ddtree.spec.mask import Form


class PagedTarget:
    """Verifies the trees of many requests in one pass, each on its own prefix.

    ``forward`` and ``commit`` never wait for the device, so ``impl.RoundGraph`` can capture a round.
    A batch has ``max_batch`` requests, those that are not in use with prefix length -1: hand
    ``prefix_lens`` and trees for all of them to ``impl.verify_round``.
    """

    mask_form: Form = "bits"

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int = 1,
        max_context: int | None = None,
        page_size: int = 1,
        num_pages: int | None = None,
        kv_dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        prefill_chunk: int = 512,
        feature_layer_ids: tuple[int, ...] = (),
        fused: bool | None = None,
    ) -> None:
        """Take a causal LM and make its pools.

        From then on the model is in evaluation mode, and attends as ``"ddtree"``.

        Args:
            model: a Transformers causal LM in float32, float16 or bfloat16 whose layers attend, in
                full or in a sliding window, through Transformers' registry. It may have been
                compiled in place (``model.compile()``).
            max_batch: requests held at once.
            max_context: most KV entries of a request, prompt and tree included; None: what the
                model's configuration allows.
            page_size: slots of a page. 1: a commit moves no KV.
            num_pages: pages of the pool; None: enough for ``max_batch`` full requests.
            kv_dtype: of the pools: the model's own (None) or ``float8_e4m3fn``, which takes half the bytes
                of bf16 and rounds what later rounds read.
            device: moves the model; None: where it is.
            prefill_chunk: most prompt tokens of one forward.
            feature_layer_ids: layers whose output hidden states a pass leaves in ``row_features``.
            fused: run the layers in few kernels (``fused.py``), as Llama, Mistral, Qwen2 and Qwen3 can be,
                instead of through Transformers; the weights stay the model's. None: on a CUDA device,
                where the model can be.

        Raises:
            InputError: the model cannot verify trees on a paged pool (the layer is named), it is on a
                device that runs no kernels, or sizes that make no sense.
        """
        for name, value in {
            "max_batch": max_batch,
            "page_size": page_size,
            "prefill_chunk": prefill_chunk,
        }.items():
            require_int(name, value, 1)
        require_tree_target(model, windows=True)
        self.max_context = context_size(model, max_context)
        self.model = model.eval() if device is None else model.to(device).eval()
        require_kernels(self.device, "the model")
        self.layers = layers_of(self.model)
        self.num_layers = len(self.layers)
        require(
            not fused or can_fuse(self.model),
            f"{type(model).__name__} is none of the plain models that can be fused "
            f"({', '.join(sorted(MODEL_TYPES))}; not compiled, no adapters, no biases of gates)",
        )
        if fused is None:
            fused = self.device.type == "cuda" and can_fuse(self.model)
        self._fused = None
        if fused:
            positions = self.max_context + MAX_HORIZON + 1
            self._fused = FusedModel(self.model, self.layers[0].head_dim, positions)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.watch(feature_layer_ids)
        self.row_features: Float[Tensor, "T width"] | None = None
        """Hidden states of the rows of the last pass, or of the last prefill."""
        self._committed: tuple[VerifyLayout, Acceptance] | None = None
        """What the last commit was given; None after a prefill."""

        pages_each = -(-self.max_context // page_size)
        num_pages = max_batch * pages_each if num_pages is None else num_pages
        require_int("num_pages", num_pages, 1)
        self._free_pages = list(range(num_pages))
        self._pages: list[list[int]] = [[] for _ in range(max_batch)]
        self.pad_slot = num_pages * page_size
        """The last slot, which takes what nobody reads."""
        kv_dtype = self.dtype if kv_dtype is None else kv_dtype
        require(
            kv_dtype in {self.dtype, *FP8},
            f"kv_dtype is {kv_dtype}; pools hold {self.dtype}, as the model, or float8_e4m3fn",
        )
        shape = (self.pad_slot + 1, self.layers[0].kv_heads, self.layers[0].head_dim)

        def pools() -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(shape, dtype=kv_dtype, device=self.device) for _ in self.layers
            )

        table = torch.full((max_batch, self.max_context), -1, device=self.device)
        self.kv = PagedKV(pools(), pools(), table, page_size)
        self.prefix_lens: Int32[Tensor, " max_batch"] = torch.full(
            (max_batch,), -1, dtype=torch.int32, device=self.device
        )
        """Committed entries of each request, -1 where none is held; memory that never moves."""

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

    @property
    def slot_table(self) -> Int64[Tensor, "max_batch max_context"]:
        """Pool slot of each KV entry of each request; -1: none is reserved."""
        return self.kv.slot_table

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free_pages)

    def watch(self, feature_layer_ids: tuple[int, ...]) -> None:
        """Keep these layers' output hidden states (0: the first) of what is committed from now on.

        Raises:
            InputError: a layer that the model does not have.
        """
        require_layers(feature_layer_ids, self.num_layers)
        self.feature_layer_ids = feature_layer_ids

    def can_begin(self, reserve: int) -> bool:
        """Whether pages for so many entries are free."""
        return -(-reserve // self.kv.page_size) <= self.num_free_pages

    def begin(
        self, place: int, token_ids: Int64[Tensor, " n"], reserve: int
    ) -> Float[Tensor, " vocab"]:
        """End what the place holds and begin a request there; see ``prefill``."""
        self.free(place)
        return self.prefill(place, token_ids, reserve=reserve)

    def line_up(self, places: Sequence[int]) -> Sequence[int]:
        """A round has all places, used or not, so that one graph serves every batch."""
        return range(self.max_batch)

    def take_features(self, place: int, count: int) -> Float[Tensor, "count width"] | None:
        """Hidden states of the ``count`` entries that the last prefill or commit added to a request.

        None where no layer is watched. Read them before the next pass.
        """
        if self.row_features is None or not self.feature_layer_ids:
            return None
        if self._committed is None:
            return self.row_features
        layout, acceptance = self._committed
        return self.row_features[layout.qo_indptr[place] + acceptance.nodes[place, :count]]

    @torch.no_grad()
    def prefill(
        self, request: int, token_ids: Int64[Tensor, " n"], *, reserve: int | None = None
    ) -> Float[Tensor, " vocab"]:
        """Append tokens to a request's prefix in chunks; a request that is not held begins here.

        Args:
            request: from 0 to ``max_batch - 1``.
            token_ids: ``[n]`` tokens.
            reserve: entries that a request which begins will need at most, the rows of its last tree
                included; pages for so many are taken. None: ``max_context``.

        Returns:
            The logits after the last token.

        Raises:
            InputError: no such request, no tokens, a token outside the vocabulary, more than was
                reserved, or too few free pages. Nothing is changed then.
        """
        self._require_request(request)
        begins = not self._pages[request]
        require(begins or reserve is None, f"request {request} is held: reserve when it begins")
        size = self.max_context if reserve is None else reserve
        require_int("reserve", size, 1, most=self.max_context)
        held = 0 if begins else int(self.prefix_lens[request])
        room = size if begins else self._room(request)
        require_tokens(token_ids, self.vocab_size, held, room)
        if begins:
            self._reserve(request, size)
        features = []
        for chunk in token_ids.to(self.device).split(self.prefill_chunk):
            tree = _chain(chunk)
            prefix = self.prefix_lens[request : request + 1]
            layout = plan_verify(tree, prefix, self.slot_table[request : request + 1])
            logits = self._pass(tree, layout, tree_mask(tree, layout).words, keep=1)
            features.append(self.row_features)
            self.prefix_lens[request] += chunk.numel()
        self._committed = None
        if self.feature_layer_ids:
            self.row_features = torch.cat([rows for rows in features if rows is not None])
        return logits[-1]

    def rewind(self, request: int, prefix_len: int) -> None:
        """Drop a request's entries from ``prefix_len`` on; its pages stay reserved.

        Raises:
            InputError: more entries than there are.
        """
        self._require_request(request)
        held = int(self.prefix_lens[request])
        require(0 <= prefix_len <= held, f"cannot rewind to {prefix_len} entries: {held} are held")
        self.prefix_lens[request].fill_(prefix_len)

    def free(self, request: int) -> None:
        """End a request: its pages and its place can be used again. One that is not held stays so."""
        self._require_request(request)
        self._free_pages += self._pages[request]
        self._pages[request] = []
        self.slot_table[request].fill_(-1)
        self.prefix_lens[request].fill_(-1)  # an assignment would wait for the device

    @torch.no_grad()
    def forward(
        self, tree: DraftTree, layout: VerifyLayout, mask: TreeMask
    ) -> Float[Tensor, "T vocab"]:
        """Verify the trees of all requests in one forward; their KV goes to ``out_cache_loc``.

        Args:
            tree: ``max_batch`` trees.
            layout: of ``impl.plan_verify``, or fixed buffers.
            mask: ancestor bits; other forms are converted.

        Returns:
            The logits of every row of the layout; those of rows past ``qo_indptr[-1]`` mean nothing.
        """
        bits = mask if isinstance(mask, BitMask) else convert_mask(mask, layout, "bits")
        return self._pass(tree, layout, bits.words, keep=0)

    @torch.no_grad()
    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """Keep the accepted rows' KV in every layer, and count them in ``prefix_lens``."""
        commit = commit_kv(self.kv, layout, acceptance)
        self._committed = layout, acceptance
        held = self.prefix_lens[: commit.prefix_lens.numel()]
        keep_accepted(acceptance.num_accepted, commit.prefix_lens, held)
        return commit

    def _pass(self, tree: DraftTree, layout: VerifyLayout, words: Tensor, keep: int) -> Tensor:
        """Run the rows through the model; ``keep``: logits of so many last rows, 0: of all."""
        watched = self.feature_layer_ids
        if self._fused is not None:
            logits, self.row_features = self._run_fused(tree, layout, words, keep)
        else:
            tokens, slots = row_inputs(tree, layout, self.pad_slot)
            verify = VerifyPass(self.kv, layout, slots)
            out = self.model(
                input_ids=tokens[None],
                position_ids=layout.positions[None],
                attention_mask=words[None, None],
                use_cache=False,
                logits_to_keep=keep,
                output_hidden_states=bool(watched),
                ddtree=verify,
            )
            logits = out.logits[0]
            if watched:  # entry 0 is the embedding
                rows = [out.hidden_states[i + 1][0] for i in watched]
                self.row_features = torch.cat(rows, dim=-1)
        return logits

    def _run_fused(
        self, tree: DraftTree, layout: VerifyLayout, words: Tensor, keep: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run the rows through the fused layers, which write the pools themselves where dtypes agree."""
        assert self._fused is not None
        require_tree(tree)
        require_requests(layout, "tree", tree.token_ids.shape[0])
        pools = list(zip(self.kv.keys, self.kv.values, strict=True))
        is_plain = pools[0][0].dtype == self.dtype
        slots = layout.out_cache_loc
        if not is_plain:
            _, slots = row_inputs(tree, layout, self.pad_slot)
        verify = VerifyPass(self.kv, layout, slots)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            asked = Asked(None, None, self.layers[layer].window, None)
            return verify.attend_in(layer, query, key, value, words, asked, write=not is_plain)

        return self._fused(
            tree.token_ids, layout.qo_indptr, layout.positions, attend,
            pools if is_plain else None, slots if is_plain else None, self.feature_layer_ids, keep,
        )  # fmt: skip

    def _reserve(self, request: int, entries: int) -> None:
        """Take pages for so many entries; the request then holds a prefix of none."""
        size = self.kv.page_size
        wanted, free = -(-entries // size), self.num_free_pages
        require(
            wanted <= free,
            f"{entries} entries take {wanted} pages of {size}; {free} are free: free a request, "
            "reserve less, or make num_pages larger",
        )
        pages, self._free_pages = self._free_pages[:wanted], self._free_pages[wanted:]
        self._pages[request] = pages
        first = torch.tensor(pages, device=self.device)[:, None] * size
        slots = (first + torch.arange(size, device=self.device)).flatten()[: self.max_context]
        self.slot_table[request, : slots.numel()] = slots
        self.prefix_lens[request].fill_(0)

    def _room(self, request: int) -> int:
        return min(len(self._pages[request]) * self.kv.page_size, self.max_context)

    def _require_request(self, request: int) -> None:
        require_int("request", request, 0, most=self.max_batch - 1)


def _chain(token_ids: Int64[Tensor, " n"]) -> DraftTree:
    """A tree in which each token is the only child of the one before: a stretch of a prompt."""
    depths = torch.arange(token_ids.numel(), dtype=torch.int32, device=token_ids.device)[None]
    scores = torch.zeros(depths.shape, dtype=torch.float64, device=token_ids.device)
    return DraftTree(token_ids[None], depths - 1, depths, scores, depths[:, -1] + 1)

"""SGLang's attention backends as they stand in a wheel, with a model runner of plain numbers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ddtree import spec
from ddtree.peers.sglang import _candidates, linked
from tests.hooks.engines import ENGINES, Engine, Stub, Values

CONFIGURED = 8
CONTEXT = 96
REQUESTS = 4
HEAD_DIM = 64
REAL = (
    "sglang.srt.plugins",
    "sglang.srt.plugins.hook_registry",
    "sglang.srt.environ",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.attention.flashinfer_backend",
    "sglang.srt.layers.attention.base_attn_backend",
    "sglang.srt.layers.attention.verify_mask",
    "sglang.srt.model_executor.forward_batch_info",
    "sglang.srt.speculative.spec_info",
    "sglang.srt.speculative.spec_registry",
    "sglang.srt.speculative.eagle_info",
    "sglang.srt.speculative.eagle_utils",
    "sglang.srt.mem_cache.kv_index_translator",
    "sglang.srt.mem_cache.kv_loc_plan",
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.kernels.ops.attention.score_mod",
    "sglang.kernels.ops.attention.metadata",
    "sglang.kernels.ops.attention.kv_indices",
    "sglang.kernels.ops.attention.utils",
    "sglang.kernels.ops.kvcache.kv_indices",
    "sglang.kernels.ops.speculative.spec_tree",
)


PLATFORMS = (
    "cuda", "hip", "xpu", "npu", "musa", "cpu", "gfx95_supported", "gfx942_supported", "gfx1250_supported"
)  # fmt: skip


def load(version: str) -> None:
    """Make ``import sglang`` find this version's wheel."""
    wheel = ENGINES / f"sglang-{version}"
    sys.path += [str(wheel), str(ENGINES / "common")]
    parallel = Values(
        attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1, attn_cp_size=1, dcp_enabled=False
    )
    kernel = Values(triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None)
    execution = Values(
        kernel=kernel, dllm=Values(dllm_algorithm=None),
        deterministic=Values(enable_deterministic_inference=False),
    )  # fmt: skip
    wrappers = Stub("flashinfer")
    for kind in ("Decode", "Prefill"):
        for cache in ("Paged", "Ragged"):
            setattr(wrappers, f"Batch{kind}With{cache}KVCacheWrapper", Wrapper)
    sys.modules |= {"flashinfer": wrappers, "flashinfer.cascade": Stub("flashinfer.cascade")}
    spec_settings = Values(
        speculative_num_draft_tokens=CONFIGURED, speculative_num_steps=7, speculative_eagle_topk=4
    )
    Engine(
        wheel / "sglang",
        REAL,
        {
            "sglang.srt.runtime_context": {
                "get_parallel": lambda: parallel,
                "get_exec": lambda: execution,
                "get_spec": lambda: spec_settings,
                "get_schedule": lambda: Values(chunked_prefill_size=-1),
                "get_buffer": lambda _, make: torch.empty(0),
                "get_platform": lambda: Values(is_sm100=False),
            },
            "sglang.srt.utils": {
                "get_device_core_count": lambda *_: 0,
                "get_cuda_graph_max_batch_size": lambda requests: requests,
                "is_flashinfer_available": lambda: True,
                **{f"is_{name}": lambda: False for name in PLATFORMS},
            },
            "sglang.srt.configs.hybrid_arch": {
                name: lambda *_: None
                for name in (
                    "mambaish_config", "hybrid_gdn_config", "kimi_linear_config", "linear_attn_model_spec"
                )
            },
        },
    )  # fmt: skip


def folder() -> Path:
    """Where the engine's files lie."""
    return next(finder.folder for finder in sys.meta_path if isinstance(finder, Engine))


class Wrapper:
    """In the place of FlashInfer's wrappers, whose plans need a GPU: counts what it is planned with."""

    def __init__(
        self, *_: Any, use_cuda_graph: bool = False, custom_mask_buf: Any = None, **__: Any
    ) -> None:
        """Be what SGLang asks of one."""
        self.is_cuda_graph_enabled, self._custom_mask_buf = use_cuda_graph, custom_mask_buf
        self.planned = 0

    def begin_forward(self, *_: Any, **__: Any) -> None:
        """Plan a pass."""
        self.planned += 1


def backend() -> Any:
    """A ``TritonAttnBackend``, made by its own constructor, with graph buffers for four requests."""
    module = import_module("sglang.srt.layers.attention.triton_backend")
    made = module.TritonAttnBackend(model_runner())
    made.init_cuda_graph_state(REQUESTS, REQUESTS * 64)
    return made


def flashinfer_backend() -> Any:
    """The same of FlashInfer."""
    module = import_module("sglang.srt.layers.attention.flashinfer_backend")
    made = module.FlashInferAttnBackend(model_runner())
    with on_cpu():
        made.init_cuda_graph_state(REQUESTS, REQUESTS * 64)
    return made


@contextmanager
def on_cpu() -> Iterator[None]:
    """Buffers that are asked for on a GPU by name are made here."""
    zeros = torch.zeros

    def made(*sizes: Any, **named: Any) -> Tensor:
        return zeros(*sizes, **named | {"device": "cpu"})

    torch.zeros = made
    try:
        yield
    finally:
        torch.zeros = zeros


def model_runner() -> Any:
    """Of the numbers that the backends' constructors read."""
    device = str(torch.get_default_device())
    table = torch.arange(1, 1 + REQUESTS * CONTEXT, dtype=torch.int32).view(REQUESTS, CONTEXT)
    pool = SimpleNamespace(
        get_value_buffer=lambda _: torch.zeros(1 + REQUESTS * CONTEXT, 2, HEAD_DIM),
        get_v_head_dim=lambda: HEAD_DIM,
        get_kv_cache_quant_method=Values,
        start_layer=0,
    )
    runner = Values(
        req_to_token_pool=SimpleNamespace(size=REQUESTS, req_to_token=table),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        sliding_window_size=None,
        page_size=1,
        device=device,
        gpu_id=0,
        is_draft_worker=False,
        kv_cache_dtype=torch.float16,
        decode_num_tokens_per_req=lambda: CONFIGURED,
        server_args=Values(
            speculative_num_draft_tokens=CONFIGURED, speculative_num_steps=7, speculative_eagle_topk=4,
            triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None,
            chunked_prefill_size=-1, enable_deterministic_inference=False,
            get_attention_backends=lambda: ("flashinfer", "flashinfer"),
        ),
        model_config=Values(
            num_attention_heads=4, get_num_kv_heads=lambda *_: 2, get_max_num_attention_heads=lambda: 4,
            v_head_dim=HEAD_DIM, swa_v_head_dim=HEAD_DIM, head_dim=HEAD_DIM, context_len=CONTEXT,
            is_encoder_decoder=False, hf_config=SimpleNamespace(architectures=()),
        ),
    )  # fmt: skip
    if (folder() / "srt/mem_cache/kv_index_translator.py").is_file():
        translator = import_module("sglang.srt.mem_cache.kv_index_translator")
        runner.kv_index_translator = translator.KVIndexTranslator(
            req_to_token=table, token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            token_to_kv_pool=pool, page_size=1, device=device,
        )  # fmt: skip
    return runner


class Pass:
    """A verify pass of trees of one budget, in the engine's terms."""

    def __init__(
        self, budget: int, prefixes: list[int], *, third_party: bool, topk: int = 4
    ) -> None:
        """Draft trees, and lay them out over the slots of the backend's requests."""
        requests, vocab = len(prefixes), 50
        random = torch.Generator().manual_seed(budget)
        logits = torch.randn(requests, 7, vocab, generator=random, device="cpu")
        logits = logits.to(torch.get_default_device())
        roots = torch.arange(requests)
        log_probs = torch.log_softmax(logits * 3, -1)
        self.tree = spec.build_tree(log_probs, roots, spec.Budget(budget), topk)
        table = torch.arange(1, 1 + requests * CONTEXT).view(requests, CONTEXT)
        self.layout = spec.plan_verify(self.tree, torch.tensor(prefixes), table)
        self.mask = spec.tree_mask(self.tree, self.layout, "flat").allowed
        self.width = budget + 1
        self.prefixes = prefixes
        self.spec_info = (self._third_party if third_party else self._eagle)()

    def _third_party(self) -> Any:
        """That of an algorithm that is not SGLang's own, which sets ``draft_token_num`` alone."""
        base = import_module("sglang.srt.speculative.spec_info")
        made = type("TreeVerifyInput", (base.SpecInput,), {})(base.SpecInputType.EAGLE_VERIFY)
        made.draft_token_num, made.custom_mask = self.width, self.mask
        return made

    def _eagle(self) -> Any:
        """SGLang's own, with the links of each tree."""
        child, sibling = linked(self.tree)
        rows = torch.arange(self.tree.parents.numel()).view(self.tree.parents.shape)
        info = import_module("sglang.srt.speculative.eagle_info")
        return info.EagleVerifyInput(
            draft_token=self.tree.token_ids.flatten(), custom_mask=self.mask, positions=self.layout.positions,
            retrieve_index=rows, retrieve_next_token=child, retrieve_next_sibling=sibling,
            retrieve_cum_len=None, spec_steps=7, topk=4, draft_token_num=self.width,
            capture_hidden_mode=None, seq_lens_sum=sum(self.prefixes), seq_lens_cpu=None,
        )  # fmt: skip

    def by_sglang(self) -> None:
        """Have SGLang's own tree builder make mask, positions and links, in place of ours."""
        builder = import_module("sglang.kernels.ops.speculative.spec_tree")
        parents, selected, width, prefix_lens = _candidates(self.tree, self.layout)
        info, rows = self.spec_info, self.tree.parents.numel()
        info.custom_mask = torch.ones_like(self.mask)
        info.positions, *links = (torch.full((rows,), -1) for _ in range(4))
        builder.sgl_build_tree_kernel_triton(
            parents, selected, prefix_lens, info.custom_mask, info.positions, *links,
            topk=width, depth=width, draft_token_num=width,
        )  # fmt: skip
        links = [link.view(-1, width) for link in links]
        info.retrieve_index, info.retrieve_next_token, info.retrieve_next_sibling = links

    def batch(self, room: int = 0) -> Any:
        """What the backend is given; ``room`` for more requests is padding, as before a replay."""
        modes = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        used = len(self.prefixes)
        padding = max(room - used, 0)
        rows = padding * self.width
        return SimpleNamespace(
            batch_size=used + padding,
            forward_mode=modes.TARGET_VERIFY,
            actual_forward_mode=modes.TARGET_VERIFY,
            req_pool_indices=torch.tensor([*range(used), *[0] * padding]),
            seq_lens=torch.tensor([*self.prefixes, *[1] * padding]),
            seq_lens_sum=sum(self.prefixes) + padding,
            seq_lens_cpu=None,
            positions=padded(getattr(self.spec_info, "positions", self.layout.positions), rows),
            input_ids=padded(self.tree.token_ids.flatten(), rows),
            out_cache_loc=self.layout.out_cache_loc,
            num_padding=padding,
            encoder_lens=None,
            kv_loc_plan=None,
            spec_info=self.spec_info,
        )


def padded(values: Tensor, rows: int) -> Tensor:
    """Values of a larger pass before are behind this one's."""
    return torch.cat([values, torch.full((rows,), 77, dtype=values.dtype)])


def attend(made: Any, pass_: Pass) -> Tensor:
    """Call the attention kernel as ``forward_extend`` does."""
    rows, meta = pass_.tree.token_ids.numel(), made.forward_metadata
    query = torch.randn(rows, 4, HEAD_DIM)
    key, value, output = (
        torch.randn(rows, 2, HEAD_DIM),
        torch.randn(rows, 2, HEAD_DIM),
        torch.zeros(rows, 4, HEAD_DIM),
    )
    pool = torch.zeros(1 + 4 * CONTEXT, 2, HEAD_DIM)
    made.extend_attention_fwd(
        query, key, value, output, pool, pool, meta.qo_indptr, meta.kv_indptr, meta.kv_indices,
        meta.custom_mask, True, meta.mask_indptr, meta.max_extend_len, 1.0, 1.0, 0.25, logit_cap=0.0,
    )  # fmt: skip
    return output

"""Batches through vLLM's own plugin loader, ``AttentionGroup`` and metadata builder, in a process of its own.

``python -m tests.hooks.vllm_pass FUNCTION``; the function's result is printed as JSON in the last line.
"""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from tests.hooks.engines import ENGINES, Anything, Engine, Values
from tests.hooks.entry_points import caught, declare_entry_points

BLOCK = 16
REAL = (
    "vllm.plugins",
    "vllm.v1.worker.utils",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.kv_cache_interface",
    "vllm.utils.math_utils",
)


def group(kind: str = "FullAttentionSpec") -> Any:
    """An ``AttentionGroup`` of the Triton backend with its builder, as a worker makes it."""
    utils = import_module("vllm.v1.worker.utils")
    interface = import_module("vllm.v1.kv_cache_interface")
    backend = import_module("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend
    more = {"sliding_window": 32} if kind == "SlidingWindowSpec" else {}
    cache = getattr(interface, kind)(
        block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float16, **more
    )
    config = Values(
        model_config=Values(
            get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 2,
            get_head_size=lambda: 64, rswa_window=None,
        ),
        compilation_config=Values(cudagraph_mode="NONE"), speculative_config=None,
        scheduler_config=Values(max_num_seqs=8),
        parallel_config=Values(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )  # fmt: skip
    made = utils.AttentionGroup(backend, ["layer"], cache, 0)
    made.create_metadata_builders(config, torch.device("cpu"))
    return made


def batch(prefixes: list[int], widths: list[int], padded_to: int = 0) -> Any:
    """The common metadata of a batch as the model runner fills it, padded requests and rows behind it."""
    common = import_module("vllm.v1.attention.backend").CommonAttentionMetadata
    requests = max(len(prefixes), padded_to)
    empty = requests - len(prefixes)
    tables = torch.zeros(requests, 8, dtype=torch.int32)
    slots, positions = [], []
    for b, (prefix, width) in enumerate(zip(prefixes, widths, strict=True)):
        tables[b] = torch.arange(1 + 8 * b, 9 + 8 * b).flip(0)
        entries = torch.arange(prefix, prefix + width)
        slots.append(tables[b, entries // BLOCK].long() * BLOCK + entries % BLOCK)
        positions.append(entries)
    starts = torch.tensor([0, *widths, *[0] * empty]).cumsum(0).int()
    tail = 4 if padded_to else 0
    return common(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor([p + w for p, w in zip(prefixes, widths, strict=True)] + [0] * empty).int(),
        num_reqs=requests, num_actual_tokens=sum(widths) + tail, max_query_len=max(widths), max_seq_len=128,
        block_table_tensor=tables, slot_mapping=torch.cat([*slots, torch.full((tail,), -1)]),
        positions=torch.cat([*positions, torch.full((tail,), 7)]),
    )  # fmt: skip


def silent() -> int:
    """Batches that are right: prefill, decode, drafts verified as chains, padding, captures, other caches."""
    passes = 0
    for kind in ("FullAttentionSpec", "SlidingWindowSpec"):
        made = group(kind)
        for prefixes, widths in (
            ([0], [40]), ([17, 3], [1, 1]), ([5, 31, 0], [8, 8, 8]), ([5, 31, 64], [8, 1, 33]),
        ):  # fmt: skip
            for padded_to in (0, 6):
                made.build_metadata(batch(prefixes, widths, padded_to))
                passes += 1
        warm_up = batch([9, 9], [8, 8])
        warm_up.slot_mapping.fill_(-1)
        made.build_metadata_for_cudagraph_capture(warm_up)
        drafter = batch([5, 31], [8, 8])
        drafter.positions += 1
        made.build_metadata(drafter)
    made.kv_cache_spec = type("MambaSpec", (), {})()
    made.build_metadata(batch([5], [8]))
    return passes


def wrong() -> dict[str, Any]:
    """Batches with one thing wrong each."""
    made, right = group(), batch([5, 31], [17, 17])
    ends = torch.tensor([0, 17, 34])
    slots = right.slot_mapping

    def broken(change: Callable[[Any], Any]) -> list[Any] | None:
        return caught(lambda: made.build_metadata(change(batch([5, 31], [17, 17]))))

    def moved(by: int) -> Any:
        return torch.cat([slots[:20], slots[20:] + by])

    return {
        "right": broken(lambda common: common),
        "max_query_len": broken(lambda common: replace(common, max_query_len=8)),
        "indptr": broken(lambda common: replace(common, query_start_loc=ends[[0, 2, 1]].int())),
        "rows": broken(lambda common: replace(common, slot_mapping=slots[:16])),
        "slots": broken(lambda common: replace(common, slot_mapping=moved(40 * BLOCK))),
        "one slot": broken(lambda common: replace(common, slot_mapping=slots.clamp(max=int(slots[3])))),
        "seq_lens": broken(lambda common: replace(common, seq_lens=torch.tensor([22, 8]).int())),
    }  # fmt: skip


def main(name: str) -> None:
    """Load the engine and its plugins, and print what the function returns."""
    declare_entry_points()
    known: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.envs": {"VLLM_PLUGINS": None},
        "vllm.model_executor.layers.attention.attention": {
            "get_num_attention_heads_from_layers": lambda *_: None
        },
        "vllm.v1.attention.backends.fa_utils": {
            "get_num_attention_heads_from_layers": lambda *_: None
        },
        "vllm.platforms": {"current_platform": Anything()},
    }
    Engine(ENGINES / "vllm-0.33.0" / "vllm", REAL, known)
    sys.path.append(str(ENGINES / "vllm-0.33.0"))
    import_module("vllm.plugins").load_general_plugins()
    print(json.dumps(globals()[name]()))


if __name__ == "__main__":
    main(*sys.argv[1:])

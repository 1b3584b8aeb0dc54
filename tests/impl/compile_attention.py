"""Compile both launches of ``verify_attention`` for a GPU that is not there; print what they took.

A process of its own, since Triton's interpreter, once on, leaves nothing to compile.
Usage: ``python -m tests.impl.compile_attention CAPABILITY DTYPE HEAD_DIM OPTIONS``, OPTIONS 0 or 1.
"""

import json
import sys
from dataclasses import asdict

import torch

from ddtree import spec
from ddtree.impl.attention import attend
from ddtree.impl.attention_configs import choose_config
from tests.impl.launches import Compiled, compiled_for


def compile_both(
    capability: int, dtype: torch.dtype, head_dim: int, with_options: bool
) -> list[Compiled]:
    """Compile for 4 query heads a KV head; nothing is run, so tensors hold anything."""
    q_len, q_heads, kv_heads = 65, 32, 8
    config = choose_config(dtype, head_dim)
    indptr = torch.zeros(2, dtype=torch.int32)
    rows = torch.zeros(q_len, dtype=torch.int64)
    layout = spec.VerifyLayout(indptr, indptr, rows, indptr.long(), q_len, rows, rows)

    def tensor(heads: int) -> torch.Tensor:
        return torch.zeros(q_len, heads, head_dim, dtype=dtype)

    with compiled_for(capability) as compiled:
        attend(
            tensor(q_heads),
            tensor(kv_heads),
            tensor(kv_heads),
            tensor(kv_heads),
            tensor(kv_heads),
            layout,
            torch.zeros(q_len, 3, dtype=torch.int32),
            scale=0.1,
            softcap=30.0 if with_options else None,
            sinks=torch.zeros(q_heads) if with_options else None,
            window=512 if with_options else None,
            return_lse=with_options,
            config=config,
            num_programs=132 * config.programs_per_sm,
        )
    return compiled


if __name__ == "__main__":
    target, dtype_name, dim, options = sys.argv[1:]
    found = compile_both(int(target), getattr(torch, dtype_name), int(dim), options == "1")
    print(json.dumps([asdict(kernel) for kernel in found]))

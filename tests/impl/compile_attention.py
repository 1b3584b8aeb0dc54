"""Compile both launches of ``verify_attention`` for GPUs that are not there; print what they took.

A process of its own, since Triton's interpreter, once on, leaves nothing to compile.
Usage: ``python -m tests.impl.compile_attention CAPABILITY-DTYPE-HEAD_DIM[-fp8][-general][-options] ...``;
``general`` asks for the kernel that runs everywhere.
"""

import json
import sys
from dataclasses import asdict
from unittest.mock import patch

import torch

from ddtree import spec
from ddtree.impl.attention import attend
from ddtree.impl.attention_configs import choose_config
from tests.impl.launches import Compiled, compiled_for


def compile_both(variant: str) -> list[Compiled]:
    """Compile for 4 query heads a KV head; nothing is run, so tensors hold anything."""
    capability, dtype_name, dim, *extras = variant.split("-")
    dtype, head_dim = getattr(torch, dtype_name), int(dim)
    with_options, fp8 = "options" in extras, "fp8" in extras
    q_len, q_heads, kv_heads = 65, 32, 8
    is_general = "general" in extras
    config = choose_config(dtype, head_dim, 0 if is_general else int(capability) // 10, fp8=fp8)
    indptr = torch.zeros(2, dtype=torch.int32)
    rows = torch.zeros(q_len, dtype=torch.int64)
    layout = spec.VerifyLayout(indptr, indptr, rows, indptr.long(), spec.QLen(q_len), rows, rows)

    def tensor(heads: int) -> torch.Tensor:
        return torch.zeros(q_len, heads, head_dim, dtype=dtype)

    pool = tensor(kv_heads)
    converts = patch("ddtree.impl.attention._converts_fp8", lambda _: int(capability) >= 89)
    with converts, compiled_for(int(capability)) as compiled:
        attend(
            tensor(q_heads),
            tensor(kv_heads),
            tensor(kv_heads),
            pool.to(torch.float8_e4m3fn) if fp8 else pool,
            pool.to(torch.float8_e4m3fn) if fp8 else pool,
            layout,
            torch.zeros(q_len, 3, dtype=torch.int32),
            scale=0.1,
            softcap=30.0 if with_options else None,
            sinks=torch.zeros(q_heads) if with_options else None,
            window=512 if with_options else None,
            key_scale=torch.ones(kv_heads) if fp8 else None,
            value_scale=0.02 if fp8 else None,
            return_lse=with_options,
            config=config,
            num_programs=132 * config.programs_per_sm,
        )
    return compiled


if __name__ == "__main__":
    print(json.dumps({v: [asdict(kernel) for kernel in compile_both(v)] for v in sys.argv[1:]}))

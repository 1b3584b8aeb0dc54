"""The address formulas of ``ddtree.spec.index``, callable inside Triton kernels.

Compiled kernels call each formula wrapped once by ``triton.jit``; Triton's CPU interpreter calls the
plain Python function. Either way it is the reference's own function, the one that is proved.
"""

from collections.abc import Callable
from typing import Any

import triton

from ddtree.spec import index


def on_device(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Make a plain function callable from kernels."""
    return formula if triton.knobs.runtime.interpret else triton.jit(formula)


bit_shift = on_device(index.bit_shift)
bit_word = on_device(index.bit_word)
bit_words = on_device(index.bit_words)
block_start = on_device(index.block_start)
chunk_len = on_device(index.chunk_len)
chunk_start = on_device(index.chunk_start)
col_of = on_device(index.col_of)
commit_entry = on_device(index.commit_entry)
dropped_step = on_device(index.dropped_step)
kv_len = on_device(index.kv_len)
mask_len = on_device(index.mask_len)
mask_offset = on_device(index.mask_offset)
num_blocks = on_device(index.num_blocks)
packed_byte = on_device(index.packed_byte)
packed_len = on_device(index.packed_len)
packed_shift = on_device(index.packed_shift)
position = on_device(index.position)
q_len_of = on_device(index.q_len_of)
row_of = on_device(index.row_of)
row_offset = on_device(index.row_offset)
round_up = on_device(index.round_up)
tree_col = on_device(index.tree_col)
unused_row = on_device(index.unused_row)
window_start = on_device(index.window_start)

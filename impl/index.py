"""The address formulas of ``ddtree.spec.index``, callable inside Triton kernels.

Compiled kernels call each formula wrapped once by ``triton.jit``; Triton's CPU interpreter calls the
plain Python function. Either way it is the reference's own function, the one that is proved.
"""

from collections.abc import Callable
from typing import Any

import triton

from ddtree.spec import index


def _on_device(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Make a formula callable from kernels."""
    return formula if triton.knobs.runtime.interpret else triton.jit(formula)


bit_shift = _on_device(index.bit_shift)
bit_word = _on_device(index.bit_word)
block_start = _on_device(index.block_start)
chunk_len = _on_device(index.chunk_len)
chunk_start = _on_device(index.chunk_start)
col_of = _on_device(index.col_of)
commit_entry = _on_device(index.commit_entry)
dropped_step = _on_device(index.dropped_step)
kv_len = _on_device(index.kv_len)
mask_len = _on_device(index.mask_len)
mask_offset = _on_device(index.mask_offset)
packed_byte = _on_device(index.packed_byte)
packed_len = _on_device(index.packed_len)
packed_shift = _on_device(index.packed_shift)
position = _on_device(index.position)
row_of = _on_device(index.row_of)
row_offset = _on_device(index.row_offset)
tree_col = _on_device(index.tree_col)
unused_row = _on_device(index.unused_row)
window_start = _on_device(index.window_start)

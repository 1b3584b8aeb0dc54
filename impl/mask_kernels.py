"""Kernels of the mask: ancestor bits from the parents, and each form from each other."""

import triton
import triton.language as tl

from ddtree.impl.index import (
    bit_shift,
    bit_word,
    block_start,
    col_of,
    kv_len,
    mask_len,
    mask_offset,
    packed_byte,
    packed_len,
    packed_shift,
    row_of,
    row_offset,
    tree_col,
)


@triton.jit
def request_of(qo_indptr, batch, query, BATCH: tl.constexpr):
    """Request that owns each query row; ``batch`` for rows past the last."""
    request = tl.arange(0, BATCH)
    end = tl.load(qo_indptr + 1 + request, mask=request < batch, other=0x7FFFFFFF)
    return tl.sum((end[None, :] <= query[:, None]).to(tl.int32), axis=1)


@triton.jit
def bits_kernel(
    parents, qo_indptr, words,  # [B, rows], [B+1], out [T, num_words]
    batch, rows, num_queries, num_words,
    BATCH: tl.constexpr, QUERIES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Ancestor bits of QUERIES query rows: climb from each row to its root, setting a bit a step."""
    query = block_start(tl.program_id(0), QUERIES) + tl.arange(0, QUERIES)
    b = request_of(qo_indptr, batch, query, BATCH)
    has_query = (query < num_queries) & (b < batch)
    node = query - tl.load(qo_indptr + b, mask=has_query, other=0)
    node = tl.where(has_query & (node < rows), node, -1)
    tree = parents + row_offset(b.to(tl.int64), rows, 0)
    word = tl.arange(0, WORDS)[None, :]
    bits = tl.zeros([QUERIES, WORDS], tl.int32)
    while tl.max(node, axis=0) >= 0:
        is_node = node >= 0
        at = tl.where(is_node, node, 0)
        bit = tl.where(is_node, tl.full([QUERIES], 1, tl.int32) << bit_shift(at), 0)
        bits |= tl.where(word == bit_word(at)[:, None], bit[:, None], 0)
        parent = tl.load(tree + at, mask=is_node, other=-1)
        node = tl.where(parent < node, parent, -1)  # a parent comes before its child
    into = row_offset(query.to(tl.int64)[:, None], num_words, word)
    tl.store(words + into, bits, mask=(query < num_queries)[:, None] & (word < num_words))


@triton.jit
def is_visible(
    mask, byte_indptr, mask_indptr, b, query, row, col, prefix_len, q_len, wanted,
    mask_rows, mask_cols,
    FORM: tl.constexpr,
):  # fmt: skip
    """Read (row, col) of request b from a mask of any form; False where not ``wanted`` or outside it.

    ``mask_cols`` is the flat form's entries, the packed form's bytes, the dense form's columns or the words
    of a row of bits, ``mask_rows`` the dense form's rows.
    """
    if FORM == "flat":
        at = mask_offset(tl.load(mask_indptr + b), row, col, prefix_len, q_len)
        seen = tl.load(mask + at, mask=wanted & (at >= 0) & (at < mask_cols), other=0) != 0
    elif FORM == "packed":
        bit = tl.where(wanted, mask_offset(0, row, col, prefix_len, q_len), 0)
        at = packed_byte(tl.load(byte_indptr + b), bit)
        byte = tl.load(mask + at, mask=wanted & (at >= 0) & (at < mask_cols), other=0)
        seen = ((byte.to(tl.int32) >> packed_shift(bit).to(tl.int32)) & 1) != 0
    elif FORM == "dense":
        tree_start = mask_cols - mask_rows
        entry = tl.where(col < prefix_len, col, tree_col(tree_start, col - prefix_len))
        line = row_offset(row_offset(b.to(tl.int64), mask_rows, row), mask_cols, entry)
        wanted &= (row < mask_rows) & (entry < mask_cols)
        seen = tl.load(mask + line, mask=wanted, other=1.0) == 0
    else:
        in_tree = wanted & (col >= prefix_len)
        node = tl.where(in_tree, col - prefix_len, 0)
        at = row_offset(query.to(tl.int64), mask_cols, bit_word(node))
        word = tl.load(mask + at, mask=in_tree, other=-1)
        seen = ((word >> bit_shift(node).to(tl.int32)) & 1) != 0
    return seen & wanted


@triton.jit(do_not_specialize=["mask_rows", "mask_cols"])
def write_rows_kernel(
    mask, byte_indptr,  # in any form
    qo_indptr, kv_indptr, mask_indptr, out,
    batch, mask_rows, mask_cols, out_rows, out_cols,
    FORM: tl.constexpr, TO: tl.constexpr, BATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one query row of the flat, dense or bits form; programs of axis 1 share its columns."""
    query = tl.program_id(0)
    b = tl.max(request_of(qo_indptr, batch, query + tl.zeros([1], tl.int32), BATCH), axis=0)
    if b < batch:
        start = tl.load(qo_indptr + b)
        row, q_len = query - start, tl.load(qo_indptr + b + 1) - start
        kv_start = tl.load(kv_indptr + b)
        prefix_len = (tl.load(kv_indptr + b + 1) - kv_start).to(tl.int64)
        width = kv_len(prefix_len, q_len)
        first = block_start(tl.program_id(1), BLOCK)
        step = block_start(tl.num_programs(1), BLOCK)
        if TO == "bits":
            for word in range(tl.program_id(1), out_cols, tl.num_programs(1)):
                node = block_start(word, 32) + tl.arange(0, 32)
                seen = is_visible(
                    mask, byte_indptr, mask_indptr, b, query, row, tree_col(prefix_len, node), prefix_len, q_len,
                    node < q_len, mask_rows, mask_cols, FORM,
                )  # fmt: skip
                bits = tl.sum(
                    seen.to(tl.int32) << bit_shift(node), axis=0
                )  # distinct bits: no carry
                tl.store(out + row_offset(query.to(tl.int64), out_cols, word), bits)
        else:
            for begin in range(first, width, step):
                col = begin + tl.arange(0, BLOCK).to(tl.int64)
                seen = is_visible(
                    mask, byte_indptr, mask_indptr, b, query, row, col, prefix_len, q_len,
                    col < width, mask_rows, mask_cols, FORM,
                )  # fmt: skip
                if TO == "flat":
                    into = mask_offset(tl.load(mask_indptr + b), row, col, prefix_len, q_len)
                    tl.store(out + into, seen.to(tl.uint8), mask=col < width)
                else:
                    tree_start = out_cols - out_rows
                    entry = tl.where(col < prefix_len, col, tree_col(tree_start, col - prefix_len))
                    line = row_offset(row_offset(b.to(tl.int64), out_rows, row), out_cols, entry)
                    tl.store(
                        out + line, tl.where(seen, 0.0, -3.4028234663852886e38), mask=col < width
                    )


@triton.jit(do_not_specialize=["mask_rows", "mask_cols"])
def packed_kernel(
    mask, byte_indptr,  # in any form
    qo_indptr, kv_indptr, mask_indptr, out, out_indptr,
    batch, mask_rows, mask_cols,
    FORM: tl.constexpr, BATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one request's packed bits, BLOCK bytes a step; programs of axis 1 share them."""
    b = tl.program_id(0)
    request = tl.arange(0, BATCH)
    is_request = request < batch
    qo_start = tl.load(qo_indptr + request, mask=is_request, other=0)
    kv_start = tl.load(kv_indptr + request, mask=is_request, other=0)
    widths = tl.load(qo_indptr + request + 1, mask=is_request, other=0).to(tl.int64) - qo_start
    prefixes = tl.load(kv_indptr + request + 1, mask=is_request, other=0).to(tl.int64) - kv_start
    sizes = tl.where(is_request, packed_len(mask_len(prefixes, widths)), 0)
    byte_start = tl.sum(tl.where(request < b, sizes, 0), axis=0)
    size = tl.sum(tl.where(request == b, sizes, 0), axis=0)
    q_len = tl.sum(tl.where(request == b, widths, 0), axis=0)
    prefix_len = tl.sum(tl.where(request == b, prefixes, 0), axis=0)
    start = tl.load(qo_indptr + b)
    if tl.program_id(1) == 0:
        if b == 0:
            tl.store(out_indptr, 0)
        tl.store(out_indptr + b + 1, byte_start + size)
    for first in range(
        block_start(tl.program_id(1), BLOCK), size, block_start(tl.num_programs(1), BLOCK)
    ):
        byte = first + tl.arange(0, BLOCK)
        bit = block_start(byte.to(tl.int64)[:, None], 8) + tl.arange(0, 8)[None, :]
        wanted = bit < mask_len(prefix_len, q_len)
        width = tl.maximum(kv_len(prefix_len, q_len), 1)
        row, col = row_of(bit, width), col_of(bit, width)
        seen = is_visible(
            mask, byte_indptr, mask_indptr, b, start + row, row, col, prefix_len, q_len,
            wanted, mask_rows, mask_cols, FORM,
        )  # fmt: skip
        value = tl.sum(seen.to(tl.int32) << packed_shift(bit).to(tl.int32), axis=1)
        tl.store(out + byte_start + byte, value.to(tl.uint8), mask=byte < size)

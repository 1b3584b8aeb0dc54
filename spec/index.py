"""Index arithmetic: every address formula of a round, written once.

Each function is plain arithmetic on integers and imports nothing, so the very same function runs
on Python ints, on torch tensors, inside Triton kernels (wrapped with ``triton.jit``) and on the
integers of a theorem prover. What is proved about a formula here is proved about the code.

Units: ``row`` and ``node`` count query rows of one request, ``col`` counts KV entries of one
request (prefix first, then the tree), ``slot`` counts entries of the KV pool. Arguments are
non-negative; ``//`` and ``%`` are only ever applied to non-negative numbers, where floor and
truncating division agree.
"""

INT32_MAX = 2147483647


# widths


def horizon_of(block_size):
    """Deepest drafted position: the block holds the root and ``horizon`` drafted tokens."""
    return block_size - 1


def q_len_of(budget):
    """Query rows of one request: the root and at most ``budget`` drafted nodes."""
    return budget + 1


def kv_len(prefix_len, q_len):
    """KV entries that a row can see at most: the committed prefix and the tree's own rows."""
    return prefix_len + q_len


# the flat mask: bool, row-major [q_len, prefix_len + q_len] for each request


def mask_len(prefix_len, q_len):
    """Entries of one request's flat mask segment."""
    return q_len * (prefix_len + q_len)


def mask_offset(start, row, col, prefix_len, q_len):
    """Address of (row, col) in the flat mask; ``start`` is the request's ``mask_indptr``."""
    return start + row * (prefix_len + q_len) + col


def tree_col(prefix_len, node):
    """Column of a tree node's own KV entry: after the prefix."""
    return prefix_len + node


# the packed mask: the flat bits, LSB first, each request on a fresh byte


def packed_len(num_bits):
    """Bytes that ``num_bits`` bits take."""
    return (num_bits + 7) // 8


def packed_byte(start, bit):
    """Address of the byte that holds ``bit``; ``start`` is the request's byte indptr."""
    return start + bit // 8


def packed_shift(bit):
    """Place of ``bit`` inside its byte, LSB first."""
    return bit % 8


# the ancestor bitset: 32-bit words, tree columns only


def bit_words(q_len):
    """Words of one row of the bitset."""
    return (q_len + 31) // 32


def bit_word(node):
    """Word that holds ``node``'s bit."""
    return node // 32


def bit_shift(node):
    """Place of ``node``'s bit inside its word, LSB first."""
    return node % 32


# positions and the sliding window


def position(prefix_len, depth):
    """Position (for RoPE and for the window) of a node: by depth, not by row."""
    return prefix_len + depth


def window_start(position, window):
    """First position that a sliding window of ``window`` entries, the query's own included, keeps."""
    return position - window + 1


# tables


def row_offset(row, row_stride, col):
    """Address in a row-major table."""
    return row * row_stride + col


def row_of(offset, row_stride):
    """Row of an address in a row-major table."""
    return offset // row_stride


def col_of(offset, row_stride):
    """Column of an address in a row-major table."""
    return offset % row_stride


# blocks, and splits of a long prefix


def num_blocks(num_entries, size):
    """Blocks of ``size`` entries that hold all entries; the last may be partial."""
    return (num_entries + size - 1) // size


def block_start(block, size):
    """First entry of a block."""
    return block * size


def round_up(num_entries, size):
    """Entries of whole blocks of ``size`` that hold all entries."""
    return (num_entries + size - 1) // size * size


def chunk_len(num_entries, num_splits, block):
    """Entries of one KV chunk: an even share, rounded up to whole blocks."""
    return ((num_entries + num_splits * block - 1) // (num_splits * block)) * block


def chunk_start(chunk, length):
    """First entry of a chunk; it ends where the next begins, or at the last entry."""
    return chunk * length


# the commit


def commit_entry(prefix_len, step):
    """KV entry that the ``step``-th accepted node (root: 0) occupies after the commit."""
    return prefix_len + step


def dropped_step(num_accepted, row, accepted_before):
    """Place that a row which is not accepted takes behind the accepted ones, in row order."""
    return num_accepted + row - accepted_before


# captured batches


def unused_row(total, request, rows, q_start, row, q_len):
    """Row of the buffers that a request's spare ``row >= q_len`` fills: behind the ``total`` used ones."""
    return total + (request * rows - q_start) + (row - q_len)


# 32-bit offsets


def fits_int32(largest):
    """Whether an offset that reaches ``largest`` can be held in 32 bits."""
    return largest <= INT32_MAX

"""The data contracts: what one round hands from step to step.

Shapes use the words of the written spec: ``B`` requests, ``Q`` padded query rows of a request,
``T`` query rows of the whole call. Integers and masks are exact; scores are float64.
"""

from dataclasses import dataclass
from typing import NewType

from jaxtyping import Bool, Float, Float64, Int32, Int64, UInt8
from torch import Tensor

BlockSize = NewType("BlockSize", int)
"""Tokens that the drafter handles in one pass, root included."""
Horizon = NewType("Horizon", int)
"""Deepest drafted position: ``block_size - 1``."""
Budget = NewType("Budget", int)
"""Most non-root nodes in a tree."""
QLen = NewType("QLen", int)
"""Query rows of one request in the verify pass: ``budget + 1`` where all are alike."""
PrefixLen = NewType("PrefixLen", int)
"""KV entries committed before the pass; the root is not among them."""
NumNodes = NewType("NumNodes", int)
"""Real nodes of a tree, root included."""
Row = NewType("Row", int)
"""A query row of a request, and so a node of its tree: 0 is the root."""
Depth = NewType("Depth", int)
"""A node's distance from the root. Positions and windows go by it, addresses by the row."""


@dataclass(frozen=True)
class DraftTree:
    """One draft tree for each request, nodes in best-first order, padded to ``Q`` rows.

    Node 0 is the root. A parent precedes its children. Rows from ``num_nodes`` on are padding.
    """

    token_ids: Int64[Tensor, "B Q"]
    """Token of each node; 0 in padding (token 0 is a token: count nodes by ``num_nodes``)."""
    parents: Int32[Tensor, "B Q"]
    """Row of each node's parent; -1 for the root and for padding."""
    depths: Int32[Tensor, "B Q"]
    """Distance from the root; 0 for the root and for padding."""
    scores: Float64[Tensor, "B Q"]
    """Sum of the path's log-probs, root 0; -inf in padding."""
    num_nodes: Int32[Tensor, " B"]
    """Real nodes, root included."""


@dataclass(frozen=True)
class VerifyLayout:
    """Where everything of one verify pass lies. The width of a request has one source: ``qo_indptr``.

    For request b: ``q_len = qo_indptr[b+1] - qo_indptr[b]``,
    ``prefix_len = kv_indptr[b+1] - kv_indptr[b]`` and
    ``mask_indptr[b+1] - mask_indptr[b] = q_len * (prefix_len + q_len)``.
    """

    qo_indptr: Int32[Tensor, " B+1"]
    """Query rows: request b owns rows ``qo_indptr[b]`` to ``qo_indptr[b+1]``."""
    kv_indptr: Int32[Tensor, " B+1"]
    """Prefix entries only: request b owns ``kv_indices[kv_indptr[b]:kv_indptr[b+1]]``."""
    kv_indices: Int64[Tensor, " N"]
    """Pool slots of the prefix entries in order; may be longer than ``kv_indptr[-1]``."""
    mask_indptr: Int64[Tensor, " B+1"]
    """Segments of the flat mask."""
    max_q_len: QLen
    """Largest ``q_len`` of the call; in fixed buffers the captured one, which is never smaller."""
    positions: Int64[Tensor, " T"]
    """``prefix_len + depth`` of each query row."""
    out_cache_loc: Int64[Tensor, " T"]
    """Pool slot that each query row's own KV is written to; -1: not written."""
    is_captured: bool = False
    """True for fixed buffers: tensors may then be longer than the call needs, with an inert tail."""


@dataclass(frozen=True)
class FlatMask:
    """True = may attend; row-major ``[q_len, prefix_len + q_len]`` for each request (SGLang Triton).

    Request b's segment is ``allowed[mask_indptr[b]:mask_indptr[b+1]]`` of the call's layout.
    """

    allowed: Bool[Tensor, " M"]


@dataclass(frozen=True)
class PackedMask:
    """The flat bits, LSB first, each request on a fresh byte (FlashInfer)."""

    packed: UInt8[Tensor, " M"]
    byte_indptr: Int64[Tensor, " B+1"]
    """Byte segments of the requests."""


@dataclass(frozen=True)
class DenseMask:
    """Additive: 0 where attending is allowed, the dtype's lowest number elsewhere (Transformers).

    Columns: ``max_prefix`` prefix entries (left-aligned), then ``Q`` tree columns. Rows and tree
    columns past a request's ``q_len`` see themselves alone, so that every softmax is finite.
    """

    bias: Float[Tensor, "B 1 Q K"]


@dataclass(frozen=True)
class BitMask:
    """Ancestor bits of the tree columns alone; every prefix entry is visible to every row (ours).

    Bit ``node % 32`` of word ``node // 32`` of a row says whether the row sees ``node``. The words
    are int32 with the 32 bits of an unsigned number. Spare bits, those from ``q_len`` on, are 0: a
    kernel may test whole words.
    """

    words: Int32[Tensor, "T W"]


TreeMask = FlatMask | PackedMask | DenseMask | BitMask


@dataclass(frozen=True)
class Acceptance:
    """What the target accepted: a path from the root, and the bonus token after it."""

    nodes: Int32[Tensor, "B H+1"]
    """Rows of the accepted nodes, root first; -1 after the end."""
    num_accepted: Int32[Tensor, " B"]
    """Accepted nodes, the root counted, so at least 1."""
    bonus: Int64[Tensor, " B"]
    """The target's choice at the last accepted node: the next round's root."""


@dataclass(frozen=True)
class Commit:
    """What a commit did. Entry ``prefix_len + i`` now holds accepted node i's KV.

    With page size 1 the slot table was permuted and ``dst == src``; otherwise the KV was moved.
    """

    prefix_lens: Int32[Tensor, " B"]
    """Committed entries after the round: ``prefix_len + num_accepted``."""
    src: Int64[Tensor, "B H+1"]
    """Pool slot that the verify pass wrote accepted node i's KV to; -1 after the end."""
    dst: Int64[Tensor, "B H+1"]
    """Pool slot that holds it now; -1 after the end."""


@dataclass(frozen=True)
class PagedKV:
    """A paged KV pool and the table that says which slot holds which entry of a request."""

    keys: tuple[Float[Tensor, "slots kv_heads head_dim"], ...]
    """One pool a layer."""
    values: tuple[Float[Tensor, "slots kv_heads head_dim"], ...]
    slot_table: Int64[Tensor, "B max_context"]
    """Slot of entry i of request b; entries from ``prefix_len`` on are reserved for the tree."""
    page_size: int = 1

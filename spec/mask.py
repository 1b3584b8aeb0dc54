"""Step 3: the ancestor-only mask, in four forms with one meaning. True = may attend. Always.

A row sees every prefix entry, itself and its ancestors. Padding rows have no parent, so they see
the prefix and themselves, and no real row sees them.
"""

from typing import Literal, get_args, overload

import torch
from jaxtyping import Bool
from torch import Tensor

from ddtree.spec.contracts import (
    BitMask,
    DenseMask,
    DraftTree,
    FlatMask,
    PackedMask,
    PrefixLen,
    QLen,
    TreeMask,
    VerifyLayout,
)
from ddtree.spec.dtypes import require_kind
from ddtree.spec.errors import InputError, given, require
from ddtree.spec.index import (
    bit_shift,
    bit_word,
    bit_words,
    kv_len,
    mask_len,
    mask_offset,
    packed_byte,
    packed_len,
    packed_shift,
)
from ddtree.spec.public import public

Form = Literal["flat", "packed", "dense", "bits"]
FORMS = (FlatMask, PackedMask, DenseMask, BitMask)
Matrix = Bool[Tensor, "q_len kv_len"]
"""One request's mask: rows are query rows, columns the prefix and then the tree."""


@overload
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Literal["flat"]) -> FlatMask: ...
@overload
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Literal["packed"]) -> PackedMask: ...
@overload
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Literal["dense"]) -> DenseMask: ...
@overload
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Literal["bits"] = "bits") -> BitMask: ...
@public
def tree_mask(tree: DraftTree, layout: VerifyLayout, form: Form = "bits") -> TreeMask:
    """Make the mask of a verify pass from the trees' parents.

    Args:
        tree: the trees, ``B`` requests.
        layout: the layout made for them.
        form: ``flat``, ``packed``, ``dense`` or ``bits`` (see the classes of those names).

    Returns:
        The mask in that form.

    Raises:
        InputError: an unknown form, a wrong dtype, a layout of another batch or with more rows than
            the trees, or a parent that does not come before its child.
    """
    require_kind("tree", tree, DraftTree)
    require_kind("layout", layout, VerifyLayout)
    batch, rows = tree.parents.shape
    require(
        layout.qo_indptr.numel() == batch + 1,
        f"the layout has {layout.qo_indptr.numel() - 1} requests, the tree {batch}",
    )
    matrices = []
    for b in range(batch):
        prefix_len, q_len = request_lens(layout, b)
        require(q_len <= rows, f"request {b} has q_len {q_len}; its tree has {rows} rows")
        seen = ancestors_or_self(tree.parents[b, :q_len].tolist()).to(layout.qo_indptr.device)
        matrices.append(torch.cat([seen.new_ones(q_len, prefix_len), seen], dim=1))
    return _write(matrices, layout, form)


@overload
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Literal["flat"]) -> FlatMask: ...
@overload
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Literal["packed"]) -> PackedMask: ...
@overload
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Literal["dense"]) -> DenseMask: ...
@overload
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Literal["bits"]) -> BitMask: ...
@public
def convert_mask(mask: TreeMask, layout: VerifyLayout, form: Form) -> TreeMask:
    """Say the same mask in another form, exactly.

    Args:
        mask: a mask of ``layout``'s call in any form.
        layout: the call's layout, from which every width is read.
        form: the form wanted.

    Returns:
        The mask in that form.

    Raises:
        InputError: an unknown form, a wrong dtype, a mask whose size is not the layout's, or a
            hidden prefix entry where ``bits`` is wanted, which cannot say so.
    """
    require_kind("mask", mask, *FORMS)
    require_kind("layout", layout, VerifyLayout)
    _require_size(mask, layout)
    batch = layout.qo_indptr.numel() - 1
    return _write([read_mask(mask, layout, b) for b in range(batch)], layout, form)


def request_lens(layout: VerifyLayout, b: int) -> tuple[PrefixLen, QLen]:
    """``(prefix_len, q_len)`` of request b, from this call's indptrs and nothing else."""
    prefix_len = _entry("kv_indptr", layout.kv_indptr, b + 1) - int(layout.kv_indptr[b])
    q_len = _entry("qo_indptr", layout.qo_indptr, b + 1) - int(layout.qo_indptr[b])
    require(prefix_len >= 0, f"kv_indptr falls: request {b} has prefix_len {prefix_len}")
    require(q_len >= 0, f"qo_indptr falls: request {b} has q_len {q_len}")
    return PrefixLen(prefix_len), QLen(q_len)


def require_requests(layout: VerifyLayout, whose: str, batch: int) -> None:
    """Refuse a layout of other requests than a tree or an acceptance; in fixed buffers more may be unused."""
    requests = layout.qo_indptr.numel() - 1
    require(
        requests >= batch if layout.is_captured else requests == batch,
        f"the layout has {requests} requests, the {whose} {batch}",
    )
    beyond = int(layout.qo_indptr[-1]) - int(layout.qo_indptr[batch])
    require(
        beyond == 0,
        f"the layout has {beyond} query rows past the {batch} requests of the {whose}",
    )


def _entry(name: str, indptr: Tensor, i: int) -> int:
    """Entry i of an indptr, refusing one that is too short for the call's requests."""
    require(
        i < indptr.numel(),
        f"{name} has {indptr.numel()} entries; the call's requests need entry {i}",
    )
    return int(indptr[i])


def ancestors_or_self(parents: list[int]) -> Bool[Tensor, "q_len q_len"]:
    """Entry (i, j) says whether j is i or an ancestor of i."""
    seen = torch.eye(len(parents), dtype=torch.bool, device="cpu")
    for node, parent in enumerate(parents):
        require(
            -1 <= parent < node,
            f"node {node} has parent {parent}; a parent comes before its child (-1: none)",
        )
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def read_mask(mask: TreeMask, layout: VerifyLayout, b: int) -> Matrix:
    """Read request b's matrix as a kernel does: at the addresses that the layout gives.

    Only bounds are checked, not whether the layout fits the mask: that is the checker's work.
    """
    prefix_len, q_len = request_lens(layout, b)
    width = kv_len(prefix_len, q_len)
    device = layout.qo_indptr.device
    row = torch.arange(q_len, device=device)[:, None]
    col = torch.arange(width, device=device)[None, :]
    match mask:
        case FlatMask(allowed):
            return _gather(
                "flat mask",
                allowed,
                mask_offset(
                    _entry("mask_indptr", layout.mask_indptr, b), row, col, prefix_len, q_len
                ),
            )
        case PackedMask(packed, byte_indptr):
            bit = mask_offset(0, row, col, prefix_len, q_len)
            byte = _gather(
                "packed mask", packed, packed_byte(_entry("byte_indptr", byte_indptr, b), bit)
            )
            bits: Tensor = byte >> packed_shift(bit) & 1
            return bits.bool()
        case DenseMask(bias):
            require(
                b < bias.shape[0],
                f"dense mask has {bias.shape[0]} requests; the layout's call has request {b}",
            )
            tree_start = bias.shape[3] - bias.shape[2]
            entry = torch.where(col < prefix_len, col, tree_start + col - prefix_len)
            require(
                q_len <= bias.shape[2] and prefix_len <= tree_start,
                f"dense mask has {bias.shape[2]} rows and {tree_start} prefix columns; request "
                f"{b} needs {q_len} and {prefix_len}",
            )
            return (bias[b, 0] == 0)[row, entry]
        case BitMask(words):
            node = torch.arange(q_len, device=device)
            start = int(layout.qo_indptr[b])
            require(
                start + q_len <= words.shape[0] and bit_words(q_len) <= words.shape[1],
                f"bit mask has shape {list(words.shape)}; request {b} needs rows {start} to "
                f"{start + q_len} of {bit_words(q_len)} words",
            )
            tree_part = words[start : start + q_len, bit_word(node)] >> bit_shift(node) & 1
            seen = tree_part.bool()
            return torch.cat([seen.new_ones(q_len, prefix_len), seen], dim=1)


def _gather(name: str, memory: Tensor, offsets: Tensor) -> Tensor:
    """Read ``memory`` at ``offsets``, refusing an address outside it."""
    first, last = (int(offsets.min()), int(offsets.max())) if offsets.numel() else (0, -1)
    require(first >= 0, f"{name} starts at entry 0; the layout reads entry {first}")
    require(
        last < memory.numel(), f"{name} has {memory.numel()} entries; the layout reads entry {last}"
    )
    return memory[offsets]


def _require_size(mask: TreeMask, layout: VerifyLayout) -> None:
    """Refuse a mask whose size is not that of the layout's call."""
    batch = layout.qo_indptr.numel() - 1
    lens = [request_lens(layout, b) for b in range(batch)]
    match mask:
        case FlatMask(allowed):
            found, expected, what = (
                allowed.numel(),
                sum(mask_len(p, q) for p, q in lens),
                "flat mask entries",
            )
            require(
                int(layout.mask_indptr[-1]) == expected,
                f"mask_indptr ends at {int(layout.mask_indptr[-1])}; the sum of q_len * "
                f"(prefix_len + q_len) is {expected}",
            )
        case PackedMask(packed, byte_indptr):
            sizes = [packed_len(mask_len(p, q)) for p, q in lens]
            found, expected, what = packed.numel(), sum(sizes), "packed mask bytes"
            require(
                byte_indptr.tolist() == [sum(sizes[:b]) for b in range(batch + 1)],
                f"byte_indptr is {byte_indptr.tolist()}; the segments have {sizes} bytes",
            )
        case DenseMask(bias):
            rows = max((q for _, q in lens), default=0)
            found, expected, what = bias.shape[0], batch, "dense mask requests"
            require(
                bias.shape[2] >= rows,
                f"dense mask has {bias.shape[2]} rows a request; the largest q_len is {rows}",
            )
        case BitMask(words):
            found, expected, what = words.shape[0], int(layout.qo_indptr[-1]), "bit mask rows"
    fits = found >= expected if layout.is_captured else found == expected
    require(fits, f"{found} {what}; the layout's call has {expected}")


def require_form(form: object) -> None:
    """Refuse a form that there is not."""
    if not (isinstance(form, str) and form in get_args(Form)):
        raise InputError(f"form is {given(form)}; known are 'flat', 'packed', 'dense' and 'bits'")


def _write(matrices: list[Matrix], layout: VerifyLayout, form: Form) -> TreeMask:
    """Write the requests' matrices in one form."""
    require_form(form)
    match form:
        case "flat":
            nothing = torch.empty(0, dtype=torch.bool, device=layout.qo_indptr.device)
            return FlatMask(torch.cat([nothing, *(m.flatten() for m in matrices)]))
        case "packed":
            return _write_packed(matrices, layout)
        case "dense":
            return _write_dense(matrices, layout)
        case "bits":
            return _write_bits(matrices, layout)


def _write_packed(matrices: list[Matrix], layout: VerifyLayout) -> PackedMask:
    device = layout.qo_indptr.device
    sizes = [packed_len(m.numel()) for m in matrices]
    packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    byte_indptr = torch.tensor([0, *sizes], dtype=torch.int64, device=device).cumsum(0)
    for start, matrix in zip(byte_indptr.tolist(), matrices, strict=False):
        bit = torch.arange(matrix.numel(), device=device)
        value = matrix.flatten().to(torch.uint8) << packed_shift(bit).to(torch.uint8)
        packed.index_add_(0, packed_byte(start, bit), value)
    return PackedMask(packed, byte_indptr)


def _write_dense(matrices: list[Matrix], layout: VerifyLayout) -> DenseMask:
    batch, device = len(matrices), layout.qo_indptr.device
    lens = [request_lens(layout, b) for b in range(batch)]
    rows = max((q for _, q in lens), default=QLen(0))
    max_prefix = max((p for p, _ in lens), default=PrefixLen(0))
    allowed = torch.zeros(batch, rows, kv_len(max_prefix, rows), dtype=torch.bool, device=device)
    allowed[:, :, max_prefix:] = torch.eye(rows, dtype=torch.bool, device=device)
    for b, ((prefix_len, q_len), matrix) in enumerate(zip(lens, matrices, strict=True)):
        allowed[b, :q_len, :prefix_len] = matrix[:, :prefix_len]
        allowed[b, :q_len, max_prefix : kv_len(max_prefix, q_len)] = matrix[:, prefix_len:]
    bias = torch.zeros(allowed.shape, device=device).masked_fill_(
        ~allowed, torch.finfo(torch.float32).min
    )
    return DenseMask(bias[:, None])


def _write_bits(matrices: list[Matrix], layout: VerifyLayout) -> BitMask:
    num_words = bit_words(QLen(max((m.shape[0] for m in matrices), default=0)))
    device = layout.qo_indptr.device
    words = torch.zeros(
        sum(m.shape[0] for m in matrices), num_words, dtype=torch.int64, device=device
    )
    for b, matrix in enumerate(matrices):
        prefix_len, q_len = request_lens(layout, b)
        hidden = (~matrix[:, :prefix_len]).nonzero()
        if hidden.numel():
            row, col = hidden[0].tolist()
            require(
                False,
                f"row {row} of request {b} does not see prefix entry {col}; the bits form "
                "holds tree columns alone and cannot say so",
            )
        node = torch.arange(q_len, device=device)
        start = int(layout.qo_indptr[b])
        value = matrix[:, prefix_len:].long() << bit_shift(node)
        words[start : start + q_len].index_add_(1, bit_word(node), value)
    return BitMask(torch.where(words >= 2**31, words - 2**32, words).int())

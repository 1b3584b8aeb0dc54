"""Invariants of the mask, in each of its four forms: a real row sees its prefix, its ancestors, itself."""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ddtree.invariants import diagnosis
from ddtree.invariants.call import Call
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.layout import real_rows
from ddtree.invariants.sizes import Sizes, ancestors, diffs, tree_rows, uniform_width
from ddtree.invariants.violation import Violation
from ddtree.spec import index

MASKS = "custom_mask|packed|bias|words"


class Seen(NamedTuple):
    """What the rows of one request see, read from one form of the mask."""

    form: str
    prefix: Tensor | None
    """``[q_len, prefix_len]`` bool; None where the form cannot say."""
    tree: Tensor
    """``[q_len, columns]`` bool, at least q_len columns."""


def read(call: Call, sizes: Sizes, b: int) -> Iterator[Seen]:
    """Read request b's rows from every form there is, at the addresses of the true sizes.

    A form that ends before the request does is left to the invariants of length.
    """
    if sizes.q_lens is None:
        return
    q_len, start = sizes.q_lens[b], sizes.row_starts[b]
    if call.words is not None and start + q_len <= call.words.shape[0]:
        yield Seen("words", None, _bits(call.words[start : start + q_len]))
    if sizes.prefix_lens is None:
        return
    prefix_len = sizes.prefix_lens[b]
    length, columns = index.mask_len(prefix_len, q_len), index.kv_len(prefix_len, q_len)
    if call.custom_mask is not None and sizes.mask_starts[b] + length <= call.custom_mask.numel():
        first = sizes.mask_starts[b]
        flat = call.custom_mask[first : first + length].reshape(q_len, columns).bool()
        yield Seen("custom_mask", flat[:, :prefix_len], flat[:, prefix_len:])
    if call.packed is not None:
        byte = sum(index.packed_len(bits) for bits in (sizes.mask_lens or [])[:b])
        data = call.packed[byte : byte + index.packed_len(length)]
        if data.numel() == index.packed_len(length):
            spread = (data[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
            bits = spread.flatten()[:length].reshape(q_len, columns).bool()
            yield Seen("packed", bits[:, :prefix_len], bits[:, prefix_len:])
    if call.bias is not None and b < call.bias.shape[0]:
        rows, width = call.bias.shape[2:]
        if q_len <= rows and prefix_len <= width - rows:
            allowed = call.bias[b, 0, :q_len] > torch.finfo(call.bias.dtype).min / 2
            yield Seen("bias", allowed[:, :prefix_len], allowed[:, width - rows :])


def _bits(words: Tensor) -> Tensor:
    """``[rows, W]`` words to ``[rows, 32 W]`` bool."""
    spread = (words.long()[:, :, None] >> torch.arange(32)) & 1
    return spread.flatten(1).bool()


def visibility(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the real columns of real rows with the ancestors."""
    assert call.parents is not None
    for b in range(sizes.batch):
        nodes = tree_rows(call, b)
        if nodes is None:
            continue
        expected = ancestors(call.parents[b, :nodes])
        for seen in read(call, sizes, b):
            found = seen.tree[:nodes, :nodes]
            if found.shape == expected.shape and not torch.equal(found, expected):
                row, col = (found != expected).nonzero()[0].tolist()
                prefix = (
                    None if seen.prefix is None or not seen.prefix.numel() else seen.prefix[:nodes]
                )
                yield Violation(
                    b,
                    int(expected[row, col]),
                    int(found[row, col]),
                    (
                        f"{seen.form}: row {row} {'sees' if found[row, col] else 'does not see'} node "
                        f"{col}; it and its ancestors are "
                        f"{expected[row].nonzero().flatten().tolist()[:16]}"
                    ),
                    diagnosis.visibility(found, expected, prefix),
                )


def prefix_visible(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look for a hidden prefix entry in a real row."""
    for b in range(sizes.batch):
        for seen in read(call, sizes, b):
            if seen.prefix is not None:
                rows = seen.prefix[: real_rows(call, sizes, b)]
                if not bool(rows.all()):
                    row, col = (~rows).nonzero()[0].tolist()
                    yield Violation(
                        b,
                        1,
                        0,
                        f"{seen.form}: row {row} does not see prefix entry {col} of {rows.shape[1]}",
                    )


def padding_invisible(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look for a padding column that a real row sees."""
    for b in range(sizes.batch):
        nodes = real_rows(call, sizes, b)
        for seen in read(call, sizes, b):
            hidden = seen.tree[:nodes, nodes:]
            if bool(hidden.any()):
                row, col = hidden.nonzero()[0].tolist()
                yield Violation(
                    b,
                    0,
                    1,
                    f"{seen.form}: row {row} sees row {nodes + col}, which is padding: num_nodes is {nodes}",
                )


def mask_values(call: Call, _: Sizes) -> Iterator[Violation]:
    """Look for values that two kernels could read in two ways."""
    if (
        call.custom_mask is not None
        and call.custom_mask.dtype is torch.uint8
        and call.custom_mask.numel()
    ):
        most = int(call.custom_mask.max())
        if most > 1:
            yield Violation(
                None, "0 or 1", most, f"custom_mask, entry {int(call.custom_mask.argmax())}"
            )
    if call.bias is not None:
        lowest = torch.finfo(call.bias.dtype).min
        right = (call.bias == 0) | (call.bias <= lowest)
        if not bool(right.all()):
            at = (~right).nonzero()[0].tolist()
            yield Violation(at[0], f"0 or {lowest}", float(call.bias[tuple(at)]), f"bias{at}")


def packed_len(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the packed mask's byte segments with the bits they hold."""
    assert call.packed is not None and sizes.mask_lens is not None
    expected = [index.packed_len(bits) for bits in sizes.mask_lens]
    if call.byte_indptr is None:
        found = [call.packed.numel()] if sizes.batch == 1 else expected
    else:
        found = diffs(call.byte_indptr, sizes.batch) or []
    for b, (have, want) in enumerate(zip(found, expected, strict=True)):
        if have != want:
            prefix_len, q_len = (sizes.prefix_lens or [])[b], (sizes.q_lens or [])[b]
            numbers = f"({q_len} * ({prefix_len} + {q_len}) + 7) // 8 = {want}"
            yield Violation(
                b,
                want,
                have,
                numbers,
                diagnosis.packed_columns(have, q_len, index.kv_len(prefix_len, q_len)),
            )
    ends = list(accumulate(found))
    if ends and (
        ends[-1] > call.packed.numel() or (ends[-1] < call.packed.numel() and not call.is_captured)
    ):
        yield Violation(
            None,
            ends[-1],
            call.packed.numel(),
            f"the segments end at byte {ends[-1]}; packed has {call.packed.numel()}",
        )


def mask_shape(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the shapes of the dense and the bit form with the largest q_len."""
    assert sizes.q_lens is not None
    most = max(sizes.q_lens, default=0)
    if call.words is not None and call.words.shape[1] < index.bit_words(most):
        yield Violation(
            None,
            index.bit_words(most),
            int(call.words.shape[1]),
            f"words a row; ({most} + 31) // 32 = {index.bit_words(most)}",
        )
    if call.words is not None and call.words.shape[0] < sum(sizes.q_lens):
        yield Violation(
            None,
            sum(sizes.q_lens),
            int(call.words.shape[0]),
            f"rows of words; q_lens {sizes.q_lens}",
        )
    if call.bias is None:
        return
    rows, width = call.bias.shape[2:]
    longest = max(sizes.prefix_lens or [], default=0)
    if rows < most:
        yield Violation(
            None,
            f"at least {most}",
            int(rows),
            f"rows of bias {list(call.bias.shape)}; the largest q_len is {most}",
        )
    elif width - rows < longest:
        yield Violation(
            None,
            f"at least {longest + rows}",
            int(width),
            f"columns of bias {list(call.bias.shape)}: the longest prefix {longest} and {rows} tree columns",
        )


def flat_len(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the flat mask itself with the sizes, whatever mask_indptr says."""
    assert call.custom_mask is not None and sizes.mask_lens is not None
    found, expected = call.custom_mask.numel(), sizes.mask_starts[-1]
    if found == expected or (call.is_captured and found >= expected):
        return
    width = None if call.is_captured else uniform_width(found, sizes.prefix_lens or [])
    hint = diagnosis.width_elsewhere(call, sizes, [width])
    sums = " + ".join(
        f"{q} * ({p} + {q})"
        for p, q in zip((sizes.prefix_lens or [])[:4], (sizes.q_lens or [])[:4], strict=True)
    )
    yield Violation(
        None,
        expected,
        found,
        f"custom_mask has {found} entries; {sums}{' + ...' if sizes.batch > 4 else ''} = {expected}",
        hint,
    )


MASK = (
    Invariant(
        "flat_len",
        "mask",
        ("The flat mask has an entry for every query row and every KV entry the row could see."),
        "len(custom_mask) == sum(q_len * (prefix_len + q_len)); under capture >=",
        ("custom_mask", "q_len", "prefix_len"),
        flat_len,
    ),
    Invariant(
        "packed_len",
        "mask",
        "A packed segment holds the request's bits, each request on a fresh byte.",
        (
            "byte_indptr[b+1] - byte_indptr[b] == (q_len * (prefix_len + q_len) + 7) // 8, "
            "byte_indptr[-1] == len(packed)"
        ),
        ("packed", "q_len", "prefix_len"),
        packed_len,
    ),
    Invariant(
        "mask_shape",
        "mask",
        "The bit and dense forms have room for the largest q_len and the longest prefix.",
        "words: [T, >= (max(q_len) + 31) // 32]; bias: [B, 1, Q >= max(q_len), K >= max(prefix_len) + Q]",
        ("words|bias", "q_len"),
        mask_shape,
    ),
    Invariant(
        "mask_values",
        "mask",
        "A flat mask holds 0 and 1, a dense one 0 and the dtype's lowest number or -inf.",
        "custom_mask[i] in {0, 1}; bias[...] in {0, lowest}",
        ("custom_mask|bias",),
        mask_values,
    ),
    Invariant(
        "visibility",
        "mask",
        "A real node sees itself and its ancestors and no other node.",
        "mask[r, prefix_len + j] == (j is r or an ancestor of r) for r, j < num_nodes[b]",
        (MASKS, "parents", "num_nodes", "q_len"),
        visibility,
        ("num_nodes", "parent_order"),
    ),
    Invariant(
        "prefix_visible",
        "mask",
        "A real row sees every entry of its prefix.",
        "mask[r, i] for i < prefix_len, r < num_nodes[b]",
        ("custom_mask|packed|bias", "prefix_len", "q_len"),
        prefix_visible,
    ),
    Invariant(
        "padding_invisible",
        "mask",
        "No real row sees a padding row.",
        "not mask[r, prefix_len + j] for r < num_nodes[b] <= j",
        (MASKS, "num_nodes", "q_len"),
        padding_invisible,
        ("num_nodes",),
    ),
)

"""Invariants of the mask, in each of its four forms: a real row sees its prefix, its ancestors, itself."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ddtree.invariants import diagnosis
from ddtree.invariants.call import Call
from ddtree.invariants.claimed import index
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.layout import real_rows
from ddtree.invariants.sizes import Sizes, ancestors, diffs, tree_rows
from ddtree.invariants.violation import Violation

MASKS = "custom_mask|packed|bias|words"


class Seen(NamedTuple):
    """What the rows of one request see, read from one form of the mask."""

    form: str
    prefix: Tensor | None
    """``[q_len, prefix_len]`` bool; None where the form cannot say."""
    tree: Tensor
    """``[q_len, columns]`` bool: q_len columns, more where a dense mask was padded."""


def read(call: Call, sizes: Sizes, b: int) -> Iterator[Seen]:
    """Read request b's rows from every form there is, at the addresses of the true sizes.

    A form that ends before the request does is left to the invariants of length and shape.
    """
    if sizes.q_lens is None:
        return
    q_len, start = sizes.q_lens[b], sizes.row_starts[b]
    if (
        call.words is not None
        and start + q_len <= call.words.shape[0]
        and index.bit_words(q_len) <= call.words.shape[1]
    ):
        yield Seen("words", None, _bits(call.words[start : start + q_len])[:, :q_len])
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


_TOLD_BY = {
    "flat_len": ("custom_mask",),
    "packed_len": ("packed",),
    "mask_shape": ("bias", "words"),
}
"""Forms of the mask by the invariant that is broken where one ends before its last request does."""


def unread(call: Call, sizes: Sizes, broken: str) -> str:
    """That the mask ends before some request's rows do, so that nothing can be said of them."""
    forms = [
        form
        for form in _TOLD_BY.get(broken, ())
        if getattr(call, form) is not None and (form == "words" or sizes.prefix_lens is not None)
    ]
    for b in range(sizes.batch) if forms else ():
        if not set(forms) <= {seen.form for seen in read(call, sizes, b)}:
            return f"{broken} is broken: no rows of request {b} to read"
    return ""


def _bits(words: Tensor) -> Tensor:
    """``[rows, W]`` words to ``[rows, 32 W]`` bool."""
    spread = (words.long()[:, :, None] >> torch.arange(32)) & 1
    return spread.flatten(1).bool()


def visibility(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the real columns of real rows with the ancestors."""
    seen = _columns(call, sizes)
    hints = {form: diagnosis.visibility(list(columns.values())) for form, columns in seen.items()}
    if not _aligned(call, sizes):
        hints["custom_mask"] = ""  # foreign bits are read
    if call.bias is not None and not _is_additive(call.bias):
        hints["bias"] = ""  # mask_values says what is wrong with it
    if call.packed is not None and not hints.get("packed"):
        swapped = _columns(replace(call, packed=diagnosis.reversed_bits(call.packed)), sizes)
        hints["packed"] = diagnosis.bit_order(list(swapped.get("packed", {}).values()))
    for b in range(sizes.batch):
        for form, columns in seen.items():
            if b not in columns or torch.equal(columns[b].found, columns[b].expected):
                continue
            found, expected, _ = columns[b]
            row, col = (found != expected).nonzero()[0].tolist()
            yield Violation(
                b,
                int(expected[row, col]),
                int(found[row, col]),
                (
                    f"{form}: row {row} {'sees' if found[row, col] else 'does not see'} node "
                    f"{col}; it and its ancestors are "
                    f"{expected[row].nonzero().flatten().tolist()[:16]}"
                ),
                hints[form],
            )


def _aligned(call: Call, sizes: Sizes) -> bool:
    """Whether the flat mask and its segments have the lengths that they are read with."""
    if call.custom_mask is None or call.mask_indptr is None:
        return True
    size, end = call.custom_mask.numel(), sizes.mask_starts[-1]
    fits = size >= end if call.is_captured else size == end
    return fits and diffs(call.mask_indptr, sizes.batch) == sizes.mask_lens


def _columns(call: Call, sizes: Sizes) -> dict[str, dict[int, diagnosis.Columns]]:
    """What each form shows of each request whose parents can be followed."""
    shown: dict[str, dict[int, diagnosis.Columns]] = {}
    for b in range(sizes.batch):
        nodes = tree_rows(call, b)
        if nodes is None or call.parents is None:
            continue
        expected = ancestors(call.parents[b, :nodes])
        for seen in read(call, sizes, b):
            found = seen.tree[:nodes, :nodes]
            if found.shape == expected.shape:
                prefix = None if seen.prefix is None else seen.prefix[:nodes]
                columns = diagnosis.Columns(found, expected, prefix)
                shown.setdefault(seen.form, {})[b] = columns
    return shown


def judged(call: Call, sizes: Sizes, b: int, seen: Seen) -> Tensor:
    """``[q_len]`` bool: the rows that are surely real nodes; nothing is demanded of the others.

    Where no tree tells, a row is real if it is the root's, if a real row sees it, or if its position is
    behind the root's and it sees another row.
    """
    q_len = seen.tree.shape[0]
    rows = torch.arange(q_len)
    if any(t is not None for t in (call.num_nodes, call.parents, call.depths, call.scores)):
        return rows < real_rows(call, sizes, b)
    real = rows < 1
    tree = seen.tree[:, :q_len]
    start = sizes.row_starts[b]
    if call.positions is not None and start + q_len <= call.positions.numel() and q_len:
        position = call.positions[start : start + q_len]
        real |= (position > position[0]) & tree.tril(-1).any(dim=1)
    while not torch.equal(wider := real | (tree.tril(-1) & real[:, None]).any(dim=0), real):
        real = wider
    return real


def mask_is_tree(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Hold the mask to what every tree obeys, where no parents are known to compare it with."""
    alike: dict[str, list[str]] = {}
    broken: list[tuple[int, str, _Wrong]] = []
    for b in range(sizes.batch):
        if tree_rows(call, b) is not None:
            continue
        for seen in read(call, sizes, b):
            wrong = _no_tree(seen, judged(call, sizes, b, seen))
            alike.setdefault(seen.form, []).append(
                "" if wrong is None else _undone(call, sizes, b, seen)
            )
            if wrong is not None:
                broken.append((b, seen.form, wrong))
    for b, form, (row, expected, found, why) in broken:
        misfit = diagnosis.misfit(call, sizes) if form == "custom_mask" else ""
        hint = alike[form][0] if len(set(alike[form])) == 1 else ""
        hint = hint or misfit
        yield Violation(b, expected, found, f"{form}: row {row} {why}", hint)


def _undone(call: Call, sizes: Sizes, b: int, seen: Seen) -> str:
    """What must be undone for the rows to see just what they would of a tree."""
    if _is_inverted(call, sizes, b, seen):
        return diagnosis.INVERTED
    turned = Seen(seen.form, seen.prefix, seen.tree[:, : seen.tree.shape[0]].T)
    whole = seen.prefix is None or bool(seen.prefix.all())
    sound = whole and _no_tree(turned, judged(call, sizes, b, turned)) is None
    return diagnosis.TRANSPOSED if sound else ""


def _is_inverted(call: Call, sizes: Sizes, b: int, seen: Seen) -> bool:
    """Whether the rows see just what they would of a tree if True meant hidden."""
    prefix = None if seen.prefix is None else ~seen.prefix
    inverse = Seen(seen.form, prefix, ~seen.tree[:, : seen.tree.shape[0]])
    if inverse.tree.shape[0] < 2 or not (prefix is None or bool(prefix.all())):
        return False
    return _no_tree(inverse, judged(call, sizes, b, inverse)) is None


class _Wrong(NamedTuple):
    row: int
    expected: list[int]
    found: list[int]
    why: str


def _no_tree(seen: Seen, real: Tensor) -> _Wrong | None:
    """The first real row whose visible rows are no node's."""
    tree = seen.tree[:, : seen.tree.shape[0]]
    for row in real.nonzero().flatten().tolist():
        found = tree[row].nonzero().flatten().tolist()
        above = [node for node in found if node < row]
        if row not in found:
            return _Wrong(row, [*above, row], found, "does not see itself")
        if found[-1] > row:
            why = f"sees row {found[-1]}, which comes after it"
            return _Wrong(row, [*above, row], found, why)
        if row and not above:
            return _Wrong(row, [0, row], found, "sees no row before it: it has no root")
        if above:
            expected = [*tree[above[-1]].nonzero().flatten().tolist(), row]
            if found != expected:
                why = f"does not see just what its parent, row {above[-1]}, sees"
                return _Wrong(row, expected, found, why)
    return None


def mask_positions(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the positions with the depths that the mask gives, where no parents tell what rows see."""
    assert call.positions is not None and sizes.prefix_lens is not None
    for b, prefix_len in enumerate(sizes.prefix_lens):
        if tree_rows(call, b) is not None:
            continue
        for seen in read(call, sizes, b):
            q_len, start = seen.tree.shape[0], sizes.row_starts[b]
            found = call.positions[start : start + q_len].long()
            if found.numel() < q_len:
                continue
            depths = seen.tree[:, :q_len].sum(dim=1) - 1
            bad = judged(call, sizes, b, seen) & (found != index.position(prefix_len, depths))
            if bool(bad.any()):
                row = int(bad.nonzero()[0])
                want = index.position(prefix_len, int(depths[row]))
                numbers = (
                    f"{seen.form}: row {row} sees {int(depths[row])} other rows: {prefix_len} + "
                    f"{int(depths[row])} = {want}"
                )
                yield Violation(b, want, int(found[row]), numbers)


def prefix_visible(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look for a hidden prefix entry in a real row."""
    for b in range(sizes.batch):
        for seen in read(call, sizes, b):
            if seen.prefix is None:
                continue
            hidden = ~seen.prefix & judged(call, sizes, b, seen)[:, None]
            if bool(hidden.any()):
                row, col = hidden.nonzero()[0].tolist()
                yield Violation(
                    b,
                    1,
                    0,
                    f"{seen.form}: row {row} does not see prefix entry {col} of {hidden.shape[1]}",
                )


def spare_bits(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look for a set bit past q_len in a real row's words."""
    assert call.words is not None and sizes.q_lens is not None
    for b, q_len in enumerate(sizes.q_lens):
        seen = next((seen for seen in read(call, sizes, b) if seen.form == "words"), None)
        if seen is None:
            continue  # mask_shape names it
        start = sizes.row_starts[b]
        spare = _bits(call.words[start : start + q_len])[:, q_len:]
        for row, bit in (spare & judged(call, sizes, b, seen)[:, None]).nonzero().tolist()[:1]:
            yield Violation(
                b,
                0,
                1,
                f"words: bit {q_len + bit} of row {row} is set; q_len is {q_len}, and bits past it are "
                "spare: a kernel that reads whole words takes them for rows",
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


def mask_values(call: Call, sizes: Sizes) -> Iterator[Violation]:
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
    if call.bias is not None and not _is_additive(call.bias):
        lowest = torch.finfo(call.bias.dtype).min
        at = ((call.bias != 0) & ~(call.bias <= lowest)).nonzero()[0].tolist()
        hint = _multiplied(call, sizes)
        yield Violation(at[0], f"0 or {lowest}", float(call.bias[tuple(at)]), f"bias{at}", hint)


def _is_additive(bias: Tensor) -> bool:
    """Whether a dense mask holds 0 and the dtype's lowest number alone."""
    return bool(((bias == 0) | (bias <= torch.finfo(bias.dtype).min)).all())


def _multiplied(call: Call, sizes: Sizes) -> str:
    """A dense mask of 1 (may attend) and 0 is the right one of another convention."""
    assert call.bias is not None
    if not bool(((call.bias == 0) | (call.bias == 1)).all()):
        return ""
    added = torch.where(call.bias == 1, 0.0, torch.finfo(call.bias.dtype).min)
    right = Call(
        bias=added.to(call.bias.dtype),
        parents=call.parents,
        num_nodes=call.num_nodes,
        positions=call.positions,
    )
    checks = (visibility, mask_is_tree, prefix_visible)
    if call.parents is None or any(list(check(right, sizes)) for check in checks):
        return ""
    return "bias is 1 where attending is allowed: an additive mask has 0 there"


def packed_len(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the packed mask's byte segments with the bits they hold."""
    assert call.packed is not None and sizes.mask_lens is not None
    expected = [index.packed_len(bits) for bits in sizes.mask_lens]
    if call.byte_indptr is None:
        held = call.packed.numel()
        has_room = bool(call.is_captured) and held >= sum(expected)
        found = [held] if sizes.batch == 1 and not has_room else expected
    else:
        found = diffs(call.byte_indptr, sizes.batch) or []
    hint = "; or: ".join(diagnosis.packed_segments(call, sizes, found))
    for b, (have, want) in enumerate(zip(found, expected, strict=True)):
        if have != want:
            prefix_len, q_len = (sizes.prefix_lens or [])[b], (sizes.q_lens or [])[b]
            numbers = f"({q_len} * ({prefix_len} + {q_len}) + 7) // 8 = {want}"
            yield Violation(b, want, have, numbers, hint)
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
    hint = diagnosis.whole_mask(call, sizes, found)
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
        proofs=("mask_cells",),
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
        proofs=("packed_bits",),
    ),
    Invariant(
        "mask_shape",
        "mask",
        "The bit and dense forms have room for the largest q_len and the longest prefix.",
        "words: [T, >= (max(q_len) + 31) // 32]; bias: [B, 1, Q >= max(q_len), K >= max(prefix_len) + Q]",
        ("words|bias", "q_len"),
        mask_shape,
        proofs=("bit_words", "dense_cells"),
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
        (MASKS, "parents", "q_len", "prefix_len|words"),
        visibility,
        ("num_nodes", "parent_order"),
        unread=unread,
        proofs=("mask_cells", "packed_bits", "bit_words", "dense_cells"),
    ),
    Invariant(
        "mask_is_tree",
        "mask",
        (
            "Without the parents too, a mask is a tree's: a real row sees itself, no later row, and "
            "before itself just what its parent, the last row before it that it sees, sees."
        ),
        "seen(r) == {r} | seen(max(seen(r) - {r})), seen(0) == {0} for real r",
        (MASKS, "q_len", "prefix_len|words"),
        mask_is_tree,
        unread=unread,
    ),
    Invariant(
        "mask_positions",
        "mask",
        "Without parents too, a real row's position is prefix_len + the other rows that it sees.",
        "positions[qo_indptr[b] + r] == prefix_len + |seen(r)| - 1 for real r",
        (MASKS, "positions", "prefix_len", "q_len"),
        mask_positions,
        ("mask_is_tree", "positions"),
        unread=unread,
    ),
    Invariant(
        "prefix_visible",
        "mask",
        "A real row sees every entry of its prefix.",
        "mask[r, i] for i < prefix_len, r < num_nodes[b]",
        ("custom_mask|packed|bias", "prefix_len", "q_len"),
        prefix_visible,
        unread=unread,
    ),
    Invariant(
        "padding_invisible",
        "mask",
        "No real row sees a padding row.",
        "not mask[r, prefix_len + j] for r < num_nodes[b] <= j",
        (MASKS, "num_nodes", "q_len", "prefix_len|words"),
        padding_invisible,
        ("num_nodes",),
        unread=unread,
    ),
    Invariant(
        "spare_bits",
        "mask",
        "The spare bits of a row's words, those past q_len, are 0.",
        "bit j of words[qo_indptr[b] + r] == 0 for j >= q_len, r < num_nodes[b]",
        ("words", "q_len"),
        spare_bits,
        unread=unread,
        proofs=("bit_words",),
    ),
)

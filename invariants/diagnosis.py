"""Solving for the cause. A hint is right or it is not given.

Each function states one cause, tests it against every number at hand, and answers ``""`` unless all of
them agree with it and at least one disagrees with a right call.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.claimed import index
from ddtree.invariants.sizes import (
    Sizes,
    Window,
    counted_alone,
    diffs,
    in_use,
    mask_fits,
    mask_is,
    packed_widths,
    prefixes_of_segments,
    prefixes_told,
    rows_told,
    uniform_width,
    width_attested,
    width_of_segment,
    window_of,
)

INVERTED = (
    "every bit is inverted: True means may attend (an additive mask has 0 there, and a mask of "
    "what is hidden has True)"
)

TRANSPOSED = "the tree's columns are transposed: rows are queries, columns are keys"


def width_elsewhere(call: Call, sizes: Sizes, widths: Sequence[int | None]) -> str:
    """One width explains every segment, and it is not this call's: the founding bug."""
    width = widths[0] if widths and len(set(widths)) == 1 else None
    if width is None or width < 1 or sizes.q_lens is None or set(sizes.q_lens) == {width}:
        return ""
    if not width_attested(call, sizes):  # two indptrs disagree, and either may be the wrong one
        return ""
    if contested := _contested_width(call, sizes, width):
        return contested
    q_lens = sorted(set(sizes.q_lens))
    if counted_alone(call, sizes):
        return (
            f"every segment fits width {width}; the call has {sum(sizes.q_lens)} query rows, which are "
            f"{q_lens[0]} for each of {sizes.batch} requests if they are shared alike"
        )
    of_call = f"q_len is {q_lens[0]}" if len(q_lens) == 1 else f"q_lens are {q_lens}"
    source = "configuration or an earlier fill" if call.is_captured else "configuration"
    short = ", or the budget was taken for budget + 1" if q_lens == [width + 1] else ""
    return f"every segment fits width {width}; this call's {of_call}: the width came from {source}{short}"


def _contested_width(call: Call, sizes: Sizes, width: int) -> str:
    """The mask itself has that width, and nothing but ``qo_indptr`` speaks for another."""
    own = diffs(call.qo_indptr, sizes.batch)
    alike = [width] * sizes.batch
    if (
        rows_told(call)
        or own != sizes.q_lens
        or not mask_fits(call, alike, sizes.prefix_lens or [])
    ):
        return ""
    return (
        f"every segment and the mask itself fit width {width}, qo_indptr says {own}: the one or the other "
        "is not of this call"
    )


def mask_segments(call: Call, sizes: Sizes) -> str:
    """Explain the lengths of ``mask_indptr``'s segments: another width, or another prefix."""
    call, sizes, kept = in_use(call, sizes)
    found = diffs(call.mask_indptr, sizes.batch)
    if not found or sizes.prefix_lens is None or sizes.q_lens is None:
        return ""
    widths = [width_of_segment(s, p) for s, p in zip(found, sizes.prefix_lens, strict=True)]
    width = width_elsewhere(call, sizes, widths)
    if widths[0] is not None and width and _contested_width(call, sizes, widths[0]):
        return width
    seen_elsewhere = call.max_q_len == widths[0] or diffs(call.qo_indptr, sizes.batch) == widths
    if width and seen_elsewhere:
        return width
    half = _half_configured(found, sizes)
    if call.max_q_len in half and call.max_q_len not in sizes.q_lens:
        return half[call.max_q_len]
    columns = _columns(found, sizes)
    other_prefix = _other_prefix(call, sizes, kept) or _contested_prefix(call, sizes)
    causes = [
        cause
        for cause in (
            width,
            *half.values(),
            *columns,
            _cumulated(found, sizes),
            other_order(found, sizes.mask_lens, kept),
            other_prefix,
        )
        if cause
    ]
    if not causes:
        return _unknown_prefix(call, sizes)
    # columns of another width, and a width of one request, may as well be prefixes that are all off alike
    shifted = "" if columns or other_prefix else _shifted_prefix(call, sizes)
    return "; or: ".join([*causes, shifted] if shifted else causes)


def other_order(found: Sequence[int], right: Sequence[int] | None, kept: Sequence[int]) -> str:
    """The right segments of distinct lengths, those of other requests; ``kept``: the requests in use."""
    if right is None or list(found) == list(right) or sorted(found) != sorted(right):
        return ""
    if len(set(right)) < len(right):
        return ""
    order = [kept[list(right).index(length)] for length in found]
    return (
        f"the segments are those of requests {order}: the indptr is of the batch in another order"
    )


def other_batch(name: str, counts: dict[str, int]) -> str:
    """All fields but one speak of one number of requests."""
    others = {count for other, count in counts.items() if other != name}
    if len(counts) < 3 or len(others) != 1 or counts.get(name) in others | {None}:
        return ""
    (agreed,) = others
    return f"all other fields speak of {agreed} requests: {name} is of another batch"


def _half_configured(found: list[int], sizes: Sizes) -> dict[int, str]:
    """One width in the rows and another in the columns: the configured width by the form that fits."""
    lens = list(zip(found, sizes.prefix_lens or [], sizes.q_lens or [], strict=True))
    if any(n < 1 or q < 1 for n, _, q in lens):
        return {}
    rows = {n // (p + q) if n % (p + q) == 0 else 0 for n, p, q in lens}
    columns = {n // q - p if n % q == 0 else 0 for n, p, q in lens}
    own = set(sizes.q_lens or [])
    forms = {
        "every segment is {w} * (prefix_len + q_len): the rows are of width {w}, the columns of this "
        "call's q_len": rows,
        "every segment is q_len * (prefix_len + {w}): the rows are of this call's q_len, the columns of "
        "width {w}": columns if own != {w + 1 for w in columns} else set(),  # _columns says it
    }
    fitting: dict[int, str] = {}
    for text, widths in forms.items():
        width = widths.pop() if len(widths) == 1 else 0
        if width > 0 and own != {width}:
            other = f"{fitting[width]}; or: " if width in fitting else ""
            fitting[width] = other + text.format(w=width)
    return fitting


def _columns(found: list[int], sizes: Sizes) -> list[str]:
    """Rows with columns left out, or with those of the longest prefix."""
    q_lens, prefix_lens = sizes.q_lens or [], sizes.prefix_lens or []
    longest = max(prefix_lens, default=0)
    pairs = list(zip(prefix_lens, q_lens, strict=True))
    kinds = {
        "every segment is q_len * prefix_len: the tree's own columns were left out": [
            q * p for p, q in pairs
        ],
        "every segment is q_len * q_len: the prefix's columns were left out": [
            q * q for _, q in pairs
        ],
        "every segment is q_len * (prefix_len + q_len - 1): each row lacks one column": [
            q * (p + q - 1) for p, q in pairs
        ],
        f"every segment has the columns of the longest prefix, {longest}: rows were padded to it": [
            index.mask_len(longest, q) for q in q_lens
        ],
        "every segment has the tree's columns twice: prefix lengths that count the tree's own entries "
        "(FlashInfer's convention) were taken": [
            index.mask_len(index.kv_len(p, q), q) for p, q in pairs
        ],
        "every segment is its packed form's bytes: bits were counted where bytes belong": [
            index.packed_len(index.mask_len(p, q)) for p, q in pairs
        ],
    }
    right = sizes.mask_lens
    return [text for text, lens in kinds.items() if found == lens and lens != right]


def _cumulated(found: list[int], sizes: Sizes) -> str:
    """Segments that grow from request to request by the right lengths."""
    if len(found) < 2 or found != list(accumulate(sizes.mask_lens or [])):
        return ""
    return "every segment holds those before it too: mask_indptr was cumulated twice"


def _other_prefix(call: Call, sizes: Sizes, kept: Sequence[int]) -> str:
    """Right widths over prefixes that the call knows from elsewhere: a window's, or another field's."""
    q_lens, prefix_lens = sizes.q_lens or [], sizes.prefix_lens or []
    prefixes = prefixes_of_segments(call, q_lens)
    if prefixes is None or prefixes == prefix_lens:
        return ""
    fit = f"the segments fit prefix lengths {prefixes}; this call's are {prefix_lens}: "
    starts = accumulate(q_lens, initial=0)
    roots = [] if call.positions is None else call.positions.tolist()
    rooted = [roots[start] for start, _ in zip(starts, q_lens, strict=False) if start < len(roots)]
    ways = [(prefix_lens, prefixes)]
    if call.prefix_lens is None and rooted != prefix_lens:  # else nothing was cut
        ways.append((prefixes, prefix_lens))
    for whole, cut in ways:
        window = window_of(whole, cut)
        if window is not None:
            of_window = f"{fit}{cut} is what a window of {window.size} leaves of {whole}"
            return "; or: ".join([of_window, *_stale_alone(window, kept)])
    sources = {"kv_indptr's": diffs(call.kv_indptr, sizes.batch), "the roots' positions": rooted}
    told = [name for name, lens in sources.items() if lens == prefixes]
    return f"{fit}{prefixes} are {' and '.join(told)}" if told else ""


def _contested_prefix(call: Call, sizes: Sizes) -> str:
    """The mask itself has other prefixes' columns, and nothing but ``kv_indptr`` speaks for its own."""
    q_lens, own = sizes.q_lens or [], sizes.prefix_lens or []
    prefixes = prefixes_of_segments(call, q_lens)
    if prefixes is None or prefixes == own or not mask_fits(call, q_lens, prefixes):
        return ""
    if prefixes_told(call, sizes):
        return ""
    return (
        f"the segments and the mask itself fit prefix lengths {prefixes}, kv_indptr says {own}: the one or "
        "the other is not of this call"
    )


def _stale_alone(window: Window, kept: Sequence[int]) -> list[str]:
    """What else explains numbers that look like a window's because of one length."""
    if window.is_sure:
        return []
    cut = [kept[b] for b in window.cut]
    whose = f"requests {cut} alone" if len(cut) > 1 else f"request {cut[0]} alone"
    return [f"a length of {whose} is not this call's: stale, or of another source"]


def _unknown_prefix(call: Call, sizes: Sizes) -> str:
    """Right widths over prefixes that no other field knows: one request alone may fit by chance."""
    q_lens, prefix_lens = sizes.q_lens or [], sizes.prefix_lens or []
    prefixes = prefixes_of_segments(call, q_lens)
    if prefixes is None or not width_attested(call, sizes):
        return ""
    moved = [q for q, a, b in zip(q_lens, prefixes, prefix_lens, strict=True) if a != b]
    if len(moved) < 2 or min(moved) < 2:
        return ""
    return f"the segments fit prefix lengths {prefixes}; this call's are {prefix_lens}"


def _shifted_prefix(call: Call, sizes: Sizes) -> str:
    """Prefixes that are off by one number in all requests."""
    own = sizes.prefix_lens or []
    prefixes = prefixes_of_segments(call, sizes.q_lens or [])
    if prefixes is None or len({a - b for a, b in zip(prefixes, own, strict=True)}) != 1:
        return ""
    return f"the segments fit prefix lengths {prefixes}; this call's are {own}"


def indptr_wrapped(indptr: Tensor, b: int, end: int | None) -> str:
    """A negative int32 offset is the right one less 2^32."""
    before, found = int(indptr[b]), int(indptr[b + 1])
    if indptr.dtype is not torch.int32 or before < 0 or found >= 0:
        return ""
    meant = found + 2**32
    if meant != end and not index.fits_int32(meant - before):
        return ""
    return f"{found} is {meant} - 2^32: the offset overflowed 32 bits"


def row_widths(call: Call, sizes: Sizes) -> str:
    """Explain ``qo_indptr``'s segments."""
    call, sizes, kept = in_use(call, sizes)
    found = diffs(call.qo_indptr, sizes.batch) or []
    return width_elsewhere(call, sizes, found) or other_order(found, sizes.q_lens, kept)


def max_q_len(call: Call, sizes: Sizes) -> str:
    """Say what a launch for too few rows leaves out."""
    most = max(sizes.q_lens or [], default=0)
    if call.max_q_len is None or call.max_q_len >= most:
        return ""
    if not width_attested(call, sizes):  # the indptrs may be the wrong ones
        return ""
    last = most - 1
    left = f"row {last}" if call.max_q_len == last else f"rows {call.max_q_len} to {last}"
    return (
        f"a launch for {call.max_q_len} rows leaves out {left} of a request: max_q_len is not of "
        "this call"
    )


def kv_lens(call: Call, sizes: Sizes) -> str:
    """``kv_indptr`` counts entries that are not of the prefix, or is cut to a window."""
    call, sizes, kept = in_use(call, sizes)
    found, prefix_lens = diffs(call.kv_indptr, sizes.batch), sizes.prefix_lens
    if found is None or prefix_lens is None or found == prefix_lens:
        return ""
    q_lens = sizes.q_lens or []
    if found == [index.kv_len(p, q) for p, q in zip(prefix_lens, q_lens, strict=False)]:
        return (
            "every segment is prefix_len + q_len: kv_indptr counts the tree's own entries "
            "(FlashInfer's convention); here it counts the prefix alone"
        )
    window = window_of(prefix_lens, found)
    causes = [
        (
            "every segment is prefix_len + 1: kv_indptr counts the root",
            [p + 1 for p in prefix_lens],
        ),
        ("a prefix of 0 was counted as 1", [max(p, 1) for p in prefix_lens]),
    ]
    fit = [text for text, lens in causes if lens == found and len(found) > 1]
    if window is not None:
        fit.append(f"the segments are what a window of {window.size} leaves of the prefixes")
        fit += _stale_alone(window, kept)
    if order := other_order(found, prefix_lens, kept):
        fit.append(order)
    return "; or: ".join(fit)


class Placed(NamedTuple):
    """The positions of one request's real rows."""

    found: Tensor
    prefix_len: int
    depths: Tensor
    first_row: int
    """Its first row in the call."""

    @property
    def right(self) -> Tensor:
        """What they should be."""
        return self.prefix_len + self.depths.long()


def positions(requests: Sequence[Placed]) -> list[str]:
    """Explain each request's positions: by what explains those of the whole call, or else by its own."""
    broken = [r for r in requests if not torch.equal(r.found, r.right)]
    shifts = [_shift(r) for r in broken]
    whole = [place for place in _PLACES if all(place.fits(r) for r in requests)]
    # lengths that are off by numbers of their own are less likely than one cause of them all
    is_shifted = all(shifts) and (not whole or len(set(shifts)) == 1)
    told = []
    for request in requests:
        causes = [place.text(request) for place in whole]
        causes += [_shifted(request)] if is_shifted else []
        if not causes and request.found.numel() > 1:
            causes = [place.text(request) for place in _PLACES if place.fits(request)]
            causes += [_shifted(request)] if _shift(request) else []
        told.append("; or: ".join(causes) if any(r.found.numel() > 1 for r in broken) else "")
    return told


def _by_call_row(r: Placed) -> str:
    far = f", {r.first_row} rows too far" if r.first_row else ""
    return (
        f"positions are prefix_len + the row of the whole call{far}: each request begins anew, and they go "
        "by depth"
    )


class _Place(NamedTuple):
    """A cause of the positions of a call."""

    made: Callable[[Placed], Tensor]
    """What it makes of a request's positions."""
    text: Callable[[Placed], str]

    def fits(self, request: Placed) -> bool:
        """Whether it makes just those that were found."""
        return torch.equal(request.found, self.made(request))


_PLACES = (
    _Place(
        lambda r: r.prefix_len + r.first_row + torch.arange(r.found.numel()),
        _by_call_row,
    ),
    _Place(
        lambda r: r.right + (r.depths > 0),
        lambda _: (
            "every position but the root's is 1 too far: the root has depth 0, its children 1"
        ),
    ),
    _Place(
        lambda r: r.prefix_len + torch.arange(r.found.numel()),
        lambda _: "positions are prefix_len + row: they go by depth, siblings share one",
    ),
)


def _shift(request: Placed) -> int:
    """By how much all positions are off; 0 where they are not off alike."""
    off = (request.found - request.right).unique()
    is_length = off.numel() == 1 and request.prefix_len + int(off) >= 0
    return int(off) if is_length else 0


def _shifted(request: Placed) -> str:
    shift = _shift(request)
    return (
        f"every position of the request is off by {shift}: they fit prefix_len "
        f"{request.prefix_len + shift}, not {request.prefix_len}: two lengths from two sources"
    )


def nodes_counted(call: Call, sizes: Sizes) -> str:
    """``num_nodes`` counts something else than the rows that have a parent, and the root."""
    call, *_ = in_use(call, sizes)
    if call.token_ids is None or call.parents is None or call.num_nodes is None:
        return ""
    if call.token_ids.shape != call.parents.shape:
        return ""
    rows = call.parents.shape[1]
    nodes = [1 + n for n in (call.parents[:, 1:] >= 0).sum(dim=1).tolist()]
    real = torch.arange(rows) < torch.tensor(nodes)[:, None]
    counted = call.num_nodes.tolist()
    together = torch.equal(call.parents[:, 1:] >= 0, real[:, 1:])
    if not together or counted == nodes:
        return ""
    if counted == [rows] * len(nodes) and _is_padding(call, ~real):
        return (
            f"num_nodes is the width of the trees, {rows} rows; the parents are those of {nodes} "
            "nodes: padding was counted"
        )
    nonzero = ((call.token_ids != 0) & real).sum(dim=1).tolist()
    last_is_zero = any(int(call.token_ids[b, n - 1]) == 0 for b, n in enumerate(nodes))
    if counted != nonzero or last_is_zero:
        return ""
    root = counted == [n - 1 for n in nodes]
    return (
        f"num_nodes counts the tokens that are not 0 ({counted}); {nodes} rows are nodes: token 0 "
        f"is a token{'; or: the root was not counted' if root else ''}"
    )


def _is_padding(call: Call, rows: Tensor) -> bool:
    """Whether depths or scores say that these rows are padding, and the tokens do not deny it."""
    said = [
        bool((value[rows] == inert).all())
        for value, inert in ((call.depths, 0), (call.scores, -torch.inf))
        if value is not None and value.shape == rows.shape
    ]
    tokens = call.token_ids
    return bool(said) and all(said) and (tokens is None or not bool(tokens[rows].any()))


class Columns(NamedTuple):
    """The tree columns of one request's real rows, as one form of the mask shows them."""

    found: Tensor
    expected: Tensor
    prefix: Tensor | None
    """``[nodes, prefix_len]``; None where the form cannot say."""


def visibility(requests: Sequence[Columns]) -> str:
    """Explain the tree columns of all requests together; all causes that yield just what was found."""
    kinds: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
        INVERTED: (torch.logical_not, False),
        TRANSPOSED: (lambda tree: tree.T, True),
        "the mask is causal by row: siblings see each other": (
            lambda tree: torch.ones_like(tree).tril(),
            True,
        ),
        "every row sees every node: no tree mask was applied": (torch.ones_like, True),
        "every row sees all rows that are less deep: the mask goes by depth, not by parent": (
            _by_depth,
            True,
        ),
        "every row sees itself alone: its ancestors are missing": (
            lambda tree: torch.eye(len(tree), dtype=torch.bool),
            True,
        ),
        "every row sees its parent and itself alone: the ancestors above are missing": (
            lambda tree: torch.eye(len(tree), dtype=torch.bool) | _parents(tree),
            True,
        ),
        "no row but the root sees the root: its column is missing": (
            lambda tree: tree & ~_first_column(tree),
            True,
        ),
        "no row sees itself: only its ancestors": (
            lambda tree: tree & ~torch.eye(len(tree), dtype=torch.bool),
            True,
        ),
    }
    fitting = [
        text
        for text, (made, seen) in kinds.items()
        if all(
            torch.equal(found, made(tree)) and (prefix is None or bool((prefix == seen).all()))
            for found, tree, prefix in requests
        )
    ]
    return "; or: ".join(fitting)


def _by_depth(tree: Tensor) -> Tensor:
    depths = tree.sum(dim=1)
    return (depths[None, :] < depths[:, None]) | torch.eye(len(tree), dtype=torch.bool)


def _parents(tree: Tensor) -> Tensor:
    """``[nodes, nodes]``: the column is the row's parent, which is the last row before it that it sees."""
    above = tree.tril(-1)
    last = above.float().mul(torch.arange(1, len(tree) + 1)).argmax(dim=1)
    parents = torch.nn.functional.one_hot(last, len(tree)).bool()
    return parents & above.any(dim=1)[:, None]


def _first_column(tree: Tensor) -> Tensor:
    """The root's column, the root's own row apart."""
    column = torch.zeros_like(tree)
    column[1:, :1] = True
    return column


def misfit(call: Call, sizes: Sizes) -> str:
    """A flat mask that is no tree's when read with one width, and that does not end where it says either."""
    widths = set(sizes.q_lens or [])
    if call.custom_mask is None or len(widths) != 1 or sizes.mask_lens is None:
        return ""
    end, last = sizes.mask_starts[-1], call.custom_mask.nonzero().flatten()[-1:].tolist()
    reach = [at + 1 for at in last] if call.is_captured else [call.custom_mask.numel()]
    if not reach or reach[0] == end or (call.is_captured and reach[0] < end):
        return ""
    return (
        f"the mask was not made for width {widths.pop()} and these prefix lengths: with them the call's "
        f"entries end at {end}, the mask's at {reach[0]}"
    )


def bit_order(reversed_requests: Sequence[Columns]) -> str:
    """The packed bytes are right once their bits are read in the other order."""
    right = all(
        torch.equal(found, tree) and (prefix is None or bool(prefix.all()))
        for found, tree, prefix in reversed_requests
    )
    if not reversed_requests or not right:
        return ""
    return "every byte holds its bits in the other order: packed bits are LSB first"


def reversed_bits(packed: Tensor) -> Tensor:
    """The packed bytes with their bits in the other order."""
    spread = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (spread.flip(1) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def packed_segments(call: Call, sizes: Sizes, found: Sequence[int]) -> list[str]:
    """Explain all byte segments together: by a width, by bits, by rows or columns of another number."""
    call, sizes, kept = in_use(call, sizes)
    found = [found[b] for b in kept]
    lens = list(zip(found, sizes.prefix_lens or [], sizes.q_lens or [], strict=True))
    if not lens or any(q < 1 for *_, q in lens):
        return []
    right = [index.packed_len(bits) for bits in sizes.mask_lens or []]
    if list(found) == right:
        return []
    common = set.intersection(*(packed_widths(n, p) for n, p, _ in lens))
    elsewhere = width_elsewhere(call, sizes, [*common]) if len(common) == 1 else ""
    rows = set.intersection(*(_counts(n, p + q) for n, p, q in lens))
    columns = set.intersection(*({p + q - c for c in _counts(n, q)} for n, p, q in lens))
    floor = list(found) == [bits // 8 for bits in sizes.mask_lens or []]
    causes = [
        elsewhere,
        "every segment is the number of its bits: bits where bytes belong"
        if list(found) == sizes.mask_lens
        else "",
        "every segment is its bits // 8: bytes go by (bits + 7) // 8" if floor else "",
        f"every segment holds {_either(rows)} rows of prefix_len + q_len columns: the rows are not of this "
        "call's q_len"
        if rows
        else "",
        _packed_columns(lens, columns),
    ]
    return [cause for cause in causes if cause]


def _counts(found: int, step: int) -> set[int]:
    """Every n whose ``n * step`` bits take ``found`` bytes."""
    least, most = (8 * found - 8) // step + 1, 8 * found // step
    return set(range(max(least, 1), most + 1))


def _either(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def _packed_columns(lens: Sequence[tuple[int, int, int]], lacking: set[int]) -> str:
    """Rows that lack equally many columns in every request; a row has the tree's columns at least."""
    lacking = {n for n in lacking if all(n <= p for _, p, _ in lens)}
    if len(lacking) != 1:
        return ""
    (lack,) = lacking
    found, prefix_len, q_len = next(
        entry for entry in lens if entry[0] != index.packed_len(index.mask_len(*entry[1:]))
    )
    columns = index.kv_len(prefix_len, q_len)
    held = f"{found} bytes hold {q_len} rows of {columns - lack} columns"
    return f"{held}; a row has prefix_len + q_len = {columns}"


def whole_mask(call: Call, sizes: Sizes, size: int) -> str:
    """Explain the length of a flat mask: the width of a whole call, or a part that is not there.

    Some width may give the sum by chance: the mask must make sense with it.
    """
    prefix_lens = sizes.prefix_lens or []
    width = None if call.is_captured else uniform_width(size, prefix_lens)
    if width and not mask_is(call, [width] * sizes.batch, prefix_lens):
        width = None
    if elsewhere := width_elsewhere(call, sizes, [width]):
        return elsewhere
    contested = _contested_prefix(call, sizes)
    return "; or: ".join(cause for cause in (capacity(size, sizes), contested) if cause)


def capacity(size: int, sizes: Sizes) -> str:
    """Explain a flat mask that is too small."""
    if sizes.q_lens is None or sizes.prefix_lens is None or not size:
        return ""
    pairs = list(zip(sizes.prefix_lens, sizes.q_lens, strict=True))
    longest, most = max(sizes.prefix_lens, default=0), max(sizes.q_lens, default=0)
    short = sum(index.mask_len(p, q) for p, q in pairs) - size
    last = index.mask_len(*pairs[-1]) if pairs else 0
    causes = {
        f"{size} is q_len * prefix_len: it was sized without the tree's own columns": (
            size == sum(q * p for p, q in pairs)
        ),
        f"{size} is {len(pairs)} * {most} rows of the longest prefix, {longest}: it was sized without the "
        "tree's own columns": size == len(pairs) * most * longest != sum(q * p for p, q in pairs),
        f"{size} is the bytes of the packed form: bits where the flat form has a byte each": (
            size == sum(index.packed_len(index.mask_len(p, q)) for p, q in pairs)
        ),
        f"the missing {short} entries are the segment of request {len(pairs) - 1}: the mask was made for "
        "one request fewer": short == last and len(pairs) > 1,
    }
    return "; or: ".join(text for text, fits in causes.items() if fits)


def row_capacity(call: Call, size: int, room: int, sizes: Sizes) -> str:
    """The rows that a buffer holds for each request are fewer than this call's q_len."""
    most = max(sizes.q_lens or [], default=0)
    if room < 1 or size % room or size // room >= most:
        return ""
    sized = (
        f"the buffer has {size // room} rows for each of {room} requests; this call's "
        f"q_len is {most}: it was sized by another width than the largest budget + 1"
    )
    if width_attested(call, sizes):
        return sized
    return f"{sized}; or: qo_indptr is of another width than this call's"


def slots(found: Tensor, table: Tensor, first: int, depths: Tensor | None = None) -> str:
    """Explain the slots of a request's entries from ``first`` on: by depth, other entries, or other pages."""
    count = found.numel()
    right = table[first : first + count]
    if count < 2 or right.numel() < count or torch.equal(found, right):
        return ""
    if depths is not None and depths.numel() == count:
        entries = first + depths.long()
        if int(entries.max()) < table.numel() and torch.equal(found, table[entries]):
            told = "the slots are those of entries prefix_len + depth: KV goes by row, siblings share none"
            last = int(depths.max())
            is_clamped = torch.equal(depths.long(), torch.arange(count).clamp(max=last))
            return "; or: ".join([told, *([_clamped(last, count)] if is_clamped else [])])
    page = _page_of(table)
    for start in (table == found[0]).nonzero().flatten().tolist():
        shift = start - first
        if torch.equal(found, table[start : start + count]):
            pages = f", one page of {page} slots" if page > 1 and abs(shift) == page else ""
            way = "further on" if shift > 0 else "back"
            return f"the slots are those of entries {abs(shift)} {way}{pages}"
    offsets = (found - right).unique()
    if offsets.numel() > 1:
        return ""
    off = int(offsets)
    pages = f", one page of {page} slots" if page > 1 and abs(off) == page else ""
    return f"every slot is off by {off}{pages}"


def _page_of(table: Tensor) -> int:
    """The largest power of two by which the table's slots come in whole, aligned runs; 1: no pages to see."""
    page, entries = 1, torch.arange(table.numel())
    while 2 * page < table.numel():
        run = 2 * page
        starts = table[entries // run * run]
        if not torch.equal(table, starts + entries % run) or bool((starts % run).any()):
            break
        page = run
    whole = bool((table.diff() == 1).all())  # one run says nothing of pages
    return 1 if whole else page


def written_by_depth(rows: Tensor, depths: Tensor) -> str:
    """Rows share a written slot just where they share a depth, and some do."""
    alike = rows[:, None] == rows[None, :]
    if rows.numel() != depths.numel() or not torch.equal(alike, depths[:, None] == depths[None, :]):
        return ""
    if (
        int(alike.sum()) == rows.numel()
    ):  # each has its own: another request's row or padding shares it
        return ""
    told = "rows of one depth share a slot: KV goes by row, siblings share none"
    first = int((rows == rows[-1]).nonzero()[0])
    is_clamped = bool((rows[first:] == rows[-1]).all()) and len(rows[:first].unique()) == first
    return "; or: ".join([told, *([_clamped(first, rows.numel())] if is_clamped else [])])


def _clamped(first: int, count: int) -> str:
    """Rows that an entry behind the last one gives the last one's slot."""
    return f"rows {first} to {count - 1} have one slot: their entries were clamped to a last one"


def commit_sources(call: Call, sizes: Sizes, request: int) -> str:
    """The committed rows are the first ones, or were found with another row stride."""
    if (
        call.src is None
        or call.nodes is None
        or call.out_cache_loc is None
        or call.num_accepted is None
    ):
        return ""
    count, start = int(call.num_accepted[request]), sizes.row_starts[request]
    nodes, found = call.nodes[request, :count].long(), call.src[request, :count]
    if torch.equal(found, call.out_cache_loc[start + nodes]):
        behind = call.src[request, count:]
        return (
            f"the sources of the {count} accepted rows are right: behind them every entry is -1, here it is "
            f"{int(behind[behind != -1][0])}"
        )
    if torch.equal(found, call.out_cache_loc[start : start + count]):
        return (
            f"the sources are rows 0 to {count - 1}; the accepted rows are {nodes.tolist()}: "
            "scattered nodes were read as a dense prefix"
        )
    stride = call.nodes.shape[1]
    addresses = index.row_offset(request, stride, nodes)
    inside = bool((addresses < call.out_cache_loc.numel()).all())
    if request > 0 and inside and torch.equal(found, call.out_cache_loc[addresses]):
        return (
            f"the sources were found with a row stride of horizon + 1 = {stride}, where a "
            "request has its own q_len of rows"
        )
    return ""

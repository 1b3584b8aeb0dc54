"""Solving for the cause. A hint is right or it is not given.

Each function states one cause, tests it against every number at hand, and answers ``""`` unless all of
them agree with it and at least one disagrees with a right call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.invariants.call import Call
from ddtree.invariants.sizes import Sizes, counts_tree, diffs, width_of_segment
from ddtree.spec import index


def width_elsewhere(call: Call, sizes: Sizes, widths: Sequence[int | None]) -> str:
    """One width explains every segment, and it is not this call's: the founding bug."""
    width = widths[0] if widths and len(set(widths)) == 1 else None
    if width is None or width < 1 or sizes.q_lens is None or set(sizes.q_lens) == {width}:
        return ""
    q_lens = sorted(set(sizes.q_lens))
    of_call = f"q_len is {q_lens[0]}" if len(q_lens) == 1 else f"q_lens are {q_lens}"
    source = "configuration or an earlier fill" if call.is_captured else "configuration"
    short = ", or the budget was taken for budget + 1" if q_lens == [width + 1] else ""
    return f"every segment fits width {width}; this call's {of_call}: the width came from {source}{short}"


def mask_segments(call: Call, sizes: Sizes) -> str:
    """Explain the lengths of ``mask_indptr``'s segments: another width, or another prefix."""
    found = diffs(call.mask_indptr, sizes.batch)
    if found is None or sizes.prefix_lens is None or sizes.q_lens is None:
        return ""
    widths = [width_of_segment(s, p) for s, p in zip(found, sizes.prefix_lens, strict=True)]
    width = width_elsewhere(call, sizes, widths)
    seen_elsewhere = call.max_q_len == widths[0] or diffs(call.qo_indptr, sizes.batch) == widths
    if width and seen_elsewhere:
        return width
    other = _without_tree(found, sizes) or _other_prefix(found, sizes)
    return "; or: ".join(cause for cause in (width, other) if cause)


def _without_tree(found: list[int], sizes: Sizes) -> str:
    """Rows of the prefix alone."""
    pairs = zip(sizes.prefix_lens or [], sizes.q_lens or [], strict=True)
    if found != [q_len * prefix_len for prefix_len, q_len in pairs]:
        return ""
    return "every segment is q_len * prefix_len: the tree's own columns were left out"


def _other_prefix(found: list[int], sizes: Sizes) -> str:
    """Right widths over other prefixes than ``kv_indptr``'s: a window's, or those of another time."""
    q_lens, prefix_lens = sizes.q_lens or [], sizes.prefix_lens or []
    if max(q_lens, default=0) < 2:  # any length divides by a q_len of 1
        return ""
    if any(q < 1 or length % q or length // q < q for length, q in zip(found, q_lens, strict=True)):
        return ""
    prefixes = [length // q - q for length, q in zip(found, q_lens, strict=True)]
    if prefixes == prefix_lens:
        return ""
    return (
        f"the segments fit prefix lengths {prefixes}; this call's are {prefix_lens}: "
        "the two lengths came from two sources"
    )


def row_widths(call: Call, sizes: Sizes) -> str:
    """Explain ``qo_indptr``'s segments."""
    return width_elsewhere(call, sizes, diffs(call.qo_indptr, sizes.batch) or [])


def max_q_len(call: Call, sizes: Sizes) -> str:
    """Say what a launch for too few rows leaves out."""
    most = max(sizes.q_lens or [], default=0)
    if call.max_q_len is None or call.max_q_len >= most:
        return ""
    return (
        f"a launch for {call.max_q_len} rows leaves out rows {call.max_q_len} to "
        f"{most - 1} of a request: max_q_len is not of this call"
    )


def kv_lens(call: Call, sizes: Sizes) -> str:
    """``kv_indptr`` counts the tree's own entries, as FlashInfer's does."""
    found = diffs(call.kv_indptr, sizes.batch)
    if found is None or sizes.q_lens is None or sizes.prefix_lens is None:
        return ""
    with_tree = [index.kv_len(p, q) for p, q in zip(sizes.prefix_lens, sizes.q_lens, strict=True)]
    if found != with_tree or not (
        call.prefix_lens is not None or counts_tree(call, found, sizes.q_lens)
    ):
        return ""
    return (
        "every segment is prefix_len + q_len: kv_indptr counts the tree's own entries "
        "(FlashInfer's convention); here it counts the prefix alone"
    )


def positions(found: Tensor, prefix_len: int, depths: Tensor) -> str:
    """Explain the positions of a request's real rows: by row, or over another prefix."""
    rows = torch.arange(found.numel())
    depths = depths.long()
    if torch.equal(found, prefix_len + rows) and not torch.equal(rows, depths):
        return "positions are prefix_len + row: they go by depth, siblings share one"
    shift = (found - prefix_len - depths).unique()
    if shift.numel() == 1 and found.numel() > 1 and int(shift):
        return (
            f"every position of the request is off by {int(shift)}: they fit prefix_len "
            f"{prefix_len + int(shift)}, not {prefix_len}: two lengths from two sources"
        )
    return ""


def token_zero_as_padding(call: Call, request: int) -> str:
    """``num_nodes`` counts the tokens that are not 0, while the parents count more nodes."""
    if call.token_ids is None or call.parents is None or call.num_nodes is None:
        return ""
    counted, tokens = int(call.num_nodes[request]), call.token_ids[request]
    nodes = 1 + int((call.parents[request, 1:] >= 0).sum())
    together = bool((call.parents[request, 1:nodes] >= 0).all())
    nonzero = int((tokens[:nodes] != 0).sum())
    if not together or counted != nonzero or nodes == nonzero or int(tokens[nodes - 1]) == 0:
        return ""
    return (
        f"num_nodes counts the tokens that are not 0 ({nonzero}); {nodes} rows are nodes: "
        "token 0 is a token"
    )


def visibility(found: Tensor, expected: Tensor, prefix: Tensor | None) -> str:
    """Explain the tree columns of a request's real rows."""
    nodes = expected.shape[0]
    if torch.equal(found, ~expected) and (prefix is None or not bool(prefix.any())):
        return (
            "every bit is inverted: True means may attend (an additive mask has 0 there, and "
            "a mask of what is hidden has True)"
        )
    if torch.equal(found, expected.T) and nodes > 1:
        return "the tree's columns are transposed: rows are queries, columns are keys"
    if torch.equal(found, torch.ones_like(expected).tril()):
        return "the mask is causal by row: siblings see each other"
    if bool(found.all()):
        return "every row sees every node: no tree mask was applied"
    return ""


def packed_columns(found: int, q_len: int, kv_len: int) -> str:
    """The only row width that a packed segment of ``found`` bytes holds ``q_len`` rows of."""
    columns = 8 * found // q_len if q_len else 0
    fits = columns > 0 and index.packed_len(q_len * columns) == found
    only = fits and index.packed_len(q_len * (columns - 1)) != found
    if not only or columns == kv_len:
        return ""
    return f"{found} bytes hold {q_len} rows of {columns} columns; a row has prefix_len + q_len = {kv_len}"


def capacity(size: int, room: int, sizes: Sizes) -> str:
    """Explain a mask buffer that is too small."""
    if sizes.q_lens is None or sizes.prefix_lens is None:
        return ""
    pairs = list(zip(sizes.prefix_lens, sizes.q_lens, strict=True))
    if size == sum(q * p for p, q in pairs):
        return f"{size} is q_len * prefix_len: the buffer was sized without the tree's own columns"
    short = sum(index.mask_len(p, q) for p, q in pairs) - size
    last = index.mask_len(*pairs[-1]) if pairs else 0
    if short == last and room == len(pairs) and len(pairs) > 1:
        return (
            f"the missing {short} entries are the segment of request {len(pairs) - 1}: the "
            "mask was made for one request fewer"
        )
    return ""


def row_capacity(size: int, room: int, sizes: Sizes) -> str:
    """The rows that a buffer holds for each request are fewer than this call's q_len."""
    most = max(sizes.q_lens or [], default=0)
    if room < 1 or size % room or size // room >= most:
        return ""
    return (
        f"the buffer has {size // room} rows for each of {room} requests; this call's "
        f"q_len is {most}: it was sized by another width than the largest budget + 1"
    )


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

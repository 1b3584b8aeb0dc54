"""Invariants of fixed buffers, as a CUDA graph reads them: room enough, and an inert tail."""

from collections.abc import Iterator
from math import isfinite

from torch import Tensor

from ddtree.invariants import diagnosis
from ddtree.invariants.call import Call
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.layout import real_rows
from ddtree.invariants.sizes import Sizes, room_counts
from ddtree.invariants.violation import Violation

_ROWS = ("positions", "out_cache_loc", "input_ids", "num_rows", "target_ids")
"""Fields of an entry a query row."""


def buffer_capacity(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare what the call needs with what each buffer holds."""
    room = room_counts(call).get("qo_indptr", sizes.batch)
    held = {
        name: value.numel() for name, value in call.known().items() if isinstance(value, Tensor)
    }
    if call.num_rows is not None:
        held["num_rows"] = call.num_rows
    rows = sizes.row_starts[-1]
    needs = dict.fromkeys(_ROWS, rows) | {
        "custom_mask": sizes.mask_starts[-1],
        "kv_indices": sum(sizes.prefix_lens or []),
    }
    for name, need in needs.items():
        if name in held and held[name] < need:
            size = held[name]
            hint = ""
            if name == "custom_mask":
                hint = diagnosis.capacity(size, sizes)
            elif name != "kv_indices":
                hint = diagnosis.row_capacity(call, size, room, sizes)
            has = f"is {size}" if name == "num_rows" else f"has {size} entries"
            yield Violation(
                None,
                f"at least {need}",
                size,
                f"{name} {has}; this call needs {need}, {need - size} more",
                hint,
            )


def stale_tail(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Look at what lies behind this call's part of each buffer."""
    known = call.known()
    for name in ("qo_indptr", "kv_indptr", "mask_indptr"):
        if name in known and known[name].numel() > sizes.batch:
            tail = known[name][sizes.batch :].tolist()
            for request, value in enumerate(tail[1:], start=sizes.batch):
                if value != tail[0]:
                    yield Violation(
                        request,
                        tail[0],
                        value,
                        (
                            f"{name}[{request + 1}]; the call has {sizes.batch} requests, so later ones are "
                            "empty"
                        ),
                    )
                    break
    rows, entries = sizes.row_starts[-1], sizes.mask_starts[-1]
    inert = (
        ("positions", rows, 0),
        ("out_cache_loc", rows, _pad_slot(call, rows)),
        ("input_ids", rows, 0),
        ("custom_mask", entries, 0),
    )
    for name, live, value in inert:
        if name not in known or (name == "custom_mask" and sizes.mask_lens is None):
            continue
        stale = (known[name][live:] != value).nonzero().flatten()
        if stale.numel():
            at = live + int(stale[0])
            held = known[name][at].item()  # of a mask of floats it may be no whole number
            yield Violation(
                None,
                value,
                int(held) if isfinite(held) else str(held),
                (
                    f"{name}[{at}]; the call ends at {live}: left over from a larger call, or this "
                    "call's width is not its own"
                ),
            )
    pad = _pad_slot(call, rows)
    padded = call.out_cache_loc is not None and pad >= 0 and pad in call.out_cache_loc[rows:]
    if padded and _is_live(call, sizes, pad):
        yield Violation(
            None,
            "a slot of no live entry",
            pad,
            f"out_cache_loc[{rows}:] holds slot {pad}, which this call uses: unused rows overwrite it",
        )


def _pad_slot(call: Call, rows: int) -> int:
    """What unused rows write to; where the call does not say, what the last of them holds."""
    if call.pad_slot is not None:
        return call.pad_slot
    tail = [] if call.out_cache_loc is None else call.out_cache_loc[rows:].tolist()
    return int(tail[-1]) if tail else -1


def _is_live(call: Call, sizes: Sizes, slot: int) -> bool:
    """Whether a prefix or a row that is surely real holds the slot; padding rows may share the pad slot."""
    assert call.out_cache_loc is not None and sizes.q_lens is not None
    live = []
    if call.kv_indices is not None and call.kv_indptr is not None:
        live.append(call.kv_indices[: int(call.kv_indptr[sizes.batch])])
    for b, start in enumerate(sizes.row_starts[:-1]):
        real = min(sizes.q_lens[b], 1) if call.num_nodes is None else real_rows(call, sizes, b)
        live.append(call.out_cache_loc[start : start + real])
    return any(slot in slots for slots in live)


BUFFERS = (
    Invariant(
        "buffer_capacity",
        "buffers",
        "Fixed buffers have room for this call, the tree's own mask columns included.",
        (
            "len(positions), rows of the query, len(target_ids) >= sum(q_len), len(custom_mask) >= "
            "sum(q_len * (prefix_len + q_len)), len(kv_indices) >= sum(prefix_len)"
        ),
        ("captured", "q_len", f"{'|'.join(_ROWS)}|custom_mask|kv_indices"),
        buffer_capacity,
        proofs=("mask_width", "padded_rows"),
    ),
    Invariant(
        "stale_tail",
        "buffers",
        (
            "Behind the call fixed buffers are inert: indptrs repeat their last value, rows "
            "hold 0 or the pad slot, the mask False."
        ),
        (
            "x_indptr[B:] == x_indptr[B], positions[T:] == 0, input_ids[T:] == 0, "
            "out_cache_loc[T:] == pad_slot (one slot of no live entry where that is not known), "
            "custom_mask[mask_indptr[B]:] == 0"
        ),
        ("captured", "q_len"),
        stale_tail,
        proofs=("padded_rows",),
    ),
)

"""Invariants of the commit: the accepted rows follow the prefix, and nothing is lost."""

from collections.abc import Iterator

import torch

from ddtree.invariants import diagnosis
from ddtree.invariants.call import Call
from ddtree.invariants.claimed import index
from ddtree.invariants.invariant import Invariant
from ddtree.invariants.sizes import Sizes
from ddtree.invariants.violation import Violation


def commit_len(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the new prefix lengths with the accepted nodes."""
    assert call.committed_lens is not None and call.num_accepted is not None
    for b, prefix_len in enumerate(sizes.prefix_lens or []):
        count = int(call.num_accepted[b])
        want, found = index.commit_entry(prefix_len, count), int(call.committed_lens[b])
        if found != want and b not in sizes.idle:
            yield Violation(b, want, found, f"{prefix_len} + {count} = {want}")


def commit_src(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the sources with the slots that the accepted rows were written to."""
    assert call.src is not None and call.nodes is not None and call.num_accepted is not None
    assert call.out_cache_loc is not None
    for b, count in enumerate(call.num_accepted.tolist()):
        if b in sizes.idle:
            continue
        rows = sizes.row_starts[b] + call.nodes[b, :count].long()
        if int(rows.max()) >= call.out_cache_loc.numel():
            continue
        expected = torch.full_like(call.src[b], -1)
        expected[:count] = call.out_cache_loc[rows]
        bad = (call.src[b] != expected).nonzero().flatten()
        if bad.numel():
            i = int(bad[0])
            numbers = (
                f"src[{b}, {i}]; nodes[{b}] is {call.nodes[b, :count].tolist()}, out_cache_loc "
                f"there {expected[:count].tolist()}"
            )
            yield Violation(
                b,
                int(expected[i]),
                int(call.src[b, i]),
                numbers,
                diagnosis.commit_sources(call, sizes, b),
            )


def commit_dst(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the destinations with entries prefix_len + i of the slot table."""
    assert call.src is not None and call.dst is not None and call.num_accepted is not None
    for b, count in enumerate(call.num_accepted.tolist()):
        found, entries = call.dst[b].long(), _entries(call, sizes, b, count)
        if entries is None or b in sizes.idle:
            continue
        expected = torch.full_like(found, -1)
        expected[:count] = entries
        bad = (found != expected).nonzero().flatten()
        if bad.numel():
            i = int(bad[0])
            entry = index.commit_entry((sizes.prefix_lens or [])[b], i)
            yield Violation(
                b,
                int(expected[i]),
                int(found[i]),
                f"dst[{b}, {i}]; entry {entry} of the request, of {count} accepted",
            )


def _entries(call: Call, sizes: Sizes, b: int, count: int) -> torch.Tensor | None:
    """Slots of entries prefix_len to prefix_len + count after the commit; None where nothing tells.

    Without the table itself: a commit that moves no KV leaves each node where it was written, and
    one that moves it puts node i where row i was written.
    """
    assert call.src is not None and call.dst is not None
    first = (sizes.prefix_lens or [])[b]
    if call.slot_table_after is not None:
        entries = call.slot_table_after[b, first : index.commit_entry(first, count)].long()
        return entries if entries.numel() == count else None
    if torch.equal(call.src[b], call.dst[b]):
        return call.src[b, :count].long()
    if call.out_cache_loc is None or sizes.q_lens is None:
        return None
    start = sizes.row_starts[b]
    entries = call.out_cache_loc[start : start + count].long()
    return entries if entries.numel() == count else None


def commit_order(call: Call, _: Sizes) -> Iterator[Violation]:
    """Look for a move that overwrites the source of a later one."""
    assert call.src is not None and call.dst is not None
    written: dict[int, tuple[int, int]] = {}
    pairs = zip(call.src.tolist(), call.dst.tolist(), strict=True)
    for b, (sources, targets) in enumerate(pairs):
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if source >= 0 and source in written:
                yield Violation(
                    b,
                    "an untouched source",
                    source,
                    f"src[{b}, {i}] = {source} was overwritten by move {written[source]} (request, step)",
                )
                break
            if target >= 0 and target != source:
                written[target] = (b, i)


def slot_permutation(call: Call, _: Sizes) -> Iterator[Violation]:
    """Compare the slots of each request's table before and after."""
    assert call.slot_table is not None and call.slot_table_after is not None
    before, after = call.slot_table, call.slot_table_after
    if before.shape != after.shape:
        yield Violation(
            None, list(before.shape), list(after.shape), "shape of the slot table before and after"
        )
        return
    bad = (before.sort(dim=1).values != after.sort(dim=1).values).any(dim=1)
    for b in bad.nonzero().flatten().tolist():
        lost = sorted(set(before[b].tolist()) - set(after[b].tolist()))
        gained = sorted(set(after[b].tolist()) - set(before[b].tolist()))
        yield Violation(
            b,
            "the same slots",
            f"lost {lost[:8]}, gained {gained[:8]}",
            f"slot_table[{b}] after the commit",
        )


def prefix_kept(call: Call, sizes: Sizes) -> Iterator[Violation]:
    """Compare the committed prefix's slots before and after."""
    assert call.slot_table is not None and call.slot_table_after is not None
    for b, prefix_len in enumerate(sizes.prefix_lens or []):
        before, after = call.slot_table[b, :prefix_len], call.slot_table_after[b, :prefix_len]
        if before.shape != after.shape:
            continue  # slot_permutation names it
        for i in (before != after).nonzero().flatten().tolist()[:1]:
            yield Violation(
                b,
                int(before[i]),
                int(after[i]),
                f"slot_table[{b}, {i}] moved; the prefix has {prefix_len} entries",
            )


def commit_once(call: Call, _: Sizes) -> Iterator[Violation]:
    """Look for an acceptance that was committed to the same table and prefixes before."""
    if call.commits_before:
        yield Violation(
            None,
            0,
            call.commits_before,
            "the same acceptance on the same prefixes and slot table: KV that was moved once would be "
            "moved again",
        )


_SOUND = ("num_accepted", "accepted_end")

COMMIT = (
    Invariant(
        "commit_once",
        "commit",
        "An acceptance is committed once: a second commit with larger pages moves moved KV again.",
        "commits_before == 0",
        ("commits_before",),
        commit_once,
    ),
    Invariant(
        "commit_len",
        "commit",
        "A commit adds the accepted nodes to the prefix and nothing else.",
        "committed_lens[b] == prefix_len + num_accepted[b]",
        ("committed_lens", "num_accepted", "prefix_len"),
        commit_len,
        ("num_accepted",),
        proofs=("commit_moves",),
    ),
    Invariant(
        "commit_src",
        "commit",
        "The sources are the slots that the accepted rows were written to.",
        "src[b, i] == out_cache_loc[qo_indptr[b] + nodes[b, i]], -1 after the end",
        ("src", "nodes", "num_accepted", "out_cache_loc", "q_len"),
        commit_src,
        (*_SOUND, "accepted_path"),
    ),
    Invariant(
        "commit_dst",
        "commit",
        "Accepted node i ends up at entry prefix_len + i of its request.",
        "dst[b, i] == slot_table_after[b, prefix_len + i], -1 after the end",
        ("src", "dst", "num_accepted", "prefix_len"),
        commit_dst,
        ("num_accepted",),
        proofs=("commit_moves",),
    ),
    Invariant(
        "commit_order",
        "commit",
        "No move overwrites the source of a later one.",
        ("dst[a, i] != src[b, j] for every later move (b, j), unless dst[a, i] == src[a, i]"),
        ("src", "dst"),
        commit_order,
        proofs=("commit_moves",),
    ),
    Invariant(
        "slot_permutation",
        "commit",
        "A commit permutes each request's slots: none is lost, none appears.",
        "sorted(slot_table_after[b]) == sorted(slot_table[b])",
        ("slot_table", "slot_table_after"),
        slot_permutation,
        proofs=("commit_places",),
    ),
    Invariant(
        "prefix_kept",
        "commit",
        "A commit leaves the prefix where it is.",
        "slot_table_after[b, i] == slot_table[b, i] for i < prefix_len",
        ("slot_table", "slot_table_after", "prefix_len"),
        prefix_kept,
    ),
)

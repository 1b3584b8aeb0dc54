"""Hints: the cause where the numbers leave no other, and silence beside it.

Three ways: cases where a hint must appear, near misses where it must not, and random corruptions of random
sound calls, where whatever is said is undone by an oracle of its own and must give the sound call back.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hs
from torch import Tensor

from ddtree.catalogue.calls import (
    change,
    field,
    indptr,
    put,
    tree_of,
    verify,
    width,
)
from ddtree.invariants import Call, violations
from ddtree.spec import plan_verify, tree_mask
from tests.invariants.mutants.kinds import with_unused

FORKED = (-1, 0, 0, 1, 1, 3, 2)
OTHER = (-1, 0, 1, 0, 2, 2, 4)
DEPTHS = torch.tensor([0, 1, 1, 2, 2, 3, 2])


def sound(*, form: str = "flat", paged: bool = False) -> Call:
    """Two forked trees over prefixes 20 and 11; paged: pages of 4 slots, shuffled."""
    tree = tree_of(FORKED, OTHER)
    slots = torch.arange(64).reshape(2, 32)
    if paged:
        pages = torch.randperm(16, generator=torch.Generator().manual_seed(5))
        slots = (4 * pages[:, None] + torch.arange(4)).reshape(2, 32)
    layout = plan_verify(tree, torch.tensor([20, 11]), slots)
    made = tree_mask(tree, layout, form)  # type: ignore[call-overload]
    return Call.of(tree, layout, made, slot_table=slots, prefix_lens=torch.tensor([20, 11]))


def of_tree(edit: Callable[[Tensor], Tensor]) -> Callable[[Call], Call]:
    """Both requests' tree columns edited in the flat mask."""

    def spoiled(call: Call) -> Call:
        mask, ends = field(call, "custom_mask").clone(), field(call, "mask_indptr").tolist()
        for (start, end), prefix in zip(pairwise(ends), (20, 11), strict=True):
            square = mask[start:end].reshape(7, -1)
            square[:, prefix:] = edit(square[:, prefix:].clone())
        return replace(call, custom_mask=mask)

    return spoiled


def parents_only(tree: Tensor) -> Tensor:
    made = torch.eye(7, dtype=torch.bool)
    for row in range(1, 7):
        made[row, int(tree[row, :row].nonzero()[-1])] = True
    return made


def without_root(tree: Tensor) -> Tensor:
    tree[1:, 0] = False
    return tree


def by_depth(tree: Tensor) -> Tensor:
    depth = tree.sum(dim=1)
    return (depth[None] < depth[:, None]) | torch.eye(7, dtype=torch.bool)


def one_bit(edit: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same, one bit changed: nearly, and so not at all."""

    def made(tree: Tensor) -> Tensor:
        changed = edit(tree)
        changed[5, 4] = ~changed[5, 4]
        return changed

    return made


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda tree: tree.T.clone(),
    "causal by row": lambda tree: torch.ones_like(tree).tril(),
    "every row sees every node": torch.ones_like,
    "the mask goes by depth": by_depth,
    "every row sees itself alone": lambda tree: torch.eye(7, dtype=torch.bool),
    "sees its parent and itself alone": parents_only,
    "the root: its column is missing": without_root,
    "no row sees itself": lambda tree: tree & ~torch.eye(7, dtype=torch.bool),
}


def hints(call: Call, invariant: str) -> list[str]:
    return [v.hint for v in violations(call) if v.invariant == invariant]


@pytest.mark.parametrize("text", MASKS)
def test_masks(text: str) -> None:
    """What was done to the tree's columns of all requests is told; one bit more, and nothing is."""
    told = hints(of_tree(MASKS[text])(sound()), "visibility")
    assert told and all(text in hint and "; or:" not in hint for hint in told)
    near = hints(of_tree(one_bit(MASKS[text]))(sound()), "visibility")
    assert near and not any(near)


@pytest.mark.parametrize("text", MASKS)
def test_a_mask_wrong_in_one_request_alone(text: str) -> None:
    """A cause of one request is no cause of the call: it is told for none."""
    call = sound()
    broken = of_tree(MASKS[text])(call)
    half = torch.arange(broken.custom_mask.numel()) < int(field(call, "mask_indptr")[1])  # type: ignore[union-attr]
    mask = torch.where(half, field(broken, "custom_mask"), field(call, "custom_mask"))
    told = hints(replace(call, custom_mask=mask), "visibility")
    assert told and not any(told)


@pytest.mark.parametrize("edit", [lambda tree: ~tree, lambda tree: tree.T.clone()])
def test_masks_without_a_tree(edit: Callable[[Tensor], Tensor]) -> None:
    """Inverted and transposed masks are told where no parents are known; with a bit more they are not."""
    call = replace(sound(), parents=None, num_nodes=None, depths=None, token_ids=None, scores=None)
    inverted = bool(edit(torch.tensor([[True]]))[0, 0]) is False
    broken = (
        replace(call, custom_mask=~field(call, "custom_mask")) if inverted else of_tree(edit)(call)
    )
    told = hints(broken, "mask_is_tree")
    assert told and all(("inverted" if inverted else "transposed") in hint for hint in told)
    near = put(broken, "custom_mask", slice(20 + 27, 20 + 29), True)
    assert not any(hints(near, "mask_is_tree"))


Spoil = Callable[[Call], Call]


def segments(lens: list[int], name: str = "mask_indptr") -> Spoil:
    return change(lambda c: {name: indptr(lens, field(c, name).dtype)})


def moved(name: str, by: int) -> Spoil:
    return change(lambda c: {name: field(c, name) + by})


def slots_of(entries: Tensor) -> Spoil:
    """Both requests' written slots taken from these entries past their prefixes."""
    return change(
        lambda c: {
            "out_cache_loc": torch.cat(
                [field(c, "slot_table")[0, 20 + entries], field(c, "slot_table")[1, 11 + entries]]
            )
        }
    )


BOTH = [7 * 27, 7 * 18]
"""The sound call's mask segments."""

APPEARS: dict[str, tuple[Spoil, str, str]] = {
    "a width": (width(8), "mask_len", "every segment fits width 8; this call's q_len is 7"),
    "a width in rows alone": (width(5, ("qo_indptr",)), "qo_indptr", "every segment fits width 5"),
    "prefix lengths": (
        segments([7 * 31, 7 * 40]),
        "mask_len",
        "fit prefix lengths [24, 33]; this call's are [20, 11]",
    ),
    "the tree's columns left out": (
        segments([140, 77]),
        "mask_len",
        "the tree's own columns were left out",
    ),
    "the tree's columns twice": (
        segments([7 * 34, 7 * 25]),
        "mask_len",
        "(FlashInfer's convention)",
    ),
    "bytes": (segments([24, 16]), "mask_len", "bits were counted where bytes belong"),
    "another order": (segments(BOTH[::-1]), "mask_len", "those of requests [1, 0]"),
    "kv with the tree": (segments([27, 18], "kv_indptr"), "kv_indptr", "(FlashInfer's convention)"),
    "kv with the root": (segments([21, 12], "kv_indptr"), "kv_indptr", "counts the root"),
    "kv in another order": (
        segments([11, 20], "kv_indptr"),
        "kv_indptr",
        "those of requests [1, 0]",
    ),
    "kv of a window": (segments([8, 8], "kv_indptr"), "kv_indptr", "a window of 8"),
    "by row": (
        change(lambda c: {"positions": torch.cat([20 + torch.arange(7), 11 + torch.arange(7)])}),
        "positions",
        "positions are prefix_len + row",
    ),
    "too far": (moved("positions", 4), "positions", "off by 4: they fit prefix_len 24, not 20"),
    "slots by depth": (
        change(
            lambda c: {
                "out_cache_loc": torch.cat(
                    [
                        field(c, "slot_table")[0, 20 + field(c, "depths")[0].long()],
                        field(c, "slot_table")[1, 11 + field(c, "depths")[1].long()],
                    ]
                )
            }
        ),
        "slot_table",
        "entries prefix_len + depth",
    ),
    "writers by depth": (
        change(
            lambda c: {
                "out_cache_loc": torch.cat(
                    [40 + field(c, "depths")[0], 50 + field(c, "depths")[1]]
                ),
                "slot_table": None,
            }
        ),
        "write_unique",
        "rows of one depth share a slot",
    ),
    "entries further on": (slots_of(torch.arange(3, 10)), "slot_table", "entries 3 further on"),
}


@pytest.mark.parametrize("name", APPEARS)
def test_a_hint_appears(name: str) -> None:
    """The cause is told, for the request that is broken first."""
    spoil, invariant, text = APPEARS[name]
    assert violations(sound()) == []
    told = hints(spoil(sound()), invariant)
    assert told, [v.invariant for v in violations(spoil(sound()))]
    assert text in told[0], told


SILENT: dict[str, tuple[Spoil, str]] = {
    "a width and one entry more": (segments([8 * 28, 8 * 19 + 1]), "mask_len"),
    "a width in one request, another in the other": (segments([8 * 28, 9 * 20]), "mask_len"),
    "prefix lengths that one request alone has": (segments([7 * 31, 7 * 18]), "mask_len"),
    "bytes, one too many": (segments([24, 17]), "mask_len"),
    "kv with the tree in one request": (segments([27, 11], "kv_indptr"), "kv_indptr"),
    "kv with the tree and one more": (segments([28, 18], "kv_indptr"), "kv_indptr"),
    "another order, one off": (segments([11, 21], "kv_indptr"), "kv_indptr"),
    "by row but one": (
        change(
            lambda c: {
                "positions": torch.cat(
                    [20 + torch.tensor([0, 1, 2, 3, 4, 5, 7]), 11 + torch.arange(7)]
                )
            }
        ),
        "positions",
    ),
    "too far but one": (
        lambda c: put(moved("positions", 4)(c), "positions", 6, 22),
        "positions",
    ),
    "slots by depth but one": (slots_of(torch.tensor([0, 1, 1, 2, 2, 3, 6])), "slot_table"),
    "slots of entries in no order": (slots_of(torch.tensor([0, 2, 1, 3, 4, 5, 6])), "slot_table"),
    "one slot written twice": (
        lambda c: put(c, "out_cache_loc", 3, int(field(c, "out_cache_loc")[4])),
        "write_unique",
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_near_miss_is_silent(name: str) -> None:
    """It is named, and no cause is told."""
    spoil, invariant = SILENT[name]
    told = hints(spoil(sound()), invariant)
    assert told and not told[0], told


ALONE = "; or: a length of request {} alone is not this call's: stale, or of another source"


@pytest.mark.parametrize("is_captured", [None, True])
@pytest.mark.parametrize(
    ("prefixes", "stale"),
    [([10, 40, 9], [10, 36, 9]), ([31, 7], [30, 7]), ([5, 12, 12], [5, 7, 7])],
)
def test_one_stale_length_is_no_window(
    prefixes: list[int], stale: list[int], is_captured: bool | None
) -> None:
    """One length cut alone, or two equal ones: a window is one of two causes, and kv_indptr is blamed."""
    tree, layout, mask = verify(prefixes, 12, None)
    wrong = replace(layout, kv_indptr=indptr(stale, torch.int32), is_captured=is_captured is True)
    first = violations(Call.of(tree, wrong, mask))[0]
    b = [p == s for p, s in zip(prefixes, stale, strict=True)].index(False)
    assert (first.invariant, first.request, first.expected, first.found) == (
        "kv_indptr",
        b,
        prefixes[b],
        stale[b],
    )
    alone = (
        ALONE.format(b)
        if len(set(prefixes)) == len(prefixes)
        else "; or: a length of requests [1, 2]"
    )
    assert f"a window of {stale[b]} leaves of the prefixes{alone}" in first.hint


@pytest.mark.parametrize(
    ("prefixes", "cut", "is_sure"), [([20, 11, 3], [8, 8, 3], True), ([20, 3], [8, 3], False)]
)
def test_two_lengths_cut_to_one_are_a_windows(
    prefixes: list[int], cut: list[int], is_sure: bool
) -> None:
    """KV that was cut with its slots blames the mask; two lengths cut to one leave no other cause."""
    tree, layout, mask = verify(prefixes, 12, None)
    ends = layout.kv_indptr[1:].tolist()
    slots = [layout.kv_indices[end - n : end] for end, n in zip(ends, cut, strict=True)]
    wrong = replace(layout, kv_indptr=indptr(cut, torch.int32), kv_indices=torch.cat(slots))
    first = violations(Call.of(tree, wrong, mask))[0]
    assert first.invariant == "mask_len"
    told = f"{cut} is what a window of 8 leaves of {prefixes}"
    assert first.hint.endswith(told + ("" if is_sure else ALONE.format(0)))


@pytest.mark.parametrize(("prefixes", "stale"), [([10, 40, 9], [10, 44, 9]), ([38, 25], [138, 25])])
def test_one_segment_of_another_prefix_is_no_window(prefixes: list[int], stale: list[int]) -> None:
    """A mask made for one longer prefix, or with a width of 16: 16 * (38 + 16) = 6 * (138 + 6)."""
    _, layout, mask = verify(prefixes, 5, None)
    wrong = replace(layout, mask_indptr=indptr([6 * (p + 6) for p in stale]))
    told = hints(replace(Call.of(wrong, mask), positions=None), "mask_len")
    b = [p == s for p, s in zip(prefixes, stale, strict=True)].index(False)
    assert told[0].endswith(f"a window of {prefixes[b]} leaves of {stale}{ALONE.format(b)}")


BY_CALL_ROW = "positions are prefix_len + the row of the whole call"


@pytest.mark.parametrize(
    ("prefixes", "shifts", "told"),
    [
        ([5, 9, 21], [0, 4, 0], [None, "off by 4", None]),
        ([5, 9, 21], [4, 4, 4], ["off by 4"] * 3),
        ([5, 9, 21], [0, 4, 8], [None, BY_CALL_ROW, BY_CALL_ROW]),
        ([7, 2], [0, 4], [None, f"off by 4: they fit prefix_len 6, not 2: two lengths; or: {BY_CALL_ROW}"]),
        ([7, 2, 2], [3, 0, 5], ["off by 3", None, "off by 5"]),
    ],
)  # fmt: skip
def test_positions_are_judged_over_all_requests(
    prefixes: list[int], shifts: list[int], told: list[str | None]
) -> None:
    """Chains of 4: the row of the whole call would put each request 4 farther off than the one before."""
    tree, layout, mask = verify(prefixes, 3, 1, horizon=4)
    moved = layout.positions + torch.tensor(shifts).repeat_interleave(4)
    found = {
        v.request or 0: v.hint
        for v in violations(Call.of(tree, replace(layout, positions=moved), mask))
        if v.invariant == "positions"
    }
    assert found.keys() == {b for b, text in enumerate(told) if text is not None}
    for b, hint in found.items():
        causes, wanted = hint.split("; or: "), (told[b] or "").split("; or: ")
        assert len(causes) == len(wanted), hint
        for text in wanted:
            assert any(text.removesuffix(": two lengths") in cause for cause in causes), hint


@pytest.mark.parametrize(("count", "at"), [(3, 0), (2, 1), (4, 0)])
def test_sources_that_go_on_are_told_as_that(count: int, at: int) -> None:
    """Rows of a chain from the first on are the accepted ones; what is wrong stands behind them."""
    tree, layout, _ = verify([5, 9], 4, 1, horizon=5)
    counts = [5, 5]
    counts[at] = count
    nodes = torch.arange(5).repeat(2, 1)
    nodes[at, count:] = -1
    src = layout.out_cache_loc.view(2, 5)
    call = Call.of(tree, layout, nodes=nodes, num_accepted=torch.tensor(counts), src=src, dst=src)
    (hint,) = hints(call, "commit_src")
    assert hint == (
        f"the sources of the {count} accepted rows are right: behind them every entry is -1, here it is "
        f"{int(src[at, count])}"
    )


@pytest.mark.parametrize(
    ("parents", "clamped"), [((-1, 0, 0, 0), 1), ((-1, 0, 1, 2, 2), 3), ((-1, 0, 0, 1), None)]
)
def test_a_row_too_narrow_writes_as_depths_would(
    parents: tuple[int, ...], clamped: int | None
) -> None:
    """Siblings at the end of a tree share a slot by depth and by a clamped entry alike: both are told."""
    tree, slots = tree_of(parents), torch.arange(24).reshape(1, 24)
    layout, count = plan_verify(tree, torch.tensor([6]), slots), len(parents)
    by_depth = slots[0, 6 + tree.depths[0].long()]
    call = Call.of(tree, replace(layout, out_cache_loc=by_depth), slot_table=slots)
    both = f"; or: rows {clamped} to {count - 1} have one slot: their entries were clamped to a last one"
    for invariant in ("write_unique", "slot_table"):
        (hint,) = hints(call, invariant)
        assert hint.endswith("siblings share none" + (both if clamped else "")), hint


@pytest.mark.parametrize("back", [False, True])
def test_slots_off_by_a_page(back: bool) -> None:
    """With pages of 4 in any order, entries 4 off are one page off, and slots 4 off too."""
    shift = torch.arange(7) + (-4 if back else 4)
    told = hints(slots_of(shift)(sound(paged=True)), "slot_table")
    way = "back" if back else "further on"
    assert told[0] == f"the slots are those of entries 4 {way}, one page of 4 slots"
    off = hints(moved("kv_indices", -4 if back else 4)(sound(paged=True)), "slot_table")
    assert off[0] == f"every slot is off by {-4 if back else 4}, one page of 4 slots"
    other = hints(moved("kv_indices", 5)(sound(paged=True)), "slot_table")
    assert other[0] == "every slot is off by 5"


def test_bits_where_bytes_belong() -> None:
    """A packed mask handed as the flat one, and segments of bits handed as bytes, are told."""
    call, packed = sound(), sound(form="packed")
    as_flat = replace(call, custom_mask=field(packed, "packed"))
    assert "bits where the flat form has a byte each" in hints(as_flat, "flat_len")[0]
    in_bits = replace(packed, byte_indptr=indptr(BOTH))
    assert "bits where bytes belong" in hints(in_bits, "packed_len")[0]
    near = replace(packed, byte_indptr=indptr([BOTH[0], BOTH[1] + 1]))
    assert not hints(near, "packed_len")[0]


FLOOR = "every segment is its bits // 8: bytes go by (bits + 7) // 8"


def _held(rows: int) -> str:
    return (
        f"every segment holds {rows} rows of prefix_len + q_len columns: the rows are not of this call's "
        "q_len"
    )


@pytest.mark.parametrize(
    ("prefixes", "q_len", "found", "hint"),
    [
        (
            [9, 6],
            7,
            [14, 11],
            f"{FLOOR}; or: 11 bytes hold 7 rows of 12 columns; a row has prefix_len + q_len = 13",
        ),
        ([17, 14, 37, 6], 12, [43, 39, 73, 27], FLOOR),
        ([9, 6, 4], 13, [22, 19, 17], _held(8)),
        ([31, 35, 14], 9, [160, 176, 92], _held(32)),
        (
            [15, 20],
            10,
            [25, 32],
            "25 bytes hold 10 rows of 20 columns; a row has prefix_len + q_len = 25",
        ),
        ([15, 20], 10, [25, 38], ""),
        ([9, 6, 4], 13, [36, 31, 22], ""),
    ],
)
def test_byte_segments_are_explained_together(
    prefixes: list[int], q_len: int, found: list[int], hint: str
) -> None:
    """A cause of packed segments is one of all requests, and all of those are told."""
    call = Call(
        qo_indptr=indptr([q_len] * len(prefixes)),
        kv_indptr=indptr(prefixes),
        byte_indptr=indptr(found),
        packed=torch.zeros(sum(found), dtype=torch.uint8),
    )
    told = hints(call, "packed_len")
    assert told and set(told) == {hint}


@pytest.mark.parametrize(
    ("prefixes", "q_len", "window"), [([28, 32, 25, 38], 16, 12), ([17, 30, 33, 13, 2], 13, 8)]
)
def test_a_width_of_the_whole_mask_fits_every_segment(
    prefixes: list[int], q_len: int, window: int
) -> None:
    """A sum that one width gives by chance is no width where the segments it consists of deny it."""
    tree, layout, mask = verify(prefixes, q_len - 1, 3)
    assert violations(Call.of(tree, layout, mask)) == []
    cut = [min(prefix, window) for prefix in prefixes]
    slots = [
        layout.kv_indices[int(end) - kept : int(end)]
        for end, kept in zip(layout.kv_indptr[1:], cut, strict=True)
    ]
    broken = replace(layout, kv_indptr=indptr(cut, torch.int32), kv_indices=torch.cat(slots))
    call = Call.of(tree, broken, mask)
    for told in (hints(call, "flat_len"), hints(replace(call, mask_indptr=None), "flat_len")):
        assert told and "every segment fits" not in told[0]


def test_an_indptr_of_another_batch() -> None:
    """The one field that speaks of other requests is told; where two do, neither is."""
    call = sound()
    other = replace(call, mask_indptr=indptr([*BOTH, 0]))
    assert "mask_indptr is of another batch" in hints(other, "batch")[0]
    two = replace(other, kv_indptr=indptr([20, 11, 0]))
    assert not any(hints(two, "batch"))


def test_token_0_counted_as_padding() -> None:
    """Counting tokens that are not 0 is told; a node too few for another reason is not."""
    tokens = [[9, 0, 2, 3, 4, 5, 6], [8, 1, 2, 3, 4, 5, 6]]
    call = Call.of(tree_of(FORKED, OTHER, tokens=tokens))
    counted = replace(call, num_nodes=torch.tensor([6, 7]).int())
    assert "token 0 is a token" in hints(counted, "padding")[0]
    fewer = replace(call, num_nodes=torch.tensor([7, 6]).int())
    assert not hints(fewer, "padding")[0]


# whatever is told of a random corruption is undone and must give the sound call back


NAMES = (
    "mask_indptr",
    "qo_indptr",
    "kv_indptr",
    "positions",
    "out_cache_loc",
    "kv_indices",
    "custom_mask",
    "num_nodes",
)
Cause = Callable[[Call, int], tuple[str, Any]]
"""A known cause: the field that it spoils, and what that holds then."""


def sizes_of(call: Call) -> list[tuple[int, int]]:
    """(prefix_len, q_len) of each request."""
    return list(zip(lens_of(call, "kv_indptr"), lens_of(call, "qo_indptr"), strict=True))


def kv_cause(made: Callable[[int, int, int], int]) -> Cause:
    """``kv_indptr`` of lengths made from (prefix_len, q_len, a number)."""
    return lambda call, n: (
        "kv_indptr",
        indptr([made(p, q, n) for p, q in sizes_of(call)], torch.int32),
    )


def mask_cause(edit: Callable[[Tensor], Tensor]) -> Cause:
    """The real tree columns of all requests edited."""

    def cause(call: Call, _: int) -> tuple[str, Any]:
        changed = replace(call, custom_mask=field(call, "custom_mask").clone())
        for square in trees_of(changed, call):
            square.copy_(edit(square.clone()))
        return "custom_mask", changed.custom_mask

    return cause


def position_cause(made: Callable[[Tensor, Tensor], Tensor]) -> Cause:
    """Positions behind the roots' made from the depths and each row's number in its request."""

    def cause(call: Call, _: int) -> tuple[str, Any]:
        rows = torch.cat([torch.arange(q) for _, q in sizes_of(call)])
        roots = torch.cat([torch.full((q,), p) for p, q in sizes_of(call)])
        return "positions", made(field(call, "positions") - roots, rows) + roots

    return cause


def counted_nonzero(call: Call, _: int) -> tuple[str, Any]:
    """Nodes counted as tokens that are not 0."""
    return "num_nodes", (field(call, "token_ids") != 0).sum(dim=1).int()


def written_by_depth(call: Call, _: int) -> tuple[str, Any]:
    """Tree rows written to the entries of their depths."""
    table, depths = field(call, "slot_table"), field(call, "depths").long()
    made = [table[b, p + depths[b, :q]] for b, (p, q) in enumerate(sizes_of(call))]
    return "out_cache_loc", torch.cat(made)


CAUSES: tuple[Cause, ...] = (
    kv_cause(lambda p, q, _: p + q),
    kv_cause(lambda p, q, _: p + 1),
    kv_cause(lambda p, q, _: max(p, 1)),
    kv_cause(lambda p, q, n: min(p, n)),
    mask_cause(lambda tree: tree.T),
    mask_cause(lambda tree: torch.ones_like(tree).tril()),
    mask_cause(torch.ones_like),
    mask_cause(lambda tree: shallower(tree)),
    mask_cause(lambda tree: eye(tree)),
    mask_cause(lambda tree: parent_of(tree)),
    mask_cause(without_root),
    mask_cause(lambda tree: tree & ~eye(tree)),
    position_cause(lambda depth, row: row),
    position_cause(lambda depth, row: depth + (depth > 0)),
    counted_nonzero,
    written_by_depth,
)


@hs.composite
def corrupted(draw: hs.DrawFn) -> tuple[Call, Call]:
    """A random sound call, and the same with one field changed in a random way, right causes among them."""
    prefixes = draw(hs.lists(hs.integers(0, 12), min_size=1, max_size=3))
    budget, topk = draw(hs.integers(0, 12)), draw(hs.sampled_from([1, 2, 4]))
    tree, layout, mask = verify(prefixes, budget, topk, horizon=draw(hs.integers(1, 4)))
    table = torch.randperm(
        len(prefixes) * (max(prefixes) + budget + 6),
        generator=torch.Generator().manual_seed(budget),
    ).reshape(len(prefixes), -1)
    layout = plan_verify(tree, torch.tensor(prefixes), table)
    known = {"prefix_lens": torch.tensor(prefixes)} if draw(hs.booleans()) else {}
    call = Call.of(tree, layout, mask, slot_table=table, **known)
    if draw(hs.booleans()):
        name, made = draw(hs.sampled_from(CAUSES))(call, draw(hs.integers(1, 9)))
        return call, replace(call, **{name: made})
    name = draw(hs.sampled_from(NAMES))
    value: Any = field(call, name).clone()
    lens = value.diff() if name.endswith("indptr") else value
    how = draw(hs.sampled_from(["shift", "one", "roll", "scale", "random", "flip", "arange"]))
    number = draw(hs.integers(1, 9))
    if not lens.numel():
        return call, call
    if lens.dtype is torch.bool:
        lens = ~lens if how in {"shift", "scale"} else lens.roll(number) if how == "roll" else lens
        if how in {"one", "random", "arange"}:
            at = draw(hs.integers(0, lens.numel() - 1))
            lens[at] = ~lens[at]
    elif how == "shift":
        lens = lens + number
    elif how == "scale":
        lens = lens * number
    elif how in {"roll", "flip"}:
        lens = lens.flip(0) if how == "flip" else lens.roll(number)
    elif how == "arange":
        lens = torch.arange(lens.numel()) + number
    elif how == "one":
        lens = lens.clone()
        lens[draw(hs.integers(0, lens.numel() - 1))] += number
    else:
        size = lens.numel()
        lens = torch.tensor(draw(hs.lists(hs.integers(0, 60), min_size=size, max_size=size)))
    value = indptr(lens.tolist(), value.dtype) if name.endswith("indptr") else lens.to(value.dtype)
    return call, replace(call, **{name: value})


def lens_of(call: Call, name: str) -> list[int]:
    return [int(n) for n in field(call, name).diff()]


def trees_of(call: Call, like: Call) -> list[Tensor]:
    """Each request's real tree columns, read with the sizes of ``like``."""
    q_lens, prefixes = lens_of(like, "qo_indptr"), lens_of(like, "kv_indptr")
    starts = field(like, "mask_indptr").tolist()
    nodes = field(like, "num_nodes").tolist()
    return [
        field(call, "custom_mask")[a:b].reshape(q, p + q)[:n, p : p + n]
        for a, b, q, p, n in zip(starts[:-1], starts[1:], q_lens, prefixes, nodes, strict=True)
    ]


def segments_are(made: Callable[[int, int], int]) -> Callable[..., bool]:
    """Every broken mask segment is this function of the sound (prefix_len, q_len)."""

    def oracle(right: Call, broken: Call, *_: str) -> bool:
        sizes = zip(lens_of(right, "kv_indptr"), lens_of(right, "qo_indptr"), strict=True)
        return lens_of(broken, "mask_indptr") == [made(p, q) for p, q in sizes]

    return oracle


def masks_are(made: Callable[[Tensor], Tensor]) -> Callable[..., bool]:
    def oracle(right: Call, broken: Call, *_: str) -> bool:
        pairs = zip(trees_of(right, right), trees_of(broken, right), strict=True)
        return all(torch.equal(made(tree.clone()), found) for tree, found in pairs)

    return oracle


def a_width(right: Call, broken: Call, *told: str) -> bool:
    """The width explains the changed field, and is not the sound call's."""
    w, own = int(told[0]), lens_of(right, "qo_indptr")
    if lens_of(broken, "qo_indptr") == [w] * len(own) != own:
        return True
    return segments_are(lambda p, _: w * (p + w))(right, broken) and own != [w] * len(own)


def stale_alone(right: Call, broken: Call, *_: str) -> bool:
    """Just one request, or equal ones, have another length than they should."""
    for name in ("kv_indptr", "mask_indptr"):
        pairs = list(zip(lens_of(right, name), lens_of(broken, name), strict=True))
        if len({pair for pair in pairs if pair[0] != pair[1]}) == 1:
            return True
    return False


def clamped(right: Call, broken: Call, *told: str) -> bool:
    first, last = int(told[0]), int(told[1])
    starts, slots = field(right, "qo_indptr").tolist(), field(broken, "out_cache_loc")
    return any(len(set(slots[s + first : s + last + 1].tolist())) == 1 for s in starts[:-1])


def positions_shifted(right: Call, broken: Call, *told: str) -> bool:
    starts = [*field(right, "qo_indptr").tolist()]
    nodes = field(right, "num_nodes").tolist()
    off = field(broken, "positions") - field(right, "positions")
    return any(
        bool((off[s : s + n] == int(told[0])).all()) for s, n in zip(starts, nodes, strict=False)
    )


def sorted_alike(right: Call, broken: Call, *_: str) -> bool:
    names = ("mask_indptr", "kv_indptr", "qo_indptr")
    return any(
        lens_of(right, n) != lens_of(broken, n)
        and sorted(lens_of(right, n)) == sorted(lens_of(broken, n))
        for n in names
    )


def by_row(right: Call, broken: Call, *_: str) -> bool:
    starts, nodes = field(right, "qo_indptr").tolist(), field(right, "num_nodes").tolist()
    found, sound_positions = field(broken, "positions"), field(right, "positions")
    return any(
        bool((found[s : s + n] - sound_positions[s] == torch.arange(n)).all())
        for s, n in zip(starts, nodes, strict=False)
    )


def by_call_row(right: Call, broken: Call, *told: str) -> bool:
    start = int(told[0])
    b = field(right, "qo_indptr").tolist().index(start)
    count, root = int(field(right, "num_nodes")[b]), int(field(right, "positions")[start])
    found = field(broken, "positions")[start : start + count]
    return torch.equal(found, root + start + torch.arange(count))


def counts_nonzero(right: Call, broken: Call, *_: str) -> bool:
    return torch.equal(field(broken, "num_nodes"), counted_nonzero(right, 0)[1])


def slots_shifted(right: Call, broken: Call, *told: str) -> bool:
    by = int(told[0]) * (1 if told[1] == "further on" else -1)
    table, prefixes = field(right, "slot_table"), lens_of(right, "kv_indptr")
    starts, nodes = field(right, "qo_indptr").tolist(), field(right, "num_nodes").tolist()
    for b, p in enumerate(prefixes):
        own = field(broken, "out_cache_loc")[starts[b] : starts[b] + nodes[b]]
        prefix = field(broken, "kv_indices")[sum(prefixes[:b]) : sum(prefixes[: b + 1])]
        if any(
            found.numel() > 1
            and first + by >= 0
            and torch.equal(found, table[b, first + by :][: found.numel()])
            for found, first in ((own, p), (prefix, 0))
        ):
            return True
    return False


def slots_off(right: Call, broken: Call, *told: str) -> bool:
    return any(
        bool((field(broken, n) - field(right, n) == int(told[0])).any())
        for n in ("out_cache_loc", "kv_indices")
    )


def any_siblings_share(right: Call, broken: Call) -> bool:
    """Two nodes of one depth of a request are written to one slot."""
    starts, nodes = field(right, "qo_indptr").tolist(), field(right, "num_nodes").tolist()
    for b, (start, n) in enumerate(zip(starts, nodes, strict=False)):
        slots = field(broken, "out_cache_loc")[start : start + n].tolist()
        depths = field(right, "depths")[b, :n].tolist()
        pairs = list(zip(slots, depths, strict=True))
        if len(set(pairs)) < len(pairs):
            return True
    return False


def prefixes_told(right: Call, broken: Call, *told: str) -> bool:
    fit, own = ([int(n) for n in re.findall(r"\d+", text)] for text in told)
    if own != lens_of(right, "kv_indptr") and fit != lens_of(right, "kv_indptr"):
        return False
    q_lens = lens_of(right, "qo_indptr")
    return [q * (p + q) for p, q in zip(fit, q_lens, strict=True)] == lens_of(broken, "mask_indptr")


def kv_is(made: Callable[[int, int], int]) -> Callable[..., bool]:
    def oracle(right: Call, broken: Call, *_: str) -> bool:
        sizes = zip(lens_of(right, "kv_indptr"), lens_of(right, "qo_indptr"), strict=True)
        return lens_of(broken, "kv_indptr") == [made(p, q) for p, q in sizes]

    return oracle


def kv_or_mask_window(right: Call, broken: Call, *told: str) -> bool:
    window = int(told[0])
    if kv_is(lambda p, _: min(p, window))(right, broken):
        return True
    return segments_are(lambda p, q: q * (min(p, window) + q))(right, broken)


def eye(tree: Tensor) -> Tensor:
    return torch.eye(len(tree), dtype=torch.bool)


def parent_of(tree: Tensor) -> Tensor:
    made = eye(tree)
    for row in range(1, len(tree)):
        made[row, int(tree[row, :row].nonzero()[-1])] = True
    return made


def shallower(tree: Tensor) -> Tensor:
    depth = tree.sum(dim=1)
    return (depth[None] < depth[:, None]) | eye(tree)


ORACLES: dict[str, Callable[..., bool]] = {
    r"every segment fits width (\d+); this call's": a_width,
    r"every segment is (\d+) \* \(prefix_len \+ q_len\): the rows": lambda r, b, w: segments_are(
        lambda p, q: int(w) * (p + q)
    )(r, b),
    r"every segment is q_len \* \(prefix_len \+ (\d+)\): the rows": lambda r, b, w: segments_are(
        lambda p, q: q * (p + int(w))
    )(r, b),
    r"the tree's own columns were left out": segments_are(lambda p, q: q * p),
    r"the prefix's columns were left out": segments_are(lambda _, q: q * q),
    r"each row lacks one column": segments_are(lambda p, q: q * (p + q - 1)),
    r"the columns of the longest prefix, (\d+)": lambda r, b, n: segments_are(
        lambda _, q: q * (int(n) + q)
    )(r, b),
    r"has the tree's columns twice": segments_are(lambda p, q: q * (p + 2 * q)),
    r"is its packed form's bytes": segments_are(lambda p, q: (q * (p + q) + 7) // 8),
    r"mask_indptr was cumulated twice": lambda r, b: (
        lens_of(b, "mask_indptr") == field(r, "mask_indptr")[1:].tolist()
    ),
    r"the segments are those of requests": sorted_alike,
    r"the segments fit prefix lengths (\[[\d, ]+\]); this call's are (\[[\d, ]+\])": prefixes_told,
    r"a window of (\d+) leaves": kv_or_mask_window,
    r"a length of requests? [\d, \[\]]+ alone is not this call's": stale_alone,
    r"rows (\d+) to (\d+) have one slot": clamped,
    r"(\[[\d, ]+\]) are (?:kv_indptr's|the roots' positions)": lambda *_: (
        True
    ),  # prefixes_told judges it
    r"every segment is prefix_len \+ q_len": kv_is(lambda p, q: p + q),
    r"every segment is prefix_len \+ 1: kv_indptr counts the root": kv_is(lambda p, _: p + 1),
    r"a prefix of 0 was counted as 1": kv_is(lambda p, _: max(p, 1)),
    r"every bit is inverted": masks_are(torch.logical_not),
    r"columns are transposed": masks_are(lambda tree: tree.T),
    r"causal by row": masks_are(lambda tree: torch.ones_like(tree).tril()),
    r"every row sees every node": masks_are(torch.ones_like),
    r"the mask goes by depth": masks_are(shallower),
    r"every row sees itself alone": masks_are(eye),
    r"its parent and itself alone": masks_are(parent_of),
    r"the root: its column is missing": masks_are(lambda tree: without_root(tree)),
    r"no row sees itself": masks_are(lambda tree: tree & ~eye(tree)),
    r"positions are prefix_len \+ row": by_row,
    r"the row of the whole call, (\d+) rows too far": by_call_row,
    r"the row of the whole call: each": lambda r, b: by_call_row(r, b, "0"),
    r"off by (-?\d+): they fit prefix_len": positions_shifted,
    r"every position but the root's is 1 too far": lambda r, b: bool(
        (field(b, "positions") - field(r, "positions") == 1).any()
    ),
    r"entries prefix_len \+ depth": lambda r, b: (
        len(set(field(b, "out_cache_loc").tolist())) < field(b, "out_cache_loc").numel()
    ),
    r"the slots are those of entries (\d+) (further on|back)": slots_shifted,
    r"every slot is off by (-?\d+)": slots_off,
    r"rows of one depth share a slot": lambda r, b: any_siblings_share(r, b),
    r"leaves out rows? (\d+)": lambda r, b, _: (b.max_q_len or 0) < (r.max_q_len or 0),
    r"num_nodes counts the tokens that are not 0": counts_nonzero,
    r"^the root was not counted": lambda r, b: bool(
        (field(r, "num_nodes") - field(b, "num_nodes") == 1).all()
    ),
    r"num_nodes is the width of the trees": lambda r, b: (
        field(b, "num_nodes").tolist()
        == [field(r, "token_ids").shape[1]] * field(r, "num_nodes").numel()
    ),
    r"mask itself fit prefix lengths (\[[\d, ]+\]), kv_indptr says (\[[\d, ]+\])": lambda r, _, *told: (
        str(lens_of(r, "kv_indptr")) in told
    ),
    r"mask itself fit width (\d+), qo_indptr says (\[[\d, ]+\])": lambda r, _, width, own: (
        str(lens_of(r, "qo_indptr")) in (own, str([int(width)] * len(lens_of(r, "qo_indptr"))))
    ),
    r"the mask was not made for width": lambda *_: True,  # says what it sees, not why
}
"""What each hint says, and whether it is so: from the sound call and the broken one, by other means."""


def overwritten() -> tuple[Call, Call]:
    """A chain, and the same with its last node's slot written by padding: no two nodes share a slot."""
    call = Call.of(*verify([5, 3], 9, 1, horizon=4))
    return call, put(call, "out_cache_loc", 5, int(field(call, "out_cache_loc")[4]))


@given(corrupted())
@example(overwritten())
def test_no_hint_is_wrong(pair: tuple[Call, Call]) -> None:
    """Whatever is told of a corruption is what was done to the call, as far as the two calls can tell."""
    right, broken = pair
    for violation in violations(broken):
        for cause in filter(None, violation.hint.split("; or: ")):
            judged = [
                (oracle, found)
                for text, oracle in ORACLES.items()
                if (found := re.search(text, cause))
            ]
            assert judged, f"no oracle for the hint {cause!r}"
            for oracle, found in judged:
                assert oracle(right, broken, *found.groups()), f"{violation}\n{broken.known()}"


def configured(name: str, prefixes: tuple[int, ...] = (5, 9)) -> tuple[Call, Call]:
    """The founding bug in one of the indptrs."""
    call = Call.of(*verify(prefixes, 16, 3, horizon=2))
    return call, width(8, (name,))(call)


@given(corrupted(), hs.integers(0, 3))
@example(configured("mask_indptr"), 2)
@example(configured("mask_indptr"), 1)
@example(configured("qo_indptr"), 2)
@example(configured("qo_indptr"), 0)
def test_an_unused_request_changes_nothing(pair: tuple[Call, Call], at: int) -> None:
    """The violations are those of the call without it, hints and all; the requests behind it move up."""
    broken = replace(pair[1], is_captured=True)
    at = min(at, field(broken, "num_nodes").numel())

    def moved(found: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda b: str(int(b[0]) + (int(b[0]) >= at)), found[0])

    def told(call: Call, *, is_moved: bool) -> list[tuple[str, int | None, str]]:
        found = []
        for v in violations(call):
            request, hint = (
                v.request,
                "" if v.invariant == "padding" else v.hint,
            )  # counts all trees
            if is_moved:
                request = None if request is None else request + (request >= at)
                hint = re.sub(r"requests? (\d+|\[[\d, ]+\])", moved, hint)
            found.append((v.invariant, request, hint))
        return found

    assert told(with_unused(broken, at), is_moved=False) == told(broken, is_moved=True)

"""What gives the founding bug away: a dump, any one field beside it, buffers alone, debug mode.

That it garbles, and is named in every field and on both paths, is held in ``tests/test_founding_bug.py``.
"""

from collections.abc import Collection
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from ddtree.decoding.founding_bug import FIELDS, configured_width
from ddtree.invariants import Call, InvariantViolation, check, debug, dump, load, report, violations
from ddtree.spec import (
    Budget,
    FlatMask,
    Horizon,
    InputError,
    PrefixLen,
    QLen,
    VerifyBuffers,
    accept_greedy,
)
from ddtree.spec.index import mask_len, q_len_of
from tests.invariants.calls import indptr, verify

WIDTH = 8


def ident(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def bake(buffers: VerifyBuffers, fields: Collection[str] = FIELDS) -> None:
    """Write the configured width into filled buffers, as a capture does."""
    wrong = configured_width(buffers.layout, WIDTH, fields)
    buffers.layout.qo_indptr.copy_(wrong.qo_indptr)
    buffers.layout.mask_indptr.copy_(wrong.mask_indptr)
    buffers.layout = replace(buffers.layout, max_q_len=wrong.max_q_len)


@pytest.mark.parametrize(("prefixes", "whole", "short"), [([5], 374, 104), ([5, 3], 714, 192)])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_dump(tmp_path: Path, suffix: str, prefixes: list[int], whole: int, short: int) -> None:
    """A dump of prefix 5, q_len 17, width 8 names the mask length with 374 and 104, and the width."""
    batch = len(prefixes)
    path = dump(
        tmp_path / f"call{suffix}",
        qo_indptr=indptr([17] * batch, torch.int32),
        kv_indptr=indptr(prefixes, torch.int32),
        mask_indptr=indptr([mask_len(PrefixLen(p), QLen(WIDTH)) for p in prefixes]),
        max_q_len=WIDTH,
    )
    first = violations(load(path))[0]
    assert (first.invariant, first.request, first.expected, first.found) == (
        "mask_len",
        0,
        374,
        104,
    )
    assert (
        first.hint
        == "every segment fits width 8; this call's q_len is 17: the width came from configuration"
    )
    assert f"the whole mask: {whole} entries, mask_indptr[-1] is {short}" in str(first)
    assert "17 * (5 + 17) = 374" in str(first)
    assert first.also == ("max_q_len",)


EVIDENCE = {
    "positions": {"positions": torch.tensor([5] * 17 + [3] * 17)},
    "out_cache_loc": {"out_cache_loc": torch.arange(34)},
    "query rows": {"num_rows": 34},
    "target's choices": {"target_ids": torch.zeros(34, dtype=torch.int64)},
    "tree": {
        "token_ids": torch.ones(2, 17, dtype=torch.int64),
        "num_nodes": torch.tensor([17, 17]),
    },
    "mask": {"custom_mask": torch.ones(714, dtype=torch.bool)},
    "the call's own q_lens": {"q_lens": torch.tensor([17, 17])},
}


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_one_piece_of_evidence_is_enough(evidence: str) -> None:
    """Three fields that agree on the configured width are refuted by any single field that knows better."""
    call = Call(
        qo_indptr=indptr([8, 8]),
        kv_indptr=indptr([5, 3]),
        mask_indptr=indptr([104, 88]),
        max_q_len=8,
        **EVIDENCE[evidence],  # type: ignore[arg-type]
    )
    found = violations(call)
    assert {"mask_len", "qo_indptr", "max_q_len"} <= {violation.invariant for violation in found}
    assert (found[0].expected, found[0].found) == (374, 104)


def test_without_evidence_there_is_no_alarm() -> None:
    """Three fields that agree, with nothing beside them, are a right call of width 8."""
    call = Call(
        qo_indptr=indptr([8, 8]),
        kv_indptr=indptr([5, 3]),
        mask_indptr=indptr([104, 88]),
        max_q_len=8,
    )
    assert report(call).ok


def test_debug_mode_stops_the_eager_path() -> None:
    """With debug mode on, the first public call that takes the wrong layout raises before it runs."""
    tree, layout, mask = verify([5, 3], 16, 1)
    wrong = configured_width(layout, WIDTH)
    buffers = VerifyBuffers(2, QLen(17), 6)
    with (
        debug(),
        pytest.raises(
            InvariantViolation,
            match=r"mask_len is broken in request 0, on entry to VerifyBuffers.fill: expected 374, found 104",
        ),
    ):
        buffers.fill(tree, wrong, mask)
    assert int(buffers.layout.qo_indptr.sum()) == 0, "nothing was written"


def test_debug_mode_stops_the_captured_path() -> None:
    """Buffers that a capture baked with the configured width are stopped where they are used."""
    tree, layout, mask = verify([5, 3], 16, 1)
    buffers = VerifyBuffers(2, QLen(17), 6)
    buffers.fill(tree, layout, mask)
    bake(buffers, ("qo_indptr", "mask_indptr"))
    with debug(), pytest.raises(InvariantViolation, match="on entry to accept_greedy") as caught:
        accept_greedy(tree, torch.zeros(34, dtype=torch.int64), buffers.layout, Horizon(7))
    assert caught.value.invariant == "mask_len"


def test_stale_replay() -> None:
    """A replay on the metadata of the call before is named, although that call was right."""
    tree, layout, mask = verify([5, 3], 7, 4)
    buffers = VerifyBuffers(2, QLen(17), 9)
    buffers.fill(tree, layout, mask)
    now, _, _ = verify([8, 6], 16, 4)
    found = violations(Call.of(now, buffers, prefix_lens=torch.tensor([8, 6])))
    assert (found[0].invariant, found[0].expected, found[0].found) == ("mask_len", 17 * 25, 8 * 13)
    assert {"qo_indptr", "kv_indptr", "positions"} <= {violation.invariant for violation in found}


def test_buffers_sized_by_the_configured_width() -> None:
    """Buffers made for the configured width have no room for budget + 1, and the numbers say so."""
    tree, layout, mask = verify([5, 3], 16, 4)
    small = VerifyBuffers(2, QLen(WIDTH), 5)
    captured = replace(
        small.layout,
        qo_indptr=layout.qo_indptr,
        kv_indptr=layout.kv_indptr,
        mask_indptr=layout.mask_indptr,
    )
    found = violations(Call.of(tree, captured, FlatMask(small.mask.allowed)))
    capacity = [violation for violation in found if violation.invariant == "buffer_capacity"]
    rows = next(violation for violation in capacity if "positions" in violation.detail)
    assert (rows.expected, rows.found) == ("at least 34", 16)
    assert "8 rows for each of 2 requests; this call's q_len is 17" in rows.hint
    assert "max_q_len" in {violation.invariant for violation in found}
    with pytest.raises(InvariantViolation):
        check(tree, captured, mask)


def test_a_width_that_does_not_fit_the_buffers_writes_nothing() -> None:
    """A call whose max_q_len alone is the configured width leaves buffers of that width alone."""
    tree, layout, mask = verify([5, 3], 16, 4)
    small = VerifyBuffers(2, QLen(WIDTH), 20)
    with pytest.raises(InputError, match="34 entries do not fit a buffer of 16"):
        small.fill(tree, configured_width(layout, WIDTH, ("max_q_len",)), mask)
    assert int(small.layout.qo_indptr.sum()) == 0


@pytest.mark.parametrize(
    ("budget", "prefixes"), list(product((8, 16, 63), ([5], [5, 3], [4, 9, 2]))), ids=ident
)
def test_fixed_buffers_without_the_tree(budget: int, prefixes: list[int]) -> None:
    """Attention sees the buffers alone: the written mask gives the width away."""
    tree, layout, mask = verify(prefixes, budget, 4)
    buffers = VerifyBuffers(len(prefixes) + 1, q_len_of(Budget(budget)), max(prefixes) + 1)
    buffers.fill(tree, layout, mask)
    assert violations(Call.of(buffers)) == []
    bake(buffers)
    first = violations(Call.of(buffers))[0]
    q_len = q_len_of(Budget(budget))
    assert (first.invariant, first.request) == ("mask_len", 0)
    assert (first.expected, first.found) == (
        mask_len(PrefixLen(prefixes[0]), q_len),
        mask_len(PrefixLen(prefixes[0]), QLen(WIDTH)),
    )
    assert first.hint.startswith(f"every segment fits width {WIDTH}; this call's q_len is {q_len}")


def test_leftover_of_a_larger_call_is_no_width() -> None:
    """A mask tail left over from a wider call is named as stale, not blamed on a width."""
    buffers = VerifyBuffers(1, QLen(17), 6)
    buffers.fill(*verify([5], 16, 4))
    leftover = buffers.mask.allowed.clone()
    tree, layout, mask = verify([5], 7, 4)
    buffers.fill(tree, layout, mask)
    live = mask.allowed.numel()
    buffers.mask.allowed[live:] = leftover[live:]
    assert [violation.invariant for violation in violations(Call.of(buffers))] == ["stale_tail"]

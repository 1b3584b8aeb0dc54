"""Every invariant: silent on clean calls, and broken by at least one mutant that it names."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ddtree.invariants import TABLE, Call, InvariantViolation, report, violations
from ddtree.spec import QLen, VerifyBuffers
from tests.invariants.calls import captured, field, indptr, put, tables, verify, whole_round
from tests.invariants.mutants.kinds import Mutant, short_mask, tied
from tests.invariants.mutants.of_acceptance import ACCEPTANCE
from tests.invariants.mutants.of_buffers import BUFFERS
from tests.invariants.mutants.of_call import CALL
from tests.invariants.mutants.of_commit import COMMIT
from tests.invariants.mutants.of_layout import LAYOUT
from tests.invariants.mutants.of_mask import MASK
from tests.invariants.mutants.of_tree import TREE

MUTANTS = [*CALL, *TREE, *LAYOUT, *MASK, *BUFFERS, *ACCEPTANCE, *COMMIT]


def _padded_writes(slots: list[int]) -> Call:
    """Layout, mask and slot table of two requests of 13 nodes in 17 rows; the padding's slots are these."""
    table = tables(2, 22)
    _, layout, mask = verify([5, 3], 16, 3, horizon=2)
    call = Call.of(layout, mask, slot_table=table, kv_pool_size=100)
    written = field(call, "out_cache_loc").clone()
    written[13:17] = written[30:34] = torch.tensor(slots)
    return replace(call, out_cache_loc=written)


CLEAN: dict[str, Callable[[], Call]] = {
    "a whole round": whole_round,
    "a whole round with pages of 2": lambda: whole_round(page_size=2),
    "a chain with padding": lambda: whole_round(topk=1, horizon=7),
    "budget 7": lambda: whole_round(budget=7, horizon=7),
    "budget 0": lambda: whole_round(budget=0, horizon=7),
    "no prefix": lambda: whole_round(prefixes=(0, 0)),
    "one request": lambda: whole_round(prefixes=(5,)),
    "fixed buffers": lambda: Call.of(*captured()),
    "full fixed buffers": lambda: Call.of(*captured(max_batch=2)),
    "fixed buffers with a slot for padding": lambda: Call.of(*captured(pad_slot=44)),
    "fixed buffers whose slot for padding is not told": lambda: replace(
        Call.of(*captured(pad_slot=44)), pad_slot=None
    ),
    "fixed buffers that were never filled": lambda: Call.of(VerifyBuffers(4, QLen(17), 7)),
    "no request": lambda: Call(
        qo_indptr=indptr([]), kv_indptr=indptr([]), mask_indptr=indptr([]), max_q_len=0
    ),
    "trees of no request in fixed buffers, their counts alone": lambda: Call(
        qo_indptr=indptr([0, 0]), num_nodes=torch.zeros(0, dtype=torch.int32), is_captured=True
    ),
    "fixed buffers of idle requests": lambda: Call(
        qo_indptr=indptr([0, 0]),
        kv_indptr=indptr([0, 0]),
        mask_indptr=indptr([0, 0]),
        max_q_len=8,
        is_captured=True,
    ),
    "fixed buffers with an idle request": lambda: Call(
        qo_indptr=indptr([4, 0, 4]),
        kv_indptr=indptr([5, 0, 3]),
        mask_indptr=indptr([36, 0, 28]),
        max_q_len=4,
        is_captured=True,
    ),
    "fixed buffers with a request that says it is unused": lambda: Call(
        qo_indptr=indptr([4, 0, 4]),
        kv_indptr=indptr([5, 0, 3]),
        mask_indptr=indptr([36, 0, 28]),
        prefix_lens=torch.tensor([5, -1, 3]),
        is_captured=True,
    ),
    "ragged": lambda: Call.of(*verify([5, 3], 16, 3, ragged=True, horizon=2)),
    "the metadata alone": lambda: short_mask([5, 3], 17, 714, capture=False),
    "a packed mask in a longer buffer, its segments not told": lambda: Call(
        qo_indptr=indptr([2]),
        kv_indptr=indptr([3]),
        positions=torch.tensor([3, 4, 0]),
        packed=torch.tensor([239, 3, 0, 0], dtype=torch.uint8),
        is_captured=True,
    ),
    "a shared prefix": lambda: Call(
        kv_indptr=indptr([2, 2]), kv_indices=torch.tensor([4, 7, 4, 9])
    ),
    "tied siblings in order": lambda: replace(tied(), token_ids=torch.tensor([[1, 4, 5]])),
    "an engine's padding rows that share a dummy slot": lambda: put(
        replace(whole_round(), slot_table=None),
        "out_cache_loc",
        slice(14, 17),
        int(field(whole_round(), "out_cache_loc")[13]),
    ),
    "padding that is not written, in a call without its tree": lambda: _padded_writes([-1] * 4),
    "padding that shares a slot, in a call without its tree": lambda: _padded_writes([99] * 4),
    "padding in fixed buffers, at position 0 and unwritten, without its tree": lambda: put(
        replace(_padded_writes([-1] * 4), is_captured=True, pad_slot=-1),
        "positions",
        slice(13, 17),
        0,
    ),
    "offsets of 64 bits": lambda: Call(num_rows=15409, vocab_size=151936, offset_bits=64),
    "the last offset of 32 bits": lambda: Call(
        kv_pool_size=2**21, slot_stride=1024, offset_bits=32
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean(name: str) -> None:
    """A clean call breaks nothing."""
    assert [str(violation) for violation in violations(CLEAN[name]())] == []


def test_clean_round_checks_all_but_buffers() -> None:
    """A whole round leaves nothing unchecked but what only fixed buffers have."""
    assert set(report(whole_round()).not_checked) == {"buffer_capacity", "stale_tail"}
    assert not {"buffer_capacity", "stale_tail"} & set(report(CLEAN["fixed buffers"]()).not_checked)


def ident(mutant: Mutant) -> str:
    return f"{mutant.invariant}: {mutant.what}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=ident)
def test_mutant(mutant: Mutant) -> None:
    """A mutant is named by its invariant, with the request, the numbers, and the cause or no cause."""
    found = [v for v in violations(mutant.call()) if v.invariant == mutant.invariant]
    assert found, (
        f"{mutant.invariant} did not see it; broken: {[v.invariant for v in violations(mutant.call())]}"
    )
    named = next((v for v in found if v.request == mutant.request and _numbers(mutant, v)), None)
    assert named is not None, "\n".join(map(str, found))
    assert mutant.hint in named.hint
    assert bool(mutant.hint) == bool(named.hint), named.hint


def _numbers(mutant: Mutant, violation: InvariantViolation) -> bool:
    return (mutant.expected is None or violation.expected == mutant.expected) and (
        mutant.found is None or violation.found == mutant.found
    )


def test_every_invariant_has_a_mutant() -> None:
    """No invariant of the table is without a mutant that breaks it."""
    assert {mutant.invariant for mutant in MUTANTS} == {row.id for row in TABLE}


def test_identifiers_are_distinct() -> None:
    """An id names one invariant."""
    assert len({row.id for row in TABLE}) == len(TABLE)


def test_given_stands_before() -> None:
    """What an invariant presupposes is checked before it."""
    order = [row.id for row in TABLE]
    for row in TABLE:
        assert all(order.index(name) < order.index(row.id) for name in row.given), row.id

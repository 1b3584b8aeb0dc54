"""The oracle's inputs: right attention passes, and each wrong read is told entry by entry."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ddtree import spec
from ddtree.catalogue.backends import Faulty, of_masks
from ddtree.invariants.conformance import Backend, oracle
from ddtree.invariants.conformance.attend import AttentionCase, attend
from ddtree.invariants.conformance.cells import Cell, case_of


def seen_by(thing: object, case: AttentionCase) -> tuple[dict[int, list[int]], str]:
    """Wrong rows of each request, and what the first of them sees."""
    result = attend(Backend.of(thing), case, lambda call, slots: oracle.inputs(case, call, slots))
    wrong = oracle.wrong_rows(case, result)
    return wrong, oracle.explain(case, result, wrong) if wrong else ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("execution", ["eager", "buffers"])
@pytest.mark.parametrize("q_len", [1, 8, 33, 65])
def test_right_attention_sees_what_it_should(
    dtype: torch.dtype, execution: str, q_len: int
) -> None:
    """In every dtype the means of up to 250 entries are told apart."""
    cell = Cell(q_len, 17, q_len > 2, q_len > 2, execution, batch=3)  # type: ignore[arg-type]
    assert seen_by(spec.verify_attention, case_of(cell, dtype)) == ({}, "")


def hides(row: int, column: int) -> Callable[[Tensor, int], Tensor]:
    def change(seen: Tensor, _prefix: int) -> Tensor:
        seen[row, column] = ~seen[row, column]
        return seen

    return change


def test_one_wrong_bit_is_named() -> None:
    """A hidden prefix entry, a sibling that is seen, and padding that is seen."""
    case = case_of(Cell(9, 5, branching=True, padding=True, batch=2), torch.float32)
    for bit, said in (
        ((2, 4), "row 2 of request 0 does not see prefix entry 4"),
        ((2, 5 + 1), "row 2 of request 0 sees row 1"),
        ((4, 5 + 7), "row 4 of request 0 sees row 7"),
    ):
        wrong, told = seen_by(Faulty(of_masks(hides(*bit))), case)
        assert wrong == {0: [bit[0]], 1: [bit[0]]}
        assert told == said


def test_padding_rows_may_see_anything() -> None:
    """Of a padding row nothing is demanded."""
    case = case_of(Cell(9, 5, padding=True), torch.float32)
    assert seen_by(Faulty(of_masks(hides(8, 0))), case) == ({}, "")


def test_an_entry_of_another_request_is_named() -> None:
    """Slots of two requests that are swapped show whose they are."""
    case = case_of(Cell(4, 3, batch=2), torch.float32)

    def swapped(*tensors: Tensor, layout: spec.VerifyLayout, mask: spec.FlatMask) -> Tensor:
        slots = layout.kv_indices.clone()
        slots[[0, 3]] = slots[[3, 0]]
        wrong = replace(layout, kv_indices=slots)
        return spec.verify_attention(*tensors, wrong, mask)[0]  # type: ignore[arg-type, call-arg]

    _, told = seen_by(lambda *a: swapped(*a[:5], layout=a[5], mask=a[6]), case)
    assert (
        told
        == "row 0 of request 0 sees prefix entry 0 of request 1 and does not see prefix entry 0"
    )


def test_outputs_that_are_none_are_told() -> None:
    """Rows that were not computed, NaN, and memory that nobody wrote."""
    case = case_of(Cell(4, 3), torch.float32)
    for value, said in (
        (0.0, "row 0 of request 0 sees nothing, or was not computed: its output is 0"),
        (torch.nan, "row 0 of request 0 is NaN"),
        (300.0, "is no mean of entries of the call: it reads memory that nobody wrote"),
    ):
        _, told = seen_by(lambda query, *_, v=value: torch.full_like(query, v), case)
        assert said in told


def test_random_numbers_may_hide_what_the_oracle_shows() -> None:
    """A key far below the others takes no weight, so a mask that hides it changes nothing: a set shows it."""
    case = case_of(Cell(4, 3), torch.float32)
    inputs = oracle.inputs(case, case.call, case.call.slots.num_slots)
    key = inputs.key.clone()
    key[0], query = -100.0, torch.ones_like(inputs.query)
    right = spec.tree_mask(case.call.tree, case.call.layout, "flat")
    wrong = spec.FlatMask(right.allowed.clone())
    wrong.allowed[7 + 3] = False  # row 1 does not see the root
    outputs = [
        spec.verify_attention(query, key, *inputs[2:], case.call.layout, mask)[0]
        for mask in (right, wrong)
    ]
    assert torch.equal(*outputs)
    told = seen_by(Faulty(of_masks(hides(1, 3))), case)[1]
    assert told == "row 1 of request 0 does not see row 0"


def test_the_sets_of_wrong_rows_are_given_bit_by_bit() -> None:
    """What rows saw under masks and slots that were changed at random, another request's entries too."""
    case = case_of(Cell(9, 5, branching=True, padding=True, batch=2), torch.float32)
    call, generator = case.call, torch.Generator().manual_seed(0)
    qo, kv = call.layout.qo_indptr.tolist(), call.layout.kv_indptr.tolist()
    flip = torch.rand(qo[-1], kv[-1] + qo[-1], generator=generator) < 0.1
    sets = oracle._expected_sets(call)
    slots = call.layout.kv_indices.clone()
    slots[[0, kv[1]]] = slots[[kv[1], 0]]  # the first prefix entries of both requests change places
    mask = spec.tree_mask(call.tree, call.layout, "flat")
    wanted, at = torch.zeros_like(sets), call.layout.mask_indptr.tolist()
    for b in range(2):
        first, width = kv[b] + qo[b], kv[b + 1] - kv[b] + qo[b + 1] - qo[b]
        own = slice(first, first + width)
        wanted[qo[b] : qo[b + 1], own] = (sets ^ flip)[qo[b] : qo[b + 1], own]
        mask.allowed[at[b] : at[b + 1]] = wanted[qo[b] : qo[b + 1], own].flatten()
    other = kv[1] + qo[1]
    wanted[:, [0, other]] = wanted[:, [other, 0]]
    layout = replace(call.layout, kv_indices=slots)

    def verify_attention(
        q: Tensor, k: Tensor, v: Tensor, kp: Tensor, vp: Tensor, *_: object
    ) -> Tensor:
        return spec.verify_attention(q, k, v, kp, vp, layout, mask)[0]

    given = Backend.of(verify_attention)
    result = attend(given, case, lambda call, slots: oracle.inputs(case, call, slots))
    wrong = oracle.wrong_rows(case, result)
    found = oracle.seen_sets(case, result, wrong)
    rows = [qo[b] + row for b, own in wrong.items() for row in own]
    assert len(rows) > 8
    assert torch.equal(found[rows].bool(), wanted[rows])
    assert found.min() == 0
    nothing = oracle.seen_sets(case, torch.full_like(result, torch.nan), {1: [2]})
    assert nothing[qo[1] + 2].tolist() == [-1] * sets.shape[1]

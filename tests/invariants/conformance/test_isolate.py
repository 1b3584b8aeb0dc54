"""Isolation names the true factor of each fault of the catalogue, and says when it cannot tell."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from ddtree import spec
from ddtree.catalogue.backends import (
    BACKENDS,
    Faulty,
    FaultyBackend,
    FoundingBug,
    Pass,
    Spoil,
    configured,
    of_masks,
)
from ddtree.invariants.conformance import Backend, Refused
from ddtree.invariants.conformance.cells import (
    Cell,
    can_be,
    case_of,
    grid,
    max_q_len,
    num_nodes,
    prefix_lens,
    q_lens,
)
from ddtree.invariants.conformance.decide import Observation, decide
from ddtree.invariants.conformance.isolate import Isolation, Tried, isolate
from ddtree.invariants.conformance.suspects import SUSPECTS, Suspect, backend_of
from ddtree.spec.mask import read_mask

CALLS = 450
BESIDE = Backend.of(spec.verify_attention)


@pytest.mark.parametrize("faulty", BACKENDS, ids=lambda f: f.name)
def test_the_true_factor_is_named(faulty: FaultyBackend) -> None:
    """The rule is the fault's own; a fault that no factor decides is said to be none."""
    found = isolate(faulty.make(), faulty.name, seconds=300, calls=CALLS)
    rules = [rule.text for rule in found.decision.rules]
    assert rules == ([faulty.decides] if faulty.decides else []), found.sentence
    assert found.sentence.startswith("fails" if faulty.decides else "cannot tell")


def test_the_founding_bug_in_a_sentence() -> None:
    """Where it fails, what does not matter, and why."""
    found = isolate(FoundingBug(), seconds=300, calls=CALLS)
    assert found.sentence.startswith(
        "fails iff q_len != 8, eager and replay alike; branching, padding, prefix, batch position "
        "and page size do not matter: likely a width of 8 is used where q_len belongs"
    )
    assert found.sentence.endswith(
        "; where q_len differs within the call, that of a request before it counts too"
    )
    eights = [o for o in found.observations if o.factors["q_len"] == 8]
    behind = [any(q != 8 for q in o.within["q_len"][: o.factors["position"]]) for o in eights]
    assert [o.failed for o in eights] == behind
    assert {*behind} == {True, False}
    assert found.example is not None
    assert "of request 0" in found.example.what


def moved(place: int, by: int) -> Spoil:
    """The prefix of one place of a batch is read from some entries before its own."""

    def spoil(given: Pass) -> Pass:
        layout, kv_indices = given.layout, given.layout.kv_indices.clone()
        if _used(layout) > place:
            start, end = layout.kv_indptr[place : place + 2].tolist()
            if start >= by:
                kv_indices[start:end] = layout.kv_indices[start - by : end - by]
        return given._replace(layout=replace(layout, kv_indices=kv_indices))

    return spoil


def _used(layout: spec.VerifyLayout) -> int:
    return int((layout.qo_indptr.diff() > 0).sum())


def kept_prefix(keep: Callable[[int, int, list[int]], int]) -> Spoil:
    """Of each request's prefix the first entries are read, by its place, the batch and all lengths."""

    def spoil(given: Pass) -> Pass:
        layout, lens = given.layout, given.layout.kv_indptr.diff().tolist()
        allowed = given.mask.allowed.clone()
        for b in range(_used(layout)):
            start, end = layout.mask_indptr[b : b + 2].tolist()
            matrix = read_mask(given.mask, layout, b).clone()
            matrix[:, max(keep(b, _used(layout), lens), 0) : lens[b]] = False
            allowed[start:end] = matrix.flatten()
        return given._replace(mask=spec.FlatMask(allowed))

    return spoil


def wide_mask(width_of: Callable[[spec.VerifyLayout], int], *, segments: bool) -> Spoil:
    """The mask is read with one width for all requests, in its rows, and in where segments begin, or not."""

    def spoil(given: Pass) -> Pass:
        layout, allowed, first = given.layout, given.mask.allowed.clone(), 0
        width, lens = width_of(layout), layout.kv_indptr.diff().tolist()
        for b in range(_used(layout)):
            start, end = layout.mask_indptr[b : b + 2].tolist()
            row = torch.arange(int(layout.qo_indptr[b + 1] - layout.qo_indptr[b]))[:, None]
            column = torch.arange(lens[b] + row.numel())
            places = (first if segments else start) + row * (lens[b] + width) + column
            last = given.mask.allowed.numel() - 1
            allowed[start:end] = given.mask.allowed[places.flatten().clamp(max=last)]
            first += width * (lens[b] + width)
        return given._replace(mask=spec.FlatMask(allowed))

    return spoil


def last_of(place: int) -> Spoil:
    """The last entry of the prefix is left out at one place of the batch."""
    return kept_prefix(lambda b, _, lens: lens[b] - (b == place))


def first_width(layout: spec.VerifyLayout) -> int:
    return int(layout.qo_indptr[1])


SEPARATED: dict[str, tuple[Spoil, str, str]] = {
    "the second, one entry off": (
        moved(1, 1),
        "prefix_len > 0 and prefix_len of a request before it > 0 and the request is the second",
        "",
    ),
    "the third, one entry off": (
        moved(2, 1),
        "prefix_len > 0 and prefix_len of a request before it > 0 and the request is the third of three",
        "",
    ),
    "the second without its last entry": (
        last_of(1), "prefix_len > 0 and the request is the second", "",
    ),
    "the third without its last entry": (
        last_of(2), "prefix_len > 0 and the request is the third of three", "",
    ),
    "the last without its last entry": (
        kept_prefix(lambda b, batch, lens: lens[b] - (b == batch - 1)),
        "prefix_len > 0 and the request is the last", "",
    ),
    "the first one's prefix length": (
        kept_prefix(lambda _, __, lens: lens[0]),
        "prefix_len > that of the first request",
        "no more of a prefix is read than the first request's has",
    ),
    "the shortest prefix length": (
        kept_prefix(lambda _, batch, lens: min(lens[:batch])),
        "prefix_len > that of another request", "",
    ),
    "max_q_len": (
        wide_mask(lambda layout: layout.max_q_len, segments=True),
        "q_len < max_q_len",
        "the mask is read with `max_q_len` where q_len belongs, in its rows and in where segments begin",
    ),
    "max_q_len in rows": (
        wide_mask(lambda layout: layout.max_q_len, segments=False),
        "q_len < max_q_len",
        "the mask is read with `max_q_len` where q_len belongs, in its rows",
    ),
    "the first one's width": (
        wide_mask(first_width, segments=False), "q_len != that of the first request", "",
    ),
    "a width of 15": (
        wide_mask(lambda _: 15, segments=True),
        "q_len != 15", "likely a width of 15 is used where q_len belongs",
    ),
}  # fmt: skip
"""Faults that only factors crossed with one another tell apart: the rule, and the cause if one is known."""


@pytest.mark.parametrize("fault", SEPARATED)
def test_factors_that_go_together_elsewhere_are_told_apart(fault: str) -> None:
    """Places, prefixes, and widths within a call: the rule is the fault's own, and no cause is made up."""
    spoil, rule, cause = SEPARATED[fault]
    found = isolate(Faulty(spoil), fault, seconds=300, calls=300)
    assert [r.text for r in found.decision.rules] == [rule], found.sentence
    assert found.cause == cause
    if "prefix_len" in rule:
        assert "prefix" not in found.sentence.partition("; ")[2].partition(" not matter")[0]


def test_a_place_that_batches_of_two_do_not_tell_is_said_so() -> None:
    """Without batches of three the second is the same as any but the first."""

    class Two(Faulty):
        def verify_attention(self, *arguments: Any, **options: Any) -> torch.Tensor:
            if _used(arguments[5]) > 2:
                raise Refused("two at most")
            return super().verify_attention(*arguments, **options)

    blind = kept_prefix(lambda b, _, lens: 0 if b == 1 else lens[b])
    found = isolate(Two(blind), "it", seconds=300, calls=300)
    assert found.sentence.startswith(
        "cannot tell `prefix_len > 0 and the request is not the first` "
        "from `prefix_len > 0 and the request is the second`: "
    ), found.sentence


def test_the_time_holds_for_all_that_follows_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow backend: no call is begun past the time, neither of a sweep nor of a counter-check."""
    now, begun = [0.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def verify_attention(*arguments: Any) -> Any:
        begun.append(now[0])
        now[0] += 0.25
        return spec.verify_attention(*arguments)[0] * 0

    found = isolate(verify_attention, "it", seconds=10)
    assert max(begun) <= 10
    assert len(begun) >= 20
    assert found.sentence.startswith("fails always")


def test_few_calls_tell_nothing() -> None:
    """How few ran is said, and no rule is made of them."""
    right = isolate(spec.verify_attention, "it", calls=1)
    assert right.sentence == "nothing failed in 1 call: too few to tell"
    wrong = isolate(FoundingBug(), "it", calls=8)
    assert wrong.decision.rules == ()
    assert wrong.sentence.startswith(f"{sum(any(t.failed or ()) for t in wrong.tried)} of ")
    assert "calls failed: too few to tell where" in wrong.sentence


@pytest.mark.parametrize("suspect", SUSPECTS, ids=lambda s: s.what)
def test_each_known_wrong_computation_is_named(suspect: Suspect) -> None:
    """A backend that does just that is told so, and no other is taken for it."""
    wrong = Backend.of(backend_of(suspect, BESIDE))
    found = isolate(wrong, seconds=300, calls=100)
    assert found.cause == suspect.what, found.sentence


def test_what_is_nearly_a_known_wrong_computation_is_not_taken_for_it() -> None:
    """A transposed mask of which one row is right: the rule stands alone, without a cause."""

    def nearly(seen: torch.Tensor, prefix_len: int) -> torch.Tensor:
        own = seen[:, prefix_len:]
        seen[:-1, prefix_len:] = own.T[:-1].clone()
        return seen

    found = isolate(Faulty(of_masks(nearly)), "it", seconds=300, calls=120)
    assert [rule.text for rule in found.decision.rules] == ["always"]
    assert found.cause == ""
    assert ":" not in found.sentence


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(0)])
def test_a_backend_that_raises_always_is_told_so(error: BaseException) -> None:
    """The exception, whatever its kind, with its place in the backend's file, and nothing of masks."""

    def verify_attention(*_: Any) -> Any:
        raise error

    found = isolate(verify_attention, "it", seconds=300, calls=40)
    line = verify_attention.__code__.co_firstlineno + 1
    name = f"every call raises {type(error).__name__}: {error} ("
    assert found.cause.startswith(name)
    assert found.cause.endswith(f"test_isolate.py:{line})")


def test_a_captured_call_that_is_too_wide_is_told_too() -> None:
    """What raises past a width fails where the call of that width was captured before a narrow one."""

    def verify_attention(*arguments: Any) -> Any:
        width = int(arguments[5].qo_indptr.diff().max())
        if width > 20:
            raise RuntimeError(f"{width} is too wide")
        return spec.verify_attention(*arguments)

    found = isolate(verify_attention, "it", seconds=300, calls=CALLS)
    (rule,) = found.decision.rules
    assert rule.text == "q_len, or that of the call captured before, > 20", found.sentence
    assert found.cause.startswith("every such call raises RuntimeError (")


def test_an_exception_is_told_where_no_rule_fits() -> None:
    """It raises at calls of no order: the exception with its place is what all failures share."""
    calls = iter(range(10**6))
    known: dict[tuple[int, ...], bool] = {}

    def verify_attention(*arguments: Any) -> Any:
        own = (*arguments[5].qo_indptr.tolist(), *arguments[5].kv_indptr.tolist())
        if known.setdefault(own, next(calls) * 7919 % 97 < 40):
            raise RuntimeError("now and then")
        return spec.verify_attention(*arguments)

    found = isolate(verify_attention, "it", seconds=300, calls=200)
    assert found.decision.rules == ()
    line = verify_attention.__code__.co_firstlineno + 3
    assert found.sentence.startswith("cannot tell: no rule of up to three conditions fits")
    name = "every failing call raises RuntimeError: now and then ("
    assert f": {name}" in found.sentence
    assert found.sentence.endswith(f"test_isolate.py:{line})")


def test_messages_with_numbers_of_the_call_are_one_exception() -> None:
    """The kind and the place are told, no message of one call."""

    def verify_attention(*arguments: Any) -> Any:
        raise ValueError(f"{arguments[0].shape[0]} rows")

    found = isolate(verify_attention, "it", seconds=300, calls=40)
    assert found.cause.startswith("every call raises ValueError (")


def test_the_smallest_prefix_is_no_prefix_length_taken_for_all() -> None:
    """What fails wherever there is a prefix is told as that."""

    def blind(seen: torch.Tensor, prefix_len: int) -> torch.Tensor:
        seen[:, :prefix_len] &= torch.arange(prefix_len) % 2 == 1
        return seen

    found = isolate(Faulty(of_masks(blind)), "it", seconds=300, calls=100)
    assert [rule.text for rule in found.decision.rules] == ["prefix_len > 0"]
    assert found.cause == ""


def test_a_width_that_no_budget_of_the_grid_has_is_found() -> None:
    """All of the grid fails: the sweep of widths finds the one that does not."""
    found = isolate(FoundingBug(width=12), seconds=300, calls=CALLS)
    assert [rule.text for rule in found.decision.rules] == ["q_len != 12"], found.sentence


def test_nothing_fails() -> None:
    """The reference: no rule, and how much was tried."""
    found = isolate(spec.verify_attention, calls=60)
    assert found.sentence.startswith("nothing fails: ")
    assert found.example is None


def test_refusals_are_no_observations() -> None:
    """A backend that takes nothing leaves nothing to tell; one that takes chains alone hides branching."""

    def closed(*_: Any) -> Any:
        raise Refused("closed today")

    assert isolate(closed, "it", calls=60).sentence == (
        "cannot tell: it refused every call (closed today)"
    )


def planning(spoil: Callable[[spec.VerifyLayout], spec.VerifyLayout]) -> object:
    """A backend that plans, wrongly, and attends to nothing."""

    def plan_verify(*arguments: Any) -> Any:
        return spoil(spec.plan_verify(*arguments))

    return plan_verify


def moved_later(layout: spec.VerifyLayout) -> spec.VerifyLayout:
    """The positions of all requests but the first are off."""
    positions = layout.positions.clone()
    positions[int(layout.qo_indptr[1]) :] += 1
    return replace(layout, positions=positions)


def short_prefix(layout: spec.VerifyLayout) -> spec.VerifyLayout:
    """Prefixes of more than 16 entries are cut, and the requests behind them moved up."""
    kept = layout.kv_indptr.diff().clamp(max=16)
    own = layout.kv_indices.tensor_split(layout.kv_indptr[1:-1].long())
    slots = [s[:n] for s, n in zip(own, kept.tolist(), strict=True)]
    ends = torch.cat([kept.new_zeros(1), kept.cumsum(0)]).int()
    return replace(layout, kv_indptr=ends, kv_indices=torch.cat(slots))


PLANS: dict[str, Callable[[spec.VerifyLayout], spec.VerifyLayout]] = {
    "q_len != 8": lambda layout: configured(layout),
    "the request is not the first": moved_later,
    "prefix_len > 16": short_prefix,
    "always": lambda layout: replace(layout, qo_indptr=layout.qo_indptr[:-1]),
}


@pytest.mark.parametrize("rule", PLANS)
def test_a_plan_is_isolated_where_there_is_no_attention(rule: str) -> None:
    """Its layouts are compared request by request, called eagerly alone."""
    found = isolate(planning(PLANS[rule]), "it", seconds=300, calls=220)
    assert [r.text for r in found.decision.rules] == [rule], found.sentence
    assert found.function == "plan_verify"
    assert {t.cell.execution for t in found.tried} == {"eager"}
    if rule == "q_len != 8":
        assert found.sentence.endswith("likely a width of 8 is used where q_len belongs")
        assert found.example is not None
        assert found.example.what.startswith("mask_len is broken in request 0: expected")


def test_a_right_plan_and_one_that_is_none() -> None:
    """Nothing fails; what is returned is told."""
    right = isolate(spec.plan_verify, "it", calls=60)
    assert right.sentence.startswith("nothing fails: 43 calls")
    assert {t.cell.execution for t in right.tried} == {"eager"}
    none = isolate(planning(lambda _: None), "it", calls=60)  # type: ignore[arg-type,return-value]
    told = "plan_verify returned a NoneType, expected a VerifyLayout"
    assert none.sentence.endswith(f"in every call {told}")


def test_what_has_neither_is_refused() -> None:
    """The message says what there is."""
    with pytest.raises(
        spec.InputError, match="neither verify_attention nor plan_verify; it offers"
    ):
        isolate(spec.build_tree)


def observations(*rows: tuple[dict[str, Any], bool]) -> list[Observation]:
    plain = {
        "q_len": 9, "num_nodes": 9, "prefix_len": 5, "branching": False, "padding": False,
        "execution": "eager", "earlier": "none", "position": 0, "batch": 1, "page_size": 1,
        "prefixes": "equal", "widths": "equal",
    }  # fmt: skip
    each = [(plain | factors, failed) for factors, failed in rows]
    return [
        Observation(own | {"widest": own["q_len"], "max_q_len": own["q_len"]}, failed)
        for own, failed in each
    ]


def test_two_factors_that_always_go_together_are_both_told() -> None:
    """Branching and pages never apart: neither is blamed alone."""
    seen = observations(
        *[({"branching": True, "page_size": 4}, True), ({}, False)] * 12,
    )
    decision = decide(seen)
    assert [rule.text for rule in decision.rules] == ["the tree branches", "page_size > 1"]
    tried = tuple(
        Tried(Cell(branching=o.factors["branching"], page_size=o.factors["page_size"]), (o.failed,))
        for o in seen
    )
    assert Isolation("it", tried, decision).sentence == (
        "cannot tell `the tree branches` from `page_size > 1`: no call has one without the other"
    )


def test_no_rule_is_made_up() -> None:
    """Failures without order: the nearest rule is named as such."""
    cells = list(islice(grid(), 300))
    tried = tuple(Tried(cell, (i * 7919 % 97 < 40,) * cell.batch) for i, cell in enumerate(cells))
    flat = Isolation("it", tried, decide([]))
    decision = decide(flat.observations)
    assert decision.rules == ()
    assert Isolation("it", tried, decision).sentence.startswith("cannot tell: no rule of up to")


def test_accidents_are_told() -> None:
    """A wrong computation that is right once does not hide its rule."""
    wrong = [({"q_len": q}, True) for q in range(10, 60)]
    decision = decide(
        observations(
            *wrong, ({"q_len": 30}, False), *[({"q_len": q}, False) for q in range(2, 9)] * 9
        )
    )
    (rule,) = decision.rules
    assert (rule.text, rule.accidents, rule.covered) == ("q_len > 8", 1, 51)


@pytest.mark.parametrize("seed", range(3))
def test_cells_are_what_they_say(seed: int) -> None:
    """Each cell's call has its width, nodes, branching, prefix and pages, and satisfies the reference."""
    for cell in islice(grid(seed), 120):
        assert can_be(cell)
        case = case_of(cell, torch.float32)
        call = case.call
        widths, nodes = call.layout.qo_indptr.diff().tolist(), call.tree.num_nodes.tolist()
        assert (widths, nodes) == ([*q_lens(cell)], [*num_nodes(cell)])
        assert max(widths) == cell.q_len
        assert len(set(widths)) == (1 if cell.widths == "equal" else cell.batch)
        assert sorted(widths, reverse=cell.widths == "falling") == widths
        for b, (q_len, count) in enumerate(zip(widths, nodes, strict=True)):
            assert (count < q_len) == cell.padding
            real = call.tree.parents[b, 1:count].tolist()
            assert (len(set(real)) < len(real)) == cell.branching
        assert call.prefix_lens.tolist() == [*prefix_lens(cell)]
        if cell.execution != "buffers":
            seen = case.call.layout.max_q_len if case.earlier is None else 0
            assert seen in {0, max_q_len(cell)}
        assert (case.earlier is not None) == (cell.execution == "replay")

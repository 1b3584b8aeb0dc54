"""Conformance: the reference holds, every fault of the catalogue breaks, and failures shrink to a file."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree import spec
from ddtree.catalogue.backends import BACKENDS, FaultyBackend, FoundingBug
from ddtree.invariants import load, violations
from ddtree.invariants.conformance import Backend, Refused
from ddtree.invariants.conformance.attend import AttentionCase
from ddtree.invariants.conformance.failure import FAILED_AFTER_OTHERS, HELD_AGAIN
from ddtree.invariants.conformance.fuzz import again, conform, hold, ids
from ddtree.invariants.conformance.properties import PROPERTIES
from ddtree.invariants.conformance.suite import Conformance
from ddtree.invariants.strategies import AWKWARD_BUDGETS
from ddtree.peers.own import Impl, Reference
from tests.processes import PYTHONPATH

BY_ID = {prop.id: prop for prop in PROPERTIES}


class TestReference(Conformance):
    """The reference holds to itself: every property is offered."""

    backend = Reference
    examples = 12


class TestNothingToSkip:
    def test_the_reference_offers_all(self) -> None:
        """So none of the tests above is skipped."""
        assert not [prop.id for prop in PROPERTIES if prop.offered(Backend.of(Reference()))]


@pytest.mark.parametrize("faulty", BACKENDS, ids=lambda f: f.name)
def test_every_faulty_backend_breaks(faulty: FaultyBackend) -> None:
    """Its visible set comes out wrong, eager or replayed, in few requests."""
    prop = "visible set" if faulty.name.endswith("-eager") else "visible set, replay"
    result = hold(Backend.of(faulty.make()), BY_ID[prop], seconds=60)
    assert result.state == "broken"
    assert isinstance(result.case, AttentionCase)
    assert len(result.case.call.prefix_lens) <= 2, str(result.case)


def test_a_failure_shrinks_to_a_file_that_names_the_cause(tmp_path: Path) -> None:
    """The founding bug in metadata code: one request of one row, and a call that the checker refuses."""
    (result,) = conform(FoundingBug(), "engine", only="plan_verify, r", folder=tmp_path)
    assert (result.state, result.what) == ("not offered", "plan_verify takes no q_lens")
    result = hold(Backend.of(FoundingBug(), "engine"), BY_ID["plan_verify"], folder=tmp_path)
    assert str(result.case) == "q_len 1, num_nodes 1, prefix_len 0, page size 1"
    assert "mask_len is broken in request 0: expected 1, found 64" in result.what
    assert result.file == tmp_path / "engine-plan-verify.safetensors"
    first = violations(load(result.file))[0]
    assert (first.invariant, first.expected, first.found) == ("mask_len", 1, 64)
    assert "width 8" in first.hint


def mutant(function: str, spoil: Callable[[Any], Any]) -> object:
    """A backend of one function whose result is spoilt."""

    def call(*arguments: Any, **options: Any) -> Any:
        return spoil(getattr(spec, function)(*arguments, **options))

    call.__name__ = function
    return call


WRONG: dict[str, Callable[[Any], Any]] = {
    "build_tree": lambda t: replace(t, num_nodes=(t.num_nodes - 1).clamp(min=1)),
    "plan_verify": lambda x: replace(x, positions=x.positions + 1),
    "tree_mask": lambda m: spec.FlatMask(torch.ones_like(m.allowed)),
    "convert_mask": lambda m: spec.FlatMask(~m.allowed),
    "accept_greedy": lambda a: replace(a, bonus=a.bonus + 1),
    "accept_sampled": lambda a: replace(a, num_accepted=a.num_accepted + 1),
    "commit_kv": lambda c: replace(c, prefix_lens=c.prefix_lens + 1),
}


@pytest.mark.parametrize("function", WRONG)
def test_a_wrong_step_breaks(function: str, tmp_path: Path) -> None:
    """A mutant of each function but the attention is found, and its smallest case written."""
    result = hold(Backend.of(mutant(function, WRONG[function])), BY_ID[function], folder=tmp_path)
    assert result.state == "broken"
    assert "expected" in result.what
    assert result.file is not None
    assert load(result.file).known()


def test_commits_may_move_slots_or_contents() -> None:
    """A commit that moves the KV where the reference permutes slots is right; one that moves rows is not."""

    def moving(kv: spec.PagedKV, layout: spec.VerifyLayout, acceptance: spec.Acceptance) -> Any:
        return spec.commit_kv(replace(kv, page_size=2), layout, acceptance)

    def dense(kv: spec.PagedKV, layout: spec.VerifyLayout, acceptance: spec.Acceptance) -> Any:
        nodes = torch.arange(acceptance.nodes.shape[1]).expand_as(acceptance.nodes)
        kept = torch.where(acceptance.nodes < 0, acceptance.nodes, nodes.int())
        return spec.commit_kv(kv, layout, replace(acceptance, nodes=kept))

    states = []
    for commit in (moving, dense):
        commit.__name__ = "commit_kv"
        states.append(hold(Backend.of(commit), BY_ID["commit_kv"]).state)
    assert states == ["holds", "broken"]


@pytest.mark.parametrize(
    ("prop", "change"),
    [
        ("window", {"window": None}),
        ("softcap", {"softcap": None}),
        ("sinks", {"sinks": None}),
        ("values, float32", {"scale": 0.2}),
    ],
)
def test_an_ignored_option_breaks(prop: str, change: dict[str, Any]) -> None:
    """Each option has an effect that the reference's numbers show."""

    def verify_attention(*arguments: Any, page_size: int, **options: Any) -> Any:  # noqa: ARG001 # an engine's
        return spec.verify_attention(*arguments, **options | change)

    result = hold(Backend.of(verify_attention), BY_ID[prop])
    assert result.state == "broken"
    assert "is off by" in result.what


@pytest.mark.parametrize("tile", [64, 128])
def test_a_causal_stop_breaks_masks_that_are_no_trees(tile: int) -> None:
    """Keys behind a tile of rows are not read (sglang #39593): no tree shows it, a mask of ones does."""

    def verify_attention(
        query: Any, key: Any, value: Any, keys: Any, values: Any, *call: Any
    ) -> Any:
        layout, mask = call
        flat = spec.convert_mask(mask, layout, "flat").allowed.clone()
        for b, prefix_len in enumerate(layout.kv_indptr.diff().tolist()):
            start, end = layout.mask_indptr[b : b + 2].tolist()
            q_len = int(layout.qo_indptr[b + 1] - layout.qo_indptr[b])
            seen = flat[start:end].view(q_len, prefix_len + q_len)
            for first in range(0, q_len, tile):
                seen[first : first + tile, prefix_len + first + tile :] = False
        spoilt = spec.FlatMask(flat)
        return spec.verify_attention(query, key, value, keys, values, layout, spoilt)

    trees_alone = Backend.of(verify_attention)
    assert BY_ID["any mask"].offered(trees_alone).startswith("any_mask is not set")
    assert hold(trees_alone, BY_ID["values, float32"], examples=20).state == "holds"
    result = hold(replace(trees_alone, any_mask=True), BY_ID["any mask"], seconds=4)
    assert result.state == "broken"
    assert isinstance(result.case, AttentionCase)
    assert result.case.call.layout.max_q_len > tile
    assert "every entry visible" in str(result.case)


def test_positions_bound_at_capture_break_the_window() -> None:
    """A replay that windows by the positions of the call that was captured; eager it is right."""

    class Bound:
        def verify_attention(self, *arguments: Any, window: int | None = None) -> Any:
            return spec.verify_attention(*arguments, window=window)

        def capture(self, *arguments: Any, **options: Any) -> Callable[[], Any]:
            layout = replace(arguments[5], positions=arguments[5].positions.clone())
            held = (*arguments[:5], layout, arguments[6])
            return lambda: spec.verify_attention(*held, **options)

    result = hold(Backend.of(Bound), BY_ID["window"], examples=120, seconds=3)
    assert result.state == "broken"
    assert isinstance(result.case, AttentionCase)
    assert result.case.execution == "replay"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("wrong", [(13, 15), (37, 57)])
def test_a_fault_of_two_widths_is_found(seed: int, wrong: tuple[int, ...]) -> None:
    """Widths beside no word and no tile, within the examples of a run that nobody set up for them."""

    def tree_mask(tree: spec.DraftTree, *arguments: Any) -> Any:
        if tree.token_ids.shape[1] in wrong:
            raise ValueError("no tile")
        return spec.tree_mask(tree, *arguments)

    result = hold(Backend.of(tree_mask), BY_ID["tree_mask"], seed=seed, seconds=30)
    assert result.state == "broken"
    assert str(result.case) in [
        f"q_len {q_len}, num_nodes {q_len}, prefix_len 0, page size 1" for q_len in wrong
    ]


def test_nearly_every_width_is_drawn() -> None:
    """Of 67 widths 60 cases have 55 at least, those beside words and tiles among them."""
    drawn: list[int] = []

    def tree_mask(tree: spec.DraftTree, *arguments: Any) -> Any:
        drawn.append(tree.token_ids.shape[1])
        return spec.tree_mask(tree, *arguments)

    assert hold(Backend.of(tree_mask), BY_ID["tree_mask"], seconds=30).state == "holds"
    assert len(drawn) == 60 and len(set(drawn)) >= 55
    assert set(drawn) >= {budget + 1 for budget in AWKWARD_BUDGETS}


def test_what_fails_only_after_other_calls_is_told(tmp_path: Path) -> None:
    """A backend that keeps its first answer: each case by itself is right, in the run and from its file."""

    class Keeps:
        def __init__(self) -> None:
            self.first: Any = None

        def tree_mask(self, *arguments: Any) -> Any:
            self.first = spec.tree_mask(*arguments) if self.first is None else self.first
            return self.first

    result = hold(Backend.of(Keeps, "keeps"), BY_ID["tree_mask"], folder=tmp_path)
    assert (result.state, result.is_alone_right) == ("broken", True)
    assert result.file is not None
    told = again(Keeps, result.file)
    assert (told.state, told.note) == ("holds", FAILED_AFTER_OTHERS)


@pytest.mark.parametrize("made", [True, False])
def test_what_fails_by_itself_is_not_told_of_other_calls(made: bool, tmp_path: Path) -> None:
    """Made anew or not; a mended backend is told that its case was written for a failure."""

    class Wrong:
        def tree_mask(self, *arguments: Any) -> Any:
            return WRONG["tree_mask"](spec.tree_mask(*arguments))

    thing = Wrong if made else Wrong()
    result = hold(Backend.of(thing, "w"), BY_ID["tree_mask"], folder=tmp_path)
    assert (result.state, result.is_alone_right) == ("broken", False)
    assert result.file is not None
    assert (again(Wrong, result.file).state, again(Wrong, result.file).note) == ("broken", "")
    assert again(Reference, result.file).note == HELD_AGAIN


def test_refusals_are_counted_by_reason() -> None:
    """A backend that takes chains of one width alone is held to those."""

    def verify_attention(*arguments: Any) -> Any:
        layout = arguments[5]
        if len(set(layout.qo_indptr.diff().tolist())) > 1:
            raise Refused("one width only")
        return spec.verify_attention(*arguments)

    result = hold(Backend.of(verify_attention), BY_ID["visible set"], examples=40)
    assert result.state == "holds"
    assert result.refused["one width only"] > 0
    assert result.examples + sum(result.refused.values()) == 40


def test_what_refuses_everything_is_not_said_to_hold() -> None:
    """Its state is its own."""

    def verify_attention(*_: Any) -> Any:
        raise Refused("closed today")

    assert hold(Backend.of(verify_attention), BY_ID["visible set"]).state == "refused"


@pytest.mark.parametrize("error", [KeyError("q"), SystemExit(0)])
def test_an_exception_is_a_failure_with_its_message(error: BaseException) -> None:
    """A backend may raise anything; the smallest case, the message and the line are told."""

    def verify_attention(*_: Any) -> Any:
        raise error

    line = verify_attention.__code__.co_firstlineno + 1
    result = hold(Backend.of(verify_attention), BY_ID["visible set"])
    assert result.what.startswith(f"it raised {type(error).__name__}: {error} (")
    assert result.what.endswith(f"test_fuzz.py:{line})")
    assert "1 request, q_len 1" in str(result.case)


@pytest.mark.parametrize("returned", [None, torch.zeros(1), torch.zeros(0, 2, 64)])
def test_a_result_of_another_kind_is_a_failure(returned: object) -> None:
    """No tensor, other axes, too few rows: told as such."""
    result = hold(Backend.of(lambda *_: returned), BY_ID["visible set"])
    assert result.state == "broken"
    assert (
        result.what == "verify_attention returned a NoneType, expected (output, lse)"
        or "has shape" in result.what
    )


@pytest.mark.parametrize("examples", [3, 20])
def test_no_more_cases_than_asked_for(examples: int) -> None:
    """What shrinking tries is not counted as drawn."""
    asked: list[int] = []

    def verify_attention(*arguments: Any) -> Any:
        asked.append(len(arguments[0]))
        output, _ = spec.verify_attention(*arguments)
        return output + (len(output) > 5)

    result = hold(Backend.of(verify_attention), BY_ID["visible set"], examples=examples, seconds=60)
    assert result.state == "broken"
    assert not result.was_cut
    assert isinstance(result.case, AttentionCase)
    assert result.case.call.layout.qo_indptr.tolist() == [0, 6]
    assert result.examples == 1 + next(i for i, rows in enumerate(asked) if rows > 5) <= examples


def test_shrinking_that_was_cut_is_told() -> None:
    """A backend so slow that time is up before the smallest case is found."""
    failed = False

    def verify_attention(*arguments: Any) -> Any:
        nonlocal failed
        if failed:
            time.sleep(0.2)
        output, _ = spec.verify_attention(*arguments)
        failed |= len(output) > 5
        return output + (len(output) > 5)

    result = hold(Backend.of(verify_attention), BY_ID["visible set"], seconds=1)
    assert (result.state, result.was_cut) == ("broken", True)


@pytest.mark.parametrize("function", WRONG)
def test_a_step_that_returns_nothing_is_told_so(function: str) -> None:
    """What came and what was expected, not an exception of the comparison."""
    result = hold(Backend.of(mutant(function, lambda _: None)), BY_ID[function])
    assert re.match(f"{function} returned a NoneType, expected an? [A-Z]", result.what)


def test_backends_are_read_from_objects_classes_modules_and_functions() -> None:
    """What offers nothing is refused, with the names there are."""
    assert set(Backend.of(spec).functions) == set(Backend.of(Reference).functions)
    assert list(Backend.of(FoundingBug).functions) == ["plan_verify", "verify_attention"]
    assert list(Backend.of(spec.build_tree).functions) == ["build_tree"]
    assert list(Backend.of(lambda: 0).functions) == ["verify_attention"]
    with pytest.raises(spec.InputError, match="Path offers none of the functions build_tree"):
        Backend.of(Path)


def test_an_unknown_property_is_refused() -> None:
    """The message lists those there are."""
    with pytest.raises(spec.InputError, match=r"no property is called 'speed'.*visible set"):
        list(conform(spec, only="speed"))
    assert len(set(ids())) == len(PROPERTIES)


@pytest.mark.gpu
def test_our_kernels_hold_on_the_device() -> None:
    """What a property hands to a backend lies on the backend's device, for steps and attention alike."""
    for result in conform(Impl(), examples=3, seconds=90):
        assert result.state == "holds", result


INPUTS: dict[str, Callable[..., torch.Tensor]] = {
    "query": lambda query, *_: query,
    "key": lambda _q, key, *_: key,
    "value": lambda _q, _k, value, *_: value,
    "key_pool": lambda *a: a[3],
    "value_pool": lambda *a: a[4],
    "layout.kv_indices": lambda *a: a[5].kv_indices,
    "mask.allowed": lambda *a: a[6].allowed,
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("prop", ["values, float32", "visible set, replay"])
def test_a_verify_pass_that_writes_into_its_inputs_breaks(name: str, prop: str) -> None:
    """Each tensor is named; what is returned is right."""

    def verify_attention(*arguments: Any) -> Any:
        result = spec.verify_attention(*arguments)
        written = INPUTS[name](*arguments)
        written.copy_(~written if written.dtype is torch.bool else written + 1)
        return result

    result = hold(Backend.of(verify_attention), BY_ID[prop], examples=20)
    assert result.what.startswith(f"it wrote into its input {name}: ")


def test_a_step_that_writes_into_its_inputs_breaks() -> None:
    """The commit alone is given something to change, its KV."""

    def accept_greedy(tree: spec.DraftTree, *arguments: Any) -> Any:
        result = spec.accept_greedy(tree, *arguments)
        tree.depths.add_(1)
        return result

    result = hold(Backend.of(accept_greedy), BY_ID["accept_greedy"])
    assert result.what == "it wrote into its input: tree.depths[0, 0] is 1; it was 0"


def test_cases_that_were_cut_are_told() -> None:
    """A right backend so slow that time is up before all cases ran holds so far; a quick one had them all."""

    def verify_attention(*arguments: Any) -> Any:
        time.sleep(0.2)
        return spec.verify_attention(*arguments)

    slow = hold(Backend.of(verify_attention), BY_ID["visible set"], examples=9, seconds=0.5)
    assert (slow.state, slow.was_cut) == ("holds", True)
    assert slow.note == f"so far: {slow.examples} of 9 cases, time was up"
    quick = hold(Backend.of(spec.verify_attention), BY_ID["visible set"], examples=3, seconds=60)
    assert (quick.state, quick.was_cut, quick.examples, quick.note) == ("holds", False, 3, "")


SUITES = """
from ddtree import spec
from ddtree.invariants.conformance.suite import Conformance


class TestNone(Conformance):
    pass


class TestWrong(Conformance):
    class backend:
        mask_forms = ()

        def build_tree(self, *given):
            return spec.build_tree(*given)


class TestRight(Conformance):
    backend = spec.build_tree
    examples = 2

    def test_more(self):
        pass
"""


def test_a_suite_without_a_backend_says_so_once(tmp_path: Path) -> None:
    """And one whose backend says what is not allowed says that; neither shows our own lines."""
    file = tmp_path / "test_mine.py"
    file.write_text(SUITES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rN", str(file)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    )
    said = "TestNone has no backend to hold to the reference: write backend = YOURS in it"
    assert ended.stdout.count(said) == 1, ended.stdout
    wrong = "backend: mask_forms is (); allowed is a tuple of one or more of 'flat',"
    assert ended.stdout.count(wrong) == len(PROPERTIES)
    assert "suite.py" not in ended.stdout
    assert f"{1 + len(PROPERTIES)} failed, 2 passed, {len(PROPERTIES) - 1} skipped" in ended.stdout

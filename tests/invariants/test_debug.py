"""Debug mode: on it sees every public call, off it is not there."""

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Generator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree import impl, spec
from ddtree.invariants import InvariantViolation, debug, is_on
from ddtree.invariants.settings import level_of
from ddtree.spec import (
    Acceptance,
    Budget,
    Commit,
    DraftTree,
    FlatMask,
    Horizon,
    InputError,
    PagedKV,
    QLen,
    Sampling,
    VerifyBuffers,
    VerifyLayout,
    accept_greedy,
    build_tree,
    commit_kv,
    convert_mask,
    plan_verify,
    public,
    tree_mask,
    verify_attention,
    verify_round,
)
from tests.impl.cases import DEVICE, moved
from tests.invariants.calls import VOCAB, captured, last_children, tables, trees, verify


class TinyTarget:
    """One attention layer over a paged pool: enough of a model to run whole rounds."""

    def __init__(self, batch: int, context: int, page_size: int = 1) -> None:
        torch.manual_seed(0)
        self.embed = torch.randn(VOCAB, 1, 4)
        pools = torch.randn(2, batch * context, 1, 4)
        self.kv = PagedKV((pools[0],), (pools[1],), tables(batch, context), page_size)
        self.spoil = False

    @property
    def slot_table(self) -> Tensor:
        return self.kv.slot_table

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask) -> Tensor:
        rows = layout.positions.numel()
        tokens = torch.zeros(rows, dtype=torch.int64)
        widths = layout.qo_indptr.diff().tolist()
        parts = [tree.token_ids[b, : widths[b]] for b in range(tree.token_ids.shape[0])]
        tokens[: sum(map(len, parts))] = torch.cat(parts)
        states = self.embed[tokens]
        written = layout.out_cache_loc >= 0
        self.kv.keys[0][layout.out_cache_loc[written]] = states[written]
        self.kv.values[0][layout.out_cache_loc[written]] = states[written]
        if self.spoil:
            mask = FlatMask(~mask.allowed)
        out, _ = verify_attention(
            states, states, states, self.kv.keys[0], self.kv.values[0], layout, mask
        )
        return out[:, 0] @ self.embed[:, 0].T

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        return commit_kv(self.kv, layout, acceptance)


def round_inputs(batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return (
        torch.randn(batch, 4, VOCAB).log_softmax(-1),
        torch.arange(1, batch + 1),
        torch.tensor([5, 3][:batch]),
    )


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("sampling", [None, Sampling(0.7, None, None, 3)])
@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_whole_rounds_pass(
    page_size: int, sampling: Sampling | None, buffered: bool, ragged: bool
) -> None:
    """A right round runs in debug mode as it does without."""
    draft, roots, prefixes = round_inputs()

    def run() -> Tensor:
        buffers = VerifyBuffers(3, QLen(17), 6) if buffered else None
        target = TinyTarget(2, 22, page_size)
        made = verify_round(
            draft,
            roots,
            prefixes,
            target,
            Budget(12),
            ragged=ragged,
            sampling=sampling,
            buffers=buffers,
        )
        return made.token_ids

    assert torch.equal(run(), debug()(run)())


def test_fixed_buffers_may_pad_with_any_slot() -> None:
    """The pad slot is the buffers' own affair: calls that see the layout alone raise no alarm."""
    tree, buffers = captured(pad_slot=44)
    with debug():
        convert_mask(buffers.mask, buffers.layout, "bits")
        accept_greedy(tree, torch.zeros(68, dtype=torch.int64), buffers.layout, Horizon(2))


def test_a_call_inside_a_call_is_seen() -> None:
    """A fault that a target makes in the middle of a round is stopped at the attention call."""
    target = TinyTarget(2, 22)
    target.spoil = True
    draft, roots, prefixes = round_inputs()
    with (
        debug(),
        pytest.raises(InvariantViolation, match=r"every bit is inverted") as caught,
    ):
        verify_round(draft, roots, prefixes, target, Budget(12))
    assert "verify_attention" in caught.value.where


def test_a_coroutine_runs_in_debug_mode() -> None:
    """The mode is on from a decorated coroutine's first step to its last, and off after an error too."""

    @debug()
    async def steps(fail: bool) -> bool:
        """Read the mode after a pause."""
        await asyncio.sleep(0)
        if fail:
            raise ValueError
        return is_on()

    assert not is_on()
    assert asyncio.run(steps(False))
    assert not is_on()
    with pytest.raises(ValueError):
        asyncio.run(steps(True))
    assert not is_on()
    assert steps.__name__ == "steps"


def test_a_generator_runs_in_debug_mode() -> None:
    """The mode is on until a decorated generator ends or is closed; what is sent to it arrives."""

    @debug
    def echo() -> Generator[object, object, bool]:
        """Yield what was sent."""
        sent = yield is_on()
        yield sent
        return is_on()

    made = echo()
    assert not is_on()
    assert next(made) is True
    assert made.send("word") == "word"
    with pytest.raises(StopIteration) as ended:
        next(made)
    assert ended.value.value is True
    assert not is_on()
    closed = echo()
    next(closed)
    assert is_on()
    closed.close()
    assert not is_on()


def test_debug_decorates_without_parentheses() -> None:
    """A bare decorator does the same, for functions and coroutines."""

    @debug
    def plain(number: int) -> tuple[int, bool]:
        return number, is_on()

    @debug
    async def later() -> bool:
        return is_on()

    assert plain(3) == (3, True)
    assert asyncio.run(later())
    assert not is_on()


def test_one_debug_object_may_be_used_again_and_nested() -> None:
    """One object counts each of its uses."""
    mode = debug()
    with mode:
        with mode:
            assert is_on()
        assert is_on()
        assert mode(is_on)()
        assert is_on()
    assert not is_on()
    with mode:
        assert is_on()
    assert not is_on()


def test_what_cannot_be_decorated_is_refused() -> None:
    """An async generator, a class and a value are refused with what to write."""

    async def items() -> AsyncIterator[int]:
        yield 1

    for wrong in (items, TinyTarget, 5):
        with pytest.raises(TypeError, match=r"cannot decorate .* write `with ddtree\.debug\(\):`"):
            debug(wrong)  # type: ignore[type-var]


def test_wrong_shape_names_the_argument() -> None:
    """A wrongly shaped argument raises before the function runs, and is named."""
    tree = trees(2, 7)
    with debug(), pytest.raises(InvariantViolation) as caught:
        plan_verify(tree, torch.tensor([[5], [3]]), tables(2, 20))
    violation = caught.value
    assert violation.invariant == "types"
    assert violation.detail == "prefix_lens of plan_verify"
    assert violation.found == "i64[2,1](torch)"
    assert "Int[Tensor, 'B']" in str(violation.expected)


def device_of(package: ModuleType) -> str:
    """Where a package's functions are called: kernels on a GPU, if there is one."""
    return DEVICE if package is impl else "cpu"


@pytest.mark.parametrize("package", [spec, impl])
def test_a_wrong_size_is_told_with_the_right_one(package: ModuleType) -> None:
    """An axis that two tensors share: the violation says what size the first has."""
    draft, roots = torch.zeros(2, 3, 5), torch.zeros(1, dtype=torch.int64)
    with debug(), pytest.raises(InvariantViolation) as caught:
        package.build_tree(*moved((draft, roots), device_of(package)), Budget(2))
    violation = caught.value
    assert violation.detail == "root_token_ids of build_tree"
    assert violation.expected == "Int64[Tensor, 'B'] with B = 2"
    assert violation.found == "i64[1](torch)"
    tree, layout, _ = verify([5, 3], 7)
    cut = replace(tree, depths=tree.depths[:, :5])
    with debug(), pytest.raises(InvariantViolation) as caught:
        package.tree_mask(*moved((cut, layout), device_of(package)))
    violation = caught.value
    assert violation.expected == "Int32[Tensor, 'B Q'] with B = 2, Q = 8"
    assert violation.found == "torch.int32 [2, 5]"


@pytest.mark.parametrize("package", [spec, impl])
def test_fp8_pools_and_their_scales_are_typed(package: ModuleType) -> None:
    """Pools of fp8 are float tensors; a scale of another number of heads, or in double, is named."""
    _, layout, mask = verify([5, 3], 7)
    rows = torch.ones(16, 2, 64)
    pool = torch.ones(40, 2, 64).to(torch.float8_e4m3fn)
    device = device_of(package)
    given = moved((rows, rows, rows, pool, pool, layout, mask), device)
    attend = partial(package.verify_attention, *given)
    with debug():
        attend(key_scale=torch.ones(2, device=device), value_scale=torch.tensor(0.5, device=device))
        for wrong in (torch.ones(3), torch.ones(2, 1), torch.ones(2).double(), "1"):
            with pytest.raises(InvariantViolation) as caught:
                attend(value_scale=moved(wrong, device))
            assert caught.value.invariant == "types"
            assert caught.value.detail == "value_scale of verify_attention"


def test_wrong_dtype_names_the_argument() -> None:
    """A float where token ids belong is named."""
    tree, layout, _ = verify([5, 3], 7)
    with debug(), pytest.raises(InvariantViolation, match="target_ids of accept_greedy"):
        accept_greedy(tree, torch.zeros(16), layout, Horizon(7))


def test_wrong_kind_names_the_argument() -> None:
    """An object of another kind is named."""
    tree, layout, _ = verify([5, 3], 7)
    with debug(), pytest.raises(InvariantViolation, match="tree of tree_mask"):
        tree_mask(layout, layout)  # type: ignore[call-overload]
    assert tree is not None


FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("tree", {"parents": torch.zeros(2, 8, dtype=torch.int64)}, "tree.parents of tree_mask"),
    ("tree", {"depths": torch.zeros(2, 7, dtype=torch.int32)}, "tree.depths of tree_mask"),
    ("tree", {"num_nodes": torch.ones(3, dtype=torch.int32)}, "tree.num_nodes of tree_mask"),
    ("layout", {"kv_indptr": torch.zeros(4, dtype=torch.int32)}, "layout.kv_indptr of tree_mask"),
    ("layout", {"positions": torch.zeros(16)}, "layout.positions of tree_mask"),
    ("layout", {"max_q_len": "8"}, "layout.max_q_len of tree_mask"),
]


@pytest.mark.parametrize(
    ("argument", "fields", "named"), FIELDS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_fields_of_contract_objects_are_typed(
    argument: str, fields: dict[str, Any], named: str
) -> None:
    """Dtypes and shapes inside a contract object are held to its annotations, axes shared."""
    tree, layout, _ = verify([5, 3], 7)
    given = {"tree": tree, "layout": layout}
    given[argument] = replace(given[argument], **fields)  # type: ignore[type-var]
    with debug(), pytest.raises(InvariantViolation) as caught:
        tree_mask(given["tree"], given["layout"])  # type: ignore[call-overload]
    assert (caught.value.invariant, caught.value.detail) == ("types", named)


def test_results_are_checked() -> None:
    """A public function that returns a broken tree is stopped on return."""

    @public.public
    def broken(tree: DraftTree) -> DraftTree:
        return replace(tree, scores=tree.scores.flip(1))

    with debug(), pytest.raises(InvariantViolation, match=r"on return from .*broken") as caught:
        broken(trees(2, 7))
    assert caught.value.invariant == "root"


def test_results_are_typed() -> None:
    """A public function that returns another type than it says is stopped."""

    @public.public
    def broken() -> DraftTree:
        return None  # type: ignore[return-value]

    with debug(), pytest.raises(InvariantViolation, match=r"its result of .*broken"):
        broken()


def test_commit_is_compared_with_the_table_before() -> None:
    """The table that a commit permutes in place is compared with what it was."""

    @public.public
    def losing(kv: PagedKV, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        made = commit_kv(kv, layout, acceptance)
        kv.slot_table[0, 0] = kv.slot_table[0, 1]
        return made

    tree, layout, _ = verify([5, 3], 7)
    kv = PagedKV((torch.zeros(26, 1, 2),), (torch.zeros(26, 1, 2),), tables(2, 13))
    acceptance = accept_greedy(tree, last_children(tree), layout, Horizon(7))
    with debug(), pytest.raises(InvariantViolation, match="slot_permutation"):
        losing(kv, layout, acceptance)


def test_bad_input_is_still_bad_input() -> None:
    """What a function itself refuses is refused as without debug mode."""
    with debug(), pytest.raises(InputError):
        build_tree(torch.full((1, 2, 3), -1.0), torch.tensor([1]), Budget(-1))


@pytest.mark.parametrize("package", [spec, impl])
@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_a_draft_of_no_log_probs_is_named(package: ModuleType, value: float) -> None:
    """NaN and positive log-probs are named before a tree is built of them, here and by the kernels."""
    log_probs = torch.full((1, 2, 3), -1.0)
    log_probs[0, 1, 2] = value
    log_probs, roots = moved((log_probs, torch.tensor([1])), device_of(package))
    with debug(), pytest.raises(InvariantViolation, match="on entry to build_tree") as caught:
        package.build_tree(log_probs, roots, Budget(3))
    assert caught.value.invariant == "log_probs"
    assert str(caught.value.found) == str(value)


@pytest.mark.parametrize("package", [spec, impl])
def test_a_draft_of_logits_is_held_to_their_log_probs(package: ModuleType) -> None:
    """Trees of logits pass; NaN and +inf are named as the log-probs that they leave none of."""
    build, device = package.build_tree, device_of(package)
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(2)).bfloat16() * 4
    logits[1, 1, 4:] = -torch.inf
    logits, roots = moved((logits, torch.tensor([1, 2])), device)
    with debug():
        assert build(logits, roots, Budget(9), from_logits=True).num_nodes.min() > 1
    for wrong in (float("nan"), float("inf")):
        logits[1, 2, 7] = wrong
        with debug(), pytest.raises(InvariantViolation, match=r"\[1, 2, 7\]") as caught:
            build(logits, roots, Budget(9), from_logits=True)
        assert (caught.value.invariant, caught.value.found) == ("log_probs", "nan")


def test_every_form_of_mask_passes() -> None:
    """All masks of the reference pass, converted too, eager and captured."""
    with debug():
        tree, layout, mask = verify([5, 0, 3], 33, 4, horizon=4)
        buffers = VerifyBuffers(4, QLen(40), 7)
        buffers.fill(tree, layout, mask)
        for form in ("flat", "packed", "dense", "bits"):
            convert_mask(mask, layout, form)
            convert_mask(buffers.mask, buffers.layout, form)


def test_off_is_not_there() -> None:
    """Off, no observer is installed, and a wrong layout goes through unseen, as in an engine."""
    assert not is_on()
    assert public._observer is None
    tree, layout, _ = verify([5, 3], 16, 3)
    wrong = replace(layout, max_q_len=QLen(8))
    accept_greedy(tree, last_children(tree), wrong, Horizon(7))


def test_nested_uses() -> None:
    """The inner of two uses leaves debug mode on for the outer."""
    with debug():
        with debug():
            assert is_on()
        assert is_on()
        assert public._observer is not None
    assert not is_on()


def test_an_exception_turns_it_off() -> None:
    """However a use ends, it ends."""
    with pytest.raises(RuntimeError), debug():
        raise RuntimeError
    assert not is_on()
    assert public._observer is None


def test_decorator() -> None:
    """As a decorator it is on for each call and off between."""
    seen = debug()(is_on)
    assert seen() and seen()
    assert not is_on()


def test_the_first_observer_loads_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs leave observed calls to Python, which is arranged once, and not before it is needed."""
    monkeypatch.setattr(public, "_observed", public._observe)
    before = public.set_observer(None)
    assert public._observed is public._observe
    try:
        public.set_observer(lambda function, args, kwargs: function(*args, **kwargs))
        arranged = public._observed
        assert arranged is not public._observe
        public.set_observer(lambda function, args, kwargs: function(*args, **kwargs))
        assert public._observed is arranged
    finally:
        public.set_observer(before)


def test_another_observer_comes_back() -> None:
    """An observer that was there before is there after."""

    def other(function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    public.set_observer(other)
    try:
        with debug():
            assert public._observer is not other
        assert public._observer is other
    finally:
        public.set_observer(None)


def test_overlapping_threads() -> None:
    """A use that ends in one thread does not end another's."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with debug():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(10)
    with debug():
        pass
    assert is_on()
    leave.set()
    thread.join()
    assert not is_on()


@pytest.mark.parametrize(
    ("value", "on"),
    [
        (None, False),
        ("", False),
        ("0", False),
        ("off", False),
        ("1", True),
        ("on", True),
        (" ON ", True),
    ],
)
def test_variable(value: str | None, on: bool) -> None:
    """The variable understands 0, 1, on and off."""
    assert (level_of(value) is not None) is on


def test_variable_refuses_the_rest() -> None:
    """A value that is neither is an error that says what is understood."""
    with pytest.raises(InputError, match="DDTREE_DEBUG is 'yess'; understood are 1, on, true, yes"):
        level_of("yess")


@pytest.mark.parametrize(("value", "printed"), [("1", "True"), ("0", "False")])
def test_variable_at_import(value: str, printed: str) -> None:
    """The variable is read when the package is imported."""
    code = "import ddtree; from ddtree.invariants import is_on; print(is_on())"
    env = os.environ | {"DDTREE_DEBUG": value}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == printed


def test_a_violation_crosses_processes() -> None:
    """A violation that a worker raised arrives whole: message, fields and all."""
    tree, layout, mask = verify([5, 3], 16, 3)
    with debug(), pytest.raises(InvariantViolation) as caught:
        convert_mask(FlatMask(mask.allowed[:-1]), layout, "bits")
    arrived = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert str(arrived) == str(caught.value)
    assert arrived.hint == caught.value.hint
    assert tree is not None

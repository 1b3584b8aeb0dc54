"""The strategies that others import: what they draw is valid, varied, and shrinks to little."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as hs

from ddtree.invariants import Call, violations
from ddtree.invariants import strategies as st
from ddtree.spec.layout import plan_verify
from ddtree.spec.round import verify_round
from ddtree.spec.tree import build_tree


@given(st.verify_calls(), hs.data())
def test_the_checker_finds_every_drawn_call_right(call: st.VerifyCall, data: hs.DataObject) -> None:
    """Trees, layouts, masks in every form and acceptances hold every invariant."""
    mask, acceptance = data.draw(st.masks(call)), data.draw(st.acceptances(call.tree))
    whole = Call.of(
        call.tree,
        call.layout,
        mask,
        acceptance,
        prefix_lens=call.prefix_lens,
        q_lens=call.q_lens,
        slot_table=call.slots.table,
        kv_pool_size=call.slots.num_slots,
    )
    assert violations(whole) == []


@given(st.trees())
def test_best_first_trees_are_what_they_say(tree: Any) -> None:
    """Every tree is right by the checker."""
    assert violations(Call.of(tree)) == []


def is_best_first(tree: Any) -> bool:
    """Whether no child stands where a tree of independent depths would not have put it."""
    first: dict[int, int] = {}
    for token, depth in zip(tree.token_ids[0].tolist(), tree.depths[0].tolist(), strict=True):
        first.setdefault(depth, token)
    nodes = zip(tree.parents[0].tolist(), tree.token_ids[0].tolist(), strict=True)
    seen: set[int] = set()
    for parent, token in nodes:
        if parent >= 0 and parent not in seen:
            seen.add(parent)
            if token != first[int(tree.depths[0, parent]) + 1]:
                return False
    return True


WANTED: dict[str, tuple[hs.SearchStrategy[Any], Callable[[Any], bool]]] = {
    "prefix 0 beside another": (
        st.verify_calls(),
        lambda call: 0 in call.prefix_lens and len(set(call.prefix_lens.tolist())) > 1,
    ),
    "padding": (st.verify_calls(), lambda call: bool((call.tree.num_nodes < call.layout.max_q_len).any())),
    "ragged": (st.verify_calls(), lambda call: len(set(call.layout.qo_indptr.diff().tolist())) > 1),
    "pages out of order": (
        st.slot_tables(2, 9),
        lambda slots: slots.page_size == 4 and not torch.equal(slots.table, slots.table.sort().values),
    ),
    "a tie": (
        st.draft_log_probs(1, 2, 4, ["bf16"]),
        lambda draft: len(draft.unique()) < draft.numel() and len(draft.unique()) > 2,
    ),
    "no candidate at a depth": (
        st.draft_log_probs(1, 2, 4),
        lambda draft: bool((draft[0, 0] == -torch.inf).all()) and bool(draft[0, 1].isfinite().any()),
    ),
    "a tree that is not best-first": (st.arbitrary_trees(), lambda tree: not is_best_first(tree)),
    "33 nodes": (st.verify_calls(), lambda call: int(call.tree.num_nodes.max()) >= 33),
    "a whole path accepted": (
        st.round_cases(),
        lambda case: case.draft_log_probs.shape[1] >= 2
        and int(
            verify_round(
                case.draft_log_probs,
                case.root_token_ids,
                case.prefix_lens,
                case.target(),
                case.budget,
                case.topk,
            ).acceptance.num_accepted.min()
        )
        == case.draft_log_probs.shape[1] + 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("wanted", WANTED)
def test_the_awkward_is_drawn(wanted: str) -> None:
    """Each awkward kind of input is found within a thousand draws."""
    strategy, holds = WANTED[wanted]
    assert holds(find(strategy, holds, settings=settings(max_examples=1000, deadline=None)))


@pytest.mark.parametrize("budget", st.AWKWARD_BUDGETS)
def test_each_awkward_budget_is_drawn(budget: int) -> None:
    """Every budget beside a block, a word or a tile comes up."""
    assert find(st.budgets(), lambda drawn: drawn == budget) == budget


def test_a_failure_shrinks_to_little() -> None:
    """A call of two requests with some prefix shrinks to roots, one entry, pages in order."""
    call = find(
        st.verify_calls(),
        lambda call: len(call.prefix_lens) >= 2 and int(call.prefix_lens.max()) >= 1,
    )
    assert call.tree.num_nodes.tolist() == [1, 1]
    assert sorted(call.prefix_lens.tolist()) == [0, 1]
    assert call.slots.page_size == 1
    assert call.slots.table.flatten().tolist() == list(range(call.slots.table.numel()))


def test_an_unknown_kind_is_refused() -> None:
    """The message names the kinds that there are."""
    with pytest.raises(
        ValueError, match="no kind 'smooth'; it has grid, flat, spiky, bf16, sparse"
    ):
        find(st.draft_log_probs(1, 1, 2, ["smooth"]), lambda _: True)


def test_the_docstrings_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example for other projects passes with spec as the engine."""

    def run_round(case: st.RoundCase, target: Any) -> list[list[int]]:
        done = verify_round(
            case.draft_log_probs,
            case.root_token_ids,
            case.prefix_lens,
            target,
            case.budget,
            case.topk,
        )
        counts = done.acceptance.num_accepted.tolist()
        return [row[:n] for row, n in zip(done.token_ids.tolist(), counts, strict=True)]

    engine = ModuleType("my_engine")
    vars(engine).update(plan=plan_verify, run_round=run_round, build_tree=build_tree)
    monkeypatch.setitem(sys.modules, "my_engine", engine)
    assert st.__doc__ is not None
    lines = [line for line in st.__doc__.splitlines() if line.startswith("    ") or not line]
    example: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in lines), example)
    example["test_the_metadata"]()
    example["test_the_text"]()

"""The captured check: the same violations as the eager one, from the device, without a wait."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from ddtree import impl
from ddtree.impl import CapturedCheck, check
from ddtree.impl import check_kernels as kernels
from ddtree.impl.check_sites import SITES, as_markdown
from ddtree.invariants import TABLE, Call, InvariantViolation, debug, violations
from ddtree.invariants.streams import capturing
from ddtree.spec import Budget, Horizon, InputError, VerifyLayout
from tests.impl.bigram import BigramTarget
from tests.impl.cases import DEVICE
from tests.impl.replay_faults import calls
from tests.impl.replayed import differences, on_device, run, told
from tests.impl.test_round import CONTEXT, HORIZON, VOCAB, draft_that_agrees
from tests.invariants.calls import captured, put, whole_round

CALLS = calls()
LONG = os.environ.get("DDTREE_PROFILE") == "long"
QUICK = [name for i, name in enumerate(CALLS) if i % 11 == 5]
"""Enough to keep the machinery honest: kernels run slowly in the interpreter."""


@pytest.mark.parametrize("name", CALLS if LONG else QUICK)
def test_the_device_says_what_the_checker_says(name: str) -> None:
    """Clean calls stay silent; broken ones give the same violation, hint and all, and the same numbers."""
    assert differences(name, CALLS[name]) == []


def test_every_invariant_has_a_site_in_the_order_of_the_table() -> None:
    """Nothing of the table is left out, and the first violation is the table's first."""
    order = list(dict.fromkeys(site.invariant for site in SITES))
    assert order == [row.id for row in TABLE]


def test_the_page_says_what_the_device_evaluates() -> None:
    """The table of the README is the one that the sites make."""
    page = (Path(__file__).resolve().parents[2] / "invariants/README.md").read_text("utf-8")
    start = "<!-- device: made by ddtree.impl.check_sites.as_markdown() -->\n"
    assert page.partition(start)[2].partition("\n<!-- end of device -->")[0] == as_markdown()


def spoiled() -> Call:
    """A mask that begins one entry late."""
    return on_device(put(Call.of(*captured()), "custom_mask", 3, False))


def test_the_record_is_freed_by_a_poll() -> None:
    """Each poll gives the first violation since the last; the others are counted."""
    made = CapturedCheck(spoiled())
    run(made, 3)
    first = made.poll()
    assert first is not None and first.invariant == "prefix_visible"
    assert made.poll() is None
    run(made, 2)
    again = made.wait()
    assert again is not None and told(again) == told(first) and again.where != first.where
    checked, broken = made.counts
    assert checked == broken >= 5


def test_the_snapshot_is_of_the_call_that_broke() -> None:
    """What later calls leave in the buffers does not matter."""
    call = spoiled()
    assert call.custom_mask is not None
    made = CapturedCheck(call, where="the verify pass")
    run(made)
    call.custom_mask[3] = True
    run(made)
    violation = made.wait()
    assert violation is not None and violation.invariant == "prefix_visible"
    assert "the verify pass (call 1 of the captured check)" in violation.where


def test_without_a_snapshot_the_record_speaks() -> None:
    """Where the buffers hold another call by now, the device's own numbers are told."""
    call = spoiled()
    assert call.custom_mask is not None
    made = CapturedCheck(call, snapshot=False)
    made.launch()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    call.custom_mask[3] = True
    violation = made.wait()
    assert violation is not None
    assert (violation.invariant, violation.request) == ("prefix_visible", 0)
    assert (violation.expected, violation.found) == (1, 0)
    assert "as the device saw it" in violation.where


@pytest.mark.parametrize("made_in", [True, False])
def test_checks_are_made_launched_and_polled_in_inference_mode_and_out_of_it(made_in: bool) -> None:
    """A server captures in it; the thread that polls is not in it, and frees the record."""
    with torch.inference_mode(mode=made_in):
        call = replace(spoiled(), slot_table=torch.arange(40, device=DEVICE).view(2, 20)[:, :9])
        made = CapturedCheck(call)
        run(made)
    assert made._staged.keys() == {"slot_table"}
    first = made.poll()
    run(made)
    with torch.inference_mode(mode=not made_in):
        second = made.wait()
    assert first is not None and second is not None
    assert (told(first), first.where != second.where) == (told(second), True)


def test_host_memory_of_records_is_used_again_and_never_given_back() -> None:
    """Zeros at first, of no other check; PyTorch's allocator sees none of it freed."""
    gc.collect()
    made = [CapturedCheck(spoiled()) for _ in range(3)]
    places = {one._seen.data_ptr() for one in made}
    assert len(places) == 3
    run(made[0])
    assert made[0].counts[1]
    del made
    again = [CapturedCheck(spoiled()) for _ in range(3)]
    assert {one._seen.data_ptr() for one in again} == places
    assert all(one.counts == (0, 0) for one in again)


def test_a_launch_that_is_not_over_is_left_to_the_next_poll() -> None:
    """A broken call takes a doubtful one's place; until the host hears of it, its snapshot may be torn."""
    whole = replace(whole_round(), num_nodes=None, slot_table=None, positions=None)
    call = on_device(put(whole, "out_cache_loc", slice(13, 17), -1))
    assert call.kv_indices is not None
    made = CapturedCheck(call)
    run(made)
    heard = made._seen.clone()
    assert heard[kernels.SNAPSHOT.value] == 1
    call.kv_indices[2] = call.kv_indices[1]
    run(made)
    told_later = made._seen.clone()
    assert told_later[kernels.SNAPSHOT.value] == 2
    made._seen.copy_(heard)
    assert made.poll() is None and made._record[kernels.SNAPSHOT.value] == 2
    made._seen.copy_(told_later)
    violation = made.poll()
    assert violation is not None and violation.invariant == "kv_unique"


def test_checks_are_polled_while_other_threads_make_some() -> None:
    """The thread of ``debug(poll=...)`` looks at all there are, and captures go on meanwhile."""
    is_over = Event()

    def made() -> CapturedCheck:
        one = CapturedCheck.__new__(CapturedCheck)
        one.watched = False
        check._live[next(check._made)] = one
        return one

    held = [made() for _ in range(300)]

    def make() -> None:
        while not is_over.is_set():
            held[:] = [*held[-300:], made()]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as thread:
            making = thread.submit(make)
            try:
                for _ in range(2000):
                    assert list(check.InGraphs().poll()) == []
            finally:
                is_over.set()
            making.result()
    finally:
        sys.setswitchinterval(interval)


def test_a_thread_finds_all_and_each_call_raises_one() -> None:
    """``debug(poll=...)``: what has been found is not raised again in the thread, which looks further."""
    mode = import_module("ddtree.invariants.debug")
    made = [CapturedCheck(spoiled(), watched=True, where=f"pass {i}") for i in range(2)]
    with debug(poll=0.005):
        for one in made:
            run(one)
        latest = time.monotonic() + 20
        while len(mode._pending) < 2:
            assert time.monotonic() < latest, mode._pending
            time.sleep(0.005)
        for i in range(2):
            with pytest.raises(InvariantViolation, match="prefix_visible") as caught:
                mode.poll()
            assert caught.value.where.startswith(f"pass {i} ")
        mode.poll()


def test_cheap_reads_indptrs_and_lengths_alone() -> None:
    """The founding bug's indptr is seen; a mask's content is not looked at."""
    made = CapturedCheck(spoiled(), level="cheap")
    run(made)
    assert made.wait() is None and made.counts[1] == 0
    wrong = on_device(replace(whole_round(), mask_indptr=torch.tensor([0, 104, 192])))
    made = CapturedCheck(wrong, level="cheap")
    run(made)
    violation = made.wait()
    assert (
        violation is not None and violation.invariant == "mask_len" and "width 8" in violation.hint
    )


def test_trees_without_counts_are_left_to_the_host() -> None:
    """The device, which does not tell their padding, raises no alarm; a node's row unwritten is named."""
    whole = replace(whole_round(), num_nodes=None, slot_table=None, positions=None)
    padded = put(whole, "out_cache_loc", slice(13, 17), -1)
    made = CapturedCheck(on_device(padded))
    run(made)
    assert (made.wait(), made.counts[1]) == (None, 0) and made.doubts
    made = CapturedCheck(on_device(put(padded, "out_cache_loc", 12, -1)))
    run(made)
    violation = made.wait()
    assert violation is not None and violation.invariant == "out_cache_loc"


@pytest.mark.parametrize("names", [("parents",), ("depths",), ("depths", "num_nodes")])
def test_masks_beside_parts_of_trees_are_judged_as_on_the_host(names: tuple[str, ...]) -> None:
    """A causal mask is caught by parents or depths alone; trees that are not counted leave it to the host."""
    whole = whole_round()
    known = {n: getattr(whole, n) for n in (*names, "qo_indptr", "kv_indptr", "positions")}
    ends = [0, *(17 * (p + 17) for p in (5, 3))]
    causal = torch.cat([torch.ones(17, p + 17).tril(p).bool().flatten() for p in (5, 3)])
    assert whole.custom_mask is not None and whole.custom_mask.numel() == sum(ends)
    is_counted = "num_nodes" in names
    for mask in (whole.custom_mask, causal):
        call = Call(custom_mask=mask, **known)
        made, expected = CapturedCheck(on_device(call)), next(iter(violations(call)), None)
        assert (expected is None) == (mask is not causal)
        run(made)
        assert told(made.wait()) == told(expected)
        assert bool(made.counts[1]) == (mask is causal and is_counted)
        assert bool(made.doubts) != is_counted
        if is_counted:
            assert differences(str(names), partial(replace, call)) == []


def test_a_strided_field_is_read_as_it_is_at_each_launch() -> None:
    """A slot table that is a part of a larger one is followed."""
    call = on_device(whole_round())
    assert call.slot_table is not None
    wide = torch.zeros(2, 40, dtype=torch.int64, device=DEVICE)
    part = wide[:, : call.slot_table.shape[1]]
    part.copy_(call.slot_table)
    made = CapturedCheck(replace(call, slot_table=part))
    run(made)
    assert made.wait() is None
    part[1, 0] += 1
    run(made)
    violation = made.wait()
    assert violation is not None and violation.invariant == "slot_table"


def test_what_cannot_be_checked_is_refused() -> None:
    """No tensor, or a level that there is not, is an error."""
    with pytest.raises(InputError, match="no tensor"):
        CapturedCheck(Call(num_rows=4))
    with pytest.raises(InputError, match="level is 'shadow'"):
        CapturedCheck(spoiled(), level="shadow")  # type: ignore[arg-type]


# debug mode while a graph is captured


class Spoiling(BigramTarget):
    """A target that writes into the layout it is given, as an engine's bug might."""

    def __init__(self, spoil: Callable[[VerifyLayout], object], *args: Any) -> None:
        super().__init__(*args)
        self.spoil = spoil

    def commit(self, layout: VerifyLayout, acceptance: Any) -> Any:
        """Spoil the layout, then commit."""
        self.spoil(layout)
        return super().commit(layout, acceptance)


def round_of(target: BigramTarget, roots: torch.Tensor, prefix_lens: torch.Tensor) -> None:
    """One round of four requests, the last of them unused."""
    draft = draft_that_agrees(target.table.cpu(), roots.cpu(), torch.Generator().manual_seed(1)).to(
        DEVICE
    )
    impl.verify_round(draft, roots, prefix_lens, target, Budget(9))


def inputs(
    spoil: Callable[[VerifyLayout], object],
) -> tuple[BigramTarget, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(VOCAB, VOCAB, generator=generator).to(DEVICE)
    slots = torch.randperm(4 * CONTEXT, generator=generator).view(4, CONTEXT).to(DEVICE)
    target = Spoiling(spoil, table, slots, 4 * CONTEXT, 1, impl.commit_kv)
    roots = torch.randint(0, VOCAB, (4,), generator=generator).to(DEVICE)
    return target, roots, torch.tensor([5, 0, 30, -1], dtype=torch.int32, device=DEVICE)


@pytest.fixture
def as_if_captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CapturedCheck]]:
    """Debug mode takes every call for one under capture: what a graph would hold is launched at once."""
    kept: list[CapturedCheck] = []
    monkeypatch.setattr(check.InGraphs, "is_capturing", lambda _: True)
    monkeypatch.setattr(check, "relaxed", nullcontext)
    monkeypatch.setattr(check, "_capture_id", lambda: 1)
    with check.keeping(kept):
        yield kept
    for made in kept:
        made.watched = False


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU captures in earnest, below")
def test_each_public_call_of_a_capture_gets_its_check(as_if_captured: list[CapturedCheck]) -> None:
    """A clean round is silent, unused request and all; nothing is checked twice."""
    with debug():
        round_of(*inputs(lambda _: None))
    assert [made.where.split(",")[0] for made in as_if_captured] == [
        "on entry to verify_round", "on return from build_tree", "on entry to plan_verify",
        "on return from plan_verify", "on return from tree_mask", "on entry to accept_greedy",
        "on return from accept_greedy", "on entry to commit_kv", "on return from commit_kv",
        "on return from verify_round",
    ]  # fmt: skip
    assert all(made.counts == (1, 0) and made.poll() is None for made in as_if_captured)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU captures in earnest, below")
def test_a_fault_of_a_capture_surfaces_at_the_next_call(
    as_if_captured: list[CapturedCheck], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next public call outside the capture raises what the graph's check found, and says where."""
    target, roots, prefix_lens = inputs(lambda layout: layout.out_cache_loc[3:5].fill_(7))
    with debug():
        round_of(target, roots, prefix_lens)
        monkeypatch.setattr(check.InGraphs, "is_capturing", lambda _: False)
        with pytest.raises(InvariantViolation, match="write_unique") as caught:
            impl.build_tree(torch.zeros(1, 2, 3, device=DEVICE), roots[:1], Budget(2))
    assert "on entry to commit_kv, under graph replay" in caught.value.where
    assert as_if_captured


@pytest.mark.gpu
def test_a_captured_round_checks_itself() -> None:
    """Replays of a round that was captured in debug mode are checked; a slot table that breaks is named."""
    target, roots, prefix_lens = inputs(lambda _: None)
    with debug():
        graph = impl.RoundGraph(target, 4, Horizon(HORIZON), VOCAB, Budget(9))
        assert len(graph.checks) == 10
        for seed in range(20):
            draft = draft_that_agrees(
                target.table.cpu(), roots.cpu(), torch.Generator().manual_seed(seed)
            ).to(DEVICE)
            graph.replay(draft[:3], roots[:3], prefix_lens[:3])
        torch.cuda.synchronize()
        assert all(made.wait() is None and made.counts[1] == 0 for made in graph.checks)
        target.slot_table[1, 3] = target.slot_table[1, 4]
        graph.replay(draft[:3], roots[:3], torch.tensor([5, 9, 30], device=DEVICE))
        torch.cuda.synchronize()
        with pytest.raises(InvariantViolation, match="kv_unique is broken in request 1"):
            graph.replay(draft[:3], roots[:3], prefix_lens[:3])


def draw_the_capture_s(ahead: int) -> None:
    """Draw streams of PyTorch's pool until so many are left before the one that graphs are captured on."""
    captures_on = torch.cuda.graph.default_capture_stream  # noqa: TID251 # captures nothing
    assert captures_on is not None
    while torch.cuda.Stream() != captures_on:  # noqa: TID251 # drawn alone
        pass
    for _ in range(31 - ahead):
        torch.cuda.Stream()  # noqa: TID251


@pytest.mark.gpu
def test_a_capture_checks_itself_wherever_the_pool_of_streams_stands() -> None:
    """No check is made on the captured stream, which PyTorch hands out with every 32nd one that is drawn."""
    target, roots, prefix_lens = inputs(lambda _: None)
    draft = draft_that_agrees(target.table.cpu(), roots.cpu(), torch.Generator().manual_seed(1)).to(
        DEVICE
    )
    with debug():
        impl.RoundGraph(target, 4, Horizon(HORIZON), VOCAB, Budget(9))
        for ahead in range(32):
            draw_the_capture_s(ahead)
            graph = impl.RoundGraph(target, 4, Horizon(HORIZON), VOCAB, Budget(9))
            graph.replay(draft[:3], roots[:3], prefix_lens[:3])
            assert [made.wait() for made in graph.checks] == [None] * 10
            assert {made.counts for made in graph.checks} == {(1, 0)}


@pytest.mark.gpu
@pytest.mark.parametrize("is_another", [True, False])
def test_a_violation_is_fetched_while_a_graph_is_captured(is_another: bool) -> None:
    """By another thread or by the one that captures: the capture goes on, and the graph has nothing of it."""
    made = CapturedCheck(spoiled())
    run(made)
    held = torch.zeros(1, device=DEVICE)
    with ThreadPoolExecutor(1) as thread, capturing() as graph:
        held.add_(1)
        polled = thread.submit(made.poll).result() if is_another else made.poll()
    assert polled is not None and polled.invariant == "prefix_visible"
    assert made.poll() is None
    made.launch()  # the record is free
    torch.cuda.synchronize()
    graph.replay()
    again = made.wait()
    assert again is not None and again.where != polled.where
    assert held.item() == 1


@pytest.mark.gpu
def test_a_graph_is_dropped_when_its_last_replay_is_over() -> None:
    """Its checks write into memory that would be another check's before."""
    target, roots, prefix_lens = inputs(lambda _: None)
    draft = torch.zeros(3, HORIZON, VOCAB, device=DEVICE).log_softmax(-1)
    with debug():
        graph = impl.RoundGraph(target, 4, Horizon(HORIZON), VOCAB, Budget(9))
        before = torch.cuda.Event()
        torch.cuda._sleep(10**9)  # half a second
        before.record()
        graph.replay(draft, roots[:3], prefix_lens[:3])
        assert not before.query()
        del graph
        gc.collect()
        assert before.query()


TRAP = """
import torch
from tests.impl.replayed import run
from tests.impl.test_check import spoiled
from ddtree.impl import CapturedCheck
run(CapturedCheck(spoiled(), trap=True))
"""


@pytest.mark.gpu
def test_a_trap_ends_the_process() -> None:
    """On request the first violation stops the device."""
    done = subprocess.run([sys.executable, "-c", TRAP], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "launch failure" in done.stderr or "CUDA error" in done.stderr, done.stderr[-500:]

"""Debug mode in a server: levels, actions, sampling, the environment, counts, threads and forks."""

import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.invariants import Call, InvariantViolation, debug, load, report
from ddtree.invariants.actions import counts
from ddtree.invariants.checks import CHEAP
from ddtree.invariants.debug import current
from ddtree.invariants.recorded import read
from ddtree.invariants.settings import Settings, settings
from ddtree.invariants.shadow import Shadow
from ddtree.spec import (
    DraftTree,
    FlatMask,
    Horizon,
    InputError,
    PrefixLen,
    QLen,
    VerifyLayout,
    accept_greedy,
    convert_mask,
    plan_verify,
    tree_mask,
)
from ddtree.spec.index import mask_len
from tests.invariants.calls import last_children, tables, trees, verify


def wrong_indptr(layout: VerifyLayout) -> VerifyLayout:
    """The founding bug's mask_indptr: width 8, q_len 17."""
    lens = [mask_len(PrefixLen(prefix), QLen(8)) for prefix in (5, 3)]
    return replace(layout, mask_indptr=torch.tensor([0, *lens]).cumsum(0))


def hidden(mask: FlatMask) -> FlatMask:
    """A mask that hides one prefix entry."""
    allowed = mask.allowed.clone()
    allowed[2] = False
    return FlatMask(allowed)


def test_cheap_looks_at_indptrs_and_not_at_masks() -> None:
    """A wrong indptr is stopped, with the whole table's hint; a wrong mask passes."""
    _, layout, mask = verify([5, 3], 16, 3, horizon=2)
    with debug(level="cheap"):
        convert_mask(hidden(mask), layout, "packed")
        with pytest.raises(InvariantViolation, match="mask_len is broken in request 0") as caught:
            convert_mask(mask, wrong_indptr(layout), "bits")
    assert "width 8" in caught.value.hint
    with debug(level="full"), pytest.raises(InvariantViolation, match="prefix_visible"):
        convert_mask(hidden(mask), layout, "packed")


def test_cheap_says_what_full_says() -> None:
    """Where cheap finds something, it is the violation of the whole table."""
    from ddtree.invariants import violations
    from tests.impl.replay_faults import calls

    seen = 0
    for name, make in calls().items():
        call = make()
        broken = violations(call)
        if told := _cheaply(call):
            seen += 1
            assert told == str(broken[0]), name
        else:
            # what it lets pass is none of its own, if the widths are as claimed
            assert not broken or broken[0].invariant not in CHEAP or _is_weighed(call), name
    assert seen > 50


def _cheaply(call: Call) -> str:
    """What the cheap check says; nothing if nothing is broken."""
    from ddtree.invariants.checks import check_cheaply

    try:
        check_cheaply(call=call)
    except InvariantViolation as violation:
        return str(violation)
    return ""


def _is_weighed(call: Call) -> bool:
    from ddtree.invariants.sizes import claimed_sizes, sizes_of

    return sizes_of(call) != claimed_sizes(call)


@pytest.mark.parametrize("action", ["log", "count"])
def test_other_actions_let_the_call_go_on(action: str, caplog: pytest.LogCaptureFixture) -> None:
    """The function runs and returns; the violation is counted, and logged if asked for."""
    _, layout, mask = verify([5, 3], 16, 3, horizon=2)
    key = ("prefix_visible", "convert_mask")
    before = counts.read("violations").get(key, 0)
    with caplog.at_level(logging.ERROR, "ddtree.debug"), debug(action=action):
        made = convert_mask(hidden(mask), layout, "packed")
    assert made.packed.numel() == 47 + 43
    assert counts.read("violations")[key] == before + 1
    assert ("prefix_visible is broken in request 0" in caplog.text) == (action == "log")


def test_a_wrong_type_is_logged_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A float where token ids belong is told; the function then does what it does without debug mode."""
    tree, layout, _ = verify([5, 3], 7)
    with caplog.at_level(logging.ERROR, "ddtree.debug"), debug(action="log"):
        with pytest.raises(InputError, match="target_ids"):
            accept_greedy(tree, torch.zeros(16), layout, Horizon(7))
        wrong = replace(tree, depths=tree.depths.long())
        tree_mask(wrong, layout)
    assert "target_ids of accept_greedy" in caplog.text
    assert "tree.depths of tree_mask" in caplog.text


def test_a_result_of_a_wrong_type_is_returned_once(caplog: pytest.LogCaptureFixture) -> None:
    """What ran is not run again."""
    from ddtree.spec import public

    runs = []

    @public.public
    def broken() -> DraftTree:
        runs.append(1)
        return None  # type: ignore[return-value]

    with caplog.at_level(logging.ERROR, "ddtree.debug"), debug(action="log"):
        assert broken() is None
    assert runs == [1]
    assert "its result of" in caplog.text


def test_a_type_error_inside_a_function_is_its_own() -> None:
    """What a function's own jaxtyped callee refuses does not run it twice under any action."""
    from ddtree.spec import public

    runs = []

    @public.public
    def failing() -> None:
        runs.append(1)
        plan_verify(trees(2, 7), torch.tensor([[5], [3]]), tables(2, 20))

    with debug(action="count"), pytest.raises(InputError):
        failing()
    assert runs == [1]


def test_sampling_looks_at_every_so_many_calls_of_each_function() -> None:
    """A quarter of each function's calls, evenly spread, the first among them."""
    tree, layout, mask = verify([5, 3], 7)
    before = counts.read("calls")
    with debug(sample=0.25):
        for _ in range(40):
            convert_mask(mask, layout, "packed")
            accept_greedy(tree, last_children(tree), layout, Horizon(7))
    after = counts.read("calls")
    for name in ("convert_mask", "accept_greedy"):
        key = (name, "full")
        assert after[key] - before.get(key, 0) == 10
    with debug(sample=0):
        convert_mask(hidden(mask), layout, "packed")


def test_a_dump_holds_the_call_and_the_function(tmp_path: Path) -> None:
    """The file reads as a captured call, with the same violation, and as a function with its arguments."""
    _, layout, mask = verify([5, 3], 16, 3, horizon=2)
    spoiled = hidden(mask)
    with debug(action="dump,raise", dump_dir=tmp_path), pytest.raises(InvariantViolation) as caught:
        convert_mask(spoiled, layout, "packed")
    (path,) = tmp_path.iterdir()
    assert caught.value.dump == str(path) and str(path) in str(caught.value)
    told = report(load(path)).broken
    assert [v.invariant for v in told] == ["prefix_visible"]
    assert (told[0].request, told[0].detail) == (caught.value.request, caught.value.detail)
    recorded = read(path)
    assert recorded.function == "convert_mask"
    assert recorded.arguments.keys() == {"mask", "layout", "form"}
    assert torch.equal(recorded.arguments["mask"].allowed, spoiled.allowed)
    assert recorded.arguments["form"] == "packed"
    assert recorded.arguments["layout"].max_q_len == 17


def test_counts_show_themselves() -> None:
    """Printed, the counts say what was counted, by name and labels."""
    with debug():
        _, layout, mask = verify([5], 4)
        convert_mask(mask, layout, "packed")
    assert "'calls': {" in repr(counts) and "('convert_mask', 'full'): " in repr(counts)


def test_a_shadow_of_no_request_reads_nothing() -> None:
    """The mask of a layout without requests is cut to nothing, whatever lies behind."""
    ends, empty = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    layout = VerifyLayout(ends, ends, empty, ends, QLen(1), empty, empty)
    mask = FlatMask(torch.ones(5, dtype=torch.bool))
    given = {"mask": mask, "layout": layout, "form": "flat"}
    assert Shadow("convert_mask", given).given["mask"].allowed.numel() == 0


def test_dumps_end_at_their_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is broken at every call does not fill its disk; a folder that fails does not stop it."""
    _, layout, mask = verify([5, 3], 7)
    already = counts.read("dumps").get(("convert_mask",), 0)
    from ddtree.invariants import actions

    next_number = next(actions._numbers)
    limit = next_number + 2
    with caplog.at_level(logging.ERROR, "ddtree.debug"):
        with debug(action="dump", dump_dir=tmp_path, max_dumps=limit):
            for _ in range(5):
                convert_mask(hidden(mask), layout, "packed")
        assert len(list(tmp_path.iterdir())) == 2
        assert counts.read("dumps")[("convert_mask",)] == already + 2
        assert f"not written: {limit} calls have been" in caplog.text
        gone = tmp_path / "gone"
        gone.mkdir()
        with debug(action="dump", dump_dir=gone, max_dumps=10**6):
            gone.rmdir()
            convert_mask(hidden(mask), layout, "packed")
    assert "there is no folder" in caplog.text


ENVIRONMENTS: list[tuple[dict[str, str], Settings]] = [
    ({}, Settings()),
    ({"DDTREE_DEBUG": "1"}, Settings()),
    ({"DDTREE_DEBUG": "Cheap"}, Settings(level="cheap")),
    (
        {"DDTREE_DEBUG": "shadow", "DDTREE_DEBUG_SAMPLE": "0.01", "DDTREE_DEBUG_ACTION": "log, count"},
        Settings(level="shadow", sample=0.01, actions=("log", "count")),
    ),
    (
        {"DDTREE_DEBUG_DUMP_DIR": "calls", "DDTREE_DEBUG_POLL": "0.5", "DDTREE_DEBUG_TRAP": "1",
         "DDTREE_DEBUG_MAX_DUMPS": "3"},
        Settings(dump_dir=Path("calls"), poll=0.5, trap=True, max_dumps=3),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "expected"), ENVIRONMENTS)
def test_settings_come_from_the_environment(
    environment: dict[str, str], expected: Settings
) -> None:
    """What a call does not say, the variables say."""
    assert settings(environment=environment) == expected
    assert settings(level="full", sample=0.5, environment=environment).sample == 0.5


WRONG: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"level": "fast"}, {}, "level is 'fast'; known are cheap, full, shadow"),
    ({"action": "raise,shout"}, {}, "action is 'shout'; known are raise, log, count, dump"),
    ({"sample": 2}, {}, "sample is 2.0; it is a fraction"),
    ({"poll": 0}, {}, "poll is 0"),
    ({"trap": "x"}, {}, "trap is 'x'; expected True or False"),
    ({"max_dumps": -1}, {}, "max_dumps is -1.0; a whole number of files, from 0"),
    ({}, {"DDTREE_DEBUG_MAX_DUMPS": "-3"}, "max_dumps is -3.0; a whole number of files"),
    ({}, {"DDTREE_DEBUG_MAX_DUMPS": "2.5"}, "max_dumps is 2.5; a whole number of files"),
    ({"action": "dump", "dump_dir": "/nowhere"}, {}, "there is no folder /nowhere"),
    (
        {},
        {"DDTREE_DEBUG": "maybe"},
        "DDTREE_DEBUG is 'maybe'; understood are 1, on, true, yes, cheap",
    ),
    ({}, {"DDTREE_DEBUG_ACTION": "cry"}, "DDTREE_DEBUG_ACTION is 'cry'"),
    ({}, {"DDTREE_DEBUG_SAMPLE": "some"}, "DDTREE_DEBUG_SAMPLE is 'some'; expected a number"),
    ({}, {"DDTREE_DEBUG_TRAP": "perhaps"}, "DDTREE_DEBUG_TRAP is 'perhaps'"),
]


@pytest.mark.parametrize(("chosen", "environment", "message"), WRONG)
def test_settings_that_there_are_not_are_refused(
    chosen: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    """The message names the argument or the variable and what is known."""
    with pytest.raises(InputError) as caught:
        settings(**chosen, environment=environment)
    assert message in str(caught.value)


def test_of_nested_uses_the_newest_counts() -> None:
    """An inner use's settings hold until it ends, whichever ends first."""
    outer, inner = debug(level="cheap"), debug(level="full", action="log")
    with outer:
        chosen = current()
        assert chosen is not None and chosen.level == "cheap"
        inner.__enter__()
        assert current() is inner.settings
    assert current() is inner.settings
    inner.__exit__()
    assert current() is None


def test_threads_share_the_mode_and_not_their_checks() -> None:
    """Many threads at once: each broken call is counted once, no clean one is."""
    _, layout, mask = verify([5, 3], 7)
    spoiled = hidden(mask)
    key = ("prefix_visible", "convert_mask")
    before = counts.read("violations").get(key, 0)

    def work() -> None:
        for i in range(20):
            convert_mask(spoiled if i % 4 == 0 else mask, layout, "packed")

    with debug(action="count"):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts.read("violations")[key] - before == 8 * 5


FORKED = """
import os, sys, torch
torch.set_num_threads(4)
torch.ones(600, 600) @ torch.ones(600, 600)  # the parent's threads have worked
from ddtree.invariants import debug
from ddtree.invariants.actions import counts
from ddtree.spec import FlatMask, convert_mask
debug_module = sys.modules["ddtree.invariants.debug"]
from tests.invariants.test_serving import hidden
from tests.invariants.calls import verify
_, layout, mask = verify([5, 3], 7)
folder = sys.argv[1]
with debug(action="dump", dump_dir=folder):
    convert_mask(hidden(mask), layout, "packed")
    counts._lock.acquire()  # as if another thread held it
    debug_module._lock.acquire()
    child = os.fork()
    if child == 0:
        with debug():
            pass
        convert_mask(hidden(mask), layout, "packed")
        os._exit(0 if counts.read("violations") == {("prefix_visible", "convert_mask"): 1} else 9)
    counts._lock.release()
    debug_module._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(os.listdir(folder)) == 2, os.listdir(folder)
"""


def test_a_forked_worker_counts_and_dumps_for_itself(tmp_path: Path) -> None:
    """A child process takes no lock with it, begins its counts anew, and its files bear its own number."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


EXPORTED = """
from prometheus_client import generate_latest
from ddtree.invariants import debug
from ddtree.spec import convert_mask
from tests.invariants.test_serving import hidden
from tests.invariants.calls import verify
_, layout, mask = verify([5, 3], 7)
with debug(action="count"):
    convert_mask(hidden(mask), layout, "packed")
    convert_mask(mask, layout, "packed")
print(generate_latest().decode())
"""


def test_counts_are_exported_to_prometheus() -> None:
    """Where prometheus-client is installed its registry has the counters."""
    pytest.importorskip("prometheus_client")
    done = subprocess.run(
        [sys.executable, "-c", EXPORTED], capture_output=True, text=True, check=True, timeout=120
    )
    assert 'ddtree_debug_calls_total{function="convert_mask",level="full"} 2.0' in done.stdout
    line = 'ddtree_debug_violations_total{function="convert_mask",invariant="prefix_visible"} 1.0'
    assert line in done.stdout


def test_off_costs_one_comparison() -> None:
    """Off, the wrapper adds less than a microsecond a call, after debug mode was on too."""
    from ddtree.spec import public

    with debug():
        pass
    assert public._observer is None

    def plain() -> None:
        return None

    wrapped = public.public(plain)

    def spent(function: Any) -> float:
        best = 1.0
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(20_000):
                function()
            best = min(best, time.perf_counter() - start)
        return best / 20_000

    assert spent(wrapped) - spent(plain) < 1e-6


def test_the_environment_sets_a_server_up(tmp_path: Path) -> None:
    """A process that is started with the variables logs, dumps and goes on, with no change of code."""
    code = (
        "from ddtree.spec import convert_mask\n"
        "from tests.invariants.calls import verify\n"
        "from tests.invariants.test_serving import hidden\n"
        "_, layout, mask = verify([5, 3], 7)\n"
        "convert_mask(hidden(mask), layout, 'packed')\n"
        "print('served')\n"
    )
    variables = {
        "DDTREE_DEBUG": "full", "DDTREE_DEBUG_ACTION": "log,dump", "DDTREE_DEBUG_DUMP_DIR": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "import ddtree\n" + code], env=os.environ | variables,
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "served"
    assert "prefix_visible is broken" in done.stderr
    assert len(list(tmp_path.iterdir())) == 1

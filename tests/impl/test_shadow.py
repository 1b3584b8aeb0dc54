"""The shadow: fast calls, run on the reference too, in debug mode and from a file."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ddtree import impl
from ddtree.invariants import InvariantViolation, debug
from ddtree.invariants.actions import counts
from ddtree.invariants.recorded import read
from ddtree.invariants.shadow import copied
from ddtree.spec import Acceptance, Budget, Horizon, PagedKV, QLen, Sampling, VerifyLayout
from tests.impl.cases import DEVICE, case, moved
from tests.impl.test_check import inputs, round_of
from tests.impl.test_round import CONTEXT, VOCAB

FUNCTIONS = (
    "build_tree", "plan_verify", "tree_mask", "accept_greedy", "commit_kv",
)  # fmt: skip


def shadows() -> dict[tuple[str, ...], int]:
    return counts.read("shadows")


def told(before: dict[tuple[str, ...], int]) -> dict[tuple[str, ...], int]:
    """What was compared since."""
    return {key: n - before.get(key, 0) for key, n in shadows().items() if n > before.get(key, 0)}


def test_a_round_is_compared_step_by_step() -> None:
    """Each step of a clean round gives what the reference gives, buffers and pools included."""
    before = shadows()
    target, roots, prefix_lens = inputs(lambda _: None)
    with debug(level="shadow"):
        draft = torch.randn(3, 4, VOCAB).log_softmax(-1).to(DEVICE)
        target.kv = PagedKV(target.kv.keys, target.kv.values, target.slot_table[:3].clone(), 4)
        buffers = impl.VerifyBuffers(5, QLen(12), CONTEXT, device=DEVICE)
        impl.verify_round(draft, roots[:3], prefix_lens[:3], target, Budget(9), buffers=buffers)
    assert told(before) == {(name, "same"): 1 for name in (*FUNCTIONS, "VerifyBuffers.fill")}


def test_what_the_reference_refuses_is_not_compared() -> None:
    """A context that is too short is no call of the reference: said, not taken for equal."""
    before = shadows()
    target, roots, _ = inputs(lambda _: None)
    prefix_lens = torch.tensor([5, 0, CONTEXT - 2, -1], dtype=torch.int32, device=DEVICE)
    with debug(level="shadow", action="count"):
        round_of(target, roots, prefix_lens)
    assert told(before)["plan_verify", "refused"] == 1
    assert ("plan_verify", "same") not in told(before)


def test_a_round_is_compared_beside_an_unused_request() -> None:
    """The reference knows no request without rows: it runs the others, and the results are as wide again."""
    before = shadows()
    with debug(level="shadow"):
        round_of(*inputs(lambda _: None))
    assert told(before) == {(name, "same"): 1 for name in FUNCTIONS}


def _accepts_for_nobody(*arguments: torch.Tensor) -> None:
    *_, num_accepted, _ = arguments
    num_accepted[3] = 1


def _moves_into_the_last_pool_once_more(*arguments: Any) -> None:
    pools, dst = arguments[0], arguments[8]
    pools[-1][dst[0, 0]] += 1


@pytest.mark.parametrize(
    ("function", "launcher", "spoil", "found"),
    [
        (
            "accept_greedy",
            "_walk",
            _accepts_for_nobody,
            r"result.num_accepted .* at \[3\]; 1 differ",
        ),
        ("commit_kv", "_commit", _moves_into_the_last_pool_once_more, r"values\[2\] of commit_kv"),
    ],
)
def test_what_goes_wrong_beside_an_unused_request_is_told(
    function: str, launcher: str, spoil: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens to the others, and that the unused one takes part."""
    module = sys.modules[getattr(impl, function).__wrapped__.__module__]
    original = getattr(module, launcher)

    def spoiled(*arguments: Any) -> None:
        original(*arguments)
        spoil(*arguments)

    monkeypatch.setattr(module, launcher, spoiled)
    target, roots, prefix_lens = inputs(lambda _: None)
    target.kv = replace(target.kv, page_size=4)
    with (
        debug(level="shadow"),
        pytest.raises(InvariantViolation, match=f"on return from {function}") as caught,
    ):
        round_of(target, roots, prefix_lens)
    assert caught.value.invariant == "shadow" and re.search(found, caught.value.detail)


def test_every_form_of_mask_and_the_attention_are_compared() -> None:
    """Masks of capacities larger than the call, and floats within the tolerance."""
    before = shadows()
    c = moved(case(5, "normal", 2, 3, 9, 8), DEVICE)
    shape = (c.layout.positions.numel(), 2, 64)
    query, key, value = (torch.randn(shape, device=DEVICE) for _ in range(3))
    pool = torch.randn(200, 2, 64, device=DEVICE)
    with debug(level="shadow"):
        for form in ("flat", "packed", "dense", "bits"):
            impl.convert_mask(impl.tree_mask(c.tree, c.layout, form), c.layout, "flat")
        bits = impl.tree_mask(c.tree, c.layout, "bits")
        impl.verify_attention(
            query, key, value, pool, pool, c.layout, bits, return_lse=True, window=5
        )
    found = told(before)
    assert found == {
        ("tree_mask", "same"): 5, ("convert_mask", "same"): 4, ("verify_attention", "same"): 1,
    }  # fmt: skip


def broken(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Any], Any]) -> None:
    """Make a launcher's module give another result, inside the public function."""
    module = sys.modules[getattr(impl, name).__wrapped__.__module__]
    kernel_launcher, helper = {
        "accept_greedy": (module, "Acceptance"),
        "verify_attention": (module, "attend"),
    }[name]
    original = getattr(kernel_launcher, helper)
    monkeypatch.setattr(kernel_launcher, helper, lambda *a, **k: spoil(original(*a, **k)))


def test_another_result_is_named_dumped_and_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kernel that is off by more than rounding is told with the place; the file replays the call."""
    c = moved(case(5, "normal", 2, 3, 9, 8), DEVICE)
    shape = (c.layout.positions.numel(), 2, 64)
    query, key, value = (torch.randn(shape, device=DEVICE) for _ in range(3))
    pool = torch.randn(200, 2, 64, device=DEVICE)
    bits = impl.tree_mask(c.tree, c.layout, "bits")

    def spoil(result: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        result[0][3, 1, 7] += 0.5
        return result

    broken(monkeypatch, "verify_attention", spoil)
    mode = debug(level="shadow", action="dump,raise", dump_dir=tmp_path, max_dumps=10**6)
    with mode, pytest.raises(InvariantViolation, match="shadow is broken") as caught:
        impl.verify_attention(query, key, value, pool, pool, c.layout, bits)
    assert "result[0] of verify_attention at [3, 1, 7]; 1 differ" in caught.value.detail
    (path,) = tmp_path.iterdir()
    recorded = read(path)
    entries = int(c.layout.kv_indptr[-1])
    held = recorded.arguments["key_pool"]
    assert held.shape == pool.shape
    used = c.layout.kv_indices[:entries].cpu()
    assert torch.equal(held[used], pool.cpu()[used])
    assert path.stat().st_size < 200_000  # not the whole pool


def attended(spoil: Callable[[torch.Tensor], object]) -> Callable[[], Any]:
    """A verify pass with a spoiled flat mask, which the attention converts by a public call of its own."""
    c = moved(case(5, "normal", 2, 3, 9, 8), DEVICE)
    query, key, value, key_pool, value_pool, key_scale, value_scale = c.attention
    mask = impl.tree_mask(c.tree, c.layout, "flat")
    spoil(mask.allowed)
    return lambda: impl.verify_attention(
        query, key, value, key_pool, value_pool, c.layout, mask,
        key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip


@pytest.mark.parametrize("level", ["full", "shadow"])
def test_a_fault_is_told_once_a_call(level: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither by the calls inside it too nor by what follows from it; by the next call again."""
    call = attended(lambda allowed: allowed[0].fill_(False))
    for _ in range(2):
        with caplog.at_level("ERROR", "ddtree.debug"), debug(level=level, action="log"):
            call()
        (record,) = caplog.records
        assert "in request 0, on entry to verify_attention" in record.getMessage()
        caplog.clear()


def test_a_broken_step_of_a_call_is_told_where_it_broke(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That the outer call's result is another too follows from it; what it does alone is told of it."""
    call = attended(lambda _: None)
    module = sys.modules[impl.convert_mask.__wrapped__.__module__]  # type: ignore[attr-defined]
    original = module._convert

    def spoiled(*arguments: Any) -> Any:
        made = original(*arguments)
        made.words[1].bitwise_and_(~1)  # a child of the root
        return made

    monkeypatch.setattr(module, "_convert", spoiled)
    before = shadows()
    with caplog.at_level("ERROR", "ddtree.debug"), debug(level="shadow", action="log"):
        call()
    (record,) = caplog.records
    assert "on return from convert_mask" in record.getMessage()
    assert told(before) == {("convert_mask", "other"): 1, ("verify_attention", "other"): 1}


def test_all_that_a_call_was_given_is_copied_to_a_device() -> None:
    """Whatever holds it: arguments by name, contract objects, pools."""
    c = case(5, "normal", 2, 3, 9, 8)
    kv = PagedKV((torch.zeros(8, 1, 4),), (torch.zeros(8, 1, 4),), torch.zeros(2, 9).long(), 1)
    made = copied({"tree": c.tree, "layout": c.layout, "kv": kv, "horizon": Horizon(3)}, "meta")
    assert made["horizon"] == 3
    found = tree_leaves([vars(made[name]) for name in ("tree", "layout", "kv")])
    devices = [one.device.type for one in found if isinstance(one, torch.Tensor)]
    assert len(devices) > 12 and set(devices) == {"meta"}


def test_a_replayed_file_says_same_or_where_it_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command runs both sides: 0 if they agree, 1 with the first difference, 2 if it cannot."""
    from ddtree.cli.app import app
    from ddtree.invariants import Call
    from ddtree.invariants.recorded import record

    def command(path: Path, code: int) -> str:
        with pytest.raises(SystemExit) as left:
            app(["replay", str(path)], standalone_mode=True)
        said = capsys.readouterr()
        assert left.value.code == code, said
        return said.out + said.err

    c = case(5, "normal", 2, 3, 9, 8)
    rows = c.layout.positions.numel()
    target_ids = torch.randint(0, 9, (rows,))
    path = record(
        tmp_path / "call.safetensors",
        "accept_greedy",
        {"tree": c.tree, "target_ids": target_ids, "layout": c.layout, "horizon": Horizon(3)},
        Call.of(c.tree, c.layout),
    )
    assert "reference and kernels" in command(path, 0)
    monkeypatch.setenv("COLUMNS", "400")

    def spoil(result: Acceptance) -> Acceptance:
        result.bonus[1] += 5
        return result

    broken(monkeypatch, "accept_greedy", spoil)
    assert "differ: result.bonus of accept_greedy at [1]; 1 differ" in command(path, 1)
    nothing = tmp_path / "metadata.safetensors"
    from ddtree.invariants import dump

    dump(nothing, c.layout)
    assert "names no function" in command(nothing, 2)
    record(nothing, "verify_round", {"target": object()}, Call.of(c.layout))
    assert "holds no arguments" in command(nothing, 2)
    record(nothing, "new_tokens", {"tree": c.tree}, None)
    assert "cannot be run again" in command(nothing, 2)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.5, "bits", torch.float32, Sampling(0.7, 3, 0.9, 5), (1, None)],
    ids=str,
)
def test_arguments_come_back_as_they_were(value: Any, tmp_path: Path) -> None:
    """Numbers, words, dtypes, contract objects and tuples survive the way through a file."""
    from ddtree.invariants.recorded import record

    layout = case(1, "normal", 2, 3, 9, 8).layout
    path = record(tmp_path / "call.safetensors", "f", {"value": value, "layout": layout}, None)
    back = read(path)
    assert back.arguments["value"] == value
    assert isinstance(back.arguments["layout"], VerifyLayout)
    assert torch.equal(back.arguments["layout"].positions, layout.positions)

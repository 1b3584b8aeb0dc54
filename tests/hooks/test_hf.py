"""The hook on Transformers models, and the entry points while debug mode is off."""

import logging
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ddtree import InputError, InvariantViolation, spec
from ddtree.decoding.target import HFTarget
from ddtree.hooks import attach
from ddtree.invariants import actions


@pytest.fixture
def target() -> HFTarget:
    """A small model with a prefix of 9 tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    made = HFTarget(transformers.LlamaForCausalLM(config).eval(), max_context=64)
    made.prefill(torch.arange(9))
    return made


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Violations stop the pass."""
    monkeypatch.setenv("DDTREE_DEBUG_ACTION", "raise")


def a_pass(target: HFTarget, budget: int = 16) -> tuple[Any, Any, Any]:
    """A tree behind the target's prefix, its layout and mask."""
    logits = torch.randn(1, 7, 60, generator=torch.Generator().manual_seed(1)) * 3
    tree = spec.build_tree(torch.log_softmax(logits, -1), torch.tensor([3]), spec.Budget(budget))
    layout = spec.plan_verify(tree, torch.tensor([target.prefix_len]), target.slot_table)
    return tree, layout, spec.tree_mask(tree, layout, "flat")


@pytest.mark.usefixtures("raising")
def test_right_passes_are_passed_by(target: HFTarget) -> None:
    """Trees of several budgets, a padded batch with a bool mask, prefill and generate are let by."""
    with attach(target.model):
        for budget in (1, 7, 16):
            target.forward(*a_pass(target, budget))
        target.step(5)
        target.model.generate(torch.arange(5)[None], max_new_tokens=3, do_sample=False)
        target.forward(*a_pass(target))
        cache = transformers.DynamicCache()
        name = target._call.cache_name
        padded = torch.tensor(
            [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
        )  # two prompts, one with padding before it
        target.model(input_ids=torch.ones_like(padded), attention_mask=padded, **{name: cache})
        tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
        allowed = torch.cat([padded.bool()[:, None].expand(2, 3, 5), tree.expand(2, 3, 3)], dim=2)
        target.model(
            input_ids=torch.ones(2, 3, dtype=torch.int64),
            attention_mask=allowed[:, None],
            position_ids=torch.tensor([[3, 4, 4], [5, 6, 6]]),
            **{name: cache},
        )


@pytest.mark.usefixtures("raising")
def test_wrong_passes_are_caught(target: HFTarget) -> None:
    """A root that sees a later row and positions by row are named; detached, nothing is."""
    tree, layout, mask = a_pass(target)
    seen = mask.allowed.clone()
    seen[target.prefix_len + 3] = True
    by_row = replace(layout, positions=target.prefix_len + torch.arange(17))
    attached = attach(target.model)
    with pytest.raises(InvariantViolation, match="mask_is_tree is broken in request 0"):
        target.forward(tree, layout, spec.FlatMask(seen))
    with pytest.raises(InvariantViolation, match="mask_positions is broken"):
        target.forward(tree, by_row, mask)
    attached.detach()
    attached.detach()
    target.forward(tree, layout, spec.FlatMask(seen))


def test_the_hook_says_where_it_is_and_writes_what_it_finds(
    target: HFTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By default violations are logged and dumped, only so many of them, and the pass goes on."""
    monkeypatch.setenv("DDTREE_DEBUG_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("DDTREE_DEBUG_MAX_DUMPS", "2")
    monkeypatch.setattr(actions, "_numbers", count(1))  # of a process that has dumped nothing yet
    tree, layout, mask = a_pass(target)
    by_row = replace(layout, positions=target.prefix_len + torch.arange(17))
    with caplog.at_level(logging.WARNING), attach(target.model):
        for _ in range(5):
            target.forward(tree, by_row, mask)
    assert (
        "ddtree hooks: installed on LlamaModel: forward (level full, action log,dump, pid"
        in caplog.text
    )
    assert caplog.text.count("mask_positions is broken") == 2
    assert "2 violations are told, more are only counted (DDTREE_DEBUG_MAX_DUMPS)" in caplog.text
    assert len(list(tmp_path.glob("*-transformers-mask_positions.safetensors"))) == 2


def test_a_fault_of_the_hook_stops_nothing(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it cannot read is said once, and the pass runs."""
    monkeypatch.setenv("DDTREE_DEBUG_ACTION", "raise")
    with attach(target.model):
        for _ in range(2):
            heads = torch.zeros(1, 2, 1, 10)
            target.model(
                input_ids=torch.ones(1, 1, dtype=torch.int64),
                attention_mask=heads,
                **{target._call.cache_name: target.cache},
            )
            target._crop(9)
    assert caplog.text.count("not checked: forward of LlamaModel: the mask has 2 heads") == 1


@pytest.mark.parametrize("thing", [None, torch.nn.Linear(2, 2)])
def test_what_takes_no_mask_is_refused(thing: Any) -> None:
    """Nothing would ever be checked; it is told what it has instead."""
    has = "no forward" if thing is None else r"forward\(input\)"
    with pytest.raises(InputError, match=f"attach was given a .*, which has {has}; expected a Tr"):
        attach(thing)


def test_off_the_entry_points_import_nothing() -> None:
    """While the variable is unset an engine pays for a comparison."""
    code = "import sys, ddtree.hooks as h; h.sglang(); h.vllm(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"

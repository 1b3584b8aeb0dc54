"""Any part of a right call, however little it tells, raises no alarm: what is not known is not guessed."""

import os

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree.invariants import Call, violations
from ddtree.spec import (
    Budget,
    Horizon,
    PagedKV,
    QLen,
    VerifyBuffers,
    accept_greedy,
    build_tree,
    commit_kv,
    plan_verify,
    tree_mask,
)
from tests.invariants.calls import last_children, tables

PROFILE = os.environ.get("DDTREE_PROFILE", "quick")
VOCAB = 5


def right_call(
    prefixes: list[int], budget: int, sizes: list[tuple[int, int]], room: int | None, pad_slot: int
) -> Call:
    """A whole pass whose request b has at most ``sizes[b][0]`` nodes and ``sizes[b][1]`` rows to spare.

    ``room``: requests and entries that fixed buffers hold beyond it; None: an eager call.
    """
    batch, horizon, q_len = len(prefixes), 3, budget + 1
    generator = torch.Generator().manual_seed(budget)
    log_probs = torch.randn(batch, horizon, VOCAB, generator=generator).log_softmax(-1)
    for b, (candidates, _) in enumerate(sizes):
        log_probs[b, :, candidates:] = -torch.inf  # fewer candidates, fewer nodes
    tree = build_tree(log_probs, torch.arange(batch), Budget(budget))
    q_lens = torch.tensor(
        [
            min(n + spare, q_len)
            for n, (_, spare) in zip(tree.num_nodes.tolist(), sizes, strict=True)
        ]
    )
    table = tables(batch, max(prefixes) + q_len)
    layout = plan_verify(tree, torch.tensor(prefixes), table, q_lens)
    choices = last_children(tree).reshape(batch, q_len)
    target_ids = torch.cat([choices[b, :n] for b, n in enumerate(q_lens.tolist())])
    acceptance = accept_greedy(tree, target_ids, layout, Horizon(horizon))
    kv = PagedKV((), (), table.clone())
    forms = [tree_mask(tree, layout, form) for form in ("packed", "dense", "bits")]
    flat = tree_mask(tree, layout, "flat")
    rows = torch.cat([tree.token_ids[b, :n] for b, n in enumerate(q_lens.tolist())])
    known = Call.of(
        tree,
        layout,
        flat,
        acceptance,
        commit_kv(kv, layout, acceptance),
        q_lens=q_lens,
        prefix_lens=torch.tensor(prefixes),
        budget=budget,
        horizon=horizon,
        slot_table=table,
        slot_table_after=kv.slot_table,
        kv_pool_size=table.numel(),
        vocab_size=VOCAB,
    ).known()
    if room is None:
        forms_known = Call.of(*forms).known()
        return Call(
            **known | forms_known, input_ids=rows, target_ids=target_ids, num_rows=rows.numel()
        )
    buffers = VerifyBuffers(batch + room, QLen(q_len + room), max(prefixes) + room, pad_slot)
    buffers.fill(tree, layout, flat)
    return Call(**known | Call.of(buffers).known())


@st.composite
def parts(draw: st.DrawFn) -> list[Call]:
    """Several choices of fields of a right call, eager or in buffers, ragged or not."""
    prefixes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    budget = draw(st.integers(0, 20))
    sizes = [
        (draw(st.integers(1, VOCAB)), draw(st.sampled_from([0, 0, 1, 3, 99]))) for _ in prefixes
    ]
    room = draw(st.sampled_from([None, 0, 1, 2]))
    known = right_call(prefixes, budget, sizes, room, draw(st.sampled_from([-1, 1000]))).known()
    always = set() if room is None else {"is_captured"}
    choices = st.sets(st.sampled_from(sorted(known)), min_size=1)
    kept = draw(st.lists(choices, min_size=12, max_size=12))
    return [Call(**{name: known[name] for name in some | always}) for some in kept]


RAGGED = Call(
    positions=torch.tensor([4, 5, 6, 7, 8, 9]), kv_indptr=torch.tensor([0, 4, 10]), max_q_len=4
)
"""Requests of 2 and 4 rows, 6 in all."""


@settings(max_examples=2000 if PROFILE == "long" else 250)
@given(parts())
@example([RAGGED])
def test_any_part_of_a_right_call_is_right(calls: list[Call]) -> None:
    """Fewer fields mean fewer checks, never an alarm, for ragged and fixed, eager and captured calls."""
    for call in calls:
        assert [str(v) for v in violations(call)] == []

"""Random sound calls, made and checked on the device, many a second: no check may raise an alarm.

A graph has several branches, each of which draws draft log-probs, prefix lengths, widths and targets of its
own at every replay, runs the steps of a round and checks all fields of the call at once. Usage: ``python -m
tests.impl.clean_calls CALLS SECONDS``; prints the figures as JSON.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddtree import impl
from ddtree.impl import CapturedCheck
from ddtree.impl.accept import new_tokens
from ddtree.invariants import Call
from ddtree.invariants.streams import capturing, own_stream
from ddtree.spec import Budget, Horizon, PagedKV, QLen

VOCAB, HORIZON, MAX_PREFIX = 37, 5, 70
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Kind:
    """One kind of call."""

    batch: int
    budget: int
    ragged: bool
    page_size: int
    buffered: bool


KINDS = (
    Kind(1, 16, False, 1, True),
    Kind(3, 7, True, 1, False),
    Kind(4, 33, True, 16, True),
    Kind(2, 64, False, 4, False),
    Kind(8, 8, True, 1, True),
    Kind(2, 31, True, 1, False),
    Kind(5, 15, False, 16, True),
    Kind(1, 65, True, 4, False),
)


class Branch:
    """The memory of one kind of call, and the steps that fill it anew."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        context = MAX_PREFIX + kind.budget + 1
        pages = -(-context // kind.page_size)
        order = torch.randperm(kind.batch * pages, device=DEVICE)
        slots = order[:, None] * kind.page_size + torch.arange(kind.page_size, device=DEVICE)
        self.num_slots = kind.batch * pages * kind.page_size
        self.table = slots.view(kind.batch, -1)[:, :context].contiguous()
        pool = torch.zeros(self.num_slots, 1, 2, device=DEVICE)
        self.kv = PagedKV((pool,), (pool.clone(),), self.table, kind.page_size)
        self.buffers = None
        if kind.buffered:
            self.buffers = impl.VerifyBuffers(
                kind.batch + 2, QLen(kind.budget + 3), MAX_PREFIX, device=DEVICE
            )

    def step(self) -> None:
        """Make one call and check it."""
        kind, shape = self.kind, (self.kind.batch, HORIZON, VOCAB)
        logits = torch.randn(shape, device=DEVICE).mul(2).round()  # many ties
        logits = logits.masked_fill(torch.rand(shape, device=DEVICE) < 0.3, -torch.inf)
        roots = torch.randint(0, VOCAB, (kind.batch,), device=DEVICE)
        drawn = torch.rand(kind.batch, device=DEVICE)
        prefix_lens = (drawn * (MAX_PREFIX + 3)).int() - 2  # at times unused, at times 0
        log_probs = logits.log_softmax(-1)
        tree = impl.build_tree(log_probs, roots, Budget(kind.budget))
        table = self.table.clone()
        layout = impl.plan_verify(tree, prefix_lens, table, tree.num_nodes if kind.ragged else None)
        flat = impl.tree_mask(tree, layout, "flat")
        bits = impl.tree_mask(tree, layout, "bits")
        fields: dict[str, Any] = {}
        if self.buffers is not None:
            self.buffers.fill(tree, layout, flat)
            layout, flat = self.buffers.layout, self.buffers.mask
            fields = {"input_ids": self.buffers.token_ids, "pad_slot": self.buffers.pad_slot}
        rows = layout.positions.numel()
        target_ids = torch.randint(0, VOCAB, (rows,), device=DEVICE)
        acceptance = impl.accept_greedy(tree, target_ids, layout, Horizon(HORIZON))
        commit = impl.commit_kv(self.kv, layout, acceptance)
        self.call = Call.of(
            tree, layout, flat, None if self.buffers else bits, acceptance, commit,
            **fields,
            draft_log_probs=log_probs, root_token_ids=roots, prefix_lens=prefix_lens,
            budget=kind.budget, horizon=HORIZON, slot_table=table, slot_table_after=self.table,
            kv_pool_size=self.num_slots, vocab_size=VOCAB, target_ids=target_ids,
            emitted=new_tokens(tree, acceptance),
        )  # fmt: skip


def compiled(number: int) -> None:
    """Compile what one kind of call launches, into Triton's cache on disk."""
    branch = Branch(KINDS[number])
    branch.step()
    CapturedCheck(branch.call).launch()
    torch.cuda.synchronize()


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one run."""
    with capturing() as graph:
        run()
    return graph


def main() -> None:
    """Replay until so many calls were checked, or so many seconds have passed."""
    wanted, seconds = int(sys.argv[1]), float(sys.argv[2])
    with multiprocessing.get_context("spawn").Pool(len(KINDS)) as pool:
        pool.map(compiled, range(len(KINDS)))
    if not wanted:
        return
    branches = [Branch(kind) for kind in KINDS]
    for branch in branches:
        branch.step()
        CapturedCheck(branch.call).launch()
    torch.cuda.synchronize()
    steps = [captured(branch.step) for branch in branches]
    checks = [CapturedCheck(branch.call) for branch in branches]
    both = [(step, captured(made.launch)) for step, made in zip(steps, checks, strict=True)]
    streams = [own_stream(torch.device("cuda"), f"branch {i}") for i in range(len(branches))]
    torch.cuda.synchronize()
    start, replays, alarms = time.time(), 0, []
    while replays * len(branches) < wanted and time.time() - start < seconds:
        for _ in range(50):
            for stream, (graph, second) in zip(streams, both, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
                    second.replay()
            replays += 1
        for made in checks:
            violation = made.poll()
            if violation is not None:
                alarms.append(str(violation))
        torch.cuda.synchronize()
        if len(alarms) > 5:
            break
    torch.cuda.synchronize()
    spent = time.time() - start
    told = [made._record.tolist()[:3] for made in checks]
    report = {
        "calls": sum(checked for checked, _, _ in told),
        "broken": sum(broken for _, broken, _ in told),
        "doubted": sum(doubted for *_, doubted in told),
        "requests": replays * sum(kind.batch for kind in KINDS),
        "seconds": round(spent, 1),
        "alarms": alarms[:3],
    }
    print(json.dumps(report, indent=1))
    sys.exit(bool(report["broken"] or report["doubted"]))


if __name__ == "__main__":
    main()

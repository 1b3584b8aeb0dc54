"""Whole rounds and fixed buffers of ``impl`` against ``spec``."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ddtree import impl, spec
from ddtree.impl import sampling as on_device
from ddtree.invariants.streams import capturing
from ddtree.spec import Budget, Horizon, InputError, QLen, Sampling
from tests.impl.bigram import BigramTarget
from tests.impl.cases import DEVICE, case, moved

VOCAB, HORIZON, CONTEXT = 31, 4, 60
SIZES_OF_BUFFERS = {"one request": (1, 3, 9, 7), "three requests": (3, 2, 13, 33)}
"""Batch, horizon, vocabulary, budget."""


def draft_that_agrees(table: Tensor, roots: Tensor, generator: torch.Generator) -> Tensor:
    """Log-probs that rank the target's own continuation first."""
    log_probs = (torch.randn(len(roots), HORIZON, VOCAB, generator=generator) * 2).log_softmax(-1)
    for b, token in enumerate(roots.tolist()):
        for depth in range(HORIZON):
            token = int(table[token].argmax())
            log_probs[b, depth, token] = -0.1
    return log_probs


def chain(log_probs: Tensor) -> Tensor:
    """The likeliest token of each depth alone: fewer nodes than a budget above the horizon."""
    return log_probs.masked_fill(log_probs < log_probs.amax(-1, keepdim=True), -torch.inf)


@pytest.mark.parametrize(
    ("budget", "page_size", "ragged", "sampling", "buffered", "from_logits"),
    [
        (8, 1, False, None, True, False),
        (17, 4, True, None, False, True),
        (5, 4, True, Sampling(0.8, 9, seed=11), True, False),
        (7, 1, False, Sampling(1.0, seed=2**64 - 4), False, True),
    ],
)
def test_a_round_equals_the_reference_and_leaves_unused_requests_alone(
    budget: int,
    page_size: int,
    ragged: bool,
    sampling: Sampling | None,
    buffered: bool,
    from_logits: bool,
) -> None:
    """Trees, tokens, slots and KV agree; a request with a negative prefix accepts nothing."""
    used = 3
    g = torch.Generator().manual_seed(budget)
    table = torch.randn(VOCAB, VOCAB, generator=g) * 4
    pages = -(-CONTEXT // page_size)
    order = torch.randperm((used + 1) * pages, generator=g)
    slots = (order[:, None] * page_size + torch.arange(page_size)).reshape(used + 1, -1)
    num_slots = slots.numel()
    roots = torch.randint(0, VOCAB, (used + 1,), generator=g)
    log_probs = draft_that_agrees(table, roots, g)
    log_probs[0] = chain(log_probs[0])
    prefix_lens = torch.randint(0, CONTEXT - budget - 1, (used + 1,), generator=g).int()
    prefix_lens[used] = -1

    target = BigramTarget(
        table.to(DEVICE), slots.clone().to(DEVICE), num_slots, page_size, impl.commit_kv
    )
    reference = BigramTarget(table, slots[:used].clone(), num_slots, page_size, spec.commit_kv)
    buffers = [
        p.VerifyBuffers(used + 2, budget + 3, CONTEXT, device=d)
        for p, d in ((impl, DEVICE), (spec, "cpu"))
    ]
    fouled(buffers[0])
    found = impl.verify_round(
        log_probs.to(DEVICE), roots.to(DEVICE), prefix_lens.to(DEVICE), target, Budget(budget),
        from_logits=from_logits, ragged=ragged, sampling=sampling, buffers=buffers[0] if buffered else None,
    )  # fmt: skip
    expected = spec.verify_round(
        log_probs[:used], roots[:used], prefix_lens[:used], reference, Budget(budget),
        from_logits=from_logits, ragged=ragged, sampling=sampling, buffers=buffers[1] if buffered else None,
    )  # fmt: skip

    found = moved(found, "cpu")
    assert expected.acceptance.num_accepted.max() > 1
    assert torch.equal(found.token_ids[:used], expected.token_ids)
    widths = found.layout.qo_indptr.diff()[:used].tolist()
    assert widths == [HORIZON + 1 if ragged else budget + 1, *[budget + 1] * (used - 1)]
    for part in ("tree", "acceptance", "commit"):
        for name, value in vars(getattr(expected, part)).items():
            assert torch.equal(getattr(getattr(found, part), name)[:used], value), name
    assert found.acceptance.num_accepted[used] == 0
    assert (found.acceptance.nodes[used] == -1).all() and (found.token_ids[used] == -1).all()
    assert torch.equal(target.slot_table[:used].cpu(), reference.slot_table)
    assert torch.equal(target.slot_table[used].cpu(), slots[used])
    pools = zip(
        target.kv.keys + target.kv.values, reference.kv.keys + reference.kv.values, strict=True
    )
    for pool, known in pools:  # the last slot takes what is not written
        assert torch.equal(pool[:-1].cpu().nan_to_num(-1), known[:-1].nan_to_num(-1))
    if buffered:
        same_buffers(buffers[0], buffers[1])


class RunAnew:
    """In place of a CUDA graph: each replay runs the call again, on the same memory."""

    def __init__(self, run: Callable[[], spec.Round], device: torch.device) -> None:
        assert device.type == "cpu"
        self.run, self.graph, self.checks = run, None, list[object]()
        self.result = run()

    def replay(self) -> spec.Round:
        """Run it again."""
        return self.run()


def test_a_round_graph_serves_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests, then two: each replay is the reference's round, and the third's slots stay put."""
    if DEVICE == "cpu":
        monkeypatch.setattr("ddtree.impl.round.Captured", RunAnew)
    g = torch.Generator().manual_seed(6)
    table = torch.randn(VOCAB, VOCAB, generator=g) * 4
    slots = torch.randperm(3 * CONTEXT, generator=g).view(3, CONTEXT)
    target = BigramTarget(
        table.to(DEVICE), slots.clone().to(DEVICE), 3 * CONTEXT, 1, impl.commit_kv
    )
    with pytest.raises(InputError, match="slot_table has 3 requests; max_batch is 4"):
        impl.RoundGraph(target, 4, Horizon(HORIZON), VOCAB, Budget(5))
    graph = impl.RoundGraph(target, 3, Horizon(HORIZON), VOCAB, Budget(5))
    assert torch.equal(target.slot_table.cpu(), slots)
    prefix_lens = torch.tensor([5, 0, 9], dtype=torch.int32)
    for batch in (3, 2):
        roots = torch.randint(0, VOCAB, (batch,), generator=g)
        draft = draft_that_agrees(table, roots, g)
        draft[0] = chain(draft[0])
        reference = BigramTarget(
            table, moved(target.slot_table[:batch], "cpu"), 3 * CONTEXT, 1, spec.commit_kv
        )
        third = moved(target.slot_table[2], "cpu")
        found = graph.replay(draft.to(DEVICE), roots.to(DEVICE), prefix_lens[:batch].to(DEVICE))
        expected = spec.verify_round(draft, roots, prefix_lens[:batch], reference, Budget(5))
        assert torch.equal(found.token_ids[:batch].cpu(), expected.token_ids)
        assert found.layout.qo_indptr.diff().tolist() == [6] * batch + [0] * (3 - batch)
        assert torch.equal(target.slot_table[:batch].cpu(), reference.slot_table)
        assert (found.token_ids[batch:] == -1).all()
    assert torch.equal(target.slot_table[2].cpu(), third)
    with pytest.raises(InputError, match="batch is 4; the graph was captured for 3"):
        graph.replay(draft.to(DEVICE), torch.zeros(4).long().to(DEVICE), prefix_lens.to(DEVICE))


@pytest.mark.parametrize("size", SIZES_OF_BUFFERS)
def test_buffers_are_filled_to_the_last_entry(size: str) -> None:
    """Stale content of every buffer is overwritten, tails included, as the reference does."""
    batch, horizon, vocab, budget = SIZES_OF_BUFFERS[size]
    c = case(5, "normal", batch, horizon, vocab, budget)
    sizes = (batch + 2, spec.QLen(budget + 4), 40)
    mine = impl.VerifyBuffers(*sizes, pad_slot=7777, device=DEVICE)
    known = spec.VerifyBuffers(*sizes, pad_slot=7777)
    fouled(mine)
    mask = spec.tree_mask(c.tree, c.layout, "flat")
    mine.fill(*moved((c.tree, c.layout, mask), DEVICE))
    known.fill(c.tree, c.layout, mask)
    same_buffers(mine, known)


def test_buffers_refuse_what_their_sizes_rule_out() -> None:
    """A batch or a q_len over the capacity is an error with both numbers."""
    c = case(1, "normal", 2, 3, 9, 8)
    call = moved((c.tree, c.layout, spec.tree_mask(c.tree, c.layout, "flat")), DEVICE)
    with pytest.raises(InputError, match="batch is 2; the buffers were made for 1"):
        impl.VerifyBuffers(1, QLen(99), 99, device=DEVICE).fill(*call)
    with pytest.raises(
        InputError, match=f"max_q_len is {c.layout.max_q_len}; the buffers were made for 2"
    ):
        impl.VerifyBuffers(3, QLen(2), 99, device=DEVICE).fill(*call)


def fouled(buffers: spec.VerifyBuffers) -> None:
    """Fill buffers with what no call leaves there."""
    for tensor in (*tensors_of(buffers).values(),):
        tensor.fill_(1 if tensor.dtype == torch.bool else 77)


def same_buffers(found: spec.VerifyBuffers, expected: spec.VerifyBuffers) -> None:
    """Compare every entry of two sets of buffers."""
    for name, value in tensors_of(expected).items():
        assert torch.equal(tensors_of(found)[name].cpu(), value), name


def tensors_of(buffers: spec.VerifyBuffers) -> dict[str, Tensor]:
    """All buffers by name."""
    every = {**vars(buffers.layout), "mask": buffers.mask.allowed, "token_ids": buffers.token_ids}
    return {name: value for name, value in every.items() if isinstance(value, Tensor)}


@pytest.mark.gpu
def test_numbers_that_a_capture_asks_for_first_are_there_at_once() -> None:
    """A temperature and seeds outlive the graph that was captured then: others read them without a replay."""
    device = torch.device("cuda", 0)
    with capturing():
        torch.zeros(1, device=device)
        temperature = on_device._constant(0.7311, device)
        seeds = on_device._seeds((5, -6), device)
    assert temperature.item() == 0.7311 and seeds.tolist() == [5, -6]

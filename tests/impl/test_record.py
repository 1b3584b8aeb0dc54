"""The record of a round, against the same fields put together in PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ddtree.decoding.decoding import top_two
from ddtree.impl.record import BLOCK, MAX_SPLITS, pack_record, record_fields
from ddtree.spec import Acceptance, DraftTree
from tests.impl.cases import DEVICE, case, moved


def split(packed: Tensor, fields: dict[str, int]) -> dict[str, Tensor]:
    """The fields of a record, on the CPU."""
    parts = packed.cpu().split(list(fields.values()), dim=1)
    return dict(zip(fields, parts, strict=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("has_logits", [True, False])
def test_a_record_is_what_pytorch_packs(seed: int, *, has_logits: bool) -> None:
    """Ragged rows, requests that accepted nothing, ties, three dtypes; past a path's end nothing is read."""
    c = case(seed, "normal", 3, 4, 11, (0, 5, 17)[seed % 3])
    # the interpreter cuts off what a bfloat16 has to round
    rounded = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    dtype = (torch.float32, torch.float16, rounded)[seed // 2]
    logits = c.target_logits.to(dtype)
    paths = c.acceptance
    if seed % 2:  # an unused request: its path is empty, its other fields mean nothing
        paths = Acceptance(paths.nodes.clone(), paths.num_accepted.clone(), paths.bonus.clone())
        paths.nodes[1], paths.num_accepted[1], paths.bonus[1] = -1, 0, 0
    rows = torch.full((logits.shape[0] + 2, 11), torch.nan, dtype=dtype)
    starts = c.layout.qo_indptr[:-1, None] + paths.nodes
    on_path = torch.arange(5) < paths.num_accepted[:, None]
    read = starts[on_path].unique()
    rows[read] = logits[read]  # whatever no path goes through is NaN
    width, size = paths.nodes.shape[1], c.tree.token_ids.shape[1]
    packed = pack_record(
        moved(c.tree, DEVICE), moved(c.layout, DEVICE), moved(paths, DEVICE),
        rows.to(DEVICE) if has_logits else None,
    )  # fmt: skip
    found = split(packed, record_fields(width, size, has_margins=has_logits))
    assert ("margins" in found) == has_logits

    for name, expected in (
        ("nodes", paths.nodes), ("num_accepted", paths.num_accepted[:, None]),
        ("bonus", paths.bonus[:, None]), ("num_nodes", c.tree.num_nodes[:, None]),
        ("tree_ids", c.tree.token_ids), ("parents", c.tree.parents), ("depths", c.tree.depths),
    ):  # fmt: skip
        assert torch.equal(found[name], expected.long()), name
    assert torch.equal(found["scores"].view(torch.float64), c.tree.scores)
    for b, count in enumerate(paths.num_accepted.tolist()):
        path = paths.nodes[b, 1:count].long()
        tokens = [*c.tree.token_ids[b, path].tolist(), *paths.bonus[b : b + 1].tolist()][:count]
        assert found["token_ids"][b].tolist() == tokens + [-1] * (width - len(tokens))
        if has_logits:
            here = rows[starts[b, :count].long()]
            margins, runner_ups = top_two(here)
            best = here.topk(3, dim=1).values
            assert torch.equal(found["margins"][b, :count].view(torch.float64), margins)
            clear = (best[:, 0] > best[:, 1]) & (
                best[:, 1] > best[:, 2]
            )  # of equals any may be second
            assert torch.equal(found["runner_up_ids"][b, :count][clear], runner_ups[clear])
            assert not found["margins"][b, count:].any()
            assert not found["runner_up_ids"][b, count:].any()


def test_of_equals_the_smaller_ids_come_first_over_several_splits() -> None:
    """The largest two in one split, in two, and one of them last of all; NaN and -inf are never second."""
    c = case(3, "normal", 1, 2, 11, 2)
    vocab = 2 * BLOCK + 5  # three splits
    path = Acceptance(torch.tensor([[0, -1, -1]]).int(), torch.tensor([1]).int(), torch.tensor([4]))
    fields = record_fields(3, 3, has_margins=True)
    for first, second in ((7, 9), (vocab - 1, 3), (2 * BLOCK, BLOCK - 1), (5, vocab - 1)):
        logits = torch.full((3, vocab), -torch.inf, device=DEVICE)
        logits[0, 100:200] = torch.nan
        logits[0, first], logits[0, second] = 2.5, -1.0
        record = pack_record(
            moved(c.tree, DEVICE), moved(c.layout, DEVICE), moved(path, DEVICE), logits
        )
        found = split(record, fields)
        assert found["margins"][0, :1].view(torch.float64).tolist() == [3.5]
        assert int(found["runner_up_ids"][0, 0]) == second
        logits[0, second] = 2.5
        record = pack_record(
            moved(c.tree, DEVICE), moved(c.layout, DEVICE), moved(path, DEVICE), logits
        )
        found = split(record, fields)
        assert found["margins"][0, :1].view(torch.float64).tolist() == [0.0]
        assert int(found["runner_up_ids"][0, 0]) == max(first, second)


def test_a_vocabulary_too_large_for_one_block_a_split() -> None:
    """Both largest in one split's first and last block or in others; rows that lie apart, two requests."""
    c = case(3, "normal", 2, 2, 11, 2)
    vocab = 2 * MAX_SPLITS * BLOCK + 5  # three blocks a split, the last of which is short
    paths = Acceptance(
        torch.tensor([[0, 1, -1], [0, -1, -1]]).int(),
        torch.tensor([2, 1]).int(),
        torch.tensor([4, 6]),
    )
    starts = c.layout.qo_indptr.tolist()
    read = (starts[0], starts[0] + 1, starts[1])
    at = ((3, 3 * BLOCK - 1), (vocab - 1, 2 * BLOCK), (5 * BLOCK + 1, 9))
    logits = torch.full((starts[-1], vocab + 3), torch.inf, device=DEVICE)[:, :vocab]
    for row, (first, second) in zip(read, at, strict=True):
        logits[row] = -1.0
        logits[row, first], logits[row, second] = 4.0, 2.5
    record = pack_record(
        moved(c.tree, DEVICE), moved(c.layout, DEVICE), moved(paths, DEVICE), logits
    )
    found = split(record, record_fields(3, 3, has_margins=True))
    margins = found["margins"].view(torch.float64)
    assert margins.tolist() == [[1.5, 1.5, 0], [1.5, 0, 0]]
    assert found["runner_up_ids"].tolist() == [[at[0][1], at[1][1], 0], [at[2][1], 0, 0]]


def test_no_requests_have_no_record() -> None:
    """Nothing is launched, and the shape is right."""
    c = case(3, "normal", 1, 2, 11, 2)
    none = Acceptance(*(part[:0] for part in vars(c.acceptance).values()))
    tree = DraftTree(*(part[:0] for part in vars(c.tree).values()))
    packed = pack_record(tree, replace(c.layout, is_captured=True), none, None)
    assert packed.shape == (0, sum(record_fields(3, 3, has_margins=False).values()))


def test_a_vocabulary_of_one_has_no_second() -> None:
    """The margin is infinite."""
    c = case(3, "normal", 1, 2, 11, 2)
    path = Acceptance(torch.tensor([[0, -1, -1]]).int(), torch.tensor([1]).int(), torch.tensor([0]))
    tree, layout = moved(c.tree, DEVICE), moved(c.layout, DEVICE)
    record = pack_record(tree, layout, moved(path, DEVICE), torch.zeros((3, 1), device=DEVICE))
    found = split(record, record_fields(3, 3, has_margins=True))
    assert found["margins"][0, :1].view(torch.float64).tolist() == [torch.inf]
    assert int(found["runner_up_ids"][0, 0]) == 0

"""Committed KV equals the cache of decoding the same tokens in a line, for every page size."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as hs

from ddtree.invariants import strategies as st
from ddtree.spec.commit import commit_kv
from ddtree.spec.contracts import Acceptance, Budget, PagedKV, QLen, VerifyLayout
from ddtree.spec.errors import InputError
from ddtree.spec.layout import plan_verify
from ddtree.spec.round import verify_round
from tests.trees import tree_of


def labelled(call: st.VerifyCall, layers: int = 2) -> PagedKV:
    """Pools whose every slot holds a number of its own."""
    size = call.slots.num_slots
    pools = [
        torch.arange(size, dtype=torch.float64).reshape(size, 1, 1) + 1000 * i
        for i in range(2 * layers)
    ]
    table = call.slots.table.clone()
    return PagedKV(tuple(pools[:layers]), tuple(pools[layers:]), table, call.slots.page_size)


def path_of(acceptance: Acceptance, b: int) -> list[int]:
    """The accepted rows."""
    return acceptance.nodes[b, : int(acceptance.num_accepted[b])].tolist()


@given(st.verify_calls(), hs.data())
def test_the_committed_entries_are_the_accepted_rows(
    call: st.VerifyCall, data: hs.DataObject
) -> None:
    """Entry prefix_len + i reads what accepted row i wrote, the prefix reads as before, in all layers.

    Every slot's number is its own, so reading a slot after it was overwritten would show.
    """
    acceptance = data.draw(st.acceptances(call.tree))
    kv, before = labelled(call), labelled(call)
    commit = commit_kv(kv, call.layout, acceptance)
    for b, prefix_len in enumerate(call.prefix_lens.tolist()):
        path = path_of(acceptance, b)
        old = call.slots.table[b]
        written = old[[*range(prefix_len), *(prefix_len + row for row in path)]]
        kept = kv.slot_table[b, : prefix_len + len(path)]
        for new_pool, old_pool in zip(
            kv.keys + kv.values, before.keys + before.values, strict=True
        ):
            assert torch.equal(new_pool[kept], old_pool[written])
        assert int(commit.prefix_lens[b]) == prefix_len + len(path)
        assert commit.src[b, : len(path)].tolist() == written[prefix_len:].tolist()
        assert commit.dst[b, : len(path)].tolist() == kept[prefix_len:].tolist()
        assert (commit.src[b, len(path) :] == -1).all()
        assert (commit.dst[b, len(path) :] == -1).all()


@given(st.verify_calls(), hs.data())
def test_nothing_is_lost_or_touched_beside(call: st.VerifyCall, data: hs.DataObject) -> None:
    """Page size 1 permutes the table and moves no KV; larger pages keep the table and other slots."""
    acceptance = data.draw(st.acceptances(call.tree))
    kv, before = labelled(call), labelled(call)
    commit = commit_kv(kv, call.layout, acceptance)
    if call.slots.page_size == 1:
        assert torch.equal(kv.slot_table.sort().values, call.slots.table.sort().values)
        assert torch.equal(commit.src, commit.dst)
        for new, old in zip(kv.keys + kv.values, before.keys + before.values, strict=True):
            assert torch.equal(new, old)
    else:
        assert torch.equal(kv.slot_table, call.slots.table)
        changed = set(commit.dst[commit.dst >= 0].tolist())
        other = [slot for slot in range(call.slots.num_slots) if slot not in changed]
        for new, old in zip(kv.keys + kv.values, before.keys + before.values, strict=True):
            assert torch.equal(new[other], old[other])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [1, 4])
def test_accepted_0_3_7(page_size: int, dtype: torch.dtype) -> None:
    """Scattered rows 0, 3 and 7 of 8, behind a prefix of 5, become entries 5, 6 and 7."""
    kv = PagedKV(
        (torch.arange(16.0).reshape(16, 1, 1).to(dtype),),
        (torch.arange(16.0).reshape(16, 1, 1).to(dtype),),
        torch.arange(16)[None],
        page_size,
    )
    layout = VerifyLayout(
        qo_indptr=torch.tensor([0, 8], dtype=torch.int32),
        kv_indptr=torch.tensor([0, 5], dtype=torch.int32),
        kv_indices=torch.arange(5),
        mask_indptr=torch.tensor([0, 104]),
        max_q_len=QLen(8),
        positions=5 + torch.arange(8),
        out_cache_loc=5 + torch.arange(8),
    )
    acceptance = Acceptance(
        torch.tensor([[0, 3, 7, -1]], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([9]),
    )
    commit = commit_kv(kv, layout, acceptance)
    assert commit.prefix_lens.tolist() == [8]
    assert commit.src.tolist() == [[5, 8, 12, -1]]
    if page_size == 1:
        assert kv.slot_table.tolist() == [[0, 1, 2, 3, 4, 5, 8, 12, 6, 7, 9, 10, 11, 13, 14, 15]]
        assert commit.dst.tolist() == [[5, 8, 12, -1]]
    else:
        assert kv.keys[0].float().flatten().tolist() == [0, 1, 2, 3, 4, 5, 8, 12, *range(8, 16)]
        assert commit.dst.tolist() == [[5, 6, 7, -1]]


@pytest.mark.parametrize(
    ("rows", "told"),
    [(8, "[5, 6, 7, 8, 9, 10, 11, 12];"), (9, "[5, 6, 7, 8, 9, 10, 11, 12, ...];")],
)
def test_a_refusal_tells_the_first_slots(rows: int, told: str) -> None:
    """Eight slots are told in full; of more, eight and that there are others."""
    tree = tree_of(parents=[[-1, *range(rows - 1)]], tokens=[list(range(rows))])
    layout = plan_verify(tree, torch.tensor([5]), torch.arange(20)[None])
    root = Acceptance(torch.tensor([[0]]).int(), torch.tensor([1]).int(), torch.tensor([9]))
    with pytest.raises(InputError) as caught:
        commit_kv(PagedKV((), (), torch.arange(20).flip(0)[None]), layout, root)
    assert f"out_cache_loc of request 0 is {told}" in str(caught.value)


def test_a_table_may_hold_more_requests() -> None:
    """Rows of the slot table behind the batch are left alone."""
    tree = tree_of(parents=[[-1, 0, 0]], tokens=[[0, 1, 2]])
    layout = plan_verify(tree, torch.tensor([5]), torch.arange(20)[None])
    accepted = Acceptance(torch.tensor([[0, 2]]).int(), torch.tensor([2]).int(), torch.tensor([9]))
    table = torch.arange(60).reshape(3, 20)
    commit = commit_kv(PagedKV((), (), table), layout, accepted)
    assert commit.src.tolist() == [[5, 7]]
    assert table[0, 5:8].tolist() == [5, 7, 6]
    assert torch.equal(table[1:], torch.arange(20, 60).reshape(2, 20))


def a_full_round() -> st.RoundCase:
    """A draft that the target accepts to its end, on pages of 4."""
    table = torch.arange(24)[None]
    case = st.RoundCase(
        torch.full((1, 3, 5), -2.0),
        torch.tensor([2]),
        ((1, 3),),
        Budget(7),
        None,
        st.SlotTable(table, 4, 24),
    )
    for depth, token in enumerate(case.target().greedy((1, 3, 2), 3)):
        case.draft_log_probs[0, depth, token] = -0.125
    return case


@given(st.round_cases(), hs.integers(1, 3))
@example(a_full_round(), 1)
def test_committed_kv_equals_the_linear_cache(case: st.RoundCase, rounds: int) -> None:
    """After rounds of a two-layer target the pools read, through the table, as linear decoding's.

    The values of layer 2 depend on what each row saw, so this also holds the mask to account.
    """
    target = case.target()
    contexts = [list(prompt) for prompt in case.prompts]
    roots, lens = case.root_token_ids, case.prefix_lens
    for _ in range(rounds):
        if int(lens.max()) + case.budget + 1 > target.slot_table.shape[1]:
            break
        done = verify_round(case.draft_log_probs, roots, lens, target, case.budget, case.topk)
        for b, context in enumerate(contexts):
            new = done.token_ids[b, : int(done.acceptance.num_accepted[b])].tolist()
            context += [int(roots[b]), *new[:-1]]
        roots, lens = done.acceptance.bonus, done.commit.prefix_lens
        assert lens.tolist() == [len(context) for context in contexts]
        for b, context in enumerate(contexts):
            slots = target.slot_table[b, : len(context)]
            for layer, expected in enumerate(target.linear(context)[0]):
                assert torch.equal(target.kv.values[layer][slots], expected)
                assert (target.kv.keys[layer][slots] == 0).all()


def test_a_layout_of_one_request_for_three_is_refused() -> None:
    """Both numbers of requests are told before anything is read."""
    tree = tree_of(parents=[[-1, 0]], tokens=[[0, 1]])
    layout = plan_verify(tree, torch.tensor([5]), torch.arange(20)[None])
    roots = Acceptance(
        torch.zeros(3, 1, dtype=torch.int32),
        torch.ones(3, dtype=torch.int32),
        torch.zeros(3).long(),
    )
    with pytest.raises(InputError, match="the layout has 1 requests, the acceptance 3"):
        commit_kv(PagedKV((), (), torch.arange(60).reshape(3, 20)), layout, roots)

"""Whole rounds against sequential decoding, and under everything that must not change the tokens."""

from dataclasses import replace

import torch
from hypothesis import example, given
from hypothesis import strategies as hs

from ddtree.invariants import strategies as st
from ddtree.invariants.exact_target import ExactTarget
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.contracts import Budget, QLen
from ddtree.spec.round import Round, verify_round
from ddtree.spec.sampling import Sampling
from ddtree.spec.softmax import log_softmax
from tests import oracles


def run(
    case: st.RoundCase,
    *,
    ragged: bool = False,
    sampling: Sampling | None = None,
    buffers: VerifyBuffers | None = None,
    target: ExactTarget | None = None,
) -> Round:
    """One round of a case, with a fresh target unless one is given."""
    return verify_round(
        case.draft_log_probs,
        case.root_token_ids,
        case.prefix_lens,
        case.target() if target is None else target,
        case.budget,
        case.topk,
        ragged=ragged,
        sampling=sampling,
        buffers=buffers,
    )


def emitted(done: Round, b: int) -> list[int]:
    """Request b's new tokens."""
    count = int(done.acceptance.num_accepted[b])
    tokens: list[int] = done.token_ids[b].tolist()
    assert tokens[count:] == [-1] * (len(tokens) - count)
    assert tokens[count - 1] == int(done.acceptance.bonus[b])
    return tokens[:count]


def all_emitted(done: Round) -> list[list[int]]:
    """Every request's new tokens."""
    return [emitted(done, b) for b in range(len(done.token_ids))]


def choose_token(
    target: ExactTarget, tokens: tuple[int, ...], sampling: Sampling, seed: int
) -> int:
    """The token after ``tokens``, decoded plainly: no tree, no mask, no cache, the oracle's numbers."""
    logits = target.linear(tokens)[1][-1]
    probs = oracles.truncated(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    first, second, _, _ = oracles.philox4x32((len(tokens) - 1, 0, 0, 0), key)
    uniform = ((first << 32 | second) >> 11) / 2**53
    total = 0.0
    for token, probability in enumerate(probs):
        total += probability
        if uniform < total:
            return token
    return max(token for token, probability in enumerate(probs) if probability > 0)


@hs.composite
def cases_and_samplings(draw: hs.DrawFn) -> tuple[st.RoundCase, Sampling]:
    """A round and how its target chooses; greedy half of the time."""
    case = draw(st.round_cases())
    greedy = hs.just(Sampling(temperature=0.0))
    return case, draw(greedy | st.samplings(case.draft_log_probs.shape[2]))


def large_case() -> st.RoundCase:
    """Two requests whose every node has several children, page size 4, the draft liked at depth 1."""
    case = st.RoundCase(
        torch.full((2, 3, 4), -1.5),
        torch.tensor([1, 2]),
        ((3, 1, 2, 0, 1), ()),
        Budget(16),
        None,
        st.SlotTable(torch.arange(63, -1, -1).reshape(2, 32), 4, 64),
    )
    for b, tokens in enumerate([(3, 1, 2, 0, 1, 1), (2,)]):
        for depth, token in enumerate(case.target().greedy(tokens, 3)):
            case.draft_log_probs[b, depth, token] = -0.5
    return case


@given(cases_and_samplings(), hs.booleans())
@example((large_case(), Sampling(temperature=0.0)), False)
def test_a_round_emits_what_sequential_decoding_emits(
    drawn: tuple[st.RoundCase, Sampling], ragged: bool
) -> None:
    """Accepted tokens and bonus are those of decoding one token at a time while the tree holds them."""
    case, sampling = drawn
    done = run(case, sampling=sampling, ragged=ragged)
    widths = done.layout.qo_indptr.diff().tolist()
    assert widths == (done.tree.num_nodes.tolist() if ragged else [case.budget + 1] * len(widths))
    target = case.target()
    for b, prompt in enumerate(case.prompts):
        real = int(done.tree.num_nodes[b])
        tokens, parents = done.tree.token_ids[b].tolist(), done.tree.parents[b].tolist()
        paths = set(oracles.token_paths(tokens, parents, real))
        context, seed = (*prompt, int(case.root_token_ids[b])), sampling.seeds(len(case.prompts))[b]
        reached, bonus = oracles.sequential(
            lambda path, context=context, seed=seed: choose_token(  # type: ignore[misc]
                target, (*context, *path), sampling, seed
            ),
            paths,
            case.draft_log_probs.shape[1],
        )
        assert emitted(done, b) == [*reached, bonus]


def test_the_large_case_accepts_whole_paths() -> None:
    """So that the properties above are not about bonus tokens alone."""
    assert [len(tokens) for tokens in all_emitted(run(large_case()))] == [4, 4]


@given(cases_and_samplings())
@example((large_case(), Sampling(temperature=0.0)))
def test_padding_changes_nothing(drawn: tuple[st.RoundCase, Sampling]) -> None:
    """With every candidate in the tree, budgets that only add padding rows give the same round."""
    case, sampling = drawn
    case = replace(case, topk=2, draft_log_probs=case.draft_log_probs[:, :3])
    room = case.slots.table.shape[1] - int(case.prefix_lens.max()) - 1
    done = run(replace(case, budget=Budget(room)), sampling=sampling)
    used = int(done.tree.num_nodes.max())
    for budget in {used - 1, min(used, room), min(used + 7, room), room}:
        for ragged in (False, True):
            padded = run(replace(case, budget=Budget(budget)), sampling=sampling, ragged=ragged)
            assert all_emitted(padded) == all_emitted(done)
            assert torch.equal(padded.acceptance.nodes, done.acceptance.nodes)
            assert torch.equal(padded.commit.prefix_lens, done.commit.prefix_lens)


@given(cases_and_samplings(), st.round_cases(), hs.booleans(), hs.data())
@example((large_case(), Sampling(temperature=0.0)), large_case(), True, None)
def test_buffer_reuse_changes_nothing(
    drawn: tuple[st.RoundCase, Sampling],
    earlier: st.RoundCase,
    ragged: bool,
    data: hs.DataObject | None,
) -> None:
    """Through larger buffers that another call used before, the round and the KV are the same."""
    case, sampling = drawn
    largest = (
        max(len(case.prompts), len(earlier.prompts)),
        max(case.budget, earlier.budget) + 1,
        max(int(case.prefix_lens.max()), int(earlier.prefix_lens.max())),
    )
    sizes = st.BufferSizes(*largest) if data is None else data.draw(st.buffer_sizes(*largest))
    spare = case.slots.num_slots  # a slot of the pool that is kept for padding
    case = replace(case, slots=replace(case.slots, num_slots=spare + 1))
    roomier = replace(earlier.slots, num_slots=max(earlier.slots.num_slots, spare) + 1)
    earlier = replace(earlier, slots=roomier)
    for pad_slot in (-1, spare):
        buffers = VerifyBuffers(sizes.max_batch, QLen(sizes.max_q_len), sizes.max_context, pad_slot)
        run(earlier, buffers=buffers)

        eager_target, target = case.target(), case.target()
        eager = run(case, sampling=sampling, ragged=ragged, target=eager_target)
        done = run(case, sampling=sampling, ragged=ragged, buffers=buffers, target=target)
        assert done.layout is buffers.layout
        assert all_emitted(done) == all_emitted(eager)
        for name in ("nodes", "num_accepted", "bonus"):
            assert torch.equal(getattr(done.acceptance, name), getattr(eager.acceptance, name)), (
                name
            )
        for name in ("prefix_lens", "src", "dst"):
            assert torch.equal(getattr(done.commit, name), getattr(eager.commit, name)), name
        assert torch.equal(target.slot_table, eager_target.slot_table)
        for new, old in zip(target.kv.values, eager_target.kv.values, strict=True):
            assert torch.equal(new[:spare].nan_to_num(-1), old[:spare].nan_to_num(-1))


@given(cases_and_samplings())
@example((large_case(), Sampling(temperature=0.0)))
def test_a_request_does_not_depend_on_its_batch(drawn: tuple[st.RoundCase, Sampling]) -> None:
    """Each request alone, and the batch in reverse, emit the same tokens."""
    case, sampling = drawn
    batch = len(case.prompts)
    seeds = sampling.seeds(batch)
    together = all_emitted(run(case, sampling=replace(sampling, seed=tuple(seeds))))
    for order in [[b] for b in range(batch)] + [list(range(batch))[::-1]]:
        part = replace(
            case,
            draft_log_probs=case.draft_log_probs[order],
            root_token_ids=case.root_token_ids[order],
            prompts=tuple(case.prompts[b] for b in order),
            slots=replace(case.slots, table=case.slots.table[order]),
        )
        done = run(part, sampling=replace(sampling, seed=tuple(seeds[b] for b in order)))
        assert all_emitted(done) == [together[b] for b in order]


@given(cases_and_samplings(), st.budgets(17))
@example((large_case(), Sampling(temperature=0.0)), Budget(1))
def test_text_does_not_depend_on_the_budget(
    drawn: tuple[st.RoundCase, Sampling], budget: Budget
) -> None:
    """Round after round, with a drafter that knows nothing, the text is that of plain decoding."""
    case, sampling = drawn
    prompt, root = case.prompts[0], int(case.root_token_ids[0])
    seed = sampling.seeds(1)[0]
    table = torch.arange(len(prompt) + 8 + budget)[None]
    target = ExactTarget([prompt], table, table.numel(), case.draft_log_probs.shape[2])
    text, lens = [root], case.prefix_lens[:1]
    while len(text) < 8:
        roots = torch.tensor(text[-1:])
        done = verify_round(
            case.draft_log_probs[:1], roots, lens, target, budget, sampling=sampling
        )
        text += emitted(done, 0)
        lens = done.commit.prefix_lens
    expected = [root]
    while len(expected) < len(text):
        expected.append(choose_token(target, (*prompt, *expected), sampling, seed))
    assert text == expected


@given(st.round_cases(), hs.floats(-3, 3, width=16))
def test_logits_give_the_round_of_their_log_probs(case: st.RoundCase, shift: float) -> None:
    """``from_logits`` takes log-softmax of the draft and changes nothing else."""
    logits = case.draft_log_probs + shift
    expected = run(replace(case, draft_log_probs=log_softmax(logits)))
    found = verify_round(
        logits, case.root_token_ids, case.prefix_lens, case.target(), case.budget, case.topk,
        from_logits=True,
    )  # fmt: skip
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.tree.scores, expected.tree.scores)

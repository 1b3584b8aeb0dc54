"""Every function of ``impl`` against the same function of ``spec``, on fresh inputs."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as hs

from ddtree import impl, spec
from ddtree.impl.rank import _group_size, ranked
from ddtree.impl.sampling import first_argmax, row_uniforms
from ddtree.impl.tree import MAX_HORIZON
from ddtree.spec import (
    Acceptance,
    Budget,
    DraftTree,
    InputError,
    QLen,
    Sampling,
    VerifyLayout,
    sampling,
)
from ddtree.spec.softmax import MAX_VOCAB, TILE
from tests.impl.cases import DEVICE, FORMS, FUNCTIONS, KINDS, Case, case, differences, moved, named

SIZES = {  # batch, horizon, vocab, budget
    "one node": (1, 1, 1, 1),
    "root alone": (3, 2, 5, 0),
    "nothing drafted": (2, 0, 7, 6),
    "budget 7": (2, 7, 13, 7),
    "a word and one": (1, 4, 19, 32),
    "few candidates": (2, 3, 3, 33),
    "many tokens": (1, 2, 521, 4),
}
LARGE = {
    "two words": (2, 15, 67, 64),
    "many requests": (33, 3, 13, 8),
    "many groups": (1, 7, 1531, 67),
    "deep": (1, 31, 9, 129),
    "many paths": (2, 9, 300, 300),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN and the largest integers: an unwritten output shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_impl_equals_spec(name: str, size: str) -> None:
    """Integers, masks, scores and moved KV are the reference's own; attention is within rounding."""
    seed = list(SIZES).index(size)
    kind = KINDS[seed % len(KINDS)]
    assert not differences(name, case(seed, kind, *SIZES[size]))


def no_requests() -> Case:
    """A call of no requests, which ``plan_verify`` refuses to lay out."""
    whole = case(5, "normal", 1, 3, 7, 5)
    made = {f.name: getattr(whole, f.name) for f in fields(whole)}
    made |= {name: value[:0] for name, value in made.items() if isinstance(value, torch.Tensor)}
    ends, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    made |= {
        "slot_table": whole.slot_table,  # it may have more rows than there are requests
        "tree": DraftTree(*(getattr(whole.tree, f.name)[:0] for f in fields(DraftTree))),
        "layout": VerifyLayout(ends, ends, none, ends.long(), QLen(0), none, none),
        "attention": (*(t[:0] for t in whole.attention[:3]), *whole.attention[3:]),
        "acceptance": Acceptance(
            *(getattr(whole.acceptance, f.name)[:0] for f in fields(Acceptance))
        ),
    }
    return Case(**made)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_of_no_requests_gives_what_the_reference_gives(name: str) -> None:
    """Tensors of no entries; a layout of it is refused, in the same sentence by both."""
    c = no_requests()
    if name != "plan_verify":
        assert not differences(name, c)
        return
    for package, given_to in ((spec, c), (impl, moved(c, DEVICE))):
        with pytest.raises(InputError, match="the tree has 0 requests; a verify pass has at least"):
            FUNCTIONS[name](package, given_to)


def test_masks_of_no_requests_and_what_buffers_hold_of_them() -> None:
    """Each form is as empty as it can be; buffers that held a call hold none any more."""
    c, whole = no_requests(), case(5, "normal", 1, 3, 7, 5)
    shapes = {"flat": [0], "packed": [0], "dense": [0, 1, 0, 0], "bits": [0, 0]}
    held = []
    for package, device in ((spec, "cpu"), (impl, DEVICE)):
        tree, layout = moved(c.tree, device), moved(c.layout, device)
        for form in FORMS:
            made = package.tree_mask(tree, layout, form)
            tensors = list(named("mask", made).values())
            assert list(tensors[0].shape) == shapes[form]
            assert form != "packed" or tensors[1].tolist() == [0]
            for to in FORMS:
                converted = package.convert_mask(made, layout, to)
                assert list(next(iter(named("mask", converted).values())).shape) == shapes[to]
        buffers = package.VerifyBuffers(2, QLen(6), 24, 99, device)
        full = moved(whole.tree, device), moved(whole.layout, device)
        buffers.fill(*full, package.tree_mask(*full, "flat"))
        buffers.fill(tree, layout, package.tree_mask(tree, layout, "flat"))
        held.append(
            named("layout", buffers.layout)
            | named("mask", buffers.mask)
            | {"token_ids": buffers.token_ids}
        )
    for name, expected in held[0].items():
        assert torch.equal(held[1][name].cpu(), expected), name
        assert (expected == (99 if name == "layout.out_cache_loc" else 0)).all(), name


@pytest.mark.parametrize("listed_from", [1, 999])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_every_kind_of_draft_are_equal(
    kind: str, listed_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties, missing candidates, zeros and scores beyond float32 leave trees bit-equal.

    So it is whether paths are listed and sorted (and popped where too many tie) or all popped.
    """
    monkeypatch.setattr("ddtree.impl.tree.LISTED_FROM", listed_from)
    c = case(7, kind, 2, 4, 33, 16)
    assert not differences("build_tree", c)
    assert not differences("build_tree from logits", c)


def test_a_budget_over_the_threshold_lists_its_paths() -> None:
    """A tree of more than one word of nodes, as launched by default."""
    assert not differences("build_tree", case(8, "bfloat16", 1, 6, 131, 99))


@pytest.mark.parametrize(("horizon", "budget"), [(0, 40), (MAX_HORIZON, 37)])
def test_the_shallowest_and_the_deepest_draft_give_the_references_trees(
    horizon: int, budget: int
) -> None:
    """Of no depth at all, and of as many as the kernels take, with budgets that list paths."""
    assert not differences("build_tree", case(4, "normal", 1, horizon, 2, budget))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_several_tiles_are_equal(kind: str) -> None:
    """Log-softmax sums tile by tile: rows of one tile more than full ones, and a budget that lists."""
    assert not differences("build_tree from logits", case(11, kind, 1, 2, 2 * TILE + 77, 40))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # poison is the same for all
@given(
    hs.integers(0, 2**32),
    hs.sampled_from([1, 2, 30, 257, TILE + 1]),
    hs.sampled_from([0.01, 1.0, 30.0, 3e4]),
    hs.sampled_from([-6e4, 0.0, 11.0]),
    hs.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    hs.integers(1, 9),
    hs.sampled_from([-torch.inf, torch.nan, torch.inf]),
)
def test_trees_of_logits_equal_the_reference(
    seed: int, vocab: int, scale: float, shift: float, dtype: torch.dtype, budget: int, wrong: float
) -> None:
    """Any scale, shift, dtype and share of -inf; NaN and +inf count as -inf here."""
    g = torch.Generator().manual_seed(seed)
    value = (torch.randn(2, 2, vocab, generator=g) * scale + shift).clamp(max=6e4).to(dtype)
    left_out = torch.rand(2, 2, vocab, generator=g) < 0.1
    roots = torch.tensor([3, 4])
    expected = spec.build_tree(
        value.masked_fill(left_out, -torch.inf), roots, Budget(budget), from_logits=True
    )
    found = impl.build_tree(
        value.masked_fill(left_out, wrong).to(DEVICE), roots.to(DEVICE), Budget(budget),
        from_logits=True,
    )  # fmt: skip
    for name, tensor in vars(expected).items():
        assert torch.equal(getattr(found, name).cpu(), tensor), name


@pytest.mark.parametrize("wrong", [0.5, torch.nan, torch.inf])
def test_what_is_no_log_prob_never_becomes_a_node(wrong: float) -> None:
    """The tree is that of -inf in its place."""
    c = case(5, "normal", 1, 2, 7, 6)
    draft, roots = c.draft_log_probs, c.root_token_ids
    left_out = torch.zeros_like(draft, dtype=torch.bool)
    left_out[0, 0, 2] = left_out[0, 1, 5] = True
    expected = spec.build_tree(draft.masked_fill(left_out, -torch.inf), roots, Budget(6))
    found = impl.build_tree(
        draft.masked_fill(left_out, wrong).to(DEVICE), roots.to(DEVICE), Budget(6)
    )
    for name, tensor in vars(expected).items():
        assert torch.equal(getattr(found, name).cpu(), tensor), name


@pytest.mark.parametrize("from_logits", [False, True])
def test_a_draft_may_be_a_part_of_a_larger_tensor(*, from_logits: bool) -> None:
    """Whatever its strides are; what lies between is no draft."""
    c = case(6, "normal", 2, 3, 9, 6)
    wide = torch.full((2, 4, 18), -0.01)
    wide[:, 1:, ::2] = c.draft_log_probs
    inner = torch.full((2, 4, 11), -0.01)
    inner[:, 1:, 2:] = c.draft_log_probs
    expected = spec.build_tree(
        c.draft_log_probs, c.root_token_ids, Budget(6), from_logits=from_logits
    )
    for part in (wide.to(DEVICE)[:, 1:, ::2], inner.to(DEVICE)[:, 1:, 2:]):
        found = impl.build_tree(
            part, c.root_token_ids.to(DEVICE), Budget(6), from_logits=from_logits
        )
        for name, tensor in vars(expected).items():
            assert torch.equal(getattr(found, name).cpu(), tensor), name


def test_groups_make_both_selections_smallest() -> None:
    """Of groups and in groups, as powers of two: at 64 of 151936 tokens 4096 groups and 64 * 64 tokens."""
    for vocab, kept, group in [
        (151936, 1, 256), (151936, 8, 128), (151936, 60, 64), (151936, 1024, 16),
        (5000, 8, 32), (100, 1, 8), (7, 300, 8),
    ]:  # fmt: skip
        assert _group_size(vocab, kept) == group, (vocab, kept)


def test_the_largest_vocabulary_of_logits_is_taken() -> None:
    """Its sums fit; a draft of no depth is not read."""
    draft = torch.zeros(1, device=DEVICE).expand(1, 0, MAX_VOCAB)
    values, ids = ranked(draft, 3, softmax=True)
    assert values.shape == ids.shape == (1, 0, 3)


def test_too_large_a_vocabulary_of_logits_is_refused() -> None:
    """Its sums might not fit; log-probs need none."""
    draft = torch.zeros(1, 1, 1, device=DEVICE).expand(1, 1, MAX_VOCAB + 1)
    with pytest.raises(spec.InputError, match=f"a row has {MAX_VOCAB + 1} logits"):
        impl.build_tree(draft, torch.zeros(1).long().to(DEVICE), Budget(1), from_logits=True)


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.95), (9, None), (3, 0.6), (None, None)])
def test_rows_that_keep_too_many_tokens_are_sampled_too(
    top_k: int | None, top_p: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the likeliest tokens alone do not decide, whole rows are cut: the same samples."""
    monkeypatch.setattr("ddtree.impl.sampling.TOP_P_KEPT", 4)
    monkeypatch.setattr("ddtree.impl.sampling.MAX_KEPT", 8)
    c = case(9, "normal", 2, 2, 19, 3)
    options = {"temperature": 1.3, "top_k": top_k, "top_p": top_p}
    assert not differences("accept_sampled", replace(c, options=options))


@pytest.mark.parametrize("seed", [5, 2**63 - 2, 2**64 - 3, (9, 2**63, 0), torch.tensor([7, -1, 5])])
def test_uniform_numbers_are_the_references(seed: Any) -> None:
    """Of every kind of seed, over requests that end in the middle of a block of rows."""
    q_lens = torch.tensor([100, 29, 7])
    ends = torch.cat([torch.zeros(1).long(), q_lens.cumsum(0)])
    positions = torch.randint(
        0, 2**33, (int(ends[-1]),), generator=torch.Generator().manual_seed(3)
    )
    layout = spec.VerifyLayout(
        ends.int(), torch.zeros(4).int(), torch.zeros(0).long(), q_lens.square().cumsum(0).roll(1),
        spec.QLen(100), positions, positions,
    )  # fmt: skip
    expected = sampling.row_uniforms(Sampling(seed=seed), layout, 3)
    found = row_uniforms(moved(Sampling(seed=seed), DEVICE), moved(layout, DEVICE), 3)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("vocab", [1, 3, 4099, 9000])
def test_the_argmax_of_rows_is_the_references(vocab: int) -> None:
    """Ties to the smallest id, in rows of one split and of several; no rows give none."""
    g = torch.Generator().manual_seed(vocab)
    rows = torch.randint(0, 4, (5, vocab), generator=g).float()
    rows[1] = -3.0
    rows[2, -1] = 9.0
    assert torch.equal(first_argmax(rows.to(DEVICE)).cpu(), sampling.first_argmax(rows))
    assert first_argmax(rows[:0].to(DEVICE)).shape == (0,)


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("kind", KINDS)
def test_impl_equals_spec_at_larger_sizes(name: str, size: str, kind: str) -> None:
    """The same where trees need several words, tiles and groups."""
    assert not differences(name, case(len(kind), kind, *LARGE[size]))


def test_a_difference_is_reported_with_its_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a bonus that is one too large is found."""
    c = case(3, "normal", 2, 3, 9, 8)

    def wrong(*args: object) -> spec.Acceptance:
        right = spec.accept_greedy(*args)  # type: ignore[arg-type]
        return replace(right, bonus=right.bonus + 1)

    monkeypatch.setattr(impl, "accept_greedy", wrong)
    lines = differences("accept_greedy", c)
    assert [line.split(":")[0] for line in lines] == ["acceptance.bonus[0]", "acceptance.bonus[1]"]


def test_a_small_difference_of_attention_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison within rounding can fail: scales that are taken for 1 % more are found."""
    c = case(3, "normal", 2, 3, 9, 8)

    def wrong(*args: Any, value_scale: torch.Tensor, **options: Any) -> Any:
        return spec.verify_attention(*args, value_scale=value_scale * 1.01, **options)

    monkeypatch.setattr(impl, "verify_attention", wrong)
    lines = differences("verify_attention", c)
    assert {line.split("[")[0] for line in lines} == {f"output by {form}" for form in FORMS}


def test_memory_is_poisoned() -> None:
    """What a launcher allocates does not hold a plausible value by luck."""
    like = torch.zeros(1)
    assert like.new_empty(3).isnan().all()
    assert (like.new_empty(3, dtype=torch.int32) == 2**31 - 1).all()

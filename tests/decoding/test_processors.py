"""Logits processors along each path of a tree: Transformers' own, and lossless."""

import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ddtree import spec
from ddtree.decoding import HFTarget, NGramDrafter, autoregressive, generate, loop
from ddtree.decoding.processors import process, process_tree
from ddtree.spec import BlockSize, Budget, InputError
from ddtree.spec import sampling as spec_sampling
from ddtree.spec.sampling import Sampling, target_distribution
from tests.decoding.tiny import VOCAB, prompt, tiny_model

PENALTY = transformers.RepetitionPenaltyLogitsProcessor(1.4)
NO_REPEAT = transformers.NoRepeatNGramLogitsProcessor(2)


def test_each_node_is_processed_with_its_own_path() -> None:
    """Every node of two trees is seen once, its context ends with its path; padding is left alone."""
    draft = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    tree = spec.build_tree(draft, torch.tensor([4, 5]), Budget(9), 2)
    tree.num_nodes[1] = 1  # the second request has its root alone
    slots = torch.arange(60).view(2, 30)
    layout = spec.plan_verify(tree, torch.tensor([2, 0]), slots)
    logits = torch.randn(20, VOCAB, dtype=torch.float64)
    kept = logits.clone()
    seen: list[list[int]] = []

    def tell(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.extend(input_ids.tolist())
        scores[:] = input_ids.sum(-1, keepdim=True)  # in place, as some of Transformers' own
        return scores

    found = process_tree([tell], [[8, 9, 4], [5]], tree, layout, logits)
    expected = {}
    for node in range(int(tree.num_nodes[0])):
        path, at = list[int](), node
        while at > 0:
            path.insert(0, int(tree.token_ids[0, at]))
            at = int(tree.parents[0, at])
        expected[node] = [8, 9, 4, *path]
    assert sorted(seen) == sorted([*expected.values(), [5]])
    for node, context in expected.items():
        assert found[node].eq(sum(context)).all()
    assert found[10].eq(5).all()
    assert torch.equal(found[11:], kept[11:])
    assert torch.equal(logits, kept)
    unused = process_tree([tell], [None, [5]], tree, layout, logits)
    assert torch.equal(unused[:10], kept[:10])


def test_a_processor_of_another_shape_is_refused() -> None:
    """Its name and both shapes."""
    with pytest.raises(InputError, match=r"function returned shape \[1\]; it was given \[2, 3\]"):
        process([lambda _ids, _scores: torch.zeros(1)], torch.zeros(2, 1).long(), torch.zeros(2, 3))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_text_is_that_of_transformers(kind: str) -> None:
    """``model.generate`` with a repetition penalty and forbidden bigrams, beside every budget."""
    model = tiny_model(kind, torch.float32)
    ids = prompt(9)
    expected = model.generate(
        ids[None],
        do_sample=False,
        max_new_tokens=24,
        repetition_penalty=1.4,
        no_repeat_ngram_size=2,
    )[0, 9:].tolist()
    target, both = HFTarget(model), (PENALTY, NO_REPEAT)
    plain = autoregressive(target, ids, max_new_tokens=24, processors=both)
    assert list(plain.token_ids) == expected
    for budget, topk in ((0, None), (7, 1), (16, 4), (32, None)):
        found = generate(
            target, NGramDrafter(VOCAB, 8), ids,
            budget=budget, topk=topk, max_new_tokens=24, processors=both,
        )  # fmt: skip
        assert list(found.token_ids) == expected
        assert found.margins == pytest.approx(plain.margins, abs=1e-3)
    without = generate(target, NGramDrafter(VOCAB, 8), ids, budget=7, max_new_tokens=24)
    assert list(without.token_ids) != expected


def test_sampled_text_is_that_of_plain_sampling() -> None:
    """One seed, processors, temperature, top-k and top-p: every budget gives the same tokens."""
    target = HFTarget(tiny_model("llama"))
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "sampling": Sampling(0.8, 12, 0.95, seed=3),
        "processors": (PENALTY, NO_REPEAT),
    }
    plain = autoregressive(target, prompt(9), **options)
    for budget in (0, 5, 16):
        found = generate(target, NGramDrafter(VOCAB, 8), prompt(9), budget=budget, **options)
        assert found.token_ids == plain.token_ids


class FixedDrafter:
    """Drafts the same block whatever the text is."""

    block_size = BlockSize(3)
    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, vocab: int) -> None:
        self.block = torch.randn(1, 2, vocab, generator=torch.Generator().manual_seed(4))

    def reset(self) -> None: ...

    def draft(self, token_ids: Tensor, features: Tensor | None = None) -> Tensor:
        return self.block.log_softmax(-1)


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (Sampling(0.7), ()),
        (Sampling(1.3, top_k=2), (PENALTY,)),
        (Sampling(1.0, top_p=0.8), (PENALTY,)),
        (Sampling(0.9), (NO_REPEAT, PENALTY)),
    ],
    ids=["temperature", "top-k, penalty", "top-p, penalty", "bigrams, penalty"],
)
def test_sampling_is_exact_by_enumeration(
    sampling: Sampling, processors: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all random numbers each text of three tokens comes exactly as often as the model says.

    The numbers of a position are cut into cells at every probability sum of every text before it.
    Within a cell no choice changes, so one run of the loop for each cell, weighted with its volume,
    is the whole distribution.
    """
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=3, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.6)
    target, ids = HFTarget(model.double()), torch.tensor([0, 2])

    def probs(text: tuple[int, ...]) -> Tensor:
        """What the model and its processors say of the next token."""
        whole = torch.cat([ids, torch.tensor(text, dtype=torch.int64)])[None]
        with torch.no_grad():
            logits = process(processors, whole, model(whole).logits[:, -1])
        return target_distribution(logits, sampling.temperature, sampling.top_k, sampling.top_p)[0]

    cells = []
    for length in range(3):
        texts = itertools.product(range(3), repeat=length)
        edges = torch.cat([probs(text).cumsum(0) for text in texts] + [torch.tensor([0.0, 1.0])])
        edges = edges.clamp(max=1).sort().values
        cells.append(
            [(float(a + b) / 2, float(b - a)) for a, b in edges.unfold(0, 2, 1) if b - a > 1e-9]
        )
    numbers: dict[int, float] = {}

    def uniforms(_seed: int, positions: Tensor) -> Tensor:
        return torch.tensor([numbers.get(int(p), 0.5) for p in positions], dtype=torch.float64)

    monkeypatch.setattr(spec_sampling, "position_uniforms", uniforms)
    monkeypatch.setattr(loop, "position_uniforms", uniforms)
    found: dict[tuple[int, ...], float] = {}
    rounds = set()
    for choice in itertools.product(*cells):
        numbers.update({1 + i: number for i, (number, _) in enumerate(choice)})
        run = generate(
            target, FixedDrafter(3), ids,
            budget=4, max_new_tokens=3, sampling=sampling, processors=processors,
        )  # fmt: skip
        volume = choice[0][1] * choice[1][1] * choice[2][1]
        found[run.token_ids] = found.get(run.token_ids, 0.0) + volume
        rounds.add(len(run.rounds))
    assert rounds == {1, 2}  # drafts were accepted and rejected
    for text in itertools.product(range(3), repeat=3):
        expected = float(probs(())[text[0]] * probs(text[:1])[text[1]] * probs(text[:2])[text[2]])
        assert found.get(text, 0.0) == pytest.approx(expected, abs=1e-7)

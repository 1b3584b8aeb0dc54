"""The Transformers target: a tree pass equals decoding one token at a time, and it knows its limits."""

from typing import Any

import pytest
import torch
import transformers

from ddtree.decoding import HFTarget, NGramDrafter, autoregressive, generate
from ddtree.spec import (
    Budget,
    InputError,
    QLen,
    VerifyBuffers,
    build_tree,
    plan_verify,
    tree_mask,
    verify_round,
)
from tests.decoding.tiny import CONFIGS, CONTEXT, VOCAB, prompt, tiny_model

KINDS = list(CONFIGS)
NEW = 30


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float64) for kind in KINDS), ("llama", torch.float32)]
)
def test_text_equals_plain_decoding(kind: str, dtype: torch.dtype) -> None:
    """Every budget and topk gives the tokens of plain decoding, in fewer passes."""
    target = HFTarget(tiny_model(kind, dtype))
    expected = autoregressive(target, prompt(9), max_new_tokens=NEW).token_ids
    fewest = NEW
    for budget in (0, 1, 7, 16, 17):
        for topk in (1, 4, None):
            drafter = NGramDrafter(VOCAB, block_size=8)
            found = generate(
                target, drafter, prompt(9), budget=budget, topk=topk, max_new_tokens=NEW
            )
            assert found.token_ids == expected, (budget, topk)
            fewest = min(fewest, len(found.rounds))
    assert fewest < NEW - 1  # trees were accepted: the equality above is not that of empty drafts


@pytest.mark.parametrize("kind", KINDS)
def test_reference_attention_equals_dense(kind: str) -> None:
    """Running the specification's attention in every layer gives the dense mask's logits."""
    model = tiny_model(kind)
    logits = [_tree_pass(HFTarget(model, attention=a)) for a in ("dense", "reference")]
    assert logits[0].abs().max() > 0.1
    assert torch.allclose(logits[0], logits[1], atol=1e-10, rtol=0)


@pytest.mark.parametrize("attention", ["dense", "reference"])
def test_fixed_buffers_equal_the_eager_pass(attention: Any) -> None:
    """Buffers for more requests, rows and context than the call has change no token."""
    target = HFTarget(tiny_model("llama"), attention=attention)
    buffers = VerifyBuffers(max_batch=3, max_q_len=QLen(20), max_context=CONTEXT)
    texts = [
        generate(
            target,
            NGramDrafter(VOCAB, 8),
            prompt(9),
            budget=16,
            topk=4,
            max_new_tokens=NEW,
            buffers=b,
        )
        for b in (None, buffers)
    ]
    assert texts[0].token_ids == texts[1].token_ids
    assert len(texts[0].rounds) == len(texts[1].rounds) < NEW - 1


@pytest.mark.parametrize("kind", KINDS)
def test_committed_cache_equals_the_linear_cache(kind: str) -> None:
    """After rounds with accepted branches the cache holds what a prefill of the text would hold."""
    target = HFTarget(tiny_model(kind))
    found = generate(
        target, NGramDrafter(VOCAB, 8), prompt(9), budget=17, topk=4, max_new_tokens=NEW
    )
    assert any(_left_the_first_rows(r.acceptance.nodes[0].tolist()) for r in found.rounds)
    text = torch.cat([prompt(9), torch.tensor(found.token_ids)])[: target.prefix_len]
    linear = HFTarget(target.model)
    linear.prefill(text)
    layers: Any = zip(target.cache.layers, linear.cache.layers, strict=True)
    for ours, theirs in layers:
        count = linear.prefix_len
        assert torch.allclose(ours.keys[:, :, :count], theirs.keys, atol=1e-10, rtol=0)
        assert torch.allclose(ours.values[:, :, :count], theirs.values, atol=1e-10, rtol=0)


def test_prefill_in_chunks_equals_one_prefill() -> None:
    """The chunk size of the prefill changes no logit."""
    model = tiny_model("llama")
    whole = HFTarget(model).prefill(prompt(50))
    for chunk in (1, 7, 49, 50):
        assert torch.allclose(HFTarget(model, prefill_chunk=chunk).prefill(prompt(50)), whole)


def test_prompt_of_one_token() -> None:
    """A prompt of a single token decodes like any other."""
    target = HFTarget(tiny_model("llama"))
    expected = autoregressive(target, prompt(1), max_new_tokens=NEW)
    found = generate(target, NGramDrafter(VOCAB, 8), prompt(1), budget=7, max_new_tokens=NEW)
    assert found.token_ids == expected.token_ids


def test_text_up_to_the_last_entry_of_the_context() -> None:
    """A text that fills the context exactly is decoded to its end; one token more is refused."""
    target = HFTarget(tiny_model("llama"), max_context=30)
    drafter = NGramDrafter(VOCAB, 8)
    expected = autoregressive(target, prompt(9), max_new_tokens=21)
    for budget in (7, 16, 63):
        found = generate(target, drafter, prompt(9), budget=budget, max_new_tokens=21)
        assert found.token_ids == expected.token_ids
    with pytest.raises(InputError, match=r"9 prompt tokens and 22 new ones make 31;.* holds 30"):
        generate(target, drafter, prompt(9), budget=7, max_new_tokens=22)
    with pytest.raises(InputError, match="max_context 129 is more than the model's 128"):
        HFTarget(target.model, max_context=129)


def test_bfloat16_is_greedy_under_the_verifiers_own_logits() -> None:
    """In bfloat16 each token is the argmax of the pass that verified it, margins never negative."""
    target = HFTarget(tiny_model("llama", torch.bfloat16))
    found = generate(target, NGramDrafter(VOCAB, 8), prompt(9), budget=16, max_new_tokens=NEW)
    text = torch.cat([prompt(9), torch.tensor(found.token_ids)])
    with torch.inference_mode():
        logits = target.model(text[None]).logits[0, 8:-1].float()
    chosen = logits.gather(1, text[9:, None])[:, 0]
    # bf16 has 8 bits: logits of either pass are off by up to 2**-8 of their size, twice for a margin
    assert (logits.amax(1) - chosen).max() <= 4 * logits.abs().max() * 2**-8


def test_features_are_the_hidden_states_of_the_committed_tokens() -> None:
    """Features come once for each committed entry, in order, and equal a plain pass's."""
    target = HFTarget(tiny_model("llama"))
    target.reset((0, 2))
    tokens = [*prompt(9).tolist(), int(target.prefill(prompt(9)).argmax())]
    features = [target.features()]
    for _ in range(6):
        draft = NGramDrafter(VOCAB, 8).draft(torch.tensor(tokens))
        root, prefix = torch.tensor(tokens[-1:]), torch.tensor([target.prefix_len])
        round_ = verify_round(draft, root, prefix, target, Budget(16), 4)
        tokens += [t for t in round_.token_ids[0].tolist() if t >= 0]
        features.append(target.features())
    found = torch.cat([f for f in features if f is not None])
    with torch.inference_mode():
        hidden = target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    assert torch.allclose(found, torch.cat([hidden[1][0], hidden[3][0]], dim=-1), atol=1e-10)


def test_layout_of_another_prefix_is_refused() -> None:
    """A layout made for another prefix is refused with both numbers."""
    target = HFTarget(tiny_model("llama"))
    target.prefill(prompt(9))
    with pytest.raises(InputError, match="prefix of 8 entries, the cache holds 9"):
        _pass(target, prefix_len=8)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MambaConfig(hidden_size=32, num_hidden_layers=2), "recurrent|mamba|linear"),
        (
            transformers.MistralConfig(
                hidden_size=32, intermediate_size=32, num_hidden_layers=2, sliding_window=8
            ),
            "DynamicSlidingWindowLayer|sliding_attention",
        ),
        (
            transformers.Qwen3NextConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_experts=2,
                intermediate_size=32,
                layer_types=["linear_attention", "full_attention"],
            ),
            "linear_attention",
        ),
        (
            transformers.GPTNeoConfig(
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
            ),
            "layers of type local",
        ),
        (transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4), "position_ids|ALiBi"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_that_cannot_verify_trees_are_refused(config: Any, reason: str) -> None:
    """A cache that cannot drop rejected nodes, or positions by row, are refused by name."""
    config.vocab_size = VOCAB
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(InputError, match=reason):
        HFTarget(model)


def test_an_encoder_decoder_is_refused() -> None:
    """An encoder-decoder model is refused by name."""
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, vocab_size=VOCAB)
        )
    with pytest.raises(InputError, match="T5ForConditionalGeneration is an encoder-decoder"):
        HFTarget(model)


def test_bad_arguments_are_refused() -> None:
    """Unknown attention, an empty prompt and tokens outside the vocabulary are refused."""
    model = tiny_model("llama")
    with pytest.raises(InputError, match="'dense' or 'reference'"):
        HFTarget(model, attention="flash")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="prompt is empty"):
        HFTarget(model).prefill(prompt(0))
    with pytest.raises(InputError, match=r"from 3 to 31; the vocabulary has 31"):
        HFTarget(model).prefill(torch.tensor([3, 31]))
    with pytest.raises(InputError, match=r"feature layers \[3\] outside the model's 3 layers"):
        HFTarget(model).reset((3,))


def _tree_pass(target: HFTarget) -> torch.Tensor:
    target.prefill(prompt(9))
    return _pass(target, prefix_len=9)


def _pass(target: HFTarget, prefix_len: int) -> torch.Tensor:
    draft = torch.log_softmax(torch.randn(1, 7, VOCAB, generator=torch.Generator()), -1)
    tree = build_tree(draft, torch.tensor([3]), Budget(16), 4)
    layout = plan_verify(tree, torch.tensor([prefix_len]), target.slot_table)
    return target.forward(tree, layout, tree_mask(tree, layout, "flat"))


def _left_the_first_rows(nodes: list[int]) -> bool:
    """Whether the accepted path skips rows, so that the commit had to move KV."""
    path = [n for n in nodes if n >= 0]
    return path != list(range(len(path)))

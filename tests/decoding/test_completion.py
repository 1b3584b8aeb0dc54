"""``ddtree.generate``: what a Transformers user calls."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import ddtree
from ddtree.decoding import NGramDrafter, Piece
from ddtree.decoding.completion import decoder
from ddtree.spec import InputError
from tests.decoding.test_published import PUBLISHED, target_of, write
from tests.decoding.tiny import VOCAB, tiny_model

PROMPTS = ["abcabcab", "z", "the cat the cat the", "qq"]


@pytest.fixture(scope="module")
def model() -> Any:
    """One tiny model for all."""
    return tiny_model("llama", torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a character; the last one is special, and there is a chat template."""
    letters = "abcdefghijklmnopqrstuvwxyz .:\n"
    words = {letter: i for i, letter in enumerate(letters)} | {"<end>": len(letters)}
    inner = Tokenizer(models.WordLevel(words, unk_token="."))  # noqa: S106 (a token of text)
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")  # noqa: S106
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] + '\n' }}{% endfor %}"
    )
    return wrapped


def transformers_text(model: Any, tokenizer: Any, prompt: str, **options: Any) -> list[int]:
    """The new tokens of ``model.generate``."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    tokens: list[int] = model.generate(ids, do_sample=False, **options)[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_texts_are_those_of_transformers(model: Any, tokenizer: Any, batch_size: int) -> None:
    """Greedy, with and without a penalty, one prompt at a time and several."""
    for penalty in (1.0, 1.3):
        found = ddtree.generate(
            model, tokenizer, PROMPTS, batch_size=batch_size, max_new_tokens=12,
            repetition_penalty=penalty,
        )  # fmt: skip
        for prompt, one in zip(PROMPTS, found, strict=True):
            expected = transformers_text(
                model, tokenizer, prompt, max_new_tokens=12, repetition_penalty=penalty
            )
            assert list(one.token_ids) == expected
            assert one.text == tokenizer.decode(expected, skip_special_tokens=True)
            assert list(one.prompt_ids) == tokenizer(prompt)["input_ids"]
            assert 1 + sum(len(each.new_token_ids) for each in one.rounds) == 12


def test_prompts_of_every_kind(model: Any, tokenizer: Any) -> None:
    """A text, ids, a tensor, a chat; alone or in a list; and nothing else."""
    options: dict[str, Any] = {"max_new_tokens": 4, "budget": 4}
    chat = [{"role": "user", "content": "hi"}]
    ids = tokenizer("abc")["input_ids"]
    same = ["abc", ids, torch.tensor(ids)]
    texts = [ddtree.generate(model, tokenizer, prompt, **options)[0].text for prompt in same]
    assert len(set(texts)) == 1
    mixed = ddtree.generate(model, tokenizer, [*same, chat], **options)
    assert [one.text for one in mixed[:3]] == texts
    (alone,) = ddtree.generate(model, tokenizer, chat, **options)
    assert alone.token_ids == mixed[3].token_ids
    assert tokenizer.decode(list(alone.prompt_ids)) == "user: hi\n"
    assert ddtree.generate(model, tokenizer, [], **options) == []
    for bad, reason in (
        ("", "the prompt is empty"),
        (["abc", ""], "prompt 1 is empty"),
        (["a", [10**6]], r"^prompt 1: token ids reach from 1000000 to 1000000; the vocabulary has"),
        ([10**6], "^token ids reach from 1000000"),
        (["a", [-1, 3]], "^prompt 1: token ids reach from -1 to 3"),
        (["a", [2**63]], "prompt 1 holds the token id 9223372036854775808, which fits no int64"),
        (["a", "b" * 125], r"^prompt 1: 125 prompt tokens and 4 new ones make 129"),
        ("ab\ud83d", r"the prompt is not UTF-8: character 2 is half a surrogate pair, U\+D83D"),
        (["abc", "\udcff"], "prompt 1 is not UTF-8: character 0 is the byte 0xff"),
        ([{"role": "user", "content": "\ud83d"}], "the prompt, a chat, is not UTF-8: character 6"),
        ([3.5], "the prompt is 3.5; expected"),
        (7, "prompts is 7; expected"),
        (
            [{"a": 1}],
            "message 0 of the prompt, a chat, holds 'a'; expected {'role': 'user', 'content'",
        ),
        ([[{"role": "user"}]], "chat template cannot write the prompt: UndefinedError"),
        (
            [torch.ones(2, 3).long()],
            r"the prompt is a Tensor of shape \[2, 3\].*several prompts are",
        ),
        (torch.ones(3), r"torch.float32; expected the token ids of one prompt, integers of shape"),
    ):
        with pytest.raises(InputError, match=reason):
            ddtree.generate(model, tokenizer, bad, **options)  # type: ignore[arg-type]


def test_pieces_add_up_to_the_texts(model: Any, tokenizer: Any) -> None:
    """What is streamed is what is returned, with stop strings that span rounds; seeds repeat."""
    whole = ddtree.generate(model, tokenizer, PROMPTS, max_new_tokens=30, temperature=0.8, seed=3)
    stop = [one.text[11:13] for one in whole[:2]]
    pieces: list[Piece] = []
    found = ddtree.generate(
        model, tokenizer, PROMPTS, max_new_tokens=30, temperature=0.8, seed=[3, 4, 5, 6],
        stop=stop, batch_size=2, budget=5, stream=pieces.append,
    )  # fmt: skip
    for i, (one, before) in enumerate(zip(found, whole, strict=True)):
        own = [piece for piece in pieces if piece.index == i]
        assert "".join(piece.text for piece in own) == one.text
        assert sum((piece.token_ids for piece in own), ()) == one.token_ids
        assert [piece.finish_reason for piece in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == one.finish_reason
        assert before.token_ids[: len(one.token_ids)] == one.token_ids
        cut = min((before.text.find(s) for s in stop if s in before.text), default=None)
        assert one.text == before.text[:cut]
    assert found[0].finish_reason == "stop_string"


def test_stop_tokens_are_the_models_own_or_those_given(model: Any, tokenizer: Any) -> None:
    """``generation_config`` says which; a given list takes its place."""
    (whole,) = ddtree.generate(model, tokenizer, "abc", max_new_tokens=20)
    stop = whole.token_ids[4]
    expected = whole.token_ids[: whole.token_ids.index(stop) + 1]
    model.generation_config.eos_token_id = stop
    try:
        (own,) = ddtree.generate(model, tokenizer, "abc", max_new_tokens=20)
        (none,) = ddtree.generate(model, tokenizer, "abc", max_new_tokens=20, stop_token_ids=())
    finally:
        model.generation_config.eos_token_id = None
    (given,) = ddtree.generate(model, tokenizer, "abc", max_new_tokens=20, stop_token_ids=[stop])
    assert own.token_ids == given.token_ids == expected
    assert own.finish_reason == given.finish_reason == "stop_token"
    assert none.token_ids == whole.token_ids


def test_drafters_by_name_and_by_hand(tokenizer: Any, model: Any, tmp_path: Path) -> None:
    """A checkpoint's folder, a drafter object; names that are none are refused."""
    config, raw = PUBLISHED["Qwen3-4B-DFlash-b16"]
    write(tmp_path, raw)
    published = target_of(config()).model
    published.generation_config.eos_token_id = None
    by_name, by_lookup = (
        ddtree.generate(published, tokenizer, [[5, 6, 5], [9]], drafter=drafter, max_new_tokens=4)
        for drafter in (tmp_path, NGramDrafter(published.config.vocab_size, 5))
    )
    assert [a.token_ids for a in by_name] == [b.token_ids for b in by_lookup]
    assert by_name[0].rounds[0].num_nodes == 17
    with pytest.raises(InputError, match="neither 'embedded' nor a folder nor"):
        ddtree.generate(model, tokenizer, "abc", drafter="no/such")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"budget": -1}, "budget is -1; the least is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; the least is 1"),
        ({"max_new_tokens": 200}, "3 prompt tokens and 200 new ones make 203; .* holds 128"),
        ({"batch_size": 0}, "batch_size is 0; the least is 1"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0.9}, "top_p cannot be given with temperature 0, which does not sample"),
        ({"top_k": 3}, "top_k cannot be given with temperature 0, which does not sample"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be above 0"),
        ({"seed": [1, 2]}, "2 seeds for 1 requests"),
        ({"stop": ""}, "a stop string is empty"),
        ({"stop": ["a", "\ud83d"]}, r"the stop string '\\ud83d' is not UTF-8: character 0 is half"),
        ({"stop": 5}, "stop is 5; expected a string or a list of them"),
        ({"stop": ["a", 1]}, "stop holds 1; expected .* go into stop_token_ids"),
        (
            {"logits_processor": lambda _, scores: scores},
            r"is a function; expected .*: \[processor\]",
        ),
        ({"drafter": None}, "drafter is None, without block_size, target_layer_ids, reset, draft"),
        ({"attention": "flash"}, "attention is 'flash'; it must be one of auto, dense, paged"),
        ({"attention": "paged"}, "layer 0 .* has a head_dim of 8"),
    ],
)
def test_bad_arguments_are_refused(
    model: Any, tokenizer: Any, options: dict[str, Any], reason: str
) -> None:
    """With the numbers."""
    with pytest.raises(InputError, match=reason):
        ddtree.generate(model, tokenizer, "abc", **options)


def test_the_paged_target_serves_it(tokenizer: Any) -> None:
    """The same texts by the kernels, in places that are fewer than the prompts."""
    wide = tiny_model("llama-64", torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"max_new_tokens": 5, "budget": 3, "batch_size": 2}
    attention = wide.config._attn_implementation
    dense = ddtree.generate(wide, tokenizer, PROMPTS[1:], attention="dense", **options)
    paged = ddtree.generate(wide.to(device), tokenizer, PROMPTS[1:], attention="paged", **options)
    assert [one.text for one in paged] == [one.text for one in dense]
    assert wide.config._attn_implementation == attention


def test_the_model_is_given_back_in_its_modes(model: Any, tokenizer: Any) -> None:
    """Module by module, where the decoding ends as where it is stopped or never begins."""

    def stopped(_: Piece) -> None:
        assert not model.training
        raise KeyboardInterrupt

    ends: tuple[tuple[Any, dict[str, Any]], ...] = (
        (None, {}),
        (None, {"attention": "dense", "batch_size": 1}),
        (KeyboardInterrupt, {"stream": stopped}),
        (InputError, {"drafter": "no-such-drafter"}),
        (InputError, {"attention": "paged"}),
        (InputError, {"seed": [1, 2, 3]}),
    )
    frozen = model.model.layers[1]
    try:
        model.train()
        frozen.eval()
        modes = [module.training for module in model.modules()]
        assert any(modes) and not all(modes)
        attention = model.config._attn_implementation
        for error, options in ends:
            with pytest.raises(error) if error else nullcontext():
                ddtree.generate(model, tokenizer, ["abc", "b"], max_new_tokens=2, **options)
            assert [module.training for module in model.modules()] == modes, options
            assert model.config._attn_implementation == attention, options
    finally:
        model.eval()


def test_text_only_grows(tokenizer: Any) -> None:
    """A tokenizer that would clean spaces up takes none back: what was streamed stands."""
    kept = tokenizer.clean_up_tokenization_spaces
    tokenizer.clean_up_tokenization_spaces = True
    try:
        assert decoder(tokenizer)(tokenizer("a .")["input_ids"]) == "a ."
    finally:
        tokenizer.clean_up_tokenization_spaces = kept


def test_invariants_hold_with_processors(tokenizer: Any, model: Any) -> None:
    """Debug mode looks at rounds whose logits were processed, greedy and sampled."""
    with ddtree.debug():
        for temperature in (0.0, 0.8):
            found = ddtree.generate(
                model, tokenizer, PROMPTS, max_new_tokens=6, temperature=temperature,
                repetition_penalty=1.3,
            )  # fmt: skip
            assert all(len(one.token_ids) == 6 for one in found)


def test_vocabulary_of_the_fixture_is_the_models(tokenizer: Any) -> None:
    """Every token that the model can say has a text."""
    assert len(tokenizer) == VOCAB

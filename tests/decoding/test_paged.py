"""The paged target: a batch's trees on one pool equal plain text at every node, round after round."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ddtree import impl
from ddtree.decoding import HFTarget, NGramDrafter, autoregressive, generate
from ddtree.decoding.capabilities import Caller
from ddtree.decoding.paged import PagedTarget
from ddtree.decoding.paged_attention import register
from ddtree.spec import Budget, DraftTree, InputError, QLen, Round, Sampling, TreeMask, VerifyLayout
from tests.decoding.tiny import COMMON, PAGED, VOCAB, WIDE, prompt, tiny_model
from tests.impl.cases import DEVICE

KINDS = list(PAGED)
HORIZON = 4
CONTEXT = 80


def close(found: Tensor, expected: Tensor) -> bool:
    """Logits here are about 10, weights large, and float32 sums come in another order."""
    return torch.allclose(found.cpu(), expected.cpu(), atol=1e-3, rtol=0)


def on_device(kind: str) -> Any:
    """A small model in float32 where the kernels run."""
    return tiny_model(kind, torch.float32).to(DEVICE)


class Plain:
    """The same weights without ddtree: one forward over a whole text, no cache, no tree."""

    def __init__(self, kind: str) -> None:
        self.model = tiny_model(kind, torch.float32)
        self.model.set_attn_implementation("eager")

    def logits(self, tokens: list[int]) -> Tensor:
        """``[len(tokens), vocab]``."""
        with torch.no_grad():
            found: Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return found

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The next ``count`` tokens."""
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(tokens) :]


class Batch:
    """Decodes several texts at once by draft trees of a target and holds every logit to ``Plain``."""

    def __init__(self, kind: str, prefixes: dict[int, int], **options: Any) -> None:
        self.plain = Plain(kind)
        self.target = PagedTarget(on_device(kind), max_context=CONTEXT, prefill_chunk=8, **options)
        self.texts: dict[int, list[int]] = {}
        self.generator = torch.Generator().manual_seed(5)
        for request, length in prefixes.items():
            self.begin(request, length)

    def begin(self, request: int, length: int, **options: Any) -> None:
        """Begin a request with a prompt of ``length``."""
        ids = prompt(length, seed=length)
        logits = self.target.prefill(request, ids, **options)
        assert close(logits, self.plain.logits(ids.tolist())[-1])
        self.texts[request] = [*ids.tolist(), int(logits.argmax())]

    def end(self, request: int) -> None:
        """End a request."""
        self.target.free(request)
        del self.texts[request]

    def draft(self) -> tuple[Tensor, Tensor]:
        """Log-probs in which the target's own continuation is seldom the first choice, and roots."""
        shape = (self.target.max_batch, HORIZON, VOCAB)
        drafts = torch.randn(shape, generator=self.generator)
        roots = torch.zeros(self.target.max_batch, dtype=torch.int64)
        for request, text in self.texts.items():
            roots[request] = text[-1]
            for depth, token in enumerate(self.plain.greedy(text, HORIZON - 1)):
                order = drafts[request, depth].sort(descending=True).values
                drafts[request, depth, token] = order[0] + (0.5 if depth % 2 else -0.01)
        return drafts.log_softmax(-1), roots

    def round(self, budget: int, *, ragged: bool = False, buffers: Any = None) -> Round:
        """Run a round; every real node's logits and every text's new tokens are plain decoding's."""
        drafts, roots = (tensor.to(DEVICE) for tensor in self.draft())
        recorder = Recorder(self.target)
        found = impl.verify_round(
            drafts, roots, self.target.prefix_lens, recorder, Budget(budget),
            ragged=ragged, buffers=buffers,
        )  # fmt: skip
        for b, text in self.texts.items():
            first = int(found.layout.qo_indptr[b])
            for node in range(int(found.tree.num_nodes[b])):
                path = path_to(found, b, node)
                expected = self.plain.logits(text + path)[-1]
                assert close(recorder.logits[first + node], expected), (b, node)
            new = [t for t in found.token_ids[b].tolist() if t >= 0]
            assert new == self.plain.greedy(text, len(new))
            text += new
            assert int(self.target.prefix_lens[b]) == len(text) - 1
        return found


class Recorder:
    """A target, with the logits of its last pass kept."""

    mask_form = "bits"

    def __init__(self, target: PagedTarget) -> None:
        self.target, self.slot_table, self.commit = target, target.slot_table, target.commit

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: TreeMask) -> Tensor:
        self.logits = self.target.forward(tree, layout, mask)
        return self.logits


def path_to(found: Round, b: int, node: int) -> list[int]:
    """The tokens from below the root to a node."""
    path: list[int] = []
    while node > 0:
        path.insert(0, int(found.tree.token_ids[b, node]))
        node = int(found.tree.parents[b, node])
    return path


@pytest.mark.parametrize(
    ("kind", "page_size"), [(kind, (1, 16)[i % 2]) for i, kind in enumerate(KINDS)]
)
def test_every_node_of_every_request_has_the_logits_of_plain_text(
    kind: str, page_size: int
) -> None:
    """Ragged prefixes, an unused place, two rounds: the second reads what the first committed."""
    batch = Batch(kind, {0: 11, 2: 1}, max_batch=3, page_size=page_size)
    rounds = [batch.round(9, ragged=page_size > 1) for _ in range(2)]
    nodes = [one.acceptance.nodes[b].tolist() for one in rounds for b in (0, 2)]
    assert any(path[1] > 1 for path in nodes)  # a commit moved KV or slots
    assert all(one.acceptance.num_accepted[1] == 0 for one in rounds)


def test_requests_come_and_go() -> None:
    """Places and pages of ended requests are used again, in between, without a trace."""
    batch = Batch("mistral-window", {}, max_batch=2, page_size=4, num_pages=25)
    batch.begin(0, 30, reserve=36)
    batch.begin(1, 5, reserve=21)
    batch.round(3)
    batch.end(0)
    batch.begin(0, 17, reserve=40)
    batch.round(5, ragged=True)
    batch.end(1)
    batch.begin(1, 2, reserve=60)
    batch.round(4)
    assert batch.target.num_free_pages == 0


def test_fixed_buffers() -> None:
    """A round through larger fixed buffers, flat mask included, changes nothing."""
    batch = Batch("llama-64", {0: 4, 1: 9}, max_batch=2)
    batch.round(4, buffers=impl.VerifyBuffers(3, QLen(8), CONTEXT, device=DEVICE))


def test_an_fp8_pool_rounds_the_prefix_alone() -> None:
    """Logits of a tree move by the rounding of e4m3 (3 bits), and by something."""
    model = on_device("llama-64")
    logits = []
    for kv_dtype in (None, torch.float8_e4m3fn):
        target = PagedTarget(model, kv_dtype=kv_dtype, page_size=4)
        target.prefill(0, prompt(5))
        drafts = torch.zeros(1, HORIZON, VOCAB, device=DEVICE).log_softmax(-1)
        recorder = Recorder(target)
        roots = torch.tensor([3], device=DEVICE)
        impl.verify_round(drafts, roots, target.prefix_lens, recorder, Budget(2))
        logits.append(recorder.logits)
    error = float((logits[0] - logits[1]).norm() / logits[0].norm())
    assert 1e-4 < error < 0.2
    with pytest.raises(InputError, match=r"kv_dtype is torch.float16; pools hold torch.float32"):
        PagedTarget(model, kv_dtype=torch.float16)


@pytest.mark.parametrize("budget", [0, 1, 16, 33])
def test_logits_equal_the_dense_target(budget: int) -> None:
    """Beside Transformers' own attention under the dense mask, for small and large trees."""
    model = on_device("llama-64")
    draft = torch.randn(1, HORIZON, VOCAB, generator=torch.Generator()).log_softmax(-1).to(DEVICE)
    logits = []
    for target in (HFTarget(model, max_context=60), PagedTarget(model)):
        if isinstance(target, HFTarget):
            target.prefill(prompt(9))
        else:
            target.begin(0, prompt(9), reserve=60)
        tree = impl.build_tree(draft, torch.tensor([3], device=DEVICE), Budget(budget))
        prefix = torch.tensor([9], device=DEVICE)
        layout = impl.plan_verify(tree, prefix, target.slot_table)
        mask: Any = impl.tree_mask(tree, layout, "flat")
        logits.append(target.forward(tree, layout, mask)[: int(tree.num_nodes[0])])
    assert len(logits[0]) == budget + 1
    assert close(*logits)


@pytest.mark.parametrize("kind", ["llama-64", "gemma2-softcap"])
def test_generate_gives_the_text_of_plain_decoding(kind: str) -> None:
    """One request through ``generate``, to the last entry of its context."""
    plain, ids = Plain(kind), prompt(9)
    target = PagedTarget(on_device(kind), max_context=30)
    found = generate(target, NGramDrafter(VOCAB, 6), ids, budget=6, max_new_tokens=21)
    assert list(found.token_ids) == plain.greedy(ids.tolist(), 21)
    assert len(found.rounds) < 20
    again = generate(target, NGramDrafter(VOCAB, 6), ids, budget=2, max_new_tokens=5)
    assert again.token_ids == found.token_ids[:5]


def test_samples_are_those_of_plain_decoding() -> None:
    """With one seed, draft trees and one token at a time sample the same text."""
    model = on_device("llama-64")
    target = PagedTarget(model, max_context=40)
    options: dict[str, Any] = {"max_new_tokens": 8, "sampling": Sampling(0.9, 9, 0.9, seed=4)}
    found = generate(target, NGramDrafter(VOCAB, 6), prompt(9), budget=4, **options)
    assert found.token_ids == autoregressive(HFTarget(model), prompt(9), **options).token_ids


def test_features_equal_the_dense_target_s() -> None:
    """Hidden states of committed entries, prompt in chunks included, come once and in order."""
    model = on_device("llama-64")
    features = []
    for target in (HFTarget(model), PagedTarget(model, prefill_chunk=4)):
        drafter = FeatureReader()
        generate(target, drafter, prompt(9), budget=6, max_new_tokens=8)
        features.append(torch.cat(drafter.seen))
    assert features[0].shape[0] > 12
    assert close(*features)


class FeatureReader(NGramDrafter):
    """A drafter that reads features and ignores them."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 6)
        self.target_layer_ids = (0, 1)
        self.seen: list[Tensor] = []

    def draft(self, token_ids: Tensor, features: Tensor | None = None) -> Tensor:
        if features is not None:
            self.seen.append(features)
        return super().draft(token_ids, None)


@pytest.mark.parametrize("kind", ["llama-64", "gemma2-softcap", "gpt-oss-sinks"])
def test_outside_a_pass_the_model_attends_as_before(kind: str) -> None:
    """A whole text, and one token after a cache, have the logits of Transformers' own attention."""
    model = on_device(kind)
    PagedTarget(model)
    assert model.config._attn_implementation == "ddtree"
    text = prompt(12).to(DEVICE)
    expected = Plain(kind).logits(text.tolist())
    with torch.no_grad():
        whole = model(input_ids=text[None], use_cache=True)
        one = model(input_ids=text[None, :11], use_cache=True)
        last, _ = Caller(model)(text[11:], one.past_key_values, keep=1)
    assert close(whole.logits[0], expected)
    assert close(last[-1], expected[-1])


def test_a_model_can_be_made_for_it() -> None:
    """Once registered, ``attn_implementation="ddtree"`` is a name like any other."""
    register()
    config = PAGED["llama-64"]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ddtree")
    assert PagedTarget(model.to(DEVICE), max_context=20).layers[1].head_dim == 64


def config_of(kind: str, **changes: Any) -> Any:
    """A configuration of WIDE's sizes."""
    return getattr(transformers, kind)(**{**WIDE, **changes})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("LlamaConfig"), r"layer 0 \(LlamaAttention\) has a head_dim of 8; .*64"),
        (
            config_of(
                "DeepseekV3Config",
                num_key_value_heads=4,
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=16,
                n_routed_experts=4,
                n_group=1,
                topk_group=1,
                num_experts_per_tok=1,
                first_k_dense_replace=2,
            ),
            r"layer 0 \(DeepseekV3Attention\) has keys of 24 and values of 16",
        ),
        (
            config_of("Qwen3NextConfig", layer_types=["full_attention", "linear_attention"]),
            "layers of type linear_attention .*layer 1",
        ),
        (
            config_of(
                "LlamaConfig",
                head_dim=64,
                rope_parameters={
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 64,
                },
            ),
            "rotary positions of type dynamic: the longest request",
        ),
        (transformers.MambaConfig(hidden_size=32, num_hidden_layers=2), "Mamba"),
        (
            transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4),
            "position_ids|ALiBi|registry",
        ),
        (
            transformers.FalconConfig(
                hidden_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB
            ),
            "does not take its attention from Transformers' registry",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_models_that_cannot_be_served_are_refused(config: Any, reason: str) -> None:
    """The message names the layer, and the model keeps the attention that it had."""
    config.vocab_size = VOCAB
    model = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE)
    before = model.config._attn_implementation
    with pytest.raises(InputError, match=reason):
        PagedTarget(model, max_context=20)
    assert model.config._attn_implementation == before


def test_a_model_that_drops_the_keyword_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No silent fall back to an attention that knows no tree."""
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    own = layer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("ddtree", None)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", forward)
    with pytest.raises(InputError, match="LlamaAttention does not hand the keyword 'ddtree'"):
        PagedTarget(on_device("llama-64"))


def test_pages_are_counted() -> None:
    """What does not fit is refused with the numbers, and nothing is changed."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE, head_dim=64)).eval()
    target = PagedTarget(
        model, max_batch=2, max_context=40, page_size=16, num_pages=4, device=DEVICE
    )
    with pytest.raises(InputError, match=r"the least is 0|request is -1"):
        target.prefill(-1, prompt(3))
    with pytest.raises(InputError, match="request is 2; the most is 1"):
        target.prefill(2, prompt(3))
    with pytest.raises(InputError, match="token_ids is a list; expected a tensor of token ids"):
        target.prefill(0, [1, 2])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="reserve is 41; the most is 40"):
        target.prefill(0, prompt(3), reserve=41)
    with pytest.raises(InputError, match="0 entries and 21 tokens more make 21; the context holds"):
        target.prefill(0, prompt(21), reserve=20)
    target.prefill(0, prompt(3), reserve=17)
    assert target.num_free_pages == 2
    with pytest.raises(InputError, match="40 entries take 3 pages of 16; 2 are free"):
        target.prefill(1, prompt(3))
    assert target.prefix_lens.tolist() == [3, -1] and target.num_free_pages == 2
    with pytest.raises(InputError, match="request 0 is held: reserve when it begins"):
        target.prefill(0, prompt(3), reserve=20)
    with pytest.raises(InputError, match=r"3 entries and 30 tokens more make 33; .* holds 32"):
        target.prefill(0, prompt(30))
    with pytest.raises(InputError, match="cannot rewind to 4 entries: 3 are held"):
        target.rewind(0, 4)
    target.free(0)
    target.free(0)
    assert target.num_free_pages == 4 and target.slot_table.eq(-1).all()
    with pytest.raises(InputError, match="max_context 129 is more than the model's 128"):
        PagedTarget(model, max_context=COMMON["max_position_embeddings"] + 1)
    with pytest.raises(InputError, match="page_size is 0; the least is 1"):
        PagedTarget(model, page_size=0)

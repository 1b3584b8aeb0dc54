"""The paged target on a GPU: half precision, no synchronisation, a round with its model in one graph."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from ddtree import impl
from ddtree.decoding.decoding import TIE_TOLERANCE
from ddtree.decoding.paged import PagedTarget
from ddtree.spec import Budget, DraftTree, Horizon, Round, TreeMask, VerifyLayout

pytestmark = pytest.mark.gpu

HORIZON = Horizon(7)
CONTEXT = 256
PREFIXES = {0: 70, 1: 3, 3: 33}
"""Requests of a batch of four: the third place is unused."""
COMMON: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONFIGS = {
    # SmolLM2-135M's sizes: 9 query heads on 3 KV heads of 64
    "smollm2": lambda: LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        **COMMON,
    ),
    "qwen3": lambda: Qwen3Config(
        vocab_size=20011,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        **COMMON,
    ),
    "gemma2": lambda: Gemma2Config(
        vocab_size=5003,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        sliding_window=16,
        **COMMON,
    ),
}
CASES = [
    ("smollm2", torch.bfloat16, 1, 64, False),
    ("qwen3", torch.float16, 16, 33, True),
    ("gemma2", torch.bfloat16, 1, 16, True),
]


def model_of(kind: str, dtype: torch.dtype) -> Any:
    """Random weights, large enough that the text depends on its context."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(weight, std=1.2 / weight.shape[1] ** 0.5)
    return model.eval()


def begun(model: Any, **options: Any) -> tuple[PagedTarget, dict[int, list[int]]]:
    """A target with the prompts of ``PREFIXES``, and each text with its first new token."""
    target = PagedTarget(model, max_batch=4, max_context=CONTEXT, **options)
    texts = {}
    for request, length in PREFIXES.items():
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(0, 5000, (length,), generator=generator)
        texts[request] = [*ids.tolist(), int(target.prefill(request, ids).argmax())]
    return target, texts


class Recorder:
    """A target, with the logits of its last pass kept."""

    mask_form = "bits"

    def __init__(self, target: PagedTarget) -> None:
        self.target, self.slot_table, self.commit = target, target.slot_table, target.commit

    def forward(self, tree: DraftTree, layout: VerifyLayout, mask: TreeMask) -> Tensor:
        self.logits = self.target.forward(tree, layout, mask)
        return self.logits


def greedy(model: Any, count: int) -> dict[int, list[int]]:
    """Each text's next tokens by rounds of the root alone."""
    target, texts = begun(model)
    for _ in range(count):
        found = impl.verify_round(
            torch.zeros(4, HORIZON, target.vocab_size, device="cuda"),
            roots_of(texts),
            target.prefix_lens,
            target,
            Budget(0),
        )
        for request, text in texts.items():
            text.append(int(found.acceptance.bonus[request]))
    return texts


def roots_of(texts: dict[int, list[int]]) -> Tensor:
    """The last token of each text."""
    return torch.tensor([texts[b][-1] if b in texts else 0 for b in range(4)], device="cuda")


def draft_of(texts: dict[int, list[int]], known: dict[int, list[int]], vocab: int) -> Tensor:
    """Log-probs in which the known continuation is likely, and not always the first choice."""
    generator = torch.Generator("cuda").manual_seed(sum(map(len, texts.values())))
    drafts = torch.randn(4, HORIZON, vocab, device="cuda", generator=generator)
    for request, text in texts.items():
        follows = known[request][len(text) : len(text) + HORIZON - 1]
        for depth, token in enumerate(follows):
            drafts[request, depth, token] = 12.0 - 0.1 * depth
            drafts[request, depth, (token + 1) % vocab] = 12.05
    return drafts.log_softmax(-1)


def extend(texts: dict[int, list[int]], found: Round) -> int:
    """Append a round's tokens; the most of them that one text got."""
    for request, text in texts.items():
        text += [t for t in found.token_ids[request].tolist() if t >= 0]
    return int(found.acceptance.num_accepted.max())


@pytest.mark.parametrize(("kind", "dtype", "page_size", "budget", "ragged"), CASES)
@torch.no_grad()
def test_captured_rounds_equal_eager_rounds(
    kind: str, dtype: torch.dtype, page_size: int, budget: int, ragged: bool
) -> None:
    """The model inside the graph: tokens, lengths, slots and logits of every replay."""
    model = model_of(kind, dtype)
    known = greedy(model, 40)
    captured, texts = begun(model, page_size=page_size)
    eager, _ = begun(model, page_size=page_size)
    recorders = Recorder(captured), Recorder(eager)
    vocab = captured.vocab_size
    graph = impl.RoundGraph(recorders[0], 4, HORIZON, vocab, Budget(budget), ragged=ragged)
    assert captured.prefix_lens.tolist() == eager.prefix_lens.tolist() == [70, 3, -1, 33]
    most = 0
    for _ in range(6):
        draft, roots = draft_of(texts, known, vocab), roots_of(texts)
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = impl.verify_round(
                draft, roots, eager.prefix_lens, recorders[1], Budget(budget), ragged=ragged
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = graph.replay(draft, roots, captured.prefix_lens)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(captured.prefix_lens, eager.prefix_lens)
        assert torch.equal(captured.slot_table, eager.slot_table)
        rows = int(found.layout.qo_indptr[-1])
        assert torch.equal(recorders[0].logits[:rows], recorders[1].logits[:rows])
        most = max(most, extend(texts, found))
    assert most > 3
    for request, text in texts.items():
        pairs = list(zip(text, known[request], strict=False))
        parted = next((i for i, (found, other) in enumerate(pairs) if found != other), None)
        if parted is not None:  # at a tie, or not at all
            so_far = torch.tensor([text[:parted]], device="cuda")
            found, other = model(so_far).logits[0, -1].double()[list(pairs[parted])]
            assert abs(found - other) < TIE_TOLERANCE[dtype], (request, parted)


@pytest.mark.parametrize(("kind", "dtype", "page_size", "budget", "ragged"), CASES)
@torch.no_grad()
def test_logits_are_as_close_to_float32_as_the_dense_target_s(
    kind: str, dtype: torch.dtype, page_size: int, budget: int, ragged: bool
) -> None:
    """Every node of every request against plain text in float32; the dense pass has its rounding too."""
    model = model_of(kind, dtype)
    target, texts = begun(model, page_size=page_size)
    recorder = Recorder(target)
    found = impl.verify_round(
        draft_of(texts, texts, target.vocab_size), roots_of(texts), target.prefix_lens, recorder,
        Budget(budget), ragged=ragged,
    )  # fmt: skip
    wide = model_of(kind, torch.float32)
    wide.load_state_dict({name: w.float() for name, w in model.state_dict().items()})
    wide.set_attn_implementation("eager")
    rows = [(b, node) for b in texts for node in range(int(found.tree.num_nodes[b]))][::7]
    paths = [texts[b] + path_to(found, b, node) for b, node in rows]
    exact = torch.stack([last_logits(wide, path) for path in paths])
    dense = torch.stack([last_logits(model, path) for path in paths])
    paged = torch.stack([recorder.logits[found.layout.qo_indptr[b] + node] for b, node in rows])
    errors = [float((one.float() - exact).norm() / exact.norm()) for one in (paged, dense)]
    print(f"{kind} {dtype}: paged {errors[0]:.2e}, dense {errors[1]:.2e} of the logits' norm")
    assert errors[0] < 1.5 * errors[1] + 1e-3


def last_logits(model: Any, text: list[int]) -> Tensor:
    """Logits after a text, by the model's own attention."""
    ids = torch.tensor([text], device="cuda")
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits


def path_to(found: Round, b: int, node: int) -> list[int]:
    """The tokens from below the root to a node."""
    path: list[int] = []
    while node > 0:
        path.insert(0, int(found.tree.token_ids[b, node]))
        node = int(found.tree.parents[b, node])
    return path

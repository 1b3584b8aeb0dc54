# ruff: noqa: E501 (a case and its message stand on one line, as a table)
"""Bad input to the launchers: an InputError with the numbers, before anything is launched.

Only what the host knows is refused here, as sizes and strides; what lies on the device is trusted.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree import impl, spec
from ddtree.impl.commit import keep_accepted, move_rows
from ddtree.impl.layers import add_norm, embed_norm, write_context
from ddtree.impl.layout import plan_blocks, row_inputs
from ddtree.impl.products import norm_gate, norm_heads, product_add
from ddtree.impl.record import pack_record
from ddtree.impl.sampling import first_argmax, row_uniforms
from ddtree.impl.tree import MAX_HORIZON
from ddtree.spec import Budget, Horizon, InputError, QLen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# One good call, from which each bad one differs in one thing: two requests, prefixes 5 and 3,
# budget 3, horizon 2, vocab 3.
DRAFT = torch.full((2, 2, 3), 1 / 3, device=DEVICE).log()
ROOTS = torch.tensor([1, 2], device=DEVICE)
LENS = torch.tensor([5, 3], dtype=torch.int32, device=DEVICE)
TABLE = torch.arange(24, device=DEVICE).reshape(2, 12)
_TREE = spec.build_tree(DRAFT.cpu(), ROOTS.cpu(), Budget(3))
_LAYOUT = spec.plan_verify(_TREE, LENS.cpu(), TABLE.cpu())


def on_device(made: Any) -> Any:
    """A contract object with its tensors on the device."""
    return replace(
        made, **{k: v.to(DEVICE) for k, v in vars(made).items() if isinstance(v, Tensor)}
    )


def first_of(layout: spec.VerifyLayout, batch: int) -> spec.VerifyLayout:
    """A layout's first requests, in its rows."""
    names = ("qo_indptr", "kv_indptr", "mask_indptr")
    indptrs: dict[str, Any] = {name: getattr(layout, name)[: batch + 1] for name in names}
    return replace(layout, **indptrs)


TREE, LAYOUT = on_device(_TREE), on_device(_LAYOUT)
ACCEPTANCE = on_device(
    spec.accept_greedy(_TREE, torch.zeros(8, dtype=torch.int64), _LAYOUT, Horizon(2))
)
ONE_REQUEST = first_of(LAYOUT, 1)
ONE_TREE = on_device(spec.build_tree(DRAFT[:1].cpu(), ROOTS[:1].cpu(), Budget(3)))
SMALL_TREE = on_device(spec.build_tree(DRAFT.cpu(), ROOTS.cpu(), Budget(2)))
ONE_ACCEPTANCE = spec.Acceptance(*(part[:1] for part in vars(ACCEPTANCE).values()))
BITS, FLAT, PACKED, DENSE = (
    on_device(spec.tree_mask(_TREE, _LAYOUT, form)) for form in ("bits", "flat", "packed", "dense")
)
H = Horizon(2)
IDS = torch.zeros(8, dtype=torch.int64, device=DEVICE)
LOGITS = torch.zeros(8, 3, device=DEVICE)
UNIFORMS = torch.zeros(8, dtype=torch.float64, device=DEVICE)


def draft(**changed: Any) -> Callable[[], object]:
    """A call of build_tree."""
    good: dict[str, Any] = {
        "draft_log_probs": DRAFT,
        "root_token_ids": ROOTS,
        "budget": 3,
        "topk": None,
    }
    return lambda: impl.build_tree(**(good | changed))


def plan(**changed: Any) -> Callable[[], object]:
    """A call of plan_verify."""
    good: dict[str, Any] = {"tree": TREE, "prefix_lens": LENS, "slot_table": TABLE}
    return lambda: impl.plan_verify(**(good | changed))


def choose(**changed: Any) -> Callable[[], object]:
    """A call of accept_sampled."""
    good: dict[str, Any] = {
        "tree": TREE, "target_logits": LOGITS, "layout": LAYOUT, "horizon": H, "uniforms": UNIFORMS,
    }  # fmt: skip
    return lambda: impl.accept_sampled(**(good | changed))


def convert(mask: Any) -> Callable[[], object]:
    """A call of convert_mask."""
    return lambda: impl.convert_mask(mask, LAYOUT, "flat")


def query(rows: int) -> Tensor:
    """Query rows of one head, and keys and values too."""
    return pool(rows, 1, 64)


def attend(**changed: Any) -> Callable[[], object]:
    """A call of verify_attention."""
    good: dict[str, Any] = {
        "query": query(8), "key": query(8), "value": query(8),
        "key_pool": pool(24, 1, 64), "value_pool": pool(24, 1, 64), "layout": LAYOUT, "mask": BITS,
    }  # fmt: skip
    return lambda: impl.verify_attention(**(good | changed))


def replay(**changed: Any) -> Callable[[], object]:
    """A replay of a graph whose capture, which takes a GPU, is left out: refusals come before it."""
    graph = impl.RoundGraph.__new__(impl.RoundGraph)
    graph.draft_log_probs, graph.root_token_ids, graph.prefix_lens = DRAFT, ROOTS, LENS
    good = {"draft_log_probs": DRAFT, "root_token_ids": ROOTS, "prefix_lens": LENS}
    return lambda: graph.replay(**(good | changed))


def pool(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A pool of zeros."""
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def keep(
    layout: spec.VerifyLayout = LAYOUT, acceptance: spec.Acceptance = ACCEPTANCE, **changed: Any
) -> Callable[[], object]:
    """A call of commit_kv on pages of 4 slots."""
    good: dict[str, Any] = {
        "keys": (pool(24, 1, 2),),
        "values": (pool(24, 1, 2),),
        "slot_table": TABLE,
        "page_size": 4,
    }
    return lambda: impl.commit_kv(spec.PagedKV(**(good | changed)), layout, acceptance)


def begin(**changed: Any) -> Callable[[], object]:
    """A call of plan_blocks: two places, blocks of three tokens."""
    good: dict[str, Any] = {
        "prefix_lens": LENS, "limits": LENS, "slot_table": TABLE, "roots": ROOTS,
        "token_ids": torch.zeros(2, 3, dtype=torch.int64, device=DEVICE),
    }  # fmt: skip
    return lambda: plan_blocks(**(good | changed))


def record(**changed: Any) -> Callable[[], object]:
    """A call of pack_record."""
    good = {"tree": TREE, "layout": LAYOUT, "acceptance": ACCEPTANCE, "logits": LOGITS}
    return lambda: pack_record(**(good | changed))


def move(*pools: Tensor, **changed: Tensor) -> Callable[[], object]:
    """A call of move_rows."""
    good = {"prefix_lens": LENS, "src": TABLE[:, :2].clone(), "dst": TABLE[:, 1:3].clone()}
    return lambda: move_rows(list(pools), spec.Commit(**(good | changed)))


def normed(**changed: Any) -> Callable[[], object]:
    """A call of add_norm: two rows of three numbers."""
    good: dict[str, Any] = {"x": pool(2, 3), "residual": pool(2, 3), "weight": pool(3), "eps": 0.1}
    return lambda: add_norm(**(good | changed))


def looked_up(**changed: Any) -> Callable[[], object]:
    """A call of embed_norm: two requests of three tokens."""
    good: dict[str, Any] = {
        "table": pool(5, 3), "token_ids": TABLE[:, :3] % 5, "starts": LAYOUT.qo_indptr, "num_rows": 8,
        "weight": pool(3), "eps": 0.1,
    }  # fmt: skip
    return lambda: embed_norm(**(good | changed))


def context(**changed: Any) -> Callable[[], object]:
    """A call of write_context: two rows in one layer, with one head of 6 numbers."""
    good: dict[str, Any] = {
        "rows": pool(1, 2, 12), "rope": (pool(9, 6), pool(9, 6)), "positions": ROOTS, "k_norms": pool(1, 6),
        "eps": 0.1, "pools": pool(1, 2, 4, 1, 6), "slots": ROOTS,
    }  # fmt: skip
    return lambda: write_context(**(good | changed))


def few_heads(**changed: Any) -> Callable[[], object]:
    """A call of norm_heads: two rows of three numbers, two heads of queries and one of keys."""
    good: dict[str, Any] = {
        "x": pool(2, 3), "norm": pool(3), "eps": 0.1, "weight": pool(24, 3), "bias": pool(24),
        "rope": (pool(9, 6), pool(9, 6)), "positions": ROOTS, "heads": (2, 1), "norms": (pool(6), None),
        "head_eps": 0.1,
    }  # fmt: skip
    return lambda: norm_heads(**(good | changed))


def few_added(**changed: Any) -> Callable[[], object]:
    """A call of product_add: two rows of three numbers, four outputs."""
    good: dict[str, Any] = {
        "x": pool(2, 3), "weight": pool(4, 3), "bias": pool(4), "residual": pool(2, 4),
    }  # fmt: skip
    return lambda: product_add(**(good | changed))


CASES: list[tuple[Callable[[], object], str]] = [
    (draft(budget=-1), "budget is -1; the least is 0, a tree of the root alone"),
    (draft(topk=0), "topk is 0; the least is 1, a chain"),
    (draft(draft_log_probs=DRAFT[0]), "draft_log_probs has shape [2, 3]; expected [batch, horizon, vocab]"),
    (draft(draft_log_probs=DRAFT[:, :, :0]), "draft_log_probs has an empty vocabulary"),
    (draft(root_token_ids=ROOTS[:1]), "root_token_ids has shape [1]; expected [2]"),
    *((draft(budget=bad), f"budget is {told}; expected a whole number") for bad, told in ((1.5, "1.5"), (None, "None"), (True, "True"), (torch.tensor(3), "a Tensor of shape []"))),
    (draft(topk=2.0), "topk is 2.0; expected a whole number"),
    (draft(from_logits=1), "from_logits is 1; expected True or False"),
    (draft(draft_log_probs=DRAFT.tolist()), "draft_log_probs is a list; expected a tensor"),
    (draft(draft_log_probs=DRAFT.long()), "draft_log_probs has dtype torch.int64; expected torch.float32 or"),
    (draft(root_token_ids=ROOTS.float()), "root_token_ids has dtype torch.float32; expected torch.int32 or torch.int64"),
    (draft(budget=1025), "budget is 1025 and horizon 2; the kernels are made for at most 1024 and 35"),
    (draft(draft_log_probs=pool(2, MAX_HORIZON + 1, 3)), f"budget is 3 and horizon {MAX_HORIZON + 1}; the kernels are made for"),
    (plan(tree=replace(TREE, **{name: part[:0] for name, part in vars(TREE).items()})), "the tree has 0 requests"),
    (plan(prefix_lens=LENS[:1]), "prefix_lens has shape [1]; expected [2]"),
    (plan(slot_table=TABLE[0]), "slot_table has shape [12]; expected [2, max_context]"),
    (plan(slot_table=TABLE[:1]), "slot_table has shape [1, 12]; expected [2, max_context]"),
    (plan(slot_table=TABLE.T.contiguous().T), "slot_table has strides (1, 2); its entries must lie side by side"),
    (plan(slot_table=TABLE[:, :1].expand(2, 12)), "slot_table has strides (12, 0); its entries must lie side by side"),
    (plan(q_lens=LENS[:1]), "q_lens has shape [1]; expected [2]"),
    (plan(tree=None), "tree is None; expected DraftTree"),
    (plan(tree=replace(TREE, depths=TREE.depths[:, :3])), "DraftTree.token_ids has 2 requests of 4 rows; the shapes of others are {'parents': [2, 4], 'depths': [2, 3], 'num_nodes': [2]}"),
    (plan(tree=replace(TREE, num_nodes=TREE.num_nodes[:1])),  "DraftTree.token_ids has 2 requests of 4 rows; the shapes of others are {'parents': [2, 4], 'depths': [2, 4], 'num_nodes': [1]}"),
    (plan(prefix_lens=LENS.float()), "prefix_lens has dtype torch.float32; expected torch.int8 or"),
    (plan(q_lens=LENS.float()), "q_lens has dtype torch.float32; expected torch.int8 or"),
    (plan(slot_table=TABLE.double()), "slot_table has dtype torch.float64; expected torch.int32 or torch.int64"),
    (plan(slot_table=torch.empty(2, 2**30, dtype=torch.int64, device="meta")), "2 requests of 1073741824 entries and 4 rows overflow int32's 2147483647: split the batch"),
    (lambda: impl.tree_mask(TREE, ONE_REQUEST), "the layout has 1 requests, the tree 2"),
    (lambda: impl.tree_mask(SMALL_TREE, LAYOUT), "the layout has max_q_len 4; its tree has 3 rows"),
    (lambda: impl.tree_mask(TREE, None), "layout is None; expected VerifyLayout"),  # type: ignore[call-overload]
    (lambda: impl.tree_mask(TREE, replace(LAYOUT, kv_indptr=LENS)), "VerifyLayout.qo_indptr has 3 entries, kv_indptr 2, mask_indptr 3"),
    (lambda: impl.tree_mask(TREE, replace(LAYOUT, positions=LAYOUT.positions[:7])), "VerifyLayout.positions has 7 rows, out_cache_loc 8"),
    (lambda: impl.tree_mask(TREE, LAYOUT, "bit"), "form is 'bit'; known are"),  # type: ignore[call-overload]
    (convert(spec.BitMask(BITS.words[:7])), "bit mask has shape [7, 1]; the layout has 8 query rows"),
    (convert(spec.BitMask(BITS.words[:, :0])), "bit mask has 0 words a row; max_q_len 4 needs 1"),
    (convert(spec.DenseMask(DENSE.bias[:1])), "dense mask has 1 requests; the layout has 2"),
    (convert(spec.DenseMask(DENSE.bias[..., :3])), "dense mask has 3 columns and 4 rows a request"),
    (convert(replace(PACKED, byte_indptr=PACKED.byte_indptr[:2])), "packed mask has 1 requests; the layout has 2"),
    (convert(spec.FlatMask(IDS.int())), "FlatMask.allowed has dtype torch.int32; expected torch.bool"),
    (convert(LAYOUT), "mask is a VerifyLayout; expected FlatMask or"),
    (lambda: impl.convert_mask(BITS, LAYOUT, "bit"), "form is 'bit'; known are"),  # type: ignore[call-overload]
    (attend(query=query(7)), "key has 8 rows, query 7"),
    (attend(query=query(7), key=query(7), value=query(7)), "query has shape [7, 1, 64]; the layout has 8 query rows"),
    (attend(mask=spec.BitMask(BITS.words[:7])), "bit mask has shape [7, 1]; the layout has 8 query rows"),
    (lambda: impl.VerifyBuffers(2, QLen(4), 5, device=DEVICE).fill(ONE_TREE, LAYOUT, FLAT), "the layout has 2 requests, the tree 1"),
    (lambda: impl.VerifyBuffers(2, QLen(4), 5, device=DEVICE).fill(SMALL_TREE, LAYOUT, FLAT), "the layout has max_q_len 4; its tree has 3 rows"),
    (lambda: row_inputs(ONE_TREE, LAYOUT, 0), "the layout has 2 requests, the tree 1"),
    (lambda: impl.accept_greedy(TREE, IDS, LAYOUT, Horizon(-1)), "horizon is -1; the least is 0"),
    (lambda: impl.accept_greedy(TREE, IDS, first_of(LAYOUT, 0), H), "the layout has 0 requests, the tree 2"),
    (lambda: impl.accept_greedy(TREE, IDS, ONE_REQUEST, H), "the layout has 1 requests, the tree 2"),
    (lambda: impl.accept_greedy(TREE, IDS[None], LAYOUT, H), "target_ids has shape [1, 8]; expected [rows]"),
    (lambda: impl.accept_greedy(TREE, IDS[:5], LAYOUT, H), "target_ids has shape [5]; the layout has 8 query rows"),
    (lambda: impl.accept_greedy(TREE, IDS.float(), LAYOUT, H), "target_ids has dtype torch.float32; expected torch.int32 or torch.int64"),
    (lambda: impl.accept_greedy(ONE_TREE, IDS, LAYOUT, H), "the layout has 2 requests, the tree 1"),
    (choose(target_logits=LOGITS[:7], uniforms=UNIFORMS[:7]), "target_logits has shape [7, 3]; the layout has 8 query rows"),
    (choose(uniforms=UNIFORMS.float()), "uniforms has dtype torch.float32; expected torch.float64"),
    (choose(temperature=None), "temperature is None; expected a finite number"),
    (choose(top_k=1.5), "top_k is 1.5; expected a whole number"),
    (replay(draft_log_probs=DRAFT[:1]), "draft_log_probs has shape [1, 2, 3]; expected [2, 2, 3]"),
    (replay(prefix_lens=LENS[:1]), "prefix_lens has shape [1]; expected [2]"),
    (lambda: impl.verify_round(DRAFT, ROOTS, LENS, None, Budget(3)), "target is None; expected Target"),  # type: ignore[arg-type]
    (choose(target_logits=LOGITS[0]), "target_logits has shape [3]; expected [rows, vocab]"),
    (choose(uniforms=UNIFORMS[:7]), "uniforms has shape [7]; target_logits has 8 rows"),
    (choose(temperature=-0.5), "temperature is -0.5; the least is 0, greedy"),
    (choose(temperature=float("inf")), "temperature is inf; expected a finite number"),
    (choose(top_k=0), "top_k is 0; the least is 1"),
    (choose(top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
    (choose(top_p=1.5), "top_p is 1.5; it must be above 0 and at most 1"),
    (choose(target_logits=pool(3, 8).T), "logits have strides (1, 8); a row's logits must lie side by side"),
    (choose(target_logits=LOGITS[:, :0]), "logits have shape [8, 0]; expected [rows, vocab]"),
    (lambda: first_argmax(LOGITS[:, :0]), "logits have shape [8, 0]; expected [rows, vocab]"),
    (lambda: row_uniforms(spec.Sampling(seed=2**64 - 1), LAYOUT, 2), "seed is 18446744073709551616; it must be from 0 to 2**64 - 1"),
    (keep(page_size=0), "page_size is 0; the least is 1"),
    (keep(page_size=1.0), "page_size is 1.0; expected a whole number"),
    (keep(acceptance=replace(ACCEPTANCE, nodes=ACCEPTANCE.nodes[:1])), "Acceptance.num_accepted has 2 requests, nodes 1"),
    (keep(acceptance=ONE_ACCEPTANCE), "the layout has 2 requests, the acceptance 1"),
    (keep(keys=()), "0 key pools, 1 value pools"),
    (keep(slot_table=TABLE[:1]), "slot_table has 1 requests, the acceptance 2"),
    (keep(slot_table=TABLE.T.contiguous().T), "slot_table has strides (1, 2)"),
    (keep(slot_table=TABLE[:, :1].expand(2, 12)), "slot_table has strides (12, 0)"),
    (keep(layout=first_of(LAYOUT, 0)), "the layout has 0 requests, the acceptance 2"),
    (keep(layout=ONE_REQUEST), "the layout has 1 requests, the acceptance 2"),
    (keep(values=(pool(24, 2, 2),)), "one pool has rows of [1, 2] torch.float32, another of [2, 2] torch.float32"),
    (keep(values=(pool(24, 1, 2, dtype=torch.float16),)), "one pool has rows of [1, 2] torch.float32, another of [1, 2] torch.float16"),
    (keep(values=(pool(24, 2, 2)[:, :1],)), "a pool of shape [24, 1, 2] has strides (4, 2, 1); pools must be contiguous"),
    (keep(keys=(pool(24, 1, 1, dtype=torch.float16),), values=(pool(24, 1, 1, dtype=torch.float16),)), "a slot's row takes 2 bytes; it must be a whole number of 4-byte words"),
    (begin(token_ids=ROOTS), "token_ids has shape [2]; expected [B, Q]"),
    (begin(token_ids=ROOTS[:, None].int()), "token_ids has dtype torch.int32; expected torch.int64"),
    (begin(token_ids=TABLE[:, :3]), "token_ids has shape [2, 3] and strides (12, 1); expected [2, 3], contiguous"),
    (begin(token_ids=TABLE[:0]), "0 blocks of 12 rows; at least 1 of each"),
    (begin(token_ids=TABLE[:, :0]), "2 blocks of 0 rows; at least 1 of each"),
    (begin(prefix_lens=LENS[:1]), "prefix_lens has shape [1]; expected [2]"),
    (begin(limits=LENS.long()), "limits has dtype torch.int64; expected torch.int32"),
    (begin(roots=TABLE[:, 1]), "roots has shape [2] and strides (12,); expected [2], contiguous"),
    (begin(slot_table=TABLE[:1]), "slot_table has shape [1, 12]; expected [2, max_context]"),
    (begin(slot_table=TABLE.T.contiguous().T), "slot_table has strides (1, 2); its entries must lie side by side"),
    (record(tree=ONE_TREE), "DraftTree.scores has shape [1, 4]; expected [2, 4]"),
    (record(tree=replace(TREE, scores=TREE.scores.float())), "DraftTree.scores has dtype torch.float32; expected torch.float64"),
    (record(acceptance=replace(ACCEPTANCE, bonus=ACCEPTANCE.bonus[:1])), "Acceptance.bonus has shape [1]; expected [2]"),
    (record(layout=ONE_REQUEST), "the layout has 1 requests, the acceptance 2"),
    (record(logits=LOGITS[:7]), "logits has shape [7, 3]; the layout has 8 query rows"),
    (record(logits=LOGITS[:, :0]), "logits have shape [8, 0]; expected [rows, vocab]"),
    (record(logits=pool(3, 8).T), "logits have strides (1, 8); a row's logits must lie side by side"),
    (record(logits=LOGITS.long()), "logits has dtype torch.int64; expected torch.float32 or"),
    (move(pool(24, 2, 2)[:, :1]), "a pool of shape [24, 1, 2] has strides (4, 2, 1); pools must be contiguous"),
    (move(pool(24, 1, 2), dst=TABLE[:1, :2].clone()), "Commit.dst has shape [1, 2] and strides"),
    (move(pool(24, 1, 2), src=TABLE[:, :2]), "Commit.src has shape [2, 2] and strides (12, 1); expected [2, 2], contiguous"),
    (lambda: keep_accepted(LENS, ROOTS[:1], ROOTS), "new has shape [1] and strides (1,); expected [2], contiguous"),
    (lambda: keep_accepted(LENS[:1], ROOTS, ROOTS), "num_accepted has shape [1] and strides (1,); expected [2], contiguous"),
    (lambda: keep_accepted(LENS, ROOTS, TABLE[:, 0]), "held has shape [2] and strides (12,); expected [2], contiguous"),
    (normed(x=pool(2, 4)[:, :3]), "x has shape [2, 3] and strides (4, 1); expected [2, 3], contiguous"),
    (normed(weight=pool(2)), "weight has shape [2] and strides (1,); expected [3], contiguous"),
    (normed(residual=pool(1, 3)), "residual has shape [1, 3] and strides (3, 1), x shape [2, 3]"),
    (normed(into=pool(3, 2).T), "into has shape [2, 3] and strides (1, 2), x shape [2, 3]"),
    (looked_up(token_ids=TABLE[:0]), "token_ids has 0 requests; rows are looked up for 1 at least"),
    (looked_up(starts=LENS), "starts has 2 entries, for 2 requests"),
    (looked_up(table=pool(3, 5).T), "table has shape [5, 3] and strides (1, 5); expected [5, 3], contiguous"),
    (looked_up(weight=pool(2)), "weight has shape [2] and strides (1,); expected [3], contiguous"),
    (context(rows=pool(1, 2, 6)), "rows has shape [1, 2, 6] and strides (12, 6, 1); expected [1, 2, 12], contiguous"),
    (context(rope=(pool(9, 6), pool(9, 4))), "rope has shape [9, 4] and strides (4, 1); expected [9, 6], contiguous"),
    (context(positions=ROOTS[:1]), "positions has shape [1] and strides (1,); expected [2], contiguous"),
    (context(slots=ROOTS[:1]), "slots has shape [1] and strides (1,); expected [2], contiguous"),
    (context(k_norms=pool(2, 6)), "k_norms has shape [2, 6] and strides (6, 1); expected [1, 6], contiguous"),
    (context(pools=pool(1, 3, 4, 1, 6)), "pools has shape [1, 3, 4, 1, 6] and strides (72, 24, 6, 6, 1); expected [1, 2, 4, 1, 6], contiguous"),
    (few_heads(rope=(pool(9, 5), pool(9, 5))), "head_dim is 5; it must be even and at most 256"),
    (few_heads(rope=(pool(9, 258), pool(9, 258))), "head_dim is 258; it must be even and at most 256"),
    (few_heads(rope=(pool(9, 6), pool(8, 6))), "rope has shape [8, 6] and strides (6, 1); expected [9, 6], contiguous"),
    (few_heads(heads=(3, 1)), "weight has shape [24, 3] and strides (3, 1); expected [30, 3], contiguous"),
    (few_heads(norm=pool(2)), "norm has shape [2] and strides (1,); expected [3], contiguous"),
    (few_heads(bias=pool(18)), "bias has shape [18] and strides (1,); expected [24], contiguous"),
    (few_heads(positions=ROOTS[:1]), "positions has shape [1] and strides (1,); expected [2], contiguous"),
    (few_heads(norms=(None, pool(3))), "norms has shape [3] and strides (1,); expected [6], contiguous"),
    (lambda: norm_gate(pool(2, 3), pool(3), 0.1, pool(5, 3)), "weight has 5 outputs; half of them are the gate's"),
    (lambda: norm_gate(pool(2, 3), pool(2), 0.1, pool(4, 3)), "norm has shape [2] and strides (1,); expected [3], contiguous"),
    (few_added(x=pool(2, 2)), "weight has shape [4, 3] and strides (3, 1); expected [4, 2], contiguous"),
    (few_added(x=pool(2, 4)[:, :3]), "x has shape [2, 3] and strides (4, 1); expected [2, 3], contiguous"),
    (few_added(bias=pool(3)), "bias has shape [3] and strides (1,); expected [4], contiguous"),
    (few_added(residual=pool(1, 4)), "residual has shape [1, 4] and strides (4, 1); expected [2, 4], contiguous"),
    (few_added(x=torch.empty(1, 2**16, device="meta"), weight=torch.empty(2**15, 2**16, device="meta")), "weight has shape [32768, 65536], 2147483648 numbers; the kernels take at most 2147483647"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_bad_input_is_refused_with_its_numbers(call: Callable[[], object], message: str) -> None:
    """Each refusal names what is wrong and the two numbers."""
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)


def test_the_calls_that_they_spoil_are_good() -> None:
    """Without the change each call runs, and the layout is marked as larger than the call."""
    made = plan()()
    assert isinstance(made, spec.VerifyLayout)
    assert made.is_captured
    for call in (
        draft(),
        choose(),
        convert(PACKED),
        attend(),
        keep(),
        keep(page_size=1),
        begin(),
        record(),
    ):
        assert call() is not None
    for call in (normed(), looked_up(), few_heads(), few_added()):
        assert call() is not None
    for call in (context(), move(), move(pool(24, 1, 2))):
        assert call() is None

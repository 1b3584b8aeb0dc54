# ruff: noqa: E501 (a case and its message stand on one line, as a table)
"""Bad input to every function of spec: an InputError that says what was wrong, with the numbers."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree.invariants.exact_target import ExactTarget
from ddtree.spec.accept import accept_greedy, accept_sampled
from ddtree.spec.attention import verify_attention
from ddtree.spec.buffers import VerifyBuffers
from ddtree.spec.commit import commit_kv
from ddtree.spec.contracts import (
    Acceptance,
    BitMask,
    Budget,
    DenseMask,
    FlatMask,
    Horizon,
    PackedMask,
    PagedKV,
    QLen,
)
from ddtree.spec.errors import InputError, require_int
from ddtree.spec.layout import plan_verify
from ddtree.spec.mask import convert_mask, tree_mask
from ddtree.spec.round import verify_round
from ddtree.spec.sampling import Sampling, position_uniforms, sample, target_distribution
from ddtree.spec.tree import build_tree

# One good call, from which each bad one differs in one thing: two requests, prefixes 5 and 3,
# budget 3, horizon 2, vocab 3.
DRAFT = torch.full((2, 2, 3), math.log(1 / 3))
ROOTS = torch.tensor([1, 2])
TREE = build_tree(DRAFT, ROOTS, Budget(3))
LENS = torch.tensor([5, 3], dtype=torch.int32)
TABLE = torch.arange(20).reshape(2, 10)
LAYOUT = plan_verify(TREE, LENS, TABLE)  # 8 rows, 8 prefix entries, 36 + 28 mask entries
MASK = tree_mask(TREE, LAYOUT, "flat")
H = Horizon(2)
IDS = torch.zeros(8, dtype=torch.int64)
LOGITS = torch.zeros(8, 3)
UNIFORMS = torch.zeros(8, dtype=torch.float64)
ACCEPTANCE = accept_greedy(TREE, IDS, LAYOUT, H)
ONE_TREE = build_tree(DRAFT[:1], ROOTS[:1], Budget(3))
ONE_ACCEPTANCE = Acceptance(*(part[:1] for part in vars(ACCEPTANCE).values()))
FIXED = replace(LAYOUT, is_captured=True)


def draft(**changed: Any) -> Callable[[], object]:
    """A call of build_tree."""
    good: dict[str, Any] = {
        "draft_log_probs": DRAFT,
        "root_token_ids": ROOTS,
        "budget": 3,
        "topk": None,
    }
    return lambda: build_tree(**(good | changed))


def poisoned(value: float) -> Tensor:
    """A draft with one bad number at request 1, depth 0, token 2."""
    bad = DRAFT.clone()
    bad[1, 0, 2] = value
    return bad


def plan(**changed: Any) -> Callable[[], object]:
    """A call of plan_verify."""
    good: dict[str, Any] = {"tree": TREE, "prefix_lens": LENS, "slot_table": TABLE, "q_lens": None}
    return lambda: plan_verify(**(good | changed))


def attend(**changed: Any) -> Callable[[], object]:
    """A call of verify_attention with 4 query heads and 2 KV heads."""
    rows, pool = torch.zeros(8, 2, 4), torch.zeros(20, 2, 4)
    good: dict[str, Any] = {
        "query": torch.zeros(8, 4, 4),
        "key": rows,
        "value": rows,
        "key_pool": pool,
        "value_pool": pool,
        "layout": LAYOUT,
        "mask": MASK,
    }
    return lambda: verify_attention(**(good | changed))


def choose(**changed: Any) -> Callable[[], object]:
    """A call of accept_sampled."""
    good: dict[str, Any] = {
        "tree": TREE,
        "target_logits": LOGITS,
        "layout": LAYOUT,
        "horizon": H,
        "uniforms": UNIFORMS,
    }
    return lambda: accept_sampled(**(good | changed))


def commit(
    nodes: list[list[int]] | None = None, counts: list[int] | None = None, **changed: Any
) -> Callable[[], object]:
    """A call of commit_kv on pools of 20 slots."""
    pool = torch.zeros(20, 1, 1)
    kv = replace(PagedKV((pool,), (pool,), TABLE.clone(), 1), **changed)
    acceptance = ACCEPTANCE
    if nodes is not None and counts is not None:
        acceptance = Acceptance(
            torch.tensor(nodes, dtype=torch.int32),
            torch.tensor(counts, dtype=torch.int32),
            torch.tensor([0] * len(nodes)),
        )
    return lambda: commit_kv(kv, LAYOUT, acceptance)


def convert(mask: Any, form: Any = "flat", **changed: Any) -> Callable[[], object]:
    """A call of convert_mask."""
    return lambda: convert_mask(mask, replace(LAYOUT, **changed), form)


def indptr(*ends: int) -> Tensor:
    """An int32 indptr."""
    return torch.tensor(ends, dtype=torch.int32)


CASES: list[tuple[Callable[[], object], str]] = [
    # build_tree
    (draft(budget=-1), "budget is -1; the least is 0"),
    (draft(topk=0), "topk is 0; the least is 1"),
    (draft(draft_log_probs=DRAFT[0]), "draft_log_probs has shape [2, 3]"),
    (draft(draft_log_probs=DRAFT[:, :, :0]), "empty vocabulary"),
    (draft(root_token_ids=ROOTS[:1]), "root_token_ids has shape [1]; expected [2]"),
    (draft(draft_log_probs=poisoned(math.nan)), "draft_log_probs[1, 0, 2] is nan"),
    (draft(draft_log_probs=poisoned(0.5)), "draft_log_probs[1, 0, 2] is 0.5"),
    (draft(draft_log_probs=poisoned(math.inf)), "draft_log_probs[1, 0, 2] is inf"),
    (draft(from_logits=1), "from_logits is 1; expected True or False"),
    (
        draft(draft_log_probs=poisoned(math.nan), from_logits=True),
        "draft_log_probs[1, 0, 2] is nan; a logit is finite or -inf",
    ),
    (draft(budget=4.5), "budget is 4.5; expected a whole number"),
    (draft(budget=None), "budget is None; expected a whole number"),
    (draft(budget=True), "budget is True; expected a whole number"),
    (draft(budget=torch.tensor(3)), "budget is a Tensor of shape []; expected a whole number"),
    (draft(topk=1.5), "topk is 1.5; expected a whole number"),
    (draft(draft_log_probs=DRAFT.tolist()), "draft_log_probs is a list; expected a tensor"),
    (draft(draft_log_probs=DRAFT.numpy()), "draft_log_probs is a ndarray of shape [2, 2, 3]; expected a tensor"),
    (draft(draft_log_probs=DRAFT.long()), "draft_log_probs has dtype torch.int64; expected torch.float32"),
    (draft(root_token_ids=[1, 2]), "root_token_ids is a list; expected a tensor"),
    (draft(root_token_ids=ROOTS.float()), "root_token_ids has dtype torch.float32; expected torch.int32"),
    (draft(root_token_ids=-ROOTS), "root_token_ids holds -2; a token is at least 0"),
    (draft(root_token_ids=torch.tensor([1, -1])), "root_token_ids holds -1; a token is at least 0"),
    # plan_verify
    (plan(prefix_lens=LENS[:1]), "prefix_lens has shape [1]; expected [2]"),
    (plan(prefix_lens=torch.tensor([5, -1])), "prefix_lens[1] is -1"),
    (plan(slot_table=TABLE[0]), "slot_table has shape [10]; expected [2, max_context]"),
    (plan(slot_table=TABLE[:, :8]), "request 0 needs prefix_len + q_len = 5 + 4 = 9 entries; slot_table has 8"),
    (plan(slot_table=TABLE - 1), "slot_table[0] holds slot -1 among the first 9 entries"),
    (plan(q_lens=torch.tensor([4])), "q_lens has shape [1]; expected [2]"),
    (plan(q_lens=torch.tensor([4, 3])), "q_lens[1] is 3; it must be from num_nodes = 4 to the tree's 4 rows"),
    (plan(q_lens=torch.tensor([8, 4])), "q_lens[0] is 8; it must be from num_nodes = 4 to the tree's 4 rows"),
    (plan(tree=None), "tree is None; expected DraftTree"),
    (plan(tree=LAYOUT), "tree is a VerifyLayout; expected DraftTree"),
    (plan(tree=replace(TREE, depths=TREE.depths.tolist())), "DraftTree.depths is a list; expected a tensor"),  # type: ignore[arg-type]
    (plan(tree=replace(TREE, token_ids=TREE.token_ids[0])), "DraftTree.token_ids has shape [4]; expected [B, Q]"),
    (plan(prefix_lens=[5, 3]), "prefix_lens is a list; expected a tensor"),
    (plan(prefix_lens=LENS.float()), "prefix_lens has dtype torch.float32"),
    (plan(slot_table=TABLE.numpy()), "slot_table is a ndarray of shape [2, 10]; expected a tensor"),
    (plan(slot_table=TABLE.double()), "slot_table has dtype torch.float64; expected torch.int32 or torch.int64"),
    (plan(slot_table=TABLE // 2), "slot_table[0] gives slot 0 to entries [0, 1]; it holds one"),
    (plan(q_lens=torch.tensor([4.0, 4.0])), "q_lens has dtype torch.float32"),
    (
        lambda: plan_verify(
            build_tree(DRAFT[:0], ROOTS[:0], Budget(3)), LENS[:0], TABLE[:0]
        ),
        "0 requests",
    ),
    # tree_mask
    (lambda: tree_mask(TREE, LAYOUT, "sparse"), "form is 'sparse'; known are 'flat', 'packed', 'dense' and 'bits'"),  # type: ignore[call-overload]
    (
        lambda: tree_mask(build_tree(DRAFT[:1], ROOTS[:1], Budget(3)), LAYOUT),
        "the layout has 2 requests, the tree 1",
    ),
    (lambda: tree_mask(build_tree(DRAFT, ROOTS, Budget(2)), LAYOUT), "request 0 has q_len 4; its tree has 3 rows"),
    (
        lambda: tree_mask(replace(TREE, parents=torch.tensor([[-1, 0, 3, 0]] * 2)), LAYOUT),
        "node 2 has parent 3; a parent comes before its child",
    ),
    (lambda: tree_mask(TREE, MASK), "layout is a FlatMask; expected VerifyLayout"),  # type: ignore[call-overload]
    # convert_mask
    (convert(None), "mask is None; expected FlatMask or PackedMask or DenseMask or BitMask"),
    (convert(MASK.allowed), "mask is a Tensor of shape [64]; expected FlatMask"),
    (convert(FlatMask(MASK.allowed.numpy())), "FlatMask.allowed is a ndarray of shape [64]; expected a tensor"),  # type: ignore[arg-type]
    (convert(MASK, None), "form is None"),
    (convert(MASK, "sparse"), "form is 'sparse'"),
    (convert(FlatMask(MASK.allowed[:-1])), "63 flat mask entries; the layout's call has 64"),
    (convert(MASK, mask_indptr=torch.tensor([0, 24, 44])), "mask_indptr ends at 44; the sum of q_len * (prefix_len + q_len) is 64"),
    (convert(PackedMask(torch.zeros(10, dtype=torch.uint8), torch.tensor([0, 5, 10]))), "byte_indptr is [0, 5, 10]; the segments have [5, 4] bytes"),
    (convert(PackedMask(torch.zeros(8, dtype=torch.uint8), torch.tensor([0, 5, 9]))), "8 packed mask bytes; the layout's call has 9"),
    (convert(DenseMask(torch.zeros(1, 1, 4, 9))), "1 dense mask requests; the layout's call has 2"),
    (convert(DenseMask(torch.zeros(2, 1, 3, 8))), "dense mask has 3 rows a request; the largest q_len is 4"),
    (convert(DenseMask(torch.zeros(2, 1, 4, 8))), "dense mask has 4 rows and 4 prefix columns; request 0 needs 4 and 5"),
    (convert(BitMask(torch.zeros(7, 1, dtype=torch.int32))), "7 bit mask rows; the layout's call has 8"),
    (convert(BitMask(torch.zeros(8, 0, dtype=torch.int32))), "request 0 needs rows 0 to 4 of 1 words"),
    (convert(FlatMask(MASK.allowed & False), "bits"), "row 0 of request 0 does not see prefix entry 0"),
    # verify_attention
    (attend(query=torch.zeros(8, 4)), "query has shape [8, 4]; expected [rows, heads, head_dim]"),
    (attend(query=torch.zeros(8, 3, 4)), "3 query heads do not divide into 2 KV heads"),
    (attend(query=torch.zeros(8, 4, 5)), "key has head_dim 4, query 5"),
    (attend(value=torch.zeros(7, 2, 4)), "key has shape [8, 2, 4], value [7, 2, 4]"),
    (attend(query=torch.zeros(9, 4, 4)), "key has 8 rows, query 9"),
    (attend(value_pool=torch.zeros(19, 2, 4)), "key_pool has shape [20, 2, 4], value_pool [19, 2, 4]"),
    (attend(key_pool=torch.zeros(20, 1, 4), value_pool=torch.zeros(20, 1, 4)), "key has 2 KV heads, key_pool 1"),
    (attend(sinks=torch.zeros(2)), "sinks has shape [2]; expected [4]"),
    (attend(softcap=0.0), "softcap is 0.0; it must be above 0"),
    (attend(window=0), "window is 0; the least is 1"),
    (attend(key_pool=torch.zeros(9, 2, 4), value_pool=torch.zeros(9, 2, 4)), "kv_indices of request 1 holds slot 10; the pool has 9 slots"),
    (attend(key_pool=torch.zeros(10, 2, 4), value_pool=torch.zeros(10, 2, 4)), "kv_indices of request 1 holds slot 10; the pool has 10 slots"),
    (attend(layout=replace(LAYOUT, qo_indptr=indptr(0, 8, 16))), "flat mask has 64 entries; the layout reads entry 103"),
    (attend(layout=replace(LAYOUT, qo_indptr=indptr(0, 4, 9))), "qo_indptr gives request 1 rows 4 to 9; query has 8"),
    (attend(layout=replace(LAYOUT, qo_indptr=indptr(0, 4, 3))), "request 1 has q_len -1"),
    (attend(layout=replace(LAYOUT, kv_indptr=indptr(0, 5, 9))), "kv_indptr gives request 1 entries 5 to 9; kv_indices has 8"),
    (attend(layout=replace(LAYOUT, kv_indptr=indptr(0, 5, 4))), "request 1 has prefix_len -1"),
    (attend(layout=replace(LAYOUT, kv_indptr=indptr(0, 5))), "kv_indptr has 2 entries; the call's requests need entry 2"),
    (attend(layout=replace(LAYOUT, mask_indptr=torch.tensor([0]))), "mask_indptr has 1 entries; the call's requests need entry 1"),
    (attend(mask=PackedMask(torch.zeros(9, dtype=torch.uint8), torch.tensor([0]))), "byte_indptr has 1 entries"),
    (attend(mask=DenseMask(torch.zeros(1, 1, 4, 9))), "dense mask has 1 requests; the layout's call has request 1"),
    (attend(layout=replace(LAYOUT, mask_indptr=torch.tensor([-3, 33, 61]))), "the layout reads entry -3"),
    (attend(query=[[[0.0]]]), "query is a list; expected a tensor"),
    (attend(mask=None), "mask is None; expected FlatMask"),
    (attend(layout=TREE), "layout is a DraftTree; expected VerifyLayout"),
    (attend(sinks=[0.0] * 4), "sinks is a list; expected a tensor"),
    (attend(scale=math.nan), "scale is nan; expected a finite number"),
    (attend(scale="1"), "scale is '1'; expected a finite number"),
    (attend(softcap=math.inf), "softcap is inf; expected a finite number"),
    (attend(window=2.5), "window is 2.5; expected a whole number"),
    (attend(compute_dtype=torch.int32), "compute_dtype is torch.int32; expected a floating dtype"),
    (attend(compute_dtype=None), "compute_dtype is None; expected a floating dtype"),
    # accept_greedy
    (lambda: accept_greedy(ONE_TREE, IDS, LAYOUT, H), "the layout has 2 requests, the tree 1"),
    (lambda: accept_greedy(ONE_TREE, IDS, FIXED, H), "the layout has 4 query rows past the 1 requests of the tree"),
    (lambda: accept_greedy(TREE, IDS, LAYOUT, Horizon(1.5)), "horizon is 1.5; expected a whole number"),  # type: ignore[arg-type]
    (lambda: accept_greedy(TREE, IDS.float(), LAYOUT, H), "target_ids has dtype torch.float32"),
    (lambda: accept_greedy(TREE, IDS.tolist(), LAYOUT, H), "target_ids is a list; expected a tensor"),  # type: ignore[arg-type]
    (lambda: accept_greedy(TREE, IDS, LAYOUT, Horizon(-1)), "horizon is -1; the least is 0"),
    (lambda: accept_greedy(TREE, IDS[:7], LAYOUT, H), "target_ids has shape [7]; the layout has 8 query rows"),
    (lambda: accept_greedy(TREE, IDS, LAYOUT, Horizon(0)), "request 0 accepts a path of depth 1; horizon is 0"),
    (
        lambda: accept_greedy(TREE, IDS, replace(LAYOUT, qo_indptr=indptr(0)), H),
        "the layout has 0 requests, the tree 2",
    ),
    (
        lambda: accept_greedy(replace(TREE, num_nodes=torch.tensor([0, 1]).int()), IDS, LAYOUT, H),
        "request 0 has 0 nodes in 4 query rows",
    ),
    (
        lambda: accept_greedy(TREE, IDS, replace(LAYOUT, qo_indptr=indptr(0, 4)), H),
        "the layout has 1 requests, the tree 2",
    ),
    (
        lambda: accept_greedy(TREE, IDS, replace(LAYOUT, qo_indptr=indptr(0, 3, 6)), H),
        "request 0 has 4 nodes in 3 query rows",
    ),
    # accept_sampled and the distribution
    (choose(target_logits=LOGITS[:7]), "target_logits has shape [7, 3]; the layout has 8 query rows"),
    (choose(uniforms=UNIFORMS[:7]), "uniforms has shape [7]; the layout has 8 query rows"),
    (choose(uniforms=UNIFORMS + 1), "uniforms holds 1.0; expected numbers in [0, 1)"),
    (choose(uniforms=UNIFORMS - 0.25), "uniforms holds -0.25"),
    (choose(uniforms=UNIFORMS * math.nan), "uniforms holds nan"),
    (choose(temperature=-1.0), "temperature is -1.0"),
    (choose(temperature=math.nan), "temperature is nan"),
    (choose(top_k=0), "top_k is 0; the least is 1"),
    (choose(top_k=1.5), "top_k is 1.5; expected a whole number"),
    (choose(top_p=math.nan), "top_p is nan; expected a finite number"),
    (choose(temperature=None), "temperature is None; expected a finite number"),
    (choose(target_logits=LOGITS.tolist()), "target_logits is a list; expected a tensor"),
    (choose(uniforms=None), "uniforms is None; expected a tensor"),
    (lambda: Sampling(temperature=-1.0), "temperature is -1.0; the least is 0, greedy"),
    (lambda: Sampling(top_k=0), "top_k is 0; the least is 1"),
    (lambda: Sampling(top_p=2.0), "top_p is 2.0; it must be above 0 and at most 1"),
    (lambda: Sampling(top_p=-0.5), "top_p is -0.5; it must be above 0 and at most 1"),
    (lambda: Sampling(seed=-1), "seed is -1; the least is 0"),
    (lambda: Sampling(seed=(3, 2**64)), f"seed is {2**64}; the most is {2**64 - 1}"),
    (lambda: Sampling(seed=b"x"), "seed is a bytes; expected a whole number"),
    (lambda: Sampling(seed=0.5), "seed is 0.5; expected a whole number"),  # type: ignore[arg-type]
    (choose(top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
    (choose(top_p=1.5), "top_p is 1.5"),
    (choose(target_logits=LOGITS * math.nan), "logits row 0 has no finite maximum"),
    (choose(target_logits=LOGITS - math.inf), "logits row 0 has no finite maximum"),
    (lambda: target_distribution(LOGITS[:, :0]), "logits have shape [8, 0]"),
    (lambda: target_distribution(LOGITS[None]), "logits have shape [1, 8, 3]; expected [rows, vocab]"),
    (lambda: sample(torch.ones(2, 1).double(), torch.tensor([0.5, 1.0]).double()), "uniforms holds 1.0; expected"),
    (lambda: sample(LOGITS.double() + 1, UNIFORMS + 2), "uniforms holds 2.0"),
    (lambda: position_uniforms(-1, IDS), "seed is -1; the least is 0"),
    (lambda: Sampling(seed=(1, 2, 3)).seeds(2), "3 seeds for 2 requests"),
    # commit_kv
    (lambda: commit_kv(PagedKV((), (), TABLE), LAYOUT, ONE_ACCEPTANCE), "the layout has 2 requests, the acceptance 1"),
    (lambda: commit_kv(PagedKV((), (), TABLE), FIXED, ONE_ACCEPTANCE), "the layout has 4 query rows past the 1 requests of the acceptance"),
    (lambda: commit_kv(PagedKV((), (), TABLE), LAYOUT, replace(ACCEPTANCE, num_accepted=ONE_ACCEPTANCE.num_accepted)), "Acceptance.num_accepted has 1 requests, nodes 2"),
    (lambda: commit_kv(None, LAYOUT, ACCEPTANCE), "kv is None; expected PagedKV"),  # type: ignore[arg-type]
    (lambda: commit_kv(PagedKV((), (), TABLE), LAYOUT, None), "acceptance is None; expected Acceptance"),  # type: ignore[arg-type]
    (commit(page_size=1.0), "page_size is 1.0; expected a whole number"),
    (commit(keys=None), "PagedKV.keys is None; expected tuple"),
    (commit(keys=([0.0],)), "PagedKV.keys[0] is a list; expected Tensor"),
    (commit(slot_table=TABLE.tolist()), "PagedKV.slot_table is a list; expected a tensor"),
    (commit(page_size=0), "page_size is 0; the least is 1"),
    (commit(keys=()), "0 key pools, 1 value pools"),
    (commit(slot_table=TABLE[:1]), "slot_table has 1 requests, the acceptance 2"),
    (commit(slot_table=TABLE[:, :8]), "request 0 has 9 entries; slot_table has room for 8"),
    (commit(slot_table=TABLE.flip(1)), "out_cache_loc of request 0 is [5, 6, 7, 8]; slot_table reserves [4, 3, 2, 1]"),
    (commit(keys=(torch.zeros(9, 1, 1),)), "slot_table[1] holds slot 16; a pool has 9 slots"),
    (commit([[0, 1, -1], [0, 2, 1]], [2, 3]), "nodes[1] is [0, 2, 1]; a path starts at the root, ascends"),
    (commit([[1, 2, -1], [0, -1, -1]], [2, 1]), "nodes[0] is [1, 2]; a path starts at the root"),
    (commit([[0, 4, -1], [0, -1, -1]], [2, 1]), "nodes[0] is [0, 4]; a path starts at the root, ascends and stays below q_len 4"),
    (commit([[0, 1, -1], [0, -1, -1]], [0, 1]), "num_accepted[0] is 0; it counts the root"),
    (commit([[0, 1, 2], [0, -1, -1]], [4, 1]), "num_accepted[0] is 4; it counts the root, and nodes has room for 3"),
    (commit([[0]] * 3, [1] * 3), "slot_table has 2 requests, the acceptance 3"),
    (commit([[0]] * 3, [1] * 3, slot_table=TABLE.repeat(2, 1)), "the layout has 2 requests, the acceptance 3"),
    (commit(keys=(torch.zeros(20, 1, 1),) * 2), "2 key pools, 1 value pools"),
    (commit([[0, 1, 1], [0, -1, -1]], [3, 1]), "nodes[0] is [0, 1, 1]; a path starts at the root, ascends"),
    (commit([[-1, 2, -1], [0, -1, -1]], [2, 1]), "nodes[0] is [-1, 2]; a path starts at the root"),
    (commit(keys=(torch.zeros(16, 1, 1),)), "slot_table[1] holds slot 16; a pool has 16 slots"),
    # VerifyBuffers
    (lambda: VerifyBuffers(0, QLen(4), 5), "max_batch is 0; the least is 1"),
    (lambda: VerifyBuffers(2, QLen(0), 5), "max_q_len is 0; the least is 1"),
    (lambda: VerifyBuffers(2, QLen(4), -1), "max_context is -1; the least is 0"),
    (lambda: VerifyBuffers(2.5, 5, 10), "max_batch is 2.5; expected a whole number"),  # type: ignore[arg-type]
    (lambda: VerifyBuffers("a", 5, 10), "max_batch is 'a'; expected a whole number"),  # type: ignore[arg-type]
    (lambda: VerifyBuffers(2, QLen(5), 10, pad_slot=-2), "pad_slot is -2; the least is -1"),
    (lambda: VerifyBuffers(2, 4, 5).fill(TREE, LAYOUT, tree_mask(TREE, LAYOUT)), "mask is a BitMask; expected FlatMask"),  # type: ignore[arg-type]
    (lambda: VerifyBuffers(2, 4, 5).fill(TREE, replace(LAYOUT, max_q_len=None), MASK), "max_q_len is None; expected a whole number"),  # type: ignore[arg-type]
    (lambda: VerifyBuffers(1, QLen(4), 5).fill(TREE, LAYOUT, MASK), "batch is 2; the buffers were made for 1"),
    (lambda: VerifyBuffers(2, QLen(3), 5).fill(TREE, LAYOUT, MASK), "max_q_len is 4; the buffers were made for 3: size them by the largest budget + 1"),
    (lambda: VerifyBuffers(2, QLen(4), 4).fill(TREE, LAYOUT, MASK), "the longest prefix is 5; the buffers were made for 4"),
    (lambda: VerifyBuffers(2, QLen(4), 5).fill(ONE_TREE, LAYOUT, MASK), "the layout has 2 requests, the tree 1"),
    (lambda: VerifyBuffers(2, QLen(4), 5).fill(build_tree(DRAFT, ROOTS, Budget(2)), LAYOUT, MASK), "the largest q_len is 4; its tree has 3 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "fragment"), CASES, ids=[fragment for _, fragment in CASES])
def test_the_error_says_what_was_wrong(call: Callable[[], object], fragment: str) -> None:
    """The message holds the numbers, found and expected."""
    with pytest.raises(InputError) as caught:
        call()
    assert fragment in str(caught.value)


def test_whole_numbers_have_bounds() -> None:
    """Both bounds are allowed; the most is int64's where none is said, and the least may have a reason."""
    for value in (-5, 2**63 - 1):
        require_int("x", value=value, least=-5)
    require_int("x", 7, 1, most=7)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: require_int("x", 2**63, 1), f"x is {2**63}; the most is 9223372036854775807"),
        (lambda: require_int("x", 8, 1, most=7), "x is 8; the most is 7"),
        (lambda: require_int("x", 0, 1), "x is 0; the least is 1"),
        (lambda: require_int("x", 0, 1, "a chain"), "x is 0; the least is 1, a chain"),
    ]
    for call, message in refused:
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("nodes", "counts"), [([[0, 1], [0, 9]], [2, 2]), ([[0, 1], [0, 1]], [2, 3])]
)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_refused_commit_changes_nothing(
    nodes: list[list[int]], counts: list[int], page_size: int
) -> None:
    """A bad second request leaves the first one's table and pools alone."""
    pool, table = torch.arange(20.0).reshape(20, 1, 1), TABLE.clone()
    kv = PagedKV((pool,), (pool + 0,), table, page_size)
    acceptance = Acceptance(
        torch.tensor(nodes, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor([0, 0]),
    )
    with pytest.raises(InputError):
        commit_kv(kv, LAYOUT, acceptance)
    assert torch.equal(table, TABLE)
    assert torch.equal(pool.flatten(), torch.arange(20.0))


@pytest.mark.parametrize(
    ("changed", "fragment"),
    [
        ({"budget": Budget(-1)}, "budget is -1"),
        ({"budget": Budget(30)}, "request 0 needs prefix_len + q_len = 5 + 31 = 36 entries"),
        ({"draft_log_probs": poisoned(math.nan)}, "draft_log_probs[1, 0, 2] is nan"),
        ({"prefix_lens": LENS[:1]}, "prefix_lens has shape [1]"),
        ({"buffers": VerifyBuffers(2, QLen(3), 5)}, "max_q_len is 4; the buffers were made for 3"),
        ({"sampling": 0.7}, "sampling is 0.7; expected Sampling"),
        ({"buffers": LAYOUT}, "buffers is a VerifyLayout; expected VerifyBuffers"),
        ({"target": None}, "target is None; expected Target"),
        ({"sampling": Sampling(seed=(1,))}, "1 seeds for 2 requests"),
    ],
)
def test_a_refused_round_commits_nothing(changed: dict[str, Any], fragment: str) -> None:
    """The target's slot table and committed KV are as before."""
    target = ExactTarget([[0, 1, 2, 0, 1], [2, 2, 2]], TABLE, 20, 3)
    good: dict[str, Any] = {
        "draft_log_probs": DRAFT,
        "root_token_ids": ROOTS,
        "prefix_lens": LENS,
        "target": target,
        "budget": Budget(3),
    }
    with pytest.raises(InputError) as caught:
        verify_round(**(good | changed))
    assert fragment in str(caught.value)
    assert torch.equal(target.slot_table, TABLE)
    for b, prompt in enumerate([[0, 1, 2, 0, 1], [2, 2, 2]]):
        for pool, expected in zip(target.kv.values, target.linear(prompt)[0], strict=True):
            assert torch.equal(pool[TABLE[b, : len(prompt)]], expected)

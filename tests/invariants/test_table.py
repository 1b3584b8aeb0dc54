"""Every invariant: silent on clean calls, and broken by at least one mutant that it names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from ddtree.invariants import TABLE, Call, InvariantViolation, report, violations
from ddtree.spec import DraftTree, VerifyBuffers
from ddtree.spec.index import INT32_MAX
from tests.invariants.calls import captured, indptr, put, verify, whole_round


class Mutant(NamedTuple):
    """A change that breaks one invariant, and the numbers it must give."""

    invariant: str
    what: str
    call: Callable[[], Call]
    request: int | None = None
    expected: Any = None
    found: Any = None
    hint: str = ""
    """Part of the hint; empty: the checker must be silent about the cause."""


def spoil(name: str, at: Any, value: Any) -> Callable[[], Call]:
    """The whole round with one entry changed."""
    return lambda: put(whole_round(), name, at, value)


def swap(**fields: Any) -> Callable[[], Call]:
    """The whole round with fields replaced."""
    return lambda: replace(whole_round(), **fields)


def change(edit: Callable[[Call], dict[str, Any]]) -> Callable[[], Call]:
    """The whole round with fields replaced by functions of it."""

    def made() -> Call:
        call = whole_round()
        return replace(call, **edit(call))

    return made


def buffered(edit: Callable[[VerifyBuffers], None], prefixes: tuple[int, ...] = (5, 3)) -> Callable[[], Call]:
    """Filled buffers, corrupted afterwards."""

    def made() -> Call:
        tree, buffers = captured(prefixes)
        edit(buffers)
        return Call.of(tree, buffers)

    return made


def tied() -> Call:
    """Two siblings of one score, the larger token first."""
    tree = DraftTree(
        torch.tensor([[1, 5, 4]]),
        torch.tensor([[-1, 0, 0]], dtype=torch.int32),
        torch.tensor([[0, 1, 1]], dtype=torch.int32),
        torch.tensor([[0.0, -1.0, -1.0]], dtype=torch.float64),
        torch.tensor([3], dtype=torch.int32),
    )
    return Call.of(tree)


def moved() -> Call:
    """A commit that moves KV (pages of 2), told in an order that overwrites a later source."""
    call = whole_round(page_size=2)
    assert call.src is not None and call.dst is not None
    src, dst = call.src.clone(), call.dst.clone()
    dst[0, 1] = src[0, 2]
    return replace(call, src=src, dst=dst)


def short_mask(prefixes: list[int], q_len: int, entries: int, *, capture: bool, rows: int | None = None) -> Call:
    """Metadata alone, with a mask buffer of ``entries``."""
    lens = [q_len * (p + q_len) for p in prefixes]
    batch = len(prefixes)
    return Call(
        qo_indptr=indptr([q_len] * batch),
        kv_indptr=indptr(prefixes),
        mask_indptr=indptr(lens),
        custom_mask=torch.ones(entries, dtype=torch.bool),
        positions=torch.repeat_interleave(torch.tensor(prefixes), q_len) if rows is None else torch.zeros(rows, dtype=torch.int64),
        is_captured=capture,
    )


def wide(**fields: Any) -> Call:
    """A call too large for 32 bits."""
    return Call(**fields)


# The whole round: prefixes [5, 3], budget 16, 13 nodes in 17 rows each, depths 0, 1, 1, ..., accepted rows scattered.
MUTANTS = [
    # call
    Mutant("batch", "q ends of four requests beside three lengths (vllm-ascend #7290)", lambda: Call(qo_indptr=torch.tensor([0, 4, 8, 12, 20]), kv_indptr=torch.tensor([0, 3, 6, 9])), None, 4, 3),
    Mutant("batch", "the tree has one request less than the layout", change(lambda c: {"num_nodes": torch.tensor([13])}), None, None, None),
    Mutant("batch", "a slot table without a request's row", change(lambda c: {"slot_table": (c.slot_table if c.slot_table is not None else torch.empty(0))[:1]}), None, 2, 1),
    Mutant("tree_shape", "parents of other trees", swap(parents=torch.zeros(2, 9, dtype=torch.int32)), None, [2, 17], [2, 9]),
    Mutant("tree_shape", "trees without a root row", lambda: Call(token_ids=torch.zeros(2, 0, dtype=torch.int64)), None, "at least 1 row", 0),
    Mutant("rows", "positions of another call", swap(positions=torch.zeros(16, dtype=torch.int64)), None, 34, 16),
    Mutant("dtypes", "an additive mask handed on as the flat mask (sglang PR #27509)", change(lambda c: {"custom_mask": torch.where(c.known()["custom_mask"], 0.0, -1e9)}), None, "bool or uint8", "torch.float32", "additive mask"),
    Mutant("dtypes", "positions in 16 bits", change(lambda c: {"positions": c.known()["positions"].short()}), None, "int32 or int64", "torch.int16"),
    Mutant("index_width", "row * vocab in 32 bits (vllm #46560)", lambda: wide(num_rows=15409, vocab_size=151936, offset_bits=32), None, f"at most {INT32_MAX}", 15409 * 151936 - 1),
    Mutant("index_width", "an int32 mask_indptr of a mask of 2.2e9 entries", lambda: wide(qo_indptr=torch.tensor([0, 17]), kv_indptr=torch.tensor([0, 130_000_000]), mask_indptr=torch.tensor([0, (17 * 130_000_017) - 2**32]).int()), None, f"at most {INT32_MAX}", 17 * 130_000_017),
    Mutant("index_width", "slot * stride in 32 bits", lambda: wide(kv_pool_size=2_200_000, slot_stride=1024, offset_bits=32), None, f"at most {INT32_MAX}", 2_200_000 * 1024 - 1),
    # tree
    Mutant("num_nodes", "a tree without its root", spoil("num_nodes", 1, 0), 1, "1 to 17", 0),
    Mutant("num_nodes", "more nodes than rows", spoil("num_nodes", 0, 18), 0, "1 to 17", 18),
    Mutant("budget", "a node over the budget", swap(budget=11), 0, "at most 12", 13),
    Mutant("root", "a root with a parent", spoil("parents", (1, 0), 0), 1, -1, 0),
    Mutant("root", "the root's token replaced by the mask token (hipfire #483)", spoil("token_ids", (0, 0), 9), 0, 1, 9),
    Mutant("parent_order", "a parent after its child", spoil("parents", (0, 4), 7), 0, "0 to 3", 7),
    Mutant("parent_order", "a second root", spoil("parents", (1, 2), -1), 1, "0 to 1", -1),
    Mutant("depth", "a depth that skips a level", spoil("depths", (0, 12), 3), 0, 2, 3),
    Mutant("depth", "a node below the horizon", swap(horizon=1), 0, "at most 1", 2),
    Mutant("siblings_distinct", "one token twice under one node", change(lambda c: {"token_ids": _twin(c)}), 0, "distinct tokens"),
    Mutant("best_first", "a NaN score (-inf log-probs in the official builder)", spoil("scores", (0, 3), float("nan")), 0, "a finite score", "nan"),
    Mutant("best_first", "a score that rises", spoil("scores", (1, 12), -0.001), 1, None, -0.001),
    Mutant("tie_order", "near-ties broken another way (sglang #31071)", tied, 0, "token 4 before 5", "token 5 before 4"),
    Mutant("padding", "token 0 counted as padding (sglang PR #27509)", lambda: _token_zero(), 0, -1, None, "token 0 is a token"),
    Mutant("padding", "a stale parent in padding", spoil("parents", (1, 16), 3), 1, -1, 3),
    Mutant("padding", "a stale token in padding", spoil("token_ids", (0, 14), 6), 0, 0, 6),
    Mutant("padding", "a stale score in padding", spoil("scores", (0, 16), -9.0), 0, -float("inf"), -9.0),
    Mutant("token_range", "a token outside the vocabulary", spoil("token_ids", (1, 5), 11), 1, "0 to 10", 11),
    Mutant("token_range", "a negative token", spoil("token_ids", (0, 5), -1), 0, "0 to 10", -1),
    # layout
    Mutant("mask_len", "width 8 from configuration, q_len 17", swap(mask_indptr=torch.tensor([0, 104, 192])), 0, 374, 104, "every segment fits width 8; this call's q_len is 17: the width came from configuration"),
    Mutant("mask_len", "segments of the prefix alone", swap(mask_indptr=indptr([17 * 5, 17 * 3])), 0, 374, 85, "the tree's own columns were left out"),
    Mutant("mask_len", "full-width segments over a window's KV (sglang #39160)", lambda: Call(qo_indptr=indptr([4, 4]), kv_indptr=indptr([8, 3]), mask_indptr=indptr([4 * 24, 4 * 7])), 0, 48, 96, "fit prefix lengths [20, 3]"),
    Mutant("mask_len", "one entry short, for no known reason", swap(mask_indptr=torch.tensor([0, 373, 714])), 0, 374, 373),
    Mutant("mask_indptr", "a start that is not 0", swap(mask_indptr=torch.tensor([1, 375, 715])), None, 0, 1),
    Mutant("mask_indptr", "segments that go back", swap(mask_indptr=torch.tensor([0, 374, 340])), 1, "at least 374", 340),
    Mutant("mask_indptr", "a mask that ends before its segments", lambda: short_mask([5, 3], 17, 700, capture=False), None, 700, 714),
    Mutant("qo_indptr", "width 8 from configuration", swap(qo_indptr=indptr([8, 8])), 0, 17, 8, "every segment fits width 8; this call's q_len is 17: the width came from configuration"),
    Mutant("qo_indptr", "the budget in place of budget + 1", swap(qo_indptr=indptr([16, 16])), 0, 17, 16, "or the budget was taken for budget + 1"),
    Mutant("qo_indptr", "two requests' rows mixed up", swap(qo_indptr=indptr([18, 16])), 0, 17, 18),
    Mutant("qo_indptr", "a start that is not 0", swap(qo_indptr=torch.tensor([1, 17, 34])), None, 0, 1),
    Mutant("max_q_len", "forced to the configured width (sglang #27473)", swap(max_q_len=8), None, 17, 8, "leaves out rows 8 to 16"),
    Mutant("max_q_len", "larger than any request of an eager call", swap(max_q_len=32), None, 17, 32),
    Mutant("kv_indptr", "the tree's own entries counted (FlashInfer's convention)", swap(kv_indptr=indptr([22, 20])), 0, 5, 22, "FlashInfer's convention"),
    Mutant("kv_indptr", "the tree's entries counted, without prefix_lens", change(lambda c: {"kv_indptr": indptr([22, 20]), "prefix_lens": None}), 0, 5, 22, "FlashInfer's convention"),
    Mutant("kv_indptr", "one entry too many", swap(kv_indptr=indptr([6, 3])), 0, 5, 6),
    Mutant("kv_indptr", "fewer slots than entries", change(lambda c: {"kv_indices": c.known()["kv_indices"][:7]}), None, "at most 7", 8),
    Mutant("kv_indices", "a slot past the pool", spoil("kv_indices", 6, 44), 1, "0 to 43", 44),
    Mutant("kv_indices", "length 0 of a padded request turned into 1 reads entry -1 (vllm #43682)", lambda: Call(kv_indptr=indptr([2, 1]), kv_indices=torch.tensor([4, 7, -1])), 1, "at least 0", -1),
    Mutant("kv_unique", "one slot for two entries", change(lambda c: {"kv_indices": _twice(c)}), 1, "distinct slots"),
    Mutant("out_cache_loc", "a real row that is not written", spoil("out_cache_loc", 18, -1), 1, "0 to 43", -1),
    Mutant("out_cache_loc", "a padding row past the pool", spoil("out_cache_loc", 15, 50), 0, "-1 to 43", 50),
    Mutant("write_unique", "a row too narrow, clamped to its last slot (sglang #26972)", change(lambda c: {"out_cache_loc": _clamped(c)}), 0, "one writer"),
    Mutant("write_disjoint", "a tree written over another request's prefix", change(lambda c: {"out_cache_loc": _over_prefix(c)}), 0, "a free slot"),
    Mutant("slot_table", "the tree written at entry prefix_len + depth", change(lambda c: {"out_cache_loc": _by_depth(c)}), 0),
    Mutant("slot_table", "two prefix entries exchanged", change(lambda c: {"kv_indices": _exchanged(c)}), 0),
    Mutant("positions", "by row, not by depth (mlxcel #1214, TensorRT-LLM #12962)", change(lambda c: {"positions": torch.cat([5 + torch.arange(17), 3 + torch.arange(17)])}), 0, 6, 7, "positions are prefix_len + row"),
    Mutant("positions", "a host mirror of the lengths that is 4 too large (a vLLM port)", change(lambda c: {"positions": c.known()["positions"] + 4}), 0, 5, 9, "off by 4: they fit prefix_len 9"),
    Mutant("positions", "parents [-1, 0, 0] seen as a chain (sglang #39287)", lambda: _siblings_as_chain(), 0, 5, 6, "positions are prefix_len + row"),
    Mutant("positions", "one stale position", spoil("positions", 3, 11), 0, 6, 11),
    Mutant("positions", "stale roots, without a tree", lambda: Call(qo_indptr=indptr([2, 2]), kv_indptr=indptr([5, 3]), positions=torch.tensor([5, 6, 5, 6])), 1, 3, 5),
    Mutant("input_ids", "tokens of the round before", change(lambda c: {"input_ids": c.known()["input_ids"].roll(1)}), 0),
    # mask
    Mutant("flat_len", "a mask made with the configured width", swap(custom_mask=torch.ones(192, dtype=torch.bool)), None, 714, 192, "every segment fits width 8"),
    Mutant("flat_len", "a mask of no width at all", swap(custom_mask=torch.ones(713, dtype=torch.bool)), None, 714, 713),
    Mutant("packed_len", "a mask of shape (10, 15) passed for (10, 20) (flashinfer #3176)", lambda: Call(qo_indptr=indptr([10]), prefix_lens=torch.tensor([10]), packed=torch.zeros(19, dtype=torch.uint8), byte_indptr=indptr([19])), 0, 25, 19, "10 rows of 15 columns"),
    Mutant("packed_len", "segments past the last byte (flashinfer #1005)", change(lambda c: {"packed": c.known()["packed"][:-1]}), None, 90, 89),
    Mutant("mask_shape", "words for 32 nodes where there are 33", lambda: Call(qo_indptr=indptr([33]), words=torch.zeros(33, 1, dtype=torch.int32)), None, 2, 1),
    Mutant("mask_shape", "a dense mask of the configured width", swap(bias=torch.zeros(2, 1, 8, 13)), None, "at least 17", 8),
    Mutant("mask_shape", "a dense mask without the prefix", swap(bias=torch.zeros(2, 1, 17, 17)), None, "at least 22", 17),
    Mutant("mask_shape", "fewer rows of words than query rows", change(lambda c: {"words": c.known()["words"][:17]}), None, 34, 17),
    Mutant("mask_values", "a byte that is neither 0 nor 1", change(lambda c: {"custom_mask": c.known()["custom_mask"].to(torch.uint8) * 255}), None, "0 or 1", 255),
    Mutant("mask_values", "a dense mask of 0 and 1", change(lambda c: {"bias": (c.known()["bias"] == 0).float()}), 0, None, 1.0),
    Mutant("visibility", "inverted, flat (sglang PR #27509)", change(lambda c: {"custom_mask": ~c.known()["custom_mask"]}), 0, 1, 0, "every bit is inverted"),
    Mutant("visibility", "inverted, bits", change(lambda c: {"words": ~c.known()["words"]}), 0, 1, 0, "every bit is inverted"),
    Mutant("visibility", "inverted, packed", change(lambda c: {"packed": ~c.known()["packed"]}), 0, 1, 0, "every bit is inverted"),
    Mutant("visibility", "inverted, dense", change(lambda c: {"bias": torch.where(c.known()["bias"] == 0, torch.finfo(torch.float32).min, 0.0)}), 0, 1, 0, "every bit is inverted"),
    Mutant("visibility", "the tree's columns transposed", lambda: _retree(lambda tree: tree.T.clone()), 0, None, None, "transposed"),
    Mutant("visibility", "causal by row", lambda: _retree(lambda tree: torch.ones_like(tree).tril()), 0, 0, 1, "causal by row"),
    Mutant("visibility", "every node visible", lambda: _retree(torch.ones_like), 0, 0, 1, "no tree mask was applied"),
    Mutant("visibility", "one foreign bit", lambda: _retree(_one_bit), 0, 0, 1),
    Mutant("prefix_visible", "a hidden prefix entry", spoil("custom_mask", 3, False), 0, 1, 0),
    Mutant("prefix_visible", "a dense mask that hides a prefix entry", spoil("bias", (1, 0, 2, 1), torch.finfo(torch.float32).min), 1, 1, 0),
    Mutant("padding_invisible", "a real row that sees the last padding row", spoil("custom_mask", 21, True), 0, 0, 1),
    Mutant("padding_invisible", "the same in the bits", change(lambda c: {"words": c.known()["words"] | (1 << 16)}), 0, 0, 1),
    # buffers
    Mutant("buffer_capacity", "a mask without the tree's own columns (sglang #29450)", lambda: short_mask([100], 4, 400, capture=True), None, "at least 416", 400, "without the tree's own columns"),
    Mutant("buffer_capacity", "a mask without the padded request's segment (sglang #6309)", lambda: short_mask([9, 9, 9, 1], 26, 3 * 26 * 35, capture=True), None, f"at least {3 * 26 * 35 + 26 * 27}", 3 * 26 * 35, f"the missing {26 * 27} entries"),
    Mutant("buffer_capacity", "rows for the configured width", lambda: short_mask([5, 3], 17, 714, capture=True, rows=16), None, "at least 34", 16, "8 rows for each of 2 requests"),
    Mutant("buffer_capacity", "a mask one entry too small", lambda: short_mask([5, 3], 17, 713, capture=True), None, "at least 714", 713),
    Mutant("stale_tail", "stale positions of a larger batch (sglang #24401)", buffered(lambda b: b.layout.positions[34:].fill_(7)), None, 0, 7),
    Mutant("stale_tail", "an unused request with a row", buffered(lambda b: b.layout.qo_indptr[3:].add_(1)), 2, 34, 35),
    Mutant("stale_tail", "mask bits behind the call", buffered(lambda b: b.mask.allowed[800:].fill_(True)), None, 0, 1),
    Mutant("stale_tail", "slots that unused rows would overwrite", buffered(lambda b: b.layout.out_cache_loc[40:].fill_(3)), None, -1, 3),
    Mutant("stale_tail", "tokens behind the call", buffered(lambda b: b.token_ids[34:].fill_(2)), None, 0, 2),
    # acceptance
    Mutant("num_accepted", "the root not counted", spoil("num_accepted", 1, 0), 1, "1 to 3", 0),
    Mutant("num_accepted", "more than the horizon", spoil("num_accepted", 0, 4), 0, "1 to 3", 4),
    Mutant("accepted_end", "a node behind the end", change(lambda c: {"num_accepted": c.known()["num_accepted"] - 1}), 0, 2, 3),
    Mutant("accepted_end", "-1 inside the path", spoil("nodes", (0, 1), -1), 0, 3, 2),
    Mutant("accepted_path", "a path that does not start at the root", spoil("nodes", (0, 0), 1), 0, 0, 1),
    Mutant("accepted_path", "a jump to another branch", change(lambda c: {"nodes": _jump(c)}), 0),
    Mutant("accepted_path", "padding accepted", spoil("nodes", (1, 2), 15), 1, "1 to 12", 15),
    Mutant("choice", "another token than the target chose", change(lambda c: {"target_ids": _other_choice(c, 0)}), 0),
    Mutant("bonus", "a bonus that is not the target's", spoil("bonus", 1, 9), 1, 0, 9),
    Mutant("bonus", "no bonus", change(lambda c: {"bonus": c.known()["bonus"] * 0 - 1, "target_ids": None}), 0, "a token id", -1),
    Mutant("walk_end", "a walk that stops too early", lambda: _early(), 0, 2, 1),
    Mutant("emitted", "the root emitted again", change(lambda c: {"emitted": c.known()["emitted"].roll(1, dims=1)}), 0),
    # commit
    Mutant("commit_len", "a gap after the round (llama.cpp #26478)", change(lambda c: {"committed_lens": c.known()["committed_lens"] + 2}), 0, 8, 10),
    Mutant("commit_src", "accepted rows read as a dense prefix (sglang #15360, PR #27509)", change(lambda c: {"src": _dense_prefix(c)}), 0, None, None, "scattered nodes were read as a dense prefix"),
    Mutant("commit_src", "a row stride of steps + 1 in place of q_len (sglang #15360)", change(lambda c: {"src": _steps_stride(c)}), 1, None, None, "row stride of horizon + 1 = 3"),
    Mutant("commit_src", "one foreign source", spoil("src", (0, 1), 2), 0, None, 2),
    Mutant("commit_dst", "a destination one entry too far", change(lambda c: {"dst": c.known()["dst"].roll(1, dims=1)}), 0),
    Mutant("commit_dst", "a moved node in the wrong row, without the table", lambda: replace(put(whole_round(page_size=2), "dst", (0, 1), 1), slot_table_after=None), 0, None, 1),
    Mutant("commit_order", "a later source overwritten", moved, 0, "an untouched source"),
    Mutant("slot_permutation", "a slot lost", change(lambda c: {"slot_table_after": _lost(c)}), 0, "the same slots"),
    Mutant("slot_permutation", "a table of another size", change(lambda c: {"slot_table_after": c.known()["slot_table_after"][:, :-1]}), None, [2, 22], [2, 21]),
    Mutant("prefix_kept", "the whole row permuted", change(lambda c: {"slot_table_after": c.known()["slot_table_after"].roll(1, dims=1)}), 0),
]  # fmt: skip


def _twin(c: Call) -> torch.Tensor:
    """The second child of the root given the first one's token."""
    tokens, parents = c.known()["token_ids"].clone(), c.known()["parents"]
    first, second = (parents[0] == 0).nonzero().flatten().tolist()[:2]
    tokens[0, second] = tokens[0, first]
    return tokens


def _token_zero() -> Call:
    """Trees whose node 2 is token 0, counted as ``(token_ids != 0).sum()``."""
    call = whole_round()
    tokens = torch.where(call.known()["token_ids"][0] == 0, 10, call.known()["token_ids"][0])[None, :]
    tokens[0, 13:] = 0
    tokens[0, 2] = 0
    parents = call.known()["parents"][:1]
    return Call(token_ids=tokens, parents=parents, num_nodes=(tokens != 0).sum(dim=1))


def _twice(c: Call) -> torch.Tensor:
    slots = c.known()["kv_indices"].clone()
    slots[7] = slots[5]
    return slots


def _clamped(c: Call) -> torch.Tensor:
    slots = c.known()["out_cache_loc"].clone()
    slots[10:17] = slots[10]
    return slots


def _over_prefix(c: Call) -> torch.Tensor:
    slots = c.known()["out_cache_loc"].clone()
    slots[2] = c.known()["kv_indices"][6]
    return slots


def _by_depth(c: Call) -> torch.Tensor:
    slots = c.known()["out_cache_loc"].clone()
    slots[:13] = slots[c.known()["depths"][0, :13].long()]
    return slots


def _exchanged(c: Call) -> torch.Tensor:
    slots = c.known()["kv_indices"].clone()
    slots[:2] = slots[:2].flip(0)
    return slots


def _siblings_as_chain() -> Call:
    return Call(
        qo_indptr=indptr([3]),
        kv_indptr=indptr([4]),
        positions=torch.tensor([4, 5, 6]),
        parents=torch.tensor([[-1, 0, 0]]),
        depths=torch.tensor([[0, 1, 1]]),
        num_nodes=torch.tensor([3]),
    )


def _retree(edit: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The round's first request alone, its real tree columns edited in the flat mask."""
    tree, layout, mask = verify([5], 16, 3, horizon=2)
    square = mask.allowed.reshape(17, 22).clone()
    square[:13, 5:18] = edit(square[:13, 5:18])
    return replace(Call.of(tree, layout, mask), custom_mask=square.flatten())


def _one_bit(tree: torch.Tensor) -> torch.Tensor:
    changed = tree.clone()
    changed[1, 2] = True
    return changed


def _jump(c: Call) -> torch.Tensor:
    nodes, parents = c.known()["nodes"].clone(), c.known()["parents"]
    other = (parents[0, :13] != nodes[0, 1]) & (torch.arange(13) > nodes[0, 1])
    nodes[0, 2] = int(other.nonzero()[0])
    return nodes


def _other_choice(c: Call, row: int) -> torch.Tensor:
    choices = c.known()["target_ids"].clone()
    choices[row] = 10 if choices[row] != 10 else 9
    return choices


def _early() -> Call:
    """A chain whose walk stopped at the root although the bonus is the root's child."""
    return Call(
        token_ids=torch.tensor([[1, 5, 6]]),
        parents=torch.tensor([[-1, 0, 1]]),
        num_nodes=torch.tensor([3]),
        nodes=torch.tensor([[0, -1, -1]]),
        num_accepted=torch.tensor([1]),
        bonus=torch.tensor([5]),
    )


def _dense_prefix(c: Call) -> torch.Tensor:
    written = c.known()["out_cache_loc"].reshape(2, 17)
    counts = c.known()["num_accepted"]
    kept = torch.arange(3) < counts[:, None]
    return torch.where(kept, written[:, :3], -1)


def _steps_stride(c: Call) -> torch.Tensor:
    src = c.known()["src"].clone()
    count = int(c.known()["num_accepted"][1])
    src[1, :count] = c.known()["out_cache_loc"][3 + c.known()["nodes"][1, :count].long()]
    return src


def _lost(c: Call) -> torch.Tensor:
    table = c.known()["slot_table_after"].clone()
    table[0, 9] = table[0, 10]
    return table


CLEAN = {
    "a whole round": whole_round,
    "a whole round with pages of 2": lambda: whole_round(page_size=2),
    "a chain with padding": lambda: whole_round(topk=1, horizon=7),
    "budget 7": lambda: whole_round(budget=7, horizon=7),
    "budget 0": lambda: whole_round(budget=0, horizon=7),
    "no prefix": lambda: whole_round(prefixes=(0, 0)),
    "one request": lambda: whole_round(prefixes=(5,)),
    "fixed buffers": lambda: Call.of(*captured()),
    "full fixed buffers": lambda: Call.of(*captured(max_batch=2)),
    "ragged": lambda: Call.of(*verify([5, 3], 16, 3, ragged=True, horizon=2)),
    "the metadata alone": lambda: short_mask([5, 3], 17, 714, capture=False),
    "a shared prefix": lambda: Call(kv_indptr=indptr([2, 2]), kv_indices=torch.tensor([4, 7, 4, 9])),
    "tied siblings in order": lambda: replace(tied(), token_ids=torch.tensor([[1, 4, 5]])),
    "an engine's padding rows that share a dummy slot": lambda: put(replace(whole_round(), slot_table=None), "out_cache_loc", slice(14, 17), int(whole_round().known()["out_cache_loc"][13])),
    "offsets of 64 bits": lambda: Call(num_rows=15409, vocab_size=151936, offset_bits=64),
    "the last offset of 32 bits": lambda: Call(kv_pool_size=2**21, slot_stride=1024, offset_bits=32),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_clean(name: str) -> None:
    """A clean call breaks nothing."""
    assert [str(violation) for violation in violations(CLEAN[name]())] == []


def test_clean_round_checks_all_but_buffers() -> None:
    """A whole round leaves nothing unchecked but what only fixed buffers have."""
    assert set(report(whole_round()).not_checked) == {"buffer_capacity", "stale_tail"}
    assert not {"buffer_capacity", "stale_tail"} & set(report(CLEAN["fixed buffers"]()).not_checked)


def ident(mutant: Mutant) -> str:
    return f"{mutant.invariant}: {mutant.what}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=ident)
def test_mutant(mutant: Mutant) -> None:
    """A mutant is named by its invariant, with the request, the numbers, and the cause or no cause."""
    found = [v for v in violations(mutant.call()) if v.invariant == mutant.invariant]
    assert found, f"{mutant.invariant} did not see it; broken: {[v.invariant for v in violations(mutant.call())]}"
    named = next((v for v in found if v.request == mutant.request and _numbers(mutant, v)), None)
    assert named is not None, "\n".join(map(str, found))
    assert mutant.hint in named.hint
    assert bool(mutant.hint) == bool(named.hint), named.hint


def _numbers(mutant: Mutant, violation: InvariantViolation) -> bool:
    return (mutant.expected is None or violation.expected == mutant.expected) and (
        mutant.found is None or violation.found == mutant.found
    )


def test_every_invariant_has_a_mutant() -> None:
    """No invariant of the table is without a mutant that breaks it."""
    assert {mutant.invariant for mutant in MUTANTS} == {row.id for row in TABLE}


def test_identifiers_are_distinct() -> None:
    """An id names one invariant."""
    assert len({row.id for row in TABLE}) == len(TABLE)


def test_given_stands_before() -> None:
    """What an invariant presupposes is checked before it."""
    order = [row.id for row in TABLE]
    for row in TABLE:
        assert all(order.index(name) < order.index(row.id) for name in row.given), row.id

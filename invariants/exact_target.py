"""A tiny target model whose every number is an integer, so that any wrong read changes its choice.

Two attention layers over a paged KV pool, with queries and keys of zero: a row's output is then the
plain mean of the values it sees. Values are small integers, and a correct row sees ``position + 1``
entries, so mean * (position + 1), rounded, is the exact sum whatever the order of summation. The
values of layer 2 depend on what layer 1 saw, so a wrong mask also spoils the KV that is committed.
``ExactTarget.linear`` says the same in plain Python, token by token, with no cache and no mask.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.spec.attention import verify_attention
from ddtree.spec.commit import commit_kv
from ddtree.spec.contracts import Acceptance, Commit, DraftTree, FlatMask, PagedKV, VerifyLayout

PRIME = 1009
LAYERS = 2
KV_HEADS = 2
HEAD_DIM = 4
Q_HEADS = 4
POISON = float("nan")


def _code(token: int, position: int, lane: int) -> int:
    """Layer 1's value: tells tokens, positions and lanes apart (a lane is one head's one dim)."""
    return (31 * token + 7) * (17 * position + 3) * (lane + 1) % PRIME


def _logits(state: Sequence[int], vocab: int) -> list[float]:
    """Logits between 0 and 8, all different unless ``key`` is PRIME - 13."""
    key = sum((lane + 1) * value for lane, value in enumerate(state)) % PRIME
    return [((key + 13) * (token + 1)) % PRIME / 128 for token in range(vocab)]


class ExactTarget:
    """A ``spec.Target``: reads widths from the layout and visibility from the mask it is given.

    Args:
        prompts: the committed tokens of each request; the root is not among them.
        slot_table: int64 ``[B, max_context]``; cloned, since commits may permute it.
        num_slots: slots of the KV pool. All but the prompts' are NaN, so a read of a slot that
            nothing was written to shows.
        vocab: number of tokens.
        page_size: slots of one page.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        slot_table: Int64[Tensor, "B max_context"],
        num_slots: int,
        vocab: int,
        page_size: int = 1,
    ) -> None:
        self.vocab = vocab
        pools = [
            torch.full((num_slots, KV_HEADS, HEAD_DIM), POISON, dtype=torch.float64)
            for _ in range(LAYERS)
        ]
        keys = tuple(torch.full_like(pool, POISON) for pool in pools)
        self.kv = PagedKV(keys, tuple(pools), slot_table.clone(), page_size)
        for b, prompt in enumerate(prompts):
            values, _ = self.linear(prompt)
            slots = slot_table[b, : len(prompt)]
            for layer in range(LAYERS):
                self.kv.keys[layer][slots] = 0.0
                self.kv.values[layer][slots] = values[layer]

    @property
    def slot_table(self) -> Int64[Tensor, "B max_context"]:
        """Slot of entry i of request b."""
        return self.kv.slot_table

    def linear(
        self, tokens: Sequence[int]
    ) -> tuple[list[Float[Tensor, "n kv_heads head_dim"]], list[list[float]]]:
        """The values that each layer caches for ``tokens``, and the logits after each of them."""
        lanes = KV_HEADS * HEAD_DIM
        sums = [[0] * lanes for _ in range(LAYERS)]
        cached: list[list[list[int]]] = [[] for _ in range(LAYERS)]
        logits = []
        for position, token in enumerate(tokens):
            state = [0] * lanes
            for layer in range(LAYERS):
                value = [
                    (5 * state[lane] + _code(token, position, lane)) % PRIME
                    for lane in range(lanes)
                ]
                cached[layer].append(value)
                sums[layer] = [s + v for s, v in zip(sums[layer], value, strict=True)]
                state = [s % PRIME for s in sums[layer]]
            logits.append(_logits(state, self.vocab))
        shape = (len(tokens), KV_HEADS, HEAD_DIM)
        return [torch.tensor(c, dtype=torch.float64).reshape(shape) for c in cached], logits

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens, decoded one at a time; of equal logits the lowest token."""
        context = list(tokens)
        for _ in range(count):
            last = self.linear(context)[1][-1]
            context.append(last.index(max(last)))
        return context[len(tokens) :]

    def forward(
        self, tree: DraftTree, layout: VerifyLayout, mask: FlatMask
    ) -> Float[Tensor, "T vocab"]:
        """Logits of every query row; the rows' own KV goes to ``layout.out_cache_loc``."""
        ends = layout.qo_indptr.tolist()
        rows = layout.positions.shape[0]
        tokens = torch.zeros(rows, dtype=torch.int64)
        # a layout wider than the tree is told by verify_attention and its checks; such rows are token 0
        for b, row in enumerate(tree.token_ids):
            held = tokens[ends[b] : ends[b + 1]][: row.numel()]
            held.copy_(row[: held.numel()])
        lane = torch.arange(KV_HEADS * HEAD_DIM)
        code = (31 * tokens + 7)[:, None] * (17 * layout.positions + 3)[:, None] * (lane + 1)
        code = code.remainder(PRIME).double()

        state = torch.zeros_like(code)
        query = torch.zeros(rows, Q_HEADS, HEAD_DIM, dtype=torch.float64)
        key = torch.zeros(rows, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        written = layout.out_cache_loc >= 0
        for layer in range(LAYERS):
            value = (5 * state + code).remainder(PRIME).reshape(key.shape)
            output, _ = verify_attention(
                query,
                key,
                value,
                self.kv.keys[layer],
                self.kv.values[layer],
                layout,
                mask,
                compute_dtype=torch.float64,
            )
            self.kv.keys[layer][layout.out_cache_loc[written]] = 0.0
            self.kv.values[layer][layout.out_cache_loc[written]] = value[written]
            # one query head of each group: [rows, Q_HEADS, HEAD_DIM] -> [rows, lanes]
            seen = output[:, :: Q_HEADS // KV_HEADS].reshape(rows, -1)
            state = (seen * (layout.positions + 1)[:, None]).round().remainder(PRIME)
        key_of_row = (state * (lane + 1)).sum(1).remainder(PRIME)
        token = torch.arange(self.vocab) + 1
        return ((key_of_row[:, None] + 13) * token).remainder(PRIME) / 128

    def commit(self, layout: VerifyLayout, acceptance: Acceptance) -> Commit:
        """Keep the accepted rows' KV as the next entries of the prefix."""
        return commit_kv(self.kv, layout, acceptance)

"""Independent oracles: each says what a step means in plain Python loops, using no code of spec.

They are exponential or quadratic where spec is not, and share no formula with it, so a mistake
would have to be made twice, in two ways, to go unseen.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product

Path = tuple[int, ...]


# trees


def candidates(row: Sequence[float], topk: int | None) -> list[tuple[int, float]]:
    """(token, log-prob) of one depth, best first, equal ones by token id; never -inf."""
    finite = [(token, value) for token, value in enumerate(row) if value != -math.inf]
    finite.sort(key=lambda pair: (-pair[1], pair[0]))
    return finite if topk is None else finite[:topk]


def best_first(
    log_probs: Sequence[Sequence[float]], budget: int, topk: int | None = None
) -> list[tuple[Path, Path, float]]:
    """(rank path, token path, score) of the best nodes: all rank paths listed, sorted, cut."""
    depths = [candidates(row, topk) for row in log_probs]
    nodes = []
    for length in range(1, len(depths) + 1):
        for ranks in product(*(range(len(depth)) for depth in depths[:length])):
            chosen = [depths[d][rank] for d, rank in enumerate(ranks)]
            score = 0.0
            for _, value in chosen:
                score += value
            nodes.append((ranks, tuple(token for token, _ in chosen), score))
    nodes.sort(key=lambda node: (-node[2], node[0]))
    return nodes[:budget]


def best_surrogates(log_probs: Sequence[Sequence[float]]) -> list[float]:
    """For every size k, the largest sum of exp(score) over all valid trees of k non-root nodes.

    Every subset of the full tree's nodes is tried; valid means that it holds its nodes' parents.
    """
    paths = [
        path
        for length in range(1, len(log_probs) + 1)
        for path in product(range(len(log_probs[0])), repeat=length)
    ]
    place = {path: i for i, path in enumerate(paths)}
    mass = [math.exp(sum(log_probs[d][token] for d, token in enumerate(path))) for path in paths]
    parent = [1 << place[path[:-1]] if len(path) > 1 else 0 for path in paths]
    best = [0.0] + [-math.inf] * len(paths)
    for subset in range(1 << len(paths)):
        members = [i for i in range(len(paths)) if subset >> i & 1]
        if all(parent[i] & subset == parent[i] for i in members):
            best[len(members)] = max(best[len(members)], sum(mass[i] for i in members))
    return best


def token_paths(token_ids: Sequence[int], parents: Sequence[int], num_nodes: int) -> list[Path]:
    """The tokens from below the root to each node; the root's own is ()."""
    paths: list[Path] = [()]
    for node in range(1, num_nodes):
        paths.append((*paths[parents[node]], token_ids[node]))
    return paths


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """The node's path, root first, itself last; a padding row's path is itself."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


# masks


def flat_mask(
    parents: Sequence[Sequence[int]], prefix_lens: Sequence[int], q_lens: Sequence[int]
) -> list[bool]:
    """The flat mask of a batch, entry by entry."""
    allowed = []
    for tree, prefix_len, q_len in zip(parents, prefix_lens, q_lens, strict=True):
        for row in range(q_len):
            path = ancestors(tree, row)
            allowed += [True] * prefix_len
            allowed += [node in path for node in range(q_len)]
    return allowed


# attention


def path_attention(
    query: Sequence[float],
    keys: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    scale: float,
    softcap: float | None = None,
    sink: float | None = None,
    window: int | None = None,
) -> tuple[list[float], float]:
    """Plain causal attention of the last token of one path, and the log-sum-exp.

    ``keys`` and ``values`` are those of the path's entries in order, the query's own last, so the
    window is simply the last ``window`` of them. A sink joins the denominator and has no value.
    """
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    logits = [scale * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    if softcap is not None:
        logits = [softcap * math.tanh(logit / softcap) for logit in logits]
    largest = max(logits if sink is None else [*logits, sink])
    weights = [math.exp(logit - largest) for logit in logits]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink - largest))
    output = [
        sum(weight * value[d] for weight, value in zip(weights, values, strict=True)) / total
        for d in range(len(values[0]))
    ]
    return output, largest + math.log(total)


# acceptance


def sequential(choose: Callable[[Path], int], paths: set[Path], horizon: int) -> tuple[Path, int]:
    """Decode one token at a time; keep while the tokens so far are a path of the tree.

    Returns the accepted tokens (the root's is ()) and the token after them.
    """
    tokens: Path = ()
    while True:
        token = choose(tokens)
        if len(tokens) == horizon or (*tokens, token) not in paths:
            return tokens, token
        tokens = (*tokens, token)


def truncated(
    logits: Sequence[float], temperature: float, top_k: int | None, top_p: float | None
) -> list[float]:
    """Temperature, then the top_k most likely, then the fewest of them that hold top_p; renormalised.

    Equal logits count as ordered by token id, so the kept set is one set. Temperature 0: the best.
    """
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return [1.0 if token == order[0] else 0.0 for token in range(len(logits))]
    largest = logits[order[0]]
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    kept = order if top_k is None else order[:top_k]
    if top_p is not None:
        total, mass, nucleus = sum(weights[t] for t in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weights[token]
            if mass >= top_p * total:
                break
        kept = nucleus
    total = sum(weights[token] for token in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(logits))]


def cut_points(sample: Callable[[float], int], vocab: int) -> list[Fraction]:
    """Exact probability of each token under ``sample(uniform)``, found by bisection.

    ``sample`` must be non-decreasing in the uniform, which is a multiple of 2^-53 below 1.
    """
    whole = 1 << 53
    starts = [0]
    for token in range(1, vocab):
        low, high = starts[-1], whole  # the first uniform whose sample is >= token
        while low < high:
            middle = (low + high) // 2
            if sample(middle / whole) >= token:
                high = middle
            else:
                low = middle + 1
        starts.append(low)
    ends = [*starts[1:], whole]
    return [Fraction(end - start, whole) for start, end in zip(starts, ends, strict=True)]


# random numbers


def philox4x32(counter: Sequence[int], key: Sequence[int], rounds: int = 10) -> tuple[int, ...]:
    """Philox-4x32 of Salmon et al. (SC 2011), section 5 and table 2."""
    word = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & word, a >> 32 ^ c3 ^ k1, a & word
        k0, k1 = k0 + 0x9E3779B9 & word, k1 + 0xBB67AE85 & word
    return c0, c1, c2, c3

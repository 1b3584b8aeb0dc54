"""The target's distribution, and random numbers that a replay repeats.

A uniform number belongs to a seed and a position, not to a row of a tree: the token after position p
is sampled with the number of p, once. So with one seed the text is the same for every budget, every
drafter and for decoding one token at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ddtree.spec.contracts import VerifyLayout
from ddtree.spec.errors import given, require, require_int, require_number
from ddtree.spec.mask import request_lens

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | Sequence[int] | Int64[Tensor, " B"] = 0
    """One seed for each request, or one for all: request b then uses ``seed + b``. A tensor holds one for
    each, in the bits of int64, and a captured graph reads it at every replay."""

    def __post_init__(self) -> None:
        """Refuse parameters that define no distribution, and seeds outside 64 bits.

        Raises:
            InputError: as ``target_distribution`` and ``position_uniforms`` raise it.
        """
        require_parameters(self.temperature, self.top_k, self.top_p)
        text = isinstance(self.seed, (str, bytes))
        require(not text, f"seed is {given(self.seed)}; expected a whole number")
        if not isinstance(self.seed, Tensor):
            for seed in self.seed if isinstance(self.seed, Sequence) else (self.seed,):
                _require_seed(seed)

    def seeds(self, batch: int) -> list[int]:
        """Return the seed of each request."""
        if isinstance(self.seed, int):
            return [self.seed + b for b in range(batch)]
        require(len(self.seed) == batch, f"{len(self.seed)} seeds for {batch} requests")
        if isinstance(self.seed, Tensor):
            return [seed % 2**64 for seed in self.seed.tolist()]
        return list(self.seed)


def first_argmax(logits: Float[Tensor, "T vocab"]) -> Int64[Tensor, " T"]:
    """Return each row's likeliest token, ties to the smallest id.

    Raises:
        InputError: a row that is empty, holds NaN or has no finite entry.
    """
    require(
        logits.ndim == 2 and logits.shape[1] >= 1,
        f"logits have shape {list(logits.shape)}; expected [rows, vocab] with a token at least",
    )
    best = logits.amax(dim=1, keepdim=True)
    lost = ~best.isfinite().flatten()  # amax carries NaN
    require(
        not lost.any(),
        f"logits row {int(lost.int().argmax()) if lost.numel() else 0} has no finite maximum: "
        "it holds NaN or +inf, or -inf alone",
    )
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[1]).amin(dim=1)


def target_distribution(
    logits: Float[Tensor, "T vocab"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Float64[Tensor, "T vocab"]:
    """Return the distribution that tokens are sampled from: temperature, then top-k, then top-p.

    Likeliest first, ties by token id, ``top_k`` keeps the first k tokens and ``top_p`` the shortest
    prefix of what is left whose probability, renormalised after top-k, reaches ``top_p`` (the order
    and meaning of Transformers' logits warpers, made exact at ties).

    Raises:
        InputError: a negative or not finite temperature, top_k below 1, top_p outside (0, 1], or a
            row without a finite maximum.
    """
    require_parameters(temperature, top_k, top_p)
    best = first_argmax(logits)
    if temperature == 0:
        return torch.nn.functional.one_hot(best, logits.shape[1]).double()
    peak = logits.double().gather(1, best[:, None])
    scaled = (
        logits.double() - peak
    ) / temperature  # the peak first: a tiny temperature cannot overflow it
    ranked, order = scaled.sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        ranked[:, top_k:] = -torch.inf
    probs = ranked.softmax(dim=1)
    if top_p is not None:
        before = probs.cumsum(dim=1) - probs
        probs = probs.masked_fill(before >= top_p, 0.0)
        probs /= probs.sum(dim=1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, order, probs)


def require_parameters(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse parameters that define no distribution."""
    require_number("temperature", temperature)
    require(temperature >= 0, "temperature is {}; the least is 0, greedy", temperature)
    if top_k is not None:
        require_int("top_k", top_k, 1, "the likeliest token (None: all)")
    if top_p is not None:
        require_number("top_p", top_p)
        require(
            0 < top_p <= 1,
            "top_p is {}; it must be above 0 and at most 1 (None: all tokens)",
            top_p,
        )


def _require_seed(seed: int) -> None:
    """Refuse what is no unsigned number of 64 bits."""
    require_int("seed", seed, 0, most=2**64 - 1)


def sample(
    probs: Float64[Tensor, "T vocab"], uniforms: Float64[Tensor, " T"]
) -> Int64[Tensor, " T"]:
    """Return each row's token by inverting its distribution function.

    Token v is chosen where ``sum(probs[:v]) <= u * sum(probs) < sum(probs[:v + 1])``.

    Raises:
        InputError: a uniform outside [0, 1).
    """
    outside = ~((uniforms >= 0) & (uniforms < 1))
    require(
        not outside.any(),
        f"uniforms holds {float(uniforms[outside][0]) if outside.any() else 0.0}; expected numbers in [0, 1)",
    )
    cdf = probs.cumsum(dim=1)
    ids = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True).flatten()
    last = probs.shape[1] - 1 - first_argmax((probs.flip(1) > 0).double())
    return torch.minimum(ids, last)  # rounding may push u * total onto the total


def row_uniforms(sampling: Sampling, layout: VerifyLayout, batch: int) -> Float64[Tensor, " T"]:
    """Return the uniform number of each query row: that of its request's seed and its position."""
    rows = []
    for b, seed in enumerate(sampling.seeds(batch)):
        start = int(layout.qo_indptr[b])
        _, q_len = request_lens(layout, b)
        rows.append(position_uniforms(seed, layout.positions[start : start + q_len]))
    return torch.cat(rows)


def position_uniforms(seed: int, positions: Int64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """Return uniform numbers in [0, 1), 53 bits each, of (seed, position): Philox 4x32-10.

    The key is the seed's two 32-bit words, the counter ``(position, 0, 0, 0)``; the number is the
    first 53 of the output's first 64 bits, low word last, over 2**53.
    """
    _require_seed(seed)
    zero = torch.zeros_like(positions)
    words = philox((positions & WORD, positions >> 32, zero, zero), (seed & WORD, seed >> 32))
    return ((words[0] << 21) | (words[1] >> 11)).double() * 2.0**-53


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32 with ten rounds (Salmon et al., SC 2011) on 32-bit words held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _multiply(PHILOX_MULTIPLIERS[0], c0)
        hi1, lo1 = _multiply(PHILOX_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + PHILOX_WEYL[0]) & WORD, (k1 + PHILOX_WEYL[1]) & WORD
    return c0, c1, c2, c3


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32-bit product, in two halves so that int64 holds each."""
    low = factor * (word & 0xFFFF)
    high = factor * (word >> 16)
    low = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (low >> 32), low & WORD

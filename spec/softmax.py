"""Log-probs of logits, the same bits on every device: what step 1 takes for log-softmax.

A tree is a function of its float32 log-probs, ties included. So log-softmax has to be exact too: not
only close to the true one, which it is, but the same wherever and in whatever order it is computed.
"""

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from ddtree.spec.errors import require
from ddtree.spec.exact import exponential, log_1p, split_steps, weight_steps

TILE = 4096
"""Neighbouring tokens whose weights are summed relative to the largest of them."""
TILE_REACH, ROW_REACH = 40.0, 100.0
"""What lies further below the largest of its tile, or of all tiles, weighs less than half a step."""
MAX_VOCAB = 2**22
"""Most tokens of a row: its sums then fit 63 bits."""


def log_softmax(logits: Float[Tensor, "*rows vocab"]) -> Float32[Tensor, "*rows vocab"]:
    """Return each row's natural log-probs; what is -inf stays so.

    With peak the largest logit and rest the sum of exp(logit - peak) over all tokens but one of it::

        log_prob = float32((float64(logit) - float64(peak)) - log(1 + rest))

    Weights exp(logit - peak of the tile) are rounded to steps of 2**-50 and summed as integers in
    each tile; the tiles' sums, brought to the row's peak, are rounded to steps of 2**-91 and summed
    likewise. So nothing depends on an order. A log-prob is within one unit in the last place of the
    true one, or within 2**-39 of it, which is more only where the likeliest token takes all but
    2**-14. Below float32's range it is -inf.

    Args:
        logits: ``[*rows, vocab]``, read as float32: finite or -inf.

    Raises:
        InputError: an empty vocabulary, or one above ``MAX_VOCAB``.
    """
    vocab = logits.shape[-1]
    require(1 <= vocab <= MAX_VOCAB, f"a row has {vocab} logits; expected 1 to {MAX_VOCAB}")
    value = logits.detach().float()
    padded = torch.nn.functional.pad(value, (0, -vocab % TILE), value=-torch.inf)
    tiles = padded.unflatten(-1, (-1, TILE))

    peaks = tiles.amax(-1)
    sums = weight_steps(_weight(tiles, peaks, TILE_REACH), bits_of).sum(-1)  # of 2**-50

    peak = peaks.amax(-1)
    weights = _weight(peaks, peak, ROW_REACH) * (sums.double() * 2.0**-10)  # of 2**-40
    whole, part = split_steps(weights, bits_of)
    rest = whole.sum(-1) - 2**40  # all but the likeliest, which weighs 1; no token: below 0
    total = rest.double() * 2.0**-40 + part.sum(-1).double() * 2.0**-91
    log_total = log_1p(total.clamp(min=0.0), bits_of, float_of)

    base = _finite(peak).double()
    log_prob = (value.double() - base[..., None]) - log_total[..., None]
    lowest = torch.finfo(torch.float32).min
    return torch.where(log_prob >= lowest, log_prob, -torch.inf).float()


def _weight(value: Tensor, peak: Tensor, reach: float) -> Tensor:
    """Return exp(value - peak); of what is out of reach, so little that it comes to no step."""
    base = _finite(peak)[..., None]
    difference = value.double() - base.double()
    difference = torch.where(value >= base - reach, difference, -reach)
    weight: Tensor = exponential(difference, bits_of, float_of)
    return weight


def _finite(peak: Tensor) -> Tensor:
    """Return the peak, 0 where it is that of no token."""
    return torch.where(peak > -torch.inf, peak, 0.0)


def bits_of(number: Float64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Return a float64's bits as an integer."""
    return number.view(torch.int64)


def float_of(bits: Int64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return the float64 of those bits."""
    return bits.view(torch.float64)

"""top-k, top-p and min-p, in that order: the lowest score that survives them.

In: scores [b, N, V] after the division by the temperature. Out: a floor [b, N, 1]. Equal scores survive or fall together, so
no sort order matters. `filtered` does all of it, for scores that are not divided yet.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated
from foreword.ops.noise import column, divided


class Filters(NamedTuple):
    """The filters of each sequence, [b]; None where no sequence of the round has that filter."""

    top_k: Tensor | None = None
    largest_k: int = 0  # a bound on every top_k, known to the host
    top_p: Tensor | None = None
    min_p: Tensor | None = None


def _kernel_serves(scores: Tensor, *_: Any) -> bool:
    return scores.dtype != torch.float64


@accelerated("round.filters:filtered", when=_kernel_serves)
def filtered(scores: Tensor, temperature: Tensor, filters: Filters) -> Tensor:
    """Return scores, with minus infinity for those that the filters drop at temperature [b]."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.masked_fill(~survivors(divided(wide, temperature), filters), -math.inf)


def survivors(scores: Tensor, filters: Filters) -> Tensor:
    """Return the tokens that all filters keep: [b, N, V] bool."""
    return scores >= lowest(scores, filters, scores.logsumexp(-1, keepdim=True))


def lowest(scores: Tensor, filters: Filters, log_mass: Tensor) -> Tensor:
    """Return the lowest score that survives: [b, N, 1]. `scores` may be the best few of a row; `log_mass` is that of all."""
    floor = torch.full_like(scores[..., :1], -math.inf)
    if filters.top_k is not None:
        floor = _top_k_floor(scores, filters.top_k, filters.largest_k)
        kept = scores.masked_fill(scores < floor, -math.inf)
        log_mass = torch.where(floor > -math.inf, kept.logsumexp(-1, keepdim=True), log_mass)
    if filters.top_p is not None:
        probability = torch.where(scores < floor, 0, (scores - log_mass).exp()).to(torch.float32)
        floor = torch.maximum(floor, _top_p_floor(scores, probability, filters.top_p))
    if filters.min_p is not None:
        floor = torch.maximum(floor, scores.amax(-1, keepdim=True) + column(filters.min_p, scores).log())
    return floor


def _top_k_floor(scores: Tensor, k: Tensor, largest: int) -> Tensor:
    """Return the k-th best score of each row; minus infinity where top-k is off."""
    largest = min(largest, scores.shape[-1])
    top = scores.topk(largest, dim=-1).values
    place = (k - 1).clamp(0, largest - 1).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return top.gather(-1, place).masked_fill((k <= 0).view(-1, 1, 1), -math.inf)


def _top_p_floor(scores: Tensor, probability: Tensor, top_p: Tensor) -> Tensor:
    """Return the score of the least likely token in the nucleus. A token is in it if those above hold less than top_p.

    Positive floats order like their bit patterns, so halving the range of patterns finds the exact edge in 31 sums: no
    sort, the same work for every input, and a fixed shape.
    """
    mass = column(top_p, probability)
    low = torch.zeros_like(probability[..., :1], dtype=torch.int32)  # the mass at and above low reaches top_p, or is all
    high = probability.amax(-1, keepdim=True).view(torch.int32) + 1  # the mass at and above high does not
    for _ in range(31):
        middle = low + (high - low) // 2
        edge = middle.view(torch.float32)
        enough = torch.where(probability >= edge, probability, 0).sum(-1, keepdim=True) >= mass
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    inside = (probability >= low.view(torch.float32)) & (probability > 0)
    least = torch.where(inside, scores, math.inf).amin(-1, keepdim=True)
    return least.masked_fill(mass >= 1, -math.inf)

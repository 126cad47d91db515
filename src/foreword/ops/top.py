"""The best tokens of long rows of scores, plain or under noise and filters.

In: scores [b, N, V], perhaps the `Noise` that tokens are compared under and the `Filters` that drop some. Out: the k best by
place or token, on demand with their log-probabilities; or the one that is sampled. Of equal scores the first wins where one
token is asked for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated
from foreword.ops.filters import Filters, lowest, survivors
from foreword.ops.noise import Noise, all_tokens, column, gumbel, under

MOST = 16  # best ones that the kernel looks for
_BLOCK = 128
_BEST = 256  # a nucleus rarely has more tokens than this


def widened(logits: Tensor) -> Tensor:
    """In float32 at least, which half precision fits into exactly: for all that is more than a comparison."""
    return logits if logits.dtype.itemsize >= 4 else logits.float()


def kernel_serves(scores: Tensor, k: int, *_: Tensor | Noise | None) -> bool:
    """The kernel compares in float32, and finds few."""
    return scores.dtype != torch.float64 and k <= MOST


@accelerated("round.top:top", when=kernel_serves)
def top(scores: Tensor, k: int, noise: Noise | None = None) -> Tensor:
    """Places of the k largest of scores [.., V], largest first: [.., k].

    A vocabulary is long and k is short: what is among the k largest lies in one of the k blocks with the largest maxima,
    so one sweep finds those, and the rest is done on a few hundred numbers.
    """
    scores = under(scores, noise)
    size = scores.shape[-1]
    if size % _BLOCK or size < 4 * k * _BLOCK:
        return scores.topk(k, dim=-1).indices
    blocks = scores.unflatten(-1, (-1, _BLOCK))
    chosen = blocks.amax(-1).topk(k, dim=-1).indices
    few = blocks.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, _BLOCK)).flatten(-2)
    places = few.topk(k, dim=-1).indices
    return chosen.gather(-1, places // _BLOCK) * _BLOCK + places % _BLOCK


@accelerated("round.top:top_with_chances", when=kernel_serves)
def top_with_chances(
    scores: Tensor, k: int, noise: Noise | None = None, vocabulary: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same, and the log-probability of each by a softmax over the row: twice [.., k]. With `vocabulary` [V], column c is
    token vocabulary[c], to the noise and in the answer."""
    if noise is not None:
        scores = under(widened(scores), noise, vocabulary)
    places, scores = top(scores, k), widened(scores)
    chances = scores.gather(-1, places) - scores.logsumexp(-1, keepdim=True)
    return places if vocabulary is None else vocabulary[places], chances


@accelerated("top:first_largest_on_cuda")
def first_largest(scores: Tensor) -> Tensor:
    """argmax, of equal ones the first. On a CPU that of torch is slow, and a maximum is quick: so by blocks."""
    if scores.shape[-1] % _BLOCK:
        return scores.argmax(-1)
    blocks = scores.unflatten(-1, (-1, _BLOCK))
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    place = blocks.gather(-2, block.unsqueeze(-1).expand(*block.shape, _BLOCK)).squeeze(-2).argmax(-1)
    return block.squeeze(-1) * _BLOCK + place


def first_largest_on_cuda(scores: Tensor) -> Tensor:
    return top(scores, 1).squeeze(-1) if kernel_serves(scores, 1) else scores.argmax(-1)


@accelerated("top:sampled_on_cuda")
def sampled(scores: Tensor, noise: Noise, filters: Filters | None) -> Tensor:
    """The token that is sampled at every row: [b, N, V] -> [b, N]. Rows at T = 0 take the largest score."""
    scores = widened(scores)
    if filters is None:
        return first_largest(under(scores, noise))
    temperature = column(noise.temperature, scores)
    return _sampled_among_best(scores / torch.where(temperature > 0, temperature, 1), noise, filters)


def sampled_on_cuda(scores: Tensor, noise: Noise, filters: Filters | None) -> Tensor:
    """Every round with noise in it goes this way: a sequence that has no filter is sampled by the same bits whether or not
    its company has one. No filter drops what is largest, so none changes a row at T = 0."""
    if filters is not None:
        wide = widened(scores)
        temperature = column(noise.temperature, wide)
        kept = survivors(wide / torch.where(temperature > 0, temperature, 1), filters)
        scores = scores.masked_fill(~kept, -math.inf)
    if kernel_serves(scores, 1):
        return top(scores, 1, noise).squeeze(-1)
    return under(widened(scores), noise).argmax(-1)


def race(scores: Tensor, tokens: Tensor, noise: Noise, floor: Tensor | None) -> Tensor:
    """Scores after the division by T, filtered and with noise; rows at T = 0 have neither. `tokens` are those whose scores
    are given."""
    samples = column(noise.temperature, scores) > 0
    filtered = scores if floor is None else scores.masked_fill(~(scores >= floor) & samples, -math.inf)
    return torch.where(samples, filtered + gumbel(noise.key, noise.position, tokens), filtered)


def _sampled_among_best(scores: Tensor, noise: Noise, filters: Filters) -> Tensor:
    """The sampled token, for the CPU, where filters and noise over a whole vocabulary cost more than a small model's pass.

    If not even the last of the best scores survives the filters, no other token does, and the race is among the best. Each
    row answers that for itself, so its token does not depend on its company.
    """
    log_mass = scores.logsumexp(-1, keepdim=True)
    few = scores.topk(min(max(_BEST, filters.largest_k + 1), scores.shape[-1]), dim=-1)
    floor = lowest(few.values, filters, log_mass)
    winner = race(few.values, few.indices, noise, floor).argmax(-1, keepdim=True)
    samples = (noise.temperature > 0).unsqueeze(1)
    choice = torch.where(samples, few.indices.gather(-1, winner).squeeze(-1), scores.argmax(-1))
    sure = (floor > few.values[..., -1:]).squeeze(-1) | ~samples
    if bool(sure.all()):
        return choice
    whole = race(scores, all_tokens(scores), noise, lowest(scores, filters, log_mass))
    return torch.where(sure, choice, whole.argmax(-1))

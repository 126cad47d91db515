"""The best tokens of long rows of scores, plain or under noise and filters.

In: scores [b, N, V], and optionally the `Noise` under which tokens are compared and the `Filters` that drop some. Out: the k
best by place or token, if wanted with their log-probabilities; or the sampled token. If only one token is asked for, the
first of equal scores wins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated
from foreword.ops.filters import Filters, filtered, lowest
from foreword.ops.noise import Noise, all_tokens, column, divided, gumbel, under

MOST = 16  # the most tokens that the kernel finds
_BLOCK = 128
_BEST = 256  # a nucleus rarely has more tokens than this


def at_least_float32(logits: Tensor) -> Tensor:
    """Return logits in float32 at least, which holds half precision exactly. Anything more than a comparison needs it."""
    return logits if logits.dtype.itemsize >= 4 else logits.float()


def kernel_serves(scores: Tensor, k: int, *_: Tensor | Noise | None) -> bool:
    """Return whether the kernel can run: it compares in float32, and finds at most MOST tokens."""
    return scores.dtype != torch.float64 and k <= MOST


@accelerated("round.top:top", when=kernel_serves)
def top(scores: Tensor, k: int, noise: Noise | None = None) -> Tensor:
    """Return the places of the k largest of scores [.., V], largest first: [.., k].

    V is large and k is small. The k largest lie in the k blocks with the largest maxima, so one sweep finds these blocks,
    and the rest works on a few hundred numbers.
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
    """Do the same, and return also the log-probability of each by a softmax over the row: [.., k] twice. With `vocabulary`
    [V], column c stands for token vocabulary[c], in the noise and in the result."""
    if noise is not None:
        scores = under(at_least_float32(scores), noise, vocabulary)
    places, scores = top(scores, k), at_least_float32(scores)
    chances = scores.gather(-1, places) - scores.logsumexp(-1, keepdim=True)
    return places if vocabulary is None else vocabulary[places], chances


@accelerated("top:first_largest_on_cuda")
def first_largest(scores: Tensor) -> Tensor:
    """Return the argmax, the first of equal scores. On a CPU torch's argmax is slow and its maximum fast, so by blocks."""
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
    """Return the token sampled at every row: [b, N, V] -> [b, N]. Rows at T = 0 take the largest score."""
    scores = at_least_float32(scores)
    if filters is None:
        return first_largest(under(scores, noise))
    return _sampled_among_best(divided(scores, noise.temperature), noise, filters)


def sampled_on_cuda(scores: Tensor, noise: Noise, filters: Filters | None) -> Tensor:
    """Sample on CUDA. Every round with noise runs this code, so a sequence without a filter is sampled by the same bits
    whether or not others in its batch have one. No filter drops the largest score, so none changes a row at T = 0."""
    if filters is not None:
        scores = filtered(scores, noise.temperature, filters)
    if kernel_serves(scores, 1):
        return top(scores, 1, noise).squeeze(-1)
    return under(at_least_float32(scores), noise).argmax(-1)


def race(scores: Tensor, tokens: Tensor, noise: Noise, floor: Tensor | None) -> Tensor:
    """Filter scores, already divided by T, and add noise. Rows at T = 0 have neither. tokens: those that the scores belong
    to."""
    samples = column(noise.temperature, scores) > 0
    filtered = scores if floor is None else scores.masked_fill(~(scores >= floor) & samples, -math.inf)
    return torch.where(samples, filtered + gumbel(noise.key, noise.position, tokens), filtered)


def _sampled_among_best(scores: Tensor, noise: Noise, filters: Filters) -> Tensor:
    """Sample on the CPU, where filters and noise over a whole vocabulary cost more than a small model's pass.

    If the last of the best scores does not survive the filters, no token below it does, so the race is among the best. Each
    row decides that for itself, so its token does not depend on the rest of the batch.
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

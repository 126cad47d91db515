"""The k largest scores of long rows, with log-probabilities on demand, in two launches.

In: scores [.., V] in float32 or half precision, optionally the `Noise` they are compared under, and the tokens of the
columns where these are a draft vocabulary. Out: the k largest, largest first, by column or token, and on demand their
log-probabilities by a softmax over the row. Equal scores keep their order and a NaN comes before every number, as in torch's
stable sort, and for k = 1 as in its argmax. One program finds the k largest of a stretch; then one merges those of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn
from foreword.ops.noise import Noise
from foreword.ops.round.noise import gumbel, noise_bits
from foreword.ops.top import MOST

ONE_WARP = 1024  # scores per warp: several warps would have to exchange each maximum that they find

_LOW_BITS = tl.constexpr(0x7FFFFFFF)
_SHORT_LOW_BITS = tl.constexpr(0x7FFF)
_NOTHING = tl.constexpr(-(2**63))
_SHORT_NOTHING = tl.constexpr(-(2**31))
_HUGE = tl.constexpr(3.0e38)


@triton.jit
def _packed(value, column):
    """Pack score and column into one int64, so that one maximum finds both: larger scores first, then earlier columns."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # the two zeros are equal
    order = tl.where(bits < 0, bits ^ _LOW_BITS, bits)
    order = tl.where(value != value, _LOW_BITS, order)
    return (order.to(tl.int64) << 32) | (column ^ _LOW_BITS).to(tl.int64)


@triton.jit
def _score(packed):
    order = (packed >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ _LOW_BITS, order).to(tl.float32, bitcast=True)


@triton.jit
def _packed_short(value, place):
    """The same in 32 bits, whose maximum a warp finds in one instruction: for half precision and places below 2 ** 16."""
    bits, wide = value.to(tl.int16, bitcast=True).to(tl.int32), value.to(tl.float32)
    order = tl.where(bits < 0, bits ^ _SHORT_LOW_BITS, bits)
    order = tl.where(wide == 0, 0, tl.where(wide != wide, _SHORT_LOW_BITS, order))
    return _at_place(order << 16, place)


@triton.jit
def _at_place(packed, place):
    """Replace the place in a score packed into 32 bits."""
    return (packed >> 16 << 16) | (place ^ 0xFFFF)


@triton.jit
def _place_of(packed):
    return (packed & 0xFFFF) ^ 0xFFFF


@triton.jit
def _short_score(packed, HALF: tl.constexpr):
    order = packed >> 16
    return tl.where(order < 0, order ^ _SHORT_LOW_BITS, order).to(tl.int16).to(HALF, bitcast=True).to(tl.float32)


@triton.jit
def _top_of_stretch(
    scores, best, peaks, masses, key, position, temperatures, vocabulary, width, positions,
    K: tl.constexpr, MASS: tl.constexpr, NOISY: tl.constexpr, VOCABULARY: tl.constexpr, SHORT: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Find the K largest of one stretch of a row, by K maxima; with MASS also its largest value and the sum of exponentials
    relative to it. SHORT: pack into 32 bits, with places in the stretch."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    stretch = row * tl.num_programs(1) + tl.program_id(1)
    within = tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + within
    inside = column < width
    given = tl.load(scores + row * width + column, mask=inside, other=float("-inf"))
    value = given.to(tl.float32)
    if NOISY:
        temperature = tl.load(temperatures + row // positions)
        # Noise belongs to the token, not to its column.
        token = tl.load(vocabulary + column, mask=inside, other=0) if VOCABULARY else column
        sampled = value / tl.where(temperature > 0, temperature, 1.0) + gumbel(
            noise_bits(key + row // positions * 2, tl.load(position + row), token)
        )
        value = tl.where(temperature > 0, sampled, value)
    nothing: tl.constexpr = _SHORT_NOTHING if SHORT else _NOTHING
    remaining = tl.where(inside, _packed_short(given, within) if SHORT else _packed(value, column), nothing)
    for i in tl.static_range(K):
        largest = tl.max(remaining, 0)
        tl.store(best + stretch * K + i, largest)
        remaining = tl.where(remaining == largest, nothing, remaining)
    if MASS:
        peak = tl.minimum(tl.maximum(tl.max(value, 0), -_HUGE), _HUGE)  # finite: a difference of infinities is NaN
        tl.store(peaks + stretch, peak)
        tl.store(masses + stretch, tl.sum(tl.exp(value - peak), 0))


@triton.jit
def _top_of_row(
    scores, best, peaks, masses, vocabulary, places, chances, stretches,
    K: tl.constexpr, MASS: tl.constexpr, VOCABULARY: tl.constexpr, SHORT: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, STRETCHES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Find the K largest of a row among the largest of its stretches, which are EACH columns long."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    best += row * stretches * K
    index = tl.arange(0, BLOCK)
    nothing: tl.constexpr = _SHORT_NOTHING if SHORT else _NOTHING
    remaining = tl.load(best + index, mask=index < stretches * K, other=nothing)
    if SHORT:  # of equal scores the first stretch wins; within a stretch they are in order already
        remaining = tl.where(remaining == nothing, nothing, _at_place(remaining, index))
    log_mass = 0.0
    if MASS:
        stretch = tl.arange(0, STRETCHES)
        inside = stretch < stretches
        peak = tl.load(peaks + row * stretches + stretch, mask=inside, other=-_HUGE)
        mass = tl.load(masses + row * stretches + stretch, mask=inside, other=0.0)
        highest = tl.max(peak, 0)
        log_mass = tl.log(tl.sum(mass * tl.exp(peak - highest), 0)) + highest
    rank = tl.arange(0, triton.next_power_of_2(K))
    found = tl.zeros([triton.next_power_of_2(K)], remaining.dtype)
    for i in tl.static_range(K):
        largest = tl.max(remaining, 0)
        remaining = tl.where(remaining == largest, nothing, remaining)
        found = tl.where(rank == i, largest, found)
    real = rank < K
    if SHORT:
        origin = _place_of(found)
        place = (origin // K * EACH + _place_of(tl.load(best + origin, mask=real, other=0))).to(tl.int64)
        value = _short_score(found, scores.dtype.element_ty)
    else:
        place, value = (found & _LOW_BITS) ^ _LOW_BITS, _score(found)
    tl.store(places + row * K + rank, tl.load(vocabulary + place, mask=real, other=0) if VOCABULARY else place, mask=real)
    if MASS:
        tl.store(chances + row * K + rank, value - log_mass, mask=real)


def top(scores: Tensor, k: int, noise: Noise | None = None) -> Tensor:
    """Return the places of the k largest of scores [.., V], largest first: [.., k]."""
    return _top(scores, k, False, noise, None)[0]


def top_with_chances(
    scores: Tensor, k: int, noise: Noise | None = None, vocabulary: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same, and their scores minus the logsumexp of the row, in float32: twice [.., k]. With `vocabulary` [V], int64,
    column c is token vocabulary[c], for the noise and in the result."""
    return _top(scores, k, True, noise, vocabulary)


def _top(scores: Tensor, k: int, mass: bool, noise: Noise | None, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    width, device = scores.shape[-1], scores.device
    assert 1 <= k <= min(MOST, width) and scores.dtype.itemsize <= 4
    assert vocabulary is None or (vocabulary.shape == (width,) and vocabulary.is_contiguous())
    flat = scores.reshape(-1, width).contiguous()  # reshape gives a view where scores are some of the columns
    rows = flat.shape[0]
    # One warp's worth of scores in both steps: half of that per stretch where the second step has few stretches to merge.
    block = min(triton.next_power_of_2(width), ONE_WARP // 2 if width <= 2**15 else ONE_WARP)
    stretches = triton.cdiv(width, block)
    merged = triton.next_power_of_2(stretches * k)
    short = scores.dtype.itemsize == 2 and noise is None and max(block, merged) <= 2**16
    best = torch.empty(rows, stretches, k, dtype=torch.int32 if short else torch.long, device=device)
    sums = torch.empty(2, rows, stretches if mass else 0, dtype=torch.float32, device=device)
    places = torch.empty(*scores.shape[:-1], k, dtype=torch.long, device=device)
    chances = torch.empty(places.shape if mass else (0,), dtype=torch.float32, device=device)
    noise_tensors = (best, best, best) if noise is None else tuple(tensor.contiguous() for tensor in noise)
    positions = 1 if noise is None else noise.position.shape[-1]
    column_tokens = best if vocabulary is None else vocabulary
    if rows:
        _top_of_stretch[(rows, stretches)](
            flat, best, *sums, *noise_tensors, column_tokens, width, positions, K=k, MASS=mass, NOISY=noise is not None,
            VOCABULARY=vocabulary is not None, SHORT=short, BLOCK=block, **launched(device, 1),
        )  # fmt: skip
        _top_of_row[(rows,)](
            flat, best, *sums, column_tokens, places, chances, stretches, K=k, MASS=mass,
            VOCABULARY=vocabulary is not None, SHORT=short, EACH=block, BLOCK=merged,
            STRETCHES=triton.next_power_of_2(stretches), **launched(device, 4 if merged > ONE_WARP else 1),
        )  # fmt: skip
    return places, chances

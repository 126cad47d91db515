"""The k best of a long row, and how likely each is: what a vocabulary is asked for, in two launches.

In: scores [.., V] in float32 or half precision, perhaps the `Noise` that they race under, and which tokens the columns are,
where these are not all. Out: the k largest, largest first, by place or token, and on demand their log-chances by a softmax
over the row. Of equal scores the first comes first, and a NaN comes before every number: the order of torch's stable sort,
and with k = 1 its argmax. A program finds the best of a stretch, then one joins a row's.
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

ONE_WARP = 1024  # numbers that one warp looks at: what several find one after the other, they have to tell each other

_LOW = tl.constexpr(0x7FFFFFFF)
_SHORT_LOW = tl.constexpr(0x7FFF)
_NOTHING = tl.constexpr(-(2**63))
_SHORT_NOTHING = tl.constexpr(-(2**31))
_HUGE = tl.constexpr(3.0e38)


@triton.jit
def _packed(value, column):
    """Score and place as one whole number, so that one maximum finds both: larger scores first, then earlier columns."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # the two zeros are equal
    order = tl.where(bits < 0, bits ^ _LOW, bits)
    order = tl.where(value != value, _LOW, order)
    return (order.to(tl.int64) << 32) | (column ^ _LOW).to(tl.int64)


@triton.jit
def _score(packed):
    order = (packed >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ _LOW, order).to(tl.float32, bitcast=True)


@triton.jit
def _packed_short(value, place):
    """The same of scores in half precision and of places below 2 ** 16, in 32 bits, whose largest a warp finds at once."""
    bits, wide = value.to(tl.int16, bitcast=True).to(tl.int32), value.to(tl.float32)
    order = tl.where(bits < 0, bits ^ _SHORT_LOW, bits)
    order = tl.where(wide == 0, 0, tl.where(wide != wide, _SHORT_LOW, order))
    return _at_place(order << 16, place)


@triton.jit
def _at_place(packed, place):
    """What is packed in 32 bits, at another place."""
    return (packed >> 16 << 16) | (place ^ 0xFFFF)


@triton.jit
def _place_of(packed):
    return (packed & 0xFFFF) ^ 0xFFFF


@triton.jit
def _short_score(packed, HALF: tl.constexpr):
    order = packed >> 16
    return tl.where(order < 0, order ^ _SHORT_LOW, order).to(tl.int16).to(HALF, bitcast=True).to(tl.float32)


@triton.jit
def _stretch(
    scores, best, peaks, masses, key, position, temperature, words, width, each,
    K: tl.constexpr, MASS: tl.constexpr, NOISY: tl.constexpr, WORDS: tl.constexpr, SHORT: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The K best of one stretch of a row, by K maxima; and its sum of exponentials, behind its peak. SHORT: at their places
    in the stretch."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    piece = row * tl.num_programs(1) + tl.program_id(1)
    within = tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + within
    here = column < width
    given = tl.load(scores + row * width + column, mask=here, other=float("-inf"))
    value = given.to(tl.float32)
    if NOISY:
        heat = tl.load(temperature + row // each)
        token = tl.load(words + column, mask=here, other=0) if WORDS else column  # what the noise is of, wherever it stands
        drawn = value / tl.where(heat > 0, heat, 1.0) + gumbel(
            noise_bits(key + row // each * 2, tl.load(position + row), token)
        )
        value = tl.where(heat > 0, drawn, value)
    nothing: tl.constexpr = _SHORT_NOTHING if SHORT else _NOTHING
    left = tl.where(here, _packed_short(given, within) if SHORT else _packed(value, column), nothing)
    for i in tl.static_range(K):
        largest = tl.max(left, 0)
        tl.store(best + piece * K + i, largest)
        left = tl.where(left == largest, nothing, left)
    if MASS:
        peak = tl.minimum(tl.maximum(tl.max(value, 0), -_HUGE), _HUGE)  # finite, so that infinities behave
        tl.store(peaks + piece, peak)
        tl.store(masses + piece, tl.sum(tl.exp(value - peak), 0))


@triton.jit
def _row(
    scores, best, peaks, masses, words, places, chances, stretches,
    K: tl.constexpr, MASS: tl.constexpr, WORDS: tl.constexpr, SHORT: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, STRETCHES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The K best of a row among the best of its stretches, which are EACH columns long."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    best += row * stretches * K
    at = tl.arange(0, BLOCK)
    nothing: tl.constexpr = _SHORT_NOTHING if SHORT else _NOTHING
    left = tl.load(best + at, mask=at < stretches * K, other=nothing)
    if SHORT:  # of as large ones the first stretch comes first, and in it the first column did already
        left = tl.where(left == nothing, nothing, _at_place(left, at))
    log_mass = 0.0
    if MASS:
        piece = tl.arange(0, STRETCHES)
        here = piece < stretches
        peak = tl.load(peaks + row * stretches + piece, mask=here, other=-_HUGE)
        mass = tl.load(masses + row * stretches + piece, mask=here, other=0.0)
        highest = tl.max(peak, 0)
        log_mass = tl.log(tl.sum(mass * tl.exp(peak - highest), 0)) + highest
    rank = tl.arange(0, triton.next_power_of_2(K))
    found = tl.zeros([triton.next_power_of_2(K)], left.dtype)
    for i in tl.static_range(K):
        largest = tl.max(left, 0)
        left = tl.where(left == largest, nothing, left)
        found = tl.where(rank == i, largest, found)
    real = rank < K
    if SHORT:
        origin = _place_of(found)
        place = (origin // K * EACH + _place_of(tl.load(best + origin, mask=real, other=0))).to(tl.int64)
        value = _short_score(found, scores.dtype.element_ty)
    else:
        place, value = (found & _LOW) ^ _LOW, _score(found)
    tl.store(places + row * K + rank, tl.load(words + place, mask=real, other=0) if WORDS else place, mask=real)
    if MASS:
        tl.store(chances + row * K + rank, value - log_mass, mask=real)


def top(scores: Tensor, k: int, noise: Noise | None = None) -> Tensor:
    """Places of the k largest of scores [.., V], largest first: [.., k]."""
    return _top(scores, k, False, noise, None)[0]


def top_with_chances(
    scores: Tensor, k: int, noise: Noise | None = None, vocabulary: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same, and their scores less the logsumexp of the row, in float32: twice [.., k]. With `vocabulary` [V], int64,
    column c is token vocabulary[c], to the noise and in the answer."""
    return _top(scores, k, True, noise, vocabulary)


def _top(scores: Tensor, k: int, mass: bool, noise: Noise | None, words: Tensor | None) -> tuple[Tensor, Tensor]:
    width, device = scores.shape[-1], scores.device
    assert 1 <= k <= min(MOST, width) and scores.dtype.itemsize <= 4
    assert words is None or (words.shape == (width,) and words.is_contiguous())
    flat = scores.reshape(-1, width).contiguous()  # of a part of the columns, reshape gives a view
    rows = flat.shape[0]
    # As much as one warp looks at in both steps: half a stretch where the second has few of them to look at.
    block = min(triton.next_power_of_2(width), ONE_WARP // 2 if width <= 2**15 else ONE_WARP)
    stretches = triton.cdiv(width, block)
    joined = triton.next_power_of_2(stretches * k)
    short = scores.dtype.itemsize == 2 and noise is None and max(block, joined) <= 2**16
    best = torch.empty(rows, stretches, k, dtype=torch.int32 if short else torch.long, device=device)
    sums = torch.empty(2, rows, stretches if mass else 0, dtype=torch.float32, device=device)
    places = torch.empty(*scores.shape[:-1], k, dtype=torch.long, device=device)
    chances = torch.empty(places.shape if mass else (0,), dtype=torch.float32, device=device)
    race = (best, best, best) if noise is None else tuple(part.contiguous() for part in noise)
    each = 1 if noise is None else noise.position.shape[-1]
    named = best if words is None else words
    if rows:
        _stretch[(rows, stretches)](
            flat, best, *sums, *race, named, width, each, K=k, MASS=mass, NOISY=noise is not None,
            WORDS=words is not None, SHORT=short, BLOCK=block, **launched(device, 1),
        )  # fmt: skip
        _row[(rows,)](
            flat, best, *sums, named, places, chances, stretches, K=k, MASS=mass, WORDS=words is not None, SHORT=short,
            EACH=block, BLOCK=joined, STRETCHES=triton.next_power_of_2(stretches),
            **launched(device, 4 if joined > ONE_WARP else 1),
        )  # fmt: skip
    return places, chances

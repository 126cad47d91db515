"""top-k, top-p and min-p as kernels: scores that a filter drops become minus infinity.

The distance of a score from the best of its row is a float of at least 0, and such floats order like their bit patterns. So
the last pattern that survives is found digit by digit: a launch counts the tokens, or sums their probabilities, up to each
of sixteen patterns, and the next one continues between two of them. Programs share a row, in stretches. The vocabulary alone
decides the order of all sums, so a row's result does not depend on other rows. The torch reference is in ops/filters.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.filters import Filters
from foreword.ops.layer.overlap import launched, take_turn

STRETCH = 1024  # tokens per program
LEVELS = 8  # launches for one filter, each for a digit of four bits

_DIGITS = tl.constexpr(16)
_ALL = tl.constexpr(0x7FFFFFFF)  # an edge that keeps every token


@triton.jit
def _step(LEVEL: tl.constexpr):
    return 1 << 4 * (7 - LEVEL)


@triton.jit
def _scaled(scores, temperatures, width, positions, BLOCK: tl.constexpr):
    """Return a stretch of a row, divided by the temperature, and its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(scores + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row // positions)
    return given / tl.where(temperature > 0, temperature, 1.0), column


@triton.jit
def _row_peak(peaks, stretches, STRETCHES: tl.constexpr):
    stretch = tl.arange(0, STRETCHES)
    place = tl.program_id(0).to(tl.int64) * stretches + stretch
    return tl.max(tl.load(peaks + place, mask=stretch < stretches, other=float("-inf")), 0)


@triton.jit
def _pattern(scaled, peak):
    """Return the bits of the distances from the row's best score."""
    distance = tl.where(scaled == peak, 0.0, peak - scaled)
    return tl.where(scaled == float("-inf"), float("inf"), distance).to(tl.int32, bitcast=True)


@triton.jit
def _lowest_pattern(
    sums, lows, goals, bounds, positions, stretches, LEVEL: tl.constexpr, MASS: tl.constexpr, STRETCHES: tl.constexpr
):
    """Return the lowest pattern that the edge can have if LEVEL of its digits are known. sums: those of the last digit."""
    row = tl.program_id(0).to(tl.int64)
    low = 0
    if LEVEL > 0:
        stretch, digit = tl.arange(0, STRETCHES), tl.arange(0, _DIGITS)
        place = (row * stretches + stretch[:, None]) * _DIGITS + digit[None, :]
        found = tl.sum(tl.load(sums + place, mask=(stretch < stretches)[:, None], other=0.0), 0)
        if LEVEL > 1:
            low, goal = tl.load(lows + row), tl.load(goals + row)
        else:
            bound, whole = tl.load(bounds + row // positions).to(tl.float32), tl.max(found, 0)
            goal = bound * whole if MASS else tl.minimum(bound, whole)
            tl.store(goals + row, goal)  # every program of the row stores the same
        below = tl.sum((found < goal).to(tl.int32), 0)
        low += tl.minimum(below, _DIGITS - 1) * _step(LEVEL - 1)
    return low


@triton.jit
def _peaks(
    scores, peaks, temperatures, width, positions, stretches, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    take_turn(EARLY)
    scaled, _ = _scaled(scores, temperatures, width, positions, BLOCK)
    tl.store(peaks + tl.program_id(0).to(tl.int64) * stretches + tl.program_id(1), tl.max(scaled, 0))


@triton.jit
def _digit(
    scores, peaks, temperatures, edges, bounds, sums_before, sums, lows_before, lows, goals, width, positions, stretches,
    LEVEL: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr, STRETCHES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Count the tokens of a stretch up to each of sixteen patterns, or with MASS sum their probabilities, as far as they
    survived the filter before."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    low = _lowest_pattern(sums_before, lows_before, goals, bounds, positions, stretches, LEVEL, MASS, STRETCHES)
    tl.store(lows + row, low)
    scaled, column = _scaled(scores, temperatures, width, positions, BLOCK)
    bits = _pattern(scaled, _row_peak(peaks, stretches, STRETCHES))
    weight = tl.exp(-bits.to(tl.float32, bitcast=True)) if MASS else tl.full([BLOCK], 1.0, tl.float32)
    weight = tl.where((column < width) & (bits <= tl.load(edges + row)), weight, 0.0)
    digit = tl.arange(0, _DIGITS)
    last = low + (digit * _step(LEVEL) + (_step(LEVEL) - 1))
    if LEVEL == 0:
        last = tl.where(digit >= 7, _ALL, last)
    found = tl.sum(tl.where(bits[:, None] <= last[None, :], weight[:, None], 0.0), 0)
    tl.store(sums + (row * stretches + tl.program_id(1)) * _DIGITS + digit, found)


@triton.jit
def _edge(
    edges, bounds, sums_before, lows_before, goals, positions, stretches,
    LEVEL: tl.constexpr, MASS: tl.constexpr, STRETCHES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Move the edge of a row to the last pattern that survives; not if its filter is off."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    edge = _lowest_pattern(sums_before, lows_before, goals, bounds, positions, stretches, LEVEL, MASS, STRETCHES)
    bound = tl.load(bounds + row // positions)
    is_on = bound < 1 if MASS else bound > 0
    tl.store(edges + row, tl.minimum(edge, tl.load(edges + row)), mask=is_on)


@triton.jit
def _drop(
    scores, kept, peaks, temperatures, edges, least, width, positions, stretches,
    FLOORED: tl.constexpr, BLOCK: tl.constexpr, STRETCHES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the scores that survive, and minus infinity for the others. With FLOORED also by min-p."""
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    scaled, column = _scaled(scores, temperatures, width, positions, BLOCK)
    peak = _row_peak(peaks, stretches, STRETCHES)
    survives = _pattern(scaled, peak) <= tl.load(edges + row)
    if FLOORED:
        survives = survives & (scaled >= peak + tl.log(tl.load(least + row // positions)))
    inside = column < width
    given = tl.load(scores + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(kept + row * width + column, tl.where(survives, given, float("-inf")), mask=inside)


def filtered(scores: Tensor, temperature: Tensor, filters: Filters) -> Tensor:
    """`filtered` of ops/filters.py."""
    width, device = scores.shape[-1], scores.device
    flat = scores.reshape(-1, width).contiguous()
    rows, positions, stretches = flat.shape[0], scores.shape[1], triton.cdiv(width, STRETCH)
    kept, edges = torch.empty_like(flat), torch.full((rows,), _ALL.value, dtype=torch.int32, device=device)
    if not rows:
        return kept.view(scores.shape)
    sums = torch.empty(LEVELS, rows, stretches, _DIGITS.value, dtype=torch.float32, device=device)
    lows, goals = torch.empty(LEVELS, rows, dtype=torch.int32, device=device), sums.new_empty(rows)
    peaks, temperature = sums.new_empty(rows, stretches), temperature.contiguous()
    grid, shared = (rows, stretches), {"STRETCHES": triton.next_power_of_2(stretches), **launched(device)}
    _peaks[grid](flat, peaks, temperature, width, positions, stretches, BLOCK=STRETCH, **launched(device))
    for bounds, mass in ((filters.top_k, False), (filters.top_p, True)):
        if bounds is None:
            continue
        bounds = bounds.contiguous()
        for level in range(LEVELS):
            before = max(level - 1, 0)
            _digit[grid](
                flat, peaks, temperature, edges, bounds, sums[before], sums[level], lows[before], lows[level], goals,
                width, positions, stretches, LEVEL=level, MASS=mass, BLOCK=STRETCH, **shared,
            )  # fmt: skip
        _edge[(rows,)](edges, bounds, sums[-1], lows[-1], goals, positions, stretches, LEVEL=LEVELS, MASS=mass, **shared)
    least = peaks if filters.min_p is None else filters.min_p.contiguous()
    _drop[grid](
        flat, kept, peaks, temperature, edges, least, width, positions, stretches,
        FLOORED=filters.min_p is not None, BLOCK=STRETCH, **shared,
    )  # fmt: skip
    return kept.view(scores.shape)

"""Int8 draft linears for a few rows: drafting need not be exact, and int8 weights halve the bytes that are read.

In: rows [.., K] in half precision, int8 codes with one scale per output, and perhaps a second input [.., K] (`Beside`). Out:
in the rows' dtype. The kernel includes the division of a preceding RMSNorm, whose weight is part of the codes, and what
follows the product (`Behind`). Int8 values are exact in half precision, so compared with ops/layer/linear.py only the
weights are rounded once more. Both start early in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.held import at_whole, folded, hold, times, whole
from foreword.ops.layer.linear import ahead, launch_options
from foreword.ops.layer.overlap import early_launch, fetch, overlaps, take_turn
from foreword.ops.layer.sums import hold_early, joined, start_early
from foreword.ops.layer.tiles import Tiles, fitting, tiles_for


@triton.jit
def _lengths(x_at, epsilon, K: tl.constexpr):
    """The factors 1 / RMS of rows [BLOCK_M]. One warp reads a whole row again, since the product spreads it over all."""
    x = at_whole(x_at[:, None, None], whole(K)[None, :, :], K, "evict_last").to(tl.float32)
    return tl.rsqrt(tl.sum(tl.sum(x * x, 1), 1) / K + epsilon)


@triton.jit
def _sums_held(
    x_at, beside_at, held, held_beside, turned, epsilon,
    K: tl.constexpr, HALVES: tl.constexpr, DIVIDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """Rows times preloaded weights, [BLOCK_M, BLOCK_N]; with two HALVES, plus the second input times its weights."""
    x = hold(x_at, K, SHARES, "evict_last")
    other = hold(beside_at, K, SHARES, "evict_last") if HALVES == 2 else x
    behind = _lengths(x_at, epsilon, K) if DIVIDED else 1.0
    sums = times(x, held, tl.zeros([SHARES, BLOCK_M, BLOCK_N], tl.float32), K, "tf32")
    if HALVES == 2:
        sums = times(other, held_beside, sums, K, "tf32")
    value = folded(sums, BLOCK_M, BLOCK_N, SHARES)
    if DIVIDED:
        value *= tl.where(turned, 1.0, behind)[:, None]
    return value


@triton.jit
def _sums_streamed(
    rows, beside, lines, real, split, turned, epsilon,
    K: tl.constexpr, HALVES: tl.constexpr, DIVIDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The same, BLOCK_K columns at a time. Where several programs share the sums, each takes STEPS of these blocks."""
    per_half: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for some in tl.range(0, STEPS, num_stages=STAGES):
        step = split * STEPS + some
        half = (step >= per_half) & (HALVES == 2)
        at = (step - tl.where(half, per_half, 0)) * BLOCK_K + tl.arange(0, BLOCK_K)
        here = at < K
        x_at = tl.where(half | turned, beside, rows) + real
        x = tl.load(x_at[:, None] + at[None, :], mask=here[None, :], other=0.0, eviction_policy="evict_last")
        w = tl.load(lines[:, None] + (tl.where(half, K, 0) + at)[None, :], mask=here[None, :], other=0)
        if DIVIDED:
            squares += x.to(tl.float32) * x.to(tl.float32)
        value = tl.dot(x, tl.trans(w.to(x.dtype)), value)
    if DIVIDED:
        value *= tl.where(turned, 1.0, tl.rsqrt(tl.sum(squares, 1) / K + epsilon))[:, None]
    return value


@triton.jit(do_not_specialize=["count"])
def _coarse(
    rows, beside, codes, scales, bias, residual, times, out, part, count, columns, epsilon,
    K: tl.constexpr, HALVES: tl.constexpr, TURN: tl.constexpr, DIVIDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SHARES: tl.constexpr,
    SPLITS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, ADDED: tl.constexpr, TIMED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_M rows times BLOCK_N columns, or one of SPLITS parts of their sums, which goes to `part`.

    Two HALVES: weights are twice as long, for both inputs. Columns from TURN on read the second input alone. DIVIDED: by the
    RMS of `rows`, for a norm whose weight is part of the codes.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    turned = (tl.program_id(1) >= tl.cdiv(TURN, BLOCK_N)) & (TURN > 0)
    first, end = tl.where(turned, TURN, 0), tl.where(turned | (TURN == 0), columns, TURN)
    column = first + (tl.program_id(1) - tl.where(turned, tl.cdiv(TURN, BLOCK_N), 0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = codes + tl.minimum(column, columns - 1).to(tl.int64) * (K * HALVES)  # instead of a mask
    real = tl.minimum(row, count - 1) * K
    if SHARES > 0:
        if HALVES == 2 and EARLY:
            fetch(lines + K, K)
        held = hold_early(lines, K, SHARES, EARLY)
        held_beside = hold(lines + K, K, SHARES, "evict_first") if HALVES == 2 else held
        take_turn(EARLY)
        value = _sums_held(
            tl.where(turned, beside, rows) + real, beside + real, held, held_beside, turned, epsilon,
            K, HALVES, DIVIDED, BLOCK_M, BLOCK_N, SHARES,
        )  # fmt: skip
    else:
        start_early(lines + split * STEPS * BLOCK_K, AHEAD, EARLY)
        value = _sums_streamed(
            rows, beside, lines, real, split, turned, epsilon,
            K, HALVES, DIVIDED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, STEPS,
        )  # fmt: skip
    inside = (row < count)[:, None] & (column < end)[None, :]
    if SPLITS > 1:
        at_line = (split * count + row)[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(part + at_line, value, mask=inside)
    else:
        _finish(
            value, scales, bias, residual, times, out, row[:, None], column[None, :], inside, columns,
            BIASED, SILU, ADDED, TIMED,
        )  # fmt: skip


@triton.jit
def _finish(
    value, scales, bias, residual, times, out, row, column, inside, columns,
    BIASED: tl.constexpr, SILU: tl.constexpr, ADDED: tl.constexpr, TIMED: tl.constexpr,
) -> None:  # fmt: skip
    """Scale, apply what follows the product, and store. `row` and `column` have the shape of `value`, or broadcast to it."""
    value *= tl.load(scales + column, mask=column < columns, other=0.0)
    at = row.to(tl.int64) * columns + column
    if BIASED:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    if SILU:
        value *= tl.sigmoid(value)
    if ADDED:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if TIMED:
        value *= tl.load(times + row + tl.zeros_like(column), mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _join(
    part, scales, bias, residual, times, out, count, columns,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, ADDED: tl.constexpr, TIMED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """A stretch of one row: add its parts in order."""
    take_turn(EARLY)
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < columns
    value = joined(part, row, column, here, count, columns, SPLITS)
    _finish(value, scales, bias, residual, times, out, row, column, here, columns, BIASED, SILU, ADDED, TIMED)


class Beside(NamedTuple):
    """A second input [.., K], with as many rows. With `turn` 0, weights are [N, 2 K] and read both inputs, concatenated.
    Otherwise weights are [N, K]: columns before `turn` read the first input, the others the second."""

    rows: Tensor
    turn: int = 0


class Behind(NamedTuple):
    """What follows the product: a SiLU, then a residual [.., N] is added, then all is multiplied by `times` [.., 1]."""

    silu: bool = False
    residual: Tensor | None = None
    times: Tensor | None = None


def coarse_linear(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    beside: Beside | None = None,
    epsilon: float | None = None,
    behind: Behind = Behind(),  # noqa: B008  it cannot be changed
    tiles: Tiles | None = None,
) -> Tensor:
    """Rows [.., K] times (codes [N, K] * scales [N, 1]), transposed, + bias [N]: [.., N].

    epsilon: that of an RMSNorm whose weight is part of the codes; with it rows are divided by their RMS, but not the second
    input. The codes must have been written before the preceding kernel started, since they are read before it ends.
    """
    columns, flat = codes.shape[0], rows.reshape(-1, rows.shape[-1]).contiguous()
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    whole = beside is not None and beside.turn == 0
    assert codes.is_contiguous() and codes.shape[1] == flat.shape[1] * (1 + whole) and scales.numel() == columns
    assert epsilon is None or not whole
    if flat.shape[0]:
        tiles = fitting(tiles or tiles_for(flat.shape[0], columns, codes.shape[1], "coarse"), rows.dtype)
        # Only programs that have a whole sum know the RMS of a row and where its columns turn.
        tiles = tiles if epsilon is None and (beside is None or whole) else replace(tiles, splits=1)
        _launch(flat, codes, (scales, bias, behind), out, beside, epsilon, tiles)
    return out


def _launch(
    rows: Tensor,
    codes: Tensor,
    after: tuple[Tensor, Tensor | None, Behind],
    out: Tensor,
    beside: Beside | None,
    epsilon: float | None,
    tiles: Tiles,
) -> None:
    (count, k), columns, early = rows.shape, codes.shape[0], overlaps(rows.device)
    turn, halves = 0 if beside is None else beside.turn, codes.shape[1] // k
    steps = triton.cdiv(triton.cdiv(k, tiles.block_k) * halves, tiles.splits)
    split = tiles.splits > 1
    part = torch.empty(tiles.splits, count, columns, dtype=torch.float32, device=rows.device) if split else out
    scales, bias, behind = after
    given = [scales, *(out if one is None else one.contiguous() for one in (bias, behind.residual, behind.times))]
    flags = {"SPLITS": tiles.splits, "BIASED": bias is not None, "SILU": behind.silu, "EARLY": early}
    flags |= {"ADDED": behind.residual is not None, "TIMED": behind.times is not None}
    blocks = triton.cdiv(turn, tiles.block_n) + triton.cdiv(columns - turn, tiles.block_n)
    least = codes.shape[1] - steps * tiles.block_k * (tiles.splits - 1)  # weights of the last program that shares a sum
    _coarse[(triton.cdiv(count, tiles.block_m), blocks, tiles.splits)](
        rows, rows if beside is None else beside.rows.contiguous(), codes, *given, out, part,
        count, columns, epsilon or 0.0,
        K=k, HALVES=halves, TURN=turn, DIVIDED=epsilon is not None,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages,
        SHARES=tiles.warps if tiles.stages == 0 else 0, STEPS=steps, AHEAD=ahead(least, tiles, False),
        **flags, **launch_options(tiles, early),
    )  # fmt: skip
    if split:
        wide = min(512, triton.next_power_of_2(columns))
        _join[(count, triton.cdiv(columns, wide))](
            part, *given, out, count, columns, BLOCK=wide, **flags, num_warps=4, **early_launch(early)
        )

"""Products of a few rows with weights in eight bits: what is only guessed by need not be exact, and half as much is read.

In: rows [.., K] in half precision, whole numbers of eight bits with a scale for each of their rows, and perhaps other rows
[.., K] `Beside` them. Out: in the rows' dtype. What is left of a norm before the product, whose weight is part of the codes,
and what comes `Behind` it are part of the kernel.
Numbers of eight bits are exact in half precision, so that beside kernels/linear.py, whose way of starting early is used here
too, only the weights are rounded once more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.held import at_whole, folded, hold, times, whole
from foreword.kernels.linear import ahead, launch_options
from foreword.kernels.overlap import early_launch, fetch, overlaps, take_turn
from foreword.kernels.sums import hold_early, joined, start_early
from foreword.kernels.tiles import Tiles, fitting, tiles_for


@triton.jit
def _lengths(x_at, epsilon, K: tl.constexpr):
    """What rows [BLOCK_M] are multiplied with, to be divided by their length. They are read once more, each by one warp:
    what a product holds of them is spread over all."""
    x = at_whole(x_at[:, None, None], whole(K)[None, :, :], K, "evict_last").to(tl.float32)
    return tl.rsqrt(tl.sum(tl.sum(x * x, 1), 1) / K + epsilon)


@triton.jit
def _sums_held(
    x_at, beside_at, held, held_beside, turned, epsilon,
    K: tl.constexpr, HALVES: tl.constexpr, DIVIDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """Rows times weights that are held, [BLOCK_M, BLOCK_N]; two HALVES: and those beside them times theirs."""
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
    """The same, BLOCK_K numbers at a time, or STEPS of them where several share the sums."""
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
    """BLOCK_M rows times BLOCK_N columns, or one of SPLITS stretches of their sums, which goes to `part`.

    Two HALVES: weights are twice as long, for a row and the one beside it. Columns from TURN on are of those beside alone.
    DIVIDED: by the length of `rows`, which is left of a norm whose weight is part of the codes.
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
    """Scaled, with what comes behind, and stored; `row` and `column` have the shape of `value`, or spread to it."""
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
    """A stretch of one row: its parts, added in order."""
    take_turn(EARLY)
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < columns
    value = joined(part, row, column, here, count, columns, SPLITS)
    _finish(value, scales, bias, residual, times, out, row, column, here, columns, BIASED, SILU, ADDED, TIMED)


class Beside(NamedTuple):
    """Other rows [.., K], of which there are as many. With `turn` 0 weights are [N, 2 K], and both are one row to them.
    Otherwise they are [N, K]: columns before `turn` are made of the rows, the others of those beside them."""

    rows: Tensor
    turn: int = 0


class Behind(NamedTuple):
    """What a product goes through: a SiLU, then something is added to it [.., N], then it is multiplied [.., 1]."""

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
    """Rows [.., K] times (codes [N, K] * scales [N, 1]), transposed, + bias [N]: [.., N]. With an `epsilon`, that of an
    RMSNorm whose weight is part of the codes, they are divided by their length; not so those beside them.

    Codes must be older than the kernel before: they are read before this one's turn.
    """
    columns, flat = codes.shape[0], rows.reshape(-1, rows.shape[-1]).contiguous()
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    whole = beside is not None and beside.turn == 0
    assert codes.is_contiguous() and codes.shape[1] == flat.shape[1] * (1 + whole) and scales.numel() == columns
    assert epsilon is None or not whole
    if flat.shape[0]:
        tiles = fitting(tiles or tiles_for(flat.shape[0], columns, codes.shape[1], "coarse"), rows.dtype)
        # The length of a row and where its columns turn are known to programs that have all of its sum.
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
    least = codes.shape[1] - steps * tiles.block_k * (tiles.splits - 1)  # of the weights, for the last of those who share
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

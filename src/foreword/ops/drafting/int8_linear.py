"""Int8 draft linears for a few rows: drafting need not be exact, and int8 weights halve the bytes that are read.

In: rows [.., K] in half precision, int8 codes with one scale per output, and optionally a second input [.., K]
(`SecondInput`). Out: [.., N] in the rows' dtype. The kernel includes the division of a preceding RMSNorm, whose weight is
folded into the codes, and what follows the product (`Epilogue`). Int8 values are exact in half precision, so compared with
ops/layer/linear.py only the weights are rounded once more. Both kernels start early in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.linear import launch_options, prefetch_count
from foreword.ops.layer.overlap import early_launch, overlaps, prefetch, take_turn
from foreword.ops.layer.preload import add_product, load_pieces, load_spans, span_indices, sum_shares
from foreword.ops.layer.sums import prefetch_early, preload_early, sum_splits
from foreword.ops.layer.tiles import Tiles, fit_to_dtype, tiles_for


@triton.jit
def _inverse_rms(x_at, epsilon, K: tl.constexpr):
    """Return 1 / RMS of rows [BLOCK_M]. One warp reads a whole row again, since the product spreads a row over all warps."""
    x = load_spans(x_at[:, None, None], span_indices(K)[None, :, :], K, "evict_last").to(tl.float32)
    return tl.rsqrt(tl.sum(tl.sum(x * x, 1), 1) / K + epsilon)


@triton.jit
def _sums_preloaded(
    x_at, second_at, preloaded, preloaded_second, is_second, epsilon,
    K: tl.constexpr, HALVES: tl.constexpr, DIVIDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """Multiply rows by preloaded weights: [BLOCK_M, BLOCK_N]. With two HALVES, add the second input times its weights."""
    x = load_pieces(x_at, K, SHARES, "evict_last")
    second = load_pieces(second_at, K, SHARES, "evict_last") if HALVES == 2 else x
    inverse = _inverse_rms(x_at, epsilon, K) if DIVIDED else 1.0
    sums = add_product(x, preloaded, tl.zeros([SHARES, BLOCK_M, BLOCK_N], tl.float32), K, "tf32")
    if HALVES == 2:
        sums = add_product(second, preloaded_second, sums, K, "tf32")
    value = sum_shares(sums, BLOCK_M, BLOCK_N, SHARES)
    if DIVIDED:
        value *= tl.where(is_second, 1.0, inverse)[:, None]
    return value


@triton.jit
def _sums_streamed(
    rows, second, weight_rows, real, split, is_second, epsilon,
    K: tl.constexpr, HALVES: tl.constexpr, DIVIDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """`_sums_preloaded` for BLOCK_K columns at a time. If several programs share the sums, each takes STEPS blocks."""
    per_half: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for some in tl.range(0, STEPS, num_stages=STAGES):
        step = split * STEPS + some
        half = (step >= per_half) & (HALVES == 2)
        at = (step - tl.where(half, per_half, 0)) * BLOCK_K + tl.arange(0, BLOCK_K)
        here = at < K
        x_at = tl.where(half | is_second, second, rows) + real
        x = tl.load(x_at[:, None] + at[None, :], mask=here[None, :], other=0.0, eviction_policy="evict_last")
        w = tl.load(weight_rows[:, None] + (tl.where(half, K, 0) + at)[None, :], mask=here[None, :], other=0)
        if DIVIDED:
            squares += x.to(tl.float32) * x.to(tl.float32)
        value = tl.dot(x, tl.trans(w.to(x.dtype)), value)
    if DIVIDED:
        value *= tl.where(is_second, 1.0, tl.rsqrt(tl.sum(squares, 1) / K + epsilon))[:, None]
    return value


@triton.jit(do_not_specialize=["count"])
def _int8_linear(
    rows, second, codes, scales, bias, residual, factor, out, partial, count, columns, epsilon,
    K: tl.constexpr, HALVES: tl.constexpr, SECOND_FROM: tl.constexpr, DIVIDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SHARES: tl.constexpr,
    SPLITS: tl.constexpr, STEPS: tl.constexpr, PREFETCHED: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply BLOCK_M rows by BLOCK_N columns. With several SPLITS a program computes a share of the sums, into `partial`.

    Two HALVES: weights are twice as long, for both inputs. Columns from SECOND_FROM on read the second input alone. DIVIDED:
    the result is divided by the RMS of `rows`, for a norm whose weight is folded into the codes.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_second = (tl.program_id(1) >= tl.cdiv(SECOND_FROM, BLOCK_N)) & (SECOND_FROM > 0)
    first, end = tl.where(is_second, SECOND_FROM, 0), tl.where(is_second | (SECOND_FROM == 0), columns, SECOND_FROM)
    block = tl.program_id(1) - tl.where(is_second, tl.cdiv(SECOND_FROM, BLOCK_N), 0)
    column = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = codes + tl.minimum(column, columns - 1).to(tl.int64) * (K * HALVES)  # instead of a mask
    real = tl.minimum(row, count - 1) * K
    if SHARES > 0:
        if HALVES == 2 and EARLY:
            prefetch(weight_rows + K, K)
        preloaded = preload_early(weight_rows, K, SHARES, EARLY)
        preloaded_second = load_pieces(weight_rows + K, K, SHARES, "evict_first") if HALVES == 2 else preloaded
        take_turn(EARLY)
        value = _sums_preloaded(
            tl.where(is_second, second, rows) + real, second + real, preloaded, preloaded_second, is_second, epsilon,
            K, HALVES, DIVIDED, BLOCK_M, BLOCK_N, SHARES,
        )  # fmt: skip
    else:
        prefetch_early(weight_rows + split * STEPS * BLOCK_K, PREFETCHED, EARLY)
        value = _sums_streamed(
            rows, second, weight_rows, real, split, is_second, epsilon,
            K, HALVES, DIVIDED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, STEPS,
        )  # fmt: skip
    inside = (row < count)[:, None] & (column < end)[None, :]
    if SPLITS > 1:
        at_line = (split * count + row)[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(partial + at_line, value, mask=inside)
    else:
        _finish(
            value, scales, bias, residual, factor, out, row[:, None], column[None, :], inside, columns,
            BIASED, SILU, ADDED, SCALED,
        )  # fmt: skip


@triton.jit
def _finish(
    value, scales, bias, residual, factor, out, row, column, inside, columns,
    BIASED: tl.constexpr, SILU: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr,
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
    if SCALED:
        value *= tl.load(factor + row + tl.zeros_like(column), mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _join(
    partial, scales, bias, residual, factor, out, count, columns,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Add the partial sums of a stretch of one row, in order."""
    take_turn(EARLY)
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < columns
    value = sum_splits(partial, row, column, here, count, columns, SPLITS)
    _finish(value, scales, bias, residual, factor, out, row, column, here, columns, BIASED, SILU, ADDED, SCALED)


class SecondInput(NamedTuple):
    """A second input [.., K], with as many rows. With `start` 0, weights are [N, 2 K] and read both inputs, concatenated.
    Otherwise weights are [N, K]: output columns before `start` read the first input, the others the second."""

    rows: Tensor
    start: int = 0


class Epilogue(NamedTuple):
    """What follows the product: a SiLU, then a residual [.., N] is added, then all is multiplied by `factor` [.., 1]."""

    silu: bool = False
    residual: Tensor | None = None
    factor: Tensor | None = None


def int8_linear(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    second: SecondInput | None = None,
    epsilon: float | None = None,
    epilogue: Epilogue = Epilogue(),  # noqa: B008  it cannot be changed
    tiles: Tiles | None = None,
) -> Tensor:
    """Multiply rows [.., K] by (codes [N, K] * scales [N, 1]), transposed, and add the bias [N]: [.., N].

    epsilon: of an RMSNorm whose weight is folded into the codes. With it the rows are divided by their RMS, but the second
    input is not. The codes must have been written before the preceding kernel started, since they are read before it ends.
    """
    columns, flat = codes.shape[0], rows.reshape(-1, rows.shape[-1]).contiguous()
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    whole = second is not None and second.start == 0
    assert codes.is_contiguous() and codes.shape[1] == flat.shape[1] * (1 + whole) and scales.numel() == columns
    assert epsilon is None or not whole
    if flat.shape[0]:
        tiles = fit_to_dtype(tiles or tiles_for(flat.shape[0], columns, codes.shape[1], "coarse"), rows.dtype)
        # Only programs that compute whole sums know the RMS of a row, and which input its columns read.
        tiles = tiles if epsilon is None and (second is None or whole) else replace(tiles, splits=1)
        _launch(flat, codes, (scales, bias, epilogue), out, second, epsilon, tiles)
    return out


def _launch(
    rows: Tensor,
    codes: Tensor,
    after: tuple[Tensor, Tensor | None, Epilogue],
    out: Tensor,
    second: SecondInput | None,
    epsilon: float | None,
    tiles: Tiles,
) -> None:
    (count, k), columns, early = rows.shape, codes.shape[0], overlaps(rows.device)
    start, halves = 0 if second is None else second.start, codes.shape[1] // k
    steps = triton.cdiv(triton.cdiv(k, tiles.block_k) * halves, tiles.splits)
    split = tiles.splits > 1
    partial = torch.empty(tiles.splits, count, columns, dtype=torch.float32, device=rows.device) if split else out
    scales, bias, epilogue = after
    given = [scales, *(out if one is None else one.contiguous() for one in (bias, epilogue.residual, epilogue.factor))]
    flags = {"SPLITS": tiles.splits, "BIASED": bias is not None, "SILU": epilogue.silu, "EARLY": early}
    flags |= {"ADDED": epilogue.residual is not None, "SCALED": epilogue.factor is not None}
    blocks = triton.cdiv(start, tiles.block_n) + triton.cdiv(columns - start, tiles.block_n)
    least = codes.shape[1] - steps * tiles.block_k * (tiles.splits - 1)  # weights of the last program that shares a sum
    _int8_linear[(triton.cdiv(count, tiles.block_m), blocks, tiles.splits)](
        rows, rows if second is None else second.rows.contiguous(), codes, *given, out, partial,
        count, columns, epsilon or 0.0,
        K=k, HALVES=halves, SECOND_FROM=start, DIVIDED=epsilon is not None,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages,
        SHARES=tiles.warps if tiles.stages == 0 else 0, STEPS=steps, PREFETCHED=prefetch_count(least, tiles, False),
        **flags, **launch_options(tiles, early),
    )  # fmt: skip
    if split:
        wide = min(512, triton.next_power_of_2(columns))
        _join[(count, triton.cdiv(columns, wide))](
            partial, *given, out, count, columns, BLOCK=wide, **flags, num_warps=4, **early_launch(early)
        )

"""Products of a few rows with weights in eight bits: what is only guessed by need not be exact, and half as much is read.

In: rows [.., K] in half precision, whole numbers of eight bits [N, K] and a scale for each of their rows. Out: [.., N] in
the rows' dtype. Numbers of eight bits are exact in half precision, so that beside kernels/linear.py, whose way of starting
early is used here too, only the weights are rounded once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.linear import ahead, joined, launch_options, start_early
from foreword.kernels.overlap import early_launch, overlaps, take_turn
from foreword.kernels.tiles import Tiles, fitting, tiles_for


@triton.jit(do_not_specialize=["count"])
def _coarse(
    rows, codes, scales, bias, out, part, count, columns,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, AHEAD: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_M rows times BLOCK_N columns, or one of SPLITS stretches of their sums, which goes to `part`."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * EACH
    line = tl.minimum(column, columns - 1)  # instead of a mask
    lines = codes + line.to(tl.int64) * K + first
    start_early(lines, 0, AHEAD, False, EARLY)
    x_at = rows + tl.minimum(row, count - 1) * K + first
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, EACH, BLOCK_K, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK_K)
        here = (at < K - first)[None, :]
        x = tl.load(x_at[:, None] + at[None, :], mask=here, other=0.0, eviction_policy="evict_last")
        w = tl.load(lines[:, None] + at[None, :], mask=here, other=0)
        value = tl.dot(x, tl.trans(w.to(x.dtype)), value)
    inside = (row < count)[:, None] & (column < columns)[None, :]
    if SPLITS > 1:
        at_line = (split * count + row)[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(part + at_line, value, mask=inside)
    else:
        _finish(value, scales, bias, out, row[:, None], column[None, :], inside, columns, BIASED)


@triton.jit
def _finish(value, scales, bias, out, row, column, inside, columns, BIASED: tl.constexpr) -> None:
    """Scaled, with the bias, and stored; `row` and `column` have the shape of `value`, or one that spreads to it."""
    value *= tl.load(scales + column, mask=column < columns, other=0.0)
    if BIASED:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * columns + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _join(
    part, scales, bias, out, count, columns,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """A stretch of one row: its parts, added in order."""
    take_turn(EARLY)
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < columns
    value = joined(part, row, column, here, count, columns, SPLITS)
    _finish(value, scales, bias, out, row, column, here, columns, BIASED)


def coarse_linear(
    rows: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Rows [.., K] times (codes [N, K] * scales [N, 1]), transposed, + bias [N]: [.., N]."""
    (columns, k), flat = codes.shape, rows.reshape(-1, rows.shape[-1]).contiguous()
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    assert codes.is_contiguous() and scales.numel() == columns
    if flat.shape[0]:
        tiles = fitting(tiles or tiles_for(flat.shape[0], columns, k, "coarse"), rows.dtype)
        _launch(flat, codes, scales, bias, out, tiles)
    return out


def _launch(rows: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor, tiles: Tiles) -> None:
    (count, k), columns, early = rows.shape, codes.shape[0], overlaps(rows.device)
    each = triton.cdiv(k, tiles.block_k * tiles.splits) * tiles.block_k
    split = tiles.splits > 1
    part = torch.empty(tiles.splits, count, columns, dtype=torch.float32, device=rows.device) if split else out
    given = scales, scales if bias is None else bias, out
    flags = {"SPLITS": tiles.splits, "BIASED": bias is not None, "EARLY": early}
    _coarse[(triton.cdiv(count, tiles.block_m), triton.cdiv(columns, tiles.block_n), tiles.splits)](
        rows, codes, *given, part, count, columns,
        K=k, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages,
        EACH=each, AHEAD=ahead(k - each * (tiles.splits - 1), tiles, False), **flags, **launch_options(tiles, early),
    )  # fmt: skip
    if split:
        wide = min(512, triton.next_power_of_2(columns))
        _join[(count, triton.cdiv(columns, wide))](
            part, *given, count, columns, BLOCK=wide, **flags, num_warps=4, **early_launch(early)
        )

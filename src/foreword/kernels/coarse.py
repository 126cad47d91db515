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

from foreword.kernels.linear import ahead, launch_options, start_early
from foreword.kernels.overlap import overlaps
from foreword.kernels.tiles import Tiles, fitting, tiles_for


@triton.jit(do_not_specialize=["count"])
def _coarse(
    rows, codes, scales, bias, out, count, columns,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_M rows times BLOCK_N columns."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(column, columns - 1)  # instead of a mask
    lines = codes + line.to(tl.int64) * K
    scale = tl.load(scales + line)[None, :]
    added = tl.load(bias + line).to(tl.float32)[None, :] if BIASED else 0.0
    if EARLY:
        start_early(lines, 0, AHEAD, False)
    x_at = rows + tl.minimum(row, count - 1) * K
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_at[:, None] + at[None, :], mask=at[None, :] < K, other=0.0, eviction_policy="evict_last")
        w = tl.load(lines[:, None] + at[None, :], mask=at[None, :] < K, other=0)
        value = tl.dot(x, tl.trans(w.to(x.dtype)), value)
    inside = (row < count)[:, None] & (column < columns)[None, :]
    value = (value * scale + added).to(out.dtype.element_ty)
    tl.store(out + row[:, None].to(tl.int64) * columns + column[None, :], value, mask=inside)


def coarse_linear(
    rows: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Rows [.., K] times (codes [N, K] * scales [N, 1]), transposed, + bias [N]: [.., N]."""
    (columns, k), flat = codes.shape, rows.reshape(-1, rows.shape[-1]).contiguous()
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    count, early = flat.shape[0], overlaps(rows.device)
    assert codes.is_contiguous() and scales.numel() == columns
    if count:
        tiles = fitting(tiles or tiles_for(count, columns, k, "coarse"), rows.dtype)
        _coarse[(triton.cdiv(count, tiles.block_m), triton.cdiv(columns, tiles.block_n))](
            flat, codes, scales, flat if bias is None else bias, out, count, columns,
            K=k, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages,
            AHEAD=ahead(k, tiles, False), BIASED=bias is not None, EARLY=early, **launch_options(tiles, early),
        )  # fmt: skip
    return out

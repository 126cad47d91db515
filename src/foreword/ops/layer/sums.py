"""Matrix products inside kernels: rows times weights, as sums that a kernel processes further before it stores them.

In: pointers to the rows, and to the weights of a program's columns. Out: sums in float32, divided by the rows' RMS where
they go through a norm. Weights must be older than the previous kernel: they are loaded while it still runs, into the L2
cache or, with 0 stages, into registers. linear.py says where numbers are rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.ops.layer.overlap import prefetch, take_turn
from foreword.ops.layer.preload import (
    add_product,
    largest_power_of_two,
    load,
    load_pieces,
    load_spans,
    span_indices,
    sum_shares,
)


@triton.jit
def prefetch_early(weight_rows, PREFETCHED: tl.constexpr, EARLY: tl.constexpr) -> None:
    """Prefetch the weights at `weight_rows` while the previous kernel still runs, then wait for the kernel's turn."""
    if EARLY:
        prefetch(weight_rows, PREFETCHED)
        take_turn(EARLY)


@triton.jit
def columns_by_warp(BLOCK_N: tl.constexpr, PER_COLUMN: tl.constexpr, WARPS: tl.constexpr):
    """Return which of BLOCK_N columns, and which of its PER_COLUMN weights, each warp takes: both [WARPS, number per warp].
    With 0 warps all warps share all sums: both [PER_COLUMN * BLOCK_N]."""
    if WARPS == 0:
        index = tl.arange(0, PER_COLUMN * BLOCK_N)
        return index % BLOCK_N, index // BLOCK_N
    else:
        per: tl.constexpr = BLOCK_N // WARPS
        warp, own = tl.arange(0, WARPS)[:, None], tl.arange(0, PER_COLUMN * per)[None, :]
        return warp * per + own % per, warp * 0 + own // per


@triton.jit
def _by_column(sums, BLOCK_N: tl.constexpr, PER_COLUMN: tl.constexpr, WARPS: tl.constexpr):
    """Order sums from `columns_by_warp` by column: those of the first weight, and of the second if there are two."""
    if PER_COLUMN == 1:
        return tl.reshape(sums, (BLOCK_N,)), 0.0
    else:
        shares: tl.constexpr = max(WARPS, 1)
        one, other = tl.split(tl.permute(tl.reshape(sums, (shares, PER_COLUMN, BLOCK_N // shares)), (0, 2, 1)))
        return tl.reshape(one, (BLOCK_N,)), tl.reshape(other, (BLOCK_N,))


@triton.jit
def preload_early(weight_rows, K: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr):
    """Preload weights into registers. Their second piece is loaded after the first has arrived, so prefetch it."""
    if EARLY:
        prefetch(weight_rows + largest_power_of_two(K), K - largest_power_of_two(K))
    return load_pieces(weight_rows, K, SHARES, "evict_first")


@triton.jit
def load_early(weight_rows, K: tl.constexpr, SHARES: tl.constexpr, PREFETCHED: tl.constexpr, EARLY: tl.constexpr):
    """Start loading the weights at `weight_rows`, then wait for the kernel's turn. With SHARES > 0 preload and return them:
    each warp has its columns if `weight_rows` is [SHARES, n], else its share of K. Otherwise prefetch them and return 0."""
    if SHARES > 0:
        if len(weight_rows.shape) == 2:
            preloaded = load_spans(tl.expand_dims(weight_rows, (2, 3)), span_indices(K)[None, None, :, :], K, "evict_first")
        else:
            preloaded = preload_early(weight_rows, K, SHARES, EARLY)
        take_turn(EARLY)
        return preloaded
    else:
        prefetch_early(weight_rows, PREFETCHED, EARLY)
        return 0


@triton.jit
def one_row_sums(
    x_at, weight_rows, preloaded, norm, epsilon,
    K: tl.constexpr, BLOCK_N: tl.constexpr, PER_COLUMN: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Multiply a row by the weights at `weight_rows`, ordered by `columns_by_warp`, or with WARPS > 0 by the preloaded ones:
    [BLOCK_N] for the first of PER_COLUMN weights, and for the second.

    NORM "inside": the row is multiplied by the norm's weight and rounded, and the sums are divided by its RMS. "first": the
    row is divided before it is rounded.
    """
    if WARPS > 0:
        sums = _one_row_preloaded(x_at, preloaded, norm, epsilon, K, WARPS, NORM)
    else:
        sums = _one_row_streamed(x_at, weight_rows, norm, epsilon, K, BLOCK_K, STAGES, NORM)
    return _by_column(sums, BLOCK_N, PER_COLUMN, WARPS)


@triton.jit
def _one_row_preloaded(x_at, preloaded, norm, epsilon, K: tl.constexpr, WARPS: tl.constexpr, NORM: tl.constexpr):
    """Every warp reads the row and has all weights of its columns, so warps exchange no sums."""
    index = span_indices(K)[None, None, :, :] + tl.zeros([WARPS, 1, 1, 1], tl.int32)
    x = load_spans(x_at, index, K, "evict_last").to(tl.float32)
    scale_after = 1.0
    if NORM != "":
        factor = load_spans(norm, index, K, "evict_last").to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(tl.sum(x * x, 2), 2) / K + epsilon)  # [WARPS, 1]
        if NORM == "first":
            factor *= inverse_rms[:, :, None, None]
        else:
            scale_after = inverse_rms
        x = (x * factor).to(x_at.dtype.element_ty).to(tl.float32)
    return tl.sum(tl.sum(preloaded.to(tl.float32) * x, 2), 2) * scale_after


@triton.jit
def _one_row_streamed(
    x_at, weight_rows, norm, epsilon, K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Multiply BLOCK_K numbers at a time; sum each position on its own, and across positions at the end."""
    masked: tl.constexpr = K % BLOCK_K != 0
    offset = tl.arange(0, BLOCK_K)
    squares = tl.zeros([BLOCK_K], tl.float32)
    scale_before = 1.0
    if NORM == "first":
        for start in tl.range(0, K, BLOCK_K):
            x = load(x_at + start + offset, start + offset < K, masked, "evict_last").to(tl.float32)
            squares += x * x
        scale_before = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    value = tl.zeros([weight_rows.shape[0], BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        index = start + offset
        inside = index < K
        w = load(weight_rows[:, None] + index[None, :], inside[None, :], masked, "evict_first").to(tl.float32)
        x = load(x_at + index, inside, masked, "evict_last").to(tl.float32)
        if NORM == "inside":
            squares += x * x
        if NORM != "":
            x *= scale_before * load(norm + index, inside, masked, "evict_last").to(tl.float32)
            x = x.to(x_at.dtype.element_ty).to(tl.float32)
        value += w * x[None, :]
    scale_after = 1.0
    if NORM == "inside":
        scale_after = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    return tl.sum(value, 1) * scale_after


@triton.jit
def few_rows_sums(
    x_at, weight_rows, preloaded, squares, row, count, remaining, epsilon,
    K: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SHARES: tl.constexpr, MASKED: tl.constexpr, PAIRED: tl.constexpr, BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply rows at `x_at` [BLOCK_M] by the weights at `weight_rows` [BLOCK_N, or if PAIRED twice that], over `remaining`
    numbers. SHARES > 0: by the preloaded weights, so that only the rows are waited for. Returns the sums of the first and of
    the second weight of each pair.

    BLOCKS > 0: the rows are multiplied by a norm's weight already; `squares` [BLOCKS, count] has their sums of squares.
    """
    if BLOCKS > 0:  # loaded before the product and used after it, so that nothing waits
        block = tl.arange(0, triton.next_power_of_2(BLOCKS))[:, None]
        inside_squares = (block < BLOCKS) & (row < count)[None, :]
        row_squares = tl.load(squares + block * count + row[None, :], mask=inside_squares, other=0.0)
    width: tl.constexpr = 2 * BLOCK_N if PAIRED else BLOCK_N
    if SHARES > 0:
        sums = tl.zeros([SHARES, BLOCK_M, width], tl.float32)
        value = sum_shares(
            add_product(load_pieces(x_at, K, SHARES, "evict_last"), preloaded, sums, K, PRECISION), BLOCK_M, width, SHARES
        )
    else:
        value = tl.zeros([BLOCK_M, width], tl.float32)
        for start in tl.range(0, SPLIT_K, BLOCK_K, num_stages=STAGES):
            index = start + tl.arange(0, BLOCK_K)
            inside = index < remaining
            x = load(x_at[:, None] + index[None, :], inside[None, :], MASKED, "evict_last")
            w = load(weight_rows[:, None] + index[None, :], inside[None, :], MASKED, "evict_first")
            value = tl.dot(x, tl.trans(w), value, input_precision=PRECISION)
    if BLOCKS > 0:
        value *= tl.rsqrt(tl.sum(row_squares, 0) / K + epsilon)[:, None]
    if PAIRED:
        return tl.split(tl.reshape(value, (BLOCK_M, BLOCK_N, 2)))
    else:
        return value, 0.0


@triton.jit
def norm_scale(squares, row, count, epsilon, K: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the factor of one row's sums: 1 / RMS if the row goes through a norm (BLOCKS > 0), else 1."""
    scale = 1.0
    if BLOCKS > 0:
        block = tl.arange(0, triton.next_power_of_2(BLOCKS))
        row_squares = tl.load(squares + block * count + row, mask=block < BLOCKS, other=0.0)
        scale = tl.rsqrt(tl.sum(row_squares, 0) / K + epsilon)
    return scale


@triton.jit
def sum_splits(partial, row, column, inside, count, columns, SPLITS: tl.constexpr):
    """Add the partial sums of one row, in order."""
    value = tl.zeros(column.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        partial_row = split * count + row
        value += tl.load(partial + partial_row.to(tl.int64) * columns + column, mask=inside, other=0.0)
    return value

"""The sums of products: rows times weights, for kernels that do something with them before they store them.

In: pointers to the rows, and to the weights of a program's columns. Out: sums in float32, divided by the rows' length where
they come from a norm. Weights must be older than the kernel before: they are on their way while that still runs, into the L2
cache or, with 0 stages, to where they are held. linear.py says where numbers are rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.ops.layer.held import at_whole, folded, hold, load, long_of, times, whole
from foreword.ops.layer.overlap import fetch, take_turn


@triton.jit
def start_early(lines, AHEAD: tl.constexpr, EARLY: tl.constexpr) -> None:
    """Ask for the weights at `lines` while the kernel before still runs."""
    if EARLY:
        fetch(lines, AHEAD)
        take_turn(EARLY)


@triton.jit
def shared_out(BLOCK_N: tl.constexpr, EACH: tl.constexpr, WARPS: tl.constexpr):
    """Which of BLOCK_N columns, and which of EACH weights of it, a program takes: both [WARPS, as many as each has], or
    [all] with 0 warps, where all sum all of them."""
    if WARPS == 0:
        every = tl.arange(0, EACH * BLOCK_N)
        return every % BLOCK_N, every // BLOCK_N
    else:
        per: tl.constexpr = BLOCK_N // WARPS
        warp, own = tl.arange(0, WARPS)[:, None], tl.arange(0, EACH * per)[None, :]
        return warp * per + own % per, warp * 0 + own // per


@triton.jit
def _by_column(sums, BLOCK_N: tl.constexpr, EACH: tl.constexpr, WARPS: tl.constexpr):
    """Sums of what `shared_out` gave, by column: those of the first weight, and of the second, if there are two."""
    if EACH == 1:
        return tl.reshape(sums, (BLOCK_N,)), 0.0
    else:
        shares: tl.constexpr = max(WARPS, 1)
        one, other = tl.split(tl.permute(tl.reshape(sums, (shares, EACH, BLOCK_N // shares)), (0, 2, 1)))
        return tl.reshape(one, (BLOCK_N,)), tl.reshape(other, (BLOCK_N,))


@triton.jit
def hold_early(lines, K: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr):
    """Weights are held. Their second piece is loaded once the first is there, so it is asked for before."""
    if EARLY:
        fetch(lines + long_of(K), K - long_of(K))
    return hold(lines, K, SHARES, "evict_first")


@triton.jit
def get_ready(lines, K: tl.constexpr, SHARES: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr):
    """The weights at `lines` are on their way, then comes the kernel's turn. With SHARES > 0 they are held: by columns where
    lines are shared out to warps, [SHARES, n], else a share of the numbers by each."""
    if SHARES > 0:
        if len(lines.shape) == 2:
            held = at_whole(tl.expand_dims(lines, (2, 3)), whole(K)[None, None, :, :], K, "evict_first")
        else:
            held = hold_early(lines, K, SHARES, EARLY)
        take_turn(EARLY)
        return held
    else:
        start_early(lines, AHEAD, EARLY)
        return 0


@triton.jit
def one_row_sums(
    x_at, lines, held, norm, epsilon,
    K: tl.constexpr, BLOCK_N: tl.constexpr, EACH: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A row times the weights at `lines`, as `shared_out` gave them, or with WARPS > 0 those that are held: [BLOCK_N] for
    the first of EACH weights, and for the second.

    NORM "inside": the row is multiplied by the norm's weight and rounded, and the sums are divided by its length. "first":
    it is divided before it is rounded.
    """
    if WARPS > 0:
        sums = _one_row_held(x_at, held, norm, epsilon, K, WARPS, NORM)
    else:
        sums = _one_row_streamed(x_at, lines, norm, epsilon, K, BLOCK_K, STAGES, NORM)
    return _by_column(sums, BLOCK_N, EACH, WARPS)


@triton.jit
def _one_row_held(x_at, held, norm, epsilon, K: tl.constexpr, WARPS: tl.constexpr, NORM: tl.constexpr):
    """Every warp reads the row and has all weights of its columns: no sum goes from one to the other."""
    at = whole(K)[None, None, :, :] + tl.zeros([WARPS, 1, 1, 1], tl.int32)
    x = at_whole(x_at, at, K, "evict_last").to(tl.float32)
    behind = 1.0
    if NORM != "":
        factor = at_whole(norm, at, K, "evict_last").to(tl.float32)
        length = tl.rsqrt(tl.sum(tl.sum(x * x, 2), 2) / K + epsilon)  # [WARPS, 1]
        if NORM == "first":
            factor *= length[:, :, None, None]
        else:
            behind = length
        x = (x * factor).to(x_at.dtype.element_ty).to(tl.float32)
    return tl.sum(tl.sum(held.to(tl.float32) * x, 2), 2) * behind


@triton.jit
def _one_row_streamed(
    x_at, lines, norm, epsilon, K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """BLOCK_K numbers at a time, summed where they lie, across at the end."""
    masked: tl.constexpr = K % BLOCK_K != 0
    wide = tl.arange(0, BLOCK_K)
    squares = tl.zeros([BLOCK_K], tl.float32)
    scale = 1.0
    if NORM == "first":
        for start in tl.range(0, K, BLOCK_K):
            x = load(x_at + start + wide, start + wide < K, masked, "evict_last").to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    value = tl.zeros([lines.shape[0], BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = start + wide
        here = at < K
        w = load(lines[:, None] + at[None, :], here[None, :], masked, "evict_first").to(tl.float32)
        x = load(x_at + at, here, masked, "evict_last").to(tl.float32)
        if NORM == "inside":
            squares += x * x
        if NORM != "":
            x *= scale * load(norm + at, here, masked, "evict_last").to(tl.float32)
            x = x.to(x_at.dtype.element_ty).to(tl.float32)
        value += w * x[None, :]
    behind = 1.0
    if NORM == "inside":
        behind = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    return tl.sum(value, 1) * behind


@triton.jit
def few_rows_sums(
    x_at, lines, held, squares, row, count, left, epsilon,
    K: tl.constexpr, EACH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, SHARES: tl.constexpr, MASKED: tl.constexpr, PAIRED: tl.constexpr, BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows at `x_at` [BLOCK_M] times the weights at `lines` [BLOCK_N, or where PAIRED twice that], `left` numbers of each;
    SHARES > 0: times those that are held, so that only the rows are waited for. Of pairs the first, and the second.

    BLOCKS > 0: the rows come multiplied by a norm's weight, and `squares` [BLOCKS, count] says how long they were.
    """
    if BLOCKS > 0:  # asked for before the product and added behind it, so that nobody waits
        block = tl.arange(0, triton.next_power_of_2(BLOCKS))[:, None]
        known = (block < BLOCKS) & (row < count)[None, :]
        lengths = tl.load(squares + block * count + row[None, :], mask=known, other=0.0)
    wide: tl.constexpr = 2 * BLOCK_N if PAIRED else BLOCK_N
    if SHARES > 0:
        sums = tl.zeros([SHARES, BLOCK_M, wide], tl.float32)
        value = folded(times(hold(x_at, K, SHARES, "evict_last"), held, sums, K, PRECISION), BLOCK_M, wide, SHARES)
    else:
        value = tl.zeros([BLOCK_M, wide], tl.float32)
        for start in tl.range(0, EACH, BLOCK_K, num_stages=STAGES):
            at = start + tl.arange(0, BLOCK_K)
            here = at < left
            x = load(x_at[:, None] + at[None, :], here[None, :], MASKED, "evict_last")
            w = load(lines[:, None] + at[None, :], here[None, :], MASKED, "evict_first")
            value = tl.dot(x, tl.trans(w), value, input_precision=PRECISION)
    if BLOCKS > 0:
        value *= tl.rsqrt(tl.sum(lengths, 0) / K + epsilon)[:, None]
    if PAIRED:
        return tl.split(tl.reshape(value, (BLOCK_M, BLOCK_N, 2)))
    else:
        return value, 0.0


@triton.jit
def scale_of(squares, row, count, epsilon, K: tl.constexpr, BLOCKS: tl.constexpr):
    """What the sums of one row are scaled by, where it comes from a norm."""
    scale = 1.0
    if BLOCKS > 0:
        block = tl.arange(0, triton.next_power_of_2(BLOCKS))
        lengths = tl.load(squares + block * count + row, mask=block < BLOCKS, other=0.0)
        scale = tl.rsqrt(tl.sum(lengths, 0) / K + epsilon)
    return scale


@triton.jit
def joined(part, row, column, here, count, columns, SPLITS: tl.constexpr):
    """The parts of one row's sums, added in order."""
    value = tl.zeros(column.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        line = split * count + row
        value += tl.load(part + line.to(tl.int64) * columns + column, mask=here, other=0.0)
    return value

"""Preload all weights of a program into registers before the input rows are ready; the rows are then loaded the same way.

A product of a few rows with a short sum takes a microsecond or two, mostly spent waiting: for the previous kernel, for
memory, and for other warps. Nothing waits for weights that are preloaded before the kernel's turn. How they are distributed
over the warps decides how often these wait for each other: once, if each warp sums a share of K (`load_pieces`,
`sum_shares`, for matrix units); only to store, if each warp has columns of its own (`span_indices`, for one row).
"""

from __future__ import annotations

import triton
import triton.language as tl

SPAN = tl.constexpr(256)  # numbers that a warp loads at once: 16 bytes per thread, in half precision


@triton.constexpr_function
def largest_power_of_two(k):
    """Return the largest power of two that is at most `k`."""
    return 1 << (k.bit_length() - 1)


@triton.constexpr_function
def log2(shares):
    return shares.bit_length() - 1


@triton.constexpr_function
def share_size(k, shares):
    """Return how many of `k` numbers a share has at most: a power of two, large enough for a matrix unit."""
    return max(16, triton.next_power_of_2(triton.cdiv(k, shares)))


@triton.constexpr_function
def span_count(k):
    """Return how many spans cover `k` numbers, rounded up to a power of two."""
    return triton.next_power_of_2(triton.cdiv(k, SPAN.value))


@triton.jit
def load(pointers, inside, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """Load from `pointers`; if MASKED, 0 where not `inside`."""
    if MASKED:
        found = tl.load(pointers, mask=inside, other=0.0, eviction_policy=POLICY)
    else:
        found = tl.load(pointers, eviction_policy=POLICY)
    return found


@triton.jit
def load_piece(pointers, FIRST: tl.constexpr, STOP: tl.constexpr, SHARES: tl.constexpr, POLICY: tl.constexpr):
    """Load numbers FIRST .. STOP from each of `pointers` [n]: [SHARES, n, a power of two], padded with 0."""
    size: tl.constexpr = share_size(STOP - FIRST, SHARES)
    index = FIRST + tl.arange(0, SHARES)[:, None, None] * size + tl.arange(0, size)[None, None, :]
    return load(pointers[None, :, None] + index, index < STOP, FIRST + SHARES * size > STOP, POLICY)


@triton.jit
def load_pieces(pointers, K: tl.constexpr, SHARES: tl.constexpr, POLICY: tl.constexpr):
    """Load all K numbers from each of `pointers`, in two pieces: 576 as 512 and 64; one piece would have to be 1024."""
    first: tl.constexpr = largest_power_of_two(K)
    main = load_piece(pointers, 0, first, SHARES, POLICY)
    rest = load_piece(pointers, first, K, SHARES, POLICY) if first < K else main
    return main, rest


@triton.jit
def add_product(x, weights, sums, K: tl.constexpr, PRECISION: tl.constexpr):
    """Add the product of loaded rows and weights to sums [SHARES, M, N]; every warp sums its share of K."""
    sums = tl.dot(x[0], tl.permute(weights[0].to(x[0].dtype), (0, 2, 1)), sums, input_precision=PRECISION)
    if largest_power_of_two(K) < K:
        sums = tl.dot(x[1], tl.permute(weights[1].to(x[1].dtype), (0, 2, 1)), sums, input_precision=PRECISION)
    return sums


@triton.jit
def sum_shares(sums, M: tl.constexpr, N: tl.constexpr, SHARES: tl.constexpr):
    """Add the shares of sums [SHARES, M, N], two by two.

    Every warp has one share. Split along the last axis, the shares reach the warp that adds them in one exchange. `tl.sum`
    would take two, with a pass through the lanes of a warp in between.
    """
    sums = tl.permute(sums, (1, 2, 0))
    for i in tl.static_range(log2(SHARES)):
        one, other = tl.split(tl.reshape(sums, (M, N, SHARES >> (i + 1), 2)))
        sums = one + other
    return tl.reshape(sums, (M, N))


@triton.jit
def span_indices(K: tl.constexpr):
    """Return indices 0 .. K, padded to whole spans: [spans, SPAN]."""
    return tl.arange(0, span_count(K))[:, None] * SPAN + tl.arange(0, SPAN)[None, :]


@triton.jit
def load_spans(pointer, index, K: tl.constexpr, POLICY: tl.constexpr):
    """Load from `pointer` at the indices of `span_indices`, 0 from K on."""
    return load(pointer + index, index < K, span_count(K) * SPAN > K, POLICY)

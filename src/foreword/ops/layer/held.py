"""Weights that a program holds, all that it needs of them, before the rows are there; and rows held as they are.

A product of a few rows and a short sum takes a microsecond or two, most of it waiting: for the kernel before, for memory,
and for the other warps. What is held before the kernel's turn is not waited for, and how it is shared out to the warps
decides how often these wait for each other: once, where each sums a share of the numbers (`hold`, `folded`, for matrix
units), and for what is stored alone where each has columns of its own (`whole`, for one row).
"""

from __future__ import annotations

import triton
import triton.language as tl

SPAN = tl.constexpr(256)  # numbers that a warp loads at once: 16 bytes by each of its threads, in half precision


@triton.constexpr_function
def long_of(k):
    """Most of `k` numbers: the largest power of two among them."""
    return 1 << (k.bit_length() - 1)


@triton.constexpr_function
def halvings(shares):
    return shares.bit_length() - 1


@triton.constexpr_function
def share_of(k, shares):
    """How many of `k` numbers a share has at most: a power of two, and enough for a matrix unit."""
    return max(16, triton.next_power_of_2(triton.cdiv(k, shares)))


@triton.constexpr_function
def spans(k):
    """How many spans `k` numbers are, or more: a power of two."""
    return triton.next_power_of_2(triton.cdiv(k, SPAN.value))


@triton.jit
def load(place, here, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """What lies at `place`; where MASKED, 0 for what is not `here`."""
    if MASKED:
        found = tl.load(place, mask=here, other=0.0, eviction_policy=POLICY)
    else:
        found = tl.load(place, eviction_policy=POLICY)
    return found


@triton.jit
def piece(lines, FIRST: tl.constexpr, STOP: tl.constexpr, SHARES: tl.constexpr, POLICY: tl.constexpr):
    """Numbers FIRST .. STOP behind each pointer of `lines` [n], [SHARES, n, a power of two]; 0 where there are no more."""
    each: tl.constexpr = share_of(STOP - FIRST, SHARES)
    at = FIRST + tl.arange(0, SHARES)[:, None, None] * each + tl.arange(0, each)[None, None, :]
    return load(lines[None, :, None] + at, at < STOP, FIRST + SHARES * each > STOP, POLICY)


@triton.jit
def hold(lines, K: tl.constexpr, SHARES: tl.constexpr, POLICY: tl.constexpr):
    """All K numbers behind each pointer of `lines`, in two pieces: 576 are 512 and 64, where one would have to be 1024."""
    long: tl.constexpr = long_of(K)
    most = piece(lines, 0, long, SHARES, POLICY)
    rest = piece(lines, long, K, SHARES, POLICY) if long < K else most
    return most, rest


@triton.jit
def times(x, held, sums, K: tl.constexpr, PRECISION: tl.constexpr):
    """Rows times weights, both held, added to sums [SHARES, M, N]: every warp sums its share."""
    sums = tl.dot(x[0], tl.permute(held[0].to(x[0].dtype), (0, 2, 1)), sums, input_precision=PRECISION)
    if long_of(K) < K:
        sums = tl.dot(x[1], tl.permute(held[1].to(x[1].dtype), (0, 2, 1)), sums, input_precision=PRECISION)
    return sums


@triton.jit
def folded(sums, M: tl.constexpr, N: tl.constexpr, SHARES: tl.constexpr):
    """The shares of sums [SHARES, M, N], added two by two.

    Every warp has one. Taken apart along the last axis they come to whoever adds them in one exchange; `tl.sum` would
    take two, and pass them through the batch rows of a warp between.
    """
    sums = tl.permute(sums, (1, 2, 0))
    for i in tl.static_range(halvings(SHARES)):
        one, other = tl.split(tl.reshape(sums, (M, N, SHARES >> (i + 1), 2)))
        sums = one + other
    return tl.reshape(sums, (M, N))


@triton.jit
def whole(K: tl.constexpr):
    """Numbers 0 .. K and some more, in spans: [spans, SPAN]."""
    return tl.arange(0, spans(K))[:, None] * SPAN + tl.arange(0, SPAN)[None, :]


@triton.jit
def at_whole(place, at, K: tl.constexpr, POLICY: tl.constexpr):
    """What lies `at` such numbers behind `place`, and 0 for those beyond K."""
    return load(place + at, at < K, spans(K) * SPAN > K, POLICY)

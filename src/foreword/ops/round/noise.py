"""Gumbel noise for (request, position, token), computed inside kernels: the same bits as `ops.noise.noise_bits`.

Noise for a vocabulary takes a dozen sweeps over memory as torch operations. A kernel that has the scores in registers adds
it at no cost.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN, _FIRST, _SECOND = tl.constexpr(0x9E3779B1), tl.constexpr(0x85EBCA6B), tl.constexpr(0xC2B2AE35)
_POSITION, _MIX = tl.constexpr(0x6C62272E), tl.constexpr(0x45D9F3B)
_MOST = tl.constexpr(1 - 2.0**-24)
_SMALL = tl.constexpr(2.0**-4)


@triton.jit
def _mixed(word):
    word = (word ^ (word >> 16)) * _MIX
    word = (word ^ (word >> 16)) * _MIX
    return word ^ (word >> 16)


@triton.jit
def noise_bits(key, position, token):
    """Return 31 random bits for each token, as int32. `key` points to the two 32-bit words of a request's key, as int64."""
    first = _mixed(tl.load(key).to(tl.uint32) ^ _mixed(position.to(tl.uint32) * _POSITION))
    second = _mixed(tl.load(key + 1).to(tl.uint32) + first)
    bits = (token.to(tl.uint32) * _GOLDEN) ^ first
    bits = (bits ^ (bits >> 16)) * _FIRST + second
    bits = (bits ^ (bits >> 13)) * _SECOND
    return ((bits ^ (bits >> 16)) >> 1).to(tl.int32)


@triton.jit
def gumbel(bits):
    """Return -log(-log(1 - u)). The hardware's logarithm is imprecise near 1, and winning tokens have a small u: a series
    serves there."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-31, _MOST)
    series = 1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * series)))
    return -tl.log(tl.where(u < _SMALL, series, -tl.log(1 - u)))

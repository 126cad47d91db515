"""Gumbel noise, a pure function of (request key, position, token id), the same on every device.

In: the keys of requests, the positions that tokens are chosen for, token ids. Out: noise, or scores under noise.
`ops/round/noise.py` makes the same bits inside kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_GOLDEN, _FIRST, _SECOND = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # odd multipliers that spread bits well


class Noise(NamedTuple):
    """What is added to the scores of a row before its tokens are compared: scores / T + noise if T > 0, else the scores."""

    key: Tensor  # [b, 2] int64
    position: Tensor  # [b, N]
    temperature: Tensor  # [b] float32


def under(scores: Tensor, noise: Noise | None, tokens: Tensor | None = None) -> Tensor:
    """Return scores [b, N, V] / T plus noise; without noise, the scores unchanged. tokens [V] or [b, N, V]: the tokens that
    the scores belong to, if not all tokens in order."""
    if noise is None:
        return scores
    tokens = all_tokens(scores) if tokens is None else tokens
    scaled = divided(scores, noise.temperature)
    return (scaled + gumbel(noise.key, noise.position, tokens)).where(column(noise.temperature, scores) > 0, scaled)


def divided(scores: Tensor, temperature: Tensor) -> Tensor:
    """Return scores [b, N, V] / T, with temperatures [b]; unchanged where T = 0."""
    divisor = column(temperature, scores)
    return scores / torch.where(divisor > 0, divisor, 1)


def all_tokens(scores: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1], device=scores.device)


def column(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per sequence [b] to fit scores [b, N, V], in their dtype."""
    return values.view(-1, 1, 1).to(like.dtype)


def gumbel(key: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Return Gumbel noise [b, N, V] for request keys [b, 2], positions [b, N] and token ids ([V] or [b, N, V])."""
    bits = noise_bits(key, position, tokens)
    # Small uniforms make large noise, and floats are finest near 0, where the winners are decided.
    uniform = (bits.to(torch.float32) + 0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def noise_bits(key: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Return 31 random bits for each (key, position, token), as int32. They are the same on every device."""
    first, second = _row_keys(key, position)
    bits = tokens.to(torch.int32) * _signed(_GOLDEN) ^ first.unsqueeze(-1)
    bits ^= _shifted(bits, 16)
    bits *= _signed(_FIRST)
    bits += second.unsqueeze(-1)
    bits ^= _shifted(bits, 13)
    bits *= _signed(_SECOND)
    bits ^= _shifted(bits, 16)
    return _shifted(bits, 1)


def _row_keys(key: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return two 32-bit words per row from the request's key and the position, in int64 so that nothing overflows."""
    place = position & WORD
    first = _mix32(key[:, :1] ^ _mix32(place * 0x6C62272E & WORD))
    second = _mix32(key[:, 1:] + first & WORD)
    return _wrapped(first), _wrapped(second)


def _mix32(word: Tensor) -> Tensor:
    for shift, multiplier in ((16, 0x45D9F3B), (16, 0x45D9F3B)):
        word = (word ^ (word >> shift)) * multiplier & WORD
    return word ^ (word >> 16)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical right shift; torch's own keeps the sign."""
    return (bits >> by) & (WORD >> by)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _wrapped(word: Tensor) -> Tensor:
    return (word - ((word >> 31) << 32)).to(torch.int32)

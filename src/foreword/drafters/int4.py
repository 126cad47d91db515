"""Matrices as four-bit codes with a scale per group of columns, for small files.

In: a matrix [N, K], K a multiple of 32. Out: codes from -8 to 7, two in a byte, and one bfloat16 scale per 32 columns of a
row: 0.5625 bytes per weight. The value of a group that is largest in magnitude has the sign of code -8, so a scale may be
negative. Of a few scales, the one with the smallest squared error is taken. Reading gives floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # columns of a row that share a scale
LOWEST, HIGHEST = -8, 7
CLIPS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # scales to try; 1 gives the largest value of a group code -8
SMALLEST = 1e-12  # a group of zeros stays one


def fits_int4(weight: Tensor) -> bool:
    """Return whether a tensor can be stored in four bits."""
    return weight.is_floating_point() and weight.dim() == 2 and weight.shape[1] % GROUP == 0


def int4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix [N, K] to packed codes, uint8 [N, K / 2], and scales, bfloat16 [N, K / 32]. The low half of a byte is
    the even column."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = _best_scales(groups)
    codes = (_rounded(groups, scales) - LOWEST).to(torch.uint8).flatten(1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales.squeeze(-1).bfloat16()


def from_int4(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the float matrix [N, K] of packed codes and their scales."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).float() + LOWEST
    return (codes.unflatten(1, (-1, GROUP)) * scales.unsqueeze(-1).float()).flatten(1)


def scales_shape(packed: Tensor) -> tuple[int, ...] | None:
    """Return the shape that the scales of packed codes must have; None if the tensor cannot be such codes."""
    if packed.dtype != torch.uint8 or packed.dim() != 2 or 2 * packed.shape[1] % GROUP:
        return None
    return packed.shape[0], 2 * packed.shape[1] // GROUP


def _best_scales(groups: Tensor) -> Tensor:
    """Return for each group [.., 32] the scale [.., 1] with the smallest squared error, as bfloat16 can hold it."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    full = torch.where(largest.abs() < SMALLEST, SMALLEST, largest / LOWEST)
    best, least = full, torch.full_like(full, torch.inf)
    for clip in CLIPS:
        scales = (clip * full).bfloat16().float()
        error = _rounded(groups, scales).mul_(scales).sub_(groups).square_().sum(-1, keepdim=True)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def _rounded(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / scales).round_().clamp_(LOWEST, HIGHEST)

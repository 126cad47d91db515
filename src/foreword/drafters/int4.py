"""Matrices as four-bit codes with a scale per 32 columns: `--store int4` before it deflated codes. Only read.

In: codes from 0 to 15, two in a byte, and one bfloat16 scale per 32 columns of a row. Out: floats, (code - 8) times scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # columns of a row that share a scale
LOWEST = -8


def from_int4(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the float matrix [N, K] of packed codes and their scales. The low half of a byte is the even column."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).float() + LOWEST
    return (codes.unflatten(1, (-1, GROUP)) * scales.unsqueeze(-1).float()).flatten(1)


def scales_shape(packed: Tensor) -> tuple[int, ...] | None:
    """Return the shape that the scales of packed codes must have; None if the tensor cannot be such codes."""
    if packed.dtype != torch.uint8 or packed.dim() != 2 or 2 * packed.shape[1] % GROUP:
        return None
    return packed.shape[0], 2 * packed.shape[1] // GROUP

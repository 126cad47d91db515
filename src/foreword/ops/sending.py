"""Copies from the host to a device that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sent(
    numbers: Sequence[float] | Sequence[tuple[float, ...]], device: torch.device | str, dtype: torch.dtype = torch.long
) -> Tensor:
    """From memory that a GPU reads by itself: from any other it is copied only when the round under way has ended."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def sent_along(part: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting for the work that the device has."""
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)

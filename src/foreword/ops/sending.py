"""Copies from the host to a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sent(
    numbers: Sequence[float] | Sequence[tuple[float, ...]], device: torch.device | str, dtype: torch.dtype = torch.long
) -> Tensor:
    """Copy numbers to a device. For a GPU they are pinned: other memory is copied only after the running round has ended."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def sent_along(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting for the work queued there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)

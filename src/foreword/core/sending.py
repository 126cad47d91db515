"""Numbers of the host on their way to a device, which nobody waits for."""

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

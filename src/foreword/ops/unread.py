"""The tokens of each sequence that a small model has not read yet, as torch operations.

In: the sequences as the engine's state has them, and how many rows of each the small model's cache holds. Out: the next
tokens to read. On CUDA, ops/drafting/catch_up.py takes the place of `unread`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated

if TYPE_CHECKING:
    from foreword.ops.round.settle import Columns


@accelerated("drafting.catch_up:catch_up")
def unread(state: Columns, cached: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the first `count` tokens that a cache of `cached` [B] rows does not hold.

    Returns how many rows of each sequence are cached [b], how many come before its root [b], the tokens [b, count] from the
    first one that is not cached, and which of these is the root [b].
    """
    length = state.lengths[state.slots]
    base = torch.minimum(cached[state.slots], length)  # the cache of a padding slot may be longer than its sequence
    column = (base.unsqueeze(1) + torch.arange(count, device=base.device)).clamp(max=state.tokens.shape[1] - 1)
    tokens = state.tokens[state.slots.unsqueeze(1), column]
    return base, length, tokens, (length - base).clamp(max=count - 1)  # larger only if nothing was read, as when timing

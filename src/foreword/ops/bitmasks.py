"""Sets of tokens as bits: token t is bit t % 32 of word t // 32, as xgrammar writes them.

In: scores [b, N, V], and the tokens allowed after each row, [b, N, W] int32. Out: scores in which the others cannot win.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def words_of(vocabulary: int) -> int:
    """Return how many words hold one bit for each token."""
    return -(-vocabulary // 32)


def drop_barred(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return scores [b, N, V] with minus infinity for every token whose bit in `allowed` [b, N, W] is 0."""
    bits = allowed.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=allowed.device) & 1
    return scores.masked_fill(bits.flatten(-2)[..., : scores.shape[-1]] == 0, -math.inf)

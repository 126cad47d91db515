"""The parts of draft heads, each in the dtype and on the device of the target that it is made for.

The initial weights matter more than the size: an untrained draft head predicts what the target's own head would.
Papers: Medusa (arXiv 2401.10774), Clover (arXiv 2405.00263), Clover-2 (arXiv 2408.00264).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor, nn

from foreword.core.target import Target
from foreword.errors import DrafterError, InputError
from foreword.model.draft_linears import DraftLinears, norm_parameters
from foreword.ops.rows import add_cosine_attention, cosine_attention
from foreword.ops.rows import remember as remember_rows


def linear(target: Target, columns_in: int, columns_out: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(columns_in, columns_out, bias, device=target.device, dtype=target.dtype)


def check_taps(method: str, taps: Sequence[int]) -> None:
    if not all(type(layer) is int for layer in taps):
        raise InputError(f"{method}: taps is {taps!r}; each is the number of a layer")


def check_taps_of(method: str, taps: Sequence[int], target: Target) -> None:
    """Refuse taps that the target does not have."""
    outside = [layer for layer in taps if not 0 <= layer <= target.layers]
    if outside:
        raise DrafterError(f"{method}: tap {outside[0]} lies outside {target.name}, which has layers 0 to {target.layers}")


def norm_like(target: Target) -> nn.RMSNorm:
    """Return a new norm that starts as the target's final one. The target's norm of a row of ones is its weight."""
    norm = plain_norm(target)
    with torch.no_grad():
        norm.weight.copy_(target.norm(torch.ones(1, 1, target.hidden_size, device=target.device, dtype=target.dtype))[0, 0])
    return norm


def plain_norm(target: Target) -> nn.RMSNorm:
    return nn.RMSNorm(target.hidden_size, eps=1e-5, device=target.device, dtype=target.dtype)


class SideBySideLinear(nn.Module):
    """A linear layer over a state and an embedding, concatenated. It starts at 0."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.product = linear(target, 2 * target.hidden_size, target.hidden_size)
        nn.init.zeros_(self.product.weight)
        nn.init.zeros_(self.product.bias)
        self._draft_linears = DraftLinears(self.product)

    def onto(self, state: Tensor, embedding: Tensor, silu: bool = False, times: Tensor | None = None) -> Tensor:
        """Add the product, or its SiLU, to the state, and multiply all by `times` [.., 1]."""
        return self._draft_linears.onto(state, state, embedding, silu, times)


class ResBlock(nn.Module):
    """x + SiLU(W x + b). W and b start at 0, so that the block starts as the identity."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.linear = linear(target, target.hidden_size, target.hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self._draft_linears = DraftLinears(self.linear)

    def forward(self, rows: Tensor) -> Tensor:
        return self._draft_linears.onto(rows, rows, silu=True)


class CosineAttention(nn.Module):
    """Attention of a state [..., H] to the embedding of one token: v * cos(q, k), head by head.

    A softmax over a single key is always 1. The cosine, from -1 to 1, weights the value instead.
    """

    def __init__(self, target: Target, bias: bool) -> None:
        super().__init__()
        size = target.hidden_size
        self.heads = gcd(size, target.attention_heads)
        self.norm = plain_norm(target)
        self.query, self.key, self.value = (linear(target, size, size, bias) for _ in range(3))
        for one in (self.query, self.key, self.value):
            if bias:
                nn.init.zeros_(one.bias)
        self._draft_linears = DraftLinears(self.query, self.key, self.value, second_from=1)

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        return cosine_attention(self._draft_linears(state, embedding, self.norm), self.heads)

    def onto(self, state: Tensor, embedding: Tensor, silu: bool = False, times: Tensor | None = None) -> Tensor:
        """Add the attention, or its SiLU, to the state, and multiply all by `times` [.., 1]."""
        state = add_cosine_attention(state, self._draft_linears(state, embedding, self.norm), self.heads, silu)
        return state if times is None else times * state


@torch.no_grad()
def near_identity(weight: Tensor, noise: Tensor) -> None:
    """Set a weight [H, n H] to pass its first H inputs through, plus some noise."""
    weight.copy_(torch.eye(*weight.shape, dtype=weight.dtype, device=weight.device) + noise)


def remember(
    held: Tensor,
    slots: Tensor,
    rows: Tensor,
    count: Tensor,
    path: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
) -> None:
    """Store each slot's last accepted row; slots with count 0 are unchanged. See `ops.rows.remember`."""
    remember_rows(held, slots, rows, count, path, norm_parameters(norm))

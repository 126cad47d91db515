"""Parts that draft heads are built of, each in the dtype and on the device of the target that it is made for.

Where a part starts from matters more than its size: an untrained head answers what the target's own head would.
Papers: Medusa (arXiv 2401.10774), Clover (arXiv 2405.00263), Clover-2 (arXiv 2408.00264).
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor, nn
from torch.nn import functional

from foreword.core.rough import Rough, added, for_kernels
from foreword.core.scores import along
from foreword.core.target import Target
from foreword.core.trees import carried

TINY = 1e-12  # keeps a row of zeros what it is


def linear(target: Target, columns_in: int, columns_out: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(columns_in, columns_out, bias, device=target.device, dtype=target.dtype)


def norm_like(target: Target) -> nn.RMSNorm:
    """A norm of one's own that starts as the target's final one: what that makes of ones is its weight."""
    norm = plain_norm(target)
    with torch.no_grad():
        norm.weight.copy_(target.norm(torch.ones(1, 1, target.hidden_size, device=target.device, dtype=target.dtype))[0, 0])
    return norm


def plain_norm(target: Target) -> nn.RMSNorm:
    return nn.RMSNorm(target.hidden_size, eps=1e-5, device=target.device, dtype=target.dtype)


def at_one(rows: Tensor) -> Tensor:
    """Rows [.., H] brought to a root mean square of 1.

    An embedding's numbers may be a thousandth of those of the stream that it joins: too small to be heard through weights
    of a usual size, which learn at a usual rate.
    """
    return functional.rms_norm(rows, rows.shape[-1:], eps=TINY)


def carried_and_embedded(known: Tensor, origin: Tensor, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What is `known` [b, n, H] of the live nodes that tokens [b, w] hang on, by `origin`; and beside it their embeddings by
    a table [V, H], at one: each [b, w, H]."""
    if known.is_cuda:
        from foreword.kernels import gather  # noqa: PLC0415  Triton is there only where CUDA is

        return gather.carried_and_embedded(known, origin, table, tokens)
    return carried(known, origin), at_one(table[tokens])


def size_of(rows: Tensor) -> Tensor:
    """[.., 1]: what `at_one` divides by."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=wide)
    return (length * rows.shape[-1] ** -0.5).to(rows.dtype)


class Beside(nn.Module):
    """A linear over a state and an embedding laid side by side, starting at 0."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.product = linear(target, 2 * target.hidden_size, target.hidden_size)
        nn.init.zeros_(self.product.weight)
        nn.init.zeros_(self.product.bias)
        self._rough = Rough(self.product)

    def onto(self, state: Tensor, embedding: Tensor, silu: bool = False, times: Tensor | None = None) -> Tensor:
        """The state with the product added, behind a SiLU where one is asked for, and all of it `times` [.., 1]."""
        return self._rough.onto(state, state, embedding, silu, times)


class ResBlock(nn.Module):
    """x + SiLU(W x + b). W and b start at 0, so that the block starts as nothing."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.linear = linear(target, target.hidden_size, target.hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self._rough = Rough(self.linear)

    def forward(self, rows: Tensor) -> Tensor:
        return self._rough.onto(rows, rows, silu=True)


class CosineAttention(nn.Module):
    """What a state [..., H] sees in one token's embedding: v * cos(q, k), head by head.

    With a single key a softmax is always 1; the cosine says instead how much of the value is let in, from -1 to 1.
    """

    def __init__(self, target: Target, bias: bool) -> None:
        super().__init__()
        size = target.hidden_size
        self.heads = gcd(size, target.attention_heads)
        self.norm = plain_norm(target)
        self.query, self.key, self.value = (linear(target, size, size, bias) for _ in range(3))
        for part in (self.query, self.key, self.value):
            if bias:
                nn.init.zeros_(part.bias)
        self._rough = Rough(self.query, self.key, self.value, turn=1)

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        parts = self._rough(state, embedding, self.norm).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        return (functional.cosine_similarity(query, key, dim=-1).unsqueeze(-1) * value).flatten(-2)

    def onto(self, state: Tensor, embedding: Tensor, silu: bool = False, times: Tensor | None = None) -> Tensor:
        """The state with what it sees added, behind a SiLU where one is asked for, and all of it `times` [.., 1]."""
        if state.is_cuda and not torch.is_grad_enabled():
            from foreword.kernels.look import looked  # noqa: PLC0415  Triton is there only where CUDA is

            state = looked(state, self._rough(state, embedding, self.norm), self.heads, silu)
            return state if times is None else times * state
        return added(state, self(state, embedding), silu, times)


@torch.no_grad()
def near_identity(weight: Tensor, noise: Tensor) -> None:
    """Make a weight [H, n H] pass its first H columns through, but for some noise."""
    weight.copy_(torch.eye(*weight.shape, dtype=weight.dtype, device=weight.device) + noise)


def counted(rows: Tensor, count: Tensor, path: Tensor | None = None) -> Tensor:
    """Rows [b, n, H], or those along a path [b, m] of them, with 0 past the first `count` [b]: what was not accepted may be
    NaN, which must not reach a cache."""
    if rows.is_cuda:
        from foreword.kernels import gather  # noqa: PLC0415  Triton is there only where CUDA is

        return gather.counted(rows, count, path)
    rows = rows if path is None else along(rows, path)
    order = torch.arange(rows.shape[1], device=rows.device)
    return rows.where((order < count.unsqueeze(1)).unsqueeze(-1), 0)


def remember(
    held: Tensor,
    slots: Tensor,
    rows: Tensor,
    count: Tensor,
    path: Tensor | None = None,
    norm: nn.RMSNorm | None = None,
) -> None:
    """Slots [b] of `held` [B, H] get the `count`-th [b] of rows [b, n, H], or of a path [b, m] of them, behind a norm if
    there is one. Where none counts they keep what they have."""
    if held.is_cuda:
        from foreword.kernels import gather  # noqa: PLC0415  Triton is there only where CUDA is

        gather.remember(held, slots, rows, count, path, for_kernels(norm))
        return
    last = (count - 1).clamp(min=0).unsqueeze(1)
    row = along(rows, last if path is None else path.gather(1, last)).squeeze(1)
    row = row if norm is None else norm(row)
    held.index_copy_(0, slots, torch.where((count > 0).unsqueeze(1), row, held[slots]))

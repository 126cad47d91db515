"""Random inputs of tree attention, with the answer in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.core.draft import Tree
from foreword.model.attention import attend, mask_of


@dataclass(frozen=True)
class AttentionCase:
    """Rows of random trees that attend to a random cache, with slots in any order and different lengths.

    Everything that no row may read, in other slots or after the scratch rows, is NaN.
    """

    query: Tensor  # [b, heads, n, width]
    keys: Tensor  # [B, key heads, rows, width]
    values: Tensor
    slots: Tensor  # [b]
    base: Tensor  # [b]
    sees: Tensor  # [b or 1, n, m]
    depth: Tensor  # [b or 1, m]

    @staticmethod
    def random(
        heads: tuple[int, int],
        width: int,
        rows: int,
        lengths: Sequence[int],
        before: int = 0,
        shared: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> AttentionCase:
        """Make one. `heads`: of queries and of keys. The rows are the last of a tree with `before` earlier rows."""
        generator = torch.Generator().manual_seed(seed)
        batch, scratch = len(lengths), before + rows
        random = torch.rand(1 if shared else batch, scratch, generator=generator) ** 0.3  # deep, so that windows matter
        tree = Tree((random * torch.arange(scratch).clamp(min=1)).long())
        slots = torch.randperm(batch + 2, generator=generator)[:batch]
        cached = torch.full((2, batch + 2, heads[1], max(lengths) + scratch + 3, width), torch.nan, dtype=dtype)
        for slot, length in zip(slots, lengths, strict=True):
            part = cached[:, slot, :, : length + scratch]
            part.copy_(torch.randn(part.shape, generator=generator))
        fused = 2 * torch.randn(batch, rows, heads[0] + 1, width, generator=generator).to(dtype)
        query = fused[:, :, : heads[0]].transpose(1, 2)
        return AttentionCase(query, *cached, slots, torch.tensor(lengths), tree.ancestors[:, before:], tree.depth)

    def to(self, device: str) -> AttentionCase:
        return AttentionCase(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def within(self, window: int) -> AttentionCase:
        """Return the same with scratch rows outside the window masked in `sees`."""
        far = self.depth[:, -self.sees.shape[1] :].unsqueeze(2) - self.depth.unsqueeze(1) >= window
        return replace(self, sees=self.sees & ~far)

    def exact(self, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        """Return the answer in float64: [b, n, heads, width]."""
        batch, heads, rows, width = self.query.shape
        keys, values = (cached[self.slots].nan_to_num().double() for cached in (self.keys, self.values))
        query, groups, column = self.query.double(), heads // keys.shape[1], torch.arange(keys.shape[2], device=keys.device)
        mask = mask_of(self.base, self.sees, keys.shape[2], groups, torch.float64)
        if window:
            length = self.base.view(-1, 1, 1)
            far = (column < length) & (column <= length + self.depth[:, -rows:].unsqueeze(2) - window)
            mask = mask.masked_fill(far.repeat(1, groups, 1).unsqueeze(1), -torch.inf)
        if not softcap:
            return attend(query, keys, values, mask, width**-0.5, sinks=sinks)
        scores = query.reshape(batch, keys.shape[1], -1, width) @ keys.mT * width**-0.5
        out = (softcap * (scores / softcap).tanh() + mask).softmax(-1) @ values
        return out.reshape(batch, heads, rows, width).transpose(1, 2)

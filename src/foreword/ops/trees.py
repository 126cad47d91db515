"""Trees of rows as masks: the ancestors of each row, and its depth."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated


@accelerated("round.tree:lineage")
def lineage(parent: Tensor) -> tuple[Tensor, Tensor]:
    """Return ancestors [b or 1, N, N] bool and depth [b or 1, N] of trees, given the parent [b or 1, N] of every row. A row
    is one of its own ancestors, and the root is its own parent."""
    nodes = parent.shape[1]
    rows = torch.arange(nodes, device=parent.device)
    reach = (rows == parent.unsqueeze(-1)) | (rows == rows.unsqueeze(-1))
    # Each squaring doubles the number of generations covered, so log2(N) of them reach the root.
    for _ in range((nodes - 1).bit_length()):
        step = reach.to(torch.float32)
        reach = (step @ step) > 0
    return reach, reach.sum(-1) - 1


@accelerated("round.tree:next_level")
def next_level(sees: Tensor, parent: Tensor) -> Tensor:
    """Return the ancestors of one more level of a tree: [b, w, m + w].

    sees [b or 1, v, m]: the ancestors of v rows among all m rows so far. parent [b, w]: which of the v rows each new row
    follows. The w new rows come after the m, and each is its own ancestor.
    """
    batch, width = parent.shape
    above = sees.expand(batch, -1, -1).gather(1, parent.unsqueeze(2).expand(-1, -1, sees.shape[2]))
    itself = torch.eye(width, dtype=torch.bool, device=sees.device).expand(batch, -1, -1)
    return torch.cat([above, itself], dim=2)

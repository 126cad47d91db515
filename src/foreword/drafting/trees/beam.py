"""Trees with the same number of nodes in every level, all of which are read and verified.

In: candidates after the nodes of a level. Out: the nodes of the next level, those with the likeliest whole paths. Every node
of the draft is read while it is drafted, so the rows that were computed are the rows of the draft. With one node per level
the tree is a chain.
Paper: Kangaroo (arXiv 2404.18911) for the exit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.core.draft import Draft, Shape
from foreword.core.state import State
from foreword.drafting.early_rows import EarlyRows
from foreword.drafting.trees.rows import FixedRows
from foreword.ops.growth import GrowingTrees, growing_trees


@dataclass(frozen=True)
class Beam:
    """How wide levels are, and when drafting ends.

    shape: the most rows and levels. width: the most nodes of a level. branch: candidates after each node. stop: a level is
    the last one if its nodes hold less than this share of the probability of the level before; with one node that is the
    probability of its token. fixed: the shape for each batch size, if it is not always the same. exits: once no sequence
    goes on, further levels are left out; to know that, the host asks the device.
    """

    shape: Shape
    width: int
    branch: int
    stop: float = 0.0
    fixed: FixedRows | None = None
    exits: bool = False

    def widths(self, batch: int) -> tuple[int, ...]:
        """Return the number of nodes in each level at this batch size; empty if no row pays off."""
        shape = self.shape if self.fixed is None else self.fixed.shape(batch)
        nodes = min(shape.nodes - 1, self.width * shape.depth)  # without the root
        width = -(-nodes // max(shape.depth, 1))
        return tuple(min(width, nodes - before) for before in range(0, nodes, max(width, 1)))

    def draft(self, state: State, rows: EarlyRows, guess: Callable[[int], tuple[Tensor, Tensor]]) -> Draft:
        """Draft level by level. `guess` returns candidates after the nodes of the last level, and their log-probabilities,
        for a level: both [b, w, k]."""
        widths = self.widths(len(state.batch.ids))
        trees: GrowingTrees = growing_trees(state, len(widths), widths[0], self.branch)
        held: Tensor | float = 1.0  # the probability that the last level's nodes hold
        size = torch.full_like(state.slots, 1 + sum(widths))
        for level, width in enumerate(widths, start=1):
            tokens, origin = trees.add(*guess(level))
            rows.read(tokens[:, :width], origin[:, :width])
            if self.stop and level < len(widths):
                before, held = held, trees.chance.exp().sum(1)
                size = size.where(held >= self.stop * before, size.clamp(max=1 + sum(widths[:level])))
                if self.exits and none_goes_on(size > 1 + sum(widths[:level])):
                    break
        return rows.draft(size)


def none_goes_on(going: Tensor) -> bool:
    """Whether all drafts have ended. It reads values: for a CPU only."""
    return not bool(going.any())

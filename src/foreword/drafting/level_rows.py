"""DRAFT: the scratch rows of a round while a tree grows: the root, then the nodes that are read, level by level.

In: for every new level, which row of the level before each of its rows follows. Out: `Rows`: the positions of the
level's rows, and which rows each attends to. All rows of earlier levels stay in place until the round ends.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from foreword.core.draft import Tree
from foreword.core.state import Batch
from foreword.model.stack import Rows
from foreword.ops.trees import next_level


class LevelRows:
    """The rows so far. At first there is the root alone."""

    def __init__(self, batch: Batch, base: Tensor) -> None:
        """base [b]: committed rows before the root."""
        self.batch, self.base = batch, base
        self.widths: tuple[int, ...] = (1,)  # rows of each level
        self._sees = Tree.chain(1, base.device).ancestors  # [b or 1, w, m]: ancestors of the last level's rows

    @property
    def last(self) -> Rows:
        """The rows of the last level."""
        return Rows(self.base, _depth(self.widths, self.base.device), self._sees, self.batch)

    def add(self, parent: Tensor) -> Rows:
        """Add a level whose rows follow rows `parent` [b, w] of the last one, and return it."""
        self._sees, self.widths = next_level(self._sees, parent), (*self.widths, parent.shape[1])
        return self.last


@cache
def _depth(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """[1, m]: the depth of rows stored level by level. It is made once and keeps its address, which captured rounds read."""
    return torch.tensor([[level for level, width in enumerate(widths) for _ in range(width)]], device=device)

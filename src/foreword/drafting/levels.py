"""The levels of growing trees as scratch rows of a stack: the root first, and one row for every node that is continued.

In: the rows of a level's nodes, and which nodes of the level before they follow. Out: these rows after the layers. A row
attends to the committed sequence, to its ancestors and to itself. None of them is kept, so nothing is rolled back.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from foreword.core.draft import Tree
from foreword.core.state import Batch
from foreword.model.stack import Rows, Stack
from foreword.ops.trees import next_level


class ScratchLevels:
    """The levels of one round. The root's row is in the cache already, as the first scratch row."""

    def __init__(self, stack: Stack, batch: Batch, length: Tensor) -> None:
        """length [b]: committed rows of the stack's cache, before the root."""
        self.stack, self.batch, self.length = stack, batch, length
        self.sees = Tree.chain(1, length.device).ancestors  # [b or 1, w, m] ancestors of the level that was read last
        self.widths: tuple[int, ...] = (1,)  # of all levels read so far

    def read(self, rows: Tensor, parent: Tensor) -> Tensor:
        """Run rows [b, w, H] of nodes that follow nodes `parent` [b, w] of the level that was read last: [b, w, H]."""
        self.sees, self.widths = next_level(self.sees, parent), (*self.widths, rows.shape[1])
        where = Rows(self.length, _depth(self.widths, rows.device), self.sees, self.batch)
        return self.stack.walk(rows, where).hidden


@cache
def _depth(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """[1, m]: the depth of rows stored level by level. It is made once and keeps its address, which captured rounds read."""
    return torch.tensor([[level for level, width in enumerate(widths) for _ in range(width)]], device=device)

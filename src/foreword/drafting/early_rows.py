"""DRAFT: the rows of a draft in the target's first layers, and the draft that they make up.

In: nodes, level by level. Out: their states after these layers, and in the end a `Draft` that brings the states along, so
that the target verifies it by its other layers alone. The target's own layers run, on the state's own root, and a draft has
exactly the rows that were read, in their order: so a drafter cannot change the output this way either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.core.draft import Draft, Early, Tree
from foreword.core.state import State
from foreword.core.target import Target
from foreword.drafting.level_rows import LevelRows


class EarlyRows:
    """The rows of one round in the target's first `layer` layers: the root, and the nodes that were read so far."""

    def __init__(self, target: Target, state: State, layer: int) -> None:
        self.target, self.layer = target, layer
        self.levels = LevelRows(state.batch, state.length)
        self.root = state.root.unsqueeze(1)
        # A sequence without drafts repeats its root: a draft token may be NaN to the target, and would be so in each round.
        self.drafts = (state.speculates[state.slots] & state.alive).unsqueeze(1)
        self.tokens, self.parents = [self.root], [torch.zeros_like(self.root)]
        self.states = [target.early(self.root, self.levels.last, layer)]  # [b, w, H] of each level

    def read(self, tokens: Tensor, parent: Tensor) -> None:
        """Read nodes [b, w] that follow rows `parent` [b, w] of the last level."""
        above = sum(self.levels.widths[:-1])  # rows before the last level
        self.tokens.append(tokens.where(self.drafts, self.root))
        self.parents.append(parent + above)
        self.states.append(self.target.early(self.tokens[-1], self.levels.add(parent), self.layer))

    def draft(self, size: Tensor) -> Draft:
        """Return the draft of all rows, of which the first `size` [b] count."""
        tokens, early = torch.cat(self.tokens, 1), Early(self.layer, torch.cat(self.states, 1))
        if max(self.levels.widths) == 1:
            return Draft(tokens, Tree.chain(tokens.shape[1], tokens.device), size, early)
        return Draft(tokens, Tree(torch.cat(self.parents, 1)), size, early)

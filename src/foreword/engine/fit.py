"""FIT, between DRAFT and VERIFY: choose how many rows this round's pass has.

In: a draft. Out: the draft that the target verifies. A target that takes chains alone gets the first one of a tree. On a
GPU the shape stays as it was bound, and unused rows are masked. On a CPU every row costs time, and reading a tensor costs
nothing, so rows that no sequence uses are cut off.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from foreword.core.draft import Draft
from foreword.core.needs import Needs
from foreword.core.state import State
from foreword.ops import rounds
from foreword.ops.device import fixes_shapes


def fit(draft: Draft, state: State, needs: Needs, chains: bool = False) -> Draft:
    """Return the rows of a draft that go through the pass. With `chains` they are a chain."""
    if chains:
        draft = draft.first_chain()
    # Grafted rows hang on fixed nodes, so those nodes must stay.
    if not needs.grafts and not fixes_shapes(draft.size.device):
        draft = draft.head(int(rounds.rows_that_count(state, draft.size).max()))
    tokens, size = rounds.fit(state, draft.tokens, draft.tree.depth, draft.size)
    return replace(draft, tokens=tokens, size=size)


def rows_in_use(column: Tensor, slots: Tensor, empty: int) -> int:
    """Return how many rows of a column [B, R] a round over slots [b] has: all, or on a CPU up to the last one that is not
    `empty` in some slot. Rows that hold something come first."""
    if fixes_shapes(slots.device):
        return column.shape[1]
    return int((column[slots] != empty).sum(1).max())

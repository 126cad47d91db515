"""Between DRAFT and VERIFY: the host's choice of how many rows this round's pass has.

On a GPU the shape stays as it was bound and unused rows are masked. On the CPU every row costs, and asking a tensor costs
nothing, so rows that no sequence uses are cut off.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from foreword.core.draft import Draft
from foreword.core.needs import Needs
from foreword.core.state import State


def fit(draft: Draft, state: State, needs: Needs) -> Draft:
    if draft.size.is_cuda:
        from foreword.kernels.settle import fitted  # noqa: PLC0415  Triton is there only where CUDA is

        tokens, size = fitted(state, draft.tokens, draft.tree.depth, draft.size)
        return Draft(tokens, draft.tree, size)
    size = torch.where(state.speculates[state.slots] & state.alive, draft.size, 1)
    # Grafted rows hang on fixed nodes, so those nodes must stay.
    if not needs.grafts:
        draft = draft.head(int(size.max()))
    return rooted(Draft(draft.tokens, draft.tree, size), state)


def rooted(draft: Draft, state: State) -> Draft:
    """Padding goes through the target too: it repeats the root, which the target has to answer to anyway. And the root is
    the engine's to say: a drafter that got it wrong costs speed, not text."""
    guessed = draft.counts & (draft.tree.depth > 0)
    return replace(draft, tokens=draft.tokens.where(guessed, state.root.unsqueeze(1)))

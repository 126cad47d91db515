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
    speculates = state.speculates[state.slots] & state.alive
    size = torch.where(speculates, draft.size, 1)
    # Grafted rows hang on fixed nodes, so those nodes must stay.
    if size.device.type == "cpu" and not needs.grafts:
        draft = draft.head(int(size.max()))
    draft = Draft(draft.tokens, draft.tree, size)
    # Padding goes through the target too: it repeats the root, which the target has to answer to anyway. And the root is
    # the engine's to say: a drafter that got it wrong costs speed, not text.
    guessed = draft.counts & (draft.tree.depth > 0)
    return replace(draft, tokens=draft.tokens.where(guessed, state.root.unsqueeze(1)))

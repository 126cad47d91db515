"""Between DRAFT and VERIFY: the host's choice of how many rows this round's pass has.

On a GPU the shape stays as it was bound and unused rows are masked. On the CPU every row costs, and asking a tensor costs
nothing, so rows that no sequence uses are cut off.
"""

from __future__ import annotations

import torch

from foreword.core.draft import Draft
from foreword.core.needs import Needs
from foreword.core.state import State


def fit(draft: Draft, state: State, needs: Needs) -> Draft:
    speculates = state.speculates[state.slots] & state.alive
    draft = Draft(draft.tokens, draft.tree, torch.where(speculates, draft.size, 1))
    # Grafted rows hang on fixed nodes, so those nodes must stay.
    if draft.size.device.type != "cpu" or needs.grafts:
        return draft
    return draft.head(int(draft.size.max()))

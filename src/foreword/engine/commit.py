"""COMMIT: Accepted -> cache and columns. Accepted rows move to the front of the scratch; the last token is the new root."""

from __future__ import annotations

import torch

from foreword.core.draft import Draft
from foreword.core.scores import Accepted, Emission
from foreword.core.state import State
from foreword.model.cache import SlotCache


def commit(state: State, cache: SlotCache, draft: Draft, accepted: Accepted, emission: Emission) -> None:
    slots, kept = state.slots, accepted.kept
    order = torch.arange(kept.shape[1], device=slots.device)
    waste = state.tokens.shape[1] - 1
    column = torch.where(kept, state.length.unsqueeze(1) + 1 + order, waste)
    state.tokens.index_put_((slots.unsqueeze(1).expand_as(column), column), emission.tokens)
    if state.sampling.kind.penalties:
        counted = (slots.unsqueeze(1).expand_as(column), emission.tokens)
        state.seen.index_put_(counted, kept.to(state.seen.dtype), accumulate=True)
    state.roots.index_copy_(0, slots, torch.where(accepted.count > 0, accepted.next, state.root))
    state.alive_slots.index_copy_(0, slots, state.alive & ~emission.ended)
    if draft.tree.is_chain:
        cache.advance(state.lanes, accepted.count)
    else:
        cache.keep(state.lanes, accepted.path, accepted.count)

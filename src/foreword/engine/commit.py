"""COMMIT: Accepted -> cache and columns. Accepted rows move to the front of the scratch; the last token is the new root."""

from __future__ import annotations

import torch

from foreword.core.draft import Draft
from foreword.core.scores import Accepted, Emission
from foreword.core.state import State
from foreword.model.cache import SlotCache


def commit(state: State, cache: SlotCache, draft: Draft, accepted: Accepted, emission: Emission) -> None:
    if state.sampling.kind.penalties:
        counted = (state.slots.unsqueeze(1).expand_as(emission.tokens), emission.tokens)
        state.seen.index_put_(counted, accepted.kept.to(state.seen.dtype), accumulate=True)
    if state.slots.is_cuda:
        from foreword.kernels.settle import written  # noqa: PLC0415  Triton is there only where CUDA is

        written(state, emission.tokens, accepted.count, accepted.next, emission.ended)
    else:
        write(state, accepted, emission)
    if draft.tree.is_chain:
        cache.advance(state.lanes, accepted.count)
    else:
        cache.keep(state.lanes, accepted.path, accepted.count)


def write(state: State, accepted: Accepted, emission: Emission) -> None:
    """The round's tokens behind the texts, the new roots, and which texts have ended."""
    slots, kept = state.slots, accepted.kept
    order = torch.arange(kept.shape[1], device=slots.device)
    waste = state.tokens.shape[1] - 1
    column = torch.where(kept, state.length.unsqueeze(1) + 1 + order, waste)
    state.tokens.index_put_((slots.unsqueeze(1).expand_as(column), column), emission.tokens)
    state.roots.index_copy_(0, slots, torch.where(accepted.count > 0, accepted.next, state.root))
    state.alive_slots.index_copy_(0, slots, state.alive & ~emission.ended)

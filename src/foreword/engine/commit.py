"""COMMIT: Accepted -> cache and columns. Accepted rows move to the front of the scratch; the last token becomes the root."""

from __future__ import annotations

from torch import Tensor

from foreword.core.draft import Draft
from foreword.core.scores import Accepted, Emission
from foreword.core.state import State
from foreword.model.cache import SlotCache
from foreword.ops.rounds import write


def commit(state: State, cache: SlotCache, draft: Draft, accepted: Accepted, emission: Emission) -> None:
    """Keep the accepted rows, and append their tokens to the sequences."""
    kind = state.sampling.kind
    if kind.repetition:
        _count(state, state.seen, accepted, emission)
    if kind.generated:
        _count(state, state.table.columns["generated"], accepted, emission)
    write(state, emission.tokens, accepted.count, accepted.next, emission.ended)
    if draft.tree.is_chain:
        cache.advance(state.batch, accepted.count)
    else:
        cache.keep(state.batch, accepted.path, accepted.count)


def _count(state: State, counts: Tensor, accepted: Accepted, emission: Emission) -> None:
    """Add a round's accepted tokens to the counts [B, V] of the sequences."""
    counted = (state.slots.unsqueeze(1).expand_as(emission.tokens), emission.tokens)
    counts.index_put_(counted, accepted.kept.to(counts.dtype), accumulate=True)

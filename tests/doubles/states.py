"""States and model caches that hold given sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from doubles.engines import SAMPLINGS
from doubles.models import CONTEXT, END
from doubles.trees import chain
from foreword.core.needs import Needs
from foreword.core.sampling import Sampling
from foreword.core.state import Batch, State
from foreword.model.model import Model


def state_of(
    sequences: Sequence[Sequence[int]], sampling: Sampling = SAMPLINGS["greedy"], slots: int | None = None
) -> State:
    """Return a state with these sequences in its slots. The last token of each is the root. There is no model."""
    count = slots or len(sequences)
    state = State.empty(count, CONTEXT, torch.zeros(count, dtype=torch.long), torch.tensor([END]))
    for slot, sequence in enumerate(sequences):
        state.tokens[slot, : len(sequence)] = torch.tensor(list(sequence))
        state.roots[slot], state.lengths[slot] = sequence[-1], len(sequence) - 1
        state.limits[slot], state.heeds_ends[slot] = CONTEXT, True
        state.speculates[slot] = state.alive_slots[slot] = True
        state.table.set(slot, sampling.derived(slot))
    ids = list(range(len(sequences)))
    return state.at(Batch.of(ids, max(map(len, sequences)) - 1))


def prefilled(model: Model, sequences: dict[int, Sequence[int]], slots: int = 4, scratch: int = 32) -> Batch:
    """Read sequences into the model's cache, one by one, each into its slot."""
    model.allocate(slots, CONTEXT, scratch)
    for slot, sequence in sequences.items():
        if sequence:
            batch = Batch.of([slot], 0)
            with torch.no_grad():
                model.score(batch, chain([list(sequence)]), Needs())
            model.cache.advance(batch, torch.tensor([len(sequence)]))
    return Batch.of(list(sequences), max(map(len, sequences.values())))


def sequence_of(state: State, index: int) -> list[int]:
    """Return one sequence, root included."""
    return state.tokens[state.slots[index], : int(state.length[index]) + 1].tolist()


def sequences_of(state: State) -> list[list[int]]:
    return [sequence_of(state, index) for index in range(len(state.batch.ids))]

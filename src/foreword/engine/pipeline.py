"""Rounds of a pipeline: one call of a looped target's group of layers for all tokens in flight, each at its own repeat.

A token that has been through the group predicts the next token, which enters in the next round while the first continues.
After its last repeat the prediction is final: it is the token that the target chooses, by the same rule as in every loop,
and the sequence grows by it. A token in flight that a prediction contradicts is dropped together with those after it. So
only final predictions are emitted, and what a token attends to is what it would attend to alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foreword.core.choosing import log_chances, pick
from foreword.core.draft import Draft, Tree
from foreword.core.drafter import Drafter
from foreword.core.loop import Pipelining
from foreword.core.scores import Emission, Scores
from foreword.core.state import State
from foreword.engine.accept import accept, history
from foreword.engine.commit import commit
from foreword.engine.eager import EagerLoop
from foreword.engine.fit import rows_in_use
from foreword.model.group import LayerGroup
from foreword.model.model import Model
from foreword.ops.flights import NONE, Flight, FlightColumns, move, tokens_of
from foreword.ops.sending import sent


class Pipeline(EagerLoop):
    """Implements `core.Loop`."""

    def __init__(self, target: Model, drafter: Drafter, pipelining: Pipelining) -> None:
        super().__init__(target, drafter)
        self.pipelining, self.repeats, self.group = pipelining, target.repeats, LayerGroup(target)
        sizes = target.cache.slots, target.repeats, target.hidden_size
        self.columns = FlightColumns.empty(*sizes, target.dtype, target.device)

    def begin(self, state: State) -> None:
        self.columns.restart(state.slots)
        super().begin(state)

    def restart(self, slots: Sequence[int]) -> None:
        self.columns.restart(sent(list(slots), self.target.device))

    def round(self, state: State) -> Emission:
        flight = self._one_repeat(state)
        rows = self._rows_to_read(flight)
        hidden = flight.hidden.gather(1, rows.unsqueeze(-1).expand(-1, -1, flight.hidden.shape[-1]))
        logits = self.target.head(self.target.norm(hidden))
        final = flight.repeat[:, 0] == self.repeats
        choice, checked = self._predictions(state, flight, rows, logits)
        decided, emission = self._decide(state, final, logits[:, :1])
        choice[:, 0] = torch.where(final, decided, choice[:, 0])
        checked[:, 0] |= final
        restarts = final & (emission.count == 0)  # a NaN, or a slot that is not alive
        move(self.columns, state.slots, flight, choice, checked, emission.count, restarts)
        return emission

    def _one_repeat(self, state: State) -> Flight:
        """Let all tokens in flight through the group of layers once."""
        repeat = self.columns.repeat_of(state.slots)
        repeat = repeat[:, : rows_in_use((repeat != NONE).sum(1), self.repeats)]
        tokens = tokens_of(self.columns, state.slots, repeat, state.root)
        known = state.batch.take(self.columns.hidden)[:, : repeat.shape[1]]
        hidden = torch.where((repeat > 0).unsqueeze(-1), known, self.target.embed(tokens))
        position = state.length.unsqueeze(1) + torch.arange(repeat.shape[1], device=repeat.device)
        # An empty row is run as a token that enters. It writes a row that a later token overwrites before it is read.
        hidden = self.group(state.batch, hidden, position, repeat.clamp(min=0))
        return Flight(tokens, torch.where(repeat == NONE, NONE, repeat + 1), hidden)

    def _rows_to_read(self, flight: Flight) -> Tensor:
        """Return the rows whose predictions are computed: [b, n], the root's first."""
        if self.pipelining.rechecks == "every":
            return torch.arange(flight.tokens.shape[1], device=flight.tokens.device).expand_as(flight.tokens)
        youngest = flight.count - 1
        return torch.stack([torch.zeros_like(youngest), youngest], dim=1)

    def _predictions(self, state: State, flight: Flight, rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each row in flight [b, n] predicts, and whether that counts although it is not final. logits: of
        `rows`."""
        chain = Draft(flight.tokens, Tree.chain(flight.tokens.shape[1], rows.device), flight.count)
        position = state.length.unsqueeze(1) + rows + 1
        predicted = pick(logits, position, state.sampling, history(state, chain).at(rows))
        counts = state.speculates[state.slots].unsqueeze(1) & (flight.repeat.gather(1, rows) != NONE)
        if self.pipelining.rechecks == "ends":
            counts &= rows == (flight.count - 1).unsqueeze(1)
        if self.pipelining.gate > 0:
            counts &= log_chances(logits, predicted, 0)[0] > math.log(self.pipelining.gate)
        return (
            flight.tokens.scatter(1, rows, predicted),
            torch.zeros_like(flight.tokens, dtype=torch.bool).scatter(1, rows, counts),
        )

    def _decide(self, state: State, final: Tensor, logits: Tensor) -> tuple[Tensor, Emission]:
        """Emit the target's choices after roots that are `final` [b], by their logits [b, 1, V]. Return the choices [b] and
        the emission. A NaN may come from a token in flight, if the sequence speculates: that counts as a draft."""
        draft, scores = Draft.nothing(state.root), Scores(logits)
        deciding = state.alive_slots.index_copy(0, state.slots, state.alive & final)
        accepted, emission = accept(replace(state, alive_slots=deciding), draft, scores, 0)
        commit(state, self.target.cache, draft, accepted, emission)
        emission.drafted.copy_(emission.broken & state.speculates[state.slots])
        self.drafter.observe(state, draft, scores, accepted)
        return accepted.next, emission

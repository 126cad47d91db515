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
from torch.nn import functional

from foreword.core.choosing import History, log_chances, pick
from foreword.core.draft import Draft, Tree
from foreword.core.drafter import Drafter
from foreword.core.loop import Constrain, Pipelining
from foreword.core.sampling_table import SamplingRows
from foreword.core.scores import Emission, Scores
from foreword.core.state import State
from foreword.engine.accept import accept, history
from foreword.engine.commit import commit
from foreword.engine.eager import EagerLoop
from foreword.engine.fit import rows_in_use
from foreword.model.group import LayerGroup
from foreword.model.model import Model
from foreword.ops.flights import NONE, Boarded, Flight, FlightColumns, board, continued, move
from foreword.ops.sending import sent


class Pipeline(EagerLoop):
    """Implements `core.loop.InTurns`."""

    def __init__(self, target: Model, drafter: Drafter, pipelining: Pipelining) -> None:
        super().__init__(target, drafter)
        self.pipelining, self.group = pipelining, LayerGroup(target)
        sizes = target.cache.slots, target.repeats, target.hidden_size
        self.columns = FlightColumns.empty(*sizes, target.dtype, target.device)

    def begin(self, state: State) -> None:
        self.columns.restart(state.slots)
        super().begin(state)

    def restart(self, slots: Sequence[int]) -> None:
        self.columns.restart(sent(list(slots), self.target.device))

    def round(self, state: State, constrain: Constrain | None = None) -> Emission:
        root = self.propose(state)
        return self.check(state, root if constrain is None else constrain(state, root))

    def propose(self, state: State) -> Draft:
        return Draft.nothing(state.root)

    def decided(self, state: State, emission: Emission) -> None:
        pass

    def check(self, state: State, root: Draft) -> Emission:
        """Call the group once. `root`: the root as a draft. A grammar holds for what follows it, as only that is final."""
        boarded = self._board(state)
        hidden = continued(self.columns.hidden, state.slots, boarded.repeat, self.target.embed(boarded.tokens))
        hidden = self.group(state.batch, hidden, boarded.position, boarded.slots)
        flight = Flight(boarded.tokens, boarded.repeat, hidden)
        chain = _in_flight(root, flight.tokens)
        predicted, logits = self._predictions(flight, boarded.position, state.sampling, history(state, chain))
        scores, deciding = Scores(logits[:, :1]), replace(state, alive_slots=boarded.deciding)
        accepted, emission = accept(deciding, root, scores, 0, predicted[:, :1])  # ACCEPT, where the root is through
        commit(state, self.target.cache, root, accepted, emission)
        move(self.columns, state, flight, predicted, self._sure(logits, predicted), self._reads_every_row, emission)
        self.drafter.observe(state, root, scores, accepted)
        return emission

    def _board(self, state: State) -> Boarded:
        """Return the rows of a round: the tokens in flight."""
        rows = rows_in_use(self.columns.repeat, state.slots, NONE)
        return board(self.columns, state, rows, self.group.slots_per_repeat)

    @property
    def _reads_every_row(self) -> bool:
        return self.pipelining.rechecks == "every"

    def _predictions(
        self, flight: Flight, position: Tensor, sampling: SamplingRows, known: History
    ) -> tuple[Tensor, Tensor]:
        """Return what rows predict by the target's own choice, and their logits: of all rows [b, n], or of the root's and
        the youngest token's [b, 2]. known: what precedes the token after each row."""
        hidden = flight.hidden
        if not self._reads_every_row:
            youngest = (flight.repeat != NONE).sum(1) - 1
            rows = torch.stack([torch.zeros_like(youngest), youngest], dim=1)
            hidden = hidden.gather(1, rows.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
            position, known = position.gather(1, rows), known.at(rows)
        logits = self.target.head(self.target.norm(hidden))
        return pick(logits, position if sampling.kind.is_greedy else position + 1, sampling, known), logits

    def _sure(self, logits: Tensor, predicted: Tensor) -> Tensor | None:
        """Return which predictions are likelier than the gate; None if there is no gate."""
        if not self.pipelining.gate:
            return None
        return log_chances(logits, predicted, 0)[0] > math.log(self.pipelining.gate)


def _in_flight(root: Draft, tokens: Tensor) -> Draft:
    """Return the tokens in flight [b, n], root included, as a chain. No grammar holds for what follows the others."""
    others = tokens.shape[1] - 1
    allowed = None if root.allowed is None else functional.pad(root.allowed, (0, 0, 0, others), value=-1)
    return replace(root, tokens=tokens, tree=Tree.chain(others + 1, tokens.device), allowed=allowed)

"""The tokens in flight through a looped model: those that have entered its group of layers and are not decided yet.

A sequence has one row per token, in the order of their positions; row 0 is the root. `repeat` says how often a token has
been through the group, NONE that the row holds no token. It falls from row to row, so that every token finds the keys and
values that it needs. `board` and `continued` give what a round runs, and `move` stores where the tokens are after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.dispatch import accelerated
from foreword.ops.rounds import Columns, Decision
from foreword.ops.slots import at_slots

NONE = -1


class FlightColumns(NamedTuple):
    """The tokens in flight of all B slots, at most R each: as many as the group is applied times."""

    tokens: Tensor  # [B, R] that of row 0 is not used: it is the root
    repeat: Tensor  # [B, R]
    hidden: Tensor  # [B, R, H] not used while `repeat` is 0: then it is the embedding

    @staticmethod
    def empty(slots: int, repeats: int, hidden: int, dtype: torch.dtype, device: torch.device) -> FlightColumns:
        repeat = torch.full((slots, repeats), NONE, dtype=torch.long, device=device)
        repeat[:, 0] = 0
        states = torch.zeros(slots, repeats, hidden, dtype=dtype, device=device)
        return FlightColumns(torch.zeros_like(repeat), repeat, states)

    def restart(self, slots: Tensor) -> None:
        """Let the roots of slots [b] enter again, and nothing else be in flight."""
        self.repeat.index_fill_(0, slots, NONE)
        self.repeat[:, 0].index_fill_(0, slots, 0)


class Boarded(NamedTuple):
    """The n rows that a round runs for each of b sequences."""

    tokens: Tensor  # [b, n]
    repeat: Tensor  # [b, n] as it is after the round
    position: Tensor  # [b, n]
    slots: Tensor  # [b, n] virtual slots: those of the repeat that the round runs
    deciding: Tensor  # [B] bool, of the round's slots: it is alive, and its root is through after the round


@dataclass(frozen=True)
class Flight:
    """The tokens in flight of b sequences in n rows, after a round."""

    tokens: Tensor  # [b, n]
    repeat: Tensor  # [b, n]
    hidden: Tensor  # [b, n, H]


@accelerated("round.flights:board")
def board(columns: FlightColumns, state: Columns, rows: int, slots_per_repeat: int) -> Boarded:
    """Return what a round runs in `rows` rows per sequence. An empty row repeats the root, as padding of a draft does, and
    runs as a token that enters: it writes a row of the cache that a later token overwrites before it is read."""
    slots, order = state.slots, torch.arange(rows, device=state.slots.device)
    repeat, root = at_slots(columns.repeat, slots)[:, :rows], state.roots[slots].unsqueeze(1)
    known = at_slots(columns.tokens, slots)[:, :rows]
    after = torch.where(repeat == NONE, NONE, repeat + 1)
    final = after[:, 0] == columns.repeat.shape[1]
    return Boarded(
        tokens=known.where((repeat != NONE) & (order > 0), root),
        repeat=after,
        position=state.lengths[slots].unsqueeze(1) + order,
        slots=slots.unsqueeze(1) + repeat.clamp(min=0) * slots_per_repeat,
        deciding=state.alive_slots.index_copy(0, slots, state.alive_slots[slots] & final),
    )


@accelerated("round.flights:continued")
def continued(hidden: Tensor, slots: Tensor, repeat: Tensor, embedded: Tensor) -> Tensor:
    """Return the states that the rows of a round start from: those of the column `hidden` [B, R, H], or for tokens that
    enter their embeddings [b, n, H]. repeat [b, n]: after the round."""
    known = at_slots(hidden, slots)[:, : repeat.shape[1]]
    return torch.where((repeat > 1).unsqueeze(-1), known, embedded)


@accelerated("round.flights:move")
def move(
    columns: FlightColumns,
    state: Columns,
    flight: Flight,
    predicted: Tensor,
    sure: Tensor | None,
    every: bool,
    decision: Decision,
) -> None:
    """Store where the tokens of a round's slots are after it, by what its rows predict.

    predicted [b, n]: of every row; if not `every`, [b, 2]: of the root and of the youngest token. sure, of the same shape:
    whether a prediction that is not final counts; None: all do. At the first row whose prediction counts and is not the
    token after it, the tokens after it are dropped, and the prediction enters. Then the root leaves if `decision` has a
    token. If it is through and there is none, after a NaN or in a slot that is not alive, it enters again, alone. A NaN
    counts as that of a draft if the sequence speculates: a token in flight may be its cause.
    """
    rows, most, slots = flight.tokens.shape[1], columns.tokens.shape[1], state.slots
    order, speculates = torch.arange(rows + 1, device=slots.device), state.speculates[slots]
    tokens, repeat = functional.pad(flight.tokens, (0, 1)), functional.pad(flight.repeat, (0, 1), value=NONE)
    final, decided = flight.repeat[:, 0] == most, decision.count
    choice, counts = predicted, flight.repeat != NONE
    if not every:
        choice = torch.where(order[:-1] == 0, predicted[:, :1], predicted[:, 1:])
        counts &= order[:-1] == counts.sum(1, keepdim=True) - 1
    if sure is not None:
        counts &= sure if every else torch.where(order[:-1] == 0, sure[:, :1], sure[:, 1:])
    follows = (tokens[:, 1:] == choice) & (repeat[:, 1:] != NONE)
    counts = (counts & speculates.unsqueeze(1)) | ((order[:-1] == 0) & final.unsqueeze(1))
    first = torch.where(counts & ~follows, order[:-1], rows).amin(1, keepdim=True)  # `rows`: there is none
    enters = order == first + 1
    tokens = torch.where(enters, choice.gather(1, first.clamp(max=rows - 1)), tokens)
    repeat = repeat.where(order <= first, NONE).masked_fill(enters, 0)
    source = order + decided.unsqueeze(1)
    inside, source = source <= rows, source.clamp(max=rows)
    moved = repeat.gather(1, source).where(inside, NONE)
    moved = torch.where((final & (decided == 0)).unsqueeze(1), torch.where(order == 0, 0, NONE), moved)
    at = source.clamp(max=rows - 1).unsqueeze(-1).expand(-1, -1, flight.hidden.shape[-1])
    stored = min(rows + 1, most)
    for column, values in zip(columns, (tokens.gather(1, source), moved, flight.hidden.gather(1, at)), strict=True):
        column[:, :stored].index_copy_(0, slots, values[:, :stored])
    decision.drafted.copy_(decision.broken & speculates)

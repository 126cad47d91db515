"""The tokens in flight through a looped model: those that have entered its group of layers and are not decided yet.

A sequence has one row per token, in the order of their positions; row 0 is the root. `repeat` says how often a token has
been through the group, NONE that the row holds no token. It falls from row to row, so that every token finds the keys and
values that it needs. Only `move` writes the columns, which have an entry for every slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foreword.ops.slots import at_slots

NONE = -1


class FlightColumns(NamedTuple):
    """The tokens in flight of all B slots, at most R each."""

    tokens: Tensor  # [B, R] that of row 0 is not used: it is the root
    repeat: Tensor  # [B, R]
    hidden: Tensor  # [B, R, H] not used while `repeat` is 0: then it is the embedding

    @staticmethod
    def empty(slots: int, most: int, hidden: int, dtype: torch.dtype, device: torch.device) -> FlightColumns:
        repeat = torch.full((slots, most), NONE, dtype=torch.long, device=device)
        repeat[:, 0] = 0
        return FlightColumns(torch.zeros_like(repeat), repeat, torch.zeros(slots, most, hidden, dtype=dtype, device=device))

    def restart(self, slots: Tensor) -> None:
        """Let the roots of slots [b] enter again, and nothing else be in flight."""
        self.repeat.index_fill_(0, slots, NONE)
        self.repeat[:, 0].index_fill_(0, slots, 0)

    def repeat_of(self, slots: Tensor) -> Tensor:
        """Return `repeat` of slots [b]: [b, R]."""
        return at_slots(self.repeat, slots)


@dataclass(frozen=True)
class Flight:
    """The tokens in flight of the b sequences of a round, in n rows."""

    tokens: Tensor  # [b, n]
    repeat: Tensor  # [b, n]
    hidden: Tensor  # [b, n, H]

    @property
    def count(self) -> Tensor:
        """[b]: how many tokens are in flight."""
        return (self.repeat != NONE).sum(1)


def tokens_of(columns: FlightColumns, slots: Tensor, repeat: Tensor, root: Tensor) -> Tensor:
    """Return the tokens of rows [b, n] with these repeats; empty rows repeat the root [b], as padding of a draft does."""
    known = at_slots(columns.tokens, slots)[:, : repeat.shape[1]]
    later = torch.arange(repeat.shape[1], device=repeat.device) > 0
    return known.where((repeat != NONE) & later, root.unsqueeze(1))


def move(
    columns: FlightColumns,
    slots: Tensor,
    flight: Flight,
    choice: Tensor,
    checked: Tensor,
    decided: Tensor,
    restarts: Tensor,
) -> None:
    """Store where the tokens of slots [b] are after a round.

    choice [b, n]: what follows each row by its own prediction. checked [b, n] bool: whether that counts; never for an empty
    row. At the first row whose prediction does not follow it, the tokens after it are dropped, and the prediction enters.
    Then `decided` [b] rows, 0 or 1, leave at the front. Where `restarts` [b] bool, the root alone enters again.
    """
    rows, most = flight.tokens.shape[1], columns.tokens.shape[1]
    order = torch.arange(rows + 1, device=slots.device)
    tokens, repeat = functional.pad(flight.tokens, (0, 1)), functional.pad(flight.repeat, (0, 1), value=NONE)
    follows = (tokens[:, 1:] == choice) & (repeat[:, 1:] != NONE)
    first = torch.where(checked & ~follows, order[:-1], rows).amin(1, keepdim=True)  # `rows`: there is none
    enters = order == first + 1
    tokens = torch.where(enters, choice.gather(1, first.clamp(max=rows - 1)), tokens)
    repeat = repeat.where(order <= first, NONE).masked_fill(enters, 0)
    source = order + decided.unsqueeze(1)
    inside, source = source <= rows, source.clamp(max=rows)
    moved = repeat.gather(1, source).where(inside, NONE)
    moved = torch.where(restarts.unsqueeze(1), torch.where(order == 0, 0, NONE), moved)
    at = source.clamp(max=rows - 1).unsqueeze(-1).expand(-1, -1, flight.hidden.shape[-1])
    stored = min(rows + 1, most)
    for column, values in zip(columns, (tokens.gather(1, source), moved, flight.hidden.gather(1, at)), strict=True):
        column[:, :stored].index_copy_(0, slots, values[:, :stored])

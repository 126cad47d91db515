"""State: what the engine knows about its sequences, on the device, shared with accept and the drafter.

Columns have one entry for each of B slots, in buffers that are never replaced. A State is a view of them: `batch` names the
b slots of this round, and the singular names (`root`, `length`) give their entries. For each of them the cache holds exactly
the `length` tokens before the root, and `tokens[slot, :length + 1]` is the sequence, root included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from foreword.core.sampling_table import SamplingRows, SamplingTable
from foreword.ops.sending import sent
from foreword.ops.slots import at_slots


@dataclass(frozen=True)
class Batch:
    """The slots of a pass, one per batch row, and what the host knows of them without asking the device.

    `span` is an upper bound on their committed lengths: attention need not look further. `ids` are the same slots as
    `slots`, on the host.
    """

    slots: Tensor  # [b]
    ids: tuple[int, ...]
    span: int
    changes: bool = False  # recorded: later rounds overwrite the buffer `slots`, so only the number of `ids` is right

    @staticmethod
    def of(ids: list[int] | tuple[int, ...], span: int, device: torch.device | str = "cpu") -> Batch:
        return Batch(sent(list(ids), device), tuple(ids), span)

    def take(self, column: Tensor) -> Tensor:
        """[b, ..]: the entries of the slots in a column [B, ..]."""
        return at_slots(column, self.slots)

    @property
    def run(self) -> slice | None:
        """The slots as a slice if they are adjacent, so that a view serves in place of a copy; otherwise None."""
        if self.changes:
            return None
        first, last = self.ids[0], self.ids[-1]
        side_by_side = self.ids == tuple(range(first, last + 1))
        return slice(first, last + 1) if side_by_side else None


@dataclass(frozen=True)
class State:
    batch: Batch
    roots: Tensor  # [B]
    lengths: Tensor  # [B] the same buffer as in the target's cache
    tokens: Tensor  # [B, L + 1] the last column takes writes that must not count
    limits: Tensor  # [B] the sequence may not become longer than this
    heeds_ends: Tensor  # [B] bool: an end token ends the sequence
    speculates: Tensor  # [B] bool: drafts may have more than the root
    alive_slots: Tensor  # [B] bool
    seen: Tensor  # [B, V] how often each token occurs in the sequence, root included; kept if a penalty is on
    table: SamplingTable

    @staticmethod
    def empty(slots: int, context: int, lengths: Tensor, ends: Tensor, vocabulary: int = 0) -> State:
        device = lengths.device
        return State(
            batch=Batch.of([], 0, device),
            roots=torch.zeros(slots, dtype=torch.long, device=device),
            lengths=lengths,
            tokens=torch.zeros(slots, context + 1, dtype=torch.long, device=device),
            limits=torch.zeros(slots, dtype=torch.long, device=device),
            heeds_ends=torch.zeros(slots, dtype=torch.bool, device=device),
            speculates=torch.zeros(slots, dtype=torch.bool, device=device),
            alive_slots=torch.zeros(slots, dtype=torch.bool, device=device),
            seen=torch.zeros(slots, 0, dtype=torch.int32, device=device),
            table=SamplingTable.empty(slots, ends, vocabulary, context),
        )

    def at(self, batch: Batch) -> State:
        return replace(self, batch=batch)

    @property
    def slots(self) -> Tensor:
        return self.batch.slots

    @property
    def ends(self) -> Tensor:
        """[E]: ids of the end tokens."""
        return self.table.ends

    @property
    def root(self) -> Tensor:
        """[b]: the last decided token of each sequence."""
        return self.batch.take(self.roots)

    @property
    def length(self) -> Tensor:
        """[b]: committed rows, which is also the root's position."""
        return self.batch.take(self.lengths)

    def ahead(self, steps: int | Tensor) -> Tensor | None:
        """Return the position of the token `steps` after the root: [b, 1 or more]. None in rounds without noise: only noise
        depends on it."""
        return self.length.unsqueeze(1) + steps if self.sampling.kind.noise else None

    @property
    def alive(self) -> Tensor:
        """[b] bool: sequences that still run. A finished one is frozen."""
        return self.alive_slots[self.slots]

    @cached_property
    def sampling(self) -> SamplingRows:
        return self.table.at(self.slots, self.batch.ids)

"""State: what the engine knows of its sequences, on the device, shared with accept and with the drafter.

Columns run over all B slots and live in buffers that are never replaced. A State is a window on them: `lanes` says which
b slots this round is about, and the singular names (`root`, `length`) give their rows. For each of them the cache holds
exactly the `length` tokens before the root, and `tokens[slot, :length + 1]` is the text, root included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from foreword.core.sampling import SamplingRows, SamplingTable
from foreword.core.sending import sent


@dataclass(frozen=True)
class Lanes:
    """Which slots a pass is about, and what the host knows of them without asking the device.

    `span` is an upper bound on their committed lengths: attention need not look further. `ids` are the same slots as
    `slots`, on the host.
    """

    slots: Tensor  # [b]
    ids: tuple[int, ...]
    span: int
    changes: bool = False  # captured: `slots` is a buffer that later rounds overwrite, so `ids` say only how many

    @staticmethod
    def of(ids: list[int] | tuple[int, ...], span: int, device: torch.device | str = "cpu") -> Lanes:
        return Lanes(sent(list(ids), device), tuple(ids), span)

    def take(self, column: Tensor) -> Tensor:
        """[b, ..]: what the slots have in a column [B, ..]."""
        if column.is_cuda:
            from foreword.kernels.gather import at_slots  # noqa: PLC0415  Triton is there only where CUDA is

            return at_slots(column, self.slots)
        return column[self.slots]

    @property
    def run(self) -> slice | None:
        """The slots as a slice where they lie side by side, so that a view serves in place of a copy."""
        if self.changes:
            return None
        first, last = self.ids[0], self.ids[-1]
        side_by_side = self.ids == tuple(range(first, last + 1))
        return slice(first, last + 1) if side_by_side else None


@dataclass(frozen=True)
class State:
    lanes: Lanes
    roots: Tensor  # [B]
    lengths: Tensor  # [B] the very buffer of the target's cache
    tokens: Tensor  # [B, L + 1] the last column is waste
    limits: Tensor  # [B] the text may not grow longer than this
    heeds_ends: Tensor  # [B] bool: an end token ends the text
    speculates: Tensor  # [B] bool: drafts may be longer than the root
    alive_slots: Tensor  # [B] bool
    seen: Tensor  # [B, V] how often each token stands in the text, the root included; kept where a penalty is on
    table: SamplingTable

    @staticmethod
    def empty(slots: int, context: int, lengths: Tensor, ends: Tensor) -> State:
        device = lengths.device
        return State(
            lanes=Lanes.of([], 0, device),
            roots=torch.zeros(slots, dtype=torch.long, device=device),
            lengths=lengths,
            tokens=torch.zeros(slots, context + 1, dtype=torch.long, device=device),
            limits=torch.zeros(slots, dtype=torch.long, device=device),
            heeds_ends=torch.zeros(slots, dtype=torch.bool, device=device),
            speculates=torch.zeros(slots, dtype=torch.bool, device=device),
            alive_slots=torch.zeros(slots, dtype=torch.bool, device=device),
            seen=torch.zeros(slots, 0, dtype=torch.int32, device=device),
            table=SamplingTable.empty(slots, ends),
        )

    def at(self, lanes: Lanes) -> State:
        return replace(self, lanes=lanes)

    @property
    def slots(self) -> Tensor:
        return self.lanes.slots

    @property
    def root(self) -> Tensor:
        """[b]: the last decided token of each sequence."""
        return self.lanes.take(self.roots)

    @property
    def length(self) -> Tensor:
        """[b]: committed rows, which is also the root's position."""
        return self.lanes.take(self.lengths)

    def ahead(self, steps: int | Tensor) -> Tensor | None:
        """[b, 1 or more]: where tokens so many steps behind the root will stand; None in rounds without noise, which is all
        that depends on it."""
        return self.length.unsqueeze(1) + steps if self.sampling.kind.noise else None

    @property
    def alive(self) -> Tensor:
        """[b] bool: sequences that still run; a finished one is frozen."""
        return self.alive_slots[self.slots]

    @cached_property
    def sampling(self) -> SamplingRows:
        return self.table.at(self.slots, self.lanes.ids)

"""Columns by slot: the entries of a round's sequences in a buffer with one entry per slot."""

from __future__ import annotations

from torch import Tensor

from foreword.ops.dispatch import accelerated


@accelerated("round.gather:at_slots")
def at_slots(column: Tensor, slots: Tensor) -> Tensor:
    """Return entries `slots` [b] of a column [B, ..]: [b, ..]."""
    return column[slots]

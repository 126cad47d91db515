"""Columns by slot: what a round's sequences have in a buffer that holds one entry per slot."""

from __future__ import annotations

from torch import Tensor

from foreword.ops.dispatch import accelerated


@accelerated("round.gather:at_slots")
def at_slots(column: Tensor, slots: Tensor) -> Tensor:
    """Entries `slots` [b] of a column [B, ..]: [b, ..]."""
    return column[slots]

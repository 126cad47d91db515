"""LayerCache: what one decoder layer remembers of B sequences, one per slot. `KVRows`, keys and values, is the kind in use.

A pass stores scratch rows after the committed ones and views both. What was stored counts only once it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from foreword.core.state import Batch
from foreword.ops.cached_rows import keep_rows


class LayerCache(Protocol):
    """What a stack asks of the cache of each of its layers.

    A recurrent layer has one state per slot instead of rows. Its cache would `store` a state for every node of the tree,
    `keep` the one of the last accepted node, and `rewind` to a state that it saved at that length. It would not be
    `reusable`: a state after n tokens says nothing about a prefix of them.
    """

    reusable: bool
    """Whether the first rows of a slot serve any sequence that begins with the same tokens."""

    def store(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write what the rows of a pass leave, at the flat places that `SlotCache.places` names."""

    def view(self, batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
        """What the slots of a pass hold in their first `rows` rows."""

    def keep(self, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
        """Move scratch rows `path[:, :count]` [b, n] to just after the committed `lengths` [B]."""

    def rewind(self, slots: Tensor, lengths: Tensor) -> None:
        """Forget all but the first `lengths` [b] rows of slots [b]."""

    def wipe(self, slot: int, first: int = 0, stop: int | None = None) -> None:
        """Set rows of a slot to zero. A masked row counts 0 times its value, and 0 x NaN is NaN."""

    def snapshot(self, slot: int, rows: int) -> tuple[Tensor, Tensor]:
        """A copy of what a slot holds in its first `rows` rows."""


@dataclass(frozen=True, eq=False)
class KVRows:
    """Keys and values of one layer: each [B, key heads, rows, width]."""

    keys: Tensor
    values: Tensor
    reusable: ClassVar[bool] = True

    def store(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values: [b, key heads, n, width]."""
        _write(self.keys, places, keys)
        _write(self.values, places, values)

    def view(self, batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
        """Views where the slots are neighbours, copies where they are not."""
        return _first(self.keys, batch, rows), _first(self.values, batch, rows)

    def keep(self, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
        """The rows of this layer alone. `SlotCache.keep` moves those of all layers at once."""
        for part in (self.keys, self.values):
            keep_rows(part[None, None], slots, lengths, path, count)

    def rewind(self, slots: Tensor, lengths: Tensor) -> None:
        """Nothing to do: rows past a sequence's length are scratch."""

    def wipe(self, slot: int, first: int = 0, stop: int | None = None) -> None:
        for part in (self.keys, self.values):
            part[slot, :, first:stop] = 0

    def snapshot(self, slot: int, rows: int) -> tuple[Tensor, Tensor]:
        return self.keys[slot, :, :rows].clone(), self.values[slot, :, :rows].clone()


def _write(cached: Tensor, places: Tensor, rows: Tensor) -> None:
    width = cached.shape[-1]
    cached.view(-1, width).index_copy_(0, places, rows.reshape(-1, width))


def _first(cached: Tensor, batch: Batch, rows: int) -> Tensor:
    cached = cached[:, :, :rows]
    return cached[batch.run] if batch.run is not None else cached.index_select(0, batch.slots)

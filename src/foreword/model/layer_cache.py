"""LayerCache: what one decoder layer keeps of B sequences, one per slot. `KVRows`, keys and values, is the kind in use.

A pass stores scratch rows after the committed ones and views both. Stored rows are committed only by `keep`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from foreword.core.state import Batch
from foreword.ops.cached_rows import keep_rows


class LayerCache(Protocol):
    """What a stack needs from the cache of each of its layers.

    A recurrent layer has one state per slot instead of rows. Its cache would `store` a state for every node of the tree,
    `keep` the one of the last accepted node, and `rewind` to a state that it saved at that length. It would not be
    `reusable`: a state after n tokens says nothing about a prefix of them.
    """

    reusable: bool
    """Whether another sequence that begins with the same tokens can reuse the first rows of a slot."""

    def store(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values of a pass at the flat places that `SlotCache.places` gives."""

    def view(self, batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
        """Return the first `rows` rows of the slots of a pass."""

    def keep(self, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
        """Move scratch rows `path[:, :count]` [b, n] to just after the committed `lengths` [B]."""

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Copy the first `rows` rows of a slot to another one, if the layer is `reusable`."""

    def rewind(self, slots: Tensor, lengths: Tensor) -> None:
        """Forget all but the first `lengths` [b] rows of slots [b]."""

    def wipe(self, slot: int, first: int = 0, stop: int | None = None) -> None:
        """Set rows of a slot to zero. A masked row has weight 0, and 0 x NaN is NaN."""

    def snapshot(self, slot: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return a copy of the first `rows` rows of a slot."""


@dataclass(frozen=True, eq=False)
class KVRows:
    """Keys and values of one layer: each [B, key heads, rows, width]."""

    keys: Tensor
    values: Tensor
    reusable: ClassVar[bool] = True

    def store(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [b, key heads, n, width]."""
        _write(self.keys, places, keys)
        _write(self.values, places, values)

    def view(self, batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
        """Return views if the slots are adjacent, copies if they are not."""
        return _first(self.keys, batch, rows), _first(self.values, batch, rows)

    def keep(self, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
        """Move the rows of this layer alone. `SlotCache.keep` moves those of all layers at once."""
        for part in (self.keys, self.values):
            keep_rows(part[None, None], slots, lengths, path, count)

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Copy the rows of this layer alone. `SlotCache.copy` copies those of all layers at once."""
        for part in (self.keys, self.values):
            part[slot, :, :rows] = part[source, :, :rows]

    def rewind(self, slots: Tensor, lengths: Tensor) -> None:
        """Do nothing: rows past a sequence's length are scratch."""

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

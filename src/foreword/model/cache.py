"""SlotCache: the layer caches of a stack, for B sequences, each with a length of its own. Rows past `length` are scratch.

A pass may write scratch rows freely, at `length` and after. Only `keep` moves accepted rows to the front of the scratch
rows and advances `length`. `rewind` drops rows by assigning a smaller length. The last row of every slot is a waste row:
padding is written there, and nothing ever reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from foreword.core.state import Batch
from foreword.errors import CapacityError
from foreword.model.layer_cache import KVRows
from foreword.ops import cached_rows
from foreword.ops.device import free_memory
from foreword.ranks.group import everywhere

SPARE = 128  # rows per slot: no method's passes exceed those of plain decoding by more


@dataclass(frozen=True)
class CacheShape:
    """What a cache holds per row."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes_per_row(self) -> int:
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize


class SharedCacheMemory:
    """Memory that the caches of several engines share. One of them writes at a time.

    It is allocated for the first cache, with SPARE more rows per slot if there is room, for engines whose passes are larger.
    A cache that needs more than that gets a new allocation.
    """

    def __init__(self) -> None:
        self._numbers: Tensor | None = None
        self._claimed_by: SlotCache | None = None

    def lend(self, cache: SlotCache, device: torch.device) -> Tensor:
        numbers = prod(cache.size)
        if self._numbers is None or self._numbers.numel() < numbers:
            spare, free = numbers * SPARE // cache.rows, free_memory(device)
            fits = free is None or (numbers + spare) * cache.shape.dtype.itemsize <= free
            self._numbers = _zeros((numbers + spare if fits else numbers,), cache, device)
        return self._numbers[:numbers].view(cache.size)

    def claim(self, cache: SlotCache) -> bool:
        """Claim the memory for a cache. Return whether another cache claimed it in between."""
        before, self._claimed_by = self._claimed_by, cache
        return before is not cache


class SlotCache:
    """One layer cache per layer of a stack, and the lengths that all of them share.

    Today every layer is a `KVRows`. They share one allocation, `held`, so that `keep` moves the rows of all layers in one
    launch. A stack with layers of several kinds would need one such call per kind.
    """

    def __init__(
        self,
        shape: CacheShape,
        slots: int,
        context: int,
        scratch: int,
        device: torch.device | str,
        memory: SharedCacheMemory | None = None,
    ) -> None:
        """`context` rows per slot, and after them room for a pass of `scratch` rows. A cache in shared `memory` must call
        `claim` before it is used."""
        self.shape = shape
        self.context, self.scratch = context, scratch
        self.rows = -(-(context + scratch + 1) // 8) * 8  # masks over all rows stay aligned
        self.size = (2, shape.layers, slots, shape.heads, self.rows, shape.width)
        self.memory, device = memory, torch.device(device)
        self.held = _zeros(self.size, self, device) if memory is None else memory.lend(self, device)
        # Indexed one by one: torch does not allow writing to tensors that iteration returns.
        self.layers = [KVRows(self.held[0][layer], self.held[1][layer]) for layer in range(shape.layers)]
        self.length = torch.zeros(slots, dtype=torch.long, device=device)

    def claim(self) -> bool:
        """Claim the shared memory; clear it if another engine used it. Return whether it was: then no slot has rows."""
        if self.memory is None or not self.memory.claim(self):
            return False
        self.held.zero_()
        self.length.zero_()
        return True

    def of_group(self, layers: int) -> SlotCache:
        """Return a view of this cache for a group of layers that is applied repeatedly. In it, every slot is one virtual
        slot per repeat: slot i of repeat r is number i + r * layers * slots."""
        view, by_layer_and_slot = copy.copy(self), self.held.flatten(1, 2)
        keys, values = by_layer_and_slot[0], by_layer_and_slot[1]
        view.layers = [KVRows(keys[first:], values[first:]) for first in range(0, layers * self.slots, self.slots)]
        return view

    @property
    def slots(self) -> int:
        return self.length.shape[0]

    @property
    def bytes(self) -> int:
        return self.shape.bytes_per_row * self.rows * self.slots

    @property
    def keys(self) -> list[Tensor]:
        """The keys of every layer."""
        return [layer.keys for layer in self.layers]

    @property
    def values(self) -> list[Tensor]:
        """The values of every layer."""
        return [layer.values for layer in self.layers]

    def check_room(self, rows: int) -> None:
        """Refuse a draft with more rows than the cache has scratch rows: near the end of the context the others would all be
        written to the waste row. A prompt chunk is exempt: it ends with the context, and only its padding lies beyond."""
        if rows > self.scratch:
            raise CapacityError(
                f"a pass over {rows} draft rows needs as many scratch rows, the cache was allocated with {self.scratch}; "
                "let the drafter's shape and needs name all rows of its passes"
            )

    def places(self, batch: Batch, rows: Tensor) -> Tensor:
        """Return the places of rows [b, n] of each slot on the flat axis (slot, head, row): [b * heads * n]."""
        return cached_rows.flat_places(batch.slots, rows, self.shape.heads, self.rows)

    def keep(self, batch: Batch, path: Tensor, count: Tensor) -> None:
        """Commit scratch rows `path[:, :count]` [b, n] in their order, in all layers; the other scratch rows are dropped."""
        cached_rows.keep_rows(self.held, batch.slots, self.length, path, count)
        self.advance(batch, count)

    def advance(self, batch: Batch, count: Tensor) -> None:
        """Commit the first `count` [b] scratch rows without moving them."""
        cached_rows.advance(self.length, batch.slots, count)

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Copy the first `rows` rows of a slot to another one, in all layers; they become all that it holds. A small model's
        cache may have fewer."""
        self.held[:, :, slot, :, :rows] = self.held[:, :, source, :, :rows]
        self.length[slot] = self.length[source].clamp(max=rows)

    def rewind(self, batch: Batch, length: Tensor) -> None:
        """Drop all but the first `length` [b] rows of each sequence."""
        self.length.index_copy_(0, batch.slots, length)
        for layer in self.layers:
            layer.rewind(batch.slots, length)

    @contextmanager
    def without_last(self, batch: Batch, count: int) -> Iterator[None]:
        """Drop the last `count` rows of sequences inside this block, and put them back afterwards, bit for bit."""
        length = batch.take(self.length)
        rows = length.unsqueeze(1) - count + torch.arange(count, device=length.device)
        places, flat = self.places(batch, rows), self.held.view(*self.size[:2], -1, self.shape.width)
        dropped = flat.index_select(2, places)
        self.rewind(batch, length - count)
        try:
            yield
        finally:
            flat.index_copy_(2, places, dropped)
            self.rewind(batch, length)

    @property
    def reusable(self) -> bool:
        """Whether another sequence that begins with the same tokens can reuse the first rows of a slot."""
        return all(layer.reusable for layer in self.layers)

    def is_sound(self, slot: int, rows: int) -> bool:
        """Whether all of a slot's first rows are finite, in the caches of all ranks. It waits for the device, so the loop
        must not call it."""
        return everywhere(bool(self.held[:, :, slot, :, :rows].isfinite().all()))

    def wipe(self, slot: int, first: int = 0, stop: int | None = None) -> None:
        """Clear rows that may not be finite: a masked row has weight 0, and 0 x NaN is NaN."""
        self.held[:, :, slot, :, first:stop] = 0

    def wipe_scratch(self, slot: int) -> None:
        """Clear the rows that are not committed, by the length on the device: a round may be in progress."""
        scratch = torch.arange(self.rows, device=self.length.device) >= self.length[slot]
        self.held[:, :, slot].masked_fill_(scratch.unsqueeze(1), 0)


def _zeros(size: tuple[int, ...], cache: SlotCache, device: torch.device) -> Tensor:
    """Allocate the memory of a cache, or raise CapacityError if the device has no room for it."""
    needed, free, slots = prod(size) * cache.shape.dtype.itemsize, free_memory(device), cache.size[2]
    if free is not None and needed > free:
        raise CapacityError(
            f"a KV cache of {slots} slots x {cache.context} tokens needs {needed / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} GiB are free on {device}; lower max_context or slots"
        )
    return torch.zeros(size, dtype=cache.shape.dtype, device=device)

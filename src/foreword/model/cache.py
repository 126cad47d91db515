"""SlotCache: the layer caches of a stack, for B sequences, each with a length of its own. Rows past `length` are scratch.

A pass may write scratch rows freely, at `length` and after. Only `keep` moves accepted rows to the front of the scratch
and advances `length`; `rewind` drops rows by assigning a smaller one. The last row of every slot is waste: padding is
written there, and nothing ever reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from foreword.core.state import Batch
from foreword.errors import CapacityError
from foreword.model.layer_cache import KVRows
from foreword.ops import cached_rows
from foreword.ops.device import free_memory

SPARE = 128  # rows: no method has passes that much larger than plain decoding


@dataclass(frozen=True)
class CacheShape:
    """What a cache holds per row, and so what it costs."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes_per_row(self) -> int:
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize


class SharedCacheMemory:
    """Memory in which the caches of several engines lie. One of them writes at a time.

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
        """Whether another cache used the memory since this one did."""
        before, self._claimed_by = self._claimed_by, cache
        return before is not cache


class SlotCache:
    """One layer cache per layer of a stack, and the lengths that all of them share.

    Today every layer is a `KVRows`. They lie in one allocation, `held`, so that `keep` moves the rows of all layers in one
    launch. A stack whose layers are of several kinds would have one such call per kind.
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
        """`context` rows per slot, and after them room for a pass of `scratch` rows. With `memory` the cache has to
        `claim` it before it is used."""
        self.shape = shape
        self.context, self.scratch = context, scratch
        self.rows = -(-(context + scratch + 1) // 8) * 8  # masks over all rows stay aligned
        self.size = (2, shape.layers, slots, shape.heads, self.rows, shape.width)
        self.memory, device = memory, torch.device(device)
        self.held = _zeros(self.size, self, device) if memory is None else memory.lend(self, device)
        # Indexed one by one: torch lets nobody write to tensors that iterating gives.
        self.layers = [KVRows(self.held[0][layer], self.held[1][layer]) for layer in range(shape.layers)]
        self.length = torch.zeros(slots, dtype=torch.long, device=device)

    def claim(self) -> bool:
        """Claim the shared memory; clear it if another engine used it. Whether it was cleared: then no slot has any rows."""
        if self.memory is None or not self.memory.claim(self):
            return False
        self.held.zero_()
        self.length.zero_()
        return True

    @property
    def slots(self) -> int:
        return self.length.shape[0]

    @property
    def bytes(self) -> int:
        return self.shape.bytes_per_row * self.rows * self.slots

    @property
    def keys(self) -> list[Tensor]:
        """Of every layer."""
        return [layer.keys for layer in self.layers]

    @property
    def values(self) -> list[Tensor]:
        """Of every layer."""
        return [layer.values for layer in self.layers]

    def check_room(self, rows: int) -> None:
        """Refuse a tree of more rows than the cache has scratch for: near the end of the context they would all be written
        to the waste row. A prompt chunk is no tree: it ends with the context, and only its padding lies beyond."""
        if rows > self.scratch:
            raise CapacityError(
                f"a pass over {rows} tree rows needs as many scratch rows, the cache was allocated with {self.scratch}; "
                "let the drafter's shape and needs name all rows of its passes"
            )

    def places(self, batch: Batch, rows: Tensor) -> Tensor:
        """Where rows [b, n] of each slot lie when (slot, head, row) is one flat axis: [b * heads * n]."""
        return cached_rows.flat_places(batch.slots, rows, self.shape.heads, self.rows)

    def keep(self, batch: Batch, path: Tensor, count: Tensor) -> None:
        """Commit scratch rows `path[:, :count]` [b, n] in their order, in all layers; the rest of the scratch is dropped."""
        cached_rows.keep_rows(self.held, batch.slots, self.length, path, count)
        self.advance(batch, count)

    def advance(self, batch: Batch, count: Tensor) -> None:
        """Commit the first `count` scratch rows where they lie."""
        cached_rows.advance(self.length, batch.slots, count)

    def rewind(self, batch: Batch, length: Tensor) -> None:
        """Drop all but the first `length` [b] rows of each sequence."""
        self.length.index_copy_(0, batch.slots, length)
        for layer in self.layers:
            layer.rewind(batch.slots, length)

    @property
    def reusable(self) -> bool:
        """Whether the first rows of a slot serve any sequence that begins with the same tokens."""
        return all(layer.reusable for layer in self.layers)

    def is_sound(self, slot: int, rows: int) -> bool:
        """Whether all of a slot's first rows are finite. It asks the device, so it is not for the loop."""
        return bool(self.held[:, :, slot, :, :rows].isfinite().all())

    def wipe(self, slot: int, first: int = 0, stop: int | None = None) -> None:
        """Clear rows that may not be finite: a masked row counts 0 times its value, and 0 x NaN is NaN."""
        self.held[:, :, slot, :, first:stop] = 0

    def wipe_scratch(self, slot: int) -> None:
        """Clear what is not committed, by the device's own count: a round may be under way."""
        scratch = torch.arange(self.rows, device=self.length.device) >= self.length[slot]
        self.held[:, :, slot].masked_fill_(scratch.unsqueeze(1), 0)


def _zeros(size: tuple[int, ...], cache: SlotCache, device: torch.device) -> Tensor:
    """Numbers of a cache, if the device has room for them."""
    needed, free, slots = prod(size) * cache.shape.dtype.itemsize, free_memory(device), cache.size[2]
    if free is not None and needed > free:
        raise CapacityError(
            f"a KV cache of {slots} slots x {cache.context} tokens needs {needed / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} GiB are free on {device}; lower max_context or slots"
        )
    return torch.zeros(size, dtype=cache.shape.dtype, device=device)

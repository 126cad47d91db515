"""SlotCache: keys and values of B sequences, each with a length of its own. Rows past `length` are scratch.

A pass may write scratch rows freely, at `length` and after. Only `keep` moves accepted rows to the front of the scratch
and advances `length`; `rewind` drops rows by assigning a smaller one. The last row of every slot is waste: padding is
written there, and nothing ever reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from foreword.core.state import Lanes
from foreword.errors import CapacityError

SPARE = 128  # rows: more than any method's passes have beyond those of plain decoding


@dataclass(frozen=True)
class CacheShape:
    """What a cache holds per layer, and so what it costs."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes_per_row(self) -> int:
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize


class Berth:
    """Memory in which the caches of several engines lie, of which one writes at a time: they take turns. Made for the first
    of them, with SPARE rows a slot for those whose passes are larger, if there is room for these; whoever needs more than
    that begins another piece."""

    def __init__(self) -> None:
        self._numbers: Tensor | None = None
        self._taken_by: SlotCache | None = None

    def lend(self, cache: SlotCache, device: torch.device) -> Tensor:
        numbers = prod(cache.size)
        if self._numbers is None or self._numbers.numel() < numbers:
            spare, free = numbers * SPARE // cache.rows, free_memory(device)
            fits = free is None or (numbers + spare) * cache.shape.dtype.itemsize <= free
            self._numbers = _zeros((numbers + spare if fits else numbers,), cache, device)
        return self._numbers[:numbers].view(cache.size)

    def take(self, cache: SlotCache) -> bool:
        """Whether another cache was there meanwhile."""
        before, self._taken_by = self._taken_by, cache
        return before is not cache


class SlotCache:
    def __init__(
        self,
        shape: CacheShape,
        slots: int,
        context: int,
        scratch: int,
        device: torch.device | str,
        berth: Berth | None = None,
    ) -> None:
        """`context` rows of text per slot, and room for a pass of `scratch` rows behind them; in memory of its own, or in a
        `berth`, which it then has to `take` before it is used."""
        self.shape = shape
        self.context = context
        self.rows = -(-(context + scratch + 1) // 8) * 8  # masks over all rows stay aligned
        self.size = (2, shape.layers, slots, shape.heads, self.rows, shape.width)
        self.berth, device = berth, torch.device(device)
        self.held = _zeros(self.size, self, device) if berth is None else berth.lend(self, device)
        self.keys, self.values = ([part[layer] for layer in range(shape.layers)] for part in (self.held[0], self.held[1]))
        self.length = torch.zeros(slots, dtype=torch.long, device=device)

    def take(self) -> bool:
        """Make a shared berth its own. Whether it was another's meanwhile: then everything is cleared, and no slot has any
        rows."""
        if self.berth is None or not self.berth.take(self):
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

    def places(self, lanes: Lanes, rows: Tensor) -> Tensor:
        """Where rows [b, n] of each slot lie when (slot, head, row) is one flat axis: [b * heads * n]."""
        heads = torch.arange(self.shape.heads, device=rows.device).view(1, -1, 1)
        head_of_slot = lanes.slots.view(-1, 1, 1) * self.shape.heads + heads
        return (head_of_slot * self.rows + rows.clamp(max=self.rows - 1).unsqueeze(1)).flatten()

    def keep(self, lanes: Lanes, path: Tensor, count: Tensor) -> None:
        """Commit scratch rows `path[:, :count]` [b, n] in their order; the rest of the scratch is forgotten."""
        if self.held.is_cuda:
            from foreword.kernels.keep import keep_rows  # noqa: PLC0415  Triton is there only where CUDA is

            keep_rows(self.held, lanes.slots, self.length, path, count)
        else:
            self._move(lanes, path, count)
        self.advance(lanes, count)

    def _move(self, lanes: Lanes, path: Tensor, count: Tensor) -> None:
        """Rows `path[:, :count]` to the front of the scratch, as torch operations."""
        base = self.length[lanes.slots].unsqueeze(1)
        order = torch.arange(path.shape[1], device=path.device)
        # Entries past `count` copy a row onto itself, so that the shape stays fixed.
        chosen = torch.where(order < count.unsqueeze(1), path, order)
        source, goal = self.places(lanes, base + chosen), self.places(lanes, base + order)
        flat = self.held.view(2 * self.shape.layers, -1, self.shape.width)
        flat.index_copy_(1, goal, flat.index_select(1, source))

    def advance(self, lanes: Lanes, count: Tensor) -> None:
        """Commit the first `count` scratch rows where they lie."""
        if self.length.is_cuda:
            from foreword.kernels.keep import advance  # noqa: PLC0415  Triton is there only where CUDA is

            advance(self.length, lanes.slots, count)
        else:
            self.length.index_add_(0, lanes.slots, count)

    def is_sound(self, slot: int, rows: int) -> bool:
        """Whether all of a slot's first rows are finite. Asks the device, so not for the loop."""
        return bool(self.held[:, :, slot, :, :rows].isfinite().all())

    def wipe(self, slot: int, first: int = 0, stop: int | None = None) -> None:
        """Clear rows that may not be sound: a masked row counts 0 times its value, and 0 x NaN is NaN."""
        self.held[:, :, slot, :, first:stop] = 0

    def wipe_scratch(self, slot: int) -> None:
        """The same for what is not committed, by the device's own count: a round may be under way."""
        scratch = torch.arange(self.rows, device=self.length.device) >= self.length[slot]
        self.held[:, :, slot].masked_fill_(scratch.unsqueeze(1), 0)

    def rewind(self, lanes: Lanes, length: Tensor) -> None:
        self.length.index_copy_(0, lanes.slots, length)


def store(cached: Tensor, places: Tensor, rows: Tensor) -> None:
    """Write rows [b, heads, n, width] of one layer at their flat places."""
    width = cached.shape[-1]
    cached.view(-1, width).index_copy_(0, places, rows.reshape(-1, width))


def look(cached: Tensor, lanes: Lanes, rows: int) -> Tensor:
    """The first rows of each slot in one layer. A view where the slots lie side by side."""
    cached = cached[:, :, :rows]
    return cached[lanes.run] if lanes.run is not None else cached.index_select(0, lanes.slots)


def _zeros(size: tuple[int, ...], cache: SlotCache, device: torch.device) -> Tensor:
    """Numbers of a cache, if the device has room for them."""
    needed, free, slots = prod(size) * cache.shape.dtype.itemsize, free_memory(device), cache.size[2]
    if free is not None and needed > free:
        raise CapacityError(
            f"a KV cache of {slots} slots x {cache.context} tokens needs {needed / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} GiB are free on {device}; lower max_context or slots"
        )
    return torch.zeros(size, dtype=cache.shape.dtype, device=device)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on a device; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as report:
            fields = dict(line.split(":") for line in report)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None

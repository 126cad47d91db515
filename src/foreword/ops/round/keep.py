"""Two kernels that commit accepted rows: one moves them to the front of the scratch, the other counts them as committed.

In: the cache as one tensor, and for each sequence the scratch rows that stay, in ascending order. One launch serves all
layers and heads. It writes no committed row and no slot outside the round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn


@triton.jit
def _move(
    cache, slots, lengths, path, count, all_slots, heads, rows,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Move the rows of one head, in one layer of one sequence."""
    take_turn(EARLY)
    layer, head, seq = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    slot = tl.load(slots + seq)
    place, column = tl.arange(0, PATH), tl.arange(0, BLOCK)
    stays = (place < tl.load(count + seq)) & (place < PLACES)
    source = tl.load(path + seq * PLACES + place, mask=stays, other=0)
    moves = (stays & (source != place))[:, None] & (column < WIDTH)[None, :]
    first = ((layer.to(tl.int64) * all_slots + slot) * heads + head) * rows + tl.load(lengths + slot)
    found = tl.load(cache + (first + source)[:, None] * WIDTH + column[None, :], mask=moves)
    tl.debug_barrier()  # one thread may read a row that another overwrites
    tl.store(cache + (first + place)[:, None] * WIDTH + column[None, :], found, mask=moves)


@triton.jit
def _advance(lengths, slots, count, EARLY: tl.constexpr) -> None:
    """Advance the length of one sequence."""
    take_turn(EARLY)
    length = lengths + tl.load(slots + tl.program_id(0))
    tl.store(length, tl.load(length) + tl.load(count + tl.program_id(0)))


def advance(lengths: Tensor, slots: Tensor, count: Tensor) -> None:
    """Add `count` [b] to the `lengths` [B] of slots [b].

    Slots must differ, unless the lengths are set again before they are read, as `Writer` does: the length of a repeated slot
    may advance once or twice."""
    _advance[(slots.shape[0],)](lengths, slots, count.contiguous(), **launched(lengths.device, 1))


def keep_rows(cache: Tensor, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """Move scratch rows `path[:, :count]` [b, n] of `cache` [2, layers, B, heads, rows, width] to just after the committed
    `lengths` [B]."""
    pairs, layers, all_slots, heads, rows, width = cache.shape
    batch, places = path.shape
    assert cache.is_contiguous()
    _move[(pairs * layers * heads, batch)](
        cache, slots, lengths, path.contiguous(), count, all_slots, heads, rows,
        WIDTH=width, PLACES=places, PATH=triton.next_power_of_2(places), BLOCK=triton.next_power_of_2(width),
        **launched(cache.device, 1 if places * width <= 1024 else 4),
    )  # fmt: skip

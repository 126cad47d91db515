"""Accepted rows to the front of the scratch, in all layers and heads, in one launch that touches no other row; and one that
counts them as committed.

In: the cache as it is held, and for each sequence the scratch rows that stay, in ascending order. Committed rows and slots
outside the round are never written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn


@triton.jit
def _move(
    held, slots, lengths, path, count, all_slots, heads, rows,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, WAY: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one layer of one sequence."""
    take_turn(EARLY)
    layer, head, seq = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    slot = tl.load(slots + seq)
    place, wide = tl.arange(0, WAY), tl.arange(0, BLOCK)
    stays = (place < tl.load(count + seq)) & (place < PLACES)
    source = tl.load(path + seq * PLACES + place, mask=stays, other=0)
    moves = (stays & (source != place))[:, None] & (wide < WIDTH)[None, :]
    first = ((layer.to(tl.int64) * all_slots + slot) * heads + head) * rows + tl.load(lengths + slot)
    found = tl.load(held + (first + source)[:, None] * WIDTH + wide[None, :], mask=moves)
    tl.debug_barrier()  # a row may be read by one thread and overwritten by another
    tl.store(held + (first + place)[:, None] * WIDTH + wide[None, :], found, mask=moves)


@triton.jit
def _advance(lengths, slots, count, EARLY: tl.constexpr) -> None:
    """One sequence."""
    take_turn(EARLY)
    own = lengths + tl.load(slots + tl.program_id(0))
    tl.store(own, tl.load(own) + tl.load(count + tl.program_id(0)))


def advance(lengths: Tensor, slots: Tensor, count: Tensor) -> None:
    """Of `lengths` [B] those of slots [b] by `count` [b]. No two slots are the same, but where lengths are told anew before
    they are read, as by `Writer`: such a one may have advanced once or twice."""
    _advance[(slots.shape[0],)](lengths, slots, count.contiguous(), **launched(lengths.device, 1))


def keep_rows(held: Tensor, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """In `held` [2, layers, B, heads, rows, width]: scratch rows `path[:, :count]` [b, n] to just behind `lengths` [B]."""
    pairs, layers, all_slots, heads, rows, width = held.shape
    batch, places = path.shape
    assert held.is_contiguous()
    _move[(pairs * layers * heads, batch)](
        held, slots, lengths, path.contiguous(), count, all_slots, heads, rows,
        WIDTH=width, PLACES=places, WAY=triton.next_power_of_2(places), BLOCK=triton.next_power_of_2(width),
        **launched(held.device, 1 if places * width <= 1024 else 4),
    )  # fmt: skip

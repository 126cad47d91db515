"""Before a pass, in one launch: where its rows stand in their texts and in the cache, and the rotary angles there.

In: how many rows are committed, how far behind them each row stands, and the angles of all rows that a text may have. What
is computed stands, as torch operations, in model/stack.py. Rows that would lie behind the cache's last are padding, and go
there. A program takes one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.overlap import launched, take_turn


@triton.jit(do_not_specialize=["first", "count"])
def _stand(
    base, depth, slots, cosine, sine, position, places, on_cosine, on_sine, first, count, heads, rows,
    d_lane, d_row, c_row, s_row, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    take_turn(EARLY)
    line = tl.program_id(0).to(tl.int64)
    lane, row = line // count, line % count
    head, wide = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    here = wide < WIDTH
    committed = tl.load(base + lane)
    at = committed + tl.load(depth + lane * d_lane + (first + row) * d_row)
    tl.store(position + line, at)
    place = (tl.load(slots + lane) * heads + head) * rows + tl.minimum(committed + first + row, rows - 1)
    tl.store(places + (lane * heads + head) * count + row, place, mask=head < heads)
    known = tl.minimum(at, rows - 1)
    tl.store(on_cosine + line * WIDTH + wide, tl.load(cosine + known * c_row + wide, mask=here), mask=here)
    tl.store(on_sine + line * WIDTH + wide, tl.load(sine + known * s_row + wide, mask=here), mask=here)


def stand(
    base: Tensor, depth: Tensor, count: int, slots: Tensor, heads: int, cosine: Tensor, sine: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The last `count` of the rows that stand `depth` [b or 1, m] behind `base` [b]: their positions [b, n]; places
    [b * heads * n] in a cache whose slots have as many rows as there are angles [1, rows, width]; and the angles at those
    positions, [b, n, width] each."""
    lanes, (_, rows, width) = base.shape[0], cosine.shape
    assert cosine.stride(2) == sine.stride(2) == 1 and cosine.dtype == sine.dtype
    position = torch.empty(lanes, count, dtype=torch.long, device=base.device)
    places = torch.empty(lanes * heads * count, dtype=torch.long, device=base.device)
    angles = torch.empty(2, lanes, count, width, dtype=cosine.dtype, device=base.device)
    _stand[(lanes * count,)](
        base.contiguous(), depth, slots, cosine, sine, position, places, *angles, depth.shape[1] - count, count, heads, rows,
        depth.stride(0) if depth.shape[0] > 1 else 0, depth.stride(1), cosine.stride(1), sine.stride(1),
        WIDTH=width, HEADS=triton.next_power_of_2(heads), BLOCK=triton.next_power_of_2(width), **launched(base.device, 1),
    )  # fmt: skip
    return position, places, (angles[0], angles[1])

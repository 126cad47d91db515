"""Where the rows of a pass stand: how each is turned, and where its keys and values go, in one launch for all layers.

In: how many rows are committed before those of each sequence, how far behind these each row stands, and the tables of angles
for every place that a text may have. Out: cosines and sines row by row, and flat places in the cache, as `Stack` computes
them with torch operations. Padding may stand beyond the tables and the cache: it takes their last row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.overlap import launched, take_turn


@triton.jit
def _stand(
    cosines, sines, base, depth, slots, cosine, sine, places, count, first, limit, d_lane, d_row,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row of one sequence."""
    take_turn(EARLY)
    row, lane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    before = tl.load(base + lane)
    wide = tl.arange(0, BLOCK)
    from_table = tl.minimum(before + tl.load(depth + lane * d_lane + (first + row) * d_row), limit - 1) * WIDTH + wide
    to_row = (lane * count + row) * WIDTH + wide
    tl.store(cosine + to_row, tl.load(cosines + from_table, mask=wide < WIDTH), mask=wide < WIDTH)
    tl.store(sine + to_row, tl.load(sines + from_table, mask=wide < WIDTH), mask=wide < WIDTH)
    head = tl.arange(0, LINES)
    place = (tl.load(slots + lane) * HEADS + head) * limit + tl.minimum(before + first + row, limit - 1)
    tl.store(places + (lane * HEADS + head) * count + row, place, mask=head < HEADS)


def standing(
    angles: tuple[Tensor, Tensor], base: Tensor, depth: Tensor, slots: Tensor, count: int, heads: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Of `angles`, cosines and sines [1, rows of a slot, width], those of the last `count` rows behind `base` [b] by their
    `depth` [b or 1, m], each [b, count, width]; and where these lie in slots of `heads` heads, [b * heads * count]."""
    cosines, sines = angles
    (_, limit, width), lanes = cosines.shape, base.shape[0]
    assert cosines.is_contiguous() and sines.is_contiguous()
    cosine, sine = torch.empty(2, lanes, count, width, dtype=cosines.dtype, device=base.device)
    places = torch.empty(lanes * heads * count, dtype=torch.long, device=base.device)
    lane_step = depth.stride(0) if depth.shape[0] > 1 else 0
    _stand[(count, lanes)](
        cosines, sines, base, depth, slots, cosine, sine, places,
        count, depth.shape[1] - count, limit, lane_step, depth.stride(1),
        HEADS=heads, WIDTH=width, LINES=triton.next_power_of_2(heads), BLOCK=triton.next_power_of_2(width),
        **launched(base.device, 1),
    )  # fmt: skip
    return (cosine, sine), places

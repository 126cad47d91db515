"""Where the rows of a pass stand, those grafted onto it among them: known before its first layer, in one launch for all.

In: how many rows are committed before those of each sequence, how far behind these each row stands and which it sees, the
nodes that grafted rows hang on, and the tables of angles for every place that a text may have. Out: cosines and sines row by
row, and flat places in the cache for every number of rows that a layer is walked with, as `Stack` computes them with torch
operations; with grafts, depth and sight of all rows too. Padding may stand beyond the tables and the cache: it takes their
last row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn


class Grafted(NamedTuple):
    """The R rows that join a pass, and how many rows its layers have, fewest first."""

    anchor: Tensor  # [R] nodes
    offset: Tensor  # [R]
    counts: Tensor
    sizes: tuple[int, ...]  # the same on the host


class Standing(NamedTuple):
    """Of all n + R rows, the grafted ones last. A layer with fewer of them has the first ones."""

    cosine: Tensor  # [b, n + R, width]
    sine: Tensor
    places: tuple[Tensor, ...]  # [b * heads * count], by count
    depth: Tensor  # [b or 1, m + R]
    sees: Tensor  # [b or 1, n + R, m + R]


@triton.jit
def _join_sight(
    depth, sees, anchor, deep, seen, seq, row, own, behind, real, first, d_seq, d_row, s_seq, s_row, s_column,
    GRAFTED: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """A row sees what the node that it is, or hangs on, sees of the tree; a grafted one also itself and its elders."""
    column = tl.arange(0, COLUMNS)
    tree = first + real
    elder = column - tree
    node = tl.load(anchor + elder, mask=(elder >= 0) & (elder < GRAFTED), other=-1)
    hangs = (row >= real) & (elder >= 0) & (elder <= row - real) & (node == own)
    above = tl.load(sees + seq * s_seq + own * s_row + column * s_column, mask=column < tree, other=0)
    inside = column < tree + GRAFTED
    to_row = (seq * (real + GRAFTED) + row) * (tree + GRAFTED)
    tl.store(seen + to_row + column, tl.where(hangs, 1, above).to(tl.uint8), mask=inside)
    to_seq = deep + seq * (tree + GRAFTED)
    tl.store(to_seq + first + row, behind)
    before = (column < first) & (row == 0)  # rows of an earlier pass, which stay as they are
    tl.store(to_seq + column, tl.load(depth + seq * d_seq + column * d_row, mask=before, other=0), mask=before)


@triton.jit
def _stand(
    cosines, sines, base, depth, slots, sees, anchor, offset, counts, cosine, sine, places, deep, seen,
    real, first, limit, d_seq, d_row, s_seq, s_row, s_column,
    GRAFTED: tl.constexpr, STAGES: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row of one sequence."""
    take_turn(EARLY)
    row, seq = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    own, ahead = row, row * 0
    if GRAFTED > 0:
        own = tl.load(anchor + row - real, mask=row >= real, other=0) + tl.where(row < real, row, 0)
        ahead = tl.load(offset + row - real, mask=row >= real, other=0)
    behind = tl.load(depth + seq * d_seq + (first + own) * d_row) + ahead
    before = tl.load(base + seq)
    wide = tl.arange(0, BLOCK)
    from_table = tl.minimum(before + behind, limit - 1) * WIDTH + wide
    to_row = (seq * tl.num_programs(0) + row) * WIDTH + wide
    tl.store(cosine + to_row, tl.load(cosines + from_table, mask=wide < WIDTH), mask=wide < WIDTH)
    tl.store(sine + to_row, tl.load(sines + from_table, mask=wide < WIDTH), mask=wide < WIDTH)
    head = tl.arange(0, LINES)
    place = (tl.load(slots + seq) * HEADS + head) * limit + tl.minimum(before + first + row, limit - 1)
    if GRAFTED == 0:
        tl.store(places + (seq * HEADS + head) * real + row, place, mask=head < HEADS)
    else:
        to_stage = places
        for stage in tl.static_range(STAGES):
            count = tl.load(counts + stage)
            tl.store(to_stage + (seq * HEADS + head) * count + row, place, mask=(head < HEADS) & (row < count))
            to_stage += tl.num_programs(1) * HEADS * count
        _join_sight(
            depth, sees, anchor, deep, seen, seq, row, own, behind, real, first, d_seq, d_row, s_seq, s_row, s_column,
            GRAFTED, COLUMNS,
        )  # fmt: skip


def standing(
    angles: tuple[Tensor, Tensor],
    base: Tensor,
    depth: Tensor,
    sees: Tensor,
    slots: Tensor,
    heads: int,
    grafted: Grafted | None = None,
) -> Standing:
    """Of `angles`, cosines and sines [1, rows of a slot, width], those of n rows behind `base` [b] by their `depth` [b or 1,
    m], of which they see `sees` [b or 1, n, m]; where they lie in slots of `heads` heads; and so for what is `grafted`."""
    (_, limit, width), (batch, real, scratch) = angles[0].shape, (base.shape[0], *sees.shape[1:])
    joined = grafted or Grafted(depth, depth, depth, (real,))
    device, more = base.device, 0 if grafted is None else len(grafted.anchor)
    assert all(part.is_contiguous() for part in angles)
    cosine, sine = torch.empty(2, batch, real + more, width, dtype=angles[0].dtype, device=device)
    places = torch.empty(batch * heads * sum(joined.sizes), dtype=torch.long, device=device)
    deep, seen = depth, sees
    if more:
        deep = torch.empty(batch, scratch + more, dtype=torch.long, device=device)
        seen = torch.empty(batch, real + more, scratch + more, dtype=torch.bool, device=device)
    _stand[(real + more, batch)](
        *angles, base, depth, slots, sees.view(torch.uint8), *joined[:3],
        cosine, sine, places, deep, seen.view(torch.uint8), real, scratch - real, limit, *_strides(depth), *_strides(sees),
        GRAFTED=more, STAGES=len(joined.sizes), HEADS=heads, WIDTH=width, LINES=triton.next_power_of_2(heads),
        BLOCK=triton.next_power_of_2(width), COLUMNS=triton.next_power_of_2(scratch + more) if more else 1,
        **launched(device, 1),
    )  # fmt: skip
    return Standing(cosine, sine, places.split([batch * heads * size for size in joined.sizes]), deep, seen)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """With that of the first axis 0 where all sequences share one."""
    return (tensor.stride(0) if tensor.shape[0] > 1 else 0, *tensor.stride()[1:])

"""Positions and cache places of all rows of a pass, grafted rows included, in one launch before the first layer.

In: the number of committed rows of each sequence; depth and visible scratch rows of each row; the nodes that grafted rows
hang on; and rotary tables for every position. Out: cosines and sines of each row, and flat cache places for every row count
that a layer runs with, as `Stack` computes them with torch operations. With grafts also depth and visibility of all rows.
Padding may lie beyond the tables and the cache: it uses their last row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn


class GraftedRows(NamedTuple):
    """The R rows that join a pass, and the row counts of its layers, fewest first."""

    anchor: Tensor  # [R] nodes
    offset: Tensor  # [R]
    counts: Tensor
    sizes: tuple[int, ...]  # the same on the host


class RowPositions(NamedTuple):
    """Positions of all n + R rows, the grafted ones last. A layer with fewer rows uses the first ones."""

    cosine: Tensor  # [b, n + R, width]
    sine: Tensor
    places: tuple[Tensor, ...]  # [b * heads * count], by count
    depth: Tensor  # [b or 1, m + R]
    sees: Tensor  # [b or 1, n + R, m + R]


@triton.jit
def _store_visibility(
    depth, sees, anchor, all_depth, all_sees, seq, row, node, row_depth, real, first, d_seq, d_row, s_seq, s_row, s_column,
    GRAFTED: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Store what a row sees: the tree rows that its node, or its anchor, sees; if grafted, also itself and earlier rows of
    the same anchor."""
    column = tl.arange(0, COLUMNS)
    tree = first + real
    earlier = column - tree
    anchor_node = tl.load(anchor + earlier, mask=(earlier >= 0) & (earlier < GRAFTED), other=-1)
    grafted_here = (row >= real) & (earlier >= 0) & (earlier <= row - real) & (anchor_node == node)
    visible = tl.load(sees + seq * s_seq + node * s_row + column * s_column, mask=column < tree, other=0)
    inside = column < tree + GRAFTED
    out_row = (seq * (real + GRAFTED) + row) * (tree + GRAFTED)
    tl.store(all_sees + out_row + column, tl.where(grafted_here, 1, visible).to(tl.uint8), mask=inside)
    out_depth = all_depth + seq * (tree + GRAFTED)
    tl.store(out_depth + first + row, row_depth)
    is_old = (column < first) & (row == 0)  # rows of an earlier pass: unchanged
    tl.store(out_depth + column, tl.load(depth + seq * d_seq + column * d_row, mask=is_old, other=0), mask=is_old)


@triton.jit
def _position_row(
    cosines, sines, base, depth, slots, sees, anchor, offset, counts, cosine, sine, places, all_depth, all_sees,
    real, first, limit, d_seq, d_row, s_seq, s_row, s_column,
    GRAFTED: tl.constexpr, STAGES: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the position of one row of one sequence."""
    take_turn(EARLY)
    row, seq = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    node, graft_offset = row, row * 0
    if GRAFTED > 0:
        node = tl.load(anchor + row - real, mask=row >= real, other=0) + tl.where(row < real, row, 0)
        graft_offset = tl.load(offset + row - real, mask=row >= real, other=0)
    row_depth = tl.load(depth + seq * d_seq + (first + node) * d_row) + graft_offset
    committed = tl.load(base + seq)
    column = tl.arange(0, BLOCK)
    table_index = tl.minimum(committed + row_depth, limit - 1) * WIDTH + column
    out_index = (seq * tl.num_programs(0) + row) * WIDTH + column
    tl.store(cosine + out_index, tl.load(cosines + table_index, mask=column < WIDTH), mask=column < WIDTH)
    tl.store(sine + out_index, tl.load(sines + table_index, mask=column < WIDTH), mask=column < WIDTH)
    head = tl.arange(0, HEAD_BLOCK)
    place = (tl.load(slots + seq) * HEADS + head) * limit + tl.minimum(committed + first + row, limit - 1)
    if GRAFTED == 0:
        tl.store(places + (seq * HEADS + head) * real + row, place, mask=head < HEADS)
    else:
        stage_places = places
        for stage in tl.static_range(STAGES):
            count = tl.load(counts + stage)
            tl.store(stage_places + (seq * HEADS + head) * count + row, place, mask=(head < HEADS) & (row < count))
            stage_places += tl.num_programs(1) * HEADS * count
        _store_visibility(
            depth, sees, anchor, all_depth, all_sees, seq, row, node, row_depth, real, first,
            d_seq, d_row, s_seq, s_row, s_column, GRAFTED, COLUMNS,
        )  # fmt: skip


def row_positions(
    angles: tuple[Tensor, Tensor],
    base: Tensor,
    depth: Tensor,
    sees: Tensor,
    slots: Tensor,
    heads: int,
    grafted: GraftedRows | None = None,
) -> RowPositions:
    """Return the positions of n rows that follow the `base` [b] committed ones, and of the `grafted` rows.

    angles: cosines and sines [1, rows of a slot, width]. depth [b or 1, m]: the rows' depth after `base`. sees [b or 1, n,
    m]: which scratch rows each row sees. slots [b]: the sequences' slots, with `heads` key heads each."""
    (_, limit, width), (batch, real, scratch) = angles[0].shape, (base.shape[0], *sees.shape[1:])
    stages = grafted or GraftedRows(depth, depth, depth, (real,))
    device, extra = base.device, 0 if grafted is None else len(grafted.anchor)
    assert all(table.is_contiguous() for table in angles)
    cosine, sine = torch.empty(2, batch, real + extra, width, dtype=angles[0].dtype, device=device)
    places = torch.empty(batch * heads * sum(stages.sizes), dtype=torch.long, device=device)
    all_depth, all_sees = depth, sees
    if extra:
        all_depth = torch.empty(batch, scratch + extra, dtype=torch.long, device=device)
        all_sees = torch.empty(batch, real + extra, scratch + extra, dtype=torch.bool, device=device)
    _position_row[(real + extra, batch)](
        *angles, base, depth, slots, sees.view(torch.uint8), *stages[:3],
        cosine, sine, places, all_depth, all_sees.view(torch.uint8), real, scratch - real, limit,
        *_strides(depth), *_strides(sees),
        GRAFTED=extra, STAGES=len(stages.sizes), HEADS=heads, WIDTH=width, HEAD_BLOCK=triton.next_power_of_2(heads),
        BLOCK=triton.next_power_of_2(width), COLUMNS=triton.next_power_of_2(scratch + extra) if extra else 1,
        **launched(device, 1),
    )  # fmt: skip
    return RowPositions(cosine, sine, places.split([batch * heads * size for size in stages.sizes]), all_depth, all_sees)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a tensor, with 0 for the first axis where all sequences share one entry."""
    return (tensor.stride(0) if tensor.shape[0] > 1 else 0, *tensor.stride()[1:])

"""Ancestors and depth of draft trees, by climbing from every row at once: one launch instead of log2 N matrix products.

In: `parent` [b or 1, N]; every parent is an earlier row, and the root is its own parent. Out: the rows on the path from the
root to each row, itself included, and the number of edges on that path. A tree that grows level by level takes one launch
per level.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn

ROWS = 16  # tree rows per program
ONE_WARP = 64  # tree rows that one warp can exchange parents of


@triton.jit
def _lineage(
    parent, ancestors, depth, p_seq, p_row,
    NODES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Climb from ROWS rows together, until the last one reaches the root. All parents are loaded first, so a step is a
    lookup in registers and waits for no memory."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    above = tl.load(parent + seq * p_seq + column * p_row, mask=column < NODES, other=0).to(tl.int32)
    real = row < NODES
    node = tl.where(real, row, 0)
    on_path = (column[None, :] == node[:, None]).to(tl.int32)
    steps = tl.zeros([ROWS], tl.int64)
    climbed = 0
    while (tl.max(node, 0) > 0) & (climbed < NODES):
        steps += (node > 0).to(tl.int64)
        node = tl.gather(above, node, 0)
        on_path |= (column[None, :] == node[:, None]).to(tl.int32)
        climbed += 1
    place = (seq * NODES + row)[:, None] * NODES + column[None, :]
    tl.store(ancestors + place, on_path.to(tl.uint8), mask=real[:, None] & (column < NODES)[None, :])
    tl.store(depth + seq * NODES + row, steps, mask=real)


def lineage(parent: Tensor) -> tuple[Tensor, Tensor]:
    """`lineage` of ops/trees.py: ancestors [b or 1, N, N] bool and depth [b or 1, N]."""
    batch, nodes = parent.shape
    ancestors = torch.empty(batch, nodes, nodes, dtype=torch.bool, device=parent.device)
    depth = torch.empty(batch, nodes, dtype=torch.long, device=parent.device)
    block = triton.next_power_of_2(nodes)
    if batch:
        _lineage[(batch, triton.cdiv(nodes, ROWS))](
            parent, ancestors.view(torch.uint8), depth, *parent.stride(),
            NODES=nodes, ROWS=ROWS, BLOCK=block, **launched(parent.device, 1 if block <= ONE_WARP else 4),
        )  # fmt: skip
    return ancestors, depth


@triton.jit
def _next_level(
    sees, parent, out, s_seq, s_row, s_column, p_seq, p_row, rows, width,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Write the ancestors of one row: those of its parent, and the row itself."""
    take_turn(EARLY)
    seq, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    above = tl.load(parent + seq * p_seq + row * p_row)
    seen = tl.load(sees + seq * s_seq + above * s_row + column * s_column, mask=column < rows, other=0)
    seen = tl.where(column == rows + row, 1, seen)
    tl.store(out + (seq * width + row) * (rows + width) + column, seen.to(tl.uint8), mask=column < rows + width)


def next_level(sees: Tensor, parent: Tensor) -> Tensor:
    """`next_level` of ops/trees.py."""
    (batch, width), rows = parent.shape, sees.shape[2]
    out = torch.empty(batch, width, rows + width, dtype=torch.bool, device=sees.device)
    _next_level[(batch, width)](
        sees.view(torch.uint8), parent, out.view(torch.uint8),
        sees.stride(0) if sees.shape[0] > 1 else 0, *sees.stride()[1:], *parent.stride(), rows, width,
        BLOCK=triton.next_power_of_2(rows + width), **launched(sees.device, 1),
    )  # fmt: skip
    return out

"""Who stands above whom in a tree of guesses, by walking up from every row at once: one launch in place of log2 N products.

In: `parent` [b or 1, N], every parent an earlier row and the root its own. Out: the rows on the way from the root to each
row, itself included, and how many edges that way has. Of a tree that grows level by level, one level is a launch as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn

ROWS = 16  # of a tree, for one program
ONE_WARP = 64  # rows of a tree whose parents one warp hands around


@triton.jit
def _climb(
    parent, ancestors, depth, p_seq, p_row,
    NODES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """All of the rows step up together, until the last has come to the root. All parents are read at once: where one row
    goes is then a look at what is there, and no wait."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    above = tl.load(parent + seq * p_seq + column * p_row, mask=column < NODES, other=0).to(tl.int32)
    real = row < NODES
    at = tl.where(real, row, 0)
    met = (column[None, :] == at[:, None]).to(tl.int32)
    steps = tl.zeros([ROWS], tl.int64)
    taken = 0
    while (tl.max(at, 0) > 0) & (taken < NODES):
        steps += (at > 0).to(tl.int64)
        at = tl.gather(above, at, 0)
        met |= (column[None, :] == at[:, None]).to(tl.int32)
        taken += 1
    place = (seq * NODES + row)[:, None] * NODES + column[None, :]
    tl.store(ancestors + place, met.to(tl.uint8), mask=real[:, None] & (column < NODES)[None, :])
    tl.store(depth + seq * NODES + row, steps, mask=real)


def lineage(parent: Tensor) -> tuple[Tensor, Tensor]:
    """Ancestors [b or 1, N, N] bool and depth [b or 1, N] of trees [b or 1, N]."""
    batch, nodes = parent.shape
    ancestors = torch.empty(batch, nodes, nodes, dtype=torch.bool, device=parent.device)
    depth = torch.empty(batch, nodes, dtype=torch.long, device=parent.device)
    block = triton.next_power_of_2(nodes)
    if batch:
        _climb[(batch, triton.cdiv(nodes, ROWS))](
            parent, ancestors.view(torch.uint8), depth, *parent.stride(),
            NODES=nodes, ROWS=ROWS, BLOCK=block, **launched(parent.device, 1 if block <= ONE_WARP else 4),
        )  # fmt: skip
    return ancestors, depth


@triton.jit
def _hang(
    sees, parent, out, s_seq, s_row, s_column, p_seq, p_row, rows, width,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row: what its parent sees, and itself."""
    take_turn(EARLY)
    seq, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    above = tl.load(parent + seq * p_seq + row * p_row)
    seen = tl.load(sees + seq * s_seq + above * s_row + column * s_column, mask=column < rows, other=0)
    seen = tl.where(column == rows + row, 1, seen)
    tl.store(out + (seq * width + row) * (rows + width) + column, seen.to(tl.uint8), mask=column < rows + width)


def hang(sees: Tensor, parent: Tensor) -> Tensor:
    """`next_level` of ops/trees.py."""
    (batch, width), rows = parent.shape, sees.shape[2]
    out = torch.empty(batch, width, rows + width, dtype=torch.bool, device=sees.device)
    _hang[(batch, width)](
        sees.view(torch.uint8), parent, out.view(torch.uint8),
        sees.stride(0) if sees.shape[0] > 1 else 0, *sees.stride()[1:], *parent.stride(), rows, width,
        BLOCK=triton.next_power_of_2(rows + width), **launched(sees.device, 1),
    )  # fmt: skip
    return out

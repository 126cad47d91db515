"""Rows of a key-value cache: where they lie, and how accepted ones move to the front of the scratch rows.

In: a `cache` as one tensor [2, layers, slots, heads, rows, width], and for each sequence the scratch rows that stay.
Committed rows and slots outside the round are never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.ops.dispatch import accelerated


def flat_places(slots: Tensor, rows: Tensor, heads: int, all_rows: int) -> Tensor:
    """Return where rows [b, n] of slots [b] lie when (slot, head, row) is one flat axis: [b * heads * n].

    Padding beyond the last row goes to the last row, which holds nothing of use."""
    head = torch.arange(heads, device=rows.device).view(1, -1, 1)
    head_of_slot = slots.view(-1, 1, 1) * heads + head
    return (head_of_slot * all_rows + rows.clamp(max=all_rows - 1).unsqueeze(1)).flatten()


@accelerated("round.keep:keep_rows")
def keep_rows(cache: Tensor, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """Move scratch rows `path[:, :count]` [b, n] to just after the committed `lengths` [slots], in all layers and heads."""
    pairs, layers, _, heads, all_rows, width = cache.shape
    base = lengths[slots].unsqueeze(1)
    order = torch.arange(path.shape[1], device=path.device)
    # Entries past `count` copy a row onto itself, so that the shape stays fixed.
    chosen = torch.where(order < count.unsqueeze(1), path, order)
    source, goal = (flat_places(slots, base + which, heads, all_rows) for which in (chosen, order))
    flat = cache.view(pairs * layers, -1, width)
    flat.index_copy_(1, goal, flat.index_select(1, source))


@accelerated("round.keep:advance")
def advance(lengths: Tensor, slots: Tensor, count: Tensor) -> None:
    """Add `count` [b] to the lengths [B] of slots [b]."""
    lengths.index_add_(0, slots, count)

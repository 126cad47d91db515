"""The tokens of each sequence that a small model has not read yet, in one launch.

In: the sequences as the engine's state has them, and how many rows of each the small model's cache holds. One program
handles one sequence. The torch reference is in ops/unread.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn
from foreword.ops.rounds import Columns


@triton.jit(do_not_specialize=["count"])
def _catch_up(
    slots, lengths, tokens, cached, base, length, unread, root, count, context, t_slot,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot, row = tl.load(slots + seq), tl.arange(0, BLOCK)
    total = tl.load(lengths + slot)
    first = tl.minimum(tl.load(cached + slot), total)
    tl.store(base + seq, first)
    tl.store(length + seq, total)
    tl.store(root + seq, tl.minimum(total - first, count - 1))
    token = tl.load(tokens + slot * t_slot + tl.minimum(first + row, context - 1), mask=row < count)
    tl.store(unread + seq * count + row, token, mask=row < count)


def catch_up(state: Columns, cached: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`unread` of ops/unread.py."""
    batch = state.slots.shape[0]
    base, length, root = torch.empty(3, batch, dtype=torch.long, device=cached.device)
    unread = torch.empty(batch, count, dtype=torch.long, device=cached.device)
    _catch_up[(batch,)](
        state.slots, state.lengths, state.tokens, cached, base, length, unread, root,
        count, state.tokens.shape[1], state.tokens.stride(0),
        BLOCK=triton.next_power_of_2(count), **launched(cached.device, 1 if count <= 128 else 4),
    )  # fmt: skip
    return base, length, unread, root

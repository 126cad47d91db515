"""Keep the rows that the last accepted node of a round carried, in one launch.

In: where a round's path ended, rows [b, R, H], and a table of which rows belong to each node. Out: the rows are written into
the slots of a drafter's states, in place, with how many of them count. Sequences that decided nothing keep their old rows.
The torch reference is in ops/pseudo_rows.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn


@triton.jit
def _carry(
    states, have, slots, path, count, rows, where, carries, places, r_seq, r_row,
    STEPS: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Keep the row of one step of one sequence."""
    take_turn(EARLY)
    step, seq = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot, decided = tl.load(slots + seq), tl.load(count + seq)
    last = tl.load(path + seq * places + tl.maximum(decided - 1, 0))
    wide = tl.arange(0, BLOCK)
    here = (wide < H) & (decided > 0)
    row = tl.load(where + last * STEPS + step)
    found = tl.load(rows + seq * r_seq + row * r_row + wide, mask=here)
    tl.store(states + (slot * STEPS + step) * H + wide, found, mask=here)
    tl.store(have + slot, tl.load(carries + last), mask=(decided > 0) & (step == 0))


def carried_on(
    states: Tensor, have: Tensor, slots: Tensor, path: Tensor, count: Tensor, rows: Tensor, where: Tensor, carries: Tensor
) -> None:
    """`carried_on` of ops/pseudo_rows.py."""
    (_, steps, size), block = states.shape, triton.next_power_of_2(states.shape[2])
    assert states.is_contiguous() and path.is_contiguous() and where.is_contiguous() and rows.stride(2) == 1
    _carry[(steps, len(slots))](
        states, have, slots, path, count, rows, where, carries, path.shape[1], *rows.stride()[:2],
        STEPS=steps, H=size, BLOCK=block, **launched(states.device, min(8, block // 256)),
    )  # fmt: skip

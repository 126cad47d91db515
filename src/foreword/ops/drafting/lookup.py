"""Prompt lookup: find the longest earlier match of a sequence's end, and continue after it, with one program per sequence.

In: the sequences by slot, and their lengths. Out: the root and its continuation, and how many tokens matched. Among equally
long matches the latest counts. The torch reference is in ops/lookup.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn


@triton.jit
def _look_up(
    tokens, slots, lengths, sizes, out, size, t_slot,
    NODES: tl.constexpr, MATCH: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Draft for one sequence."""
    take_turn(EARLY)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + seq)
    end = tl.load(lengths + slot)
    line = tokens + slot * t_slot
    best = tl.zeros([BLOCK], tl.int64) - 1
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        run = column < end  # a match ends before the root
        matched = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MATCH):
            last = tl.load(line + tl.maximum(end - back, 0))
            there = (column < end) & (column >= back)  # all loads are issued at once, whatever earlier ones return
            run = run & there & (end >= back) & (tl.load(line + column - back, mask=there, other=-1) == last)
            matched += run.to(tl.int64)
        best = tl.maximum(best, tl.where(column < end, matched * t_slot + column, -1))
    longest = tl.max(best, 0)
    found = tl.maximum(longest, 0) // t_slot
    place = tl.where(longest < 0, -1, longest % t_slot)  # with nothing before the root there is no match
    ahead = tl.arange(0, AHEAD)
    source = place + 1 + (ahead - 1) % (end - place)
    token = tl.load(line + tl.where(ahead == 0, end, source), mask=ahead < NODES, other=0)
    tl.store(out + seq * NODES + ahead, token, mask=ahead < NODES)
    tl.store(size + seq, tl.load(sizes + found))


def looked_up(tokens: Tensor, slots: Tensor, lengths: Tensor, sizes: Tensor, nodes: int, span: int) -> tuple[Tensor, Tensor]:
    """`looked_up` of ops/lookup.py. Each program stops at the length of its sequence, so `span` is not used."""
    batch, device = slots.shape[0], slots.device
    out = torch.empty(batch, nodes, dtype=torch.long, device=device)
    size = torch.empty(batch, dtype=torch.long, device=device)
    _look_up[(batch,)](
        tokens, slots, lengths, sizes, out, size, tokens.stride(0),
        NODES=nodes, MATCH=sizes.shape[0] - 1, AHEAD=triton.next_power_of_2(nodes), BLOCK=1024, **launched(device, 8),
    )  # fmt: skip
    return out, size

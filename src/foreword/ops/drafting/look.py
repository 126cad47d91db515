"""Cosine attention of a state to a single key, head by head, in one launch.

In: a state, and query, key and value of `heads` heads from one matrix product. Out: the state plus v * cos(q, k), or plus
its SiLU. The torch reference is in ops/rows.py; training uses it on CUDA too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import launched, take_turn

_SMALLEST = tl.constexpr(1e-8)  # the smallest length of a vector, as in torch


@triton.jit
def _look(
    state, parts, out,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row, as a matrix of heads."""
    take_turn(EARLY)
    head, column = tl.arange(0, LINES), tl.arange(0, BLOCK)
    real = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
    row, within = tl.program_id(0).to(tl.int64), head[:, None] * WIDTH + column[None, :]
    at, part = row * HEADS * WIDTH + within, parts + row * 3 * HEADS * WIDTH + within
    before = tl.load(state + at, mask=real, other=0.0).to(tl.float32)
    q = tl.load(part, mask=real, other=0.0).to(tl.float32)
    k = tl.load(part + HEADS * WIDTH, mask=real, other=0.0).to(tl.float32)
    v = tl.load(part + 2 * HEADS * WIDTH, mask=real, other=0.0).to(tl.float32)
    lengths = tl.maximum(tl.sqrt(tl.sum(q * q, 1)), _SMALLEST) * tl.maximum(tl.sqrt(tl.sum(k * k, 1)), _SMALLEST)
    seen = v * (tl.sum(q * k, 1) / lengths)[:, None]
    if SILU:
        seen = seen / (1.0 + tl.exp(-seen))
    tl.store(out + at, (before + seen).to(out.dtype.element_ty), mask=real)


def looked(state: Tensor, parts: Tensor, heads: int, silu: bool) -> Tensor:
    """state [.., H] + v * cos(q, k), or + SiLU(v * cos(q, k)), of `parts` [.., 3 H]: query, key, value."""
    state, parts = state.contiguous(), parts.contiguous()
    out, width = torch.empty_like(state), state.shape[-1] // heads
    lines, block = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    warps = min(8, lines * block // 256)
    _look[(state.numel() // state.shape[-1],)](
        state, parts, out, HEADS=heads, WIDTH=width, SILU=silu, LINES=lines, BLOCK=block, **launched(state.device, warps)
    )
    return out

"""What a state sees in a token: cosine attention to a single key, head by head, in one launch.

In: a state, and query, key and value of `heads` heads as one product made them. Out: the state with v * cos(q, k) added,
behind a SiLU where one is asked for. core/heads.py computes the same with torch operations, which training needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.overlap import launched, take_turn

_SMALLEST = tl.constexpr(1e-8)  # length of a vector: torch's own bound


@triton.jit
def _look(
    state, parts, out,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row, with its heads below each other."""
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
    """state [.., H] + v * cos(q, k), or + SiLU(v * cos(q, k)), of `parts` [.., 3 H]: query before key before value."""
    state, parts = state.contiguous(), parts.contiguous()
    out, width = torch.empty_like(state), state.shape[-1] // heads
    lines, block = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    warps = min(8, lines * block // 256)
    _look[(state.numel() // state.shape[-1],)](
        state, parts, out, HEADS=heads, WIDTH=width, SILU=silu, LINES=lines, BLOCK=block, **launched(state.device, warps)
    )
    return out

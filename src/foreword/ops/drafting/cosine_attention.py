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

_SMALLEST = tl.constexpr(1e-8)  # a lower bound on the length of a vector, as in torch


@triton.jit
def _cosine_attention(
    state, qkv, out,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
    LINES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Attend for one row, as a matrix of heads."""
    take_turn(EARLY)
    head, column = tl.arange(0, LINES), tl.arange(0, BLOCK)
    real = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
    row, within = tl.program_id(0).to(tl.int64), head[:, None] * WIDTH + column[None, :]
    at, query_at = row * HEADS * WIDTH + within, qkv + row * 3 * HEADS * WIDTH + within
    before = tl.load(state + at, mask=real, other=0.0).to(tl.float32)
    q = tl.load(query_at, mask=real, other=0.0).to(tl.float32)
    k = tl.load(query_at + HEADS * WIDTH, mask=real, other=0.0).to(tl.float32)
    v = tl.load(query_at + 2 * HEADS * WIDTH, mask=real, other=0.0).to(tl.float32)
    lengths = tl.maximum(tl.sqrt(tl.sum(q * q, 1)), _SMALLEST) * tl.maximum(tl.sqrt(tl.sum(k * k, 1)), _SMALLEST)
    attended = v * (tl.sum(q * k, 1) / lengths)[:, None]
    if SILU:
        attended = attended / (1.0 + tl.exp(-attended))
    tl.store(out + at, (before + attended).to(out.dtype.element_ty), mask=real)


def add_cosine_attention(state: Tensor, qkv: Tensor, heads: int, silu: bool) -> Tensor:
    """`add_cosine_attention` of ops/rows.py."""
    state, qkv = state.contiguous(), qkv.contiguous()
    out, width = torch.empty_like(state), state.shape[-1] // heads
    lines, block = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    warps = min(8, lines * block // 256)
    _cosine_attention[(state.numel() // state.shape[-1],)](
        state, qkv, out, HEADS=heads, WIDTH=width, SILU=silu, LINES=lines, BLOCK=block, **launched(state.device, warps)
    )
    return out

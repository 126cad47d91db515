"""Tree attention as a Triton kernel, for CUDA: the prefix is split over blocks, and the tree's few rows come with it.

Masked attention of torch builds a mask over every key and reads it in every layer. Here a program takes one key head of one
sequence, a block of the queries that share it, and a stretch of its keys; it looks at `sees` only where the stretch reaches
the scratch rows, and stops at the sequence's own length. A second kernel joins the stretches.
The reference is `attention.attend`; tests hold the two together, on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 64  # keys that one program takes, at least: enough programs to fill a GPU at batch 1
PROGRAMS = 512  # as many programs as keep a large GPU busy


@triton.jit
def _attend(
    query, keys, values, slots, base, sees, part, weight, scale,
    q_batch, q_head, q_row, c_slot, c_head, c_row, s_batch, s_row,
    rows, scratch, heads, queries, stretch, splits,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Softmax of one block of queries over one stretch of keys, unnormalised, with its log-weight."""
    lane, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    split = tl.program_id(2)
    slot = tl.load(slots + lane)
    length = tl.load(base + lane)
    at = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    group, row = at // rows, at % rows
    real = at < queries
    wide = tl.arange(0, WIDTH)
    q_at = lane * q_batch + (head * GROUPS + group) * q_head + row * q_row
    q = tl.load(query + q_at[:, None] + wide[None, :], mask=real[:, None], other=0.0)

    best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    mixed = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    cache_at = slot * c_slot + head * c_head
    first = split * stretch
    stop = tl.minimum(first + stretch, length + scratch)
    for start in range(first, stop, BLOCK_K):
        key_at = start + tl.arange(0, BLOCK_K)
        here = key_at < stop
        place = cache_at + key_at[:, None] * c_row + wide[None, :]
        k = tl.load(keys + place, mask=here[:, None], other=0.0)
        v = tl.load(values + place, mask=here[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        away = key_at - length
        in_tree = (away >= 0) & here
        seen = tl.load(
            sees + lane * s_batch + row[:, None] * s_row + away[None, :], mask=real[:, None] & in_tree[None, :], other=0
        )
        score = tl.where((away < 0)[None, :] | (seen != 0), score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        fade = tl.exp(best - safe)
        chance = tl.exp(score - safe[:, None])
        total = total * fade + tl.sum(chance, 1)
        mixed = mixed * fade[:, None] + tl.dot(chance.to(v.dtype), v, input_precision=PRECISION)
        best = peak
    out = (tl.program_id(0) * splits + split) * queries + at
    tl.store(part + out[:, None] * WIDTH + wide[None, :], mixed / tl.maximum(total, 1e-38)[:, None], mask=real[:, None])
    tl.store(weight + out, tl.where(total > 0, best + tl.log(tl.maximum(total, 1e-38)), float("-inf")), mask=real)


@triton.jit
def _join(
    part, weight, out, o_batch, o_head, o_row, rows, heads, queries, splits,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """One query: its stretches, weighted by how much of the softmax each holds."""
    lane, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    at = tl.program_id(1)
    group, row = at // rows, at % rows
    split, wide = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    here = split < splits
    place = (tl.program_id(0) * splits + split) * queries + at
    log = tl.load(weight + place, mask=here, other=float("-inf"))
    share = tl.exp(log - tl.max(log, 0))
    pieces = tl.load(part + place[:, None] * WIDTH + wide[None, :], mask=here[:, None], other=0.0)
    mixed = tl.sum(pieces * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + lane * o_batch + row * o_row + (head * GROUPS + group) * o_head + wide, mixed)


def attend_tree(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, base: Tensor, sees: Tensor, span: int, scaling: float
) -> Tensor:
    """query [b, heads, n, width] over the cache's keys and values [B, key heads, rows, width]: [b, n, heads, width].

    `base` [b] counts each slot's committed rows, at most `span`; `sees` [b or 1, n, m] is over the m scratch rows behind.
    """
    batch, all_heads, rows, width = query.shape
    heads = keys.shape[1]
    groups, scratch = all_heads // heads, sees.shape[2]
    queries = groups * rows
    block = min(max(16, triton.next_power_of_2(queries)), 64)
    blocks = triton.cdiv(queries, block)
    stretch = _stretch(span + scratch, batch * heads * blocks)
    splits = triton.cdiv(span + scratch, stretch)
    part = torch.empty(batch * heads, splits, queries, width, dtype=torch.float32, device=query.device)
    weight = torch.empty(batch * heads, splits, queries, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, rows, all_heads, width, dtype=query.dtype, device=query.device)
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    tree = sees.to(torch.int8)
    per_tree = tree.stride(0) if tree.shape[0] > 1 else 0
    _attend[(batch * heads, blocks, splits)](
        query, keys, values, slots, base, tree, part, weight, scaling,
        *query.stride()[:3], *keys.stride()[:3], per_tree, tree.stride(1),
        rows, scratch, heads, queries, stretch, splits,
        WIDTH=width, GROUPS=groups, BLOCK_Q=block, BLOCK_K=32 if width > 64 else 64, PRECISION=precision,
    )  # fmt: skip
    _join[(batch * heads, queries)](
        part, weight, out, out.stride(0), out.stride(2), out.stride(1), rows, heads, queries, splits,
        WIDTH=width, GROUPS=groups, SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out


def _stretch(keys: int, programs: int) -> int:
    """Keys per program: short where few programs would be left idle otherwise, longer where there are plenty."""
    splits = max(1, PROGRAMS // programs)
    return max(STRETCH, -(-keys // splits // STRETCH) * STRETCH)

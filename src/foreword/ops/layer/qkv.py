"""The q/k/v product of a few rows, rotated and stored by the kernel that computes it: what attention needs, in one launch.

In: rows of a layer, its q/k/v weights, cosines and sines of the rows' positions, and their places in the cache. Out: the
queries, turned; keys, turned, and values are in the cache. A program takes columns of one head in pairs, one of the low half
and one of the high, which rotation mixes. The product is rounded before it is rotated, as it is where rotary.py reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.linear import Handed, Norm, Prepared, cut, cut_for_one, launch_options, parts, prepare
from foreword.ops.layer.overlap import early_launch, overlaps, take_turn
from foreword.ops.layer.rotary import angles, place_of, put, turned
from foreword.ops.layer.sums import few_rows_sums, get_ready, joined, one_row_sums, scale_of, shared_out
from foreword.ops.layer.tiles import Tiles, fitting, tiles_for


@triton.jit
def _place(block, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Where a block of pairs begins: the head, and the column of its low half."""
    per_head: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    return block // per_head, block % per_head * BLOCK_N


@triton.jit
def _finish(
    low, high, angle, bias, out, keys, values, line, place, head, at, here,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BIASED: tl.constexpr,
) -> None:  # fmt: skip
    """What comes after the product; `line`, `place` and `at` have the shape of `low`, or one that spreads to it."""
    if BIASED:
        added = bias + head * (2 * HALF) + tl.minimum(at, HALF - 1)
        low += tl.load(added).to(tl.float32)
        high += tl.load(added + HALF).to(tl.float32)
    low, high = low.to(out.dtype.element_ty).to(tl.float32), high.to(out.dtype.element_ty).to(tl.float32)
    if head < HEADS + KEY_HEADS:
        low, high = turned(low, high, angle)
    put(out, keys, values, line, place, head, low, high, at, here, HEADS, KEY_HEADS, HALF)


@triton.jit
def _one_row_turned(
    rows, weight, bias, norm, cosine, sine, keys, values, places, out, per_seq, epsilon, c_batch, c_row, s_batch, s_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr,
    BIASED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row times BLOCK_N pairs."""
    line = tl.program_id(0)
    head, begin = _place(tl.program_id(1), BLOCK_N, HALF)
    at = begin + tl.arange(0, BLOCK_N)
    taken, half = shared_out(BLOCK_N, 2, WARPS)
    line_at = tl.minimum(begin + taken, HALF - 1) + half * HALF
    lines = weight + (head * (2 * HALF) + line_at).to(tl.int64) * K
    held = get_ready(lines, K, WARPS, AHEAD, EARLY)
    # Where the rows stand is asked for in the kernel's turn: the one before may just have said it.
    seq, row, here = line // per_seq, line % per_seq, at < HALF
    place = place_of(places, seq, row, head, per_seq, KEY_HEADS)
    angle = angles(cosine, sine, seq * c_batch + row * c_row, seq * s_batch + row * s_row, at, here, HALF)
    low, high = one_row_sums(
        rows + line * K, lines, held, norm, epsilon, K, BLOCK_N, 2, WARPS, BLOCK_K, STAGES, NORM
    )  # fmt: skip
    _finish(
        low, high, angle, bias, out, keys, values, line, place, head, at, here, HEADS, KEY_HEADS, HALF, BIASED
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "per_seq"])
def _few_rows_turned(
    rows, weight, bias, norm, cosine, sine, keys, values, places, out, part, count, per_seq, epsilon,
    c_batch, c_row, s_batch, s_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, EACH: tl.constexpr,
    AHEAD: tl.constexpr, BLOCKS: tl.constexpr, SHARES: tl.constexpr,
    BIASED: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_M rows times BLOCK_N pairs, or one of SPLITS stretches of their sums, which goes to `part`."""
    line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, begin = _place(tl.program_id(1), BLOCK_N, HALF)
    at = begin + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * EACH
    wide = tl.arange(0, 2 * BLOCK_N)  # every column of the low half, and that of the high one behind it
    line_at = tl.minimum(begin + wide // 2, HALF - 1) + wide % 2 * HALF
    lines = weight + (head * (2 * HALF) + line_at).to(tl.int64) * K + first
    real = tl.minimum(line, count - 1)
    seq, row = real // per_seq, real % per_seq
    inside = (line < count)[:, None] & (at < HALF)[None, :]
    if SPLITS == 1:
        place = place_of(places, seq, row, head, per_seq, KEY_HEADS)
        c_at, s_at = seq * c_batch + row * c_row, seq * s_batch + row * s_row
        angle = angles(cosine, sine, c_at[:, None], s_at[:, None], at[None, :], inside, HALF)
    held = get_ready(lines, K, SHARES, AHEAD, EARLY)
    low, high = few_rows_sums(
        rows + real * K + first, lines, held, norm, line, count, K - first, epsilon,
        K, EACH, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SHARES, K != SPLITS * EACH, True, BLOCKS, PRECISION,
    )  # fmt: skip
    if SPLITS == 1:
        _finish(
            low, high, angle, bias, out, keys, values, line[:, None], place[:, None], head, at[None, :], inside,
            HEADS, KEY_HEADS, HALF, BIASED,
        )  # fmt: skip
    else:
        goal = part + ((split * count + line).to(tl.int64) * (HEADS + 2 * KEY_HEADS) + head)[:, None] * (2 * HALF)
        tl.store(goal + at[None, :], low, mask=inside)
        tl.store(goal + HALF + at[None, :], high, mask=inside)


@triton.jit(do_not_specialize=["count", "per_seq"])
def _join_turned(
    part, bias, norm, cosine, sine, keys, values, places, out, count, per_seq, epsilon, c_batch, c_row, s_batch, s_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """A head of a row whose sums several programs shared."""
    take_turn(EARLY)
    line, head = tl.program_id(0), tl.program_id(1)
    seq, row = line // per_seq, line % per_seq
    at = tl.arange(0, BLOCK)
    here = at < HALF
    place = place_of(places, seq, row, head, per_seq, KEY_HEADS)
    angle = angles(cosine, sine, seq * c_batch + row * c_row, seq * s_batch + row * s_row, at, here, HALF)
    columns: tl.constexpr = (HEADS + 2 * KEY_HEADS) * 2 * HALF
    column = head * (2 * HALF) + at
    scale = scale_of(norm, line, count, epsilon, K, BLOCKS)
    low = joined(part, line, column, here, count, columns, SPLITS) * scale
    high = joined(part, line, column + HALF, here, count, columns, SPLITS) * scale
    _finish(
        low, high, angle, bias, out, keys, values, line, place, head, at, here, HEADS, KEY_HEADS, HALF, BIASED
    )  # fmt: skip


def linear_turn_and_store(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    cosine: Tensor,
    sine: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    *,
    handed: Handed | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`turn_and_store` of norm(rows) @ weight.T + bias: rows [b, n, K] to queries [b, heads, n, width], others to the cache.

    The weight [(heads + 2 key heads) * width, K] has q above k above v. `handed` is as in `few_rows_linear`, all
    else as in `turn_and_store`. What turns the rows, and their places, must be older than the kernel before.
    """
    batch, per_seq, k = rows.shape
    key_heads, width = keys.shape[1], keys.shape[3]
    heads, half = weight.shape[0] // width - 2 * key_heads, width // 2
    assert weight.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    assert places.shape[0] == batch * key_heads * per_seq
    cosine, sine = cosine.expand(batch, per_seq, width), sine.expand(batch, per_seq, width)
    assert cosine.stride(2) == 1 and sine.stride(2) == 1
    tiles = fitting(tiles or tiles_for(batch * per_seq, weight.shape[0], k, "turned"), rows.dtype)
    tiles = replace(tiles, block_n=min(tiles.block_n, triton.next_power_of_2(half)))
    out = torch.empty(batch, per_seq, heads, width, dtype=rows.dtype, device=rows.device)
    where = _Where(cosine, sine, keys, values, places, out)
    early = overlaps(rows.device)
    flags = {"HEADS": heads, "KEY_HEADS": key_heads, "HALF": half, "BIASED": bias is not None, "EARLY": early}
    launch = _launch_one if tiles.block_m == 1 else _launch_few
    ready = prepare(rows, norm, handed, tiles)
    launch(ready, weight, out if bias is None else bias, where, tiles, flags)
    return out.transpose(1, 2)


class _Where(NamedTuple):
    """What turns the rows, and where they go."""

    cosine: Tensor
    sine: Tensor
    keys: Tensor
    values: Tensor
    places: Tensor
    out: Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.cosine.stride()[:2], *self.sine.stride()[:2]


def _launch_one(ready: Prepared, weight: Tensor, bias: Tensor, where: _Where, tiles: Tiles, flags: dict[str, int]) -> None:
    count, k = ready.rows.shape
    _one_row_turned[(count, _blocks(tiles, flags))](
        ready.rows, weight, bias, ready.norm, *where, where.out.shape[1], ready.epsilon, *where.strides,
        NORM=ready.kind, **cut_for_one(k, tiles, paired=True), **flags, **launch_options(tiles, bool(flags["EARLY"])),
    )  # fmt: skip


def _launch_few(ready: Prepared, weight: Tensor, bias: Tensor, where: _Where, tiles: Tiles, flags: dict[str, int]) -> None:
    (count, k), per_seq, early = ready.rows.shape, where.out.shape[1], bool(flags["EARLY"])
    part = parts(ready, weight.shape[0], tiles) if tiles.splits > 1 else where.out
    _few_rows_turned[(triton.cdiv(count, tiles.block_m), _blocks(tiles, flags), tiles.splits)](
        ready.rows, weight, bias, ready.norm, *where, part, count, per_seq, ready.epsilon, *where.strides,
        **cut(ready, tiles, paired=True), **flags, **launch_options(tiles, early),
    )  # fmt: skip
    if tiles.splits > 1:
        _join_turned[(count, flags["HEADS"] + 2 * flags["KEY_HEADS"])](
            part, bias, ready.norm, *where, count, per_seq, ready.epsilon, *where.strides,
            K=k, BLOCK=triton.next_power_of_2(flags["HALF"]), SPLITS=tiles.splits, BLOCKS=ready.blocks,
            **flags, num_warps=1, **early_launch(early),
        )  # fmt: skip


def _blocks(tiles: Tiles, flags: dict[str, int]) -> int:
    return (flags["HEADS"] + 2 * flags["KEY_HEADS"]) * triton.cdiv(flags["HALF"], tiles.block_n)

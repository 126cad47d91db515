"""The q/k/v product of a few rows, with rotary embeddings and cache stores in the same kernel.

In: rows of a layer, its q/k/v weights, cosines and sines of the rows' positions, and their places in the cache. Out: rotated
queries; rotated keys and values are stored in the cache. A program takes columns of one head in pairs: one of the low half
and one of the high half, which the rotation mixes. The product is rounded before it is rotated, as in rotary.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.linear import (
    Norm,
    Prepared,
    Prescaled,
    constants,
    constants_for_one_row,
    launch_options,
    partial_sums,
    prepare,
)
from foreword.ops.layer.overlap import early_launch, overlaps, take_turn
from foreword.ops.layer.rotary import angles, cache_place, rotated, store_head
from foreword.ops.layer.sums import columns_by_warp, few_rows_sums, load_early, norm_scale, one_row_sums, sum_splits
from foreword.ops.layer.tiles import Tiles, fit_to_dtype, tiles_for


@triton.jit
def _first_pair(block, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Return where a block of pairs begins: the head, and the column in its low half."""
    per_head: tl.constexpr = (HALF + BLOCK_N - 1) // BLOCK_N
    return block // per_head, block % per_head * BLOCK_N


@triton.jit
def _rotate_and_store(
    low, high, angle, bias, out, keys, values, flat_row, place, head, index, inside,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, BIASED: tl.constexpr,
) -> None:  # fmt: skip
    """Add the bias, round, rotate queries and keys, and store. `flat_row`, `place` and `index` broadcast to `low`."""
    if BIASED:
        added = bias + head * (2 * HALF) + tl.minimum(index, HALF - 1)
        low += tl.load(added).to(tl.float32)
        high += tl.load(added + HALF).to(tl.float32)
    low, high = low.to(out.dtype.element_ty).to(tl.float32), high.to(out.dtype.element_ty).to(tl.float32)
    if head < HEADS + KEY_HEADS:
        low, high = rotated(low, high, angle)
    store_head(out, keys, values, flat_row, place, head, low, high, index, inside, HEADS, KEY_HEADS, HALF)


@triton.jit
def _one_row_rotated(
    rows, weight, bias, norm, cosine, sine, keys, values, places, out, per_seq, epsilon, c_batch, c_row, s_batch, s_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, PREFETCHED: tl.constexpr, NORM: tl.constexpr,
    BIASED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row by BLOCK_N pairs of columns."""
    flat_row = tl.program_id(0)
    head, begin = _first_pair(tl.program_id(1), BLOCK_N, HALF)
    index = begin + tl.arange(0, BLOCK_N)
    pair_in_block, half = columns_by_warp(BLOCK_N, 2, WARPS)
    weight_row = tl.minimum(begin + pair_in_block, HALF - 1) + half * HALF
    weight_rows = weight + (head * (2 * HALF) + weight_row).to(tl.int64) * K
    preloaded = load_early(weight_rows, K, WARPS, PREFETCHED, EARLY)
    # Positions and places are loaded after the wait: the previous kernel may have written them.
    seq, row, inside = flat_row // per_seq, flat_row % per_seq, index < HALF
    place = cache_place(places, seq, row, head, per_seq, KEY_HEADS)
    angle = angles(cosine, sine, seq * c_batch + row * c_row, seq * s_batch + row * s_row, index, inside, HALF)
    low, high = one_row_sums(
        rows + flat_row * K, weight_rows, preloaded, norm, epsilon, K, BLOCK_N, 2, WARPS, BLOCK_K, STAGES, NORM
    )  # fmt: skip
    _rotate_and_store(
        low, high, angle, bias, out, keys, values, flat_row, place, head, index, inside, HEADS, KEY_HEADS, HALF, BIASED
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "per_seq"])
def _few_rows_rotated(
    rows, weight, bias, norm, cosine, sine, keys, values, places, out, partial, count, per_seq, epsilon,
    c_batch, c_row, s_batch, s_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, SPLIT_K: tl.constexpr,
    PREFETCHED: tl.constexpr, BLOCKS: tl.constexpr, SHARES: tl.constexpr,
    BIASED: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply BLOCK_M rows by BLOCK_N pairs; with SPLITS > 1, store one of SPLITS partial sums in `partial`."""
    flat_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, begin = _first_pair(tl.program_id(1), BLOCK_N, HALF)
    index = begin + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * SPLIT_K
    pair = tl.arange(0, 2 * BLOCK_N)  # each column of the low half, followed by that of the high half
    weight_row = tl.minimum(begin + pair // 2, HALF - 1) + pair % 2 * HALF
    weight_rows = weight + (head * (2 * HALF) + weight_row).to(tl.int64) * K + first
    real = tl.minimum(flat_row, count - 1)
    seq, row = real // per_seq, real % per_seq
    inside = (flat_row < count)[:, None] & (index < HALF)[None, :]
    if SPLITS == 1:
        place = cache_place(places, seq, row, head, per_seq, KEY_HEADS)
        c_at, s_at = seq * c_batch + row * c_row, seq * s_batch + row * s_row
        angle = angles(cosine, sine, c_at[:, None], s_at[:, None], index[None, :], inside, HALF)
    preloaded = load_early(weight_rows, K, SHARES, PREFETCHED, EARLY)
    low, high = few_rows_sums(
        rows + real * K + first, weight_rows, preloaded, norm, flat_row, count, K - first, epsilon,
        K, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SHARES, K != SPLITS * SPLIT_K, True, BLOCKS, PRECISION,
    )  # fmt: skip
    if SPLITS == 1:
        _rotate_and_store(
            low, high, angle, bias, out, keys, values, flat_row[:, None], place[:, None], head, index[None, :], inside,
            HEADS, KEY_HEADS, HALF, BIASED,
        )  # fmt: skip
    else:
        destination = partial + ((split * count + flat_row).to(tl.int64) * (HEADS + 2 * KEY_HEADS) + head)[:, None] * (
            2 * HALF
        )
        tl.store(destination + index[None, :], low, mask=inside)
        tl.store(destination + HALF + index[None, :], high, mask=inside)


@triton.jit(do_not_specialize=["count", "per_seq"])
def _finish_splits(
    partial, bias, norm, cosine, sine, keys, values, places, out, count, per_seq, epsilon, c_batch, c_row, s_batch, s_row,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Add the partial sums of one head of a row, then rotate and store it."""
    take_turn(EARLY)
    flat_row, head = tl.program_id(0), tl.program_id(1)
    seq, row = flat_row // per_seq, flat_row % per_seq
    index = tl.arange(0, BLOCK)
    inside = index < HALF
    place = cache_place(places, seq, row, head, per_seq, KEY_HEADS)
    angle = angles(cosine, sine, seq * c_batch + row * c_row, seq * s_batch + row * s_row, index, inside, HALF)
    columns: tl.constexpr = (HEADS + 2 * KEY_HEADS) * 2 * HALF
    column = head * (2 * HALF) + index
    scale = norm_scale(norm, flat_row, count, epsilon, K, BLOCKS)
    low = sum_splits(partial, flat_row, column, inside, count, columns, SPLITS) * scale
    high = sum_splits(partial, flat_row, column + HALF, inside, count, columns, SPLITS) * scale
    _rotate_and_store(
        low, high, angle, bias, out, keys, values, flat_row, place, head, index, inside, HEADS, KEY_HEADS, HALF, BIASED
    )  # fmt: skip


def linear_rotate_and_store(
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
    prescaled: Prescaled | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Apply `rotate_and_store` to norm(rows) @ weight.T + bias: rows [b, n, K] give queries [b, heads, n, width].

    The weight [(heads + 2 key heads) * width, K] has q above k above v. `prescaled` is as in `few_rows_linear`, all else as
    in `rotate_and_store`. Cosines, sines and places must be older than the previous kernel.
    """
    batch, per_seq, k = rows.shape
    key_heads, width = keys.shape[1], keys.shape[3]
    heads, half = weight.shape[0] // width - 2 * key_heads, width // 2
    assert weight.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    assert places.shape[0] == batch * key_heads * per_seq
    cosine, sine = cosine.expand(batch, per_seq, width), sine.expand(batch, per_seq, width)
    assert cosine.stride(2) == 1 and sine.stride(2) == 1
    tiles = fit_to_dtype(tiles or tiles_for(batch * per_seq, weight.shape[0], k, "turned"), rows.dtype)
    tiles = replace(tiles, block_n=min(tiles.block_n, triton.next_power_of_2(half)))
    out = torch.empty(batch, per_seq, heads, width, dtype=rows.dtype, device=rows.device)
    rotary = _Rotary(cosine, sine, keys, values, places, out)
    early = overlaps(rows.device)
    flags = {"HEADS": heads, "KEY_HEADS": key_heads, "HALF": half, "BIASED": bias is not None, "EARLY": early}
    launch = _launch_one if tiles.block_m == 1 else _launch_few
    prepared = prepare(rows, norm, prescaled, tiles)
    launch(prepared, weight, out if bias is None else bias, rotary, tiles, flags)
    return out.transpose(1, 2)


class _Rotary(NamedTuple):
    """What rotates the rows, and where they are stored."""

    cosine: Tensor
    sine: Tensor
    keys: Tensor
    values: Tensor
    places: Tensor
    out: Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.cosine.stride()[:2], *self.sine.stride()[:2]


def _launch_one(
    prepared: Prepared, weight: Tensor, bias: Tensor, rotary: _Rotary, tiles: Tiles, flags: dict[str, int]
) -> None:
    count, k = prepared.rows.shape
    _one_row_rotated[(count, _blocks(tiles, flags))](
        prepared.rows, weight, bias, prepared.norm, *rotary, rotary.out.shape[1], prepared.epsilon, *rotary.strides,
        NORM=prepared.kind, **constants_for_one_row(k, tiles, paired=True), **flags,
        **launch_options(tiles, bool(flags["EARLY"])),
    )  # fmt: skip


def _launch_few(
    prepared: Prepared, weight: Tensor, bias: Tensor, rotary: _Rotary, tiles: Tiles, flags: dict[str, int]
) -> None:
    (count, k), per_seq, early = prepared.rows.shape, rotary.out.shape[1], bool(flags["EARLY"])
    partial = partial_sums(prepared, weight.shape[0], tiles) if tiles.splits > 1 else rotary.out
    _few_rows_rotated[(triton.cdiv(count, tiles.block_m), _blocks(tiles, flags), tiles.splits)](
        prepared.rows, weight, bias, prepared.norm, *rotary, partial, count, per_seq, prepared.epsilon, *rotary.strides,
        **constants(prepared, tiles, paired=True), **flags, **launch_options(tiles, early),
    )  # fmt: skip
    if tiles.splits > 1:
        _finish_splits[(count, flags["HEADS"] + 2 * flags["KEY_HEADS"])](
            partial, bias, prepared.norm, *rotary, count, per_seq, prepared.epsilon, *rotary.strides,
            K=k, BLOCK=triton.next_power_of_2(flags["HALF"]), SPLITS=tiles.splits, BLOCKS=prepared.blocks,
            **flags, num_warps=1, **early_launch(early),
        )  # fmt: skip


def _blocks(tiles: Tiles, flags: dict[str, int]) -> int:
    return (flags["HEADS"] + 2 * flags["KEY_HEADS"]) * triton.cdiv(flags["HALF"], tiles.block_n)

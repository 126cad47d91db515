"""Products of a few rows with a weight matrix, as a decoding pass makes them: every weight is read once.

In: 1 to about 128 rows. The gate behind a product, bias and residual are part of the same kernel, and so may be the RMSNorm
before it: rows are multiplied by its weight, rounded and summed; how long they are is only known at the end of the sums, and
divides them there. A norm in a kernel of its own rounds in the same places, so a row comes out the same alone and among
others, but for the order of sums. Sums are float32 and in a fixed order: the same call gives the same bits. Safe to capture.
How a product is cut is a matter of measuring: `python -m foreword.bench.linears` does it, tiles.py holds what it found.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.overlap import fetch, let_next_start, overlaps, wait_for_previous
from foreword.kernels.tiles import Tiles, fitting, tiles_for

Norm = tuple[Tensor, float]  # weight [K] and epsilon of an RMSNorm

FETCHED = 2**15  # numbers that a program asks for while it waits: what it needs first, and no more than 16 requests a thread

# A row times a norm's weight, before it is divided by its length, may be too large for these numbers or too small: rows are
# normalised before they are rounded, and the norm is a kernel of its own, or reads its row twice.
NORMED_FIRST = (torch.float16,)


@triton.jit
def _load(place, here, MASKED: tl.constexpr, POLICY: tl.constexpr):
    if MASKED:
        found = tl.load(place, mask=here, other=0.0, eviction_policy=POLICY)
    else:
        found = tl.load(place, eviction_policy=POLICY)
    return found


@triton.jit
def _store(
    value, up, added, bias, out, row, column, here, columns, GATED: tl.constexpr, BIASED: tl.constexpr
) -> None:  # fmt: skip
    """What comes after the product; `row` and `column` have the shape of `value`, or one that spreads to it."""
    if BIASED:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            up += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)
        value = value * tl.sigmoid(value) * up
    tl.store(out + row * columns + column, (value + added).to(out.dtype.element_ty), mask=here)


@triton.jit
def _residual(residual, row, column, here, columns, ADDED: tl.constexpr):
    """Asked for before the product, so that it is there when the product is."""
    return tl.load(residual + row * columns + column, mask=here, other=0.0).to(tl.float32) if ADDED else 0.0


@triton.jit
def start_early(lines, above, AHEAD: tl.constexpr, PAIRED: tl.constexpr) -> None:
    """Ask for the weights at `lines`, and for those `above` them, while the kernel before still runs."""
    let_next_start()
    fetch(lines, AHEAD)
    if PAIRED:
        fetch(lines + above, AHEAD)
    wait_for_previous()


@triton.jit
def one_row_sums(
    x_at, lines, above, norm, epsilon,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PAIRED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """A row times the weights at `lines` [BLOCK_N], and times those `above` them: summed where they lie, across at the end.

    NORM "inside": see the top. "first": the row is divided before it is rounded, for which it is read twice.
    """
    masked: tl.constexpr = K % BLOCK_K != 0
    wide = tl.arange(0, BLOCK_K)
    squares = tl.zeros([BLOCK_K], tl.float32)
    scale = 1.0
    if NORM == "first":
        for start in tl.range(0, K, BLOCK_K):
            x = _load(x_at + start + wide, start + wide < K, masked, "evict_last").to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    value = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = start + wide
        here = at < K
        w = _load(lines[:, None] + at[None, :], here[None, :], masked, "evict_first").to(tl.float32)
        x = _load(x_at + at, here, masked, "evict_last").to(tl.float32)
        if NORM == "inside":
            squares += x * x
        if NORM != "":
            x *= scale * _load(norm + at, here, masked, "evict_last").to(tl.float32)
            x = x.to(x_at.dtype.element_ty).to(tl.float32)
        value += w * x[None, :]
        if PAIRED:
            u = _load(lines[:, None] + above + at[None, :], here[None, :], masked, "evict_first").to(tl.float32)
            up += u * x[None, :]
    behind = 1.0
    if NORM == "inside":
        behind = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    return tl.sum(value, 1) * behind, tl.sum(up, 1) * behind


@triton.jit
def few_rows_sums(
    x_at, lines, above, norm, row, left, epsilon,
    K: tl.constexpr, EACH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr, PAIRED: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows at `x_at` [BLOCK_M] times the weights at `lines` [BLOCK_N], and times those `above` them, `left` numbers of each.

    NORM "inside": see the top. "before": the rows come multiplied and rounded, and `norm` holds what they are scaled by.
    """
    behind = tl.full([BLOCK_M], 1.0, tl.float32)
    if NORM == "before":
        behind = tl.load(norm + row)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, EACH, BLOCK_K, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK_K)
        here = at < left
        x = _load(x_at[:, None] + at[None, :], here[None, :], MASKED, "evict_last")
        if NORM == "inside":
            raw = x.to(tl.float32)
            squares += raw * raw
            x = (raw * _load(norm + at, here, MASKED, "evict_last").to(tl.float32)[None, :]).to(x.dtype)
        w = _load(lines[:, None] + at[None, :], here[None, :], MASKED, "evict_first")
        value = tl.dot(x, tl.trans(w), value, input_precision=PRECISION)
        if PAIRED:
            u = _load(lines[:, None] + above + at[None, :], here[None, :], MASKED, "evict_first")
            up = tl.dot(x, tl.trans(u), up, input_precision=PRECISION)
    if NORM == "inside":
        behind = tl.rsqrt(tl.sum(squares, 1) / K + epsilon)
    if NORM != "":
        value, up = value * behind[:, None], up * behind[:, None]
    return value, up


@triton.jit
def _one_row(
    rows, weight, bias, residual, norm, out, columns, epsilon,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row times BLOCK_N columns."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = weight + tl.minimum(column, columns - 1).to(tl.int64) * K  # instead of a mask
    above = tl.cast(columns, tl.int64) * K  # from a row of the gate to that of up
    if EARLY:
        start_early(lines, above, AHEAD, GATED)
    added = _residual(residual, row, column, column < columns, columns, ADDED)
    value, up = one_row_sums(rows + row * K, lines, above, norm, epsilon, K, BLOCK_N, BLOCK_K, STAGES, GATED, NORM)
    _store(value, up, added, bias, out, row, column, column < columns, columns, GATED, BIASED)


@triton.jit(do_not_specialize=["count"])
def _few_rows(
    rows, weight, bias, residual, norm, out, part, count, columns, epsilon,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, AHEAD: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_M rows times BLOCK_N columns, or one of SPLITS stretches of their sums, which goes to `part`."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * EACH
    lines = weight + tl.minimum(column, columns - 1).to(tl.int64) * K + first
    above = tl.cast(columns, tl.int64) * K
    if EARLY:
        start_early(lines, above, AHEAD, GATED)
    inside = (row < count)[:, None] & (column < columns)[None, :]
    added = _residual(residual, row[:, None], column[None, :], inside, columns, ADDED and SPLITS == 1)
    real = tl.minimum(row, count - 1)
    value, up = few_rows_sums(
        rows + real * K + first, lines, above, norm, real, K - first, epsilon,
        K, EACH, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, K != SPLITS * EACH, GATED, NORM, PRECISION,
    )  # fmt: skip
    if SPLITS > 1:
        line = split * count + row
        tl.store(part + line[:, None].to(tl.int64) * columns + column[None, :], value, mask=inside)
    else:
        _store(value, up, added, bias, out, row[:, None], column[None, :], inside, columns, GATED, BIASED)


@triton.jit
def joined(part, row, column, here, count, columns, scales, SPLITS: tl.constexpr, SCALED: tl.constexpr):
    """The parts of one row's sums, added in order, and scaled where the row comes from a norm."""
    value = tl.zeros(column.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        line = split * count + row
        value += tl.load(part + line.to(tl.int64) * columns + column, mask=here, other=0.0)
    if SCALED:
        value *= tl.load(scales + row)
    return value


@triton.jit(do_not_specialize=["count"])
def _join(
    part, bias, residual, scales, out, count, columns,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = column < columns
    added = _residual(residual, row, column, here, columns, ADDED)
    value = joined(part, row, column, here, count, columns, scales, SPLITS, SCALED)
    _store(value, value, added, bias, out, row, column, here, columns, False, BIASED)


@triton.jit
def _norm(
    rows, weight, out, scales, epsilon, K: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, EARLY: tl.constexpr
) -> None:  # fmt: skip
    """RMSNorm of one row: all of it where FIRST, or its weight alone, and what the row is still to be scaled by."""
    at = tl.arange(0, BLOCK_K)
    here = at < K
    factor = tl.load(weight + at, mask=here, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0)
    x = tl.load(rows + row * K + at, mask=here, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / K + epsilon)
    if FIRST:
        factor *= scale
    else:
        tl.store(scales + row, scale)
    tl.store(out + row * K + at, (x * factor).to(out.dtype.element_ty), mask=here)


def few_rows_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Rows [.., K] times weight [N, K]: norm(rows) @ weight.T + bias + residual, [.., N].

    `gated`: the weight is [2N, K], gate above up, and what is given back is silu(gate) * up.
    """
    k = weight.shape[1]
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    flat = rows.reshape(-1, k).contiguous()
    tiles = fitting(tiles or tiles_for(flat.shape[0], columns, k, "gated" if gated else "plain"), rows.dtype)
    assert weight.is_contiguous() and not (gated and tiles.splits > 1)
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    if not flat.shape[0]:
        return out
    given = _Given(weight, out if bias is None else bias, out if residual is None else residual.contiguous(), out)
    flags = {"BIASED": bias is not None, "ADDED": residual is not None, "EARLY": overlaps(rows.device)}
    launch = _launch_one if tiles.block_m == 1 else _launch_few
    launch(prepare(flat, norm, tiles), given, columns, tiles, gated, flags)
    return out


class Prepared(NamedTuple):
    """Rows as a product reads them, and what is left of the norm for it to do: NORM of the kernels."""

    rows: Tensor
    norm: Tensor  # its weight, or the scales of the rows
    epsilon: float
    kind: Literal["", "first", "inside", "before"]


def prepare(rows: Tensor, norm: Norm | None, tiles: Tiles) -> Prepared:
    """Launches the norm where it is a kernel of its own."""
    if norm is None:
        return Prepared(rows, rows, 0.0, "")
    first = rows.dtype in NORMED_FIRST
    if tiles.block_m == 1:
        return Prepared(rows, *norm, "first" if first else "inside")
    if tiles.norm_inside and not first:
        assert tiles.splits == 1, "a program that has a part of the sum cannot know the row's length"
        return Prepared(rows, *norm, "inside")
    return _normed(rows, *norm, first)


def _normed(rows: Tensor, weight: Tensor, epsilon: float, first: bool) -> Prepared:
    count, k = rows.shape
    out, early = torch.empty_like(rows), overlaps(rows.device)
    scales = torch.empty(count, dtype=torch.float32, device=rows.device)
    _norm[(count,)](
        rows, weight, out, scales, epsilon,
        K=k, BLOCK_K=triton.next_power_of_2(k), FIRST=first, EARLY=early, num_warps=4, **early_launch(early),
    )  # fmt: skip
    return Prepared(out, scales, 0.0, "" if first else "before")


class _Given(NamedTuple):
    """What a product reads and writes; where there is no bias or residual, `out` stands in for it and is not read."""

    weight: Tensor
    bias: Tensor
    residual: Tensor
    out: Tensor


def _launch_one(ready: Prepared, given: _Given, columns: int, tiles: Tiles, gated: bool, flags: dict[str, bool]) -> None:
    count, k = ready.rows.shape
    _one_row[(count, triton.cdiv(columns, tiles.block_n))](
        ready.rows, given.weight, given.bias, given.residual, ready.norm, given.out, columns, ready.epsilon,
        K=k, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages, AHEAD=ahead(k, tiles, gated),
        GATED=gated, NORM=ready.kind, **flags, **launch_options(tiles, flags["EARLY"]),
    )  # fmt: skip


def _launch_few(ready: Prepared, given: _Given, columns: int, tiles: Tiles, gated: bool, flags: dict[str, bool]) -> None:
    count = ready.rows.shape[0]
    part = parts(ready, columns, tiles) if tiles.splits > 1 else given.out
    blocks = triton.cdiv(count, tiles.block_m), triton.cdiv(columns, tiles.block_n), tiles.splits
    _few_rows[blocks](
        ready.rows, given.weight, given.bias, given.residual, ready.norm, given.out, part, count, columns, ready.epsilon,
        GATED=gated, **cut(ready, tiles, gated), **flags, **launch_options(tiles, flags["EARLY"]),
    )  # fmt: skip
    if tiles.splits > 1:
        wide = min(512, triton.next_power_of_2(columns))
        _join[(count, triton.cdiv(columns, wide))](
            part, given.bias, given.residual, ready.norm, given.out, count, columns,
            BLOCK_N=wide, SPLITS=tiles.splits, SCALED=ready.kind == "before", **flags,
            num_warps=4, num_stages=1, **early_launch(flags["EARLY"]),
        )  # fmt: skip


def parts(ready: Prepared, columns: int, tiles: Tiles) -> Tensor:
    """Room for the sums of programs that share them."""
    rows = ready.rows
    return torch.empty(tiles.splits, rows.shape[0], columns, dtype=torch.float32, device=rows.device)


def cut(ready: Prepared, tiles: Tiles, paired: bool) -> dict[str, Any]:
    """What a product by matrix units has to be compiled for. Where the sums are shared, whoever joins them scales them."""
    k = ready.rows.shape[1]
    each = triton.cdiv(k, tiles.block_k * tiles.splits) * tiles.block_k
    last = k - each * (tiles.splits - 1)  # the shortest
    return {
        "K": k, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.stages,
        "SPLITS": tiles.splits, "EACH": each, "AHEAD": ahead(last, tiles, paired),
        "NORM": ready.kind if tiles.splits == 1 else "",
        "PRECISION": "ieee" if ready.rows.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def ahead(k: int, tiles: Tiles, paired: bool) -> int:
    """How much of each of its weight rows a program asks for early, where it has `k` numbers of them."""
    return max(0, min(k, FETCHED // (tiles.block_n * (2 if paired else 1))))


def launch_options(tiles: Tiles, early: bool) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, **early_launch(early)}


def early_launch(early: bool) -> dict[str, Any]:
    """Only where it is asked for: other devices do not know the option."""
    return {"launch_pdl": True} if early else {}

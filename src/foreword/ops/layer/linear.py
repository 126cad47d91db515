"""Products of a few rows with a weight matrix, as a decoding pass makes them: every weight is read once.

In: 1 to about 256 rows. Gate, bias, residual and RMSNorm are part of the kernel: rows are multiplied by the norm's weight,
rounded and summed, and the sums divided by the row's length at their end. With matrix units the product before hands on its
rows multiplied, and their squares (`Handed`), or else a kernel of its own does. All round in the same places: a row comes
out the same alone and among others, but for the order of sums, which is fixed. Safe to capture. Weights and residual, which
must be older than the kernel before, are on their way while that still runs: into the L2 cache, or held at once. How a
product is cut is measured (`studies/linear_tiles.py`, `studies/linear_tiles_in_passes.py`); tiles.py holds the result.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import early_launch, overlaps, take_turn
from foreword.ops.layer.sums import few_rows_sums, get_ready, joined, one_row_sums, scale_of, shared_out
from foreword.ops.layer.tiles import Kind, Tiles, fitting, tiles_for

Norm = tuple[Tensor, float]  # weight [K] and epsilon of an RMSNorm

FETCHED = 2**15  # numbers that a program asks for while it waits: what it needs first, and no more than 16 requests a thread

# A row times a norm's weight, before it is divided by its length, may be too large for these numbers or too small: rows are
# normalised before they are rounded, and the norm is a kernel of its own, or reads its row twice. Nothing is handed on.
NORMED_FIRST = (torch.float16,)


@triton.jit
def _store(
    value, up, added, bias, out, row, column, here, columns, GATED: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    """What comes after the product; `row` and `column` have the shape of `value`, or one that spreads to it. As stored."""
    if BIASED:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            up += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)
        value = value * tl.sigmoid(value) * up
    value = (value + added).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, value, mask=here)
    return value


@triton.jit
def _hand_on(stored, factor, ready, row, column, here, columns, AXIS: tl.constexpr):
    """What was stored goes to `ready` times the weight of the norm that comes next. Its squares, summed over the columns."""
    wide = stored.to(tl.float32)
    tl.store(ready + row * columns + column, (wide * factor).to(ready.dtype.element_ty), mask=here)
    return tl.sum(tl.where(here, wide * wide, 0.0), AXIS)


@triton.jit
def _residual(residual, row, column, here, columns, ADDED: tl.constexpr):
    """Asked for before the kernel's turn: it is older than the rows. So it is there when the product is."""
    return tl.load(residual + row * columns + column, mask=here, other=0.0).to(tl.float32) if ADDED else 0.0


@triton.jit
def _one_row(
    rows, weight, bias, residual, norm, out, columns, epsilon,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row times BLOCK_N columns."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    each: tl.constexpr = 2 if GATED else 1
    taken, weight_of = shared_out(BLOCK_N, each, WARPS)
    line = tl.minimum(tl.program_id(1) * BLOCK_N + taken, columns - 1) + weight_of * columns
    lines = weight + line.to(tl.int64) * K
    added = _residual(residual, row, column, column < columns, columns, ADDED)
    held = get_ready(lines, K, WARPS, AHEAD, EARLY)
    value, up = one_row_sums(
        rows + row * K, lines, held, norm, epsilon, K, BLOCK_N, each, WARPS, BLOCK_K, STAGES, NORM
    )  # fmt: skip
    _store(value, up, added, bias, out, row, column, column < columns, columns, GATED, BIASED)


@triton.jit(do_not_specialize=["count"])
def _few_rows(
    rows, weight, bias, residual, norm, out, after, ready, squares, part, count, columns, epsilon,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, AHEAD: tl.constexpr, SHARES: tl.constexpr, GATED: tl.constexpr,
    BLOCKS: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, HANDS: tl.constexpr, EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_M rows times BLOCK_N columns, or one of SPLITS stretches of their sums, which goes to `part`."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * EACH
    each: tl.constexpr = 2 if GATED else 1
    wide = tl.arange(0, each * BLOCK_N)  # every column of the gate, and that of up behind it
    line = tl.minimum(block * BLOCK_N + wide // each, columns - 1) + wide % each * columns
    lines = weight + line.to(tl.int64) * K + first
    factor = tl.load(after + tl.minimum(column, columns - 1)).to(tl.float32)[None, :] if HANDS and SPLITS == 1 else 0.0
    inside = (row < count)[:, None] & (column < columns)[None, :]
    added = _residual(residual, row[:, None], column[None, :], inside, columns, ADDED and SPLITS == 1)
    held = get_ready(lines, K, SHARES, AHEAD, EARLY)
    real = tl.minimum(row, count - 1)
    value, up = few_rows_sums(
        rows + real * K + first, lines, held, norm, row, count, K - first, epsilon,
        K, EACH, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SHARES, K != SPLITS * EACH, GATED, BLOCKS, PRECISION,
    )  # fmt: skip
    if SPLITS > 1:
        line = split * count + row
        tl.store(part + line[:, None].to(tl.int64) * columns + column[None, :], value, mask=inside)
    else:
        stored = _store(value, up, added, bias, out, row[:, None], column[None, :], inside, columns, GATED, BIASED)
        if HANDS:
            own = _hand_on(stored, factor, ready, row[:, None], column[None, :], inside, columns, 1)
            tl.store(squares + block * count + row, own, mask=row < count)


@triton.jit(do_not_specialize=["count"])
def _join(
    part, bias, residual, norm, out, after, ready, squares, count, columns, epsilon,
    K: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, HANDS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    here = column < columns
    factor = tl.load(after + column, mask=here, other=0.0).to(tl.float32) if HANDS else 0.0
    take_turn(EARLY)
    added = _residual(residual, row, column, here, columns, ADDED)
    scale = scale_of(norm, row, count, epsilon, K, BLOCKS)
    value = joined(part, row, column, here, count, columns, SPLITS) * scale
    stored = _store(value, value, added, bias, out, row, column, here, columns, False, BIASED)
    if HANDS:
        tl.store(squares + block * count + row, _hand_on(stored, factor, ready, row, column, here, columns, 0))


@triton.jit
def _norm(
    rows, weight, out, squares, epsilon, K: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, EARLY: tl.constexpr
) -> None:  # fmt: skip
    """RMSNorm of one row: all of it where FIRST, or its weight alone, and the sum of squares that is still to divide it."""
    at = tl.arange(0, BLOCK_K)
    here = at < K
    factor = tl.load(weight + at, mask=here, other=0.0, eviction_policy="evict_last").to(tl.float32)
    take_turn(EARLY)
    row = tl.program_id(0)
    x = tl.load(rows + row * K + at, mask=here, other=0.0).to(tl.float32)
    length = tl.sum(x * x, 0)
    if FIRST:
        factor *= tl.rsqrt(length / K + epsilon)
    else:
        tl.store(squares + row, length)
    tl.store(out + row * K + at, (x * factor).to(out.dtype.element_ty), mask=here)


class Handed(NamedTuple):
    """Rows on their way through a norm: multiplied by its weight and rounded, to be divided when their length is known."""

    of: Tensor  # [.., K] the rows as they were; whoever has others has no use for the rest
    rows: Tensor  # [count, K]
    squares: Tensor  # [blocks, count] of `of`, each the sum over a block of columns


def few_rows_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    handed: Handed | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Rows [.., K] times weight [N, K]: norm(rows) @ weight.T + bias + residual, [.., N].

    `gated`: the weight is [2N, K], gate above up, and what is given back is silu(gate) * up. `handed` saves the norm a
    kernel if it was made for this norm `of` these very rows.
    """
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    tiles = _tiles(rows, weight, tiles, "gated" if gated else "plain")
    assert not (gated and tiles.splits > 1)
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    if out.numel():
        given = _Given.of(out, weight, bias, residual, None, None)
        _launch(prepare(rows, norm, handed, tiles), given, tiles, gated)
    return out


def linear_and_hand_on(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    after: Tensor,
    *,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Handed | None]:
    """rows @ weight.T + bias + residual, [.., N], and the same for a norm with weight `after` [N] that comes next.

    Nothing is handed on where that norm would have no use for it: by products of one row, and in float16.
    """
    tiles = _tiles(rows, weight, tiles, "plain")
    out = torch.empty(*rows.shape[:-1], weight.shape[0], dtype=rows.dtype, device=rows.device)
    if not out.numel():
        return out, None
    hands = tiles.block_m > 1 and rows.dtype not in NORMED_FIRST
    handed = _room_for(out, tiles) if hands else None
    given = _Given.of(out, weight, bias, residual, after, handed)
    _launch(prepare(rows, None, None, tiles), given, tiles, gated=False)
    return out, handed


def _tiles(rows: Tensor, weight: Tensor, tiles: Tiles | None, kind: Kind) -> Tiles:
    assert weight.is_contiguous()
    tall, k = weight.shape
    return fitting(tiles or tiles_for(rows.numel() // k, tall // 2 if kind == "gated" else tall, k, kind), rows.dtype)


def _room_for(out: Tensor, tiles: Tiles) -> Handed:
    columns = out.shape[-1]
    count = out.numel() // columns
    blocks = triton.cdiv(columns, _joined_at_once(columns) if tiles.splits > 1 else tiles.block_n)
    squares = torch.empty(blocks, count, dtype=torch.float32, device=out.device)
    return Handed(out, torch.empty(count, columns, dtype=out.dtype, device=out.device), squares)


def _joined_at_once(columns: int) -> int:
    return min(512, triton.next_power_of_2(columns))


class Prepared(NamedTuple):
    """Rows [count, K] as a product reads them, and what is left of the norm for it to do: NORM of the one-row kernels."""

    rows: Tensor
    norm: Tensor  # its weight; where the rows come multiplied by it, their squares [blocks, count]
    epsilon: float
    kind: Literal["", "first", "inside", "behind"]

    @property
    def blocks(self) -> int:
        return self.norm.shape[0] if self.kind == "behind" else 0


def prepare(rows: Tensor, norm: Norm | None, handed: Handed | None, tiles: Tiles) -> Prepared:
    """Launches the norm where it is a kernel of its own."""
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    if norm is None:
        return Prepared(flat, flat, 0.0, "")
    weight, epsilon = norm
    first = rows.dtype in NORMED_FIRST
    if tiles.block_m == 1:
        return Prepared(flat, weight, epsilon, "first" if first else "inside")
    if handed is None or handed.of is not rows:
        handed = _normed(flat, weight, epsilon, first)
    return Prepared(handed.rows, handed.squares, epsilon, "" if first else "behind")


def _normed(rows: Tensor, weight: Tensor, epsilon: float, first: bool) -> Handed:
    count, k = rows.shape
    out, early = torch.empty_like(rows), overlaps(rows.device)
    squares = torch.empty(1, count, dtype=torch.float32, device=rows.device)
    _norm[(count,)](
        rows, weight, out, squares, epsilon,
        K=k, BLOCK_K=triton.next_power_of_2(k), FIRST=first, EARLY=early, num_warps=4, **early_launch(early),
    )  # fmt: skip
    return Handed(rows, out, squares)


class _Given(NamedTuple):
    """What a product reads and writes besides its rows; where there is none, `out` stands in and is not touched."""

    weight: Tensor
    bias: Tensor
    residual: Tensor
    out: Tensor
    after: Tensor
    ready: Tensor
    squares: Tensor
    flags: dict[str, bool]

    @staticmethod
    def of(
        out: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        after: Tensor | None,
        handed: Handed | None,
    ) -> _Given:
        flags = {"BIASED": bias is not None, "ADDED": residual is not None, "EARLY": overlaps(out.device)}
        hands = (out, out) if handed is None else (handed.rows, handed.squares)
        given = [out if part is None else part.contiguous() for part in (bias, residual, after)]
        return _Given(weight, given[0], given[1], out, given[2], *hands, flags | {"HANDS": handed is not None})


def _launch(ready: Prepared, given: _Given, tiles: Tiles, gated: bool) -> None:
    (_launch_one if tiles.block_m == 1 else _launch_few)(ready, given, tiles, gated)


def _launch_one(ready: Prepared, given: _Given, tiles: Tiles, gated: bool) -> None:
    (count, k), columns = ready.rows.shape, given.out.shape[-1]
    flags = {name: given.flags[name] for name in ("BIASED", "ADDED", "EARLY")}
    _one_row[(count, triton.cdiv(columns, tiles.block_n))](
        ready.rows, given.weight, given.bias, given.residual, ready.norm, given.out, columns, ready.epsilon,
        GATED=gated, NORM=ready.kind, **cut_for_one(k, tiles, gated), **flags, **launch_options(tiles, flags["EARLY"]),
    )  # fmt: skip


def _launch_few(ready: Prepared, given: _Given, tiles: Tiles, gated: bool) -> None:
    (count, k), columns, flags = ready.rows.shape, given.out.shape[-1], given.flags
    part = parts(ready, columns, tiles) if tiles.splits > 1 else given.out
    behind = given.bias, given.residual, ready.norm, given.out, given.after, given.ready, given.squares
    blocks = triton.cdiv(count, tiles.block_m), triton.cdiv(columns, tiles.block_n), tiles.splits
    _few_rows[blocks](
        ready.rows, given.weight, *behind, part, count, columns, ready.epsilon,
        GATED=gated, **cut(ready, tiles, gated), **flags, **launch_options(tiles, flags["EARLY"]),
    )  # fmt: skip
    if tiles.splits > 1:
        wide = _joined_at_once(columns)
        _join[(count, triton.cdiv(columns, wide))](
            part, *behind, count, columns, ready.epsilon,
            K=k, BLOCK_N=wide, SPLITS=tiles.splits, BLOCKS=ready.blocks, **flags,
            num_warps=4, num_stages=1, **early_launch(flags["EARLY"]),
        )  # fmt: skip


def parts(ready: Prepared, columns: int, tiles: Tiles) -> Tensor:
    """Room for the sums of programs that share them."""
    rows = ready.rows
    return torch.empty(tiles.splits, rows.shape[0], columns, dtype=torch.float32, device=rows.device)


def cut_for_one(k: int, tiles: Tiles, paired: bool) -> dict[str, Any]:
    """What a product of one row has to be compiled for. Held weights are shared out to the warps by columns."""
    return {
        "K": k, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.stages,
        "WARPS": tiles.warps if tiles.stages == 0 else 0, "AHEAD": ahead(k, tiles, paired),
    }  # fmt: skip


def cut(ready: Prepared, tiles: Tiles, paired: bool) -> dict[str, Any]:
    """What a product by matrix units has to be compiled for. Where the sums are shared, whoever joins them scales them.
    Held weights are shared out to the warps."""
    k = ready.rows.shape[1]
    each = triton.cdiv(k, tiles.block_k * tiles.splits) * tiles.block_k
    last = k - each * (tiles.splits - 1)  # the shortest
    return {
        "SHARES": tiles.warps if tiles.stages == 0 else 0,
        "K": k, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.stages,
        "SPLITS": tiles.splits, "EACH": each, "AHEAD": ahead(last, tiles, paired),
        "BLOCKS": ready.blocks if tiles.splits == 1 else 0,
        "PRECISION": "ieee" if ready.rows.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def ahead(k: int, tiles: Tiles, paired: bool) -> int:
    """How much of each of its weight rows a program asks for early, where it has `k` numbers of them."""
    return max(0, min(k, FETCHED // (tiles.block_n * (2 if paired else 1))))


def launch_options(tiles: Tiles, early: bool) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": max(1, tiles.stages), **early_launch(early)}

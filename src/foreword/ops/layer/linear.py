"""Linear layers for the 1 to about 256 rows of a decoding pass, with gate, bias, residual and RMSNorm in the kernel.

A norm multiplies rows by its weight and rounds them; the sums are divided by the row's RMS at the end. With matrix units the
previous product delivers rows multiplied already, and their squares (`Prescaled`); otherwise a separate kernel does. All
variants round in the same places, so a row's result does not depend on other rows but for the order of sums, which is fixed.
Weights and residual must be older than the previous kernel: they are loaded while it still runs. Safe to capture. tiles.py
has the tile sizes, measured by `studies/linear_tiles.py` and `studies/linear_tiles_in_passes.py`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.ops.layer.overlap import early_launch, overlaps, take_turn
from foreword.ops.layer.sums import columns_by_warp, few_rows_sums, load_early, norm_scale, one_row_sums, sum_splits
from foreword.ops.layer.tiles import Kind, Tiles, fit_to_dtype, tiles_for

Norm = tuple[Tensor, float]  # weight [K] and epsilon of an RMSNorm

MOST_PREFETCHED = 2**15  # numbers that a waiting program prefetches: those it needs first, at most 16 requests per thread

# A row times a norm's weight may overflow or underflow these types before it is divided by its RMS. So rows are normalised
# before they are rounded; the norm is a separate kernel, or reads its row twice; and no product prescales rows.
NORMED_FIRST = (torch.float16,)


@triton.jit
def _store(
    value, up, added, bias, out, row, column, inside, columns, GATED: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    """Apply what follows the product, store, and return what was stored. `row` and `column` broadcast to `value`."""
    if BIASED:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            up += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)
        value = value * tl.sigmoid(value) * up
    value = (value + added).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, value, mask=inside)
    return value


@triton.jit
def _store_prescaled(stored, factor, prescaled, row, column, inside, columns, AXIS: tl.constexpr):
    """Store the result times the next norm's weight in `prescaled`; return its sums of squares over the columns."""
    wide = stored.to(tl.float32)
    tl.store(prescaled + row * columns + column, (wide * factor).to(prescaled.dtype.element_ty), mask=inside)
    return tl.sum(tl.where(inside, wide * wide, 0.0), AXIS)


@triton.jit
def _residual(residual, row, column, inside, columns, ADDED: tl.constexpr):
    """Load the residual before the kernel's turn, since it is older than the rows: then it is ready when the product is."""
    return tl.load(residual + row * columns + column, mask=inside, other=0.0).to(tl.float32) if ADDED else 0.0


@triton.jit
def _one_row(
    rows, weight, bias, residual, norm, out, columns, epsilon,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row by BLOCK_N columns."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    per_column: tl.constexpr = 2 if GATED else 1
    column_in_block, which = columns_by_warp(BLOCK_N, per_column, WARPS)
    weight_row = tl.minimum(tl.program_id(1) * BLOCK_N + column_in_block, columns - 1) + which * columns
    weight_rows = weight + weight_row.to(tl.int64) * K
    added = _residual(residual, row, column, column < columns, columns, ADDED)
    preloaded = load_early(weight_rows, K, WARPS, PREFETCHED, EARLY)
    value, up = one_row_sums(
        rows + row * K, weight_rows, preloaded, norm, epsilon, K, BLOCK_N, per_column, WARPS, BLOCK_K, STAGES, NORM
    )  # fmt: skip
    _store(value, up, added, bias, out, row, column, column < columns, columns, GATED, BIASED)


@triton.jit(do_not_specialize=["count"])
def _few_rows(
    rows, weight, bias, residual, norm, out, next_norm, prescaled, squares, partial, count, columns, epsilon,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_K: tl.constexpr, PREFETCHED: tl.constexpr, SHARES: tl.constexpr, GATED: tl.constexpr,
    BLOCKS: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, PRESCALES: tl.constexpr, EARLY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply BLOCK_M rows by BLOCK_N columns; with SPLITS > 1, store one of SPLITS partial sums in `partial`."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * SPLIT_K
    per_column: tl.constexpr = 2 if GATED else 1
    index = tl.arange(0, per_column * BLOCK_N)  # each column of the gate, followed by that of up
    weight_row = tl.minimum(block * BLOCK_N + index // per_column, columns - 1) + index % per_column * columns
    weight_rows = weight + weight_row.to(tl.int64) * K + first
    factor = (
        tl.load(next_norm + tl.minimum(column, columns - 1)).to(tl.float32)[None, :] if PRESCALES and SPLITS == 1 else 0.0
    )
    inside = (row < count)[:, None] & (column < columns)[None, :]
    added = _residual(residual, row[:, None], column[None, :], inside, columns, ADDED and SPLITS == 1)
    preloaded = load_early(weight_rows, K, SHARES, PREFETCHED, EARLY)
    real = tl.minimum(row, count - 1)
    value, up = few_rows_sums(
        rows + real * K + first, weight_rows, preloaded, norm, row, count, K - first, epsilon,
        K, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SHARES, K != SPLITS * SPLIT_K, GATED, BLOCKS, PRECISION,
    )  # fmt: skip
    if SPLITS > 1:
        partial_row = split * count + row
        tl.store(partial + partial_row[:, None].to(tl.int64) * columns + column[None, :], value, mask=inside)
    else:
        stored = _store(value, up, added, bias, out, row[:, None], column[None, :], inside, columns, GATED, BIASED)
        if PRESCALES:
            row_squares = _store_prescaled(stored, factor, prescaled, row[:, None], column[None, :], inside, columns, 1)
            tl.store(squares + block * count + row, row_squares, mask=row < count)


@triton.jit(do_not_specialize=["count"])
def _finish_splits(
    partial, bias, residual, norm, out, next_norm, prescaled, squares, count, columns, epsilon,
    K: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, PRESCALES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < columns
    factor = tl.load(next_norm + column, mask=inside, other=0.0).to(tl.float32) if PRESCALES else 0.0
    take_turn(EARLY)
    added = _residual(residual, row, column, inside, columns, ADDED)
    scale = norm_scale(norm, row, count, epsilon, K, BLOCKS)
    value = sum_splits(partial, row, column, inside, count, columns, SPLITS) * scale
    stored = _store(value, value, added, bias, out, row, column, inside, columns, False, BIASED)
    if PRESCALES:
        tl.store(squares + block * count + row, _store_prescaled(stored, factor, prescaled, row, column, inside, columns, 0))


@triton.jit
def _norm(
    rows, weight, out, squares, epsilon, K: tl.constexpr, BLOCK_K: tl.constexpr, FIRST: tl.constexpr, EARLY: tl.constexpr
) -> None:  # fmt: skip
    """RMSNorm of one row if FIRST; otherwise multiply by its weight only, and store the sum of squares for the division."""
    index = tl.arange(0, BLOCK_K)
    inside = index < K
    factor = tl.load(weight + index, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    take_turn(EARLY)
    row = tl.program_id(0)
    x = tl.load(rows + row * K + index, mask=inside, other=0.0).to(tl.float32)
    square_sum = tl.sum(x * x, 0)
    if FIRST:
        factor *= tl.rsqrt(square_sum / K + epsilon)
    else:
        tl.store(squares + row, square_sum)
    tl.store(out + row * K + index, (x * factor).to(out.dtype.element_ty), mask=inside)


class Prescaled(NamedTuple):
    """Rows halfway through an RMSNorm: multiplied by its weight and rounded, not yet divided by their RMS."""

    source: Tensor  # [.., K] the rows before the norm; the rest is valid for this very tensor only
    rows: Tensor  # [count, K]
    squares: Tensor  # [blocks, count] sums of squares of `source`, each over a block of columns


def few_rows_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    prescaled: Prescaled | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return norm(rows) @ weight.T + bias + residual: rows [.., K] and weight [N, K] give [.., N].

    `gated`: the weight is [2N, K], gate above up, and the result is silu(gate) * up. `prescaled` saves the norm's kernel if
    it was made for this norm from these very rows.
    """
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    tiles = _tiles(rows, weight, tiles, "gated" if gated else "plain")
    assert not (gated and tiles.splits > 1)
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    if out.numel():
        operands = _Operands.of(out, weight, bias, residual, None, None)
        _launch(prepare(rows, norm, prescaled, tiles), operands, tiles, gated)
    return out


def linear_and_prescale(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    next_norm: Tensor,
    *,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Prescaled | None]:
    """Return rows @ weight.T + bias + residual [.., N], and the same prescaled for the next norm, of weight `next_norm` [N].

    Products of one row and in float16 return None for the latter: the norm would not use it.
    """
    tiles = _tiles(rows, weight, tiles, "plain")
    out = torch.empty(*rows.shape[:-1], weight.shape[0], dtype=rows.dtype, device=rows.device)
    if not out.numel():
        return out, None
    prescales = tiles.block_m > 1 and rows.dtype not in NORMED_FIRST
    prescaled = _prescaled_buffers(out, tiles) if prescales else None
    operands = _Operands.of(out, weight, bias, residual, next_norm, prescaled)
    _launch(prepare(rows, None, None, tiles), operands, tiles, gated=False)
    return out, prescaled


def _tiles(rows: Tensor, weight: Tensor, tiles: Tiles | None, kind: Kind) -> Tiles:
    assert weight.is_contiguous()
    tall, k = weight.shape
    return fit_to_dtype(tiles or tiles_for(rows.numel() // k, tall // 2 if kind == "gated" else tall, k, kind), rows.dtype)


def _prescaled_buffers(out: Tensor, tiles: Tiles) -> Prescaled:
    columns = out.shape[-1]
    count = out.numel() // columns
    blocks = triton.cdiv(columns, _summed_at_once(columns) if tiles.splits > 1 else tiles.block_n)
    squares = torch.empty(blocks, count, dtype=torch.float32, device=out.device)
    return Prescaled(out, torch.empty(count, columns, dtype=out.dtype, device=out.device), squares)


def _summed_at_once(columns: int) -> int:
    return min(512, triton.next_power_of_2(columns))


class Prepared(NamedTuple):
    """Rows [count, K] as a product reads them, and the part of the norm that the product does."""

    rows: Tensor
    norm: Tensor  # its weight; for prescaled rows their squares [blocks, count]
    epsilon: float
    kind: Literal["", "first", "inside", "prescaled"]  # NORM of the one-row kernels

    @property
    def blocks(self) -> int:
        return self.norm.shape[0] if self.kind == "prescaled" else 0


def prepare(rows: Tensor, norm: Norm | None, prescaled: Prescaled | None, tiles: Tiles) -> Prepared:
    """Prepare rows for a product: launch the norm where it is a separate kernel."""
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    if norm is None:
        return Prepared(flat, flat, 0.0, "")
    weight, epsilon = norm
    first = rows.dtype in NORMED_FIRST
    if tiles.block_m == 1:
        return Prepared(flat, weight, epsilon, "first" if first else "inside")
    if prescaled is None or prescaled.source is not rows:
        prescaled = _normed(flat, weight, epsilon, first)
    return Prepared(prescaled.rows, prescaled.squares, epsilon, "" if first else "prescaled")


def _normed(rows: Tensor, weight: Tensor, epsilon: float, first: bool) -> Prescaled:
    count, k = rows.shape
    out, early = torch.empty_like(rows), overlaps(rows.device)
    squares = torch.empty(1, count, dtype=torch.float32, device=rows.device)
    _norm[(count,)](
        rows, weight, out, squares, epsilon,
        K=k, BLOCK_K=triton.next_power_of_2(k), FIRST=first, EARLY=early, num_warps=4, **early_launch(early),
    )  # fmt: skip
    return Prescaled(rows, out, squares)


class _Operands(NamedTuple):
    """The tensors that a product reads and writes besides its rows; `out` is a placeholder for those that are absent."""

    weight: Tensor
    bias: Tensor
    residual: Tensor
    out: Tensor
    next_norm: Tensor
    prescaled: Tensor
    squares: Tensor
    flags: dict[str, bool]

    @staticmethod
    def of(
        out: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        next_norm: Tensor | None,
        buffers: Prescaled | None,
    ) -> _Operands:
        flags = {"BIASED": bias is not None, "ADDED": residual is not None, "EARLY": overlaps(out.device)}
        prescale_buffers = (out, out) if buffers is None else (buffers.rows, buffers.squares)
        tensors = [out if tensor is None else tensor.contiguous() for tensor in (bias, residual, next_norm)]
        return _Operands(
            weight, tensors[0], tensors[1], out, tensors[2], *prescale_buffers, flags | {"PRESCALES": buffers is not None}
        )


def _launch(prepared: Prepared, operands: _Operands, tiles: Tiles, gated: bool) -> None:
    (_launch_one if tiles.block_m == 1 else _launch_few)(prepared, operands, tiles, gated)


def _launch_one(prepared: Prepared, operands: _Operands, tiles: Tiles, gated: bool) -> None:
    (count, k), columns = prepared.rows.shape, operands.out.shape[-1]
    flags = {name: operands.flags[name] for name in ("BIASED", "ADDED", "EARLY")}
    _one_row[(count, triton.cdiv(columns, tiles.block_n))](
        prepared.rows, operands.weight, operands.bias, operands.residual, prepared.norm, operands.out, columns,
        prepared.epsilon, GATED=gated, NORM=prepared.kind, **constants_for_one_row(k, tiles, gated), **flags,
        **launch_options(tiles, flags["EARLY"]),
    )  # fmt: skip


def _launch_few(prepared: Prepared, operands: _Operands, tiles: Tiles, gated: bool) -> None:
    (count, k), columns, flags = prepared.rows.shape, operands.out.shape[-1], operands.flags
    partial = partial_sums(prepared, columns, tiles) if tiles.splits > 1 else operands.out
    shared = (
        operands.bias,
        operands.residual,
        prepared.norm,
        operands.out,
        operands.next_norm,
        operands.prescaled,
        operands.squares,
    )
    blocks = triton.cdiv(count, tiles.block_m), triton.cdiv(columns, tiles.block_n), tiles.splits
    _few_rows[blocks](
        prepared.rows, operands.weight, *shared, partial, count, columns, prepared.epsilon,
        GATED=gated, **constants(prepared, tiles, gated), **flags, **launch_options(tiles, flags["EARLY"]),
    )  # fmt: skip
    if tiles.splits > 1:
        block = _summed_at_once(columns)
        _finish_splits[(count, triton.cdiv(columns, block))](
            partial, *shared, count, columns, prepared.epsilon,
            K=k, BLOCK_N=block, SPLITS=tiles.splits, BLOCKS=prepared.blocks, **flags,
            num_warps=4, num_stages=1, **early_launch(flags["EARLY"]),
        )  # fmt: skip


def partial_sums(prepared: Prepared, columns: int, tiles: Tiles) -> Tensor:
    """Return a buffer for the partial sums of programs that share a sum."""
    rows = prepared.rows
    return torch.empty(tiles.splits, rows.shape[0], columns, dtype=torch.float32, device=rows.device)


def constants_for_one_row(k: int, tiles: Tiles, paired: bool) -> dict[str, Any]:
    """Return the compile-time constants of a one-row product. Preloaded weights are distributed to the warps by columns."""
    return {
        "K": k, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.stages,
        "WARPS": tiles.warps if tiles.stages == 0 else 0, "PREFETCHED": prefetch_count(k, tiles, paired),
    }  # fmt: skip


def constants(prepared: Prepared, tiles: Tiles, paired: bool) -> dict[str, Any]:
    """Return the compile-time constants of a product on matrix units. If programs share sums, the kernel that adds them
    scales them. Preloaded weights are distributed over the warps by shares of K."""
    k = prepared.rows.shape[1]
    split_k = triton.cdiv(k, tiles.block_k * tiles.splits) * tiles.block_k
    last = k - split_k * (tiles.splits - 1)  # the shortest
    return {
        "SHARES": tiles.warps if tiles.stages == 0 else 0,
        "K": k, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.stages,
        "SPLITS": tiles.splits, "SPLIT_K": split_k, "PREFETCHED": prefetch_count(last, tiles, paired),
        "BLOCKS": prepared.blocks if tiles.splits == 1 else 0,
        "PRECISION": "ieee" if prepared.rows.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def prefetch_count(k: int, tiles: Tiles, paired: bool) -> int:
    """Return how many numbers of each weight row a program prefetches, if it reads `k` of each."""
    return max(0, min(k, MOST_PREFETCHED // (tiles.block_n * (2 if paired else 1))))


def launch_options(tiles: Tiles, early: bool) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": max(1, tiles.stages), **early_launch(early)}

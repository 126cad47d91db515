"""Products of a few rows with a weight matrix, as a decoding pass makes them: every weight is read once.

In: 1 to about 128 rows. The gate after a product, bias and residual are part of the same kernel, and so is the RMSNorm
before it where there is one row, which is multiplied and summed. More rows go through the matrix units, which want them as
they are: there the norm is a kernel of its own. Both round in the same places, so a row comes out the same alone and among
others, but for the order of sums. Sums are float32 and in a fixed order: the same call gives the same bits. Safe to capture.
How a product is cut is a matter of measuring: `python -m foreword.bench.linears` does it, `TUNED` holds what it found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.overlap import fetch, let_next_start, overlaps, wait_for_previous

PROGRAMS = 2 * 132  # two for every multiprocessor of a large GPU
BUCKETS = (1, 16, 64)  # row counts that are measured; more rows than these run as several blocks
FETCHED = 2**15  # numbers that a program asks for while it waits: what it needs first, and no more than 16 requests a thread


@dataclass(frozen=True)
class Tiles:
    """A program takes `block_m` rows (1: no matrix unit) and `block_n` columns, `block_k` numbers of each at a time.

    `stages` of them are on their way at once. With `splits` > 1 that many programs share the sum, and a second kernel
    adds their parts in order: for products with few columns and long sums.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1


# (bucket, columns, k, gated) -> what the sweep found on an H200 in bfloat16.
TUNED: dict[tuple[int, int, int, bool], Tiles] = {
    (1, 960, 576, False): Tiles(1, 8, 1024, warps=2, stages=1),
    (16, 960, 576, False): Tiles(16, 16, 64, warps=4, stages=6),
    (64, 960, 576, False): Tiles(64, 32, 64, warps=4, stages=6),
    (1, 576, 576, False): Tiles(1, 4, 256, warps=4, stages=3),
    (16, 576, 576, False): Tiles(16, 16, 128, warps=2, stages=5),
    (64, 576, 576, False): Tiles(64, 32, 64, warps=4, stages=6),
    (1, 1536, 576, True): Tiles(1, 2, 1024, warps=4, stages=1),
    (16, 1536, 576, True): Tiles(16, 16, 64, warps=2, stages=6),
    (64, 1536, 576, True): Tiles(64, 16, 128, warps=4, stages=4),
    (1, 576, 1536, False): Tiles(1, 2, 2048, warps=2, stages=1),
    (16, 576, 1536, False): Tiles(16, 32, 64, warps=2, stages=6, splits=2),
    (64, 576, 1536, False): Tiles(64, 16, 64, warps=4, stages=6),
    (1, 6144, 4096, False): Tiles(1, 16, 512, warps=4, stages=1),
    (16, 6144, 4096, False): Tiles(16, 128, 64, warps=4, stages=5, splits=4),
    (64, 6144, 4096, False): Tiles(64, 128, 64, warps=4, stages=4, splits=4),
    (1, 4096, 4096, False): Tiles(1, 16, 512, warps=8, stages=1),
    (16, 4096, 4096, False): Tiles(16, 64, 128, warps=4, stages=5, splits=4),
    (64, 4096, 4096, False): Tiles(64, 32, 128, warps=4, stages=6),
    (1, 14336, 4096, True): Tiles(1, 8, 1024, warps=4, stages=3),
    (16, 14336, 4096, True): Tiles(16, 64, 64, warps=4, stages=5),
    (64, 14336, 4096, True): Tiles(64, 128, 64, warps=8, stages=4),
    (1, 4096, 14336, False): Tiles(1, 16, 512, warps=8, stages=1),
    (16, 4096, 14336, False): Tiles(16, 64, 128, warps=4, stages=5, splits=4),
    (64, 4096, 14336, False): Tiles(64, 32, 128, warps=4, stages=6),
}


def tiles_for(rows: int, n: int, k: int, gated: bool) -> Tiles:
    """How to cut `rows` x `k` times `n` columns (of the gate alone where gated)."""
    bucket = next((size for size in BUCKETS if rows <= size), BUCKETS[-1])
    tiles = TUNED.get((bucket, n, k, gated))
    if tiles is None:
        tiles = _tiles_for_one(n, k, gated) if bucket == 1 else _tiles_for_few(bucket, n, k, gated)
    return replace(tiles, block_m=min(tiles.block_m, max(16, triton.next_power_of_2(rows))))


def _tiles_for_one(n: int, k: int, gated: bool) -> Tiles:
    """Many small programs; a short sum in one go, a long one in steps of 16 KiB."""
    width = next((size for size in (16, 8, 4) if n // size >= PROGRAMS), 4)
    if k <= 2048:
        return Tiles(1, width, max(triton.next_power_of_2(k), 128), warps=4, stages=1)
    width = min(width, 8) if gated else width
    return Tiles(1, width, 512 if gated or width > 8 else 1024, warps=4, stages=1)


def _tiles_for_few(bucket: int, n: int, k: int, gated: bool) -> Tiles:
    """Every program reads all of its rows, so a large product wants wide programs, and a small one few rows in each."""
    depth = 128 if k >= 128 else max(16, triton.next_power_of_2(k))
    if n * k <= 2**22:
        return Tiles(16 if k > 1024 else min(bucket, 32), 16, depth, warps=4, stages=5)
    width = 64 if bucket == 64 else 32
    width = width // 2 if gated else width
    splits = 1 if gated else min(8, PROGRAMS // triton.cdiv(n, width), k // 1024)
    return Tiles(bucket, width, depth, warps=4, stages=4 if bucket == 64 else 5, splits=max(1, splits))


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
def _one_row(
    rows, weight, bias, residual, norm, out, columns, epsilon,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    GATED: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One row times BLOCK_N columns: products are summed where they lie, and across only at the end."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = tl.minimum(column, columns - 1).to(tl.int64)  # instead of a mask
    lines = weight + real * K
    above = tl.cast(columns, tl.int64) * K  # from a row of the gate to that of up
    if EARLY:
        let_next_start()
        fetch(lines, AHEAD)
        if GATED:
            fetch(lines + above, AHEAD)
        wait_for_previous()
    added = _residual(residual, row, column, column < columns, columns, ADDED)
    masked: tl.constexpr = K % BLOCK_K != 0
    wide = tl.arange(0, BLOCK_K)
    scale = 1.0
    if NORMED:
        squares = tl.zeros([BLOCK_K], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            x = _load(rows + row * K + start + wide, start + wide < K, masked, "evict_last").to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
    value = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = start + wide
        here = at < K
        w = _load(lines[:, None] + at[None, :], here[None, :], masked, "evict_first").to(tl.float32)
        x = _load(rows + row * K + at, here, masked, "evict_last").to(tl.float32)
        if NORMED:  # rounded as `_norm` rounds it, so that a row gives the same alone and among others
            x *= scale * _load(norm + at, here, masked, "evict_last").to(tl.float32)
            x = x.to(rows.dtype.element_ty).to(tl.float32)
        value += w * x[None, :]
        if GATED:
            u = _load(lines[:, None] + above + at[None, :], here[None, :], masked, "evict_first").to(tl.float32)
            up += u * x[None, :]
    total, other = tl.sum(value, 1), tl.sum(up, 1)
    _store(total, other, added, bias, out, row, column, column < columns, columns, GATED, BIASED)


@triton.jit(do_not_specialize=["count"])
def _few_rows(
    rows, weight, bias, residual, out, part, count, columns,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, AHEAD: tl.constexpr, GATED: tl.constexpr,
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
        let_next_start()
        fetch(lines, AHEAD)
        if GATED:
            fetch(lines + above, AHEAD)
        wait_for_previous()
    inside = (row < count)[:, None] & (column < columns)[None, :]
    added = _residual(residual, row[:, None], column[None, :], inside, columns, ADDED and SPLITS == 1)
    masked: tl.constexpr = K != SPLITS * EACH
    places = rows + tl.minimum(row, count - 1) * K + first
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, EACH, BLOCK_K, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK_K)
        here = at < K - first
        x = _load(places[:, None] + at[None, :], here[None, :], masked, "evict_last")
        w = _load(lines[:, None] + at[None, :], here[None, :], masked, "evict_first")
        value = tl.dot(x, tl.trans(w), value, input_precision=PRECISION)
        if GATED:
            u = _load(lines[:, None] + above + at[None, :], here[None, :], masked, "evict_first")
            up = tl.dot(x, tl.trans(u), up, input_precision=PRECISION)
    if SPLITS > 1:
        line = split * count + row
        tl.store(part + line[:, None].to(tl.int64) * columns + column[None, :], value, mask=inside)
    else:
        _store(value, up, added, bias, out, row[:, None], column[None, :], inside, columns, GATED, BIASED)


@triton.jit(do_not_specialize=["count"])
def _join(
    part, bias, residual, out, count, columns,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """The parts of one row's sums, added in order."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = column < columns
    added = _residual(residual, row, column, here, columns, ADDED)
    value = tl.zeros([BLOCK_N], tl.float32)
    for split in tl.static_range(SPLITS):
        line = split * count + row
        value += tl.load(part + line.to(tl.int64) * columns + column, mask=here, other=0.0)
    _store(value, value, added, bias, out, row, column, here, columns, False, BIASED)


@triton.jit
def _norm(rows, weight, out, epsilon, K: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr) -> None:
    """RMSNorm of one row."""
    at = tl.arange(0, BLOCK_K)
    here = at < K
    scale = tl.load(weight + at, mask=here, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if EARLY:
        let_next_start()
        wait_for_previous()
    place = tl.program_id(0) * K + at
    x = tl.load(rows + place, mask=here, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / K + epsilon) * scale
    tl.store(out + place, x.to(out.dtype.element_ty), mask=here)


def few_rows_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Rows [.., K] times weight [N, K]: norm(rows) @ weight.T + bias + residual, [.., N].

    `norm` is the weight [K] and the epsilon of an RMSNorm. `gated`: the weight is [2N, K], gate above up, and what is
    given back is silu(gate) * up.
    """
    k = weight.shape[1]
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    flat = rows.reshape(-1, k).contiguous()
    tiles = _fitting(tiles or tiles_for(flat.shape[0], columns, k, gated), rows.dtype)
    assert weight.is_contiguous() and not (gated and tiles.splits > 1)
    out = torch.empty(*rows.shape[:-1], columns, dtype=rows.dtype, device=rows.device)
    if not flat.shape[0]:
        return out
    early = overlaps(rows.device)
    given = _Given(flat, weight, out if bias is None else bias, out if residual is None else residual.contiguous(), out)
    flags = {"GATED": gated, "BIASED": bias is not None, "ADDED": residual is not None, "EARLY": early}
    options: dict[str, Any] = {
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **({"launch_pdl": True} if early else {}),
    }
    if tiles.block_m == 1:
        _launch_one(given, norm, columns, tiles, flags, options)
    else:
        given = given if norm is None else given._replace(rows=normed(flat, *norm))
        _launch_few(given, columns, tiles, flags, options)
    return out


def normed(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of rows [m, K]."""
    count, k = rows.shape
    out, early = torch.empty_like(rows), overlaps(rows.device)
    options: dict[str, Any] = {"num_warps": 4} | ({"launch_pdl": True} if early else {})
    _norm[(count,)](rows, weight, out, epsilon, K=k, BLOCK_K=triton.next_power_of_2(k), EARLY=early, **options)
    return out


class _Given(NamedTuple):
    """What a product reads and writes; where there is no bias or residual, `out` stands in for it and is not read."""

    rows: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor
    out: Tensor


def _launch_one(
    given: _Given,
    norm: tuple[Tensor, float] | None,
    columns: int,
    tiles: Tiles,
    flags: dict[str, bool],
    options: dict[str, Any],
) -> None:
    count, k = given.rows.shape
    scale, epsilon = norm or (given.out, 0.0)
    ahead = _ahead(k, tiles, flags)
    _one_row[(count, triton.cdiv(columns, tiles.block_n))](
        given.rows, given.weight, given.bias, given.residual, scale, given.out, columns, epsilon,
        K=k, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages, AHEAD=ahead,
        NORMED=norm is not None, **flags, **options,
    )  # fmt: skip


def _launch_few(given: _Given, columns: int, tiles: Tiles, flags: dict[str, bool], options: dict[str, Any]) -> None:
    count, k = given.rows.shape
    precision = "ieee" if given.rows.dtype == torch.float32 else "tf32"
    part = given.out
    if tiles.splits > 1:
        part = torch.empty(tiles.splits, count, columns, dtype=torch.float32, device=part.device)
    blocks = triton.cdiv(count, tiles.block_m), triton.cdiv(columns, tiles.block_n), tiles.splits
    each = triton.cdiv(k, tiles.block_k * tiles.splits) * tiles.block_k
    ahead = _ahead(k - each * (tiles.splits - 1), tiles, flags)  # the last split is the shortest
    _few_rows[blocks](
        *given, part, count, columns,
        K=k, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages,
        SPLITS=tiles.splits, EACH=each, AHEAD=ahead, PRECISION=precision, **flags, **options,
    )  # fmt: skip
    if tiles.splits > 1:
        wide = min(512, triton.next_power_of_2(columns))
        _join[(count, triton.cdiv(columns, wide))](
            part, given.bias, given.residual, given.out, count, columns,
            BLOCK_N=wide, SPLITS=tiles.splits, BIASED=flags["BIASED"], ADDED=flags["ADDED"], EARLY=flags["EARLY"],
            **{**options, "num_warps": 4, "num_stages": 1},
        )  # fmt: skip


def _ahead(k: int, tiles: Tiles, flags: dict[str, bool]) -> int:
    """How much of each of its weight rows a program asks for early, where it has `k` numbers of them."""
    return max(0, min(k, FETCHED // (tiles.block_n * (2 if flags["GATED"] else 1))))


def _fitting(tiles: Tiles, dtype: torch.dtype) -> Tiles:
    """Tiles are meant for half precision; numbers twice as long come half as many at a time."""
    return tiles if dtype.itemsize <= 2 else replace(tiles, block_k=max(16, tiles.block_k // 2))

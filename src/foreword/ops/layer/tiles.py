"""How a product of few rows is split into programs, by its size and kind: measured where possible, estimated elsewhere.

`python studies/linear_tiles.py` measures on a CUDA device and prints lines for `TUNED`. Tiles decide speed and the order of
sums, never where numbers are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

Kind = Literal["plain", "gated", "turned", "coarse"]
"""Gated and turned products take columns in pairs: gate and up, or the two halves of a head. Turned: q, k and v with rotary
embeddings. Coarse: int8 weights. Results of studies record these names."""

PROGRAMS = 2 * 132  # two per multiprocessor of a large GPU
BUCKETS = (1, 2, 16, 32, 64)  # measured row counts; more rows run as several blocks
ONE_BY_ONE = 2  # rows up to which no matrix units are faster: further rows read the weights from the L2 cache


@dataclass(frozen=True)
class Tiles:
    """A program takes `block_m` rows (1: no matrix unit) and `block_n` columns or pairs, `block_k` numbers at a time.

    `stages` of these blocks are in flight at once. With 0 stages a program preloads all its weights before the rows are
    ready, whatever `block_k` is. With `splits` > 1 that many programs share the sum, and a second kernel adds their partial
    sums in order: for products with few columns and long sums.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1

    def __post_init__(self) -> None:
        assert self.stages or self.splits == 1, f"{self}: preloaded weights (stages=0) need splits=1"
        assert self.stages or self.block_m > 1 or self.block_n >= self.warps, f"{self}: every warp needs a column of its own"


# (bucket, columns out, k, kind) -> the best tiles on an H200 in bfloat16. The first nineteen are the default model's,
# measured inside whole passes except for the plain 960. The turned ones of 6144 columns follow from the plain ones.
TUNED: dict[tuple[int, int, int, Kind], Tiles] = {
    (1, 960, 576, "plain"): Tiles(1, 8, 1024, warps=2, stages=1),
    (16, 960, 576, "plain"): Tiles(16, 16, 64, warps=4, stages=6),
    (64, 960, 576, "plain"): Tiles(64, 32, 64, warps=4, stages=6),
    (1, 960, 576, "turned"): Tiles(1, 8, 1024, warps=8, stages=0),
    (16, 960, 576, "turned"): Tiles(16, 16, 64, warps=8, stages=0),
    (32, 960, 576, "turned"): Tiles(16, 16, 64, warps=8, stages=0),
    (64, 960, 576, "turned"): Tiles(32, 16, 64, warps=8, stages=0),
    (1, 576, 576, "plain"): Tiles(1, 4, 1024, warps=4, stages=0),
    (16, 576, 576, "plain"): Tiles(16, 16, 64, warps=4, stages=0),
    (32, 576, 576, "plain"): Tiles(16, 16, 64, warps=4, stages=0),
    (64, 576, 576, "plain"): Tiles(64, 16, 64, warps=4, stages=6),
    (1, 1536, 576, "gated"): Tiles(1, 8, 1024, warps=4, stages=0),
    (16, 1536, 576, "gated"): Tiles(16, 16, 64, warps=4, stages=10),
    (32, 1536, 576, "gated"): Tiles(32, 32, 64, warps=4, stages=8),
    (64, 1536, 576, "gated"): Tiles(64, 16, 128, warps=4, stages=4),
    (1, 576, 1536, "plain"): Tiles(1, 2, 2048, warps=1, stages=0),
    (16, 576, 1536, "plain"): Tiles(16, 16, 64, warps=8, stages=0),
    (32, 576, 1536, "plain"): Tiles(16, 16, 64, warps=8, stages=0),
    (64, 576, 1536, "plain"): Tiles(64, 16, 128, warps=4, stages=4),
    (1, 6144, 4096, "plain"): Tiles(1, 16, 512, warps=4, stages=1),
    (16, 6144, 4096, "plain"): Tiles(16, 128, 64, warps=4, stages=5, splits=4),
    (64, 6144, 4096, "plain"): Tiles(64, 128, 64, warps=4, stages=4, splits=4),
    (1, 6144, 4096, "turned"): Tiles(1, 8, 512, warps=4, stages=1),
    (16, 6144, 4096, "turned"): Tiles(16, 64, 64, warps=4, stages=5, splits=4),
    (64, 6144, 4096, "turned"): Tiles(64, 64, 64, warps=4, stages=4, splits=4),
    (1, 4096, 4096, "plain"): Tiles(1, 16, 512, warps=8, stages=1),
    (16, 4096, 4096, "plain"): Tiles(16, 64, 128, warps=4, stages=5, splits=4),
    (64, 4096, 4096, "plain"): Tiles(64, 32, 128, warps=4, stages=6),
    (1, 14336, 4096, "gated"): Tiles(1, 8, 1024, warps=4, stages=3),
    (16, 14336, 4096, "gated"): Tiles(16, 64, 64, warps=4, stages=5),
    (64, 14336, 4096, "gated"): Tiles(64, 128, 64, warps=8, stages=4),
    (1, 4096, 14336, "plain"): Tiles(1, 16, 512, warps=8, stages=1),
    (16, 4096, 14336, "plain"): Tiles(16, 64, 128, warps=4, stages=5, splits=4),
    (64, 4096, 14336, "plain"): Tiles(64, 32, 128, warps=4, stages=6),
    (1, 7680, 4608, "turned"): Tiles(1, 8, 512, warps=8, stages=1),
    (1, 4608, 4608, "plain"): Tiles(1, 16, 512, warps=4, stages=1),
    (1, 12288, 4608, "gated"): Tiles(1, 8, 1024, warps=4, stages=3),
    (1, 4608, 12288, "plain"): Tiles(1, 8, 1024, warps=8, stages=1),
    (16, 49152, 576, "coarse"): Tiles(16, 64, 64, warps=4, stages=0),
    (16, 576, 576, "coarse"): Tiles(16, 16, 64, warps=4, stages=0),
    (16, 576, 1152, "coarse"): Tiles(16, 16, 128, warps=2, stages=5),
    (16, 49152, 4608, "coarse"): Tiles(16, 64, 128, warps=2, stages=5),
    (16, 16768, 576, "coarse"): Tiles(16, 64, 64, warps=4, stages=0),
    (16, 1728, 576, "coarse"): Tiles(16, 16, 64, warps=8, stages=0),
    (16, 16768, 4608, "coarse"): Tiles(16, 128, 256, warps=4, stages=4),
    (16, 13824, 4608, "coarse"): Tiles(16, 64, 128, warps=2, stages=5),
    (16, 4608, 4608, "coarse"): Tiles(16, 64, 256, warps=4, stages=4, splits=3),
    (16, 4608, 9216, "coarse"): Tiles(16, 64, 256, warps=4, stages=4, splits=3),
}


def tiles_for(rows: int, n: int, k: int, kind: Kind = "plain") -> Tiles:
    """Return the tiles of a product of `rows` x `k` with `n` output columns."""
    bucket = next((size for size in BUCKETS if rows <= size), BUCKETS[-1])
    tiles = TUNED.get((bucket, n, k, kind))
    if tiles is None and kind == "coarse":
        tiles = TUNED.get((16, n, k, kind)) or _tiles_for_coarse(n, k)
    if tiles is None and bucket in (2, 32):  # like the neighbouring bucket, if that was measured
        tiles = TUNED.get((1 if bucket == ONE_BY_ONE else 64, n, k, kind))
    if tiles is None:
        columns = n // 2 if kind == "turned" else n
        tiles = _tiles_for_one(columns, k, kind) if bucket <= ONE_BY_ONE else _tiles_for_few(bucket, columns, k, kind)
    return replace(tiles, block_m=min(tiles.block_m, max(16, triton.next_power_of_2(rows))))


def _tiles_for_one(n: int, k: int, kind: Kind) -> Tiles:
    """Use many small programs; take a short sum in one step, a long one in steps of 16 KiB."""
    width = next((size for size in (16, 8, 4) if n // size >= PROGRAMS), 4)
    if k <= 2048:
        return Tiles(1, width, max(triton.next_power_of_2(k), 128), warps=4, stages=1)
    paired = kind != "plain"
    width = min(width, 8) if paired else width
    return Tiles(1, width, 512 if paired or width > 8 else 1024, warps=4, stages=1)


def _tiles_for_coarse(n: int, k: int) -> Tiles:
    """Use the same tiles for any number of rows: wide programs for a vocabulary, many narrow ones for a small weight. Split
    the sums of a large weight so that every multiprocessor has something to read."""
    if n >= 2**14:
        return Tiles(32, 64 if k >= 1024 else 128, 256 if k >= 1024 else 128, warps=4, stages=4)
    if n * k <= 2**22:
        return Tiles(32, 16, 128, warps=4, stages=5)
    return Tiles(32, 64, 256, warps=4, stages=4, splits=max(1, min(4, PROGRAMS // triton.cdiv(n, 64), k // 1024)))


def _tiles_for_few(bucket: int, n: int, k: int, kind: Kind) -> Tiles:
    """Every program reads all of its rows, so a large product needs wide programs, and a small one few rows in each."""
    depth = 128 if k >= 128 else max(16, triton.next_power_of_2(k))
    if n * k <= 2**22:
        return Tiles(16 if k > 1024 else min(bucket, 32), 16, depth, warps=4, stages=5)
    width = 64 if bucket == 64 else 32
    width = width if kind == "plain" else width // 2
    splits = 1 if kind == "gated" else min(8, PROGRAMS // triton.cdiv(n, width), k // 1024)
    return Tiles(bucket, width, depth, warps=4, stages=4 if bucket == 64 else 5, splits=max(1, splits))


def fit_to_dtype(tiles: Tiles, dtype: torch.dtype) -> Tiles:
    """Tiles are meant for half precision: with longer numbers, halve `block_k` and do not preload weights."""
    return tiles if dtype.itemsize <= 2 else replace(tiles, block_k=max(16, tiles.block_k // 2), stages=tiles.stages or 5)

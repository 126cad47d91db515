"""Tiles of products: measured ones come first, and estimated ones can be launched."""

import pytest
import torch

pytest.importorskip("triton")

from foreword.ops.layer.tiles import BUCKETS, TUNED, Kind, Tiles, fit_to_dtype, tiles_for

SMALL = Tiles(16, 16, 32, warps=4, stages=2)


def test_measured_tiles_come_before_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TUNED, (16, 999, 64, "plain"), SMALL)
    assert tiles_for(9, 999, 64) == tiles_for(16, 999, 64) == SMALL
    assert SMALL not in (tiles_for(2, 999, 64), tiles_for(17, 999, 64), tiles_for(16, 999, 64, "gated"))


def test_two_rows_use_the_tiles_of_one_until_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Tiles(1, 2, 64, warps=2, stages=1)
    monkeypatch.setitem(TUNED, (1, 999, 64, "gated"), one)
    assert [tiles_for(rows, 999, 64, "gated") == one for rows in (1, 2, 3, 5)] == [True, True, False, False]
    assert tiles_for(2, 555, 64).block_m == 1
    monkeypatch.setitem(TUNED, (2, 999, 64, "gated"), SMALL)
    assert tiles_for(1, 999, 64, "gated") == one and tiles_for(2, 999, 64, "gated") == SMALL


def test_no_program_takes_more_rows_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TUNED, (64, 999, 64, "plain"), Tiles(64, 16, 32, warps=4, stages=2))
    assert [tiles_for(rows, 999, 64).block_m for rows in (17, 32, 33, 64, 100)] == [32, 32, 64, 64, 64]
    monkeypatch.setitem(TUNED, (32, 999, 64, "plain"), SMALL)
    assert [tiles_for(rows, 999, 64) == SMALL for rows in (16, 17, 32, 33)] == [False, True, True, False]


def launches(tiles: Tiles, k: int, kind: Kind) -> bool:
    sizes = tiles.block_m, tiles.block_n, tiles.block_k, tiles.warps
    lines = tiles.block_m + tiles.block_n * (1 if kind == "plain" else 2)
    numbers = lines * (tiles.stages * tiles.block_k or 2 * k)  # preloaded weights are in shares that are powers of two
    return (
        all(size > 0 and size & (size - 1) == 0 for size in sizes)
        and tiles.block_m <= BUCKETS[-1]
        and (tiles.splits == 1 or kind != "gated")
        and (tiles.block_m == 1 or (tiles.block_k >= 16 and numbers * 2 <= 220 * 1024))
        and (tiles.stages > 0 or tiles.splits == 1)
    )


@pytest.mark.parametrize("kind", ["plain", "gated", "turned"])
def test_default_tiles_can_be_launched(kind: Kind) -> None:
    sizes = [(16, 16), (960, 576), (576, 1536), (49152, 576), (4096, 14336), (14336, 4096)]
    cases = [(rows, n, k) for rows in (1, 2, 4, 16, 40, 64, 128, 2048) for n, k in sizes]
    wrong = {case: tiles for case in cases if not launches(tiles := tiles_for(*case, kind), case[2], kind)}
    assert not wrong


def test_float32_weights_are_not_preloaded() -> None:
    preloaded = Tiles(16, 16, 64, warps=4, stages=0)
    assert fit_to_dtype(preloaded, torch.bfloat16) == preloaded
    assert fit_to_dtype(preloaded, torch.float32).stages > 0 and fit_to_dtype(preloaded, torch.float32).block_k == 32

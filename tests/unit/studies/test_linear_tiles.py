"""The search over tilings: what it tries can be launched, and what it prints can be pasted."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from foreword.ops.layer.tiles import Tiles, tiles_for
from linear_tiles import PRODUCTS, ROWS, LinearTiming, LinearTrial, Product, ablations, best, grid, other_ways, tuned


@pytest.mark.parametrize("rows", ROWS)
def test_every_grid_is_small_and_can_be_launched(rows: int) -> None:
    for product in PRODUCTS:
        check_grid(product, rows)


def check_grid(product: Product, rows: int) -> None:
    tried = grid(product, rows)
    if product.kind == "coarse":
        assert bool(tried) == (rows == 16)
        assert all(tiles.stages * (32 + tiles.block_n) * tiles.block_k <= 227 * 1024 for tiles in tried)
        return
    assert tried[0] == tiles_for(rows, product.n, product.k, product.kind)
    assert 5 <= len(tried) <= 25 and len(set(tried)) == len(tried)
    for tiles in tried:
        held = (0 if tiles.block_m == 1 else tiles.block_m) + tiles.block_n * (1 if product.kind == "plain" else 2)
        assert held * tiles.block_k * 2 * max(1, tiles.stages - (tiles.block_m < 64)) <= 227 * 1024
        assert tiles.splits == 1 or product.kind != "gated"
        assert product.kind != "turned" or tiles.block_n <= product.width // 2
    assert {tiles.block_m == 1 for tiles in tried} == ({True, False} if rows <= 4 else {False})


def test_the_whole_sweep_is_bounded() -> None:
    assert sum(len(grid(product, rows)) for product in PRODUCTS for rows in ROWS) < 900


def test_the_fastest_that_worked_is_kept() -> None:
    product = PRODUCTS[0]
    slow, quick, broken = (LinearTrial(product, 16, Tiles(16, 16, size, 4, 4)) for size in (32, 64, 128))
    winners = best([LinearTiming(slow, us=3.0), LinearTiming(quick, us=2.0), LinearTiming(broken, failed="too large")])
    assert winners[product, 16].trial == quick
    assert eval(f"{{{tuned(winners)}}}") == {(16, 960, 576, "turned"): quick.tiles}


def test_ablations_are_distinguished() -> None:
    product = PRODUCTS[0]
    quick, slow = (LinearTrial(product, 16, Tiles(16, 8, 64, 4, stages)) for stages in (6, 5))
    winners = best([LinearTiming(quick, us=2.0), LinearTiming(slow, us=4.0)])
    again = ablations(winners)
    assert [(look.overlap, look.handed, look.product.normed, look.apart) for look in again] == [
        (False, True, True, False), (True, False, True, False), (True, True, False, False), (True, True, True, True)
    ]  # fmt: skip
    assert again[3].tiles == tiles_for(16, product.n, product.k)
    ablated = [LinearTiming(look, us=5.0 + number) for number, look in enumerate(again)]
    elsewhere = [LinearTiming(replace(look, rows=64), us=1.0) for look in again]
    assert other_ways(winners[product, 16], elsewhere + ablated) == [5.0, 6.0, 7.0, 8.0]
    assert other_ways(winners[product, 16], elsewhere) == [None] * 4

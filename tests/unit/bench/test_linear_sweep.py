"""The sweep over tiles: what it tries can be launched, and what it prints can be pasted."""

import pytest

pytest.importorskip("triton")

from foreword.bench.linears import PRODUCTS, ROWS, Product, Result, Trial, best, grid, second_look, tuned
from foreword.kernels.linear import Tiles, tiles_for


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: f"{product.model} {product.name}")
def test_the_grid_is_modest_and_can_be_launched(product: Product, rows: int) -> None:
    tried = grid(product, rows)
    assert tried[0] == tiles_for(rows, product.n, product.k, product.gated)
    assert 5 <= len(tried) <= 20 and len(set(tried)) == len(tried)
    for tiles in tried:
        held = (0 if tiles.block_m == 1 else tiles.block_m) + tiles.block_n * (2 if product.gated else 1)
        assert held * tiles.block_k * 2 * max(1, tiles.stages - (tiles.block_m < 64)) <= 227 * 1024
        assert tiles.splits == 1 or not product.gated


def test_the_quickest_that_worked_is_kept() -> None:
    product = PRODUCTS[0]
    slow, quick, broken = (Trial(product, 16, Tiles(16, 16, size, 4, 4)) for size in (32, 64, 128))
    winners = best([Result(slow, us=3.0), Result(quick, us=2.0), Result(broken, failed="too large")])
    assert winners[product, 16].trial == quick
    assert eval(f"{{{tuned(winners)}}}") == {(16, 960, 576, False): quick.tiles}
    assert [(trial.overlap, trial.product.normed) for trial in second_look(winners)] == [(False, True), (True, False)]

"""Products with weights of eight bits as a kernel, against torch's, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from foreword.ops.layer.tiles import Tiles
from rounds import check_coarse, check_coarse_between

HELD = Tiles(16, 16, 64, warps=4, stages=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter has no dot of bfloat16
@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 1, 16), (8, 300, 72), (33, 128, 200), (5, 130, 1024)])
def test_rows_times_eight_bits(rows: int, columns: int, k: int, dtype: torch.dtype) -> None:
    check_coarse("cpu", rows, columns, k, dtype)


@pytest.mark.parametrize("splits", [2, 3])
def test_sums_that_are_shared(splits: int) -> None:
    check_coarse("cpu", 3, 130, 200, torch.float32, Tiles(16, 32, 32, warps=4, stages=2, splits=splits))


@pytest.mark.parametrize(("rows", "columns", "k"), [(8, 300, 72), (17, 40, 576), (5, 20, 64)])
def test_weights_that_are_held(rows: int, columns: int, k: int) -> None:
    """In half precision: longer numbers are not held."""
    check_coarse("cpu", rows, columns, k, torch.float16, HELD)


@pytest.mark.parametrize("turn", [0, 16, 33])
def test_held_with_rows_beside_a_norm_before_and_what_comes_behind(turn: int) -> None:
    check_coarse_between("cpu", turn, torch.float16, HELD)


@pytest.mark.parametrize("tiles", [None, Tiles(16, 32, 32, warps=4, stages=2, splits=2)], ids=["whole", "shared"])
@pytest.mark.parametrize("turn", [0, 16, 33])
def test_rows_beside_a_norm_before_and_what_comes_behind(turn: int, tiles: Tiles | None) -> None:
    check_coarse_between("cpu", turn, torch.float32, tiles)

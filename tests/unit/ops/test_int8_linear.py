"""Int8 draft linears as a kernel, against torch, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from foreword.ops.layer.tiles import Tiles
from rounds import check_int8_epilogue, check_int8_linear

HELD = Tiles(16, 16, 64, warps=4, stages=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter has no dot of bfloat16
@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 1, 16), (8, 300, 72), (33, 128, 200), (5, 130, 1024)])
def test_rows_times_int8_weights(rows: int, columns: int, k: int, dtype: torch.dtype) -> None:
    check_int8_linear("cpu", rows, columns, k, dtype)


@pytest.mark.parametrize("splits", [2, 3])
def test_sums_shared_by_several_programs(splits: int) -> None:
    check_int8_linear("cpu", 3, 130, 200, torch.float32, Tiles(16, 32, 32, warps=4, stages=2, splits=splits))


@pytest.mark.parametrize(("rows", "columns", "k"), [(8, 300, 72), (17, 40, 576), (5, 20, 64)])
def test_preloaded_weights(rows: int, columns: int, k: int) -> None:
    """In half precision: float32 rows are not preloaded."""
    check_int8_linear("cpu", rows, columns, k, torch.float16, HELD)


@pytest.mark.parametrize("start", [0, 16, 33])
def test_preloaded_weights_with_a_second_input_a_norm_and_an_epilogue(start: int) -> None:
    check_int8_epilogue("cpu", start, torch.float16, HELD)


@pytest.mark.parametrize("tiles", [None, Tiles(16, 32, 32, warps=4, stages=2, splits=2)], ids=["whole", "shared"])
@pytest.mark.parametrize("start", [0, 16, 33])
def test_a_second_input_a_norm_and_an_epilogue(start: int, tiles: Tiles | None) -> None:
    check_int8_epilogue("cpu", start, torch.float32, tiles)

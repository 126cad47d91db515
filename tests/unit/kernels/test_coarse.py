"""Products with weights of eight bits as a kernel, against torch's, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from rounds import check_coarse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter has no dot of bfloat16
@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 1, 16), (8, 300, 72), (33, 128, 200), (5, 130, 1024)])
def test_rows_times_eight_bits(rows: int, columns: int, k: int, dtype: torch.dtype) -> None:
    check_coarse("cpu", rows, columns, k, dtype)

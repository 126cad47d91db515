"""Rows brought to a drafter's own products, against the torch operations that they stand for, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from rounds import check_carry


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("live", "count", "columns"), [(1, 1, 16), (1, 8, 72), (8, 8, 64), (3, 5, 20)])
def test_what_a_level_goes_on_from(live: int, count: int, columns: int, dtype: torch.dtype) -> None:
    check_carry(count, "cpu", live, count, columns, dtype)

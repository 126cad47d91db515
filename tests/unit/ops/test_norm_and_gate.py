"""The norm and gate kernels against torch's operations, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from rounds import check_norm_and_gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "columns"), [(1, 1), (3, 48), (2, 1500)])
def test_norms_residuals_and_gates(count: int, columns: int, dtype: torch.dtype) -> None:
    check_norm_and_gate("cpu", count, columns, dtype)

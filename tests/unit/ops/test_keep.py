"""Moving rows to the front of the scratch, against gather and scatter, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from rounds import check_keep


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("nodes", "width"), [(2, 16), (9, 20), (24, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_only_accepted_rows_move(seed: int, nodes: int, width: int, dtype: torch.dtype) -> None:
    check_keep(seed, "cpu", nodes, width, dtype)

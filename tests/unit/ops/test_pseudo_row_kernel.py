"""A step of pseudo rows, appended to a pass by a kernel, against its matrix, in Triton's interpreter."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from doubles import target
from foreword.drafting.transfer import Transfer
from rounds import check_pseudo_rows


@pytest.mark.parametrize("options", [{}, {"squeeze": 2}, {"norm": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("rows", [0, 3])
def test_a_step_is_appended_to_the_rows_of_a_pass(rows: int, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    (matrix,) = Transfer(steps=1, layers=(1,), conditioned=False, **options).module(target(dtype=torch.float32))
    for weight in matrix.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    check_pseudo_rows("cpu", matrix, rows, 5, torch.float32)

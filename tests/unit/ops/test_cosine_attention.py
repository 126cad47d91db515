"""Cosine attention to a single key as a kernel, against torch, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from rounds import check_cosine_attention


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (9, 64), (3, 20)])
def test_a_state_attends_to_a_token(heads: int, width: int, dtype: torch.dtype, silu: bool) -> None:
    check_cosine_attention(heads, "cpu", heads, width, dtype, silu)

"""Tokens in flight through a looped model: kernels against their torch references, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from rounds import check_flights


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("repeats", [2, 5])
def test_what_a_round_runs_and_where_its_tokens_are_after_it(repeats: int, every: bool, gated: bool) -> None:
    for seed in range(6):
        check_flights(seed, "cpu", repeats, 24, torch.float32, every, gated)

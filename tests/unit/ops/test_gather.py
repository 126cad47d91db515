"""Rows brought to a drafter's own products, against the torch operations that they stand for, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from rounds import check_conditioned_on_next, check_level, check_remember, check_take


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("live", "count", "columns"), [(1, 1, 16), (1, 8, 72), (8, 8, 64), (3, 5, 20)])
def test_what_a_level_goes_on_from(live: int, count: int, columns: int, dtype: torch.dtype) -> None:
    check_level(count, "cpu", live, count, columns, dtype)


@pytest.mark.parametrize(("shape", "dtype"), [((), torch.long), ((20,), torch.float16), ((3, 700), torch.float32)], ids=str)
def test_what_slots_hold(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for seed in range(5):
        check_take(seed, "cpu", shape, dtype)


@pytest.mark.parametrize("pathed", [False, True])
@pytest.mark.parametrize("taps", [(), (1,), (0, 1, 2)])
def test_what_is_told_of_rows_that_were_committed(taps: tuple[int, ...], pathed: bool) -> None:
    for seed in range(4):
        check_conditioned_on_next(seed, "cpu", taps, pathed)


@pytest.mark.parametrize("columns", [16, 20])
def test_the_last_row_that_counts_is_remembered(columns: int) -> None:
    for seed in range(6):
        check_remember(seed, "cpu", columns, torch.float32)

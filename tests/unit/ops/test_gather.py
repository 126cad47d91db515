"""Kernels that gather a drafter's rows, against their torch references, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from rounds import check_at_slots, check_carried_and_embedded, check_conditioned_on_next, check_remember


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("live", "count", "columns"), [(1, 1, 16), (1, 8, 72), (8, 8, 64), (3, 5, 20)])
def test_the_rows_that_a_level_starts_from(live: int, count: int, columns: int, dtype: torch.dtype) -> None:
    check_carried_and_embedded(count, "cpu", live, count, columns, dtype)


@pytest.mark.parametrize(("shape", "dtype"), [((), torch.long), ((20,), torch.float16), ((3, 700), torch.float32)], ids=str)
def test_entries_of_slots(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for seed in range(5):
        check_at_slots(seed, "cpu", shape, dtype)


@pytest.mark.parametrize("pathed", [False, True])
@pytest.mark.parametrize("taps", [(), (1,), (0, 1, 2)])
def test_committed_rows_conditioned_on_the_next_token(taps: tuple[int, ...], pathed: bool) -> None:
    for seed in range(4):
        check_conditioned_on_next(seed, "cpu", taps, pathed)


@pytest.mark.parametrize("columns", [16, 20])
def test_the_last_accepted_row_is_remembered(columns: int) -> None:
    for seed in range(6):
        check_remember(seed, "cpu", columns, torch.float32)

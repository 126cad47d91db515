"""The tokens that a small model has not read yet, against the torch body in ops/unread.py, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from rounds import check_catch_up


@pytest.mark.parametrize("count", [1, 2, 7, 50])
@pytest.mark.parametrize("seed", range(6))
def test_from_the_first_row_that_is_not_cached(seed: int, count: int) -> None:
    check_catch_up(seed, "cpu", count)

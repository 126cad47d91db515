"""Where rows stand, by a kernel, against the stack's own operations, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from rounds import check_standing


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "scratch"), [(1, 1), (3, 3), (4, 9)])
def test_rows_stand_where_the_stack_says(count: int, scratch: int, shared: bool) -> None:
    for seed in range(4):
        check_standing(seed, "cpu", count, scratch, shared)

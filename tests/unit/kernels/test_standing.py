"""Where rows stand, by a kernel, against the stack's own operations, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from foreword.core.needs import Graft
from rounds import check_standing


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "scratch"), [(1, 1), (3, 3), (4, 9)])
def test_rows_stand_where_the_stack_says(count: int, scratch: int, shared: bool) -> None:
    for seed in range(4):
        check_standing(seed, "cpu", count, scratch, shared)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "scratch"), [(4, 4), (4, 9)])
def test_grafted_rows_stand_behind_their_anchors(count: int, scratch: int, shared: bool) -> None:
    """Some nodes carry several rows, of one graft and of both, and one carries none."""
    grafts = [
        Graft.of(1, (0, 3, 3), (1, 1, 2), lambda real, _: real),
        Graft.of(2, (3, 1, 0), (3, 1, 2), lambda real, _: real),
    ]
    for seed in range(4):
        check_standing(seed, "cpu", count, scratch, shared, grafts[: 1 + seed % 2])

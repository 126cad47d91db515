"""Where the rows of a pass stand, against the torch operations of model/stack.py, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from rounds import check_stand


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 7), (5, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_positions_places_and_angles(seed: int, first: int, count: int) -> None:
    check_stand(seed, "cpu", first, count)

"""The rows that the last accepted node of a round carried, kept by a kernel, against torch, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from rounds import check_carried_on


def test_the_rows_of_the_last_accepted_node_are_kept() -> None:
    for seed in range(12):
        check_carried_on(seed, "cpu", 1 + seed)

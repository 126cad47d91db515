"""What a round's last right node leaves, by a kernel, against the torch operations, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from rounds import check_carry


def test_the_last_right_node_leaves_its_rows() -> None:
    for seed in range(12):
        check_carry(seed, "cpu", 1 + seed)

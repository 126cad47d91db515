"""Token Recycling's walk and its lessons as kernels against the method's own torch operations, in Triton's interpreter."""

import pytest

pytest.importorskip("triton")

from rounds import check_learn, check_walk

MODES = ("shared", "session")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nodes", [1, 7, 64, 81])
@pytest.mark.parametrize("noisy", [False, True])
def test_the_likeliest_nodes_are_drafted(noisy: bool, nodes: int, mode: str) -> None:
    for seed in range(4):
        check_walk(seed, "cpu", nodes, mode, noisy)


@pytest.mark.parametrize("accepts", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nodes", [1, 12, 70])
def test_the_latest_row_wins(nodes: int, mode: str, accepts: bool) -> None:
    for seed in range(4):
        check_learn(seed, "cpu", nodes, mode, accepts)

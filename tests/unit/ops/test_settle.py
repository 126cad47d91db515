"""FIT, ACCEPT and COMMIT's columns: kernels against their torch references, in Triton's interpreter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from rounds import check_fit, check_settle

SIZES = st.sampled_from([1, 2, 5, 16, 33])
SEEDS = st.integers(0, 10**6)


@settings(max_examples=40)
@given(SEEDS, SIZES)
def test_a_draft_is_fitted(seed: int, nodes: int) -> None:
    check_fit(seed, "cpu", nodes)


@settings(max_examples=60)
@given(SEEDS, SIZES, st.integers(0, 3), st.booleans())
def test_a_round_is_settled(seed: int, nodes: int, ends: int, shared: bool) -> None:
    """Any tree, with end tokens, length limits, frozen slots and NaN."""
    check_settle(seed, "cpu", nodes, ends, shared)


def test_the_rounds_are_not_all_alike() -> None:
    """Every kind of outcome occurs among the random rounds."""
    seen = [check_settle(seed, "cpu", 16, 1, False)[1] for seed in range(40)]
    counts = {count for emission in seen for count in emission.count.tolist()}
    assert counts >= {0, 1, 2, 3}
    for name in ("ended", "broken"):
        assert {flag for emission in seen for flag in getattr(emission, name).tolist()} == {False, True}

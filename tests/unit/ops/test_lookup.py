"""The longest match and its continuation against the method's own torch operations, through Triton's interpreter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from rounds import check_lookup


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5), st.integers(1, 40))
def test_any_sequence(seed: int, nodes: int, match: int, longest: int) -> None:
    check_lookup(seed, "cpu", nodes, match, longest)


def test_sequences_longer_than_a_block() -> None:
    for seed in range(3):
        check_lookup(seed, "cpu", 9, 5, 2500)

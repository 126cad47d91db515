"""Chains attached to trees by the kernel, against torch, in Triton's interpreter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from rounds import check_with_chain


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 16), st.integers(0, 10**6))
def test_any_tree_and_chain(nodes: int, links: int, seed: int) -> None:
    check_with_chain(seed, "cpu", nodes, links)


def test_a_tree_that_all_sequences_share() -> None:
    check_with_chain(3, "cpu", 12, 5, shared=True)

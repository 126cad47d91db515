"""The share of an output that repeats itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.text import LOOP_GRAM, loop_share


def slow_loop_share(tokens: list[int], gram: int) -> float:
    """Token by token: does it lie in an n-gram that occurred earlier too?"""
    starts = range(len(tokens) - gram + 1)
    repeated = {
        place
        for start in starts
        if any(tokens[start : start + gram] == tokens[before : before + gram] for before in range(start))
        for place in range(start, start + gram)
    }
    return len(repeated) / len(tokens) if tokens else 0.0


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5))
def test_loop_share_equals_the_slow_count(tokens: list[int], gram: int) -> None:
    assert loop_share(tokens, gram) == pytest.approx(slow_loop_share(tokens, gram))


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0.0),
        (list(range(50)), 0.0),
        ([7] * LOOP_GRAM, 0.0),
        ([7] * (LOOP_GRAM + 1), LOOP_GRAM / (LOOP_GRAM + 1)),
        (list(range(8)) * 2, 0.5),
        (list(range(7)) + [99] + list(range(7)) + [98], 0.0),
    ],
    ids=str,
)
def test_loops_counted_by_hand(tokens: list[int], share: float) -> None:
    assert loop_share(tokens) == pytest.approx(share)

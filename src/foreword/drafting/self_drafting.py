"""What drafting with a part of the target is expected to bring: tokens and speed, by how often the part is right.

In: the agreement, which is the share of tokens at which the part's first candidate is the target's own; what one draft token
costs; what passes cost by their rows. A pass over one row, a round of plain decoding, costs 1. Out: the draft length that
pays off most, its speed-up, and the agreement from which on drafting pays off at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

VerifyCost = Callable[[int], float]
"""The cost of a pass by its rows."""

HALVINGS = 30  # of the interval in which the break-even agreement lies


class DraftLength(NamedTuple):
    """How many tokens to draft per round, and the speed-up over plain decoding that is expected of it."""

    tokens: int
    speedup: float


def expected_tokens(agreement: float, length: int) -> float:
    """Return the tokens that a round is expected to decide if `length` tokens are drafted: 1 + a + a^2 + .. + a^length. This
    takes the tokens to be right independently of each other."""
    return sum(agreement**token for token in range(length + 1))


def expected_speedup(agreement: float, length: int, draft_cost: float, verify_cost: VerifyCost) -> float:
    """Return the speed-up over plain decoding: tokens per round over the cost of a round."""
    return expected_tokens(agreement, length) / (length * draft_cost + verify_cost(length + 1))


def best_length(agreement: float, draft_cost: float, verify_cost: VerifyCost, most: int, least: int = 0) -> DraftLength:
    """Return the best draft length of `least` to `most` tokens. If it is 0, drafting does not pay off."""
    lengths = [DraftLength(n, expected_speedup(agreement, n, draft_cost, verify_cost)) for n in range(least, most + 1)]
    return max(lengths, key=lambda one: one.speedup)


def break_even(draft_cost: float, verify_cost: VerifyCost, most: int) -> float | None:
    """Return the agreement from which on drafts of up to `most` tokens are as fast as plain decoding; None if drafting is
    slower even where every draft token is right."""

    def pays(agreement: float) -> bool:
        return best_length(agreement, draft_cost, verify_cost, most, least=1).speedup >= 1

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high

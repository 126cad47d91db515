"""How much an output repeats itself, counted in tokens. Small models fall into loops, which flatter lookup methods and teach
a drafter nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

LOOP_GRAM = 8


def loop_share(tokens: Sequence[int], gram: int = LOOP_GRAM) -> float:
    """Return the share of tokens that lie in a `gram`-gram which occurred earlier in the output."""
    seen: set[tuple[int, ...]] = set()
    repeated = [False] * len(tokens)
    for end in range(gram, len(tokens) + 1):
        piece = tuple(tokens[end - gram : end])
        if piece in seen:
            repeated[end - gram : end] = [True] * gram
        seen.add(piece)
    return sum(repeated) / max(len(tokens), 1)

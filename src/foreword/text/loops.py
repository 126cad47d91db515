"""How much a text repeats itself, counted on its tokens: small models fall into loops, which flatter whoever looks things
up and teach a drafter nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

LOOP_GRAM = 8


def loop_share(tokens: Sequence[int], gram: int = LOOP_GRAM) -> float:
    """The share of tokens that lie in an 8-gram which the answer already had: how much it loops, which flatters lookup."""
    seen: set[tuple[int, ...]] = set()
    repeated = [False] * len(tokens)
    for end in range(gram, len(tokens) + 1):
        piece = tuple(tokens[end - gram : end])
        if piece in seen:
            repeated[end - gram : end] = [True] * gram
        seen.add(piece)
    return sum(repeated) / max(len(tokens), 1)

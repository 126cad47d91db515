"""DRAFT: nothing. Plain decoding is a drafter that proposes the root alone, so it runs the same code as every method.

It is the baseline of every speed-up and the reference that every other method is compared with.
"""

from __future__ import annotations

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.state import State


class Plain(Drafter):
    paper = "-"
    copies = True

    def __init__(self, rows: int | None = None) -> None:
        """`rows` is accepted and not used: a round has one row."""

    def propose(self, state: State) -> Draft:
        return Draft.nothing(state.root)

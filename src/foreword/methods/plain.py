"""DRAFT: nothing. Plain decoding is the drafter that proposes the root alone; it runs the same code as every method.

It is the baseline of every figure, and the truth that every other method is proved against.
"""

from __future__ import annotations

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.state import State


class Plain(Drafter):
    paper = "-"

    def __init__(self, rows: int | None = None) -> None:
        """`rows` is taken and not needed: a round has one row."""

    def propose(self, state: State) -> Draft:
        return Draft.nothing(state.root)

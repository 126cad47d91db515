"""VERIFY: Draft -> Scores. The target checks the whole tree in one pass, writing scratch rows only."""

from __future__ import annotations

from foreword.core.draft import Draft
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.state import State
from foreword.core.target import Target


def verify(target: Target, state: State, draft: Draft, needs: Needs) -> Scores:
    return target.score(state.lanes, draft, needs)

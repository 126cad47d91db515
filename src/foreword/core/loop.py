"""Loop: the order of events in a round. `engine/lockstep.py` is the one nearly every method uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from foreword.core.draft import Draft
from foreword.core.scores import Emission, Scores
from foreword.core.state import State


class Loop(Protocol):
    def begin(self, state: State) -> None:
        """Sequences enter."""

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        """A chunk of their prompt went by."""

    def round(self, state: State) -> Emission:
        """Decide at least one token for every sequence that is alive."""

    def end(self, slots: Sequence[int]) -> None:
        """Sequences leave."""


class InTurns(Loop, Protocol):
    """A loop whose drafts may be made on the host: its round is `propose`, `check`, `decided`."""

    def propose(self, state: State) -> Draft:
        """Candidates after the root."""

    def check(self, state: State, draft: Draft) -> Emission:
        """All that the target does with them."""

    def decided(self, state: State, emission: Emission) -> None:
        """The check is on its way."""

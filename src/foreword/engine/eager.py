"""What loops that record nothing have in common: how sequences enter and leave, and how prompts are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.scores import Scores
from foreword.core.state import State
from foreword.model.model import Model


class EagerLoop:
    """Implements `core.Loop`, all but `round`."""

    captured = False
    reads_after = False

    def __init__(self, target: Model, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.target.cache.copy(source, slot, rows)
        self.drafter.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.drafter.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.drafter.read(state, chunk, scores)

    def prompt_pass(self, state: State, chunk: Draft, read: Callable[[State, Draft], Scores | None]) -> Scores | None:
        return read(state, chunk)

    def has_pass(self, sequences: int, before: int, rows: int) -> bool:
        return True

    def recorded(self, sequences: int, length: int) -> None:
        return None

    def forget(self) -> None:
        pass

    def restart(self, slots: Sequence[int]) -> None:
        pass

    def end(self, slots: Sequence[int]) -> bool | None:
        return self.drafter.end(slots)

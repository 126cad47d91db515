"""The round: propose, verify, accept, commit, observe. All methods run in this order.

VERIFY happens here: the target scores all rows of the draft in one pass (`Model.score`), and accept.py compares the draft
with these scores. Everything after `propose` is the check. If a drafter works on the host, only the check is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.scores import Emission, Scores
from foreword.core.state import State
from foreword.engine.accept import accept
from foreword.engine.commit import commit
from foreword.engine.fit import fit
from foreword.model.model import Model


class Lockstep:
    """Implements `core.InTurns`, and records nothing."""

    captured = False
    reads_after = False

    def __init__(self, target: Model, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter

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

    def round(self, state: State) -> Emission:
        emission = self.check(state, self.propose(state))
        self.decided(state, emission)
        return emission

    def propose(self, state: State) -> Draft:
        return self.drafter.propose(state)  # DRAFT

    def check(self, state: State, draft: Draft) -> Emission:
        draft = fit(draft, state, self.drafter.needs)
        self.target.cache.check_room(draft.nodes + self.drafter.needs.grafted_rows)
        scores = self.target.score(state.batch, draft, self.drafter.needs)  # VERIFY
        accepted, emission = accept(state, draft, scores, self.drafter.shape.depth)  # ACCEPT
        commit(state, self.target.cache, draft, accepted, emission)
        self.drafter.observe(state, draft, scores, accepted)
        return emission

    def decided(self, state: State, emission: Emission) -> None:
        self.drafter.decided(state, emission)

    def end(self, slots: Sequence[int]) -> bool | None:
        return self.drafter.end(slots)

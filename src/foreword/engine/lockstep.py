"""The round, as it reads: propose, verify, accept, commit, observe. Every method but SPEED runs in this order."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.scores import Emission, Scores
from foreword.core.state import State
from foreword.engine.accept import accept
from foreword.engine.commit import commit
from foreword.engine.fit import fit
from foreword.engine.verify import verify
from foreword.model.model import Model


class Lockstep:
    """Satisfies `core.Loop`."""

    def __init__(self, target: Model, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter

    def begin(self, state: State) -> None:
        self.drafter.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.drafter.read(state, chunk, scores)

    def round(self, state: State) -> Emission:
        draft = fit(self.drafter.propose(state), state, self.drafter.needs)  # DRAFT
        scores = verify(self.target, state, draft, self.drafter.needs)  # VERIFY
        accepted, emission = accept(state, draft, scores, self.drafter.shape.depth)  # ACCEPT
        commit(state, self.target.cache, draft, accepted, emission)
        self.drafter.observe(state, draft, scores, accepted)
        return emission

    def end(self, slots: Sequence[int]) -> None:
        self.drafter.end(slots)

"""The round, as it reads: propose, verify, accept, commit, observe. Every method but SPEED runs in this order.

All behind `propose` is the check: where a drafter works on the host, that is what is captured.
"""

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
    """Satisfies `core.InTurns`."""

    def __init__(self, target: Model, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter

    def begin(self, state: State) -> None:
        self.drafter.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.drafter.read(state, chunk, scores)

    def round(self, state: State) -> Emission:
        emission = self.check(state, self.propose(state))
        self.decided(state, emission)
        return emission

    def propose(self, state: State) -> Draft:
        return self.drafter.propose(state)  # DRAFT

    def check(self, state: State, draft: Draft) -> Emission:
        draft = fit(draft, state, self.drafter.needs)
        scores = verify(self.target, state, draft, self.drafter.needs)  # VERIFY
        accepted, emission = accept(state, draft, scores, self.drafter.shape.depth)  # ACCEPT
        commit(state, self.target.cache, draft, accepted, emission)
        self.drafter.observe(state, draft, scores, accepted)
        return emission

    def decided(self, state: State, emission: Emission) -> None:
        self.drafter.decided(state, emission)

    def end(self, slots: Sequence[int]) -> None:
        self.drafter.end(slots)

"""The round: propose, fit, verify, accept, commit, observe. All methods that draft run in this order.

This file is where a draft is verified. It calls `Model.score`, which scores all rows of the draft in one pass (VERIFY), and
then `accept`, which compares the draft with these scores (ACCEPT). The check is everything from `fit` to `observe`. If a
drafter works on the host, only the check is recorded. Grammars work on the host too: between the draft and its check.
"""

from __future__ import annotations

from foreword.core.draft import Draft
from foreword.core.loop import Constrain
from foreword.core.scores import Emission
from foreword.core.state import State
from foreword.engine.accept import accept
from foreword.engine.commit import commit
from foreword.engine.eager import EagerLoop
from foreword.engine.fit import fit


class Lockstep(EagerLoop):
    """Implements `core.loop.InTurns`."""

    def round(self, state: State, constrain: Constrain | None = None) -> Emission:
        draft = self.propose(state)
        if constrain is not None:
            draft = constrain(state, draft)
        emission = self.check(state, draft)
        self.decided(state, emission)
        return emission

    def propose(self, state: State) -> Draft:
        return self.drafter.propose(state)  # DRAFT

    def check(self, state: State, draft: Draft) -> Emission:
        draft = fit(draft, state, self.drafter.needs, chains=self.target.slow != "")
        self.target.cache.check_room(draft.nodes + self.drafter.needs.grafted_rows)
        scores = self.target.score(state.batch, draft, self.drafter.needs)  # VERIFY
        accepted, emission = accept(state, draft, scores, self.drafter.shape.depth)  # ACCEPT
        commit(state, self.target.cache, draft, accepted, emission)
        self.drafter.observe(state, draft, scores, accepted)
        return emission

    def decided(self, state: State, emission: Emission) -> None:
        self.drafter.decided(state, emission)

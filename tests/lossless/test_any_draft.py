"""The law for any draft: trees, tokens and sizes that hypothesis makes up, some of them correct."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import (
    SAMPLINGS,
    VOCABULARY,
    Liar,
    Plan,
    Playback,
    Recorder,
    check_yield,
    engine,
    full_sequence,
    requests,
    target,
    truth,
    written,
)
from foreword.core.draft import Draft
from foreword.core.state import State

# Half of the rows are children of the row before them, so that trees are deep; more than half have the correct token.
NODES = st.tuples(st.just(-1) | st.integers(0, 999), st.none() | st.none() | st.integers(0, VOCABULARY - 1))
PLANS = st.builds(Plan, st.lists(NODES, max_size=8).map(tuple), st.integers(1, 9))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=40)
@given(plans=st.lists(PLANS, min_size=1, max_size=5), slots=st.integers(1, 3))
def test_any_draft_gives_the_truth(sampling: str, plans: list[Plan], slots: int) -> None:
    """And every correct draft token is accepted."""
    model, asked = target(), requests(3, SAMPLINGS[sampling], max_new_tokens=8)
    playback = Recorder(Playback(plans, [full_sequence(model.hf, request) for request in asked]))
    assert written(engine(playback, model, slots), asked) == [truth(model.hf, request) for request in asked]
    check_yield(playback, model.hf, asked)


def test_a_drafter_s_wrong_root_changes_nothing() -> None:
    class Careless(Liar):
        def propose(self, state: State) -> Draft:
            draft = super().propose(state)
            draft.tokens[:, 0] = (state.root + 1) % VOCABULARY
            return draft

    model, asked = target(), requests(3, max_new_tokens=8)
    assert written(engine(Careless(), model), asked) == [truth(model.hf, request) for request in asked]

"""A request's tokens do not depend on the other requests of the batch, on when it came, or on how the others end."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from doubles import (
    SAMPLINGS,
    Liar,
    Oracle,
    drafter,
    engine,
    full_sequence,
    in_turns,
    requests,
    run_to_end,
    target_for,
    truth,
)
from foreword.core.drafter import Drafter
from foreword.core.loop import Constrain
from foreword.core.sampling import Sampling
from foreword.core.scores import Emission
from foreword.core.state import State
from foreword.engine.request import Request
from foreword.methods import METHODS
from foreword.model.model import Model

Maker = Callable[[Model, list[Request]], Drafter]

DRAFTERS: dict[str, Maker] = {
    **{name: lambda model, asked, name=name: drafter(name, model) for name in METHODS},
    "liar": lambda model, asked: Liar(),
    "oracle": lambda model, asked: Oracle([full_sequence(model.hf, request) for request in asked]),
}
COMPANY: list[dict[str, Any]] = [
    {"sampling": Sampling(seed=1)},
    {"sampling": Sampling(temperature=1.3, top_p=0.7, seed=2)},
    {"sampling": Sampling(repetition_penalty=1.7, seed=3)},
    {"sampling": Sampling(temperature=0.9, seed=4), "min_new_tokens": 12},
    {"sampling": Sampling(seed=5), "speculate": False},
    {"sampling": Sampling(seed=6, logprobs=3)},
]

every_drafter = pytest.mark.parametrize("name", DRAFTERS)


@pytest.mark.parametrize(("name", "sampling"), in_turns(DRAFTERS, SAMPLINGS.values()))
def test_company_does_not_matter(name: str, sampling: Sampling) -> None:
    """Three requests with one sampling among one of every other, four at a time."""
    model, mine = target_for(name), requests(4, sampling, max_new_tokens=10)[1:]
    company = zip(requests(6, seed=9, max_new_tokens=12), COMPANY, strict=True)
    others = [replace(request, **options) for request, options in company]
    asked = [mine[0], *others[:3], mine[1], *others[3:], mine[2]]
    runs = engine(DRAFTERS[name](model, asked), model, slots=4).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]


@every_drafter
@pytest.mark.parametrize("late", [1, 4])
def test_when_it_came_does_not_matter(late: int, name: str) -> None:
    model = target_for(name)
    *others, mine = requests(4, SAMPLINGS["T=0.8"], max_new_tokens=10)
    steps = engine(DRAFTERS[name](model, [*others, mine]), model, slots=2)
    early = [steps.add(request) for request in others]
    for _ in range(late):
        steps.step()
    running = steps.add(mine)
    run_to_end(steps)
    assert running.tokens == truth(model.hf, mine)
    assert [run.tokens for run in early] == [truth(model.hf, request) for request in others]


@every_drafter
@pytest.mark.parametrize("after", [0, 2])
def test_aborted_company_does_not_matter(after: int, name: str) -> None:
    """One is aborted while it waits, reads its prompt or generates; the next takes its slot."""
    model = target_for(name)
    asked = requests(5, SAMPLINGS["T=0.8"], seed=3, max_new_tokens=8)
    steps = engine(DRAFTERS[name](model, asked), model, slots=2)
    first, gone, *rest = [steps.add(request) for request in asked]
    for _ in range(after):
        steps.step()
    steps.abort(gone)
    written_before = list(gone.tokens)
    run_to_end(steps)
    assert gone.finish_reason == "abort" and gone.tokens == written_before
    assert gone.tokens == truth(model.hf, asked[1])[: len(gone.tokens)]
    assert [run.tokens for run in (first, *rest)] == [truth(model.hf, request) for request in (asked[0], *asked[2:])]


@pytest.mark.parametrize(("name", "late"), in_turns(DRAFTERS, [False, True]))
def test_free_slots_that_pad_a_round_do_not_matter(name: str, late: bool) -> None:
    """Captured rounds come in a few sizes. Prompts of a second wave begin with what the padding slots still hold."""
    model = target_for(name)
    first = [replace(one, max_new_tokens=3 + 2 * i) for i, one in enumerate(requests(5, SAMPLINGS["T=0.8"]))]
    sequences = [(*request.prompt, *truth(model.hf, request)) for request in first]
    second = [Request((*text, 5, 6), Sampling(seed=i), 6, reuse=True) for i, text in enumerate(sequences)]
    steps = engine(DRAFTERS[name](model, [*first, *second]), model, slots=5, late=late)
    steps.slots.pads = True
    sizes, launch = [], steps.loop.round

    def watched(state: State, constrain: Constrain | None = None) -> Emission:
        if set(steps.slots.free) - set(state.batch.ids):
            sizes.append(len(state.batch.ids))
        return launch(state, constrain)

    steps.loop.round = watched  # type: ignore[method-assign]
    before, after = steps.generate(first), steps.generate(second)
    assert [run.tokens for run in (*before, *after)] == [truth(model.hf, request) for request in [*first, *second]]
    needs = steps.drafter.needs
    again = [run.accepted[-1] if needs.deferred else int(needs.follower) for run in before]  # rows that are read again
    assert [run.reused for run in after] == [len(text) - 1 - rows for text, rows in zip(sequences, again, strict=True)]
    assert 4 in sizes and set(sizes) <= {1, 2, 4}, "of rounds that leave a slot free"

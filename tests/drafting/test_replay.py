"""Replay: whatever happened before, the draft is what a fresh drafter would propose for the same text.

This alone catches a draft cache that is never rolled back, and an engine that hands a drafter the wrong rows. A drafter
that `learns` remembers other texts on purpose; of it the law asks that the same rounds give the same drafts.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from doubles import (
    POISON,
    SAMPLINGS,
    LastHidden,
    Liar,
    Recorder,
    Seen,
    drafter,
    drafts_of,
    engine,
    poisoned_model,
    requests,
    target,
    taught,
    truth,
)
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.methods import METHODS
from foreword.model.model import Model

FORGETFUL = [name for name, method in METHODS.items() if not method.load().learns]
LEARNING = [name for name, method in METHODS.items() if method.load().learns]
DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    **{name: lambda model, name=name: drafter(name, model) for name in FORGETFUL},
    "draft_model, a chain": lambda model: taught("draft_model", model, rows=6, tree="chain", stop=0.1),
    "a double that keeps the last hidden state": lambda model: LastHidden(),
}


def history(make: Callable[[Model], Drafter], sampling: Sampling) -> Recorder:
    """Two slots, eight requests: some enter late, one is given up, two go on from what a slot still holds."""
    model = target()
    recorder = Recorder(make(model))
    steps = engine(recorder, model, slots=2)
    asked = requests(6, sampling, max_new_tokens=7)
    gone, *_ = [steps.add(request) for request in asked[:3]]
    for _ in range(3):
        steps.step()
    steps.abort(gone)
    for request in asked[3:]:
        steps.add(request)
    while steps.busy:
        steps.step()
    text = (*asked[5].prompt, *truth(model.hf, asked[5]))
    for prompt in ((*text, 9, 8, 7), text):
        steps.generate([Request(prompt, sampling.derived(5), max_new_tokens=6, reuse=True)])
    return recorder


def first_draft(
    make: Callable[[Model], Drafter], text: list[int], sampling: Sampling, model: Model | None = None
) -> tuple[list[int], list[int]]:
    """Of a fresh drafter on a fresh engine that read the whole text as its prompt."""
    model = model or target()
    recorder = Recorder(make(model))
    steps = engine(recorder, model, slots=1)
    steps.add(Request(tuple(text), sampling, max_new_tokens=1))
    while not recorder.proposed:
        steps.step()
    return drafts_of(recorder.proposed[0])[0]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_the_draft_is_a_fresh_drafter_s(make: Callable[[Model], Drafter], sampling: Sampling) -> None:
    seeds = {request.prompt[0]: request.sampling for request in requests(6, sampling)}
    rounds = history(make, sampling).proposed
    assert sum(len(seen.slots) for seen in rounds) > 20
    for seen in rounds:
        for text, draft in zip(seen.texts, drafts_of(seen), strict=True):
            assert draft == first_draft(make, text, seeds[text[0]])


WAYS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "goes on": lambda text: (*text, 9, 30, 12, 5),
    "diverges in the prompt": lambda text: (*text[:3], 9, 30, 12, 5),
    "diverges where it goes on": lambda text: (*text[:-4], 9, 30, 12, 5),
    "is shorter": lambda text: text[:6],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_what_a_slot_still_holds_changes_no_draft(make: Callable[[Model], Drafter], way: str) -> None:
    """A second text that begins like the first, up to some token: its first drafts are a fresh drafter's."""
    model, asked = target(), requests(4, max_new_tokens=8, ignore_eos=True)[3]
    recorder = Recorder(make(model))
    steps = engine(recorder, model, slots=1)
    (first,) = steps.generate([asked])
    rounds = len(recorder.proposed)
    (second,) = steps.generate([replace(asked, prompt=WAYS[way]((*asked.prompt, *first.tokens)), reuse=True)])
    assert second.reused > 0
    for seen in recorder.proposed[rounds : rounds + 2]:
        assert drafts_of(seen)[0] == first_draft(make, seen.texts[0], asked.sampling)


SICK = Request((3, POISON, *range(10, 24)), SAMPLINGS["greedy"])
HEALTHY = Request((3, 9, 4), SAMPLINGS["greedy"], max_new_tokens=6, ignore_eos=True)


@pytest.mark.filterwarnings("ignore::foreword.errors.ForewordWarning")
@pytest.mark.parametrize("rounds", [0, 1, 9], ids=["its prompt is read", "one round", "to its end"])
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_nan_that_a_text_left_changes_no_draft_of_the_next(make: Callable[[Model], Drafter], rounds: int) -> None:
    """What a drafter keeps of its own, a cache for example, is NaN after a text that was. The next text in that slot is
    shorter, so that its rows do not write over all of it."""
    hf = poisoned_model()
    recorder = Recorder(make(Model(hf)))
    steps = engine(recorder, Model(hf), slots=1)
    sick = steps.add(SICK)
    while not (sick.done or (sick.ready and len(sick.accepted) >= rounds)):
        steps.step_for(())
    steps.abort(sick)
    before = len(recorder.proposed)
    (run,) = steps.generate([HEALTHY])
    assert run.tokens == truth(hf, HEALTHY) and POISON not in run.tokens
    drafted = recorder.proposed[before : before + 2]
    assert len(drafted) == 2
    for seen in drafted:
        assert drafts_of(seen)[0] == first_draft(make, seen.texts[0], HEALTHY.sampling, Model(hf))


def heard(recorder: Recorder) -> list[tuple[list[list[int]], list[tuple[list[int], list[int]]]]]:
    return [(seen.texts, drafts_of(seen)) for seen in recorder.proposed]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", LEARNING)
def test_the_same_rounds_give_the_same_drafts(name: str, sampling: Sampling) -> None:
    one, other = (history(lambda model: drafter(name, model), sampling) for _ in range(2))
    assert heard(one) == heard(other)
    assert any(len(tokens) > 1 for _, drafts in heard(one) for tokens, _ in drafts)


@pytest.mark.parametrize("name", LEARNING)
def test_a_learning_drafter_learns(name: str) -> None:
    """The second writing of the same text takes fewer rounds than the first: else it need not be called learning."""
    model = target()
    steps = engine(drafter(name, model), model, slots=1)
    asked = requests(3, max_new_tokens=20, ignore_eos=True)[2]
    (first,), (second,) = steps.generate([asked]), steps.generate([asked])
    assert len(second.accepted) < len(first.accepted)


def test_the_drafter_hears_of_every_arrival_and_departure() -> None:
    recorder = Recorder(Liar())
    steps = engine(recorder, slots=2)
    runs = [steps.add(replace(request, max_new_tokens=4, ignore_eos=True)) for request in requests(5)]
    while steps.busy:
        steps.step()
    assert sorted(slot for slots in recorder.began for slot in slots) == sorted(run.slot for run in runs)
    assert sorted(recorder.ended) == sorted(run.slot for run in runs)


def test_what_is_observed_is_what_was_proposed() -> None:
    """Of every round: the draft that was checked is the head of the one proposed, padded with the root, and the text grew
    by its path."""
    recorder = Recorder(Liar())
    engine(recorder, slots=3).generate(requests(5, SAMPLINGS["T=0.8"]))
    assert len(recorder.proposed) == len(recorder.observed)
    for before, after in zip(recorder.proposed, recorder.observed, strict=True):
        proposed = before.draft.tokens[:, : after.draft.nodes]
        assert after.draft.tokens.tolist() == proposed.where(after.draft.counts, proposed[:, :1]).tolist()
        _check_growth(before, after)


def _check_growth(before: Seen, after: Seen) -> None:
    accepted = after.accepted
    assert accepted is not None
    for index, (old, new) in enumerate(zip(before.texts, after.texts, strict=True)):
        path = accepted.path[index, : accepted.count[index]].tolist()
        drafted = [int(after.draft.tokens[index, row]) for row in path]
        assert new == [*old, *drafted[1:], int(accepted.next[index])]

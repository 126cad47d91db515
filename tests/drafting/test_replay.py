"""Replay: whatever happened before, the draft is that of a new drafter for the same sequence.

This alone catches a draft cache that is never rolled back, and an engine that passes a drafter the wrong rows. A drafter
that `learns` uses other sequences on purpose; it must give the same drafts for the same rounds.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from doubles import (
    DRAFTING,
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
    truth,
    with_random_weights,
)
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.request import Request
from foreword.methods import METHODS
from foreword.model.model import Model

STATELESS = [name for name in DRAFTING if not METHODS[name].load().learns]
LEARNING = [name for name in DRAFTING if METHODS[name].load().learns]
DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    **{name: lambda model, name=name: drafter(name, model) for name in STATELESS},
    "draft_model, a chain": lambda model: with_random_weights("draft_model", model, rows=6, tree="chain", stop=0.1),
    "a double that keeps the last hidden state": lambda model: LastHidden(),
}


def history(make: Callable[[Model], Drafter], sampling: Sampling) -> Recorder:
    """Run eight requests on two slots: some enter late, one is aborted, two continue from what a slot holds."""
    model = target()
    recorder = Recorder(make(model))
    steps = engine(recorder, model, slots=2)
    asked = requests(6, sampling, max_new_tokens=7)
    aborted, *_ = [steps.add(request) for request in asked[:3]]
    for _ in range(3):
        steps.step()
    steps.abort(aborted)
    for request in asked[3:]:
        steps.add(request)
    while steps.busy:
        steps.step()
    sequence = (*asked[5].prompt, *truth(model.hf, asked[5]))
    for prompt in ((*sequence, 9, 8, 7), sequence):
        steps.generate([Request(prompt, sampling.derived(5), max_new_tokens=6, reuse=True)])
    return recorder


def first_draft(
    make: Callable[[Model], Drafter], sequence: list[int], sampling: Sampling, model: Model | None = None
) -> tuple[list[int], list[int]]:
    """Return the first draft of a new drafter on a new engine that reads the whole sequence as its prompt."""
    model = model or target()
    recorder = Recorder(make(model))
    steps = engine(recorder, model, slots=1)
    steps.add(Request(tuple(sequence), sampling, max_new_tokens=1))
    while not recorder.proposed:
        steps.step()
    return drafts_of(recorder.proposed[0])[0]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_the_draft_is_that_of_a_new_drafter(make: Callable[[Model], Drafter], sampling: Sampling) -> None:
    seeds = {request.prompt[0]: request.sampling for request in requests(6, sampling)}
    rounds = history(make, sampling).proposed
    assert sum(len(seen.slots) for seen in rounds) > 20
    for seen in rounds[:: 4 if sampling.temperature else 5]:  # each takes a new engine
        for sequence, draft in zip(seen.sequences, drafts_of(seen), strict=True):
            assert draft == first_draft(make, sequence, seeds[sequence[0]])


NEXT_PROMPTS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "continues": lambda sequence: (*sequence, 9, 30, 12, 5),
    "diverges in the prompt": lambda sequence: (*sequence[:3], 9, 30, 12, 5),
    "diverges in the output": lambda sequence: (*sequence[:-4], 9, 30, 12, 5),
    "is shorter": lambda sequence: sequence[:6],
}


@pytest.mark.parametrize("prompt", NEXT_PROMPTS)
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_what_a_slot_holds_changes_no_draft(make: Callable[[Model], Drafter], prompt: str) -> None:
    """The second prompt shares a prefix with the first sequence: its first drafts are those of a new drafter."""
    model, asked = target(), requests(4, max_new_tokens=8, ignore_eos=True)[3]
    recorder = Recorder(make(model))
    steps = engine(recorder, model, slots=1)
    (first,) = steps.generate([asked])
    rounds = len(recorder.proposed)
    (second,) = steps.generate([replace(asked, prompt=NEXT_PROMPTS[prompt]((*asked.prompt, *first.tokens)), reuse=True)])
    assert second.reused > 0
    for seen in recorder.proposed[rounds : rounds + 2]:
        assert drafts_of(seen)[0] == first_draft(make, seen.sequences[0], asked.sampling)


@pytest.mark.parametrize("prompt", ["continues", "diverges in the output"])
@pytest.mark.parametrize("runs", [False, True], ids=["left", "runs"])
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_what_is_copied_changes_no_draft(make: Callable[[Model], Drafter], runs: bool, prompt: str) -> None:
    """The second sequence gets another slot, which holds the tokens of a third: its drafts are those of a new drafter."""
    model, asked = target(), requests(4, max_new_tokens=8, ignore_eos=True)[3]
    third = replace(asked, prompt=tuple(range(3, 30)), session="third")
    text = (*asked.prompt, *truth(model.hf, asked))
    recorder = Recorder(make(model))
    steps = engine(recorder, model, slots=2)
    steps.generate([third])
    source = steps.add(replace(asked, max_new_tokens=40 if runs else 8))
    while not source.done and (not runs or len(source.tokens) < 12):
        steps.step()
    rounds = len(recorder.proposed)
    second = steps.add(replace(asked, prompt=NEXT_PROMPTS[prompt](text), reuse=True, session="third", max_new_tokens=6))
    while not second.done:
        steps.step()
    assert second.slot != source.slot and (second.reused > 0) == steps.drafter.copies
    own = [(seen, seen.slots.index(second.slot)) for seen in recorder.proposed[rounds:] if second.slot in seen.slots]
    for seen, row in own[:2]:
        assert drafts_of(seen)[row] == first_draft(make, seen.sequences[row], asked.sampling)


SICK = Request((3, POISON, *range(10, 24)), SAMPLINGS["greedy"])
HEALTHY = Request(
    (3, 9, 5), SAMPLINGS["greedy"], max_new_tokens=6, ignore_eos=True
)  # no drafter here drafts POISON after it


@pytest.mark.filterwarnings("ignore::foreword.errors.ForewordWarning")
@pytest.mark.parametrize("rounds", [0, 1, 9], ids=["prompt only", "one round", "to its end"])
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_nan_of_an_earlier_request_changes_no_draft(make: Callable[[Model], Drafter], rounds: int) -> None:
    """What a drafter keeps, such as a cache, is NaN after a request with NaN. The next request in that slot is shorter, so
    its rows do not overwrite all of it."""
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
        assert drafts_of(seen)[0] == first_draft(make, seen.sequences[0], HEALTHY.sampling, Model(hf))


def sequences_and_drafts(recorder: Recorder) -> list[tuple[list[list[int]], list[tuple[list[int], list[int]]]]]:
    return [(seen.sequences, drafts_of(seen)) for seen in recorder.proposed]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", LEARNING)
def test_the_same_rounds_give_the_same_drafts(name: str, sampling: Sampling) -> None:
    one, other = (history(lambda model: drafter(name, model), sampling) for _ in range(2))
    assert sequences_and_drafts(one) == sequences_and_drafts(other)
    assert any(len(tokens) > 1 for _, drafts in sequences_and_drafts(one) for tokens, _ in drafts)


@pytest.mark.parametrize("name", LEARNING)
def test_a_learning_drafter_learns(name: str) -> None:
    """The same request is drafted differently the second time; otherwise `learns` would be wrong."""
    model = target()
    recorder = Recorder(drafter(name, model))
    steps = engine(recorder, model, slots=1)
    asked = requests(3, max_new_tokens=30, ignore_eos=True)[2]
    drafts = []
    for _ in range(2):
        recorder.proposed.clear()
        steps.generate([asked])
        drafts.append(sequences_and_drafts(recorder))
    assert drafts[0] != drafts[1]


def test_the_drafter_is_called_for_every_arrival_and_departure() -> None:
    recorder = Recorder(Liar())
    steps = engine(recorder, slots=2)
    runs = [steps.add(replace(request, max_new_tokens=4, ignore_eos=True)) for request in requests(5)]
    while steps.busy:
        steps.step()
    assert sorted(slot for slots in recorder.began for slot in slots) == sorted(run.slot for run in runs)
    assert sorted(recorder.ended) == sorted(run.slot for run in runs)


def test_what_is_observed_is_what_was_proposed() -> None:
    """In every round the checked draft is the first rows of the proposed one, padded with the root, and the sequence grows
    by the accepted path."""
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
    for index, (old, new) in enumerate(zip(before.sequences, after.sequences, strict=True)):
        path = accepted.path[index, : accepted.count[index]].tolist()
        drafted = [int(after.draft.tokens[index, row]) for row in path]
        assert new == [*old, *drafted[1:], int(accepted.next[index])]

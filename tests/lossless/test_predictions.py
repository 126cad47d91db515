"""A prediction changes no token, with any method. Where the output follows it, rounds are as long as they can be."""

from dataclasses import replace
from typing import Any

import pytest

from doubles import (
    SAMPLINGS,
    VOCABULARY,
    Recorder,
    drafter,
    drafts_of,
    engine,
    prompts,
    requests,
    rerunning,
    state_of,
    target,
    target_for,
    truth,
    with_random_weights,
)
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import SamplingStages, SlotOptions
from foreword.engine.request import EngineLimits, Request, Running
from foreword.errors import InputError
from foreword.methods import METHODS, make
from foreword.methods.prompt_lookup import PromptLookup
from foreword.model.model import Model

LOOKING_UP = [name for name, method in METHODS.items() if method.load().predicts]
ROWS = 6
WRONG = prompts(3, seed=9)[1]


def changed(output: list[int]) -> list[int]:
    """Return an output in which one token is another, one is left out and one is added."""
    return [*output[:3], (output[3] + 1) % VOCABULARY, *output[4:6], *output[7:10], 5, *output[10:]]


def asked_of(model: Model, sampling: Sampling) -> list[Request]:
    """Return requests whose predictions are the output itself, its first half, more than it, a changed one, a wrong one,
    none, its end, and the output after something else."""
    asked = requests(8, sampling, max_new_tokens=12, ignore_eos=True)
    outputs = [truth(model.hf, request) for request in asked]
    kinds = (
        outputs[0],
        outputs[1][:8],
        [*outputs[2], *WRONG],
        changed(outputs[3]),
        WRONG,
        (),
        outputs[6][5:],
        [*WRONG, *outputs[7]],
    )
    return [replace(request, prediction=tuple(kind)) for request, kind in zip(asked, kinds, strict=True)]


def looking_up(name: str, model: Model) -> Drafter:
    """Make a drafter whose chains have at most five draft tokens, whatever they cost."""
    if name == "prompt_lookup":
        return make(name, rows=ROWS)
    return with_random_weights(name, model, rows=24, heads=3, taps=(0, 2), chain=ROWS - 1)


def history(runs: list[Running]) -> list[Any]:
    return [(run.tokens, run.accepted, run.drafted, run.predicted) for run in runs]


@pytest.mark.parametrize("name", METHODS)
def test_a_prediction_changes_no_output(name: str) -> None:
    """Three at a time, greedy and sampled, with and without predictions; some start from what a slot holds."""
    model = target_for(name)
    greedy, sampled = (asked_of(model, sampling) for sampling in SAMPLINGS.values())
    asked = [replace(pair[place % 2], reuse=True) for place, pair in enumerate(zip(greedy, sampled, strict=True))]
    runs = engine(drafter(name, model), model).generate([*asked, asked[0], asked[3]])
    assert [run.tokens for run in runs] == [truth(model.hf, run.request) for run in runs]
    assert all(run.predicted <= sum(max(count - 1, 0) for count in run.accepted) for run in runs)
    assert any(run.predicted for run in runs) == (name in LOOKING_UP), "other methods draft nothing from it"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", LOOKING_UP)
def test_captured_rounds_serve_any_prediction(name: str, late: bool) -> None:
    """A round that was captured for one prediction is replayed for the next. It drafts and accepts what an eager one does,
    and requests without a prediction have captured rounds of their own."""
    model, asked = target(), asked_of(target(), SAMPLINGS["T=0.8"])
    eager = engine(drafter(name, model), model, late=late).generate([*asked, *asked])
    steps = engine(drafter(name, model), model, late=late)
    steps.loop = loop = rerunning(steps.loop, steps.drafter)
    steps.slots.pads = True
    captured = steps.generate([*asked, *asked])
    assert [run.tokens for run in captured] == [run.tokens for run in eager]
    assert history(captured) == history(eager)
    steps.generate([asked[5], asked[5]])
    assert {key[2].predictions for key, bucket in loop.buckets.items() if bucket.graph} == {0, 1024}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", LOOKING_UP)
def test_an_output_that_follows_its_prediction_takes_the_fewest_rounds(name: str, sampling: Sampling) -> None:
    """From the first round on, each accepts all five draft tokens: the draft is there before the first token."""
    model = target()
    asked = [replace(request, max_new_tokens=18) for request in asked_of(model, sampling)[:3]]
    asked = [replace(request, prediction=tuple(truth(model.hf, request))) for request in asked]
    for run in engine(looking_up(name, model), model).generate(asked):
        assert run.tokens == truth(model.hf, run.request)
        assert run.accepted == [ROWS] * 3 and run.predicted == 3 * (ROWS - 1)


def rounds_of(model: Model, request: Request, prediction: list[int]) -> int:
    (run,) = engine(looking_up("prompt_lookup", model), model).generate([replace(request, prediction=tuple(prediction))])
    return len(run.accepted)


def test_after_a_divergence_it_finds_its_way_back() -> None:
    """A changed token costs a round or two, and so does one that is left out or added."""
    model, (request,) = target(), requests(2, max_new_tokens=36, ignore_eos=True)[1:]
    output = truth(model.hf, request)
    assert rounds_of(model, request, output) == 6
    for prediction in ([*output[:9], 3, *output[10:]], [*output[:9], *output[10:]], [*output[:9], 3, *output[9:]]):
        assert rounds_of(model, request, prediction) <= 9
    assert rounds_of(model, request, []) > 20


def predicted_state(sequence: list[int], prompt: int, prediction: tuple[int, ...]) -> Any:
    state = state_of([sequence])
    options = SlotOptions(SAMPLINGS["greedy"], prompt=tuple(sequence[:prompt]), prediction=prediction)
    state.table.set_all({0: options}, state.slots)
    return state.at(state.batch)


@pytest.mark.parametrize(
    ("sequence", "prompt", "prediction", "chain"),
    [
        ([9, 8, 7], 3, (1, 2, 3), [1, 2, 3]),  # the prompt's end is where it begins
        ([9, 8, 7, 1, 2], 3, (1, 2, 3, 4), [3, 4]),  # it ends, and is not repeated
        ([9, 8, 7, 1, 2, 3], 3, (1, 2, 3), []),
        ([5, 6, 9, 5], 2, (4, 9, 5, 7), [7]),  # a longer match than in the sequence
        ([5, 6, 5], 2, (4, 5, 7), [7]),  # one as long
        ([1, 2, 3, 4, 9, 2, 3], 4, (8, 3, 9, 9), [4, 9, 2, 3, 4]),  # a shorter one
        ([9, 9, 1, 2, 3], 2, (3, 7, 3, 6, 3, 5), [6, 3, 5]),  # of its own, the closest
        ([9, 9, 1, 3], 2, (3, 7, 3, 6), [6]),  # of two as close, the later
        ([1, 2, 3, 9, 1], 4, (4, 5), [2, 3, 9, 1, 2]),  # the prompt itself is the sequence's
    ],
)
def test_what_is_drafted(sequence: list[int], prompt: int, prediction: tuple[int, ...], chain: list[int]) -> None:
    made = PromptLookup(rows=ROWS)
    made.prepare(target(), 1)
    draft = made.propose(predicted_state(sequence, prompt, prediction))
    assert draft.tokens[0, 1 : int(draft.size)].tolist() == chain


def test_a_slot_s_earlier_prediction_is_forgotten() -> None:
    """A request without a prediction, next to one with: its drafts are those of a new drafter without any."""
    model, asked = target(), asked_of(target(), SAMPLINGS["greedy"])
    recorder = Recorder(make("prompt_lookup", rows=ROWS))
    steps = engine(recorder, model, slots=2)
    steps.generate(asked[:2])
    first = len(recorder.proposed)
    plain = replace(asked[1], prediction=())
    runs = steps.generate([asked[0], plain])
    alone = Recorder(make("prompt_lookup", rows=ROWS))
    engine(alone, model, slots=1).generate([plain])
    expected = {tuple(seen.sequences[0]): drafts_of(seen)[0] for seen in alone.proposed}
    seen = 0
    for one in recorder.proposed[first:]:
        for sequence, slot, draft in zip(one.sequences, one.slots, drafts_of(one), strict=True):
            if slot == runs[1].slot:
                assert draft == expected[tuple(sequence)]
                seen += 1
    assert seen == len(runs[1].accepted) and runs[1].predicted == 0 < runs[0].predicted


def test_without_predictions_nothing_is_made_for_them() -> None:
    """No column and no stage: the first request with a prediction brings them, and its rounds alone have them."""
    model, asked = target(), asked_of(target(), SAMPLINGS["greedy"])
    steps = engine(make("prompt_lookup"), model)
    steps.generate([asked[5]])
    assert "predicted" not in steps.state.table.columns
    steps.generate([replace(asked[0], speculate=False)])
    assert "predicted" not in steps.state.table.columns, "a request without drafts needs none"
    steps.generate(asked[:1])
    places = [steps.state.table.columns[name].data_ptr() for name in ("predicted", "predicted_span")]
    steps.generate(asked)
    assert places == [steps.state.table.columns[name].data_ptr() for name in ("predicted", "predicted_span")]
    (run,) = [steps.add(asked[5])]
    steps.step()
    assert steps.state.table.kind((run.slot,)) == SamplingStages()


def test_a_prediction_that_reaches_past_the_context() -> None:
    """The tokens that fit are drafted."""
    model, (request,) = target(), requests(2, max_new_tokens=64, ignore_eos=True)[1:]
    output = truth(model.hf, request)
    asked = replace(request, prediction=(*output, *WRONG, *WRONG))
    (run,) = engine(looking_up("prompt_lookup", model), model).generate([asked])
    assert run.tokens == output and run.stop_reason == "context" and len(run.accepted) == -(-len(output) // ROWS)


def test_tokens_after_the_end_of_the_output_are_not_counted() -> None:
    """A stop token ends the output in the middle of an accepted chain."""
    model, (request,) = target(), requests(2, max_new_tokens=12, ignore_eos=True)[1:]
    output = truth(model.hf, request)
    stop = next(place for place in (3, 4, 2) if output[place] not in output[:place])
    asked = replace(request, prediction=tuple(output), stop_token_ids=(output[stop],))
    (run,) = engine(looking_up("prompt_lookup", model), model).generate([asked])
    assert run.tokens == output[: stop + 1] and run.predicted == stop + 1


def test_a_prediction_that_cannot_be_served_is_refused() -> None:
    limits = EngineLimits(context=8, trained=8, vocabulary=10)
    limits.check(Request((1,), prediction=(9,) * 8))
    with pytest.raises(InputError, match="prediction has 9 tokens, the context holds 8"):
        limits.check(Request((1,), prediction=(9,) * 9))
    with pytest.raises(InputError, match="prediction holds 10, which is outside the model's vocabulary"):
        limits.check(Request((1,), prediction=(10,)))

"""A target that answers NaN is an error, under every sampling; other requests of the batch are not affected."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from doubles import (
    CONTEXT,
    IN_PROCESS,
    POISON,
    Liar,
    Plan,
    Playback,
    engine,
    fresh,
    full_sequence,
    poisoned_model,
    requests,
    run_to_end,
    target,
    tiny,
    tokenizer,
    truth,
    with_random_weights,
    written,
)
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.errors import ForewordWarning, NumericsError
from foreword.methods import METHODS, make
from foreword.model.model import Model
from foreword.text import TextStream

WAYS = {
    "greedy": Sampling(seed=1),
    "sampled": Sampling(temperature=0.8, seed=1),
    "top_k": Sampling(temperature=0.8, top_k=3, seed=1),
    "top_p": Sampling(temperature=0.8, top_p=0.9, seed=1),
    "min_p": Sampling(temperature=0.8, min_p=0.1, seed=1),
    "penalty": Sampling(repetition_penalty=1.3, seed=1),
}
WEIGHTS = {
    "a layer": "model.layers.2.mlp.down_proj.weight",
    "one row of the head": "lm_head.weight",
}


def broken(weight: str) -> PreTrainedModel:
    hf = fresh("qwen3")
    with torch.no_grad():
        hf.get_parameter(weight)[7] = math.nan
    return hf


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_nan_is_an_error(weight: str, way: str) -> None:
    asked = requests(3, WAYS[way])
    for drafter in (make("plain"), Liar()):
        with pytest.raises(NumericsError, match="NaN"):
            engine(drafter, Model(broken(WEIGHTS[weight]))).generate(asked)


SICK = Request((3, POISON, *range(10, 20)), Sampling(seed=1), 9)
HEALTHY = Request((3, 9, 4), Sampling(seed=1), 9)


def test_other_requests_of_the_batch_are_not_affected() -> None:
    """The request with the token is aborted; the other one continues correctly, and so does the next in that slot."""
    hf = poisoned_model()
    assert POISON not in truth(hf, HEALTHY)
    steps = engine(make("plain"), Model(hf), slots=2)
    bad, good = steps.add(SICK), steps.add(HEALTHY)
    run_to_end(steps)
    assert bad.finish_reason == "abort" and bad.tokens == [] and isinstance(bad.error, NumericsError)
    after = [steps.add(HEALTHY) for _ in range(2)]
    run_to_end(steps)
    assert [run.tokens for run in (good, *after)] == [truth(hf, HEALTHY)] * 3


@pytest.mark.parametrize("late", [False, True])
def test_nor_are_they_if_several_rounds_are_read_at_once(late: bool) -> None:
    hf = poisoned_model()
    steps = engine(make("plain"), Model(hf), slots=2, late=late)
    bad, *good = (steps.add(request) for request in (SICK, HEALTHY, HEALTHY, HEALTHY))
    while steps.busy:
        steps.step_for((), 4)
    assert bad.finish_reason == "abort" and bad.tokens == [] and isinstance(bad.error, NumericsError)
    assert [run.tokens for run in good] == [truth(hf, HEALTHY)] * 3


@pytest.mark.parametrize("after", [1, 2])
def test_a_slot_left_with_nan_serves_the_next(after: int) -> None:
    """The request is aborted while its prompt is read: no round has seen the NaN in its rows."""
    hf = poisoned_model()
    steps = engine(make("plain"), Model(hf), slots=1)
    bad = steps.add(SICK)
    for _ in range(after):
        steps.step()
    steps.abort(bad)
    (run,) = steps.generate([HEALTHY])
    assert run.tokens == truth(hf, HEALTHY)


def proposing(token: int) -> Playback:
    """Drafts the correct tokens and, on another branch, one token; both are in the pass."""
    return Playback([Plan(((0, None), (1, None), (0, token)), 4)], [full_sequence(tiny("qwen3"), HEALTHY)])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "penalty"])  # with it the true text has the token
@pytest.mark.parametrize("late", [False, True])
def test_a_nan_in_a_draft_does_not_reach_the_output(late: bool, way: str) -> None:
    """The draft token is wrong and never accepted. Its NaN reaches the other rows, so the request continues without
    drafts."""
    hf, asked = poisoned_model(), replace(HEALTHY, sampling=replace(WAYS[way], seed=3))
    steps = Engine(Model(hf), proposing(POISON), slots=2, max_context=CONTEXT, chunk=5, late=late)
    sick, alone = steps.add(asked), steps.add(replace(asked, speculate=False))
    with pytest.warns(ForewordWarning, match="NaN to a draft.*without speculation"):
        run_to_end(steps)
    assert sick.tokens == alone.tokens == truth(hf, asked)
    assert sick.accepted[0] == 0 and sum(sick.accepted) == len(sick.tokens)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.trained])
def test_a_drafter_of_nan_does_not_reach_the_output(name: str) -> None:
    """Some drafters write rows next to the sequence in the target's own cache: no request may fail because of them."""
    model, asked = target("qwen3"), requests(4, max_new_tokens=8)
    drafter = with_random_weights(name, model, **IN_PROCESS.get(name, {}))
    for weight in drafter.module.parameters():
        weight.data.fill_(math.nan)
    assert written(engine(drafter, model), asked) == [truth(model.hf, request) for request in asked]


@pytest.mark.filterwarnings("ignore::foreword.errors.ForewordWarning")
def test_nan_in_a_drafter_s_buffers_does_not_reach_the_next_request() -> None:
    """The next prompt has a single token, so that no row is read which would overwrite them."""
    hf, after = poisoned_model(), replace(HEALTHY, prompt=(9,))
    model = Model(hf)
    steps = engine(with_random_weights("firp", model), model, slots=1)
    with pytest.raises(NumericsError):
        steps.generate([SICK])
    (run,) = steps.generate([after])
    assert run.tokens == truth(hf, after)


def test_nan_of_a_round_in_progress_does_not_abort_the_request() -> None:
    """It was launched before the scratch rows were wiped, so it answers NaN although it drafts nothing."""
    hf, bad, nothing = poisoned_model(), Plan(((0, None), (1, None), (0, POISON)), 4), Plan((), 1)
    steps = engine(Playback([bad, nothing, nothing], [full_sequence(tiny("qwen3"), HEALTHY)]), Model(hf), slots=1, late=True)
    with pytest.warns(ForewordWarning):
        (run,) = steps.generate([HEALTHY])
    assert run.tokens == truth(hf, HEALTHY)


@pytest.mark.parametrize(("late", "rounds"), [(True, 1), (False, 4), (True, 2), (True, 4)])
def test_a_round_after_the_end_leaves_nothing_to_the_next_request(late: bool, rounds: int) -> None:
    """A stop string is found while the next round runs, or has run already, and that round has a NaN in its draft."""
    hf = poisoned_model()
    text = tokenizer().decode(truth(hf, HEALTHY)[:3])
    stops = replace(HEALTHY, stream=TextStream(tokenizer(), (text[-2:],)))
    drafter = Playback([Plan((), 1), Plan((), 1), Plan((), 1), Plan(((0, POISON),), 2)], [[]])
    steps = engine(drafter, Model(hf), slots=1, late=late)
    first = steps.add(stops)
    while steps.busy:
        steps.step_for((), rounds)
    assert first.finish_reason == "stop" and drafter.played >= 4
    (second,) = steps.generate([replace(HEALTHY, speculate=False)])
    assert second.tokens == truth(hf, HEALTHY)


def test_a_slot_where_a_draft_was_nan_drafts_again() -> None:
    """Only that request runs without drafts."""
    hf = poisoned_model()
    drafter = proposing(POISON)
    steps = engine(drafter, Model(hf), slots=1)
    with pytest.warns(ForewordWarning):
        steps.generate([HEALTHY])
    drafter.plans = [Plan(((0, None), (1, None), (0, 9)), 4)]
    (run,) = steps.generate([HEALTHY])
    assert run.tokens == truth(hf, HEALTHY) and sum(run.drafted) > 0


def test_nan_in_a_prompt_teaches_nothing() -> None:
    """In a table that all requests share: a later one must not draft from a NaN."""
    hf = poisoned_model()
    steps = engine(make("token_recycling", rows=4), Model(hf), slots=1)
    with pytest.raises(NumericsError):
        steps.generate([replace(SICK, prompt=(3, POISON, *HEALTHY.prompt))])
    (run,) = steps.generate([HEALTHY])
    assert run.tokens == truth(hf, HEALTHY)


def test_a_nan_is_not_raised_for_callers_of_other_requests() -> None:
    hf = poisoned_model()
    steps = engine(make("plain"), Model(hf), slots=2)
    bad = steps.add(SICK)
    (good,) = steps.generate([HEALTHY])
    assert good.tokens == truth(hf, HEALTHY)
    assert isinstance(bad.error, NumericsError) and bad.finish_reason == "abort"

"""A round that is read while the next one runs: the same output, whichever requests enter, end, stop or are aborted."""

from dataclasses import replace

import pytest

from doubles import SAMPLINGS, Oracle, drafter, engine, full_sequence, requests, run_to_end, target, target_for, truth
from foreword.core.drafter import Drafter
from foreword.core.sampling import Sampling
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.methods import METHODS, make
from foreword.model.model import Model


def late(drafter: Drafter, model: Model, slots: int = 2) -> Engine:
    return engine(drafter, model, slots, late=True)


def knowing(model: Model, asked: list[Request]) -> Drafter:
    return Oracle([full_sequence(model.hf, request) for request in asked], lies=3)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("method", [*METHODS, "oracle"])
def test_the_outputs_are_the_truth(method: str, sampling: Sampling) -> None:
    model, asked = target_for(method), requests(7, sampling)
    chosen = knowing(model, asked) if method == "oracle" else drafter(method, model)
    runs = late(chosen, model).generate(asked)
    assert [run.tokens for run in runs] == [truth(model.hf, request) for request in asked]
    assert all(sum(run.accepted) == len(run.tokens) for run in runs)


def test_a_step_returns_what_the_round_before_decided() -> None:
    model, (asked,) = target(), requests(1, max_new_tokens=4, ignore_eos=True)
    steps = late(make("plain"), model)
    run = steps.add(asked)
    brought = []
    while steps.busy:
        brought.append([event.tokens for event in steps.step()])
    expected = truth(model.hf, asked)
    assert brought == [[], *([[token]] for token in expected)]
    assert run.decode_s > 0


def test_an_aborted_request_does_not_affect_the_next() -> None:
    """The round in progress is dropped, and the slot's next output is correct from its first token."""
    model, asked = target(), requests(4, max_new_tokens=12, ignore_eos=True)
    steps = late(knowing(model, asked), model, slots=1)
    runs = [steps.add(request) for request in asked]
    for _ in range(3):
        steps.step()
    written = len(runs[0].tokens)
    steps.abort(runs[0])
    run_to_end(steps)
    assert 0 < len(runs[0].tokens) == written
    assert [run.tokens for run in runs[1:]] == [truth(model.hf, request) for request in asked[1:]]


def test_a_prompt_starts_from_a_slot_that_continued_too_long() -> None:
    """The host stops a sequence late, so its slot has continued; a later turn starts from the output, not from that."""
    model, (asked,) = target(), requests(1, seed=5, max_new_tokens=12, ignore_eos=True)
    steps = late(make("plain"), model, slots=1)
    first = steps.add(asked)
    for _ in range(5):
        steps.step()
    steps.abort(first)
    sequence = (*asked.prompt, *first.tokens)
    turn = replace(asked, prompt=(*sequence, 9, 30), reuse=True)
    (second,) = steps.generate([turn])
    assert second.reused == len(sequence) - 1
    assert second.tokens == truth(model.hf, turn)
